"""A Llama model so small that a context of 100,000 tokens is affordable on a CPU, with random
weights from a fixed seed.

The weights are so large that every token of the context shows in the logprobs: a cache that gave
back wrong KV would be seen. Nobody can read what the model says; its tokens are numbers.
"""

import json
from pathlib import Path

LAYERS, KV_HEADS, HEAD_SIZE, VOCAB = 4, 2, 32, 1024
_HIDDEN, _INNER, _HEADS = 128, 256, 4
KV_TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_SIZE * 4
"""Keys and values of a token in all layers, in float32."""


def write_model(folder: Path, max_tokens: int) -> Path:
    """Writes config.json and model.safetensors of a model for contexts of up to `max_tokens`;
    returns the folder."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCAB,
        "max_position_embeddings": max_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 1.5 * shape[-1] ** -0.5

    def norm() -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(_HIDDEN, generator=generator)

    tensors = {
        "model.embed_tokens.weight": 0.05 * torch.randn(VOCAB, _HIDDEN, generator=generator),
        "model.norm.weight": norm(),
        "lm_head.weight": weight(VOCAB, _HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.self_attn.q_proj.weight": weight(_HEADS * HEAD_SIZE, _HIDDEN),
            f"{name}.self_attn.k_proj.weight": weight(KV_HEADS * HEAD_SIZE, _HIDDEN),
            f"{name}.self_attn.v_proj.weight": weight(KV_HEADS * HEAD_SIZE, _HIDDEN),
            f"{name}.self_attn.o_proj.weight": weight(_HIDDEN, _HEADS * HEAD_SIZE),
            f"{name}.mlp.gate_proj.weight": weight(_INNER, _HIDDEN),
            f"{name}.mlp.up_proj.weight": weight(_INNER, _HIDDEN),
            f"{name}.mlp.down_proj.weight": weight(_HIDDEN, _INNER),
            f"{name}.input_layernorm.weight": norm(),
            f"{name}.post_attention_layernorm.weight": norm(),
        }
    save_file(tensors, folder / "model.safetensors")
    return folder
