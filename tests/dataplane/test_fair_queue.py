"""Tests `FairQueue` against a list per owner."""

import threading
from collections import defaultdict, deque

import hypothesis.strategies as st
from hypothesis import given, settings
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


@settings(max_examples=20)
@given(st.integers(1, 4), st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_threads_get_every_item_once(num_threads: int, counts: list[int]) -> None:
    queue: FairQueue[int] = FairQueue()
    got: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        while (item := queue.get()) is not None:
            with lock:
                got.append(item)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for owner, count in enumerate(counts):
        queue.put(str(owner), list(range(100 * owner, 100 * owner + count)))
    queue.close()
    for thread in threads:
        thread.join(60)
    assert sorted(got) == sorted(
        100 * owner + n for owner, count in enumerate(counts) for n in range(count)
    )
