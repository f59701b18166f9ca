"""Tiny models in real vLLM: logprobs of a load against those of the store."""

import random
from typing import Any

import pytest
import torch

from tests.vllm.feature_runs import Starter, clean
from tests.vllm.runs import NGRAM, difference, prompts, settled
from tests.vllm.tiny import VOCAB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (31, 33, 100, 257, 500, 701)
LONG, CAMPAIGN = pytest.mark.long, pytest.mark.campaign
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-3}
ALIGN = {"enable_prefix_caching": True, "mamba_cache_mode": "align"}
CHUNKED = {"max_num_batched_tokens": 96, "max_num_seqs": 4}
# vLLM's hits may end inside a block, hotkv's not: it must extend a shorter hit of vLLM's.
TAILS = ALIGN | {"block_size": 64, "prefix_match_unit": 32}
MLA: dict[str, Any] = {"block_size": 16, "enable_prefix_caching": True}
if torch.cpu._is_amx_tile_supported():
    # AMX kernels lack float32 and need whole tiles.
    MLA |= {"block_size": 32, "dtype": "bfloat16"}
else:
    # Without AMX answers differ after a hit, so vLLM forbids reuse. hotkv is forced on, two hits
    # are compared.
    MLA |= {"despite_vllm": True}
GATED = ALIGN | {"dtype": "bfloat16", "max_model_len": 4096}


@pytest.mark.long
def test_wrong_kv_would_be_seen(start: Starter) -> None:
    """A token changed in mid-prompt must exceed every tolerance here."""
    one = start("gemma3")
    (prompt,) = prompts(9, (500,))
    other = [*prompt[:300], 5, *prompt[301:]]
    answers = [one.ask("generate", prompts=[p], max_tokens=8) for p in (prompt, other)]
    assert difference(*answers) > 20 * TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("kind", "settings", "alignment"),
    [
        pytest.param("gemma3", {}, 32, marks=CAMPAIGN),
        pytest.param("gemma3", CHUNKED, 32, id="gemma3-chunked-prefill", marks=LONG),
        pytest.param("gemma3", {"speculative_config": NGRAM}, 32, id="ngram", marks=CAMPAIGN),
        pytest.param("gemma4", {}, 64),
        pytest.param("gpt_oss", {}, 32, marks=LONG),
        pytest.param("llama4", {}, 32, marks=LONG),
        pytest.param("two_windows", {}, 32, marks=CAMPAIGN),
        pytest.param("mistral", {}, 32, marks=CAMPAIGN),
        # Batching changes their answers. With all but lfm2 a hit does too, so two hits are
        # compared.
        pytest.param("lfm2", ALIGN, 32, id="lfm2", marks=CAMPAIGN),
        pytest.param("lfm2", TAILS, 64, id="lfm2-partial-tails", marks=LONG),
        pytest.param("deepseek", MLA, MLA["block_size"], id="deepseek", marks=LONG),
        pytest.param("gemma3", {"dtype": "bfloat16"}, 32, id="bfloat16", marks=CAMPAIGN),
        # Blocks of 1056 or 1088 tokens, by processor.
        pytest.param("qwen3_next", GATED, 0, id="qwen3_next", marks=LONG),
    ],
)
def test_warm_is_as_good_as_cold(
    start: Starter, kind: str, settings: dict[str, Any], alignment: int
) -> None:
    batch = prompts(9, (1100, 2500) if kind == "qwen3_next" else LENGTHS)
    is_alone = kind in ("lfm2", "deepseek", "qwen3_next") or "dtype" in settings
    first, second = start(kind, **settings), start(kind, **settings)

    def ask(engine: Any) -> dict[str, Any]:
        if is_alone:
            return engine.ask_each(batch, 16)
        return engine.ask("generate", prompts=batch, max_tokens=16)

    expected = ask(first)
    if is_alone and kind != "lfm2":
        expected = ask(first)
    settled(first)
    warm = ask(second)
    alignment = alignment or second.ask("block_size")["tokens"]
    assert warm["cached"] == [(len(p) - 1) // alignment * alignment for p in batch]
    assert warm["tokens"] == expected["tokens"]
    assert difference(expected, warm) < TOLERANCE[settings.get("dtype", "float32")]
    assert second.ask("stats")["totals"]["loads"] >= min(4, len(batch))
    assert clean(first) and clean(second)
    if kind == "lfm2":
        longer = [prompt + [5] * 300 for prompt in batch[2:4]]
        cached = second.ask("generate", prompts=longer, max_tokens=1)["cached"]
        assert min(cached) >= 64


@pytest.mark.parametrize(
    "interval", [0, pytest.param(256, marks=LONG), pytest.param(1 << 20, marks=CAMPAIGN)]
)
def test_states_are_kept_at_intervals_and_ends(start: Starter, interval: int) -> None:
    """Each turn hits up to the previous prompt's last full block."""
    dice = random.Random(4)
    settings = ALIGN | {"max_num_batched_tokens": 64, "max_num_seqs": 2}
    settings |= {"prefix_cache_retention_interval": 32}
    settings |= {"connector": {"state_interval_tokens": interval}}
    one, second = (start("lfm2", **settings) for _ in range(2))
    plain: list[dict[str, Any]] = []
    prompt: list[int] = []
    for _ in range(4):
        prompt = prompt + [dice.randrange(3, VOCAB) for _ in range(100)]
        plain.append(one.ask("generate", prompts=[prompt], max_tokens=2))
        settled(one)
        one.ask("reset")
    assert [answer["cached"] for answer in plain] == [[0], [96], [192], [288]]
    # There are 12 attention blocks besides.
    ends = {96, 192, 288, 384}
    states = {0: {64, 160, 256, 352} | ends, 256: {256} | ends}.get(interval, ends)
    assert settled(one)["stored_blocks"] == 12 + len(states)
    warm = second.ask("generate", prompts=[prompt], max_tokens=2)
    assert warm["cached"] == [384] and difference(plain[-1], warm) < TOLERANCE["float32"]
