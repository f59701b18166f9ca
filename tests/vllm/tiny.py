"""Tiny models with random weights, so that engines start in seconds."""

import json
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32
VOCAB = 1024

COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_THREE_WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]

MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | {"num_hidden_layers": 2},
    # They share a buffer.
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": 96,
        "sliding_window_pattern": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    # One latent head.
    "deepseek": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "hidden_act": "silu",
    },
    # Short-convolution states beside full attention.
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "conv_dim": 128,
        "conv_dim_out": 128,
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_dim": 128,
        "block_ff_dim": 256,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 32,
        "norm_eps": 1e-5,
    },
    # Learned attention sinks; every second layer has a sliding window.
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "sliding_window": 96,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "swiglu_limit": 7.0,
    },
    # Three layers attend within chunks of 96 tokens.
    "llama4": {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "attention_chunk_size": 96,
        "intermediate_size_mlp": 256,
        "no_rope_layer_interval": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "use_qk_norm": True,
        "hidden_act": "silu",
    },
    # Windows with smaller heads, so blocks of twice as many tokens.
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "sliding_window": 96,
        "layer_types": _THREE_WINDOWS,
        "global_head_dim": 64,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCAB,
        "enable_moe_block": False,
    },
    # Windows of two widths and full attention.
    "two_windows": {
        "architectures": ["ExaoneMoEForCausalLM"],
        "model_type": "exaone_moe",
        "num_hidden_layers": 4,
        "layer_types": _THREE_WINDOWS,
        "sliding_windows": [64, 160, 64, 0],
        "sliding_window": 96,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "is_moe_layer": [False, True, True, True],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    | {"num_hidden_layers": 4, "sliding_window": 96},
    # Blocks of 1056 or 1088 tokens, by processor. The kernels need heads of 128 channels and
    # bfloat16.
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
        "hidden_act": "silu",
    },
    # A drafter for "llama".
    "eagle": _LLAMA | {"num_hidden_layers": 1, "eagle_config": {}},
}


def write_model(folder: Path, kind: str = "llama") -> Path:
    """Atomically: engines may be reading it."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / "config.json.new"
    draft.write_text(json.dumps(COMMON | MODELS[kind]))
    draft.replace(folder / "config.json")
    return folder


def transfer_config(**extra: Any) -> dict[str, Any]:
    """Every hit is loaded: a tiny model computes as fast as a server loads."""
    socket = str(extra.get("target", "")).removeprefix("unix:")
    waits = {"startup_wait_s": 60.0} if socket and Path(socket).exists() else {}
    extra = {"load": "always", **waits, **extra}
    return {
        "kv_connector": "HotKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {f"hotkv.{name}": value for name, value in extra.items()},
    }


def engine_args(model: Path, *, blocks: int = 512, **more: Any) -> dict[str, Any]:
    """blocks: of the llama."""
    value_bytes = 4 if more.get("dtype") == "float32" else 2
    page_bytes = 2 * BLOCK_TOKENS * 2 * 32 * 2 * value_bytes
    return {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "block_size": BLOCK_TOKENS,
        "max_model_len": 2048,
        "enforce_eager": True,
        "kv_cache_memory_bytes": blocks * page_bytes,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 16,
        "seed": 0,
        "disable_log_stats": False,
        **more,
    }
