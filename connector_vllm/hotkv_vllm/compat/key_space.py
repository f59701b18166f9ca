"""Computes the key space of an engine: the identity of everything that decides the bytes of a
block.

Parts of vLLM that this module reads: the model's name and dtype,
`CacheConfig.prefix_caching_hash_algo` and `cache_dtype`, the parallel sizes,
`KVCacheConfig.hash_block_size`, and through `fingerprint` every field of every config object. How K
and V are packed comes from the attention backend of each layer in `static_forward_context`, from
`current_platform`, and on CPU from `_get_attn_isa`.
"""

from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import iter_layer_specs

from hotkv_proto.groups import GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_vllm.compat import Unsupported
from hotkv_vllm.compat.fingerprint import key_space_factors
from hotkv_vllm.compat.foreign_code import named
from hotkv_vllm.compat.kv_groups import CacheGroup, layer_specs
from hotkv_vllm.compat.model_weights import hub_snapshot
from hotkv_vllm.config import ConnectorConfig


def key_space(
    vllm_config: Any,
    kv_cache_config: Any,
    config: ConnectorConfig,
    groups: tuple[CacheGroup, ...],
    shard_bytes: tuple[int, ...],
    num_shards: int,
    page_format: str,
    weights_identity: str,
) -> KeySpace:
    """Returns the engine's key space. Raises Unsupported if a part of it can't be determined.

    config: hotkv's settings.
    groups: the groups that hotkv stores.
    shard_bytes: bytes of this rank's shard (part) of a block, per group. The returned key space
        states this size for the shards of all ranks.
    num_shards: number of shards of a block.
    page_format: a text that identifies how the engine arranges the bytes of a page (of one block in
        one layer).
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    algorithm = cache.prefix_caching_hash_algo
    names = [tuple(kv_cache_config.kv_cache_groups[g.vllm_group].layer_names) for g in groups]
    return KeySpace(
        model=_model_name(model),
        weights_identity=weights_identity,
        dtype=str(model.dtype).removeprefix("torch."),
        groups=tuple(
            GroupSpec(
                group.kind,
                group.block_tokens,
                (size,) * num_shards,
                group.window_tokens,
                layer_names,
            )
            for group, size, layer_names in zip(groups, shard_bytes, names, strict=True)
        ),
        hash_block_tokens=kv_cache_config.hash_block_size or groups[0].block_tokens,
        kv_dtype=str(cache.cache_dtype),
        hash_algorithm=algorithm,
        hash_seed=_hash_seed(algorithm),
        hash_bytes=len(get_hash_fn_by_name(algorithm)("hotkv")),
        parallel_shape=f"tp={parallel.tensor_parallel_size},pp={parallel.pipeline_parallel_size},"
        f"dcp={parallel.decode_context_parallel_size}",
        page_format=page_format,
        tenant=config.tenant,
        extra=key_space_factors(vllm_config, layer_specs(kv_cache_config)),
    )


def _model_name(model: Any) -> str:
    """Returns a readable name of the model. For a model in a local folder this is the model's
    architecture, because engines share KV even if their folders have different names."""
    if snapshot := hub_snapshot(str(model.model)):
        return snapshot[0]
    if not Path(model.model).exists():
        return str(model.model)
    return str(
        next(
            iter(getattr(model.hf_config, "architectures", None) or ()), model.hf_config.model_type
        )
    )


def _hash_seed(algorithm: str) -> str:
    """Returns the seed of the engine's block hashes. Raises Unsupported if each process of vLLM
    draws its own seed, because no other engine could then find the blocks."""
    hash_function = get_hash_fn_by_name(algorithm)
    seed: str = resolve_none_hash_seed(hash_function)
    if seed != resolve_none_hash_seed(hash_function):
        raise Unsupported(
            f"prefix_caching_hash_algo {algorithm} draws a seed per process; set PYTHONHASHSEED, "
            "or use sha256"
        )
    return seed


def packing(
    vllm_config: Any, kv_cache_config: Any, groups: tuple[CacheGroup, ...], device_type: str
) -> str:
    """Returns a text that identifies how the engine packs K and V inside a page (the bytes of one
    block in one layer): the attention backends, the quantization, and on CPU the instruction set.
    """
    parts = []
    for group in groups:
        names = kv_cache_config.kv_cache_groups[group.vllm_group].layer_names
        if not names:
            # Skips a group without layers on this rank: its layers are in another pipeline stage.
            continue
        parts += [_backend_name(vllm_config, name) for name in names]
        for spec in iter_layer_specs(
            kv_cache_config.kv_cache_groups[group.vllm_group].kv_cache_spec
        ):
            quant = getattr(spec, "kv_quant_mode", None)
            if quant:
                parts.append(f"quant={quant}")
            if (
                quant
                or "fp8" in str(vllm_config.cache_config.cache_dtype)
                or getattr(spec, "dtype", None) == torch.uint8
            ):
                # Adds the exact FP8 format, because the setting does not determine it: some GPUs of
                # a platform write e4m3fn, other GPUs e4m3fnuz. Some layers write FP8 as bytes,
                # whatever the setting (the indexer of DeepSeek V3.2).
                parts.append(str(current_platform.fp8_dtype()).removeprefix("torch."))
            if device_type == "cpu" and hasattr(spec, "head_size"):
                parts.append(_isa(vllm_config, spec))
    return "+".join(dict.fromkeys(parts))


def _backend_name(vllm_config: Any, layer_name: str) -> str:
    """Returns the name of a layer's attention backend, and its class and code too if the class is a
    plugin's, because any plugin's backend may have the same name."""
    layer = vllm_config.compilation_config.static_forward_context.get(layer_name)
    backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
    if backend is None:
        return "unknown"
    name, foreign = str(backend.get_name()), named(backend)
    return f"{name}={foreign}" if foreign else name


def _isa(vllm_config: Any, spec: Any) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(
        vllm_config.model_config.dtype,
        spec.block_size,
        spec.head_size,
        vllm_config.cache_config.cache_dtype,
    )
    return f"{isa}/{torch.backends.cpu.get_cpu_capability()}"
