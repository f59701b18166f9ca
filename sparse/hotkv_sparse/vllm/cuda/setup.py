"""Installs residency in the layers of a CUDA engine, once, when vLLM registers its KV caches.

All device memory is allocated here, before vLLM captures graphs: tables of hot sets, sketches of
`hotkv.sketch_tokens` tokens, and a staging area for one layer's pages of the longest context.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotkv_client.arena import Arena
from hotkv_sparse import SparseConfig
from hotkv_sparse.centre import Centres
from hotkv_sparse.cuda.device import Array, Device, Host
from hotkv_sparse.cuda.hotsets import CudaHotSets, Fragment
from hotkv_sparse.cuda.index import Index, IndexShape, Pages
from hotkv_sparse.cuda.mapped_arena import MappedArena
from hotkv_sparse.cuda.residents import PagePlaces, Residents
from hotkv_sparse.cuda.selector import CudaSelector
from hotkv_sparse.cuda.workspace import StepShape, Workspace
from hotkv_sparse.vllm import attention_layers, block_manager
from hotkv_sparse.vllm.cpu.setup import centre_of
from hotkv_sparse.vllm.cuda.torch_device import TorchDevice
from hotkv_sparse.vllm.cuda.worker import CudaLayer, CudaWorker
from hotkv_sparse.vllm.worker.totals import Totals
from hotkv_vllm import link
from hotkv_vllm.compat import Unsupported, checks

logger = link.logger


def install(
    config: SparseConfig,
    sketch_tokens: int,
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    centres: Centres | None = None,
    device: Device | None = None,
) -> CudaWorker:
    """Attaches a worker to all layers. Raises Unsupported, with the reason, if a layer can't attend
    to blocks that are only in host memory.

    device: None for the device of `kv_caches`.
    """
    from hotkv_sparse.vllm.cuda.backend import HotFlashImpl

    found = attention_layers.full_attention_layers(vllm_config, kv_cache_config)
    names = block_manager.resident_layers(kv_cache_config)
    if not names or len(found) != len(names):
        raise Unsupported("not all layers are of plain full attention, so contexts can't be freed")
    for one in found:
        why = _why_not(one.impl, isinstance(one.impl, HotFlashImpl))
        if why:
            raise Unsupported(f"layer {one.name} {why}")
    first = kv_caches[found[0].name]
    if device is None:
        device = TorchDevice(first.device)
        device.compile()
    place = checks.rank_place(vllm_config, kv_cache_config)
    page_bytes = {name: _page_bytes(kv_caches[name]) for name in names}
    shard_bytes = sum(page_bytes.values())
    offsets, at = {}, place.shard_index * shard_bytes
    for name in names:
        offsets[name] = at
        at += page_bytes[name]
    heads, block_tokens, width = first.shape[1:]
    sizes = (heads, block_tokens, width // 2)
    num_heads = found[0].impl.num_heads
    workspace = _workspace(config, vllm_config, kv_cache_config, num_heads, sizes, device)
    num_rows = -(-sketch_tokens // workspace.shape.block_tokens)
    layers = [
        _layer(
            config, workspace, one, kv_caches[one.name], offsets[one.name], num_rows, place, centres
        )
        for one in found
    ]
    staging = torch.empty(
        (workspace.shape.max_blocks, *first.shape[1:]), dtype=first.dtype, device=first.device
    )
    staging = staging.as_strided(staging.shape, first.stride())
    number = first.device.index or 0

    def device_arena(arena: Arena) -> MappedArena:
        return MappedArena(
            arena.memory, number, is_writable=arena.is_writable, memory_end=arena.memory_end
        )

    worker = CudaWorker(
        workspace,
        layers,
        num_rows,
        place.num_shards * shard_bytes,
        not vllm_config.use_v2_model_runner,
        device_arena,
        staging,
    )
    for one, layer in zip(found, layers, strict=True):
        one.impl.attach(worker, layer)
    logger.warning(
        "hotkv: contexts beyond device memory on CUDA, in %d layers: such engines have run on one "
        "GPU only, for minutes. %r",
        len(layers),
        config,
    )
    return worker


def _why_not(impl: Any, is_ours: bool) -> str:
    """Why a layer can't have residency; empty if it can.

    is_ours: `impl` is a `HotFlashImpl`.
    """
    if not is_ours:
        return (
            f"has attention of type {type(impl).__name__}; hotkv has a backend for FLASH_ATTN "
            "only: set attention_backend to FLASH_ATTN"
        )
    if impl.logits_soft_cap:
        return "caps its logits, which sketches don't know"
    if impl.fa4_hd256:
        return "uses FlashAttention 4's kernel for heads of 256, which takes tables of one width"
    return ""


def _page_bytes(pages: torch.Tensor) -> int:
    """Raises Unsupported unless the layer's pages are contiguous and lie side by side."""
    size = pages[0].numel() * pages.element_size()
    if pages.dim() != 4 or pages.stride(0) * pages.element_size() != size:
        raise Unsupported(
            f"pages are {list(pages.shape)} with strides {list(pages.stride())}; each layer's must "
            "lie side by side"
        )
    return size


class _Counter:
    """A `Device` that only counts the bytes that its callers would allocate, for `totals`."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        self.num_bytes += int(np.prod(shape)) * np.dtype(dtype).itemsize
        return _Shaped(shape)

    def write(self, target: Array, start: Sequence[int], values: Host) -> None: ...

    def read(self, source: Array) -> Host:
        raise NotImplementedError

    def launch(self, *_: object, **__: object) -> None: ...


@dataclass(frozen=True, slots=True)
class _Shaped:
    shape: Sequence[int]


def totals(
    config: SparseConfig, sketch_tokens: int, vllm_config: Any, kv_cache_config: Any
) -> Totals:
    """Bytes of vLLM's KV pool and of all that `install` would allocate, counted without
    allocating."""
    spec = block_manager.resident_spec(kv_cache_config)
    assert spec is not None, "not a resident engine"
    num_heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
    num_layers = len(block_manager.resident_layers(kv_cache_config))
    device = _Counter()
    sizes = (spec.num_kv_heads, spec.block_size, spec.head_size)
    workspace = _workspace(config, vllm_config, kv_cache_config, num_heads, sizes, device)
    num_rows = -(-sketch_tokens // spec.block_size)
    tables = device.num_bytes + 4 * workspace.shape.max_blocks
    sketches, nowhere = 0, Pages(0, "bfloat16", 1, 1, 1)
    for layer in range(num_layers):
        (name,) = config.scorers_of(layer)
        device.num_bytes = 0
        index = _index(workspace, name, num_rows, None, None)
        sketches += device.num_bytes
        device.num_bytes = 0
        hot = CudaHotSets(workspace, [Fragment(0, 0, 1)], 1)
        CudaSelector(workspace, layer, index, nowhere, nowhere, hot)
        tables += device.num_bytes
    return Totals(
        int(kv_cache_config.num_blocks)
        * block_manager.layers_in_pool(kv_cache_config)
        * spec.page_size_bytes,
        sketches,
        0,
        workspace.shape.max_blocks * spec.page_size_bytes,
        tables,
    )


def free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0])


def _workspace(
    config: SparseConfig,
    vllm_config: Any,
    kv_cache_config: Any,
    num_heads: int,
    sizes: tuple[int, int, int],
    device: Device,
) -> Workspace:
    """sizes: number of KV heads, tokens of a block, channels of a head."""
    heads, block_tokens, head_size = sizes
    scheduler = vllm_config.scheduler_config
    num_rows = max(
        scheduler.max_num_seqs, vllm_config.compilation_config.max_cudagraph_capture_size or 0
    )
    max_blocks = -(-vllm_config.model_config.max_model_len // block_tokens)
    slots = block_manager.hot_blocks(config, block_tokens)
    shape = StepShape(
        num_rows,
        max_blocks,
        block_tokens,
        num_heads,
        heads,
        head_size,
        slots,
        max_prefetch=0,
        num_states=scheduler.max_num_seqs,
    )
    residents = Residents(
        device,
        config,
        num_rows,
        shape.states,
        max_blocks,
        block_tokens,
        kv_cache_config.num_blocks,
        scheduler.max_num_batched_tokens,
    )
    return Workspace(device, config, shape, residents)


def _index(
    workspace: Workspace,
    name: str,
    num_rows: int,
    mu_HD: npt.NDArray[np.float32] | None,
    bias: float | None,
) -> Index:
    shape = IndexShape(
        name, workspace.shape.kv_heads, workspace.shape.head_size, workspace.shape.block_tokens
    )
    return Index(workspace.device, shape, num_rows, mu_HD, bias)


def _layer(
    config: SparseConfig,
    workspace: Workspace,
    layer: attention_layers.AttentionLayer,
    pages: torch.Tensor,
    offset: int,
    num_rows: int,
    place: checks.RankPlace,
    centres: Centres | None,
) -> CudaLayer:
    shape = workspace.shape
    if pages.shape[2] != layer.block_tokens:
        raise Unsupported(f"layer {layer.name} splits its blocks into smaller ones")
    (name,) = config.scorers_of(layer.index)
    first_head = place.shard_index * shape.kv_heads
    mu_HD: npt.NDArray[np.float32] | None
    mu_HD, biases = centre_of(layer.index, (name,), first_head, shape.kv_heads, centres)
    index = _index(workspace, name, num_rows, mu_HD, biases.get(name))
    page_bytes = _page_bytes(pages)
    # The selector reads only keys: vLLM's kernel computes the attention.
    keys = _keys(layer, pages)
    sinks = layer.impl.sinks
    fragment = Fragment(offset, pages.data_ptr(), page_bytes)
    hot = CudaHotSets(workspace, [fragment], page_bytes)
    return CudaLayer(
        layer.name,
        layer.impl.scale,
        CudaSelector(
            workspace,
            layer.index,
            index,
            keys,
            keys,
            hot,
            None if sinks is None else (sinks, _name_of(sinks.dtype)),
        ),
        PagePlaces(pages.data_ptr(), page_bytes, offset),
        pages,
        getattr(layer.module, "_q_scale", None),
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _keys(layer: attention_layers.AttentionLayer, pages: torch.Tensor) -> Pages:
    """Raises Unsupported if there is neither one scale nor one for each KV head."""
    stored = attention_layers.stored_dtype(pages.dtype, layer.impl.kv_cache_dtype)
    strides = pages.stride(0), pages.stride(2), pages.stride(1)
    if stored.itemsize > 1:
        return Pages(pages.data_ptr(), _name_of(stored), *strides)
    scales, heads = layer.module._k_scale, pages.shape[1]
    if scales.dtype != torch.float32 or scales.numel() not in (1, heads):
        raise Unsupported(
            f"layer {layer.name} has {scales.numel()} scales of keys for {heads} KV heads"
        )
    return Pages(
        pages.data_ptr(), _name_of(stored), *strides, scales, int(scales.numel() == heads > 1)
    )
