"""Finds the pages in the tensors that vLLM registered, and exports their memory to the server.

A slot holds the pages of a block in the order of its group's layers. Inside a page the axes (heads,
tokens, channels) keep the engine's physical order, which is part of the key space.

All strides are read from the tensors. So all layouts of vLLM are served, and groups that share
one buffer. The names of layouts (LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC) have the axes in
memory, outermost first, for layers, blocks, KV heads, tokens, channels of K and V.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import group_kernel_blocks

from hotkv_client import cuda_export
from hotkv_client.cuda_export import CudaExport, CudaExportError
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_vllm.compat import Unsupported, checks, key_space, kv_groups, model_weights, reuse
from hotkv_vllm.compat.model_weights import READ_WAIT_S
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.identity.ranks import RankNote, this_host
from hotkv_vllm.link import logger

# ---------------------------------------------------------------------- memory that the server maps

CUDA_HANDLE_BYTES = 64
UNSET_EXPANDABLE = "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"
CUDA_LIBRARY = cuda_export.LIBRARY


@dataclass(slots=True)
class ExportedMemory:
    """Engine memory, described for the server to map. The owner must call `close`.

    fds: open descriptors of shared files and of backings, by their ids in the layout.
    """

    layout: Layout
    fds: dict[str, int]

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds = {}


def new_export(name: str) -> CudaExport | None:
    """None without a driver that can export virtual memory."""
    try:
        return CudaExport(name, CUDA_LIBRARY)
    except CudaExportError as error:
        logger.info("hotkv: %s", error)
        return None


def cuda_memory(handle_id: str, storage: Any, export: CudaExport | None) -> MemoryHandle:
    """Raises Unsupported, with the reason, if CUDA does not share the memory.

    export: gets the descriptors if it is virtual memory, which has no IPC handle.
    """
    if export is None or not export.is_virtual(storage.data_ptr()):
        return cuda_handle(handle_id, storage)
    uuid = cuda_device_uuid(storage.device)
    try:
        return export.export(handle_id, storage.data_ptr(), storage.nbytes(), uuid)
    except CudaExportError as error:
        raise Unsupported(f"{error}; {_why_not_exported()}") from error


def cuda_handle(handle_id: str, storage: Any) -> MemoryHandle:
    """The CUDA IPC handle of the storage's allocation, and the storage's offset in it. Raises
    Unsupported, with the reason, if CUDA does not share the memory.

    Source: `_share_cuda_` of torch 2.x returns (device, handle, bytes, offset, counter file,
        counter offset, event, event is needed).
    """
    try:
        device, handle, num_bytes, offset, *counter = storage._share_cuda_()
    except RuntimeError as error:
        why = _why_not_shared(storage)
        raise Unsupported(
            f"CUDA does not share this memory with other processes ({_first_line(error)}); {why}"
        ) from error
    if counter and counter[0]:
        # torch counts a handle's users and keeps the memory until none is left. The server does
        # not use torch and would never decrease the count.
        torch.UntypedStorage._release_ipc_counter_cuda(counter[0], counter[1])
    return MemoryHandle(
        handle_id,
        num_bytes,
        offset,
        _plain_handle(bytes(handle)),
        cuda_device_uuid(torch.device("cuda", device)),
    )


def _plain_handle(handle: bytes) -> bytes:
    """CUDA's 64 bytes of torch's handle. Since torch 2.5 two bytes precede them: a version and
    the kind of memory (`c`: cudaMalloc, `e`: expandable segment). Raises Unsupported unless the
    kind is `c`."""
    if len(handle) == CUDA_HANDLE_BYTES:
        return handle
    if handle[1:2] == b"e":
        raise Unsupported(
            "the memory is a segment that can grow, and the driver's calls that export it are not "
            f"found; {UNSET_EXPANDABLE}"
        )
    if len(handle) == CUDA_HANDLE_BYTES + 2 and handle[1:2] == b"c":
        return handle[2:]
    raise Unsupported(
        f"this torch gives a handle of {len(handle)} bytes that begins with {handle[:2]!r}, "
        "which is not known"
    )


def cuda_device_uuid(device: torch.device) -> bytes:
    """16 bytes, independent of CUDA_VISIBLE_DEVICES."""
    return bytes(torch.cuda.get_device_properties(device).uuid.bytes)


def _is_expandable() -> bool:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    settings = ",".join(os.environ.get(name, "") for name in names)
    return "expandable_segments:true" in settings.lower()


def _why_not_exported() -> str:
    """PyTorch's segments are exportable unless TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC is 0; vLLM's
    cumem allocator asks for it only on devices that know fabric handles."""
    if _is_expandable():
        return f"set TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC to 1, or {UNSET_EXPANDABLE}"
    return (
        "or leave out enable_sleep_mode and enable_cumem_allocator: this vLLM's allocator makes no "
        "descriptors on this device"
    )


def _why_not_shared(storage: Any) -> str:
    if _is_expandable():
        return UNSET_EXPANDABLE
    if "MIG" in torch.cuda.get_device_name(storage.device):
        return "a MIG instance shares memory only within itself: run the server in the same one"
    return (
        "memory must come from cudaMalloc: leave out enable_sleep_mode and enable_cumem_allocator, "
        "and use no managed memory or other allocator"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# ------------------------------------------------------------------------------ where the pages lie

SHARED_MEMORY_DIR = "/dev/shm"
Dims = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LayerPages:
    """A layer's pages in the engine's memory. The page of block b starts at byte `base` + b *
    `block_stride` of the torch storage `handle_id`.

    run: contiguous bytes of each piece of a page.
    dims: (repetitions, distance in bytes) of the pieces per axis, outermost first; see
        `PageTensor`.
    """

    name: str
    handle_id: str
    base: int
    block_stride: int
    run: int
    dims: Dims

    @property
    def page_bytes(self) -> int:
        total = self.run
        for count, _ in self.dims:
            total *= count
        return total


@dataclass(slots=True)
class EngineMemoryMap:
    """Where the engine's pages are.

    tensors: of all groups, in the order of a slot.
    shard_bytes: of this rank, per group.
    storages: torch's, by handle id.
    page_format: for the key space (`_page_format`).
    """

    tensors: list[PageTensor] = field(default_factory=list)
    shard_bytes: list[int] = field(default_factory=list)
    storages: dict[str, torch.UntypedStorage] = field(default_factory=dict)
    page_format: str = ""


def describe(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: Any,
    groups: Sequence[kv_groups.CacheGroup],
) -> EngineMemoryMap:
    """Reads the layout from the registered tensors. Raises Unsupported if a layer has none, or
    if it is not where vLLM's `kv_cache_tensors` places it."""
    found = EngineMemoryMap()
    formats = []
    for index, group in enumerate(groups):
        names = kv_cache_config.kv_cache_groups[group.vllm_group].layer_names
        layers = [
            _layer_pages(name, kv_caches, kv_cache_config.num_blocks, found.storages)
            for name in names
        ]
        for layer in layers:
            _check_placement(layer, kv_cache_config)
        offset = 0
        for run in _folded(layers):
            found.tensors.append(_page_tensor(index, run, offset))
            offset += sum(layer.page_bytes for layer in run)
        found.shard_bytes.append(offset)
        pages = (_page_format(kv_caches[name], kv_cache_config.num_blocks) for name in names)
        formats.append("/".join(dict.fromkeys(pages)))
    found.page_format = ";".join(formats)
    return found


def _layer_pages(
    name: str,
    kv_caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    storages: dict[str, torch.UntypedStorage],
) -> LayerPages:
    if name not in kv_caches:
        raise Unsupported(f"layer {name} registered no KV cache")
    tensor = group_kernel_blocks(kv_caches[name], num_blocks)
    size = tensor.element_size()
    storage = tensor.untyped_storage()
    handle_id = next(
        (h for h, s in storages.items() if s.data_ptr() == storage.data_ptr()), f"kv{len(storages)}"
    )
    storages.setdefault(handle_id, storage)
    axes = sorted(
        (
            (count, stride * size)
            for count, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
            if count > 1
        ),
        key=lambda axis: -axis[1],
    )
    run = size
    while axes and axes[-1][1] == run:
        run *= axes.pop()[0]
    return LayerPages(
        name, handle_id, tensor.storage_offset() * size, tensor.stride(0) * size, run, tuple(axes)
    )


def _page_format(tensor: torch.Tensor, num_blocks: int) -> str:
    """A page's axes in physical order, each a letter with its size, then the bytes of an
    element: `H4N32C256:2` for 4 heads, 32 tokens, 256 channels of two bytes.
    """
    tensor = group_kernel_blocks(tensor, num_blocks)
    letters = "KHNC" if tensor.dim() == 5 else "HNC" if tensor.dim() == 4 else "XYZW"
    axes = sorted(
        zip(tensor.stride()[1:], letters, tensor.shape[1:], strict=False), key=lambda axis: -axis[0]
    )
    return (
        "".join(f"{letter}{count}" for _, letter, count in axes if count > 1)
        + f":{tensor.element_size()}"
    )


def _check_placement(layer: LayerPages, kv_cache_config: Any) -> None:
    """Raises Unsupported if tensor and placement differ: this module misunderstands one of them."""
    for placed in kv_cache_config.kv_cache_tensors:
        if layer.name in placed.layers:
            base = placed.offset + placed.layers.index(layer.name) * placed.layer_stride
            if (base, placed.block_stride) != (layer.base, layer.block_stride):
                raise Unsupported(
                    f"layer {layer.name} lies at byte {layer.base} with block stride "
                    f"{layer.block_stride}, "
                    f"but vLLM's placement says {base} and {placed.block_stride}"
                )
            return
    raise Unsupported(f"layer {layer.name} has no place in vLLM's kv_cache_tensors")


def _folded(layers: Sequence[LayerPages]) -> list[list[LayerPages]]:
    """Runs of consecutive layers that one `PageTensor` describes: pages of one shape at equal
    distances."""
    runs: list[list[LayerPages]] = []
    for layer in layers:
        span = layer.run + sum((count - 1) * stride for count, stride in layer.dims)
        last = runs[-1] if runs else []
        if last and replace(last[0], name=layer.name, base=layer.base) == layer:
            distance = layer.base - last[-1].base
            if distance >= span and (len(last) == 1 or distance == last[1].base - last[0].base):
                last.append(layer)
                continue
        runs.append([layer])
    return runs


def _page_tensor(group_index: int, run: Sequence[LayerPages], shard_offset: int) -> PageTensor:
    first = run[0]
    dims = first.dims
    if len(run) > 1:
        dims = ((len(run), run[1].base - first.base), *dims)
    return PageTensor(
        group_index=group_index,
        handle_id=first.handle_id,
        base_offset_bytes=first.base,
        block_stride_bytes=first.block_stride,
        run_bytes=first.run,
        shard_offset_bytes=shard_offset,
        dims=dims,
        layer_names=tuple(layer.name for layer in run),
    )


def export(found: EngineMemoryMap, num_blocks: int, shard_index: int, name: str) -> ExportedMemory:
    """Exports for reading and writing. Raises Unsupported if that is impossible; the engine's
    tensors stay usable.

    name: vLLM's name of the layout, for the server's log.
    """
    handles: list[MemoryHandle] = []
    with contextlib.ExitStack() as undo:
        fds: dict[str, int] = {}
        virtual = new_export("backing") if _on_cuda(found) else None
        if virtual is not None:
            undo.callback(virtual.close)
        for handle_id, storage in found.storages.items():
            if storage.device.type == "cpu":
                fds[handle_id] = _share_cpu(storage)
                undo.callback(os.close, fds[handle_id])
                handles.append(MemoryHandle(handle_id, storage.nbytes()))
            elif storage.device.type == "cuda":
                handles.append(cuda_memory(handle_id, storage, virtual))
            else:
                raise Unsupported(
                    f"KV cache on device {storage.device.type} can't be shown to the server"
                )
        memory = ExportedMemory(
            Layout(shard_index, num_blocks, tuple(handles), tuple(found.tensors), name),
            {**fds, **(virtual.fds if virtual is not None else {})},
        )
        undo.pop_all()
    return memory


def _on_cuda(found: EngineMemoryMap) -> bool:
    return any(storage.device.type == "cuda" for storage in found.storages.values())


def _share_cpu(storage: torch.UntypedStorage) -> int:
    """Moves a CPU storage into an unlinked shared file; tensors over it stay valid. Returns a
    descriptor that the caller must close. Raises Unsupported if /dev/shm has too little room, or
    if torch's file is too small."""
    share = getattr(storage, "_share_fd_cpu_", None)
    if share is None:
        raise Unsupported("this torch can't move a CPU tensor to shared memory")
    if not storage.is_shared():
        free = os.statvfs(SHARED_MEMORY_DIR)
        if free.f_bavail * free.f_frsize < storage.nbytes() * 1.02:
            raise Unsupported(
                f"{SHARED_MEMORY_DIR} has {free.f_bavail * free.f_frsize >> 20} MiB left, the KV "
                f"cache needs {storage.nbytes() >> 20} MiB"
            )
    fd, size = share()
    if size < storage.nbytes():
        raise Unsupported(f"the shared file has {size} bytes, the KV cache {storage.nbytes()}")
    return os.dup(fd)


# ------------------------------------------------------------------------------ a rank's own memory


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """memory: None if it can't be exported; the note says why.
    groups: those that hotkv stores.
    """

    note: RankNote
    memory: ExportedMemory | None = None
    groups: tuple[kv_groups.CacheGroup, ...] = ()
    device: Any = None


def find_own(
    kv_caches: Mapping[str, Any],
    vllm_config: Any,
    kv_cache_config: Any,
    config: ConnectorConfig,
    place: checks.RankPlace,
    known_space: KeySpace | None,
    earlier: tuple[str, ...],
    reading: "Future[str]",
) -> OwnMemory:
    """Describes and exports this rank's KV memory. Never raises, because the other ranks wait for
    this rank's note, which says why it can't take part.

    known_space: this rank's key space from before a sleep; None to compute it.
    earlier: connectors that have registered the tensors before (`checks.earlier_connectors`).
    reading: identity of the weights; awaited for READ_WAIT_S.
    """
    host = this_host()
    try:
        reuse.check_reuse(vllm_config, kv_cache_config)
        groups = kv_groups.cache_groups(vllm_config, kv_cache_config)
        found = describe(kv_caches, kv_cache_config, groups)
        if not found.storages:
            raise Unsupported(f"pipeline stage {place.stage} has no layer with a KV cache")
        device = next(iter(found.storages.values())).device
        checks.check_earlier(earlier, device.type)
        packing = key_space.packing(vllm_config, kv_cache_config, groups, device.type)
        page_format = f"{found.page_format};{packing}"
        # A key space allows no size of 0. `ranks.decide` replaces all sizes when the ranks
        # agree.
        sizes = tuple(size or 1 for size in found.shard_bytes)
        identity = model_weights.read_by(reading, READ_WAIT_S)
        space = known_space or key_space.key_space(
            vllm_config, kv_cache_config, config, groups, sizes, 1, page_format, identity
        )
        space = replace(space, weights_identity=identity)
        name = str(getattr(kv_cache_config, "kv_cache_layout", "") or "")
        memory = export(found, kv_cache_config.num_blocks, place.shard_index, name)
        if memory.layout.backing_ids and not checks.tells_of_sleep(vllm_config):
            memory.close()
            raise Unsupported(
                "this vLLM unmaps the memory for a sleep and does not tell its connector, as 0.33 "
                "does: leave out enable_sleep_mode, or take vLLM 0.33"
            )
    except (Unsupported, OSError, ValueError) as error:
        return OwnMemory(RankNote(place, host, None, why_off=str(error) or type(error).__name__))
    except Exception as error:  # noqa: BLE001 - a rank that raised would leave the others waiting
        logger.exception("hotkv: the KV cache's layout can't be read")
        return OwnMemory(RankNote(place, host, None, why_off=f"{type(error).__name__}: {error}"))
    return OwnMemory(RankNote(place, host, space, tuple(found.shard_bytes)), memory, groups, device)
