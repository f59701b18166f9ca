"""What engines compute on this processor, for demo, benchmarks and tests."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from demo import prompts

if TYPE_CHECKING:
    from demo.processes import Engine

WARM_UP_TOKENS = 600
MOST_PREFILL_S = 30.0
LINEAR_TOKENS = 6000
"""Where half of SmolLM2's time is attention, which grows with the square of the length."""
STEP_TOKENS = 50


def dtype_for(model: str) -> str:
    """vLLM's `dtype`: float32 for a model in bfloat16 without the processor's instructions, else
    `auto`. Imports torch. Source: `CpuPlatform.import_kernels` of vLLM."""
    import torch

    config = Path(model) / "config.json"
    known = json.loads(config.read_text()) if config.is_file() else {}
    if known.get("dtype", known.get("torch_dtype")) != "bfloat16" or torch.cuda.is_available():
        return "auto"
    has_bfloat16 = (
        torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
        # Of Arm.
        or torch.cpu.get_capabilities().get("bf16", False)
    )
    return "auto" if has_bfloat16 else "float32"


def warm_up(engine: "Engine", model: Path, seed: int, most: int) -> int:
    """Two prompts for vLLM's one-time work. Returns the length that takes about MOST_PREFILL_S,
    at most `most`. seed: the caller's prompts have others than `seed` and `seed + 1`."""
    for one in (seed, seed + 1):
        answer = engine.generate(prompts.token_ids(model, one, WARM_UP_TOKENS), max_tokens=4)
    return fitting_tokens(answer.ttft_s, most)


def fitting_tokens(warm_up_s: float, most: int) -> int:
    """Between WARM_UP_TOKENS and `most`. warm_up_s: of a prompt of WARM_UP_TOKENS."""

    def work(length: int) -> float:
        return length * (1 + length / LINEAR_TOKENS)

    fitting = most
    while fitting > WARM_UP_TOKENS and (
        warm_up_s * work(fitting) > MOST_PREFILL_S * work(WARM_UP_TOKENS)
    ):
        fitting -= STEP_TOKENS
    return max(fitting, WARM_UP_TOKENS)
