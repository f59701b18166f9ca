"""Small classes of the scheduler side."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_vllm.compat import NULL_BLOCK
from hotkv_vllm.scheduler import hidden_keys
from hotkv_vllm.scheduler.find.common_loads import CommonLoads
from hotkv_vllm.scheduler.hidden_keys import HiddenKeys
from hotkv_vllm.scheduler.store.other_loads import OtherLoads
from hotkv_vllm.scheduler.written_blocks import WrittenBlocks
from tests.vllm.desks import blocks

OUTCOMES = st.sampled_from(["well", "well", "failed", "unheard", "lost"])
PLANNED = st.tuples(st.booleans(), st.integers(0, 2), OUTCOMES, st.booleans())


@given(st.lists(PLANNED, max_size=16), st.integers(0, 2))
def test_blocks_anothers_load_may_lack_arent_stored(
    steps: list[tuple[bool, int, str, bool]], behind: int
) -> None:
    """Each step admits a request, which runs `delay` steps later; its report comes `behind`
    steps later."""
    others, numbers = OtherLoads(), dict[int, int]()
    # due, ran_in: steps by request. are_open: steps whose loads have no result. bad: steps whose
    # loads may have failed.
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
    """The first 64 tokens of `p` are loading, until time 1."""
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
    """States are written whole.

    matched: local hit, tokens.
    computed: of a finished load, tokens.
    num_hit: blocks that both cover.
    """
    written = WrittenBlocks([16, 0])
    written.matched("a", matched)
    written.allocated(asks("a", computed), blocks([1, 2, 3], [NULL_BLOCK, 11, 12]))
    assert written.of_step() == {*[1, 2, 3][num_hit:], 11, 12} == written.take()
    assert written.take() == set() == written.of_step()
    # A later request may have the same name.
    written.matched("b", 32)
    written.ended("b")
    for name in "ab":
        written.allocated(asks(name), blocks([1, 2, 3], []))
        assert written.take() == {1, 2, 3}
    with pytest.raises(ValueError, match="shorter"):
        written.allocated(asks("a"), blocks([1]))


def test_beyond_the_most_keys_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = HiddenKeys()
    monkeypatch.setattr(hidden_keys, "MAX_HIDDEN_KEYS", 3)
    keys = [b"a", b"b", b"c", b"d"]
    hidden.hide(0, keys[:3])
    hidden.hide(0, keys[3:])
    assert hidden.mask(0, keys, np.ones(4, np.bool_)).tolist() == [True, False, False, False]
