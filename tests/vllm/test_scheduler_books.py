"""Tests small classes of the scheduler side, each alone: `OtherLoads` (loads by other connectors),
`CommonLoads` (loads of blocks that several requests need), `WrittenBlocks` (device blocks that a
step writes) and `HiddenKeys` (block keys that lookups must miss, after failed loads)."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_vllm.compat import NULL_BLOCK
from hotkv_vllm.scheduler import hits
from hotkv_vllm.scheduler.hits import HiddenKeys
from hotkv_vllm.scheduler.loads import CommonLoads, OtherLoads
from hotkv_vllm.scheduler.written_blocks import WrittenBlocks
from tests.vllm.desks import blocks

OUTCOMES = st.sampled_from(["well", "well", "failed", "unheard", "lost"])
PLANNED = st.tuples(st.booleans(), st.integers(0, 2), OUTCOMES, st.booleans())


@given(st.lists(PLANNED, max_size=16), st.integers(0, 2))
def test_blocks_anothers_load_may_lack_arent_stored(
    steps: list[tuple[bool, int, str, bool]], behind: int
) -> None:
    """Another connector loads in some steps, and its loads may fail. A request may have used such a
    load. As long as the load's result is unknown, and if it has failed, the request's blocks must
    not be stored. Each random step admits a request, which runs `delay` steps later. A step's
    report arrives `behind` steps later, unless the report or the step's plan is lost."""
    others, numbers = OtherLoads(), dict[int, int]()
    # due, ran_in: for each request, the step in which it will run, and the one in which it ran.
    # are_open: steps whose loads have no result so far. bad: steps whose loads may have failed.
    due, ran_in, are_open, bad = dict[str, int](), dict[str, int](), set[int](), set[int]()
    for at, (has_load, delay, outcome, ends) in enumerate(steps):
        if ends:
            others.ended(f"{at - 1}")
            due.pop(f"{at - 1}", None)
            ran_in.pop(f"{at - 1}", None)
        others.admitted(f"{at}")
        due[f"{at}"] = at + delay
        if outcome == "lost":
            others.lost()
            ran_in |= dict.fromkeys(due.keys() - ran_in.keys(), -1)
            bad.add(-1)
        else:
            running = {name for name, first in due.items() if first <= at}
            ran_in = dict.fromkeys(running, at) | ran_in
            are_open |= {at} if has_load or are_open else set()
            numbers[at] = others.step(running, has_load)
            assert bool(numbers[at]) == (at in are_open)
        told = at - behind
        if told in numbers and steps[told][2] != "unheard" and numbers[told]:
            bad |= {one for one in are_open if one < told or steps[told][2] == "failed"}
            are_open = {one for one in are_open if one > told}
            others.settled(numbers[told], steps[told][2] == "well")
        waiting = due.keys() - ran_in.keys()
        held = {name for name, first in ran_in.items() if first in are_open | bad}
        assert others.held == held
        assert {name for name in due if not others.may_store(name)} == held | waiting


@pytest.mark.parametrize(
    ("computed", "hit", "prompt", "now_s", "is_awaited"),
    [
        (0, 64, "p", 0.9, True),
        (0, 64, "p", 1.0, False),
        (0, 64, "q", 0.0, False),
        (0, 48, "p", 0.0, False),
        (0, 128, "p", 0.0, True),
        (0, 144, "p", 0.0, False),
        (16, 112, "p", 0.0, True),
        (16, 128, "p", 0.0, False),
        (64, 80, "p", 0.0, False),
    ],
)
def test_load_is_awaited_if_it_brings_half(
    computed: int, hit: int, prompt: str, now_s: float, is_awaited: bool
) -> None:
    """A load of the first 64 tokens of prompt `p` is in progress, until time 1 at most. A request
    must wait for this load if the request's own hit contains these tokens, and if they are at least
    half of what the request would load.

    computed, hit: tokens of the request that are computed, and that its hit covers.
    prompt: its prompt.
    now_s: the time at which it asks.
    is_awaited: whether it must wait.
    """
    common = CommonLoads()
    common.begin("a", 64, b"p64", 1.0)

    def awaited() -> str:
        return common.awaited(computed, hit, lambda tokens: f"{prompt}{tokens}".encode(), now_s)

    assert awaited() == ("a" if is_awaited else "")
    common.ended("a")
    assert not awaited()


def asks(name: str, computed: int = 0) -> Any:
    return SimpleNamespace(request_id=name, num_computed_tokens=computed)


@pytest.mark.parametrize(
    "matched, computed, num_hit",
    [(0, 0, 0), (16, 0, 1), (31, 0, 1), (0, 32, 2), (16, 32, 2), (32, 16, 2)],
)
def test_blocks_behind_a_requests_hit_are_new(matched: int, computed: int, num_hit: int) -> None:
    """Allocates blocks for a request with a hit. Only the blocks after the hit must count as
    written by it; in a group of recurrent states, all must.

    matched: tokens of a hit in vLLM's own cache.
    computed: tokens of a finished load.
    num_hit: number of blocks that these cover.
    """
    written = WrittenBlocks([16, 0])
    written.matched("a", matched)
    written.allocated(asks("a", computed), blocks([1, 2, 3], [NULL_BLOCK, 11, 12]))
    assert written.of_step() == {*[1, 2, 3][num_hit:], 11, 12} == written.take()
    assert written.take() == set() == written.of_step()
    # A request ends before its blocks are allocated. The record of its hit must be deleted, because
    # a later request may have the same name.
    written.matched("b", 32)
    written.ended("b")
    for name in "ab":
        written.allocated(asks(name), blocks([1, 2, 3], []))
        assert written.take() == {1, 2, 3}
    with pytest.raises(ValueError, match="shorter"):
        written.allocated(asks("a"), blocks([1]))


def test_beyond_the_most_keys_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = HiddenKeys()
    monkeypatch.setattr(hits, "MAX_HIDDEN_KEYS", 3)
    keys = [b"a", b"b", b"c", b"d"]
    hidden.hide(0, keys[:3])
    hidden.hide(0, keys[3:])
    assert hidden.mask(0, keys, np.ones(4, np.bool_)).tolist() == [True, False, False, False]
