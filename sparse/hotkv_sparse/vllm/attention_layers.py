"""Which layers can attend sparsely, whether sparse decode can work in an engine, and hotkv's
attention backends in place of vLLM's."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_cache_interface import KVCacheSpecKind, get_kv_cache_spec_kind

from hotkv_proto.errors import HotKVError
from hotkv_sparse import SparseConfig
from hotkv_sparse.centre import Centres
from hotkv_sparse.formats import format_named
from hotkv_sparse.vllm import block_manager
from hotkv_sparse.vllm.settings import ALLOW_CUDA, CENTRE, SPARSE
from hotkv_vllm.compat import reuse
from hotkv_vllm.compat.fingerprint import WITHOUT_OWN_KV
from hotkv_vllm.config import ConfigError, flat

# ------------------------------------------------------------------------------------- which layers


def override_cpu_attention(class_path: str) -> None:
    """Unless another plugin has replaced vLLM's backend."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CPU_ATTN.is_overridden():
        register_backend(AttentionBackendEnum.CPU_ATTN, class_path)


def override_cuda_attention(class_path: str) -> None:
    """As `override_cpu_attention`, for FlashAttention; without residency it behaves as vLLM's
    own (`cuda.backend`)."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.FLASH_ATTN.is_overridden():
        register_backend(AttentionBackendEnum.FLASH_ATTN, class_path)


def check_sparse(vllm_config: Any, kv_cache_config: Any, config: SparseConfig) -> None:
    """Raises ConfigError if sparse decode can't work here, or its settings don't suit the model."""
    parallel = vllm_config.parallel_config
    device = vllm_config.device_config.device_type
    why = ""
    if device != "cpu":
        why = cuda_refusal(vllm_config, config)
    if why:
        raise ConfigError(f"{SPARSE}: {why}; or leave out {SPARSE}")
    drafter = vllm_config.speculative_config
    if drafter is not None and device != "cpu":
        why = "on CUDA it does not work with speculative decoding; leave out speculative_config"
    elif drafter is not None and drafter.method not in WITHOUT_OWN_KV:
        why = (
            f"a drafter with KV of its own ({drafter.method}) would draft from sparse attention; "
            f"use one of {', '.join(sorted(WITHOUT_OWN_KV))}"
        )
    elif (cache_dtype := str(vllm_config.cache_config.cache_dtype)) not in _CACHE_DTYPES:
        why = (
            f"it can't read the keys of kv_cache_dtype {cache_dtype}; use one of "
            f"{', '.join(sorted(_CACHE_DTYPES))}"
        )
    elif parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        why = "it does not work with pipeline or context parallelism"
    else:
        # A long context's blocks are stored and loaded like those of a shared prefix.
        why = reuse.why_forbidden(vllm_config, kv_cache_config)
    if why:
        raise ConfigError(f"{SPARSE}: {why}; or leave out {SPARSE}")
    if config.residency != "off":
        block_manager.check_residency(vllm_config, kv_cache_config, config)
    try:
        for _, block_tokens in sparse_groups(kv_cache_config):
            config.check(vllm_config.model_config.get_total_num_hidden_layers(), block_tokens)
    except HotKVError as error:
        raise ConfigError(f"hotkv.{error.message}") from None


def cuda_refusal(vllm_config: Any, config: SparseConfig) -> str:
    """Why an engine that is not on CPUs can't decode sparsely; empty if it can."""
    device = vllm_config.device_config.device_type
    if device != "cuda" or config.residency == "off":
        return (
            f"with residency = {config.residency!r} it works in CPU engines only, and this one "
            f"runs on {device}; on CUDA set {SPARSE}.residency to 'auto' or 'host'"
        )
    extra = flat(vllm_config.kv_transfer_config.kv_connector_extra_config)
    if extra.get(ALLOW_CUDA) is not True:
        return f"on CUDA it has run on one GPU only; to try it, set {ALLOW_CUDA} to true"
    if not _is_cuda_scorer(config.scorer):
        return f"on CUDA it builds rot2u and rot3u, not {config.scorer}"
    if config.fusion:
        return "on CUDA it has no fusion; leave it out"
    if config.copy_method not in ("kernel", "auto"):
        return (
            f"on CUDA a kernel copies pages, so copy_method = {config.copy_method!r} has no "
            "effect; use 'kernel' or 'auto'"
        )
    if not config.max_correction_blocks:
        return (
            "on CUDA no block joins a hot set after the step that selects it, so with "
            "max_correction_blocks = 0 hot sets would never change; use 1 or more"
        )
    if vllm_config.parallel_config.use_ubatching:
        return "on CUDA it does not work with micro-batches (enable_dbo)"
    return ""


def replays_decode(vllm_config: Any) -> bool:
    """Whether vLLM may replay decode steps from full CUDA graphs."""
    mode = vllm_config.compilation_config.cudagraph_mode
    # Workers may later change to a mode with fewer graphs, not with more.
    return mode is None or bool(mode.has_full_cudagraphs())


def _is_cuda_scorer(name: str) -> bool:
    form = format_named(name)
    return bool(form.bits) and not form.by_axes


def check_centres(vllm_config: Any, kv_cache_config: Any, centres: Centres) -> None:
    """Raises ConfigError if they don't fit the model's layers, KV heads or channels."""
    from vllm.model_executor.models.utils import extract_layer_index

    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    if max(centres.layers) >= num_layers:
        raise ConfigError(
            f"{CENTRE}: it has a centre of layer {max(centres.layers)}, the model has "
            f"{num_layers} layers; calibrate with this model"
        )
    num_shards = vllm_config.parallel_config.tensor_parallel_size // kv_cache_config.kv_tp_replicas
    for group_index, _ in sparse_groups(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[group_index]
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            index = extract_layer_index(name)
            needed = (spec.num_kv_heads * num_shards, spec.head_size)
            mu_HD = centres.mu(index)
            if mu_HD is not None and mu_HD.shape != needed:
                raise ConfigError(
                    f"{CENTRE}: its centre of layer {index} is {list(mu_HD.shape)}, the model's "
                    f"layer has {needed[0]} KV heads of size {needed[1]}; calibrate with this model"
                )


def sparse_groups(kv_cache_config: Any) -> tuple[tuple[int, int], ...]:
    """(vLLM group, tokens of a block) of full attention."""
    return tuple(
        (index, group.kv_cache_spec.block_size)
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        if get_kv_cache_spec_kind(group.kv_cache_spec) is KVCacheSpecKind.FULL_ATTENTION
    )


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A layer that can attend sparsely: causal full attention over its own keys, without ALiBi.

    index: in the model.
    group: of vLLM.
    impl: vLLM's object that computes its attention.
    isa: instruction set of its CPU kernel; empty on CUDA.
    module: vLLM's layer, which has the scales of an fp8 KV cache.
    """

    name: str
    index: int
    group: int
    block_tokens: int
    impl: Any
    isa: str
    module: Any


_FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""By vLLM's `kv_cache_dtype`; the pages' tensor is of uint8."""
_CACHE_DTYPES = {"auto", "bfloat16", "float16", "float32", *_FP8}


def stored_dtype(pages: torch.dtype, cache_dtype: str) -> torch.dtype:
    """Of the values in pages. `pages`: of their tensor."""
    return _FP8.get(cache_dtype, pages)


def full_attention_layers(vllm_config: Any, kv_cache_config: Any) -> tuple[AttentionLayer, ...]:
    """Of this worker, in the model's order."""
    from vllm.model_executor.models.utils import extract_layer_index

    found = []
    context = vllm_config.compilation_config.static_forward_context
    for group_index, block_tokens in sparse_groups(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[group_index]
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            layer = context[name]
            impl = getattr(layer, "impl", None)
            if (
                impl is not None
                and _is_plain(impl)
                and not (spec.sliding_window or spec.attention_chunk_size or spec.non_causal)
            ):
                found.append(
                    AttentionLayer(
                        name,
                        extract_layer_index(name),
                        group_index,
                        block_tokens,
                        impl,
                        getattr(layer, "isa", ""),
                        layer,
                    )
                )
    return tuple(sorted(found, key=lambda layer: layer.index))


def _is_plain(impl: Any) -> bool:
    shape = (impl.attn_type, impl.kv_sharing_target_layer_name)
    is_whole = impl.sliding_window in (-1, (-1, -1))
    return shape == ("decoder", None) and is_whole and impl.alibi_slopes is None


# ------------------------------------------------------------------------------ how keys are turned


def rope_frequencies(head_size: int) -> npt.NDArray[np.float64] | None:
    """Radians per token by which RoPE rotates a head's channels, float64 [F]; channels i and i + F
    are a pair.

    Read from the rotary modules' tables, so right with any scaling. None if no module has this
    head size, modules of it differ, or one rotates other pairs (`is_neox_style` False).
    """
    from vllm.model_executor.layers import rotary_embedding

    found: list[npt.NDArray[np.float64]] = []
    for module in getattr(rotary_embedding, "_ROPE_DICT", {}).values():
        if getattr(module, "head_size", None) != head_size:
            continue
        table: Any = getattr(module, "cos_sin_cache", None)
        if table is None or not getattr(module, "is_neox_style", False) or len(table) < 2:
            return None
        cos, sin = table[1].detach().double().cpu().numpy().reshape(2, -1)
        found.append(np.arctan2(sin, cos))
    if not found or any(not np.array_equal(found[0], other) for other in found[1:]):
        return None
    return found[0]
