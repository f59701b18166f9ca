"""Tests `FairQueue` against a list per owner."""

from collections import defaultdict, deque

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotkv_server.dataplane.host import FairQueue


class Machine(RuleBasedStateMachine):
    """Also counts how often others are served while an owner waits."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[tuple[str, int]] = FairQueue()
        self.model: dict[str, deque[tuple[str, int]]] = defaultdict(deque)
        self.passed_over: dict[str, int] = defaultdict(int)
        self.number = 0

    @rule(owner=st.sampled_from("abcd"), count=st.integers(0, 5))
    def put(self, owner: str, count: int) -> None:
        items = [(owner, self.number + n) for n in range(count)]
        self.number += count
        self.queue.put(owner, items)
        self.model[owner].extend(items)

    @precondition(lambda self: len(self.queue))
    @rule()
    def get(self) -> None:
        found = self.queue.get()
        assert found is not None
        owner, number = found
        assert self.model[owner].popleft() == (owner, number)
        self.passed_over[owner] = 0
        for other, waiting in self.model.items():
            if other != owner and waiting:
                self.passed_over[other] += 1
        # While an owner waits, each other owner is served at most once.
        assert all(count < len(self.model) for count in self.passed_over.values())

    @invariant()
    def counts(self) -> None:
        assert len(self.queue) == sum(map(len, self.model.values()))


TestMachine = Machine.TestCase
