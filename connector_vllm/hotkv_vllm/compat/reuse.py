"""Finds out whether vLLM itself forbids prefix caching in this engine, and why. Then hotkv must be
off too.

vLLM has one flag (`CacheConfig.enable_prefix_caching`) for two decisions. If the user turned the
flag off, only vLLM's own prefix cache on the device is off, and hotkv works. If vLLM turned the
flag off, the reason is that any prefix hit would be wrong in this engine, or would end the engine.
A hit of hotkv would do the same harm.

The flag `enable_prefix_caching` does not say whether the user or vLLM turned it off, and the
connector may not even see vLLM's decision: `EngineCore` decides after the workers have copied the
config, and layers decide in the worker's process. So this module makes vLLM's decisions again, from
the same inputs (`ModelConfig.is_prefix_caching_supported`, KV cache specs and others).
`tools/check_vllm_reuse.py` finds all places in vLLM's sources where vLLM makes such a decision, and
names the check of this module that covers each place. Rules for single requests
(`Request.skip_reading_prefix_cache`) are handled by the scheduler side.

Parts of vLLM that this module reads: `ModelConfig` (`is_prefix_caching_supported`, `attn_type`,
`runner_type`, `pooler_config`, `use_mla`), `VllmConfig.is_mm_encoder_only`,
`CacheConfig.enable_prefix_caching`, `SchedulerConfig.enable_chunked_prefill`, `non_causal` and the
class of each layer's KV cache spec, `attn_backend` of the layers in `static_forward_context`,
`envs.VLLM_BATCH_INVARIANT`, `AuxOutputConfig.enable_return_routed_experts`, `kv_quant_mode` of each
layer's spec, `VllmConfig.use_v2_model_runner`, `KernelConfig.enable_jit_warmup`,
`current_platform`.
"""

from typing import Any

from vllm import envs
from vllm.platforms import current_platform
from vllm.platforms.interface import CpuArchEnum
from vllm.v1.kv_cache_interface import KVQuantMode, RSWASpec, iter_layer_specs

from hotkv_vllm.compat import Unsupported

NO_REUSE_IF_BATCH_INVARIANT = frozenset({"FLASHINFER", "TRITON_MLA"})
"""Names of the attention backends with which vLLM turns prefix caching off if batch invariance is
on. Source: `Attention.__init__` and `MLAAttention.__init__`."""


def check_reuse(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises Unsupported, with the reason, if a hit of hotkv would do harm in this engine (see
    `why_forbidden`). Checks only the layers of this rank, so every rank must call it."""
    if why := why_forbidden(vllm_config, kv_cache_config):
        raise Unsupported(why)


def why_forbidden(vllm_config: Any, kv_cache_config: Any) -> str:
    """Returns why a hit of hotkv would do harm in this engine: vLLM itself forbids prefix caching,
    would end the engine at a hit, or would overwrite loaded KV. Returns an empty text if hits are
    fine."""
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
    # On a CPU without AMX, `CpuPlatform.check_and_update_config` turns prefix caching and chunked
    # prefill off for MLA models. If the user of a CPU with AMX has turned both off, the settings
    # look the same, so the answer is the same too.
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
        # No reason: the user has turned prefix caching on for a model of this kind, and vLLM
        # accepts that.
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
    """Returns why a hit would end the engine; empty if it would not.

    With `enable_return_routed_experts` vLLM records, by block hash, the experts of the tokens that
    this engine has computed. It raises if a request hits a block that this engine has not computed.
    Source: `BlockObjectStore.get_concatenated` in vLLM 0.32. vLLM does not refuse hotkv in this
    case: `VllmConfig._verify_aux_output_compatibility` refuses only some connectors, by name.
    """
    outputs = getattr(vllm_config, "aux_output_config", None)
    if outputs is None or not outputs.enable_return_routed_experts:
        return ""
    return (
        "with enable_return_routed_experts vLLM needs the experts of every token of a hit, and has "
        "them only of tokens that this engine computed"
    )


def _of_scales(vllm_config: Any, kv_cache_config: Any) -> str:
    """Returns why the engine's first step would overwrite a part of loaded KV; empty if it would
    not.

    With KV scales per token and head, vLLM's Triton attention sets the scales in all pages of a
    layer to 1 when the layer first runs. This does no harm if the layer first runs in the warm-up
    of model runner V2, before any load. Source: `TritonAttentionImpl._ensure_scale_caches` and
    `Worker.compile_or_warm_up_model` in vLLM 0.32.
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
