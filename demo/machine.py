"""Chooses what engines compute on this processor, for the demo, the benchmarks and the tests."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from demo import prompts

if TYPE_CHECKING:
    from demo.processes import Engine

WARM_UP_TOKENS = 600
MOST_PREFILL_S = 30.0
LINEAR_TOKENS = 6000
"""Length at which half of a prompt's time is attention, which grows with the square of the length:
SmolLM2's."""
STEP_TOKENS = 50


def dtype_for(model: str) -> str:
    """Returns vLLM's `dtype` for the model in the folder `model`: float32 for a model in bfloat16
    if the processor has no instructions for it, otherwise `auto`.

    Imports torch. Source of the test: `CpuPlatform.import_kernels` of vLLM.
    """
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
    """Runs two prompts before the measurements, so that these do not include vLLM's one-time work.
    Returns the length of a prompt that the engine computes in about MOST_PREFILL_S seconds, at most
    `most`.

    seed: of the prompts; the caller's prompts have others than `seed` and `seed + 1`.
    """
    for one in (seed, seed + 1):
        answer = engine.generate(prompts.token_ids(model, one, WARM_UP_TOKENS), max_tokens=4)
    return fitting_tokens(answer.ttft_s, most)


def fitting_tokens(warm_up_s: float, most: int) -> int:
    """Returns the length of a prompt for this machine, between WARM_UP_TOKENS and `most`.

    warm_up_s: seconds that a prompt of WARM_UP_TOKENS took.
    """

    def work(length: int) -> float:
        return length * (1 + length / LINEAR_TOKENS)

    fitting = most
    while fitting > WARM_UP_TOKENS and (
        warm_up_s * work(fitting) > MOST_PREFILL_S * work(WARM_UP_TOKENS)
    ):
        fitting -= STEP_TOKENS
    return max(fitting, WARM_UP_TOKENS)
