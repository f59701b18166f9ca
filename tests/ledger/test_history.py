"""Tests the ledger's history against a list of all samples."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotkv_server.ledger.history import History

NUM_SAMPLES = 4
FIRST = 10


class HistoryBesideAList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.totals = np.array([100.0, 0.5])
        self.history = History(("tokens", "seconds"), ("lag",), NUM_SAMPLES, self.totals, FIRST)
        self.number = FIRST
        # Per interval: growth of `tokens` and `seconds`, and the value of `lag`.
        self.noted: dict[int, tuple[float, float, float]] = {}
        self.unseen = np.zeros(2)

    @rule(tokens=st.integers(-5, 1000), seconds=st.sampled_from([0.0, 0.25, -0.5]))
    def grow(self, tokens: int, seconds: float) -> None:
        self.totals += (tokens, seconds)
        self.unseen += (tokens, seconds)

    @rule(later=st.sampled_from([1, 1, 1, 2, 3, 5, 9, 100]), lag=st.sampled_from([0.0, 0.5]))
    def note(self, later: int, lag: float) -> None:
        self.noted.update((self.number + skipped, (0.0, 0.0, 0.0)) for skipped in range(1, later))
        self.number += later
        self.noted[self.number] = (*self.unseen.tolist(), lag)
        self.unseen[:] = 0.0
        self.history.note(self.number, self.totals, (lag,))

    @rule(back=st.integers(0, 2))
    def time_does_not_go_back(self, back: int) -> None:
        with pytest.raises(AssertionError):
            self.history.note(self.number - back, self.totals, (9.0,))

    @invariant()
    def the_latest_are_there(self) -> None:
        kept = sorted(self.noted)[-NUM_SAMPLES:]
        assert self.history.number == self.number and len(self.history) == len(kept)
        samples = self.history.samples()
        assert list(samples) == ["tokens", "seconds", "lag"]
        for place, values in enumerate(samples.values()):
            assert values.tolist() == [self.noted[number][place] for number in kept]
            values[:] = -1.0


TestHistory = HistoryBesideAList.TestCase
