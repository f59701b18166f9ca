"""The disk tier's calls, and the queue from which its threads take *pieces*: some blocks of a call,
copied at once. The *rest* of a call is in no piece yet.

Always true:

- a block is in at most one piece;
- a call ends once: with its last piece, or when its rest is dropped and no piece is under way;
- reads go before writes, unless no piece of a write was taken for PATIENCE_S. Calls of a kind take
  turns, a piece each, so large calls don't delay small ones;
- at most three quarters of several threads write, so that reads need not wait;
- few large blocks move at a time, or each would take so long that the disk seemed to hang: a
  piece waits while two or more of its kind have MAX_PIECE_BYTES times the number of threads.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hotkv_server.tiers.protocol import Codes, Int64s, PlacedBlocks, Read, Seals, Write

MIN_PIECE_BYTES, MAX_PIECE_BYTES = 256 << 10, 2 << 20
"""Below it Python's time per piece would count; above it a read would wait more than
milliseconds when all threads are busy."""
NO_DEADLINE_S = math.inf
PATIENCE_S = 0.5
"""After this time without a piece of a write one goes first, because its blocks can't be evicted
from the arena."""


@dataclass(eq=False, slots=True)
class DiskCall:
    """A read or write of n blocks.

    `deadline_s`: time.monotonic; pieces not taken by then are not copied.
    `answer`: gets `codes` and `seals` at the end.
    `codes`: uint8 [n], `Read` or `Write`; FAILED until known.
    `seals`: uint64 [n], of written blocks; 0 until known.
    """

    blocks: PlacedBlocks
    is_write: bool
    deadline_s: float
    answer: Callable[[Codes, Seals], None]
    codes: Codes = field(init=False)
    seals: Seals = field(init=False)
    code: int = field(default=0, init=False)
    """errno of the last failed block, or 0."""
    _ends: Int64s = field(init=False)
    _num_cut: int = field(default=0, init=False)
    _num_open: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        failed = Write.FAILED if self.is_write else Read.FAILED
        self.codes = np.full(len(self.blocks), failed, np.uint8)
        self.seals = np.zeros(len(self.blocks), np.uint64)
        self._ends = np.cumsum(self.blocks.num_bytes)

    def cut(self, num_bytes: int) -> "DiskPiece":
        """The next blocks that fit into `num_bytes`, at least one."""
        begin = self._num_cut
        end = int(np.searchsorted(self._ends, self._cut_bytes + num_bytes, "right"))
        self._num_cut = max(begin + 1, end)
        self._num_open += 1
        return DiskPiece(self, begin, self._num_cut)

    def cut_rest(self) -> "DiskPiece":
        """The rest as one late piece."""
        begin, self._num_cut = self._num_cut, len(self.blocks)
        self._num_open += 1
        return DiskPiece(self, begin, self._num_cut, is_late=True)

    def drop_rest(self) -> bool:
        """True if the call has ended."""
        self._num_cut = len(self.blocks)
        return not self._num_open

    def piece_done(self) -> bool:
        """True if the call has ended."""
        self._num_open -= 1
        return not self._num_open and not self.has_rest

    @property
    def _cut_bytes(self) -> int:
        return int(self._ends[self._num_cut - 1]) if self._num_cut else 0

    @property
    def rest_bytes(self) -> int:
        return int(self._ends[-1]) - self._cut_bytes

    @property
    def has_rest(self) -> bool:
        return self._num_cut < len(self.blocks)


@dataclass(frozen=True, slots=True)
class DiskPiece:
    """Blocks `begin` to `end` - 1. `is_late`: past the deadline, so they are not copied and stay
    FAILED."""

    call: DiskCall
    begin: int
    end: int
    is_late: bool = False

    @property
    def num_bytes(self) -> int:
        return int(self.call.blocks.num_bytes[self.begin : self.end].sum())


class CallQueue:
    """See the module. Thread-safe. Without a bound of its own: `drive` bounds its calls' bytes."""

    def __init__(self, num_threads: int, patience_s: float = PATIENCE_S) -> None:
        self._num_threads = num_threads
        self._max_writing = max(1, num_threads * 3 // 4)
        self._max_bytes = num_threads * MAX_PIECE_BYTES
        # Pieces under way and their bytes, by `is_write`.
        self._num_moving = {False: 0, True: 0}
        self._moving_bytes = {False: 0, True: 0}
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._reads: deque[DiskCall] = deque()
        self._writes: deque[DiskCall] = deque()
        self._written_s = 0.0
        self._is_closed = False

    def __repr__(self) -> str:
        return (
            f"CallQueue({len(self._reads)} reads, {len(self._writes)} writes, "
            f"{self._num_moving[True]} threads write)"
        )

    def add(self, call: DiskCall) -> bool:
        """The call must have a block. False if the queue is closed."""
        with self._changed:
            if self._is_closed:
                return False
            if call.is_write:
                if not self._writes:
                    self._written_s = time.monotonic()
                self._writes.append(call)
            else:
                self._reads.append(call)
            self._changed.notify()
        return True

    def take(self) -> DiskPiece | None:
        """Blocks until there is a piece; None once the queue is closed."""
        with self._changed:
            while not self._is_closed:
                if (piece := self._next(time.monotonic())) is not None:
                    self._num_moving[piece.call.is_write] += 1
                    self._moving_bytes[piece.call.is_write] += piece.num_bytes
                    if self._reads or self._writes:
                        # More to do: wake another thread.
                        self._changed.notify()
                    return piece
                self._changed.wait()
            return None

    def done(self, piece: DiskPiece) -> bool:
        """True if the piece's call has ended, so no thread uses its slots any more."""
        with self._changed:
            self._num_moving[piece.call.is_write] -= 1
            self._moving_bytes[piece.call.is_write] -= piece.num_bytes
            if self._reads or self._writes:
                self._changed.notify()
            return piece.call.piece_done()

    def drop_late(self, now_s: float) -> list[DiskCall]:
        """Drops the rest of late reads, and returns those that have ended by this. Only needed
        while all threads are busy; a free one finds them in `take`."""
        with self._changed:
            late = [call for call in self._reads if call.deadline_s < now_s]
            for call in late:
                self._reads.remove(call)
            return [call for call in late if call.drop_rest()]

    def close(self) -> list[DiskCall]:
        """Drops the rest of all calls, and returns those that have ended by this."""
        with self._changed:
            self._is_closed = True
            waiting = [*self._reads, *self._writes]
            self._reads.clear()
            self._writes.clear()
            self._changed.notify_all()
            return [call for call in waiting if call.drop_rest()]

    def _next(self, now_s: float) -> DiskPiece | None:
        may_write = bool(self._writes) and self._num_moving[True] < self._max_writing
        may_write = may_write and self._has_room(is_write=True)
        is_overdue = may_write and now_s - self._written_s > self._patience_s
        if may_write and (is_overdue or not self._reads):
            self._written_s = now_s
            return self._cut_first(self._writes)
        if not self._reads or not self._has_room(is_write=False):
            return None
        if self._reads[0].deadline_s < now_s:
            return self._reads.popleft().cut_rest()
        return self._cut_first(self._reads)

    def _has_room(self, *, is_write: bool) -> bool:
        """Another piece of this kind, of any size, may be taken."""
        return self._num_moving[is_write] < 2 or self._moving_bytes[is_write] < self._max_bytes

    def _cut_first(self, calls: deque[DiskCall]) -> DiskPiece:
        share_bytes = sum(call.rest_bytes for call in calls) // self._num_threads
        call = calls.popleft()
        piece = call.cut(min(max(share_bytes, MIN_PIECE_BYTES), MAX_PIECE_BYTES))
        if call.has_rest:
            calls.append(call)
        return piece
