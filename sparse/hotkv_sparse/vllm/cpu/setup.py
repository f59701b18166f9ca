"""Installs sparse attention in the layers of a CPU engine, once, when vLLM registers its KV
caches."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotkv_proto import native
from hotkv_sparse import SparseConfig
from hotkv_sparse.centre import Centres
from hotkv_sparse.formats import needs_axes, token_scorer
from hotkv_sparse.vllm import attention_layers, block_manager
from hotkv_sparse.vllm.cpu.batch import SparseLayer
from hotkv_sparse.vllm.cpu.first_prompt import NO_TURNING, Turning
from hotkv_sparse.vllm.cpu.key_pages import KeyFormat, KeyPages, key_packing
from hotkv_sparse.vllm.cpu.pool import LayerShape
from hotkv_sparse.vllm.cpu.resident_pages import slot_places
from hotkv_sparse.vllm.cpu.resident_worker import ResidentWorker
from hotkv_sparse.vllm.cpu.worker import SparseWorker
from hotkv_sparse.vllm.settings import CENTRE
from hotkv_vllm import link
from hotkv_vllm.compat import Unsupported, checks

logger = link.logger


def install(
    config: SparseConfig,
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    centres: Centres | None = None,
) -> SparseWorker:
    """Attaches a worker to all layers that may attend sparsely. Raises Unsupported if there is
    none, or if this CPU lacks the compiled kernels."""
    if not native.available():
        raise Unsupported(native.why_unavailable())
    from hotkv_sparse.vllm.cpu.backend import HotAttentionImpl

    place = checks.rank_place(vllm_config, kv_cache_config)
    layers, impls = [], []
    found = [
        layer
        for layer in attention_layers.full_attention_layers(vllm_config, kv_cache_config)
        if layer.index not in config.dense_layers
    ]
    config, turning = _calibrating(config, found, vllm_config, centres)
    for layer in found:
        if not isinstance(layer.impl, HotAttentionImpl):
            raise Unsupported(
                f"layer {layer.name} has attention of type {type(layer.impl).__name__}; hotkv "
                "announces its own to vLLM by an entry point: "
                "install hotkv again, and name it where VLLM_PLUGINS is set"
            )
        layers.append(
            _sparse_layer(
                config,
                layer,
                kv_caches[layer.name],
                vllm_config.model_config.dtype,
                kv_cache_config.num_blocks,
                place.shard_index,
                centres,
            )
        )
        impls.append(layer.impl)
    if not layers:
        raise Unsupported("the model has no layer of plain full attention beside dense_layers")
    # Before the first request: numba takes a second to load kernels, and longer to compile them.
    native.require("hotkv_sparse.all_kernels")
    most_drafts = int(vllm_config.num_speculative_tokens)
    worker = SparseWorker(config, layers, turning, most_drafts=most_drafts)
    if config.residency != "off":
        names = block_manager.resident_layers(kv_cache_config)
        spots = slot_places(layers, names, place.shard_index)
        longest = -(-vllm_config.model_config.max_model_len // layers[0].shape.block_tokens)
        worker = ResidentWorker(config, layers, spots, turning, longest, most_drafts=most_drafts)
    for impl, sparse_layer in zip(impls, layers, strict=True):
        impl.attach(worker, sparse_layer)
    logger.info(
        "hotkv: sparse decode in %d layers, from %d tokens on, %r",
        len(layers),
        config.min_context_tokens,
        config,
    )
    return worker


def _calibrating(
    config: SparseConfig,
    layers: list[attention_layers.AttentionLayer],
    vllm_config: Any,
    centres: Centres | None,
) -> tuple[SparseConfig, Turning]:
    """With what layers calibrate themselves; NO_TURNING if none does. With `rot2u` in place of
    `mix2` if one does, and it is not known how positions rotate its keys."""
    sizes = {
        layer.impl.head_size
        for layer in layers
        if any(map(needs_axes, config.scorers_of(layer.index)))
        and (centres is None or centres.axes(layer.index) is None)
    }
    if not sizes:
        return config, NO_TURNING
    known = attention_layers.rope_frequencies(sizes.pop()) if len(sizes) == 1 else None
    if known is not None:
        return config, Turning(known, int(vllm_config.model_config.max_model_len))
    logger.warning(
        "hotkv: mix2 can't calibrate itself with this model, since it is not known how positions "
        "turn its keys; rot2u takes its place. For mix2 calibrate once, and name the file in %s",
        CENTRE,
    )
    fusion = {"rot2u" if needs_axes(one) else one: share for one, share in config.fusion.items()}
    return replace(config, scorer="rot2u", fusion=fusion), NO_TURNING


def _sparse_layer(
    config: SparseConfig,
    layer: attention_layers.AttentionLayer,
    pages: torch.Tensor,
    dtype: torch.dtype,
    num_blocks: int,
    shard: int,
    centres: Centres | None,
) -> SparseLayer:
    heads, block_tokens, width = pages.shape[1:]
    if len(pages) != num_blocks or block_tokens != layer.block_tokens:
        raise Unsupported(
            f"layer {layer.name} splits its blocks of {layer.block_tokens} tokens into smaller ones"
        )
    head_size = width // 2
    packing = key_packing(block_tokens, head_size, dtype, layer.isa, layer.impl.kv_cache_dtype)
    stored = attention_layers.stored_dtype(pages.dtype, layer.impl.kv_cache_dtype)
    sinks = layer.impl.sinks
    names = tuple(config.scorers_of(layer.index))
    mu_HD, biases = centre_of(layer.index, names, shard * heads, heads, centres)
    axes = None if centres is None else centres.axes(layer.index)
    if axes is not None:
        axes = axes.heads(shard * heads, heads)
    return SparseLayer(
        layer.name,
        layer.index,
        layer.group,
        LayerShape(num_blocks, block_tokens, heads, head_size, names, mu_HD, biases, axes),
        layer.impl.scale,
        KeyPages(pages, KeyFormat(packing, stored, partial(_key_scale, layer.module))),
        None if sinks is None else sinks.detach().float().numpy(),
    )


def _key_scale(layer: Any) -> float:
    return float(getattr(layer, "_k_scale_float", 1.0))


def centre_of(
    layer: int, names: tuple[str, ...], first_head: int, heads: int, centres: Centres | None
) -> tuple[npt.NDArray[np.float32] | None, dict[str, float]]:
    """A layer's centre for a rank's heads, float32 [heads, channels], and the biases measured with
    it, by format. None and no biases if the layer has no centre.

    first_head: the rank's first KV head in the model.
    """
    mu_HD = centres.mu(layer) if centres is not None else None
    if centres is None or mu_HD is None:
        return None, {}
    found = {name: centres.bias(layer, name) for name in names if token_scorer(name)}
    return np.ascontiguousarray(mu_HD[first_head : first_head + heads]), {
        name: bias for name, bias in found.items() if bias is not None
    }
