"""Engines whose KV lies in virtual memory of `timed_gpu.c`, which this process loads too.
`python -m tests.device.virtual_memory TARGET` runs one until it is killed."""

import atexit
import contextlib
import ctypes
import functools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_size_t, c_uint64
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotkv_client.cuda_export import CudaExport
from hotkv_proto.cuda_memory import (
    ON_DEVICE,
    PINNED,
    POSIX_DESCRIPTOR,
    READ_AND_WRITE,
    AccessDescription,
    AllocationProperties,
    Location,
)
from hotkv_proto.layout import MemoryHandle
from tests.device.timed_gpu import TimedGpus, library
from tests.doubles.device_memory import BACKING_NAME, bytes_at, uuid_of
from tests.server.devices_support import PAGE, DeviceEngine, done
from tests.server.support import hashes

BACKING_BYTES = 5 * PAGE
"""Less than a layer, and no multiple of its pages."""
SKEW_BYTES = 1536
"""Between storages, so that pages cross from one backing to the next."""


@functools.cache
def engine_gpus() -> TimedGpus:
    """The devices of this process's engines."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    gpus = TimedGpus(folder, num_devices=8)
    assert _driver().timed_open(os.fsencode(gpus.path)) == 0
    return gpus


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(str(library()))


def _call(name: str, *arguments: object) -> None:
    status = getattr(_driver(), name)(*arguments)
    assert status == 0, (name, status)


class VirtualPool:
    """A range of an engine, which sleeps as vLLM's allocator: the addresses stay, the memory does
    not.

    sizes: bytes of the backings.
    handle_types: how they may be exported.
    """

    def __init__(
        self, sizes: Sequence[int], device: int = 0, handle_types: int = POSIX_DESCRIPTOR
    ) -> None:
        engine_gpus()
        self._sizes, self._device, self._handle_types = tuple(sizes), device, handle_types
        self._backings: list[c_uint64] = []
        start = c_uint64()
        self._enter()
        _call("cuMemAddressReserve", byref(start), c_size_t(self.num_bytes), 0, 0, 0)
        self.address = start.value
        self.wake()

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes)

    def _enter(self) -> None:
        _call("cuCtxSetCurrent", ctypes.c_void_p(self._device + 1))

    def wake(self) -> None:
        self._enter()
        made = AllocationProperties(PINNED, self._handle_types, Location(ON_DEVICE, self._device))
        at = self.address
        for size in self._sizes:
            backing = c_uint64()
            _call("cuMemCreate", byref(backing), c_size_t(size), byref(made), 0)
            _call("cuMemMap", c_uint64(at), c_size_t(size), 0, backing, 0)
            self._backings.append(backing)
            at += size
        access = AccessDescription(Location(ON_DEVICE, self._device), READ_AND_WRITE)
        _call("cuMemSetAccess", c_uint64(self.address), c_size_t(self.num_bytes), byref(access), 1)

    def sleep(self) -> None:
        self._enter()
        at = self.address
        for size, backing in zip(self._sizes, self._backings, strict=True):
            _call("cuMemUnmap", c_uint64(at), c_size_t(size))
            _call("cuMemRelease", backing)
            at += size
        self._backings.clear()

    def array(self) -> NDArray[np.uint8]:
        return bytes_at(self.address, self.num_bytes)

    def close(self) -> None:
        if self._backings:
            self.sleep()
        self._enter()
        _call("cuMemAddressFree", c_uint64(self.address), c_size_t(self.num_bytes))


def num_descriptors(pid: int, *names: str) -> int:
    """Of memfds whose names begin so; without `names`, of virtual memory."""
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    wanted = tuple(f"/memfd:{name}" for name in names or (BACKING_NAME,))
    return sum(link.startswith(wanted) for link in links)


def export(name: str = "kv") -> CudaExport:
    return CudaExport(name, str(library()))


@dataclass(slots=True)
class VirtualEngine(DeviceEngine):
    """virtual: handles whose memory lies in `pool`, one after the other.
    alter: changes what the engine says of a handle, and the descriptors that it sends.
    """

    virtual: frozenset[str] = frozenset({"kv"})
    num_backings: int = 16
    backing_bytes: int = BACKING_BYTES
    alter: Callable[[MemoryHandle, dict[str, int]], MemoryHandle] = lambda handle, fds: handle
    pool: VirtualPool = field(init=False)
    exported: CudaExport = field(init=False)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Offset in the pool, and bytes, by handle."""

    def __post_init__(self) -> None:
        self.pool = VirtualPool([self.backing_bytes] * self.num_backings, self.device)
        self.register()

    def register(self) -> None:
        self.exported = export()
        self.pool._enter()
        DeviceEngine.register(self)

    def _handle(self, name: str, num_bytes: int, *, in_file: bool) -> MemoryHandle:
        if name not in self.virtual:
            return DeviceEngine._handle(self, name, num_bytes, in_file=in_file)
        if name not in self.places:
            begin = max((at + size for at, size in self.places.values()), default=0)
            self.places[name] = begin + SKEW_BYTES, num_bytes
        at, _ = self.places[name]
        assert at + num_bytes <= self.pool.num_bytes
        handle = self.exported.export(name, self.pool.address + at, num_bytes, uuid_of(self.device))
        self.fds.update(self.exported.fds)
        return self.alter(handle, self.fds)

    def view(self, name: str) -> NDArray[np.uint8]:
        if name not in self.virtual:
            return DeviceEngine.view(self, name)
        at, num_bytes = self.places[name]
        return self.pool.array()[at : at + num_bytes]

    def sleep(self) -> None:
        self._withdraw()
        self.pool.sleep()

    def _withdraw(self) -> None:
        self.session.close()
        for name in self.exported.fds:
            self.fds.pop(name, None)
        self.exported.close()

    def wake(self) -> None:
        self.pool.wake()
        self.register()

    def close(self) -> None:
        self._withdraw()
        DeviceEngine.close(self)
        self.pool.close()


def main() -> None:
    engine = VirtualEngine(sys.argv[1]).connected()
    names, ids = hashes(4), np.arange(4, dtype=np.int32)
    engine.fill(ids, 1)
    done(engine.store(names, ids)[1])
    print("stored", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
