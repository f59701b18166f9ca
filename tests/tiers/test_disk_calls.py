"""Tests `CallQueue`, the disk tier's work, against a model: each block goes to one thread, each
call ends once, reads go first."""

import time
from collections import deque
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.tiers.disk.calls import (
    MAX_PIECE_BYTES,
    MIN_PIECE_BYTES,
    NO_DEADLINE_S,
    CallQueue,
    DiskCall,
    DiskPiece,
)
from hotkv_server.tiers.protocol import (
    PlacedBlocks,
)

NUM_THREADS = 4


def call(num_blocks: int, block_bytes: int = MIN_PIECE_BYTES, *, is_write: bool = False,
         deadline_s: float = NO_DEADLINE_S) -> DiskCall:  # fmt: skip
    zeros = np.zeros(num_blocks, np.int64)
    sizes = zeros + block_bytes
    seals = np.zeros(num_blocks, np.uint64)
    blocks = PlacedBlocks([b"key"] * num_blocks, zeros, sizes, zeros, sizes, seals)
    return DiskCall(blocks, is_write, deadline_s, lambda codes, seals: None)


def call_queue(num_threads: int, **options: Any) -> CallQueue:
    """`take` raises AssertionError instead of waiting."""

    def wait(timeout: float | None = None) -> bool:
        raise AssertionError("nothing to take")

    queue = CallQueue(num_threads, **options)
    queue._changed.wait = wait  # type: ignore[method-assign]
    return queue


def take(queue: CallQueue) -> DiskPiece:
    piece = queue.take()
    assert piece is not None
    return piece


class Machine(RuleBasedStateMachine):
    @initialize(num_threads=st.sampled_from([1, 2, 4, 5]))
    def start(self, num_threads: int) -> None:
        # No write overtakes reads, so the order is known.
        self.queue = call_queue(num_threads, patience_s=1e9)
        # One of several threads is left for reads.
        self.most_writing = max(1, num_threads * 3 // 4)
        self.most_bytes = num_threads * MAX_PIECE_BYTES
        self.waiting: dict[bool, deque[DiskCall]] = {False: deque(), True: deque()}
        self.next_block: dict[DiskCall, int] = {}
        self.open: list[DiskPiece] = []
        self.ended: list[DiskCall] = []
        self.is_closed = False

    @property
    def num_writing(self) -> int:
        return sum(piece.call.is_write for piece in self.open)

    def may_move(self, *, is_write: bool) -> bool:
        """Two pieces of a kind always; more while they are below `most_bytes` together."""
        moving = [piece for piece in self.open if piece.call.is_write == is_write]
        sizes = [(piece.end - piece.begin) * piece.call.blocks.num_bytes[0] for piece in moving]
        return len(moving) < 2 or sum(sizes) < self.most_bytes

    @rule(
        num_blocks=st.integers(1, 20),
        block_bytes=st.sampled_from([SLOT_ALIGN, MIN_PIECE_BYTES, 3 << 20]),
        is_write=st.booleans(),
        is_late=st.booleans(),
    )
    def add(self, num_blocks: int, block_bytes: int, is_write: bool, is_late: bool) -> None:
        late_s = 0.0 if is_late and not is_write else NO_DEADLINE_S
        added = call(num_blocks, block_bytes, is_write=is_write, deadline_s=late_s)
        assert self.queue.add(added) == (not self.is_closed)
        if not self.is_closed:
            self.waiting[is_write].append(added)
            self.next_block[added] = 0

    @rule()
    def take(self) -> None:
        may_write = self.waiting[True] and self.num_writing < self.most_writing
        may_write = may_write and not self.waiting[False] and self.may_move(is_write=True)
        may_read = self.waiting[False] and self.may_move(is_write=False)
        if not (self.is_closed or may_read or may_write):
            with pytest.raises(AssertionError, match="nothing to take"):
                self.queue.take()
            return
        piece = self.queue.take()
        if self.is_closed:
            assert piece is None
            return
        assert piece is not None
        line = self.waiting[not self.waiting[False]]
        taken = line.popleft()
        assert piece.call is taken
        assert piece.begin == self.next_block[taken] < piece.end <= len(taken.blocks)
        size = int(taken.blocks.num_bytes[0])
        assert piece.is_late == (taken.deadline_s == 0.0)
        if not piece.is_late:
            assert (piece.end - piece.begin) * size <= max(MAX_PIECE_BYTES, size)
        else:
            assert piece.end == len(taken.blocks)
        self.next_block[taken] = piece.end
        if piece.end < len(taken.blocks):
            line.append(taken)
        self.open.append(piece)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        piece = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        is_open = any(other.call is piece.call for other in self.open)
        has_rest = self.next_block[piece.call] < len(piece.call.blocks)
        assert self.queue.done(piece) == (not is_open and not has_rest)
        if not is_open and not has_rest:
            self.ended.append(piece.call)

    @rule()
    def drop_late(self) -> None:
        late = [each for each in self.waiting[False] if each.deadline_s == 0.0]
        self._dropped(late, self.queue.drop_late(time.monotonic()))
        for each in late:
            self.waiting[False].remove(each)

    @rule()
    @precondition(lambda self: len(self.ended) > 3)
    def close(self) -> None:
        rest = [*self.waiting[False], *self.waiting[True]]
        self._dropped(rest, self.queue.close())
        self.waiting = {False: deque(), True: deque()}
        self.is_closed = True

    def _dropped(self, dropped: list[DiskCall], ended: list[DiskCall]) -> None:
        for each in dropped:
            self.next_block[each] = len(each.blocks)
        busy = {piece.call for piece in self.open}
        assert ended == [each for each in dropped if each not in busy]
        self.ended.extend(ended)

    @invariant()
    def ends(self) -> None:
        assert len(set(self.ended)) == len(self.ended)

    def teardown(self) -> None:
        while self.open:
            piece = self.open.pop()
            if self.queue.done(piece):
                self.ended.append(piece.call)
        self.ended.extend(self.queue.close())
        assert set(self.ended) == set(self.next_block)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60)


def test_pieces_share_calls_among_threads_bounded() -> None:
    queue = call_queue(NUM_THREADS)
    queue.add(call(16, 64 << 10))
    assert [(take(queue).end) for _ in range(4)] == [4, 8, 12, 16]
    queue.add(call(1000, 64 << 10))
    assert take(queue).end == MAX_PIECE_BYTES // (64 << 10)
    queue.close()
    queue = call_queue(NUM_THREADS)
    queue.add(call(3, 64 << 20))
    pieces = [take(queue) for _ in range(2)]
    assert [piece.end for piece in pieces] == [1, 2]
    with pytest.raises(AssertionError, match="nothing to take"):
        queue.take()
    assert not queue.done(pieces[0])
    assert take(queue).end == 3


def test_long_waiting_writes_precede_reads() -> None:
    queue = call_queue(NUM_THREADS, patience_s=0.0)
    read, write = call(100), call(100, is_write=True)
    queue.add(read)
    queue.add(write)
    time.sleep(1e-3)
    assert take(queue).call is write
    patient = call_queue(NUM_THREADS, patience_s=60.0)
    patient.add(call(1, is_write=True))
    patient.add(read := call(100))
    assert take(patient).call is read
