"""Typed calls of CUDA's driver, through ctypes. Each releases the GIL.

CuPy is not used for them: it holds the GIL during calls that mostly return at once, but may wait
while another thread pins or opens memory. Then all threads would wait.

Calls are named as the library's symbols, with the version suffix (_v2) that fits the types here.
Names, types and numbers: `cuda.h` of CUDA 13.0. Some drivers lack `_OPTIONAL_CALLS`.
"""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import (
    POINTER,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_size_t,
    c_uint,
    c_uint64,
    c_void_p,
)

from hotkv_proto.cuda_memory import AccessDescription, Location
from hotkv_server.device.runtime import DeviceError, Int64s

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
"""Of an interprocess handle."""

NOT_READY = 600
"""Status of a query for an event that has not passed."""
STICKY = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})
"""After these every call with the same context fails, and so every call for the device: 214 ECC,
220 NVLink, 226 contained, 700 to 721 faults of a kernel, 709 destroyed context, 810 end of MPS,
911 error of another device.

For most, `cuda.h` says that every call of the process fails. Contexts of other devices were
usable all the same, so that is found out by `CudaCopyEngine.probe`."""
STICKY_EVERYWHERE = frozenset({810, 911})
"""Of these, errors that are not of one device."""

ATTRIBUTE_HOST_POINTER_IS_DEVICES = 91
ATTRIBUTE_HOST_NUMA_NODE = 134
STREAM_NON_BLOCKING = 1
EVENT_BLOCKING_SYNC = 1
EVENT_DISABLE_TIMING = 2
HOST_PORTABLE = 1
HOST_MAPPED = 2
IPC_LAZY_PEER_ACCESS = 1
POINTER_DEVICE = 9
SOURCE_IN_STREAM_ORDER = 1
PREFER_OVERLAP_WITH_COMPUTE = 1

_PCI_ID_BYTES = 64
_NAME_BYTES = 256


class Handle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle, passed by value."""

    _fields_ = (("bytes", c_char * HANDLE_BYTES),)


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. The hints matter only for managed memory."""

    _fields_ = (
        ("source_order", c_int),
        ("source_hint", Location),
        ("destination_hint", Location),
        ("flags", c_uint),
    )


_DEVICE, _CONTEXT, _STREAM, _EVENT, _ADDRESS = c_int, c_void_p, c_void_p, c_void_p, c_uint64
_ARRAY = c_void_p
_MEMORY = c_uint64

_CALLS: Mapping[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(_DEVICE), c_int),
    "cuDeviceGetName": (c_char_p, c_int, _DEVICE),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, _DEVICE),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, _DEVICE),
    "cuDeviceGetUuid_v2": (c_char_p, _DEVICE),
    "cuDevicePrimaryCtxRetain": (POINTER(_CONTEXT), _DEVICE),
    "cuCtxSetCurrent": (_CONTEXT,),
    "cuStreamCreateWithPriority": (POINTER(_STREAM), c_uint, c_int),
    "cuEventCreate": (POINTER(_EVENT), c_uint),
    "cuEventDestroy_v2": (_EVENT,),
    "cuEventRecord": (_EVENT, _STREAM),
    "cuEventQuery": (_EVENT,),
    "cuEventSynchronize": (_EVENT,),
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, c_size_t, _STREAM),
    "cuMemAlloc_v2": (POINTER(_ADDRESS), c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemGetAddressRange_v2": (POINTER(_ADDRESS), POINTER(c_size_t), _ADDRESS),
    "cuPointerGetAttribute": (c_void_p, c_int, _ADDRESS),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemAddressReserve": (POINTER(_ADDRESS), c_size_t, c_size_t, _ADDRESS, c_uint64),
    "cuMemAddressFree": (_ADDRESS, c_size_t),
    "cuMemImportFromShareableHandle": (POINTER(_MEMORY), c_void_p, c_int),
    "cuMemRelease": (_MEMORY,),
    "cuMemMap": (_ADDRESS, c_size_t, c_size_t, _MEMORY, c_uint64),
    "cuMemUnmap": (_ADDRESS, c_size_t),
    "cuMemSetAccess": (_ADDRESS, c_size_t, POINTER(AccessDescription), c_size_t),
    "cuIpcOpenMemHandle_v2": (POINTER(_ADDRESS), Handle, c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuIpcOpenEventHandle": (POINTER(_EVENT), Handle),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, _STREAM, POINTER(c_void_p), c_void_p),
}
_OPTIONAL_CALLS: Mapping[str, tuple[type, ...]] = {
    "cuMemcpyBatchAsync": (
        *(_ARRAY,) * 3,
        c_size_t,
        POINTER(CopyAttributes),
        POINTER(c_size_t),
        c_size_t,
        POINTER(c_size_t),
        _STREAM,
    ),
    "cuMemcpyBatchAsync_v2": (
        *(_ARRAY,) * 3,
        c_size_t,
        POINTER(CopyAttributes),
        POINTER(c_size_t),
        c_size_t,
        _STREAM,
    ),
}


class Driver:
    """Methods raise DeviceError with the call, `where` (the device or action) and CUDA's error.
    If a call needs a context, the caller has made one current."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise DeviceError(
                f"no NVIDIA driver: {error}; install one on the host, and give the container its "
                "GPUs (docker: --gpus all; Kubernetes: nvidia.com/gpu)"
            ) from None
        missing = [
            name
            for name, types in {**_CALLS, **_OPTIONAL_CALLS}.items()
            if not self._declare(name, types)
        ]
        self._missing = frozenset(missing)
        if needed := self._missing & _CALLS.keys():
            raise DeviceError(
                f"the NVIDIA driver lacks {', '.join(sorted(needed))}; install one of CUDA 12 or "
                "newer"
            )
        # Of each batch of copies.
        self._attributes = byref(
            CopyAttributes(source_order=SOURCE_IN_STREAM_ORDER, flags=PREFER_OVERLAP_WITH_COMPUTE)
        )
        self._first = byref(c_size_t(0))
        self.call("cuInit", "starting CUDA", 0)

    def __repr__(self) -> str:
        return f"Driver({self._library._name}, missing={sorted(self._missing)})"

    def _declare(self, name: str, types: Sequence[type]) -> bool:
        function = getattr(self._library, name, None)
        if function is None:
            return False
        function.argtypes, function.restype = types, c_int
        return True

    def has(self, name: str) -> bool:
        return name not in self._missing

    def call(self, name: str, where: str, /, *arguments: object) -> None:
        """`name`: a call that this driver has; `arguments` as ctypes takes them."""
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise self.error(name, where, status)

    def error(self, name: str, where: str, status: int) -> DeviceError:
        """For a call that returned `status`."""
        texts = [c_char_p(), c_char_p()]
        self._library.cuGetErrorName(status, byref(texts[0]))
        self._library.cuGetErrorString(status, byref(texts[1]))
        code, text = ((each.value or b"unknown").decode(errors="replace") for each in texts)
        return DeviceError(
            f"{name} on {where}: {code} ({status}): {text}",
            is_lost=status in STICKY,
            is_everywhere=status in STICKY_EVERYWHERE,
        )

    # Devices

    def num_devices(self) -> int:
        count = c_int()
        self.call("cuDeviceGetCount", "all devices", byref(count))
        return count.value

    def device(self, number: int) -> int:
        """CUDA's handle."""
        device = c_int()
        self.call("cuDeviceGet", f"device {number}", byref(device), number)
        return device.value

    def name(self, number: int) -> str:
        text = ctypes.create_string_buffer(_NAME_BYTES)
        self.call("cuDeviceGetName", f"device {number}", text, _NAME_BYTES, self.device(number))
        return text.value.decode(errors="replace")

    def pci_bus_id(self, number: int) -> str:
        text = ctypes.create_string_buffer(_PCI_ID_BYTES)
        self.call(
            "cuDeviceGetPCIBusId", f"device {number}", text, _PCI_ID_BYTES, self.device(number)
        )
        return text.value.decode().lower()

    def uuid(self, number: int) -> bytes:
        """16 bytes. A MIG slice has its own."""
        uuid = ctypes.create_string_buffer(16)
        self.call("cuDeviceGetUuid_v2", f"device {number}", uuid, self.device(number))
        return uuid.raw

    def attribute(self, number: int, attribute: int) -> int:
        value = c_int()
        self.call(
            "cuDeviceGetAttribute", f"device {number}", byref(value), attribute, self.device(number)
        )
        return value.value

    def retain_context(self, number: int) -> int:
        """The primary context, which the process shares and keeps."""
        context = c_void_p()
        self.call(
            "cuDevicePrimaryCtxRetain", f"device {number}", byref(context), self.device(number)
        )
        return context.value or 0

    # Calls that need more than their arguments

    def copy_batch(
        self, where: str, stream: int, dst: Int64s, src: Int64s, num_bytes: Int64s
    ) -> bool:
        """Several copies with one call. False, with none started, if the driver lacks it: new in
        CUDA 12.8. Arrays are int64 [copies], contiguous; no size may be 0."""
        given = (
            _address(dst),
            _address(src),
            _address(num_bytes),
            len(dst),
            self._attributes,
            self._first,
            1,
        )
        if self.has("cuMemcpyBatchAsync_v2"):
            self.call("cuMemcpyBatchAsync_v2", where, *given, stream)
        elif self.has("cuMemcpyBatchAsync"):
            failed = c_size_t((1 << 64) - 1)
            status = self._library.cuMemcpyBatchAsync(*given, byref(failed), stream)
            if status != 0:
                copy = f" at copy {failed.value} of {len(dst)}" if failed.value < len(dst) else ""
                raise self.error("cuMemcpyBatchAsync", f"{where}{copy}", status)
        else:
            return False
        return True

    def passed(self, where: str, event: int) -> bool:
        status = self._library.cuEventQuery(event)
        if status not in (0, NOT_READY):
            raise self.error("cuEventQuery", where, status)
        return bool(status == 0)

    def launch(
        self,
        where: str,
        function: int,
        num_blocks: int,
        num_threads: int,
        stream: int,
        arguments: Sequence[int],
    ) -> None:
        """The kernel's parameters must have 8 bytes each, and it must need no dynamic shared
        memory."""
        values = [c_uint64(argument) for argument in arguments]
        pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.call(
            "cuLaunchKernel",
            where,
            function,
            num_blocks,
            1,
            1,
            num_threads,
            1,
            1,
            0,
            stream,
            pointers,
            None,
        )


def _address(array: Int64s) -> int:
    return int(array.__array_interface__["data"][0])


def handle_of(what: str, handle: bytes) -> Handle:
    """Raises DeviceError unless there are 64 bytes. `what`: for the message."""
    if len(handle) != HANDLE_BYTES:
        raise DeviceError(
            f"{what}: an interprocess handle has {HANDLE_BYTES} bytes, this one {len(handle)}; "
            "send what CUDA gave, unchanged"
        )
    return Handle.from_buffer_copy(handle)
