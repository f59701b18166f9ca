"""`Patience` against a simple model."""

from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_vllm.scheduler.find.hits import ANSWER_PATIENCE_S, MOST_PASSED_BY, Patience
from tests.vllm.parts import TOKENS, Parts, request

SHARES = st.sampled_from([0.0, 0.1, 0.4, 0.6, 1.0, 1.5, 30.0])
"""Multiples of what a step may wait."""


WAKING_S = 1e-6
"""Each simulated wait takes this much longer."""


class Server:
    def __init__(self) -> None:
        self.clock_s = 100.0
        self.needs_s = dict[int, float]()
        self.waits = list[float]()

    def ask(self, needs_s: float) -> "Future[Any]":
        answer: Future[Any] = Future()
        self.needs_s[id(answer)] = needs_s
        if not needs_s:
            answer.set_result(None)
        return answer

    @property
    def left_s(self) -> float:
        return ANSWER_PATIENCE_S - sum(self.waits) - WAKING_S * len(self.waits)

    def wait_for(self, answer: "Future[Any]", seconds: float) -> bool:
        needs_s = self.needs_s[id(answer)]
        self.waits.append(min(needs_s, seconds))
        self.clock_s += self.waits[-1] + WAKING_S
        return needs_s <= seconds


@given(st.lists(st.lists(SHARES, max_size=8), max_size=120))
def test_waits_are_bounded_and_rare_after_failures(
    steps: list[list[float]],
) -> None:
    server = Server()
    patience = Patience(lambda: server.clock_s, server.wait_for)
    asked = list[Future[Any]]()
    vain = passes_by = 0
    for shares in steps:
        patience.begin_step()
        server.waits.clear()
        for share in shares:
            asked.append(server.ask(share * ANSWER_PATIENCE_S))
            before, left_s = len(server.waits), server.left_s
            is_there = patience.awaits(asked[-1])
            has_waited = len(server.waits) > before
            if not share:
                assert is_there and not has_waited
            elif left_s <= 0:
                assert not is_there and not has_waited
            elif passes_by:
                passes_by -= 1
                assert not is_there and not has_waited
            else:
                assert has_waited and is_there == (share * ANSWER_PATIENCE_S <= left_s)
                vain = 0 if is_there else vain + 1
                passes_by = min(2**vain - 1, MOST_PASSED_BY)
        assert sum(server.waits) <= ANSWER_PATIENCE_S * (1 + 1e-9)


def test_wait_is_real_and_no_longer() -> None:
    patience = Patience()
    assert not patience.awaits(Future())
    patience = Patience()
    answer: Future[Any] = Future()
    answer.set_exception(ConnectionError("no server"))
    assert patience.awaits(answer)


@pytest.mark.parametrize("table", [True, False])
def test_immediate_answers_cost_no_further_step(table: bool) -> None:
    parts = Parts()
    parts.server.table = table
    parts.put("a", range(4))
    state = parts.state(request("a", 5 * TOKENS))
    parts.finder.arrive(state, parts.clock)
    assert parts.match(state) == (4 * TOKENS, True)
