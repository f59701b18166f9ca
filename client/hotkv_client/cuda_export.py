"""Shows the server this process's CUDA memory that has no interprocess handle: virtual memory, as
of PyTorch's expandable segments and of vLLM's cumem allocator.

Always true: a backing is exported once, even if several ranges share it. An export keeps device
memory: until `close`, memory that the allocator releases is not free.
"""

import ctypes
import os
import resource
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p

from hotkv_proto.cuda_memory import FABRIC, POSIX_DESCRIPTOR, AllocationProperties
from hotkv_proto.layout import MAX_BACKINGS, CudaBacking, MemoryHandle

LIBRARY = "libcuda.so.1"
SPARE_DESCRIPTORS = 64
"""Left to the rest of the process."""

CALLS: Mapping[str, tuple[type, ...]] = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuMemRetainAllocationHandle": (POINTER(c_uint64), c_void_p),
    "cuMemGetAllocationPropertiesFromHandle": (POINTER(AllocationProperties), c_uint64),
    "cuMemExportToShareableHandle": (POINTER(c_int), c_uint64, c_int, c_uint64),
    "cuMemRelease": (c_uint64,),
}


class CudaExportError(ValueError):
    """The memory can't be shared; the message says why."""


class CudaExport:
    """Ranges of this process. The owner must call `close`. Calls need a current CUDA context.

    fds: of the backings, by id.
    """

    def __init__(self, name: str, library: str = LIBRARY) -> None:
        """Raises CudaExportError without a driver that has the calls.

        name: begins the backings' ids.
        """
        try:
            self._library = ctypes.CDLL(library)
            for call, types in CALLS.items():
                function = getattr(self._library, call)
                function.argtypes, function.restype = types, c_int
        except (OSError, AttributeError) as error:
            raise CudaExportError(f"the NVIDIA driver can't export memory: {error}") from error
        self._name = name
        self._known: dict[int, CudaBacking] = {}
        self.fds: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"CudaExport({self._name!r}, {len(self.fds)} backings)"

    def is_virtual(self, address: int) -> bool:
        memory = c_uint64()
        if self._library.cuMemRetainAllocationHandle(byref(memory), address):
            return False
        self._library.cuMemRelease(memory)
        return True

    def export(
        self, handle_id: str, address: int, num_bytes: int, device_uuid: bytes
    ) -> MemoryHandle:
        """Of a range of virtual memory. Raises CudaExportError if some of it has no memory, or its
        memory was not made to be exported by descriptors."""
        at, base_offset_bytes = address, 0
        backings: list[CudaBacking] = []
        while at < address + num_bytes:
            start, size = c_uint64(), c_size_t()
            self._call("cuMemGetAddressRange_v2", byref(start), byref(size), at)
            if not start.value <= at < start.value + size.value:
                raise CudaExportError(f"the driver names no memory at {at:#x}")
            if not backings:
                base_offset_bytes = at - start.value
            backings.append(self._backing(start.value, size.value))
            at = start.value + size.value
        return MemoryHandle(
            handle_id,
            num_bytes,
            base_offset_bytes,
            device_uuid=device_uuid,
            backings=tuple(backings),
        )

    def _backing(self, start: int, num_bytes: int) -> CudaBacking:
        if (known := self._known.get(start)) is not None:
            return known
        if len(self._known) == MAX_BACKINGS:
            raise CudaExportError(
                f"the memory has over {MAX_BACKINGS} backings, more than hotkv maps; use an "
                "allocator with larger ones"
            )
        backing_id = f"{self._name}.{len(self._known)}"
        self.fds[backing_id] = self._export(start)
        backing = self._known[start] = CudaBacking(backing_id, num_bytes)
        return backing

    def _export(self, start: int) -> int:
        memory, properties, fd = c_uint64(), AllocationProperties(), c_int(-1)
        self._call("cuMemRetainAllocationHandle", byref(memory), start)
        try:
            self._call("cuMemGetAllocationPropertiesFromHandle", byref(properties), memory)
            if not properties.handle_types & POSIX_DESCRIPTOR:
                raise CudaExportError(_why_not(properties.handle_types))
            self._call("cuMemExportToShareableHandle", byref(fd), memory, POSIX_DESCRIPTOR, 0)
        finally:
            self._library.cuMemRelease(memory)
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most != resource.RLIM_INFINITY and fd.value >= most - SPARE_DESCRIPTORS:
            os.close(fd.value)
            raise CudaExportError(
                f"each backing needs a descriptor, and this process may have {most}; raise the "
                "limit (ulimit -n)"
            )
        os.set_inheritable(fd.value, False)
        return fd.value

    def dup(self) -> dict[str, int]:
        """New descriptors, for another owner."""
        return {backing_id: os.dup(fd) for backing_id, fd in self.fds.items()}

    def close(self) -> None:
        """Closes the descriptors. May be called twice."""
        fds, self.fds = self.fds, {}
        self._known.clear()
        for fd in fds.values():
            os.close(fd)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = c_char_p()
            self._library.cuGetErrorName(status, byref(text))
            said = (text.value or b"unknown").decode(errors="replace")
            raise CudaExportError(f"{name}: {said} ({status})")


def _why_not(handle_types: int) -> str:
    if handle_types & FABRIC:
        return (
            "the memory was made for fabric handles, not for descriptors (requestedHandleTypes = "
            f"{handle_types}); take the IMEX channels from the engine (NVIDIA_IMEX_CHANNELS), so "
            "that its allocator makes descriptors"
        )
    return (
        f"the memory was not made to be shared (requestedHandleTypes = {handle_types}, without "
        f"{POSIX_DESCRIPTOR}, a POSIX descriptor)"
    )
