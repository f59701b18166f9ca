"""Weights files of tiny models, as large as `random_weights`, from which ranks load their
shards."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_weights(folder: Path, *, seed: int = 1, **changes: Any) -> Path:
    """transformers must know the architecture.

    changes: of config.json, written first.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    described = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(described))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    generator = torch.Generator().manual_seed(seed)
    # Gemma adds 1 to its norm weights.
    middle = 0.0 if described["model_type"].startswith("gemma") else 1.0
    tensors = {}
    for name, weight in model.named_parameters():
        values = torch.randn(weight.shape, generator=generator)
        if weight.dim() > 1:
            tensors[name] = values * (0.05 if "embed" in name else 1.5 * weight.shape[-1] ** -0.5)
        else:
            tensors[name] = 0.1 * values + middle
    save_file(tensors, folder / "model.safetensors")
    return folder
