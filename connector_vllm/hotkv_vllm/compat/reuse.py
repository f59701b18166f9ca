"""Whether vLLM itself forbids prefix caching in this engine, so that hotkv must be off too.

`CacheConfig.enable_prefix_caching` does not say who turned it off. If the user did, hotkv works. If
vLLM did, any hit would be wrong, or would end the engine. The connector may not see this, because
`EngineCore` decides after the workers have copied the config, and layers decide in the worker's
process. So this module repeats vLLM's decisions from the same inputs.

`tools/check_vllm_reuse.py` finds all of them in vLLM's sources, and names the check here for
each. Rules for single requests (`Request.skip_reading_prefix_cache`) are the scheduler side's.
"""

from typing import Any

from vllm import envs
from vllm.platforms import current_platform
from vllm.platforms.interface import CpuArchEnum
from vllm.v1.kv_cache_interface import KVQuantMode, RSWASpec, iter_layer_specs

from hotkv_vllm.compat import Unsupported

NO_REUSE_IF_BATCH_INVARIANT = frozenset({"FLASHINFER", "TRITON_MLA"})
"""Attention backends with which batch invariance turns prefix caching off (`Attention.__init__`,
`MLAAttention.__init__`)."""


def check_reuse(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises Unsupported if `why_forbidden`. Checks this rank's layers only, so every rank must
    call it."""
    if why := why_forbidden(vllm_config, kv_cache_config):
        raise Unsupported(why)


def why_forbidden(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why a hit would do harm: vLLM forbids prefix caching, would end the engine at a hit, or
    overwrite loaded KV. Empty if hits are fine."""
    why = (
        _of_platform(vllm_config)
        or _of_model(vllm_config)
        or _of_specs(kv_cache_config)
        or _of_layers(vllm_config)
    )
    if why:
        return f"vLLM itself forbids prefix caching: {why}"
    return _of_outputs(vllm_config) or _of_scales(vllm_config, kv_cache_config)


def _of_platform(vllm_config: Any) -> str:
    if not current_platform.is_cpu():
        return ""
    if current_platform.get_cpu_architecture() is CpuArchEnum.RISCV:
        return "the CPU is a RISC-V"
    # Without AMX `CpuPlatform.check_and_update_config` turns prefix caching and chunked prefill
    # off for MLA. A user with AMX who has turned off both looks the same.
    if (
        vllm_config.model_config.use_mla
        and not vllm_config.cache_config.enable_prefix_caching
        and not vllm_config.scheduler_config.enable_chunked_prefill
    ):
        return "latent attention (MLA) on a CPU without AMX computes each prompt as a whole"
    return ""


def _of_model(vllm_config: Any) -> str:
    model = vllm_config.model_config
    if vllm_config.is_mm_encoder_only:
        return "this engine runs the multi-modal encoder only"
    if model.is_prefix_caching_supported:
        return ""
    if model.runner_type == "pooling":
        pooler = model.pooler_config
        return (
            f"this pooling needs all tokens of a text at once ({model.attn_type} attention, "
            f"seq_pooling_type {pooler.seq_pooling_type}, tok_pooling_type "
            f"{pooler.tok_pooling_type})"
        )
    if vllm_config.cache_config.enable_prefix_caching:
        # The user has turned it on for such a model, and vLLM accepts that.
        return ""
    return f"its default for models of this kind ({model.attn_type})"


def _of_specs(kv_cache_config: Any) -> str:
    specs = [
        spec
        for group in kv_cache_config.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
    ]
    if any(getattr(spec, "non_causal", False) for spec in specs):
        return "the model has non-causal attention layers"
    if any(isinstance(spec, RSWASpec) for spec in specs):
        return "with R-SWA the KV of generated tokens depends on where the prompt ended"
    return ""


def _of_layers(vllm_config: Any) -> str:
    if not envs.VLLM_BATCH_INVARIANT:
        return ""
    layers = vllm_config.compilation_config.static_forward_context.values()
    names = {
        layer.attn_backend.get_name() for layer in layers if getattr(layer, "attn_backend", None)
    }
    forbidden = sorted(names & NO_REUSE_IF_BATCH_INVARIANT)
    return f"batch invariance with {', '.join(forbidden)}" if forbidden else ""


def _of_outputs(vllm_config: Any) -> str:
    """With `enable_return_routed_experts` vLLM records, by block hash, the experts of tokens
    that this engine computed, and raises at a hit on others
    (`BlockObjectStore.get_concatenated`, vLLM 0.32).
    `VllmConfig._verify_aux_output_compatibility` refuses only some connectors, by name."""
    outputs = getattr(vllm_config, "aux_output_config", None)
    if outputs is None or not outputs.enable_return_routed_experts:
        return ""
    return (
        "with enable_return_routed_experts vLLM needs the experts of every token of a hit, and has "
        "them only of tokens that this engine computed"
    )


def _of_scales(vllm_config: Any, kv_cache_config: Any) -> str:
    """With KV scales per token and head, Triton attention sets all pages' scales to 1 in a
    layer's first run, which overwrites loaded KV, but for the warm-up of model runner V2
    (`TritonAttentionImpl._ensure_scale_caches`, `Worker.compile_or_warm_up_model`, vLLM 0.32)."""
    modes = [
        getattr(spec, "kv_quant_mode", KVQuantMode.NONE)
        for group in kv_cache_config.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
    ]
    if not any(mode.is_per_token_head for mode in modes) or (
        vllm_config.use_v2_model_runner and vllm_config.kernel_config.enable_jit_warmup
    ):
        return ""
    return (
        f"without its kernels' warm-up (enforce_eager, or runner V1) vLLM resets the scales of "
        f"kv_cache_dtype {vllm_config.cache_config.cache_dtype} in its first step, after loads"
    )
