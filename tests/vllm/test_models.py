"""Real vLLM with tiny models of real architectures: logprobs of an engine that loads from hotkv
against those of the one that stored.

Weights are random but large, so that a wrong block shows (`random_weights`); in float32 cold and
warm then agree to the last digits.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.runs import difference, prompts, settled
from tests.vllm.tiny import VOCAB, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (31, 33, 100, 257, 500, 701)
ALIGN = {"enable_prefix_caching": True, "mamba_cache_mode": "align"}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
MLA: dict[str, Any] = {"block_size": 16, "enable_prefix_caching": True}
if torch.cpu._is_amx_tile_supported():
    # vLLM's kernels for AMX know no float32, and want blocks of whole tiles.
    MLA |= {"block_size": 32, "dtype": "bfloat16"}
else:
    # vLLM's other kernels answer otherwise after a prefix hit, so it forbids them, and hotkv is off
    # (`test_reuse`). Between two hits the bytes must be equal all the same.
    MLA |= {"despite_vllm": True}
LONG, CAMPAIGN = pytest.mark.long, pytest.mark.campaign
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-3}

Start = Callable[..., EngineProcess]


@pytest.fixture
def start(shared_daemon: Daemon, engines: Engines, tmp_path: Path) -> Start:
    def make(
        kind: str, *, connector: dict[str, Any] | None = None, **settings: Any
    ) -> EngineProcess:
        settings = {
            "load_format": "random",
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 1024,
        } | settings
        # A key space of the test's own in the server that all tests share.
        connector = {
            "weights_identity": tmp_path.name,
            "flush_timeout_s": 5.0,
            "startup_wait_s": 20.0,
        } | (connector or {})
        return engines.start(
            write_model(tmp_path / kind, kind),
            shared_daemon.target,
            connector=connector,
            **settings,
        )

    return make


def clean(totals: dict[str, float]) -> bool:
    return not {"failed_loads", "hook_errors", "refused_blocks", "short_grants"} & totals.keys()


@pytest.mark.long
def test_wrong_kv_would_be_seen(start: Start) -> None:
    """The control of this file: one other token far back moves the logprobs by more than any
    tolerance here."""
    one = start("gemma3")
    (prompt,) = prompts(9, (500,))
    other = [*prompt[:300], 5, *prompt[301:]]
    answers = [one.ask("generate", prompts=[p], max_tokens=8) for p in (prompt, other)]
    assert difference(*answers) > 20 * TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("kind", "settings", "alignment"),
    [
        pytest.param("gemma3", {}, 32, id="gemma3", marks=CAMPAIGN),
        pytest.param(
            "gemma3",
            {"max_num_batched_tokens": 96, "max_num_seqs": 4},
            32,
            id="gemma3-chunked-prefill",
            marks=LONG,
        ),
        pytest.param(
            "gemma3", {"speculative_config": NGRAM}, 32, id="gemma3-ngram", marks=CAMPAIGN
        ),
        pytest.param("gemma4", {}, 64, id="gemma4"),
        pytest.param("gpt_oss", {}, 32, id="gpt_oss", marks=LONG),
        pytest.param("llama4", {}, 32, id="llama4"),
        pytest.param("two_windows", {}, 32, id="two_windows", marks=CAMPAIGN),
        pytest.param("windows_only", {}, 32, id="windows_only", marks=CAMPAIGN),
        pytest.param("mistral", {}, 32, id="mistral", marks=CAMPAIGN),
    ],
)
def test_warm_is_as_good_as_cold(
    start: Start, kind: str, settings: dict[str, Any], alignment: int
) -> None:
    batch = prompts(9, LENGTHS)
    first, second = start(kind, **settings), start(kind, **settings)
    cold = first.ask("generate", prompts=batch, max_tokens=40)
    assert clean(settled(first))
    warm = second.ask("generate", prompts=batch, max_tokens=40)
    assert warm["cached"] == [(len(p) - 1) // alignment * alignment for p in batch]
    assert (
        warm["tokens"] == cold["tokens"]
        and difference(cold, warm) < TOLERANCE[settings.get("dtype", "float32")]
    )
    totals = second.ask("stats")["totals"]
    assert totals["loads"] >= 4 and clean(totals)


@pytest.mark.parametrize(
    ("kind", "settings", "alignment", "is_exact"),
    [
        pytest.param("lfm2", ALIGN, 32, True, id="lfm2", marks=CAMPAIGN),
        # vLLM's own hits end inside a block here; a local hit that does must not upset a longer one
        # from hotkv, which ends with a block.
        pytest.param(
            "lfm2",
            {**ALIGN, "block_size": 64, "prefix_match_unit": 32},
            64,
            True,
            id="lfm2-partial-tails",
            marks=LONG,
        ),
        # vLLM's latent attention on CPU answers otherwise after any prefix hit, so hits are the
        # measure: the same engine's.
        pytest.param("deepseek", MLA, MLA["block_size"], False, id="deepseek", marks=LONG),
        pytest.param(
            "gemma3",
            {"dtype": "bfloat16"},
            32,
            False,
            id="gemma3-bfloat16",
            marks=CAMPAIGN,
        ),
    ],
)
def test_models_whose_answer_depends_on_the_batch(
    start: Start, kind: str, settings: dict[str, Any], alignment: int, is_exact: bool
) -> None:
    """One prompt at a time: these answer otherwise in company, by vLLM's CPU kernels or by the
    rounding of bfloat16."""
    batch = prompts(9, LENGTHS)

    first, second = start(kind, **settings), start(kind, **settings)
    cold, local = first.ask_each(batch, 40), first.ask_each(batch, 40)
    assert clean(settled(first))
    warm = second.ask_each(batch, 40)
    expected = cold if is_exact else local
    assert warm["cached"] == [(len(p) - 1) // alignment * alignment for p in batch]
    assert (
        warm["tokens"] == expected["tokens"]
        and difference(expected, warm) < TOLERANCE[settings.get("dtype", "float32")]
    )
    totals = second.ask("stats")["totals"]
    assert totals["loads"] >= 4 and clean(totals)
    longer = [prompt + [5] * 300 for prompt in batch[2:4]]
    assert [
        second.ask("generate", prompts=[prompt], max_tokens=1)["cached"][0] >= 64
        for prompt in longer
    ] == [True, True]


@pytest.mark.long
def test_states_that_take_a_block_of_a_thousand_tokens(start: Start) -> None:
    """Gated delta net: one state is 1056 tokens of KV; hits end there only."""
    settings = {"dtype": "bfloat16", "max_model_len": 4096, **ALIGN}
    batch = prompts(9, (1100, 2500))
    first, second = start("qwen3_next", **settings), start("qwen3_next", **settings)
    cold = first.ask_each(batch, 20)
    settled(first)
    # In bfloat16 on AMX a hit, or company, moves logprobs by itself: one prompt at a time, beside
    # vLLM's own hits.
    local, warm = first.ask_each(batch, 20), second.ask_each(batch, 20)
    assert warm["cached"] == local["cached"] == [1056, 2112]
    assert (
        warm["tokens"] == cold["tokens"] == local["tokens"]
        and difference(local, warm) < TOLERANCE["bfloat16"]
    )


@pytest.mark.long
def test_a_drafter_has_the_last_block_computed_again(start: Start, tmp_path: Path) -> None:
    drafter = {
        "method": "eagle",
        "model": str(write_model(tmp_path / "eagle", "eagle")),
        "num_speculative_tokens": 2,
    }
    batch = prompts(9, LENGTHS)
    first, second = (start("llama", speculative_config=drafter) for _ in range(2))
    cold = first.ask("generate", prompts=batch, max_tokens=40)
    settled(first)
    first.ask("reset")
    local_hits = first.ask("generate", prompts=batch, max_tokens=40)["cached"]
    warm = second.ask("generate", prompts=batch, max_tokens=40)
    assert warm["tokens"] == cold["tokens"] and difference(cold, warm) < TOLERANCE["float32"]
    # As many as vLLM itself takes from its own cache: one block less than without a drafter.
    again = second.ask("generate", prompts=batch, max_tokens=40)["cached"]
    assert warm["cached"] == again == local_hits == [max(0, len(p) // 32 * 32 - 32) for p in batch]
    assert clean(second.ask("stats")["totals"])


@pytest.mark.parametrize("interval", [0, 256, pytest.param(1 << 20, marks=CAMPAIGN)])
def test_states_are_kept_at_intervals_and_at_the_end_of_a_prompt(
    start: Start, interval: int
) -> None:
    """A conversation: each prompt is the one before and more. Every turn goes on where the last one
    ended."""
    dice = random.Random(4)
    settings = {
        **ALIGN,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 2,
        "prefix_cache_retention_interval": 32,
    }
    one, second = (
        start("lfm2", connector={"state_interval_tokens": interval}, **settings) for _ in range(2)
    )
    plain: list[dict[str, Any]] = []
    prompt: list[int] = []
    for _ in range(4):
        prompt = prompt + [dice.randrange(3, VOCAB) for _ in range(100)]
        plain.append(one.ask("generate", prompts=[prompt], max_tokens=2))
        settled(one)
        one.ask("reset")
    assert [answer["cached"] for answer in plain] == [[0], [96], [192], [288]]
    # 12 blocks of attention, and states: all at which a step of 64 tokens or a prompt ended, those
    # at the interval and the ends, the ends.
    ends = {96, 192, 288, 384}
    states = {0: {64, 160, 256, 352} | ends, 256: {256} | ends}.get(interval, ends)
    assert settled(one)["stored_blocks"] == 12 + len(states)
    warm = second.ask("generate", prompts=[prompt], max_tokens=2)
    assert warm["cached"] == [384] and difference(plain[-1], warm) < TOLERANCE["float32"]


@pytest.mark.long
def test_four_requests_on_a_device_too_small_for_the_prefix_in_window_layers(start: Start) -> None:
    """1) a long prompt is stored, 2) a shorter one hits, 3) another long one flushes the device
    cache, 4) the first loads again.

    Source: the hybrid connector's design in vLLM. The first prompt has 22 blocks in each of six
    groups; the device has 72.
    """
    settings = {
        "num_gpu_blocks_override": 72,
        "max_model_len": 768,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 2,
    }
    first, other = prompts(3, (720, 730))
    one, fresh = start("gemma3", **settings), start("gemma3", num_gpu_blocks_override=512)
    long = one.ask("generate", prompts=[first], max_tokens=8)
    settled(one)
    shorter = one.ask("generate", prompts=[first[:400]], max_tokens=8)
    another = one.ask("generate", prompts=[other], max_tokens=8)
    before = settled(one)
    again = one.ask("generate", prompts=[first], max_tokens=8)
    assert (long["cached"], shorter["cached"], another["cached"], again["cached"]) == (
        [0],
        [384],
        [0],
        [704],
    )
    assert again["tokens"] == long["tokens"] and difference(long, again) < TOLERANCE["float32"]
    totals = one.ask("stats")["totals"]
    assert totals["loads"] == before["loads"] + 1 and clean(totals)
    # 22 blocks of the full layer, three in each of the five windows; a block is 8 KiB a layer.
    assert totals["load_bytes"] - before["load_bytes"] == (22 + 5 * 3) * 2 * 32 * 2 * 32 * 4
    assert (
        difference(fresh.ask("generate", prompts=[first[:400]], max_tokens=8), shorter)
        < TOLERANCE["float32"]
    )
