"""A Llama with random weights from a fixed seed, so small that a CPU computes 100,000 tokens.

Weights are so large that every token of the context changes the logprobs: wrong KV changes
answers. Tokens mean nothing.
"""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Shape:
    """dtype: of weights and KV, as torch names it."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    dtype: str

    @property
    def kv_token_bytes(self) -> int:
        """A token's bytes in all layers."""
        value_bytes = {"float32": 4, "bfloat16": 2}[self.dtype]
        return self.layers * 2 * self.kv_heads * self.head_size * value_bytes


TINY = Shape(4, 128, 256, 4, 2, 32, 1024, "float32")
LAYERS, VOCAB, KV_TOKEN_BYTES = TINY.layers, TINY.vocab, TINY.kv_token_bytes


def write_config(folder: Path, max_tokens: int, shape: Shape = TINY) -> Path:
    """config.json, for up to `max_tokens`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab,
        "max_position_embeddings": max_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": shape.dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_model(folder: Path, max_tokens: int, shape: Shape = TINY, device: str = "cpu") -> Path:
    """config.json and model.safetensors. device: where torch draws; another draws other
    weights."""
    import torch
    from safetensors.torch import save_file

    write_config(folder, max_tokens, shape)
    generator = torch.Generator(device).manual_seed(1)
    dtype = getattr(torch, shape.dtype)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    def weight(*sizes: int) -> torch.Tensor:
        return (draw(*sizes) * 1.5 * sizes[-1] ** -0.5).to(dtype)

    def norm() -> torch.Tensor:
        return (1.0 + 0.1 * draw(shape.hidden)).to(dtype)

    hidden, inner = shape.hidden, shape.inner
    query, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    tensors = {
        "model.embed_tokens.weight": (0.05 * draw(shape.vocab, hidden)).to(dtype),
        "model.norm.weight": norm(),
        "lm_head.weight": weight(shape.vocab, hidden),
    }
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.self_attn.q_proj.weight": weight(query, hidden),
            f"{name}.self_attn.k_proj.weight": weight(kv, hidden),
            f"{name}.self_attn.v_proj.weight": weight(kv, hidden),
            f"{name}.self_attn.o_proj.weight": weight(hidden, query),
            f"{name}.mlp.gate_proj.weight": weight(inner, hidden),
            f"{name}.mlp.up_proj.weight": weight(inner, hidden),
            f"{name}.mlp.down_proj.weight": weight(hidden, inner),
            f"{name}.input_layernorm.weight": norm(),
            f"{name}.post_attention_layernorm.weight": norm(),
        }
    save_file(tensors, folder / "model.safetensors")
    return folder
