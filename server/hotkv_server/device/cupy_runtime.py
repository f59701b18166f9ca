"""`DeviceRuntime` for real devices. Calls CUDA's driver; CuPy only compiles the copy kernel, once
per device, into its cache on disk.

A device starts when it is first used: its context takes some hundred MiB of device memory and is
shared by all users of CUDA in the process. Every method makes its device current in the calling
thread. Streams live as long as the process; so do events that are not closed.
"""

import contextlib
import importlib
import math
import os
import threading
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from hotkv_proto import extras
from hotkv_proto.cuda_memory import (
    ON_DEVICE,
    POSIX_DESCRIPTOR,
    READ_AND_WRITE,
    AccessDescription,
    Location,
)
from hotkv_server.device import driver as cu
from hotkv_server.device.runtime import (
    DeviceError,
    DeviceInfo,
    Event,
    Extent,
    Int64s,
    Priority,
    Stream,
)

COPY_BLOCKS = 8
COPY_THREADS = 512
"""Thread blocks in a launch of the copy kernel, and threads in each. Together they have 128
bytes a thread in flight, half a MiB; PCIe 5 needs about 128 KiB. Takes 8 of the 132
multiprocessors of an H200."""

_SYSFS = Path("/sys/bus/pci/devices")
_PRIORITIES = {Priority.LOW: 0, Priority.HIGH: -5}
"""0 is CUDA's lowest; it clamps numbers beyond the device's range."""
_WARP = 32
_BYTES_OF_WARP = 4096
"""Bytes that a warp has in flight; smaller shares would not occupy it."""
_SHARES_PER_WARP = 8
"""If the copies are large enough (`copy_shares`)."""


@dataclass(frozen=True, slots=True)
class CudaStream:
    device: int
    handle: int


@dataclass(frozen=True, slots=True)
class CudaEvent:
    device: int
    handle: int


class CupyRuntime:
    """The constructor raises DeviceError without a driver, device or CuPy; the message says what to
    install, or which access the container needs.

    `copy_threads`: a multiple of 32, at most 512.
    `sysfs`: folder with the PCI devices.
    """

    def __init__(
        self,
        *,
        copy_blocks: int = COPY_BLOCKS,
        copy_threads: int = COPY_THREADS,
        library: str = cu.LIBRARY,
        sysfs: Path = _SYSFS,
    ) -> None:
        if copy_blocks < 1 or not _WARP <= copy_threads <= 512 or copy_threads % _WARP:
            raise ValueError(
                f"copy_blocks {copy_blocks}: from 1; copy_threads {copy_threads}: a multiple of "
                "32, from 32 to 512"
            )
        self._driver = cu.Driver(library)
        self._copy_blocks = copy_blocks
        self._copy_threads = copy_threads
        self._devices = _find_devices(self._driver, sysfs)
        self._cupy = _import_cupy()
        self._starting = threading.Lock()
        self._contexts: dict[int, int] = {}
        self._copy_kernels: dict[int, int] = {}
        self._modules: list[object] = []
        self._lost: set[int] = set()
        self._entered = threading.local()

    def __repr__(self) -> str:
        return (
            f"CupyRuntime(devices={len(self._devices)}, started={sorted(self._contexts)}, "
            f"{self._driver!r})"
        )

    def devices(self) -> Sequence[DeviceInfo]:
        return self._devices

    # Order

    def new_stream(self, device: int, priority: Priority) -> CudaStream:
        stream = c_void_p()
        self._call(
            device,
            "cuStreamCreateWithPriority",
            byref(stream),
            cu.STREAM_NON_BLOCKING,
            _PRIORITIES[priority],
        )
        return CudaStream(device, stream.value or 0)

    def new_event(self, device: int) -> CudaEvent:
        event = c_void_p()
        self._call(
            device, "cuEventCreate", byref(event), cu.EVENT_BLOCKING_SYNC | cu.EVENT_DISABLE_TIMING
        )
        return CudaEvent(device, event.value or 0)

    def record(self, event: Event, stream: Stream) -> None:
        self._call(stream.device, "cuEventRecord", _handle(event), _handle(stream))

    def passed(self, event: Event) -> bool:
        return self._driver.passed(self._enter(event.device), _handle(event))

    def synchronize(self, event: Event) -> None:
        self._call(event.device, "cuEventSynchronize", _handle(event))

    # Copies

    def copy(self, stream: Stream, dst: int, src: int, num_bytes: int) -> None:
        if num_bytes:
            self._call(stream.device, "cuMemcpyAsync", dst, src, num_bytes, _handle(stream))

    def copy_batch(self, stream: Stream, dst: Int64s, src: Int64s, num_bytes: Int64s) -> None:
        where = self._enter(stream.device)
        if len(dst) == 0 or self._driver.copy_batch(where, _handle(stream), dst, src, num_bytes):
            return
        for to, at, size in zip(dst.tolist(), src.tolist(), num_bytes.tolist(), strict=True):
            self._driver.call("cuMemcpyAsync", where, to, at, size, _handle(stream))

    def copy_kernel(self, stream: Stream, table: int, num_copies: int, max_bytes: int) -> None:
        if num_copies == 0 or max_bytes == 0:
            return
        device = stream.device
        where = self._enter(device)
        kernel = self._copy_kernels.get(device) or self._compile_copy(device)
        shares = copy_shares(num_copies, max_bytes, self._copy_blocks * self._copy_threads // _WARP)
        self._driver.launch(
            where,
            kernel,
            self._copy_blocks,
            self._copy_threads,
            _handle(stream),
            (table, num_copies, shares),
        )

    # Memory

    def allocate(self, device: int, num_bytes: int) -> int:
        address = c_uint64()
        self._call(device, "cuMemAlloc_v2", byref(address), num_bytes)
        return address.value

    def free(self, device: int, address: int) -> None:
        self._call(device, "cuMemFree_v2", address)

    def allocate_pinned(self, num_bytes: int) -> int:
        address = c_void_p()
        self._call(
            self._any_device(),
            "cuMemHostAlloc",
            byref(address),
            num_bytes,
            cu.HOST_PORTABLE | cu.HOST_MAPPED,
        )
        return address.value or 0

    def free_pinned(self, address: int) -> None:
        self._call(self._any_device(), "cuMemFreeHost", address)

    def register(self, address: int, num_bytes: int) -> None:
        flags = cu.HOST_PORTABLE | cu.HOST_MAPPED
        self._call(self._any_device(), "cuMemHostRegister_v2", address, num_bytes, flags)

    def unregister(self, address: int) -> None:
        self._call(self._any_device(), "cuMemHostUnregister", address)

    # Between processes

    def open_memory(self, device: int, handle: bytes) -> int:
        address = c_uint64()
        self._call(
            device,
            "cuIpcOpenMemHandle_v2",
            byref(address),
            cu.handle_of("memory", handle),
            cu.IPC_LAZY_PEER_ACCESS,
        )
        return address.value

    def extent(self, device: int, address: int) -> Extent:
        start, num_bytes, owner = c_uint64(), c_size_t(), c_int()
        self._call(device, "cuMemGetAddressRange_v2", byref(start), byref(num_bytes), address)
        self._call(device, "cuPointerGetAttribute", byref(owner), cu.POINTER_DEVICE, address)
        return Extent(start.value, num_bytes.value, owner.value)

    def close_memory(self, device: int, address: int) -> None:
        self._call(device, "cuIpcCloseMemHandle", address)

    def map_range(self, device: int, backings: Sequence[tuple[int, int]]) -> int:
        start, sizes = c_uint64(), [num_bytes for _, num_bytes in backings]
        self._call(device, "cuMemAddressReserve", byref(start), sum(sizes), 0, 0, 0)
        num_mapped = 0
        try:
            at = start.value
            for index, (fd, num_bytes) in enumerate(backings):
                self._map(f"device {device}, backing {index}", at, fd, num_bytes)
                num_mapped += 1
                at += num_bytes
            access = AccessDescription(Location(ON_DEVICE, self._driver.device(device)))
            access.access = READ_AND_WRITE
            self._call(device, "cuMemSetAccess", start.value, sum(sizes), byref(access), 1)
        except BaseException:
            with contextlib.suppress(DeviceError):
                self._unmap(device, start.value, sizes, num_mapped)
            raise
        return start.value

    def _map(self, where: str, address: int, fd: int, num_bytes: int) -> None:
        """The mapping keeps the memory, so its handle is released here."""
        handle = c_uint64()
        self._driver.call(
            "cuMemImportFromShareableHandle", where, byref(handle), c_void_p(fd), POSIX_DESCRIPTOR
        )
        try:
            self._driver.call("cuMemMap", where, address, num_bytes, 0, handle, 0)
        finally:
            self._driver.call("cuMemRelease", where, handle)

    def unmap_range(self, device: int, address: int, sizes: Sequence[int]) -> None:
        self._unmap(device, address, sizes, len(sizes))

    def _unmap(self, device: int, address: int, sizes: Sequence[int], num_mapped: int) -> None:
        failed: DeviceError | None = None
        at = address
        for num_bytes in sizes[:num_mapped]:
            try:
                self._call(device, "cuMemUnmap", at, num_bytes)
            except DeviceError as error:
                failed = failed or error
            at += num_bytes
        try:
            self._call(device, "cuMemAddressFree", address, sum(sizes))
        except DeviceError as error:
            failed = failed or error
        if failed is not None:
            raise failed

    def open_event(self, device: int, handle: bytes) -> CudaEvent:
        event = c_void_p()
        self._call(device, "cuIpcOpenEventHandle", byref(event), cu.handle_of("event", handle))
        return CudaEvent(device, event.value or 0)

    def close_event(self, event: Event) -> None:
        self._call(event.device, "cuEventDestroy_v2", _handle(event))

    # Inside

    def _call(self, device: int, name: str, *arguments: object) -> None:
        try:
            self._driver.call(name, self._enter(device), *arguments)
        except DeviceError as error:
            if error.is_lost:
                self._lost.add(device)
            raise

    def _enter(self, device: int) -> str:
        """Makes the device current; returns its name for messages."""
        context = self._contexts.get(device) or self._start(device)
        where = f"device {device}"
        self._driver.call("cuCtxSetCurrent", where, context)
        self._entered.device = device
        return where

    def _start(self, device: int) -> int:
        if not 0 <= device < len(self._devices):
            raise DeviceError(
                f"device {device}: this process has {len(self._devices)}, counted from 0"
            )
        with self._starting:
            if device not in self._contexts:
                self._contexts[device] = self._driver.retain_context(device)
            return self._contexts[device]

    def _any_device(self) -> int:
        """For calls about host memory: the one that this thread used last, so that a call for a
        session on one device does not wait for another; else a started one. Not a lost one, if
        there is another."""
        latest = getattr(self._entered, "device", None)
        started = [*([] if latest is None else [latest]), *list(self._contexts)]
        return next((one for one in started if one not in self._lost), 0)

    def _compile_copy(self, device: int) -> int:
        with self._starting:
            if device not in self._copy_kernels:
                module, kernel = compile_kernel(
                    self._cupy, device, Path(__file__).parent / "kernels" / "copy.cu", "copy_runs"
                )
                self._modules.append(module)
                self._copy_kernels[device] = kernel
        self._enter(device)
        return self._copy_kernels[device]


def copy_shares(num_copies: int, max_bytes: int, num_warps: int) -> int:
    """Shares into which the kernel splits each copy: enough to occupy all warps, none smaller
    than what a warp has in flight. `max_bytes`: of the largest copy."""
    wanted = math.ceil(_SHARES_PER_WARP * num_warps / num_copies)
    return max(1, min(wanted, math.ceil(max_bytes / _BYTES_OF_WARP)))


def compile_kernel(cupy: ModuleType, device: int, source: Path, name: str) -> tuple[object, int]:
    """Compiles and loads a kernel. The caller keeps the module, with which the kernel is
    unloaded. Raises DeviceError. Makes `device` current in the calling thread."""
    try:
        cupy.cuda.runtime.setDevice(device)
        try:
            return _load(cupy, source, name)
        except OSError:  # CuPy cannot write its cache: the user has no home
            os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
            return _load(cupy, source, name)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(
            f"loading {source.name} on device {device}: {error}", is_lost=error.status in cu.STICKY
        ) from error
    except (cupy.cuda.compiler.CompileException, RuntimeError, ImportError, OSError) as error:
        raise DeviceError(
            f"compiling {source.name} for device {device}: {error}; CuPy needs NVRTC: "
            f"{extras.advice('cuda12')} (or of CUDA 13), or a CUDA toolkit"
        ) from error


def _load(cupy: ModuleType, source: Path, name: str) -> tuple[object, int]:
    module = cupy.RawModule(code=source.read_text(), options=("-std=c++17",), backend="nvrtc")
    function = module.get_function(name)
    return (module, function), int(function.kernel.ptr)


def _import_cupy() -> ModuleType:
    try:
        return importlib.import_module("cupy")
    except (ImportError, ValueError, AttributeError) as error:
        # Built for another numpy, CuPy raises other errors than ImportError.
        raise DeviceError(
            f"CuPy does not load: {error}: {extras.advice('cuda12')}, or of CUDA 13, as the driver "
            "needs"
        ) from error


def _find_devices(driver: cu.Driver, sysfs: Path) -> tuple[DeviceInfo, ...]:
    count = driver.num_devices()
    if count == 0:
        raise DeviceError(
            "the NVIDIA driver shows no device; CUDA_VISIBLE_DEVICES may hide them, or the "
            "container was given none"
        )
    for number in range(count):
        if not driver.attribute(number, cu.ATTRIBUTE_HOST_POINTER_IS_DEVICES):
            raise DeviceError(
                f"device {number} ({driver.name(number)}) sees registered memory at other "
                "addresses than the host does; leave it out by CUDA_VISIBLE_DEVICES"
            )
    return tuple(_describe(driver, number, sysfs) for number in range(count))


def _describe(driver: cu.Driver, number: int, sysfs: Path) -> DeviceInfo:
    pci_bus_id = driver.pci_bus_id(number)
    return DeviceInfo(
        number=number,
        uuid=driver.uuid(number),
        name=driver.name(number),
        pci_bus_id=pci_bus_id,
        numa_node=_numa_node(driver, number, sysfs / pci_bus_id),
    )


def _numa_node(driver: cu.Driver, number: int, slot: Path) -> int:
    try:
        return int((slot / "numa_node").read_text())
    except (OSError, ValueError):
        pass
    try:  # no /sys in the container; drivers before CUDA 12.2 lack this attribute
        return driver.attribute(number, cu.ATTRIBUTE_HOST_NUMA_NODE)
    except DeviceError:
        return -1


def _handle(thing: Stream | Event) -> int:
    if not isinstance(thing, (CudaStream, CudaEvent)):
        raise TypeError(f"{thing!r} is no stream or event of this runtime")
    return thing.handle
