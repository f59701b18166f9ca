"""Models so small that engines start in seconds: random weights from a fixed seed, token ids in and out."""

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

MODELS: dict[str, dict[str, Any]] = {
    # One group of full attention.
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2},
    # Five groups of sliding windows and one of full attention over one buffer.
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
    # Multi-head latent attention: one latent head.
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
}


def write_model(folder: Path, kind: str = "llama") -> Path:
    """Writes the config.json of one of MODELS and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(COMMON | MODELS[kind]))
    return folder


def transfer_config(**extra: Any) -> dict[str, Any]:
    """`kv_transfer_config` with the connector and its settings (`target` for `hotkv.target`)."""
    return {
        "kv_connector": "HotKVConnector",
        "kv_connector_module_path": "hotkv_vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {f"hotkv.{name}": value for name, value in extra.items()},
    }


def engine_args(model: Path, *, blocks: int = 512, **more: Any) -> dict[str, Any]:
    """Arguments of `LLM` / `EngineArgs` for the tiny model."""
    page_bytes = 2 * BLOCK_TOKENS * 2 * 32 * 2 * 2
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
