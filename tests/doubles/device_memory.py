"""Simulated device memory: allocations and events that processes share, and ranges that streams
may copy."""

import bisect
import ctypes
import itertools
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_server.device.runtime import HOST, DeviceError, Extent

# -------------------------------------------------------------------------------- Between processes
# An allocation is a memfd; its handle has 64 bytes, as in CUDA, and maps the memfd through
# /proc/<pid>/fd. So a test sees whether a process still maps a dead engine's memory: as
# `memfd:hotkv-device` in /proc/<pid>/maps. An event is a memfd with two counters: records, and
# the last record passed.

MEMORY_NAME, EVENT_NAME = "hotkv-device", "hotkv-device-event"
BACKING_NAME = "hotkv-device-backing"
"""Of virtual memory: begins the name of its memfd (`tests/device/timed_gpu.c`)."""
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
_FIXED, _NO_RESERVE, _PROT_NONE, _FAILED = 0x10, 0x4000, 0, ctypes.c_void_p(-1).value
PAGE_BYTES = mmap.PAGESIZE


def uuid_of(device: int) -> bytes:
    """16 bytes."""
    return b"hotkv-fake-gpu" + device.to_bytes(2, "big")


def map_pages(num_bytes: int, fd: int = -1) -> int:
    """Address. `fd`: -1: zeros. Raises DeviceError if the system refuses."""
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return _map(num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd)


def reserve_pages(num_bytes: int) -> int:
    """Addresses that are used nowhere else and that the host can't access."""
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


def map_backings(backings: Sequence[tuple[int, int]]) -> int:
    """Address of descriptors' memory, side by side: (descriptor, bytes). Raises DeviceError."""
    num_bytes = sum(count for _, count in backings)
    start = at = reserve_pages(num_bytes)
    for fd, count in backings:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if not name.startswith(f"/memfd:{BACKING_NAME}") or os.fstat(fd).st_size != count:
            unmap_pages(start, num_bytes)
            raise DeviceError(f"fake device: map_range: invalid argument: {name} of {count} bytes")
        _libc.mmap(at, count, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, fd, 0)
        at += count
    return start


def unmap_pages(address: int, num_bytes: int) -> None:
    _libc.munmap(address, num_bytes)


def bytes_at(address: int, num_bytes: int) -> NDArray[np.uint8]:
    """A view."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


@dataclass(frozen=True, slots=True)
class FakeHandle:
    """What 64 bytes of a handle say.

    kind: name of the memfd.
    pid, fd: its owner, and its descriptor there.
    inode: tells whether the descriptor was closed and reused.
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
        """Raises DeviceError unless it is a valid handle of this kind."""
        if (
            len(raw) != _FORMAT.size
            or zlib.crc32(raw[:-4]) != int.from_bytes(raw[-4:], "little")
            or raw[:8] != _MAGIC[kind]
        ):
            raise DeviceError(f"fake device: invalid resource handle: no {kind} handle")
        _, pid, fd, inode, num_bytes, device, _ = _FORMAT.unpack(raw)
        return FakeHandle(kind, pid, fd, inode, num_bytes, device)

    def map(self) -> int:
        """Address here. Raises DeviceError if the owner has freed the memory or died."""
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
    """A memfd of this process, mapped."""

    def __init__(self, kind: str, num_bytes: int, device: int) -> None:
        self._fd = os.memfd_create(kind)
        os.ftruncate(self._fd, num_bytes)
        self.num_bytes = num_bytes
        self.address = map_pages(num_bytes, self._fd)
        self.handle = FakeHandle(
            kind, os.getpid(), self._fd, os.fstat(self._fd).st_ino, num_bytes, device
        ).pack()

    def close(self) -> None:
        """Processes that have mapped it keep its bytes."""
        if self._fd >= 0:
            unmap_pages(self.address, self.num_bytes)
            os.close(self._fd)
            self._fd = -1


class FakeAllocation:
    """An engine's device memory, which the server opens by `handle` and `device_uuid`."""

    def __init__(self, num_bytes: int, device: int = 0) -> None:
        self.num_bytes, self.device, self.device_uuid = num_bytes, device, uuid_of(device)
        self._memory = _Shared(MEMORY_NAME, num_bytes, device)
        self.handle = self._memory.handle

    def __repr__(self) -> str:
        return f"FakeAllocation({self.num_bytes} bytes, device {self.device})"

    def array(self) -> NDArray[np.uint8]:
        """As the engine's kernels see it; not after `close`."""
        return bytes_at(self._memory.address, self.num_bytes)

    def words(self) -> NDArray[np.uint32]:
        """For marks."""
        return self.array()[: self.num_bytes // 4 * 4].view(np.uint32)

    def close(self) -> None:
        self._memory.close()


class FakeIpcEvent:
    """An engine's interprocess CUDA event, which the test passes by `reach`."""

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self._memory = _Shared(EVENT_NAME, EVENT_BYTES, device)
        self._counters = bytes_at(self._memory.address, EVENT_BYTES).view(np.uint64)
        self.handle = self._memory.handle

    def record(self) -> None:
        """As if at the end of the device's queue."""
        self._counters[0] += np.uint64(1)

    def reach(self) -> None:
        """The device has passed the last record."""
        self._counters[1] = self._counters[0]

    def close(self) -> None:
        self._memory.close()


# -------------------------------------------------------------------------------- What streams know
# Always true: addresses of device memory have no pages, so the host can't access them. A range
# is invalid if it leaves its allocation, crosses registrations, was freed or closed, or is
# another device's: a call then raises as CUDA's would, a kernel loses the device. Freed
# addresses stay reserved. The caller holds the runtime's lock.


@dataclass(slots=True, eq=False)
class KnownMemory:
    """A range that streams may copy.

    shadow: address of its bytes in this process. Device memory has no pages at `start`, so that the
        host can't access it.
    device: HOST for registered host memory.
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
        """How it was made."""
        if self.device != HOST:
            return "opened" if self.handle else "allocated"
        return "pinned" if self.mapped_bytes else "registered"


class Ranges:
    """All memory that streams may copy. `version` rises with every change."""

    def __init__(self) -> None:
        self.version = 0
        self._memories: list[KnownMemory] = []
        self._graves: list[tuple[int, int]] = []

    def __repr__(self) -> str:
        return f"Ranges({len(self._memories)} memories, {len(self._graves)} given back)"

    def held(self) -> dict[str, int]:
        """What is not freed, by kind."""
        kinds = [memory.kind for memory in self._memories]
        return {
            kind: kinds.count(kind)
            for kind in ("allocated", "pinned", "registered", "opened")
            if kind in kinds
        }

    # Allocating and freeing

    def allocate(self, device: int, num_bytes: int) -> int:
        return self._keep_device(device, num_bytes, map_pages(num_bytes), b"")

    def allocate_pinned(self, num_bytes: int) -> int:
        start = map_pages(num_bytes)
        return self._keep(
            KnownMemory(start, start + num_bytes, start, HOST, mapped_bytes=num_bytes)
        )

    def register(self, address: int, num_bytes: int) -> None:
        """Raises DeviceError unless these are whole pages, none registered."""
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
        """The same address if it is open already."""
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

    def map_range(self, device: int, backings: Sequence[tuple[int, int]]) -> int:
        """Its kind is `opened`."""
        shadow = map_backings(backings)
        num_bytes = sum(count for _, count in backings)
        return self._keep_device(device, num_bytes, shadow, f"range at {shadow}".encode())

    def close(self, device: int, address: int) -> None:
        """Unmaps after as many calls as `open` had."""
        memory = self.find("close_memory", address, device, "opened")
        memory.num_opened -= 1
        if not memory.num_opened:
            self.drop(memory)

    def find(self, method: str, address: int, device: int, kind: str) -> KnownMemory:
        """Memory that begins at `address`. Raises DeviceError. `method`: for its message."""
        for memory in self._memories:
            if (memory.start, memory.device, memory.kind) == (address, device, kind):
                return memory
        raise DeviceError(
            f"fake device: {method}: invalid argument: nothing of the kind at {address:#x}"
        )

    def drop(self, memory: KnownMemory) -> None:
        self.version += 1
        self._memories.remove(memory)
        if memory.device != HOST:
            unmap_pages(memory.shadow, memory.mapped_bytes)
            # Stay reserved, so that any later access fails.
            self._graves.append((memory.start, memory.end))
        elif memory.mapped_bytes:
            unmap_pages(memory.shadow, memory.mapped_bytes)

    def drop_all(self) -> None:
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
        """Allocation that contains `address`. Raises DeviceError."""
        for memory in self._memories:
            if memory.device != HOST and memory.start <= address < memory.end:
                return Extent(memory.start, memory.end - memory.start, memory.device)
        raise DeviceError(
            f"fake device {device}: extent: invalid argument: no memory of a device at {address:#x}"
        )

    def shadow_of(self, address: int, num_bytes: int) -> int:
        """Raises ValueError unless one memory contains the range."""
        found = self._overlapping(address, address + num_bytes)
        if not found or not (found[0].start <= address and address + num_bytes <= found[0].end):
            raise ValueError(f"no memory of a device at {address:#x}")
        return address - found[0].start + found[0].shadow

    def copy_range(
        self, device: int, start: int, num_bytes: int, what: str
    ) -> tuple[int, KnownMemory | None]:
        """Address of the bytes here, and the memory that contains them; `start` and None for
        host memory that is not registered. Raises DeviceError if CUDA would refuse the copy.
        `what`: for its message.
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
        """Address of the bytes here. Raises DeviceError, with the device lost, if a kernel could
        not access the range."""
        found, end = self._overlapping(start, start + num_bytes), start + num_bytes
        # To a kernel adjoining registrations are one range: they have the host's addresses.
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
