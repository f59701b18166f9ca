"""Memory and events of a made-up device that two processes can share, and the engine's side of
both.

An allocation is a memfd: whoever has its handle of 64 bytes maps it through /proc/<pid>/fd, so a
dead engine's memory is seen in /proc/<pid>/maps of those that still hold it, as
`memfd:hotkv-device`. An event is a memfd with two counters: recorded and passed.
"""

import ctypes
import mmap
import os
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_server.device.runtime import DeviceError

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
    """UUID of the made-up device of that number; 16 bytes."""
    return b"hotkv-fake-gpu" + device.to_bytes(2, "big")


def map_pages(num_bytes: int, fd: int = -1) -> int:
    """Address of a new mapping: of the file, or of zeros. Raises DeviceError."""
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return _map(num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd)


def reserve_pages(num_bytes: int) -> int:
    """Reserves addresses that nothing else gets and the host can't touch."""
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
    """Unmaps or frees them."""
    _libc.munmap(address, num_bytes)


def bytes_at(address: int, num_bytes: int) -> NDArray[np.uint8]:
    """A view of the host's memory."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


@dataclass(frozen=True, slots=True)
class Handle:
    """The fields of a handle's 64 bytes."""

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
    def parse(raw: bytes, kind: str) -> "Handle":
        """Reads a handle. Raises DeviceError if it is not of that kind."""
        if (
            len(raw) != _FORMAT.size
            or zlib.crc32(raw[:-4]) != int.from_bytes(raw[-4:], "little")
            or raw[:8] != _MAGIC[kind]
        ):
            raise DeviceError(f"fake device: invalid resource handle: no {kind} handle")
        _, pid, fd, inode, num_bytes, device, _ = _FORMAT.unpack(raw)
        return Handle(kind, pid, fd, inode, num_bytes, device)

    def map(self) -> int:
        """Maps its memory into this process and returns the address. Raises DeviceError if its
        process has freed it or died."""
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
        self.handle = Handle(
            kind, os.getpid(), self._fd, os.fstat(self._fd).st_ino, num_bytes, device
        ).pack()

    def close(self) -> None:
        """Frees it; others that hold it keep its bytes."""
        if self._fd >= 0:
            unmap_pages(self.address, self.num_bytes)
            os.close(self._fd)
            self._fd = -1


class FakeAllocation:
    """Device memory of an engine. `handle`: to send to the server, with `device_uuid`."""

    def __init__(self, num_bytes: int, device: int = 0) -> None:
        self.num_bytes, self.device, self.device_uuid = num_bytes, device, uuid_of(device)
        self._memory = _Shared(MEMORY_NAME, num_bytes, device)
        self.handle = self._memory.handle

    def __repr__(self) -> str:
        return f"FakeAllocation({self.num_bytes} bytes, device {self.device})"

    def array(self) -> NDArray[np.uint8]:
        """Its bytes, as the engine's kernels see them; not to be used after `close`."""
        return bytes_at(self._memory.address, self.num_bytes)

    def words(self) -> NDArray[np.uint32]:
        """The same as flag words."""
        return self.array()[: self.num_bytes // 4 * 4].view(np.uint32)

    def close(self) -> None:
        self._memory.close()


class FakeIpcEvent:
    """An interprocess event of an engine, whose device passes it when told to."""

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self._memory = _Shared(EVENT_NAME, EVENT_BYTES, device)
        self._counters = bytes_at(self._memory.address, EVENT_BYTES).view(np.uint64)
        self.handle = self._memory.handle

    def record(self) -> None:
        """The engine's queue ends with it."""
        self._counters[0] += np.uint64(1)

    def reach(self) -> None:
        """The engine's device has come to it, as last recorded."""
        self._counters[1] = self._counters[0]

    def close(self) -> None:
        self._memory.close()
