"""An engine's key space."""

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
    """Raises Unsupported if a part can't be determined.

    shard_bytes: of this rank, per group; the result states them for all ranks.
    page_format: identifies how the bytes of a page are arranged.
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
    """For a local folder the architecture: engines share KV whatever the folder's name."""
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
    """Raises Unsupported if each process draws its own: no other engine could find the blocks."""
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
    """Identifies how K and V are packed inside a page: attention backends, quantization, on CPU
    the instruction set."""
    parts = []
    for group in groups:
        names = kv_cache_config.kv_cache_groups[group.vllm_group].layer_names
        if not names:
            # Its layers are in another pipeline stage.
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
                # The setting does not determine the format: GPUs write e4m3fn or e4m3fnuz, and
                # some layers write FP8 as bytes whatever the setting (DeepSeek V3.2's indexer).
                parts.append(str(current_platform.fp8_dtype()).removeprefix("torch."))
            if device_type == "cpu" and hasattr(spec, "head_size"):
                parts.append(_isa(vllm_config, spec))
    return "+".join(dict.fromkeys(parts))


def _backend_name(vllm_config: Any, layer_name: str) -> str:
    """With class and code if a plugin's: plugins may use one name."""
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
