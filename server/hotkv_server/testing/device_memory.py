"""Simulates device memory for tests: allocations and events that two processes share, and the
address ranges that streams may copy."""

import bisect
import ctypes
import itertools
import mmap
import os
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_server.device.runtime import HOST, DeviceError, Extent

# -------------------------------------------------------------------------------- Between processes
# An allocation is a memfd. Its handle has 64 bytes, as in CUDA; a process with the handle maps the
# memfd through /proc/<pid>/fd. So a test can see whether a process still maps the memory of a dead
# engine: as `memfd:hotkv-device` in /proc/<pid>/maps. An event is a memfd with two counters: how
# many times it was recorded, and the last record that the device has passed.

MEMORY_NAME, EVENT_NAME = "hotkv-device", "hotkv-device-event"
EVENT_BYTES = 16
_FORMAT = struct.Struct("<8sIiQQi24xI")
_MAGIC = {MEMORY_NAME: b"hkv-mem\0", EVENT_NAME: b"hkv-evt\0"}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NO_RESERVE, _PROT_NONE, _FAILED = 0x4000, 0, ctypes.c_void_p(-1).value
PAGE_BYTES = mmap.PAGESIZE


def uuid_of(device: int) -> bytes:
    """Returns the UUID (16 bytes) of the simulated device with this number."""
    return b"hotkv-fake-gpu" + device.to_bytes(2, "big")


def map_pages(num_bytes: int, fd: int = -1) -> int:
    """Maps a file into memory; without a file, maps memory filled with zeros. Returns the address.
    Raises DeviceError if the system refuses.

    fd: descriptor of the file; -1: no file.
    """
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return _map(num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd)


def reserve_pages(num_bytes: int) -> int:
    """Reserves a range of addresses that is used nowhere else and that the host can't access.
    Returns its start."""
    return _map(num_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, -1)


def _map(num_bytes: int, protection: int, flags: int, fd: int) -> int:
    address: int | None = _libc.mmap(None, num_bytes, protection, flags, fd, 0)
    if address in (None, _FAILED):
        raise DeviceError(
            f"fake device: out of memory: mmap of {num_bytes} bytes: "
            f"{os.strerror(ctypes.get_errno())}"
        )
    assert address is not None
    return address


def unmap_pages(address: int, num_bytes: int) -> None:
    """Unmaps an address range that was mapped or reserved."""
    _libc.munmap(address, num_bytes)


def bytes_at(address: int, num_bytes: int) -> NDArray[np.uint8]:
    """Returns a view of this process's memory at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


@dataclass(frozen=True, slots=True)
class FakeHandle:
    """The content of a handle (64 bytes), by which another process opens an allocation or an event.

    kind: name of the memfd, which distinguishes allocations from events.
    pid, fd: process that owns the memfd, and its descriptor there.
    inode: inode of the memfd, to detect that the descriptor was closed and reused.
    """

    kind: str
    pid: int
    fd: int
    inode: int
    num_bytes: int
    device: int

    def pack(self) -> bytes:
        raw = _FORMAT.pack(
            _MAGIC[self.kind], self.pid, self.fd, self.inode, self.num_bytes, self.device, 0
        )
        return raw[:-4] + zlib.crc32(raw[:-4]).to_bytes(4, "little")

    @staticmethod
    def parse(raw: bytes, kind: str) -> "FakeHandle":
        """Parses the bytes of a handle. Raises DeviceError unless they are a valid handle of this
        kind (of device memory or of an event)."""
        if (
            len(raw) != _FORMAT.size
            or zlib.crc32(raw[:-4]) != int.from_bytes(raw[-4:], "little")
            or raw[:8] != _MAGIC[kind]
        ):
            raise DeviceError(f"fake device: invalid resource handle: no {kind} handle")
        _, pid, fd, inode, num_bytes, device, _ = _FORMAT.unpack(raw)
        return FakeHandle(kind, pid, fd, inode, num_bytes, device)

    def map(self) -> int:
        """Maps the handle's memory into this process and returns the address. Raises DeviceError if
        the owning process has freed the memory or died."""
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError(f"fake device: invalid resource handle: {error}") from error
        try:
            found = os.fstat(fd)
            if (found.st_ino, found.st_size) != (self.inode, self.num_bytes):
                raise DeviceError("fake device: invalid resource handle: it was freed")
            return map_pages(self.num_bytes, fd)
        finally:
            os.close(fd)


class _Shared:
    """A memfd that this process has made and mapped."""

    def __init__(self, kind: str, num_bytes: int, device: int) -> None:
        self._fd = os.memfd_create(kind)
        os.ftruncate(self._fd, num_bytes)
        self.num_bytes = num_bytes
        self.address = map_pages(num_bytes, self._fd)
        self.handle = FakeHandle(
            kind, os.getpid(), self._fd, os.fstat(self._fd).st_ino, num_bytes, device
        ).pack()

    def close(self) -> None:
        """Unmaps and closes the memfd. Other processes that have mapped it can still read its
        bytes."""
        if self._fd >= 0:
            unmap_pages(self.address, self.num_bytes)
            os.close(self._fd)
            self._fd = -1


class FakeAllocation:
    """Simulates an allocation in the device memory of an engine, which the server can open.

    handle, device_uuid: the engine sends both to the server, which opens the memory by them.
    """

    def __init__(self, num_bytes: int, device: int = 0) -> None:
        self.num_bytes, self.device, self.device_uuid = num_bytes, device, uuid_of(device)
        self._memory = _Shared(MEMORY_NAME, num_bytes, device)
        self.handle = self._memory.handle

    def __repr__(self) -> str:
        return f"FakeAllocation({self.num_bytes} bytes, device {self.device})"

    def array(self) -> NDArray[np.uint8]:
        """Returns the allocation's bytes, as the engine's kernels see them. Don't use the array
        after `close`."""
        return bytes_at(self._memory.address, self.num_bytes)

    def words(self) -> NDArray[np.uint32]:
        """Returns the allocation's bytes as uint32 words, which serve as flags for marks (points in
        the queue of the engine's device)."""
        return self.array()[: self.num_bytes // 4 * 4].view(np.uint32)

    def close(self) -> None:
        self._memory.close()


class FakeIpcEvent:
    """Simulates an interprocess CUDA event of an engine. The test calls `reach` to make the device
    pass the event."""

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self._memory = _Shared(EVENT_NAME, EVENT_BYTES, device)
        self._counters = bytes_at(self._memory.address, EVENT_BYTES).view(np.uint64)
        self.handle = self._memory.handle

    def record(self) -> None:
        """Records the event, as if at the end of the queue of the engine's device."""
        self._counters[0] += np.uint64(1)

    def reach(self) -> None:
        """Marks the event's last record as passed, as if the engine's device had reached it."""
        self._counters[1] = self._counters[0]

    def close(self) -> None:
        self._memory.close()


# -------------------------------------------------------------------------------- What streams know
# The address ranges that streams may copy, and the places in this process where their bytes are.
#
# Always true: the addresses of device memory have no pages, so the host can't access it. A range is
# invalid if it leaves its allocation, crosses registrations, was freed or closed, or belongs to
# another device. A call with an invalid range raises as CUDA's call would; a kernel that accesses
# an invalid range loses the device. Freed addresses stay reserved. The caller holds the runtime's
# lock.


@dataclass(slots=True, eq=False)
class KnownMemory:
    """A piece of memory from and to which simulated streams may copy.

    start, end: the memory's range of addresses.
    shadow: address in this process at which the bytes of the memory are. For device memory this is
        not `start`: the addresses from `start` on have no pages, so that the host can't access
        them.
    device: number of the memory's device; HOST for registered host memory.
    """

    start: int
    end: int
    shadow: int
    device: int
    mapped_bytes: int = 0
    handle: bytes = b""
    num_opened: int = 0

    @property
    def kind(self) -> str:
        """Returns how the memory was made: allocated, opened, pinned or registered."""
        if self.device != HOST:
            return "opened" if self.handle else "allocated"
        return "pinned" if self.mapped_bytes else "registered"


class Ranges:
    """All pieces of memory from and to which simulated streams may copy. `version` increases with
    every change."""

    def __init__(self) -> None:
        self.version = 0
        self._memories: list[KnownMemory] = []
        self._graves: list[tuple[int, int]] = []

    def __repr__(self) -> str:
        return f"Ranges({len(self._memories)} memories, {len(self._graves)} given back)"

    def held(self) -> dict[str, int]:
        """Returns how many pieces of memory are not freed, by kind (`KnownMemory.kind`)."""
        kinds = [memory.kind for memory in self._memories]
        return {
            kind: kinds.count(kind)
            for kind in ("allocated", "pinned", "registered", "opened")
            if kind in kinds
        }

    # Allocating and freeing

    def allocate(self, device: int, num_bytes: int) -> int:
        """Allocates device memory and returns its address."""
        return self._keep_device(device, num_bytes, map_pages(num_bytes), b"")

    def allocate_pinned(self, num_bytes: int) -> int:
        """Allocates registered host memory and returns its address."""
        start = map_pages(num_bytes)
        return self._keep(
            KnownMemory(start, start + num_bytes, start, HOST, mapped_bytes=num_bytes)
        )

    def register(self, address: int, num_bytes: int) -> None:
        """Registers (page-locks) host memory. Raises DeviceError if the memory does not consist of
        whole pages, or if a part of it is already registered."""
        if address % PAGE_BYTES or num_bytes % PAGE_BYTES or num_bytes <= 0:
            raise DeviceError(
                f"fake device: register: invalid argument: {address:#x} and {num_bytes} bytes are "
                "no whole pages"
            )
        if self._overlapping(address, address + num_bytes):
            raise DeviceError(
                "fake device: register: part or all of the requested memory range is already mapped"
            )
        self._keep(KnownMemory(address, address + num_bytes, address, HOST))

    def open(self, device: int, handle: bytes) -> int:
        """Opens an allocation of another process and returns its address. If it is open already,
        returns the same address."""
        for memory in self._memories:
            if memory.handle == handle and memory.device == device:
                memory.num_opened += 1
                return memory.start
        parsed = FakeHandle.parse(handle, MEMORY_NAME)
        if parsed.device != device:
            raise DeviceError(
                f"fake device {device}: open_memory: invalid device context: the memory is of "
                f"device {parsed.device}"
            )
        return self._keep_device(device, parsed.num_bytes, parsed.map(), handle)

    def close(self, device: int, address: int) -> None:
        """Closes an allocation of another process. The memory is unmapped once it was closed as
        many times as it was opened."""
        memory = self.find("close_memory", address, device, "opened")
        memory.num_opened -= 1
        if not memory.num_opened:
            self.drop(memory)

    def find(self, method: str, address: int, device: int, kind: str) -> KnownMemory:
        """Returns the memory of this kind that begins at `address`. Raises DeviceError if there is
        no such memory.

        method: name of the runtime's call, for the error message.
        kind: how the memory was made (`KnownMemory.kind`).
        """
        for memory in self._memories:
            if (memory.start, memory.device, memory.kind) == (address, device, kind):
                return memory
        raise DeviceError(
            f"fake device: {method}: invalid argument: nothing of the kind at {address:#x}"
        )

    def drop(self, memory: KnownMemory) -> None:
        """Frees, closes or unregisters a piece of memory, according to how it was made."""
        self.version += 1
        self._memories.remove(memory)
        if memory.device != HOST:
            unmap_pages(memory.shadow, memory.mapped_bytes)
            # Keep the addresses reserved, so that no later allocation gets them: an access to freed
            # memory must fail.
            self._graves.append((memory.start, memory.end))
        elif memory.mapped_bytes:
            unmap_pages(memory.shadow, memory.mapped_bytes)

    def drop_all(self) -> None:
        """Frees all memories."""
        for memory in list(self._memories):
            self.drop(memory)

    def _keep_device(self, device: int, num_bytes: int, shadow: int, handle: bytes) -> int:
        start = reserve_pages(num_bytes)
        return self._keep(
            KnownMemory(
                start,
                start + num_bytes,
                shadow,
                device,
                mapped_bytes=num_bytes,
                handle=handle,
                num_opened=1,
            )
        )

    def _keep(self, memory: KnownMemory) -> int:
        self.version += 1
        bisect.insort(self._memories, memory, key=lambda other: other.start)
        return memory.start

    # Resolving addresses

    def extent(self, device: int, address: int) -> Extent:
        """Returns the device allocation that contains `address`. Raises DeviceError if no
        allocation contains it."""
        for memory in self._memories:
            if memory.device != HOST and memory.start <= address < memory.end:
                return Extent(memory.start, memory.end - memory.start, memory.device)
        raise DeviceError(
            f"fake device {device}: extent: invalid argument: no memory of a device at {address:#x}"
        )

    def shadow_of(self, address: int, num_bytes: int) -> int:
        """Returns the address, in this process, of the bytes that stand for a range of device
        memory. Raises ValueError unless a single memory contains the range."""
        found = self._overlapping(address, address + num_bytes)
        if not found or not (found[0].start <= address and address + num_bytes <= found[0].end):
            raise ValueError(f"no memory of a device at {address:#x}")
        return address - found[0].start + found[0].shadow

    def copy_range(
        self, device: int, start: int, num_bytes: int, what: str
    ) -> tuple[int, KnownMemory | None]:
        """Checks a range of memory that a call copies, as CUDA would. Returns the address at which
        this process has the bytes, and the `KnownMemory` that contains the range. For host memory
        that is not registered, returns `start` and None. Raises DeviceError if CUDA would refuse a
        copy of the range on `device`.

        what: name of the copying call, for the error message.
        """
        end = start + num_bytes
        found = self._overlapping(start, end)
        problem = ""
        if any(start < grave_end and end > grave for grave, grave_end in self._graves):
            problem = "memory that was freed or closed"
        elif found and not (found[0].start <= start and end <= found[0].end):
            problem = (
                "a range that leaves its allocation"
                if found[0].device != HOST
                else "a range that crosses registrations"
            )
        elif found and found[0].device not in (HOST, device):
            problem = f"memory of device {found[0].device}"
        if problem:
            raise DeviceError(
                f"fake device {device}: {what}: invalid argument: {problem}: {start:#x} and "
                f"{num_bytes} bytes"
            )
        return (start, None) if not found else (start - found[0].start + found[0].shadow, found[0])

    def kernel_range(self, device: int, start: int, num_bytes: int) -> int:
        """Checks a range of memory that a kernel on `device` accesses. Returns the address at which
        this process has the bytes. If a kernel could not access the range, raises a DeviceError
        that says that the device is lost (unusable)."""
        found, end = self._overlapping(start, start + num_bytes), start + num_bytes
        # A kernel sees adjoining registrations as a single range, because they have the host's
        # addresses.
        covered = (
            found
            and found[0].start <= start
            and end <= found[-1].end
            and all(a.end == b.start for a, b in itertools.pairwise(found))
        )
        if num_bytes and (
            not covered
            or (len(found) > 1 and any(m.device != HOST for m in found))
            or found[0].device not in (HOST, device)
        ):
            raise DeviceError("an illegal memory access was encountered", is_lost=True)
        return start - found[0].start + found[0].shadow if found else start

    def _overlapping(self, start: int, end: int) -> list[KnownMemory]:
        at = bisect.bisect_right(self._memories, start, key=lambda memory: memory.end)
        found = []
        while at < len(self._memories) and self._memories[at].start < end:
            found.append(self._memories[at])
            at += 1
        return found
