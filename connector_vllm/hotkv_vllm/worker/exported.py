"""Memory that the engine shows to the server: layout and descriptors, and CUDA's handles as torch
gives them. Knows nothing of vLLM."""

import os
from dataclasses import dataclass
from typing import Any

import torch

from hotkv_proto.layout import Layout, MemoryHandle
from hotkv_vllm.compat import Unsupported

CUDA_HANDLE_BYTES = 64
UNSET_EXPANDABLE = "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"


@dataclass(slots=True)
class ExportedMemory:
    """Layout for the server, and descriptors of the file mappings in it; the owner closes them."""

    layout: Layout
    fds: dict[str, int]

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds = {}


def cuda_handle(handle_id: str, storage: Any) -> MemoryHandle:
    """IPC handle of the allocation and where the storage begins in it. Raises Unsupported, with
    what stands in the way.

    Source: `_share_cuda_` of torch 2.x gives (device, handle, bytes, offset, counter file, counter
    offset, event, event is needed).
    """
    try:
        device, handle, num_bytes, offset, *counter = storage._share_cuda_()
    except RuntimeError as error:
        why = _why_not_shared(storage)
        raise Unsupported(
            f"CUDA does not share this memory with other processes ({_first_line(error)}); {why}"
        ) from error
    if len(counter) >= 2 and counter[0]:
        # torch counts the receivers, to keep the memory for them after its tensor is gone. The
        # server is none that torch knows.
        torch.UntypedStorage._release_ipc_counter_cuda(counter[0], counter[1])
    return MemoryHandle(
        handle_id,
        num_bytes,
        offset,
        _plain_handle(bytes(handle)),
        cuda_device_uuid(torch.device("cuda", device)),
    )


def _plain_handle(handle: bytes) -> bytes:
    """CUDA's 64 bytes out of torch's handle: since 2.5 a version and the kind of memory (`c`:
    cudaMalloc, `e`: a segment that grows) come before them.
    """
    if len(handle) == CUDA_HANDLE_BYTES:
        return handle
    if handle[1:2] == b"e":
        raise Unsupported(
            "the memory is a segment that can grow, which other processes can't open; "
            f"{UNSET_EXPANDABLE}"
        )
    if len(handle) == CUDA_HANDLE_BYTES + 2 and handle[1:2] == b"c":
        return handle[2:]
    raise Unsupported(
        f"this torch gives a handle of {len(handle)} bytes that begins with {handle[:2]!r}, "
        "which is not known"
    )


def cuda_device_uuid(device: torch.device) -> bytes:
    """16 bytes, whatever CUDA_VISIBLE_DEVICES calls the device. torch gives them as bytes, or as a
    list of numbers."""
    return bytes(torch.cuda.get_device_properties(device).uuid.bytes)


def _why_not_shared(storage: Any) -> str:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    settings = ",".join(os.environ.get(name, "") for name in names)
    if "expandable_segments:true" in settings.lower():
        return UNSET_EXPANDABLE
    if "MIG" in torch.cuda.get_device_name(storage.device):
        return "a MIG instance shares memory only within itself: run the server in the same one"
    return (
        "memory must come from cudaMalloc: leave out enable_sleep_mode and "
        "enable_cumem_allocator, and use no managed memory or other "
        "allocator"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
