"""The state machine of `lower_machine`, with a shared store that forgets blocks at will."""

import contextlib
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import precondition, rule

from hotkv_server.cache.room.removal import finished
from hotkv_server.cache.values import HashList
from hotkv_server.tiers.book.books import TierBooks, books_of
from hotkv_server.tiers.book.copies import MAX_TRIES, OLD, Copies
from hotkv_server.tiers.book.moves import Move
from tests.core.lower_machine import GARBAGE, GROUPS, NUMBERS, SPACES, Content, LowerMachine
from tests.core.support import words_of


class SharedMachine(LowerMachine):
    """`remote` is the store, with numbers of flushes in place of generations."""

    def __init__(self) -> None:
        super().__init__()
        self.remote: set[Content] = set()
        self.going: list[tuple[Move, list[Content], list[int]]] = []
        self.coming: list[tuple[Move, int]] = []
        self.lanes: dict[int, int] = {}
        self._copies: Copies | None = None

    @property
    def _tiers(self) -> TierBooks:
        try:
            return books_of(self.core)
        except LookupError:
            return TierBooks(self.core)

    @property
    def copies(self) -> Copies:
        if self._copies is None:
            self._copies = Copies(self._tiers.moves)
            self._tiers.copies.append(self._copies)
        return self._copies

    @precondition(lambda self: self.copies.num_waiting)
    @rule(num_bytes=st.integers(0, 1 << 16), is_flushed=st.booleans(), data=st.data())
    def begin_out(self, num_bytes: int, is_flushed: bool, data: st.DataObject) -> None:
        """`is_flushed`: a flush of the first block's key space runs."""
        lanes = [lane for lane, waiting in enumerate(self.copies.lanes) if len(waiting)]
        lane = data.draw(st.sampled_from(lanes))
        taken = finished(self.copies.take(num_bytes, lane))
        key_spaces = self.core.space.index.key_spaces(taken).tolist()
        flushed = key_spaces[0] if is_flushed and key_spaces else 0
        held, before = np.array(key_spaces) == flushed, len(self.copies.lanes[lane])
        with self._tiers.stopped(flushed) if flushed else contextlib.nullcontext():
            moves = self.copies.begin(taken, lane)
        assert sum(map(len, moves)) == (~held).sum()
        assert len(self.copies.lanes[lane]) == before + held.sum()
        for move in moves:
            self.lanes[move.number] = lane
            offsets = self.core.space.index.offsets(move.entries).tolist()
            self.going.append((move, [self.slots[offset] for offset in offsets], offsets))

    @precondition(lambda self: self.going)
    @rule(data=st.data())
    def end_out(self, data: st.DataObject) -> None:
        move, contents, offsets = self.going.pop(data.draw(st.integers(0, len(self.going) - 1)))
        for offset, content in zip(offsets, contents, strict=True):
            assert self.slots[offset] == content, "a slot changed while the tier read it"
            if data.draw(st.booleans()):
                self.remote.add(content)
        failed = np.array([data.draw(st.booleans()) for _ in range(len(move))], np.bool_)
        may_go = failed & ~move.is_void & self.core.space.index.is_ready(move.entries)
        lane = max(OLD, self.lanes.pop(move.number)) + 1
        before = list(map(len, self.copies.lanes))
        num_given_up = self.copies.end(move, failed)
        if lane > OLD + MAX_TRIES:
            assert num_given_up == may_go.sum()
        else:
            assert not num_given_up
            before[lane] += may_go.sum()
        assert list(map(len, self.copies.lanes)) == before

    @rule(space=SPACES)
    def offer_old(self, space: int) -> None:
        self.copies.add_old(self.core.space.index.ready_blocks(space))

    @rule(space=SPACES, group=GROUPS, numbers=NUMBERS)
    def begin_in(self, space: int, group: int, numbers: list[int]) -> None:
        listed, record = HashList(group, words_of(numbers)), self.core.catalog.record(space)
        (absent,) = self._tiers.arrivals.absent(space, [listed])
        there = [at for at in absent if self.content(space, group, numbers[at]) in self.remote]
        move = self._tiers.arrivals.begin(
            space, [listed], [np.array(there, np.int64)], lambda one: record.shape(one).slot_bytes
        )
        if move is not None:
            assert len(move) <= len(there) and not len(move.places)
            offsets = self.core.space.index.offsets(move.entries).tolist()
            self.slots.update(dict.fromkeys(offsets, GARBAGE))
            self.coming.append((move, self.num_flushes[space]))

    @rule(space=SPACES, group=GROUPS, numbers=NUMBERS, data=st.data())
    def share_and_fetch(
        self, space: int, group: int, numbers: list[int], data: st.DataObject
    ) -> None:
        """Puts blocks into the store as another node would, and fetches them."""
        self.remote |= {self.content(space, group, number) for number in numbers}
        self.begin_in(space, group, numbers)

    @precondition(lambda self: self.coming)
    @rule(data=st.data())
    def end_in(self, data: st.DataObject) -> None:
        move, generation = self.coming.pop(data.draw(st.integers(0, len(self.coming) - 1)))
        offsets = self.core.space.index.offsets(move.entries).tolist()
        keys = zip(*self.core.space.index.keys(move.entries), strict=True)
        found = np.zeros(len(move), np.bool_)
        for at, (space, group, words) in enumerate(keys):
            content = (int(space), int(group), words.tobytes(), generation)
            if content in self.remote and data.draw(st.booleans()):
                self.slots[offsets[at]] = content
                found[at] = True
        self.now_s += 1.0
        came = self._tiers.arrivals.end(move, found, None, self.now_s)
        assert len(came) == int(found.sum())
        self.waiting.append(move)

    @rule(keep=st.booleans())
    def forget(self, keep: bool) -> None:
        self.remote = {content for at, content in enumerate(sorted(self.remote)) if keep and at % 2}

    def teardown(self) -> None:
        for move, _ in self.coming:
            self._tiers.arrivals.end(move, np.zeros(len(move), np.bool_), None, self.now_s)
            self.waiting.append(move)
        for move, *_ in self.going:
            self.copies.end(move)
        super().teardown()


TestSharedMachine: Any = SharedMachine.TestCase
TestSharedMachine.settings = settings(max_examples=60, deadline=None)
