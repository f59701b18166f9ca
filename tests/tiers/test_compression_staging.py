"""Staging memory is never given twice, and comes back whole."""

import mmap

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.tiers.compression.pieces import Call, PieceQueue
from hotkv_server.tiers.compression.staging import Extents, open_staging
from hotkv_server.tiers.protocol import Blocks

UNITS = 24


class ExtentsMachine(RuleBasedStateMachine):
    """Beside a map of who has which unit."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(UNITS)
        self.owners = np.zeros(UNITS, np.int64)
        self.taken: dict[int, tuple[int, int]] = {}
        self.num_taken = 0

    @rule(size=st.integers(1, UNITS))
    def take(self, size: int) -> None:
        begin = self.extents.take(size)
        runs = [at for at in range(UNITS - size + 1) if not self.owners[at : at + size].any()]
        assert begin == (runs[0] if runs else None)
        if begin is not None:
            self.num_taken += 1
            self.owners[begin : begin + size] = self.num_taken
            self.taken[self.num_taken] = begin, size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.taken)))
        self.extents.give(*self.taken.pop(number))
        self.owners[self.owners == number] = 0

    @invariant()
    def agrees(self) -> None:
        self.extents.check_invariants()
        assert self.extents.free_bytes == (self.owners == 0).sum()


TestExtents = ExtentsMachine.TestCase


class QueueMachine(RuleBasedStateMachine):
    """Calls of any sizes: pieces under way never overlap, and each row is in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = PieceQueue(UNITS)
        self.open: list = []
        self.waiting: dict[Call, set[int]] = {}
        self.ended: list[Call] = []

    @rule(sizes=st.lists(st.integers(1, UNITS + 4), max_size=6), is_write=st.booleans())
    def add(self, sizes: list[int], is_write: bool) -> None:
        num_bytes = np.array(sizes, np.int64)
        blocks = Blocks([b""] * len(sizes), num_bytes, num_bytes)
        call = Call(blocks, is_write, float("inf"), lambda codes, seals: None)
        fitting = {row for row, size in enumerate(sizes) if size <= UNITS}
        assert self.queue.add(call) == bool(fitting)
        if fitting:
            self.waiting[call] = fitting

    @rule()
    def take(self) -> None:
        with self.queue._changed:
            piece = self.queue._next(0.0)
        if piece is None:
            assert self.open or not any(self.waiting.values()), "nobody gets his turn"
            return
        rows = set(range(piece.begin, piece.end))
        assert rows and rows <= self.waiting[piece.call]
        self.waiting[piece.call] -= rows
        assert piece.num_bytes == piece.call.blocks.num_bytes[piece.begin : piece.end].sum()
        if piece.call.is_write:
            reads = [call for call in self.waiting if not call.is_write and self.waiting[call]]
            assert not reads, "a write went before a read"
        self.open.append(piece)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        piece = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        is_last = not self.waiting[piece.call] and all(
            other.call is not piece.call for other in self.open
        )
        assert self.queue.done(piece) == is_last

    @invariant()
    def agrees(self) -> None:
        self.queue.check_invariants()
        used = np.zeros(UNITS, np.int64)
        for piece in self.open:
            used[piece.place : piece.place + piece.num_bytes] += 1
        assert used.max() <= 1
        assert self.queue._extents.free_bytes == (used == 0).sum()
        writing = [piece.num_bytes for piece in self.open if piece.call.is_write]
        assert sum(writing) <= UNITS // 2 or len(writing) == 1


TestQueue = QueueMachine.TestCase


def test_staging_memory_is_there_from_the_start() -> None:
    memory = open_staging(3 * SLOT_ALIGN)
    try:
        assert not memory.has_holes() and memory.num_bytes == 3 * SLOT_ALIGN
        assert not memory.address % (2 << 20)
    finally:
        memory.close()


@pytest.mark.parametrize("num_bytes", [0, -SLOT_ALIGN, SLOT_ALIGN + 1, mmap.PAGESIZE // 2])
def test_odd_staging_is_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="no multiple"):
        open_staging(num_bytes)
