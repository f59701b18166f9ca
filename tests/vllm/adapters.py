"""Writes LoRA adapters for the tiny llama."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.vllm.tiny import COMMON

RANK = 8
LORA = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}


def write_adapter(folder: Path, seed: int) -> Path:
    """In PEFT's layout. Replaces an older adapter, as `save_pretrained` does."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    hidden, kv = COMMON["hidden_size"], COMMON["num_key_value_heads"] * COMMON["head_dim"]
    tensors = {}
    for layer in range(2):
        for name, width in {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "o_proj": hidden}.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = (
                torch.randn(RANK, hidden, generator=generator) * hidden**-0.5
            )
            tensors[f"{prefix}.lora_B.weight"] = (
                torch.randn(width, RANK, generator=generator) * RANK**-0.5
            )
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    }
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"bias": "none", "task_type": "CAUSAL_LM"})
    )
    return folder


_numbers: dict[Path, int] = {}


def adapter(path: Path) -> dict[str, Any]:
    return {
        "lora_name": path.name,
        "lora_int_id": _numbers.setdefault(path, len(_numbers) + 1),
        "lora_path": str(path),
    }
