"""Compares `SequenceBook` with a dict, and tests when a step counts as a use."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.table import Words, hash_words
from hotkv_server.cache.room.shares import FLOOR_SHARE, FairBound
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.server.select.book import PackedCentre, SelectSpec
from hotkv_sparse.server.select.sequences import (
    HASH_BYTES,
    SEQUENCE_BYTES,
    TOUCH_INTERVAL_S,
    LiveSequence,
    SequenceBook,
)

SESSIONS = st.sampled_from([1, 2])
IDS = st.sampled_from(["a", "b", "c", "d"])
CAPACITY = 4 * SEQUENCE_BYTES + 20 * HASH_BYTES
BLOCKS = st.lists(st.integers(0, 2), max_size=7)


def words(blocks: list[int]) -> Words:
    return hash_words(b"".join(bytes([block]) * 32 for block in blocks), 32)


@contextlib.contextmanager
def refusal(reason: Reason | None) -> Iterator[None]:
    """Expects HotKVError with this reason; None: no error."""
    if reason is None:
        yield
        return
    with pytest.raises(HotKVError) as caught:
        yield
    assert caught.value.reason is reason


class BookMachine(RuleBasedStateMachine):
    """Two clients, at most three sequences each, share one bound of CAPACITY bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.book = SequenceBook(3, 9, FairBound(CAPACITY))
        self.model: dict[tuple[int, str], tuple[int, list[int], int]] = {}
        self.owner_of = {1: "one", 2: "two"}

    def num_blocks(self) -> int:
        return sum(len(blocks) for _, blocks, _ in self.model.values())

    def weight(self, session: int) -> int:
        return sum(
            SEQUENCE_BYTES + HASH_BYTES * len(blocks)
            for (other, _), (_, blocks, _) in self.model.items()
            if other == session
        )

    def refused(self, session: int, more: int, length: int) -> Reason | None:
        if length > 9:
            return Reason.TOO_LARGE
        held, left = self.weight(session) + more, CAPACITY - self.weight(1) - self.weight(2) - more
        allowed = not more or (left >= 0 and (held <= left or held <= CAPACITY // FLOOR_SHARE))
        return None if allowed else Reason.OVERLOADED

    @rule(session=SESSIONS, name=IDS, group=st.sampled_from([0, 1]), blocks=BLOCKS)
    def create(self, session: int, name: str, group: int, blocks: list[int]) -> None:
        existing, reason = self.model.get((session, name)), None
        if existing is not None:
            old_group, old, created = existing
            if (old_group, created, old[: len(blocks)]) != (group, len(blocks), blocks):
                reason = Reason.DUPLICATE_ID
        elif sum(key[0] == session for key in self.model) >= 3:
            reason = Reason.OVERLOADED
        else:
            reason = self.refused(session, SEQUENCE_BYTES + HASH_BYTES * len(blocks), len(blocks))
        owner = self.owner_of[session]
        with refusal(reason):
            sequence, is_new = self.book.create(session, name, group, words(blocks), None, owner)
            assert is_new == (existing is None) and sequence is self.book.get(session, name)
            if is_new:
                self.model[session, name] = (group, blocks, len(blocks))

    @rule(session=SESSIONS, name=IDS, first=st.integers(-1, 10), blocks=BLOCKS)
    def append(self, session: int, name: str, first: int, blocks: list[int]) -> None:
        group, old, created = self.model.get((session, name), (0, [], -1))
        reason: Reason | None = Reason.INVALID_FIELD
        whole = old[: max(first, 0)] + blocks + old[max(first, 0) + len(blocks) :]
        if created >= 0 and 0 <= first <= len(old) and whole[: len(old)] == old:
            reason = self.refused(session, HASH_BYTES * (len(whole) - len(old)), len(whole))
        with refusal(reason):
            self.book.append(session, name, first, words(blocks))
            self.model[session, name] = (group, whole, created)

    @rule(session=SESSIONS, name=IDS)
    def pop(self, session: int, name: str) -> None:
        known = self.model.pop((session, name), None)
        assert (self.book.pop(session, name) is None) == (known is None)

    @rule(session=SESSIONS)
    def drop_session(self, session: int) -> None:
        self.book.drop_session(session)
        self.model = {key: value for key, value in self.model.items() if key[0] != session}

    @invariant()
    def agrees(self) -> None:
        self.book.check_invariants()
        assert (len(self.book), self.book.num_blocks) == (len(self.model), self.num_blocks())
        for (session, name), (group, blocks, created) in self.model.items():
            sequence = self.book.get(session, name)
            assert (sequence.group_index, sequence.created_blocks) == (group, created)
            assert np.array_equal(sequence.hashes, words(blocks))


TestBook = BookMachine.TestCase


def test_centres_and_hot_sets_weigh_their_bytes() -> None:
    plain = SelectSpec(SparseConfig(sink_tokens=16, recent_tokens=16), 256, (2, 3), 1, 32, 16, 4)
    centred = replace(plain, centres={2: PackedCentre(bytes(4 * 32 * 4), {})})
    hot = replace(plain, hot_blocks=800)
    book = SequenceBook(9, 100, FairBound(100_000 * HASH_BYTES))
    cases = [
        (None, 0),
        (plain, 13 * 20),
        (centred, 4 * 32 * 4 + 13 * 20),
        (hot, 13 * 20 + 2 * 4 * (14 * 800 + 6 * 20)),
    ]
    for count, (spec, more) in enumerate(cases, 1):
        held = book.bound.held("one")
        book.create(1, str(count), 0, words([1] * 20), spec, "one")
        assert book.bound.held("one") == held + SEQUENCE_BYTES + 20 * HASH_BYTES + more
        book.append(1, str(count), 20, words([1] * 5))
        book.check_invariants()
    hot_bytes = 13 * 25 + 2 * 4 * (14 * 800 + 6 * 25)
    assert book.bound.held("one") == held + SEQUENCE_BYTES + 25 * HASH_BYTES + hot_bytes
    with pytest.raises(HotKVError, match="blocks' worth of memory more"):
        book.create(1, "large", 0, words([1]), replace(plain, hot_blocks=20_000), "one")
    book.drop_session(1)
    book.check_invariants()
    assert not book.bound.total


def test_use_counts_once_per_interval() -> None:
    sequence = LiveSequence("s", 0, words([0] * 6), None, 6)

    def use(positions: list[int], now_s: float) -> list[int]:
        return sequence.use(np.array(positions, np.int32), now_s).tolist()

    assert use([4, 1, 6, 99], 10.0) == [1, 4]
    assert use([4], 10.1) == [] and use([2, 4], 10.2) == []
    assert use([], 10.0 + TOUCH_INTERVAL_S) == [2, 4]
    sequence.hashes = words([0] * 8)
    assert use([7], 11.1) == []
    assert sequence.take_used(11.2).tolist() == [7] and sequence.take_used(11.2).tolist() == []
