"""Finds the reason for which vLLM itself forbids that the KV of a prefix is used again in this
engine.

vLLM has one flag (`CacheConfig.enable_prefix_caching`) for two things: the user's choice, and
vLLM's own decision that a prefix hit would be wrong in this engine or would end it. If the user
turned the flag off, only the device's cache is off, and hotkv goes on. vLLM's own decision binds
hotkv.

The flag alone does not tell the two apart, and the connector may not even see vLLM's decision:
`EngineCore` makes a decision after the workers have copied the config, and layers decide in the
worker's process. So this module asks vLLM again (`ModelConfig.is_prefix_caching_supported`, KV
cache specs). If vLLM decides in the middle of other code, this module reads the same inputs.
`tools/check_vllm_reuse.py` finds all such places in vLLM's sources, and names the check that covers
each. The scheduler side handles rules for single requests (`Request.skip_reading_prefix_cache`).

Reads `ModelConfig` (`is_prefix_caching_supported`, `attn_type`, `runner_type`, `pooler_config`,
`use_mla`), `VllmConfig.is_mm_encoder_only`, `CacheConfig.enable_prefix_caching`,
`SchedulerConfig.enable_chunked_prefill`, `non_causal` and the class of each layer's KV cache spec,
`attn_backend` of the layers in `static_forward_context`, `envs.VLLM_BATCH_INVARIANT`,
`AuxOutputConfig.enable_return_routed_experts`, `kv_quant_mode` of each layer's spec,
`VllmConfig.use_v2_model_runner`, `KernelConfig.enable_jit_warmup`, `current_platform`.
"""

from typing import Any

from vllm import envs
from vllm.platforms import current_platform
from vllm.platforms.interface import CpuArchEnum
from vllm.v1.kv_cache_interface import KVQuantMode, RSWASpec, iter_layer_specs

from hotkv_vllm.compat import Unsupported

NO_REUSE_IF_BATCH_INVARIANT = frozenset({"FLASHINFER", "TRITON_MLA"})
"""Attention backends without prefix caching if batch invariance is on. Source: `Attention.__init__`
and `MLAAttention.__init__`."""


def check_reuse(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises Unsupported with vLLM's reason if vLLM itself forbids prefix caching in this engine.
    Every rank checks its own layers."""
    if why := why_forbidden(vllm_config, kv_cache_config):
        raise Unsupported(why)


def why_forbidden(vllm_config: Any, kv_cache_config: Any) -> str:
    """Returns the reason for which vLLM itself forbids prefix caching in this engine, or would
    spoil a hit that hotkv loads; empty if there is none."""
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
    # Without AMX `CpuPlatform.check_and_update_config` turns both off. With AMX a user who turns
    # off both is refused as well.
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
        # vLLM accepts --enable-prefix-caching for a generating model without a warning.
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
    """Returns why a hit would end the engine although vLLM forbids none.

    vLLM keeps the experts of the tokens that this engine has computed, by block hash, and raises at
    a hit in any other block. Source: `BlockObjectStore.get_concatenated` in vLLM 0.32, whose
    `VllmConfig._verify_aux_output_compatibility` refuses only some connectors, by name.
    """
    outputs = getattr(vllm_config, "aux_output_config", None)
    if outputs is None or not outputs.enable_return_routed_experts:
        return ""
    return (
        "with enable_return_routed_experts vLLM needs the experts of every token of a hit, and has "
        "them only of tokens that this engine computed"
    )


def _of_scales(vllm_config: Any, kv_cache_config: Any) -> str:
    """Returns why the engine's first step would spoil loaded KV.

    vLLM's Triton attention sets the scales in all pages of a layer to 1 when the layer first runs.
    Only the warm-up of runner V2 runs it before requests come. Source:
    `TritonAttentionImpl._ensure_scale_caches` and `Worker.compile_or_warm_up_model` in vLLM 0.32.
    """
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
