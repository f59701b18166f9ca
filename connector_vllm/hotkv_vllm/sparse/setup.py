"""Puts sparse attention into an engine's layers, once, when vLLM registers its KV caches."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotkv import native
from hotkv.sparse import SparseConfig
from hotkv_vllm import compat, link
from hotkv_vllm.layout import key_packing, unpacked_keys
from hotkv_vllm.sparse.pool import LayerShape
from hotkv_vllm.sparse.worker import SparseLayer, SparseWorker

logger = link.logger


def install(
    config: SparseConfig, recall_steps: int, vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]
) -> SparseWorker:
    """Attaches a worker to all layers that may be sparse. Raises compat.Unsupported where there are none."""
    from hotkv_vllm.sparse.backend import HotAttentionImpl

    layers, impls = [], []
    for layer in compat.full_attention_layers(vllm_config, kv_cache_config):
        if layer.index in config.dense_layers:
            continue
        if not isinstance(layer.impl, HotAttentionImpl):
            raise compat.Unsupported(
                f"layer {layer.name} has attention of type {type(layer.impl).__name__}; hotkv announces its own to vLLM by an entry point: "
                "install hotkv again, and name it where VLLM_PLUGINS is set"
            )
        layers.append(_sparse_layer(config, layer, kv_caches[layer.name], kv_cache_config.num_blocks))
        impls.append(layer.impl)
    if not layers:
        raise compat.Unsupported("the model has no layer of plain full attention beside dense_layers")
    # Before the first request: numba takes a second to load and some kernels to compile.
    native.load("hotkv.sparse.kernels")
    worker = SparseWorker(config, layers, recall_steps)
    for impl, sparse_layer in zip(impls, layers, strict=True):
        impl.attach(worker, sparse_layer)
    logger.info("hotkv: sparse decode in %d layers, from %d tokens on, %r", len(layers), config.min_context_tokens, config)
    return worker


def _sparse_layer(config: SparseConfig, layer: compat.AttentionLayer, pages: torch.Tensor, num_blocks: int) -> SparseLayer:
    heads, block_tokens, width = pages.shape[1:]
    if len(pages) != num_blocks or block_tokens != layer.block_tokens:
        raise compat.Unsupported(f"layer {layer.name} splits its blocks of {layer.block_tokens} tokens into smaller ones")
    head_size = width // 2
    packing = key_packing(block_tokens, head_size, pages.dtype, layer.isa)

    def keys_of(blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        keys: npt.NDArray[np.float32] = unpacked_keys(pages, torch.from_numpy(blocks), packing).numpy()
        return keys

    sinks = layer.impl.sinks
    return SparseLayer(
        layer.name,
        layer.index,
        layer.group,
        LayerShape(num_blocks, block_tokens, heads, head_size, tuple(config.scorers_of(layer.index))),
        layer.impl.scale,
        keys_of,
        None if sinks is None else sinks.detach().float().numpy(),
    )
