"""Digests of the settings of vLLM that may decide KV bytes: all but those in `HARMLESS` and
`HARMLESS_ENVIRONMENT`.

A new setting counts: engines that differ in it share nothing until an author of hotkv has found
it harmless. There are no names of models, layers or values here: `key_space_factors` walks
through vLLM's config objects as they are.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import os
import types
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import transformers
from vllm import envs

from hotkv_vllm import versions
from hotkv_vllm.compat import uses
from hotkv_vllm.compat.foreign_code import code_of, foreign_code, plugin_classes

# -------------------------------------------------------------------------------- settings left out

# A setting is harmless if engines that differ only in it compute the same KV for the same
# tokens, but for rounding, which batch size and kernel fusion change too.


def _names(text: str) -> frozenset[str]:
    """Words of the text, without comment lines."""
    return frozenset(
        word
        for line in text.splitlines()
        if not line.strip().startswith("#")
        for word in line.split()
    )


HARMLESS: Mapping[str, frozenset[str]] = {
    "VllmConfig": _names("""
        # Harmless: serving, monitoring and debugging; the transfer of KV, encoder outputs and
        # weights (the key space identifies weights by their content).
        instance_id kv_transfer_config kv_events_config ec_transfer_config ec_manager_config
        observability_config logging_config profiler_config weight_transfer_config shutdown_timeout
        reasoning_config structured_outputs_config aux_output_config
        # Harmless: concerns tokens after they were sampled.
        watermark_config
        # Harmless: how operations are fused, captured and batched; whether weights are offloaded to
        # host memory.
        compilation_config optimization_level performance_mode scheduler_config offload_config
        # Harmless, because covered elsewhere: a request's block keys cover its LoRA adapter's bytes
        # (`adapters`), and the KV of a drafter (model that proposes tokens) has groups of its own.
        lora_config speculative_config
    """),
    "ModelConfig": _names("""
        # Harmless: where the weights come from. The key space identifies weights by their content.
        model model_weights hf_config_path revision hf_token hf_overrides
        # Harmless: how text becomes tokens and tokens text. Block keys are hashes of the tokens.
        tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin
        renderer_num_workers served_model_name allowed_local_media_path allowed_media_domains
        enable_prompt_embeds
        # Harmless: sampling and pooling, which follow the last layer. `seed` also decides weights
        # of format "dummy" (random), but then it is part of the weights' identity.
        seed max_logprobs logprobs_mode use_fp64_gumbel return_sampling_mask generation_config
        override_generation_config logits_processors pooler_config
        # Harmless: graph capture, sleep, allocators.
        enforce_eager disable_cascade_attn enable_sleep_mode sleep_preserve_parameter_names
        sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend
        enable_cumem_allocator
    """),
    "MultiModalConfig": _names("""
        # Harmless: limits, caches and transport of media. For example, vLLM sets
        # allow_missing_mm_embeddings by kv_role: False in a producer, otherwise True.
        enable_mm_embeds allow_missing_mm_embeddings
        limit_per_prompt mm_processor_cache_gb mm_processor_cache_type
        mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_fp8_scale_save_path
        mm_encoder_fp8_scale_save_margin skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb
    """),
    "CacheConfig": _names("""
        # Harmless: how much memory the cache has, and values that vLLM computes from this.
        gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks
        kv_cache_memory_bytes kv_cache_size_tokens kv_cache_max_concurrency
        # Harmless as settings: sizes and layouts of blocks. The key space contains the sizes and
        # layouts that the engine really uses.
        block_size user_specified_block_size _block_size_resolved effective_attention_block_size
        hash_block_size cache_hit_alignment_tokens kv_cache_layout prefix_caching_hash_algo
        # Harmless: what the engine's own caches retain, and where.
        enable_prefix_caching prefix_cache_retention_interval kv_offloading_size
        kv_offloading_backend enable_mamba_shared_prefix_checkpoint
    """),
    "ParallelConfig": _names("""
        # Harmless: replicas, and where processes run and listen. (Sizes that split the KV are not
        # in this list, because they change its bytes.)
        data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local
        data_parallel_index data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port
        data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb dp_sync_interval
        disable_nccl_for_dp_synchronization distributed_executor_backend
        master_addr master_port node_rank nnodes numa_bind numa_bind_nodes
        numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds
        cpu_distributed_timeout_seconds world_size rank placement_group ray_workers_use_nsight
        ray_runtime_env max_parallel_loading_workers enable_fault_tolerance fault_tolerance_config
        _data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank
        # Harmless: which rank computes an expert or a batch, and over which links.
        enable_eplb eplb_config enable_elastic_ep elastic_ep_max_dp_size expert_placement_strategy
        enable_ep_weight_filter all2all_backend disable_custom_all_reduce enable_shm_tensor_arena
        enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
        enable_batch_sharded_sampling dcp_comm_backend
    """),
    "LoadConfig": _names("""
        download_dir safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location
    """),
    "KernelConfig": _names("""
        enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup
        enable_jit_warmup
        # Harmless: which kernel computes the same operation. vLLM's default depends on the
        # compilation.
        ir_op_priority
    """),
    "SpeculativeConfig": _names("""
        # Harmless, because the key space covers the draft model's config objects, and its weights
        # by content.
        model revision code_revision target_model_config target_parallel_config
        draft_parallel_config draft_load_config enforce_eager draft_tensor_parallel_size
        tensor_parallel_size
        # Harmless: how many tokens are drafted, and which of them are accepted.
        num_speculative_tokens num_speculative_tokens_per_batch_size disable_padded_drafter_batch
        use_local_argmax_reduction prompt_lookup_max prompt_lookup_min
        suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests
        suffix_decoding_max_spec_factor suffix_decoding_min_token_prob rejection_sample_method
        synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification
        draft_sample_method dspark_draft_topk
    """),
    "DeviceConfig": _names("device"),
    # Harmless: which memory holds the tables of n-gram embeddings. vLLM chooses it by the host's
    # resources.
    "EngramConfig": _names("dp_shared_memory use_thp"),
    "KVCacheSpec": _names("block_stride_alignment num_speculative_blocks"),
    "LoRAConfig": _names(
        "max_lora_rank max_lora_cls_labels max_loras max_cpu_loras default_mm_loras "
        "specialize_active_lora fully_sharded_loras"
    ),
    # Harmless: `online_quantization_time` is a duration that vLLM measures while it loads the
    # weights.
    "OnlineQuantizationConfig": _names("online_quantization_time"),
}
"""Fields by class: vLLM's config classes, its KV cache specs and bases of these. A companion's spec
names its own in `HARMLESS_FIELDS`."""

HARMLESS_ENVIRONMENT = _names("""
    # Harmless: build and packaging.
    VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION NVCC_THREADS VLLM_USE_PRECOMPILED
    VLLM_USE_PRECOMPILED_RUST CMAKE_BUILD_TYPE VERBOSE VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX
    VLLM_DOCKER_BUILD_CONTEXT VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG
    CUDA_HOME VLLM_NCCL_SO_PATH VLLM_NCCL_INCLUDE_PATH VLLM_CUDART_SO_PATH VLLM_USE_RUST_FRONTEND
    VLLM_USE_RUST_BENCH VLLM_RUST_FRONTEND_PATH
    # Harmless: processes, threads, places, ranks, ports.
    VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_CI_ENV VLLM_PROCESS_NAME_PREFIX
    VLLM_LOOPBACK_IP VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_RAY_PER_WORKER_GPUS
    VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS
    VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_EXTRA_ENV_VARS_TO_COPY
    VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE
    VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_WRAPPED_PP_COMM
    VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT
    VLLM_P2P_MAX_PEERS VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT
    VLLM_MOONCAKE_BOOTSTRAP_PORT MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME
    VLLM_USE_SPINLOOP_EXT VLLM_USE_V2_MODEL_RUNNER VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS
    VLLM_SKIP_P2P_CHECK VLLM_DISABLE_PYNCCL
    # Harmless: paths of transfers, sizes of buffers, warm-up of kernels.
    VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_LOAD_RECV_THREADS
    VLLM_MOONCAKE_STORE_TIER_LOG VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_USE_SIMPLE_KV_OFFLOAD
    VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE
    VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL VLLM_DBO_COMM_SMS VLLM_ELASTIC_EP_DRAIN_REQUESTS
    VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_HAS_FLASHINFER_CUBIN VLLM_DEEP_GEMM_WARMUP
    VLLM_ENABLE_CUDAGRAPH_GC VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE
    VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN
    # Harmless: limits of time and memory, logs, metrics.
    VLLM_ENGINE_READY_TIMEOUT_S VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_USAGE_SOURCE
    VLLM_CONFIGURE_LOGGING VLLM_TRACE_FUNCTION VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S
    VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
    VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_XGRAMMAR_CACHE_MB
    VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_N_SEQUENCES
    VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS
    VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION
    VLLM_DEBUG_MFU_METRICS VLLM_DISABLE_LOG_LOGO VLLM_GC_DEBUG VLLM_DEBUG_WORKSPACE
    VLLM_GPU_SYNC_CHECK VLLM_PATTERN_MATCH_DEBUG VLLM_CUSTOM_SCOPES_FOR_PROFILING
    VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
    VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS VLLM_DISABLE_COMPILE_CACHE
    VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_MSGPACK_ZERO_COPY_THRESHOLD
    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
    # Harmless: how requests become tokens, and what happens to tokens after they were sampled.
    VLLM_USE_FASTOKENS VLLM_V1_USE_OUTLINES_CACHE VLLM_ENFORCE_STRICT_TOOL_CALLING
    VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS
    VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_SYSTEM_START_DATE VLLM_ENABLE_COHERE_API
    VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_ENABLE_RESPONSES_API_STORE VLLM_USE_FLASHINFER_SAMPLER
    VLLM_ALLOW_INSECURE_SERIALIZATION
    # Covered elsewhere: the key space names the plugins that are loaded, with their versions
    # (`foreign_code`); block keys cover the adapters' bytes; max_model_len counts if it may be
    # longer than the model's own length.
    VLLM_PLUGINS VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST
    VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_KV_CACHE_LAYOUT
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES
""")
"""All other variables of vLLM count if they are set."""

MEDIA_ENVIRONMENT = (
    *("VLLM_MEDIA_CONNECTOR", "VLLM_VIDEO_LOADER_BACKEND"),
    # Quality with which Dots3Note's processor compresses frames.
    "XHS_VIDEO_JPEG_QUALITY",
)
"""Decide which frames of a video the model gets, and count: vLLM may hash the file
(`MultiModalHasher.serialize_item`, vLLM 0.32), and its `compile_factors` lack them."""


# ------------------------------------------------------------------------------ settings that count


AUTO = -1
"""Of `max_model_len`: vLLM reduces the model's length to what the device holds
(`_auto_fit_max_model_len`, vLLM 0.32), so it may differ at each start. It decides no KV but in
`_SIZES_MEDIA`."""

_SIZES_MEDIA = ("Dots3Note", "NemotronH_")
"""Beginnings of architectures that reduce media until they fit into `max_model_len`."""

WITHOUT_LENGTH = _names("""
    AfmoeForCausalLM ApertusForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM
    BloomForCausalLM ChatGLMForConditionalGeneration ChatGLMModel Cohere2ForCausalLM
    Cohere2MoeForCausalLM CohereForCausalLM DbrxForCausalLM DeciLMForCausalLM Ernie4_5ForCausalLM
    Ernie4_5_MoeForCausalLM Exaone4ForCausalLM ExaoneForCausalLM ExaoneMoEForCausalLM
    ExaoneMoeForCausalLM FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM
    GPT2LMHeadModel GPTJForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3nForCausalLM
    Gemma4ForCausalLM GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM GptOssForCausalLM
    GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM
    GraniteMoeSharedForCausalLM GraniteSWAForCausalLM HYV3ForCausalLM HrmTextForCausalLM
    HyperCLOVAXForCausalLM IQuestCoderForCausalLM IQuestLoopCoderForCausalLM InternLM2ForCausalLM
    InternLM3ForCausalLM JambaForCausalLM K2HorizonForCausalLM LLaMAForCausalLM LagunaForCausalLM
    Lfm2ForCausalLM Lfm2MoeForCausalLM LlamaForCausalLM Mamba2ForCausalLM MambaForCausalLM
    MiMoForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM MiniCPMForCausalLM
    Ministral3ForCausalLM MistralForCausalLM MixtralForCausalLM MuseGlimmerForCausalLM
    NemotronForCausalLM NemotronHForCausalLM NemotronHPuzzleForCausalLM OPTForCausalLM
    OlmoHybridForCausalLM OlmoeForCausalLM OrionForCausalLM PanguEmbeddedForCausalLM
    PanguProMoEV2ForCausalLM Param2MoEForCausalLM Phi3ForCausalLM PhiMoEForCausalLM Qwen2ForCausalLM
    Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Rnj1ForCausalLM
    SarvamMoEForCausalLM SolarForCausalLM StableLmForCausalLM Step1ForCausalLM Step3TextForCausalLM
    Step3p5ForCausalLM TeleChat2ForCausalLM TeleChat3ForCausalLM TeleFLMForCausalLM
    Zamba2ForCausalLM
""")
"""Architectures whose code, with the models that it builds on, does not read `max_model_len` (vLLM
0.32 and 0.33). Tables of RoPE have the model's own length, so the engine's decides no KV. Others do
read it: Llama4 scales queries beyond 32,768 tokens; MiniMaxM2 and Plamo3 size their tables by it,
and a table's size decides its values with some kinds of RoPE."""

_LONG_ROPE = ("longrope", "su")
"""Kinds of RoPE whose factors vLLM chooses by `max_model_len` (`Phi3LongRoPEScaledRotaryEmbedding`,
vLLM 0.32)."""

WITHOUT_OWN_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Methods of speculative decoding."""


def key_space_factors(vllm_config: Any, layer_specs: Mapping[str, Any]) -> tuple[str, ...]:
    """Versions of vLLM and transformers, and `name=digest` per config object and further part, by
    which an operator finds why two engines don't share.

    layer_specs: by layer name.
    """
    return _factors(_parts(vllm_config, layer_specs))


def portable_factors(vllm_config: Any, layer_specs: Mapping[str, Any]) -> tuple[str, ...]:
    """Without the tensor-parallel size, for KV that is stored the same for all."""
    heads = vllm_config.model_config.get_total_num_kv_heads()
    whole = {
        name: dataclasses.replace(spec, num_kv_heads=heads) for name, spec in layer_specs.items()
    }
    parts = _parts(vllm_config, whole)
    parallel = _fields(vllm_config.parallel_config)
    parallel.pop("tensor_parallel_size", None)
    return _factors(parts | {"parallel_config": parallel})


def _parts(vllm_config: Any, layer_specs: Mapping[str, Any]) -> dict[str, Any]:
    parts = {name: value for name, value in _fields(vllm_config).items() if value is not None}
    if draft_model(vllm_config) is not None:
        parts["speculative_config"] = vllm_config.speculative_config
    parts |= foreign_code(vllm_config)
    return parts | {"layers": dict(layer_specs), "environment": environment()}


def _factors(parts: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"vllm={versions.VERSION}",
        # transformers' processors compute pixels, and vLLM may run its models.
        f"transformers={transformers.__version__}",
        *(f"{name}={digest(value)}" for name, value in sorted(parts.items())),
    )


def draft_model(vllm_config: Any) -> Any | None:
    """vLLM's config of a draft model, which may have KV of its own."""
    speculative = vllm_config.speculative_config
    return (
        None
        if speculative is None or speculative.method in WITHOUT_OWN_KV
        else speculative.draft_model_config
    )


def environment() -> dict[str, str]:
    """Variables of vLLM that are set and count. Without Ray's, which assign devices and which
    vLLM sets itself."""
    known = {*envs.compile_factors(), *MEDIA_ENVIRONMENT}
    return {
        name: os.environ[name]
        for name in sorted(known)
        if name in os.environ and name not in HARMLESS_ENVIRONMENT and not name.startswith("RAY_")
    }


def digest(value: Any) -> str:
    """Of `canonical(value)`: 32 hexadecimal digits."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def canonical(value: Any, within: tuple[int, ...] = ()) -> Any:
    """As JSON types, equal in every process for equal settings: without addresses or the order of
    sets. An unknown object is its class and attributes; inside itself, its class only.

    within: ids of the objects around it.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return f"{value.__module__}.{value.__qualname__}{code_of(value.__module__ or '')}"
    if id(value) in within:
        return type(value).__qualname__
    within = (*within, id(value))
    if isinstance(value, Mapping):
        entries = (
            (json.dumps(canonical(key, within)), canonical(entry, within))
            for key, entry in value.items()
        )
        return dict(sorted(entries, key=lambda entry: entry[0]))
    if isinstance(value, set | frozenset):
        return sorted(
            (canonical(entry, within) for entry in value),
            key=lambda entry: json.dumps(entry, sort_keys=True),
        )
    if isinstance(value, Sequence) and type(value).__module__ != "torch":
        return [canonical(entry, within) for entry in value]
    return _canonical_object(value, within)


def _canonical_object(value: Any, within: tuple[int, ...]) -> Any:
    name = _class_name(type(value))
    if hasattr(value, "to_dict") and hasattr(value, "model_type"):
        return canonical(_model_settings(value.to_dict()), within)
    if dataclasses.is_dataclass(value):
        return [name, canonical(_fields(value), within)]
    if isinstance(value, functools.partial):
        return [name, canonical([value.func, value.args, value.keywords], within)]
    attributes = getattr(value, "__dict__", None)
    if attributes is not None and type(value).__module__ != "torch":
        return [name, canonical(_counted(value, attributes), within)]
    # A dtype's, device's, number's or pattern's text identifies it, unless it has the object's
    # address.
    text = str(value)
    return name if f"at {id(value):#x}" in text else [name, text]


def _class_name(kind: type) -> str:
    """A spec of hotkv's counts as vLLM's that it extends: exact KV is the same."""
    if kind.__module__.startswith("hotkv_"):
        kind = next(one for one in kind.__mro__ if not one.__module__.startswith("hotkv_"))
    return kind.__qualname__ + code_of(kind.__module__)


def _fields(value: Any) -> dict[str, Any]:
    """Without those in `HARMLESS`."""
    # vLLM declares some fields but never sets them.
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    found = _counted(value, {name: getattr(value, name) for name in names})
    if hasattr(value, "original_max_model_len"):
        if not _length_counts(value):
            del found["max_model_len"]
        elif value.original_max_model_len == AUTO and not _is_sizing_media(value):
            found["max_model_len"] = value.get_and_verify_max_len(AUTO)
    return found


def _is_sizing_media(model: Any) -> bool:
    return bool(model.architecture.startswith(_SIZES_MEDIA))


def _length_counts(model: Any) -> bool:
    """Also with an untested vLLM, whose models may read the length, and with a plugin's model."""
    return (
        model.architecture not in WITHOUT_LENGTH
        or not uses.is_tested(uses.OWN, versions.VERSION)
        or model.architecture in plugin_classes()
        or bool(envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN)
        or model.use_mla
        or _has_long_rope(model.hf_config.to_dict())
    )


def _has_long_rope(config: Any) -> bool:
    if isinstance(config, Mapping):
        return any(map(_has_long_rope, config.values()))
    return config in _LONG_ROPE if isinstance(config, str) else False


def _counted(value: Any, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that count. Sorts lists of names in quantization configs: vLLM makes them from
    sets (`maybe_update_config` of `AutoAWQConfig` and `AutoGPTQConfig`, vLLM 0.32)."""
    kinds = [kind.__name__ for kind in type(value).__mro__]
    own: frozenset[str] = getattr(value, "HARMLESS_FIELDS", frozenset())
    harmless = own.union(*(HARMLESS.get(kind, frozenset()) for kind in kinds))
    found = {name: entry for name, entry in attributes.items() if name not in harmless}
    if "QuantizationConfig" in kinds:
        for name, entry in found.items():
            if isinstance(entry, list) and all(isinstance(one, str) for one in entry):
                found[name] = sorted(entry)
    return found


def _model_settings(config: Any) -> Any:
    """A transformers config without path and version, at every depth."""
    if isinstance(config, dict):
        return {
            name: _model_settings(entry)
            for name, entry in config.items()
            if name not in ("_name_or_path", "transformers_version")
        }
    return [_model_settings(entry) for entry in config] if isinstance(config, list) else config
