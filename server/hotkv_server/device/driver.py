"""Typed calls of CUDA's driver, through ctypes. Each call releases the GIL while it runs.

CuPy is not used for these calls, because CuPy holds the GIL during calls that mostly return at
once. Such a call may have to wait while another thread of the process pins memory or opens memory
of another process. If the waiting call held the GIL, all other threads would wait too.

Calls are named as the symbols of the library, with the version suffix (such as _v2) that matches
the types here. Some drivers lack the calls in `_OPTIONAL_CALLS`. Source of names, types and
numbers: `cuda.h` of CUDA 13.0.
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

from hotkv_server.device.runtime import DeviceError, Int64s

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
"""Size of an interprocess handle, of memory or of an event, in bytes."""

NOT_READY = 600
"""Status of a query for an event that the device has not reached yet."""
STICKY = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})
"""Errors after which every further call of the process fails: errors of the hardware (214 ECC, 220
NVLink, 226 contained), faults of a kernel (700 to 721), a destroyed context (709), the end of MPS
(810), an error of another device (911)."""

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
    """CUDA's types CUipcMemHandle and CUipcEventHandle, which are passed by value."""

    _fields_ = (("bytes", c_char * HANDLE_BYTES),)


class Location(ctypes.Structure):
    """CUDA's type CUmemLocation. If all its fields are 0, it gives CUDA no hint."""

    _fields_ = (("type", c_int), ("id", c_int))


class CopyAttributes(ctypes.Structure):
    """CUDA's type CUmemcpyAttributes. The hints matter only for managed memory."""

    _fields_ = (
        ("source_order", c_int),
        ("source_hint", Location),
        ("destination_hint", Location),
        ("flags", c_uint),
    )


_DEVICE, _CONTEXT, _STREAM, _EVENT, _ADDRESS = c_int, c_void_p, c_void_p, c_void_p, c_uint64
_ARRAY = c_void_p

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
    """The library of CUDA's driver. Methods raise DeviceError, whose message has the name of the
    call, the device or action (`where`), and CUDA's error with its text. If a call of CUDA needs a
    context, the caller must make a context current before."""

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
        """Returns True if this driver has the call `name`."""
        return name not in self._missing

    def call(self, name: str, where: str, /, *arguments: object) -> None:
        """Calls the driver. Raises DeviceError if the call fails.

        `name`: the name of a call that this driver has.
        `where`: names the device or the action, for the error message.
        `arguments`: the arguments of the call, as ctypes takes them.
        """
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise self.error(name, where, status)

    def error(self, name: str, where: str, status: int) -> DeviceError:
        """Returns the error to raise for a call that has failed.

        `name`: name of the call.
        `where`: names the device or the action, for the error message.
        `status`: the status that the call has returned.
        """
        texts = [c_char_p(), c_char_p()]
        self._library.cuGetErrorName(status, byref(texts[0]))
        self._library.cuGetErrorString(status, byref(texts[1]))
        code, text = ((each.value or b"unknown").decode(errors="replace") for each in texts)
        return DeviceError(
            f"{name} on {where}: {code} ({status}): {text}", is_lost=status in STICKY
        )

    # Devices

    def num_devices(self) -> int:
        count = c_int()
        self.call("cuDeviceGetCount", "all devices", byref(count))
        return count.value

    def device(self, number: int) -> int:
        """Returns CUDA's handle of the device with this number."""
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
        """Returns the UUID of a device, 16 bytes. A MIG slice has its own UUID."""
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
        """Returns the primary context of a device, which all users of CUDA in the process share,
        and retains it for the rest of the process."""
        context = c_void_p()
        self.call(
            "cuDevicePrimaryCtxRetain", f"device {number}", byref(context), self.device(number)
        )
        return context.value or 0

    # Calls that need more than their arguments

    def copy_batch(
        self, where: str, stream: int, dst: Int64s, src: Int64s, num_bytes: Int64s
    ) -> bool:
        """Starts several copies in a stream with a single call. Returns False, without copying, if
        the driver lacks this call, which is new in CUDA 12.8.

        `where`: names the device, for the error message.
        `stream`: handle of the stream.
        `dst`, `src`: addresses, int64 [copies], contiguous.
        `num_bytes`: sizes, int64 [copies], contiguous; no size may be 0.
        """
        attributes = CopyAttributes(
            source_order=SOURCE_IN_STREAM_ORDER, flags=PREFER_OVERLAP_WITH_COMPUTE
        )
        first, failed = c_size_t(0), c_size_t((1 << 64) - 1)
        given = (
            dst.ctypes.data,
            src.ctypes.data,
            num_bytes.ctypes.data,
            len(dst),
            byref(attributes),
            byref(first),
            1,
        )
        if self.has("cuMemcpyBatchAsync_v2"):
            self.call("cuMemcpyBatchAsync_v2", where, *given, stream)
        elif self.has("cuMemcpyBatchAsync"):
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
        """Launches a kernel in a stream. The kernel's parameters must all have 8 bytes, and it must
        need no dynamic shared memory.

        `where`: names the device, for the error message.
        `function`: handle of the kernel.
        `num_blocks`, `num_threads`: number of thread blocks, and of threads in each.
        `stream`: handle of the stream.
        `arguments`: values of the parameters.
        """
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


def handle_of(what: str, handle: bytes) -> Handle:
    """Converts the bytes of an interprocess handle to CUDA's type. Raises DeviceError unless there
    are 64 bytes. `what`: names the handle in the error message."""
    if len(handle) != HANDLE_BYTES:
        raise DeviceError(
            f"{what}: an interprocess handle has {HANDLE_BYTES} bytes, this one {len(handle)}; "
            "send what CUDA gave, unchanged"
        )
    return Handle.from_buffer_copy(handle)
