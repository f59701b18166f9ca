"""Tests the ledger's forecast against the simulator: the ceiling (hits of an endless cache) and
the gain (further hits of a larger one) may differ by two percentage points."""

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.policies import POLICIES
from hotkv_server.ledger.book.forecast import GIB, MAX_SEEN, Forecast, RequestDemand, step_bytes
from hotkv_server.simulate.replay import replay, unbounded
from hotkv_server.simulate.trace import Trace, load_trace, make_trace
from tests.simulate.traces import MAKERS

TRACES = Path(__file__).resolve().parents[3] / "shared/traces"
"""Beside the repository; tests of absent ones are skipped."""
BLOCK_BYTES = GIB >> 4
"""16 blocks take one GiB, the forecast's step."""
POINTS = 0.02


@functools.cache
def trace_of(name: str) -> Trace:
    if name in MAKERS:
        return make_trace(name, MAKERS[name](0, 1500))
    path = TRACES / f"{name}_trace.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return load_trace(path)


def forecast_of(trace: Trace, capacity_blocks: int, max_keys: int, policy: str) -> Forecast:
    made = Forecast(POLICIES[policy], 0, max_keys, MAX_SEEN)
    keys = np.ascontiguousarray(trace.hashes[:, :2]).view(np.uint64)[:, 0]
    starts = trace.starts.tolist()
    for request, now_s in enumerate(trace.times_s.tolist()):
        mine = keys[starts[request] : starts[request + 1]]
        demand = RequestDemand(mine, len(mine) * 16 + 5, 16, BLOCK_BYTES, 0, may_refuse=True)
        made.observe(demand, capacity_blocks * BLOCK_BYTES, now_s, int(now_s // 60))
    made.check_invariants()
    return made


def compare(name: str, percent: float, max_keys: int, policy: str) -> tuple[float, float]:
    """Differences to the simulator, of ceiling and gain, as shares of the prompt tokens."""
    trace = trace_of(name)
    capacity = trace.capacity_blocks(percent)
    made = forecast_of(trace, capacity, max_keys, policy)
    step = step_bytes(capacity * BLOCK_BYTES) // BLOCK_BYTES
    found = made.outlook(0, capacity * BLOCK_BYTES, int(trace.times_s[-1] // 60))
    tokens = len(trace.blocks) * 16 + trace.num_requests * 5
    assert found.prompt_tokens == tokens
    larger, smaller = (
        replay(trace, blocks, POLICIES[policy]).prefix.sum() * 16 / tokens
        for blocks in (capacity + step, capacity)
    )
    ceiling = unbounded(trace).sum() * 16 / tokens
    return found.ceiling_ratio - ceiling, found.gain_ratio - max(0.0, larger - smaller)


EVERYDAY = [
    ("zipf_trees", 5, 4096, "hotness"),
    ("agent_sessions", 5, 256, "hotness"),
    ("mixture", 5, 256, "hotness"),
    ("drift", 2, 4096, "lru"),
    ("agents", 5, 512, "hotness"),
]
# `EVERYDAY` has these two.
SIZES = itertools.cycle([(2, 4096), (10, 256)])
LONG = [
    pytest.param(name, *size, "hotness", marks=pytest.mark.long)
    for name, size in zip(MAKERS, SIZES, strict=False)
    if name not in ("zipf_trees", "agent_sessions")
]
LONG += [
    pytest.param("synthetic", 10, 4096, "hotness", marks=pytest.mark.long),
    pytest.param("conversation", 10, 4096, "hotness", marks=pytest.mark.campaign),
]


@pytest.mark.parametrize(("name", "percent", "max_keys", "policy"), [*EVERYDAY, *LONG])
def test_ceiling_and_gain_are_the_simulators(
    name: str, percent: float, max_keys: int, policy: str
) -> None:
    ceiling_error, gain_error = compare(name, percent, max_keys, policy)
    assert abs(ceiling_error) <= POINTS and abs(gain_error) <= POINTS, (ceiling_error, gain_error)


def demand(first: int, count: int, num_hits: int = 0) -> RequestDemand:
    numbers = np.arange(first, first + count, dtype=np.uint64) + np.uint64(1)
    keys = numbers * np.uint64(0x9E37_79B9_7F4A_7C15)
    return RequestDemand(keys, count * 16, 16, BLOCK_BYTES, num_hits)


def test_blocks_named_twice_count_once() -> None:
    """Only a faulty engine does this; it must not end the node's timer."""
    made = Forecast(POLICIES["hotness"], 0, 64, 512)
    made.observe(replace(demand(0, 1), keys=np.repeat(demand(0, 1).keys, 100)), GIB, 0.0, 0)
    assert made.shadow_share == made.seen_share == 1.0
    for number in range(1, 100):
        keys = np.tile(demand(7 * number, 5).keys, 2)
        made.observe(replace(demand(0, 5), keys=keys), GIB, float(number), 0)
        made.check_invariants()


def test_actual_hits_are_reachable_though_unseen() -> None:
    """Engines also store answers, which no earlier request had."""
    found = Forecast(POLICIES["hotness"], 0).outlook(3600, GIB, 0)
    assert (found.prompt_tokens, found.ceiling_ratio, found.gain_ratio) == (0, 0.0, 0.0)
    made = Forecast(POLICIES["lru"], 0)
    made.observe(demand(0, 10, num_hits=6), GIB, 0.0, 0)
    assert made.outlook(0, GIB, 0).ceiling_ratio == 0.6


def test_a_smaller_sample_remembers_what_it_has_seen() -> None:
    made = Forecast(POLICIES["lru"], 0, 64, 512)
    for ceiling in (0.0, 0.5):
        for first in range(0, 4000, 50):
            made.observe(demand(first, 50), 1000 * GIB, 0.0, 0)
            made.check_invariants()
        assert made.outlook(0, GIB, 0).ceiling_ratio == pytest.approx(ceiling, abs=0.08)
    assert made.seen_share <= 1 / 8 and made.shadow_share <= 1 / 32


@pytest.mark.parametrize("is_restored", [False, True])
def test_endless_cache_forgets_nothing(is_restored: bool) -> None:
    made = Forecast(POLICIES["lru"], 0, 64, 4096)
    made.observe(demand(0, 200), GIB, 0.0, 0)
    if is_restored:
        made = restored(made)
    for number in range(1, 31):
        made.observe(demand(1000, 400), GIB, float(number), 0)
    made.observe(demand(0, 200), GIB, 31.0, 60 * 24)
    assert made.outlook(60, GIB, 60 * 24).ceiling_ratio == 1.0


def restored(made: Forecast) -> Forecast:
    again = Forecast(POLICIES["lru"], 0, 64, 4096)
    # Beyond the table's end, as another version's ledger may have.
    beyond = np.uint64(again._seen.tags.size << 32 | 1)
    again.put_back(np.append(made.seen(), beyond), made.seen_share)
    return again


def test_blocks_from_before_a_restart_yield_first() -> None:
    """The table has room for all, so new keys must not displace old ones."""
    made = Forecast(POLICIES["lru"], 0, 64, 4096)
    made.observe(demand(0, 2000), GIB, 0.0, 0)
    again = restored(made)
    again.observe(demand(2000, 2000), GIB, 1.0, 0)
    again.observe(demand(0, 2000), GIB, 2.0, 60 * 24)
    again.check_invariants()
    assert again.outlook(60, GIB, 60 * 24).ceiling_ratio == pytest.approx(1.0, abs=0.001)


@pytest.mark.parametrize("max_keys", [4096, 1024])
def test_larger_arena_has_larger_steps(max_keys: int) -> None:
    assert step_bytes(GIB) == step_bytes(8 * GIB) == GIB and step_bytes(64 * GIB) == 8 * GIB
    made, capacity = Forecast(POLICIES["lru"], 0, max_keys), 64 * GIB
    blocks = capacity // BLOCK_BYTES
    for turn in range(4):
        # A few more than the cache holds.
        for part in range(0, blocks + 64, 64):
            made.observe(demand(part, 64), capacity, turn * 1e4 + part, 0)
    found = made.outlook(0, capacity, 0)
    assert found.gain_ratio > 0.5 and found.gib_gain_ratio == pytest.approx(found.gain_ratio / 8)
