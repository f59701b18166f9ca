"""Weights of a tiny model in a file, as large as those of `random_weights`, so that ranks load
shards of one and the same model."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_weights(folder: Path, *, seed: int = 1, **changes: Any) -> Path:
    """Writes model.safetensors beside the config.json of a "llama" or "gemma3" of `tiny.MODELS`,
    with `changes`; returns the folder."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    is_gemma = config["model_type"] == "gemma3_text"
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if is_gemma else []
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (config["vocab_size"], hidden),
        "norm": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        shapes |= {
            f"{attention}.q_proj": (query, hidden),
            f"{attention}.k_proj": (keys, hidden),
            f"{attention}.v_proj": (keys, hidden),
        }
        shapes |= {
            f"{attention}.o_proj": (hidden, query),
            f"{mlp}.gate_proj": (inner, hidden),
            f"{mlp}.up_proj": (inner, hidden),
        }
        shapes |= {f"{mlp}.down_proj": (hidden, inner)} | {
            f"layers.{layer}.{norm}": (hidden,) for norm in norms
        }
        shapes |= (
            {f"{attention}.{norm}": (head,) for norm in ("q_norm", "k_norm")} if is_gemma else {}
        )
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"model.{name}.weight": _values(name, shape, generator, is_gemma)
        for name, shape in shapes.items()
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _values(
            "lm_head", (config["vocab_size"], hidden), generator, is_gemma
        )
    save_file(tensors, folder / "model.safetensors")
    return folder


def _values(
    name: str, shape: tuple[int, ...], generator: torch.Generator, is_gemma: bool
) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return values * (0.05 if "embed" in name else 1.5 * shape[-1] ** -0.5)
    # Gemma's norms add one themselves.
    return 0.1 * values + (0.0 if is_gemma else 1.0)
