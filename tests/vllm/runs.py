"""Generates with real engines."""

import random
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_for
from tests.vllm.processes import EngineProcess
from tests.vllm.tiny import BLOCK_TOKENS, VOCAB

LENGTHS = (1, 31, 33, 47, 64, 65, 95, 100, 127, 129, 200, 255, 257, 300, 333, 500, 641, 777, 901)
RANDOM = {"load_format": "random", "dtype": "float32"}
"""Wrong KV gives other tokens. Batches differ after a load, and only float32 does not round them
differently."""
NOISE = 1e-4
NGRAM: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
"""Wrong KV changes it by twenty times as much (`test_models.py::test_wrong_kv_would_be_seen`)."""


def prompts(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def usable(prompt: list[int]) -> int:
    """Whole blocks without the last token."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def hits(batch: list[list[int]]) -> list[int]:
    return [usable(prompt) for prompt in batch]


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest difference of log probabilities, up to each prompt's first token that differs."""
    worst = 0.0
    for mine, theirs, my_tokens, their_tokens in zip(
        one["logprobs"], other["logprobs"], one["tokens"], other["tokens"], strict=True
    ):
        for a, b, token, their_token in zip(mine, theirs, my_tokens, their_tokens, strict=True):
            worst = max(worst, abs(a - b))
            if token != their_token:
                break
    return worst


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["tokens"] == other["tokens"]) and difference(one, other) <= NOISE


def settled(engine: EngineProcess) -> dict[str, float]:
    """Counters, once all earlier stores are reported."""
    stats: dict[str, Any] = {}

    def is_reported() -> bool:
        engine.ask("generate", prompts=[[7, 8, 9]], max_tokens=2)
        stats.update(engine.ask("stats"))
        return not stats["stores"]

    wait_for(is_reported, "the reports of all stores")
    totals: dict[str, float] = stats["totals"]
    return totals


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
