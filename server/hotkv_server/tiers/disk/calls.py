"""Calls of the disk tier (reads and writes), and the queue from which the tier's threads take them.
A thread takes a *piece* of a call: some of its blocks, which the thread moves at once. The blocks
of a call that are in no piece yet are its *rest*.

Always true:

- each block of a call is in at most one piece;
- a call ends once: when its last piece ends, or when its rest is dropped and no piece is under way;
- reads go before writes, unless threads have taken no piece of a write for PATIENCE_S. Calls of the
  same kind take turns, a piece each, so a large call does not delay small calls;
- if there are several threads, at most three quarters of them write at a time, so that reads need
  not wait for the end of writes;
- only a few large blocks are read at a time, and only a few are written. A piece waits if two or
  more pieces of its kind (reads or writes) are under way and together have at least MAX_PIECE_BYTES
  times the number of threads. The reason: if more large blocks were moved at a time, each would
  take so long that the disk would seem to hang.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hotkv_server.tiers.protocol import Blocks, Codes, Int64s, Read, Seals, Write

MIN_PIECE_BYTES, MAX_PIECE_BYTES = 256 << 10, 2 << 20
"""Bounds of the size of a piece (blocks that a thread copies at once). Each piece costs some time
in Python; the lower bound keeps this time small compared with the disk's time. The upper bound
keeps the wait of a read at a few milliseconds when all threads are busy."""
NO_DEADLINE_S = math.inf
"""Writes have no deadline."""
PATIENCE_S = 0.5
"""If writes are queued and no piece of a write was taken for this time, the next piece is a piece
of a write, even if reads are queued. Writes must not wait for ever, because the blocks that they
copy can't be evicted from the arena meanwhile."""


@dataclass(eq=False, slots=True)
class DiskCall:
    """A read or a write of n blocks, with its results.

    `deadline_s`: a time of time.monotonic. A piece (some of the call's blocks) that no thread has
        taken by then is not copied.
    `answer`: called with `codes` and `seals` when the call has ended.
    `codes`: uint8 [n], the result of each block, a value of `Read` or `Write`; FAILED until the
        result is known.
    `seals`: uint64 [n], the seals (checksums) of written blocks; 0 until they are known.
    """

    blocks: Blocks
    is_write: bool
    deadline_s: float
    answer: Callable[[Codes, Seals], None]
    codes: Codes = field(init=False)
    seals: Seals = field(init=False)
    code: int = field(default=0, init=False)
    """errno of the last block of the call that failed; 0 if no block failed with an errno. It tells
    the tier why the disk is unusable."""
    _ends: Int64s = field(init=False)
    _num_cut: int = field(default=0, init=False)
    _num_open: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        failed = Write.FAILED if self.is_write else Read.FAILED
        self.codes = np.full(len(self.blocks), failed, np.uint8)
        self.seals = np.zeros(len(self.blocks), np.uint64)
        self._ends = np.cumsum(self.blocks.num_bytes)

    def cut(self, num_bytes: int) -> "DiskPiece":
        """Returns the next piece of the call, for a thread to move: as many of its next blocks as
        fit into `num_bytes`, but at least one block."""
        begin = self._num_cut
        end = int(np.searchsorted(self._ends, self._cut_bytes + num_bytes, "right"))
        self._num_cut = max(begin + 1, end)
        self._num_open += 1
        return DiskPiece(self, begin, self._num_cut)

    def cut_rest(self) -> "DiskPiece":
        """Returns the blocks of the call that are in no piece (blocks for a thread to move) yet, as
        one piece. The piece is marked as late, so its blocks are not moved."""
        begin, self._num_cut = self._num_cut, len(self.blocks)
        self._num_open += 1
        return DiskPiece(self, begin, self._num_cut, is_late=True)

    def drop_rest(self) -> bool:
        """Drops the rest of the call: the blocks that no thread has taken yet. They are not copied.
        Returns True if the call has ended."""
        self._num_cut = len(self.blocks)
        return not self._num_open

    def piece_done(self) -> bool:
        """Counts a piece (some of the call's blocks) as done. Returns True if the call has
        ended."""
        self._num_open -= 1
        return not self._num_open and not self.has_rest

    @property
    def _cut_bytes(self) -> int:
        return int(self._ends[self._num_cut - 1]) if self._num_cut else 0

    @property
    def rest_bytes(self) -> int:
        """Bytes of the call's blocks that are in no piece (blocks for a thread to copy) yet."""
        return int(self._ends[-1]) - self._cut_bytes

    @property
    def has_rest(self) -> bool:
        """True if some of the call's blocks are in no piece (blocks for a thread to copy) yet."""
        return self._num_cut < len(self.blocks)


@dataclass(frozen=True, slots=True)
class DiskPiece:
    """A piece of a call: its blocks `begin` to `end` - 1, which a thread moves at once. `is_late`:
    True if the call's deadline has passed, so that the blocks are not moved and stay FAILED."""

    call: DiskCall
    begin: int
    end: int
    is_late: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the piece's blocks, which a thread copies at once."""
        return int(self.call.blocks.num_bytes[self.begin : self.end].sum())


class CallQueue:
    """The queue of read and write calls from which the threads of the disk tier take pieces (some
    blocks of a call); see the module. Thread-safe. The queue itself has no bound, because
    `drive.below` and `drive.tiers` bound the bytes of their calls.

    `num_threads`: number of threads that call `take`.
    """

    def __init__(self, num_threads: int, patience_s: float = PATIENCE_S) -> None:
        self._num_threads = num_threads
        self._max_writing = max(1, num_threads * 3 // 4)
        self._max_bytes = num_threads * MAX_PIECE_BYTES
        # Number and bytes of the pieces (some blocks of a call) that threads copy now. The key is
        # True for writes, False for reads.
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
        """Adds a call (a read or write of blocks), which must have at least one block. Returns
        False if the queue is closed."""
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
        """Returns the next piece (some blocks of a call), which the calling thread must copy.
        Blocks until there is a piece. Returns None once the queue is closed."""
        with self._changed:
            while not self._is_closed:
                if (piece := self._next(time.monotonic())) is not None:
                    self._num_moving[piece.call.is_write] += 1
                    self._moving_bytes[piece.call.is_write] += piece.num_bytes
                    if self._reads or self._writes:
                        # The queue has more blocks to copy, so wake another thread.
                        self._changed.notify()
                    return piece
                self._changed.wait()
            return None

    def done(self, piece: DiskPiece) -> bool:
        """Counts a piece (some blocks of a call) as done, after the calling thread has copied it.
        Returns True if the piece's call has ended, so that no thread uses the call's slots (places
        in the arena) any more."""
        with self._changed:
            self._num_moving[piece.call.is_write] -= 1
            self._moving_bytes[piece.call.is_write] -= piece.num_bytes
            if self._reads or self._writes:
                self._changed.notify()
            return piece.call.piece_done()

    def drop_late(self, now_s: float) -> list[DiskCall]:
        """Drops the rest of each read whose deadline has passed: the blocks that no thread has
        taken yet. Returns the reads that have ended by this, because no thread is copying their
        blocks. Each other read ends when the last thread has copied its blocks.

        Needed only while all threads are busy: a free thread finds such reads in `take`.
        """
        with self._changed:
            late = [call for call in self._reads if call.deadline_s < now_s]
            for call in late:
                self._reads.remove(call)
            return [call for call in late if call.drop_rest()]

    def close(self) -> list[DiskCall]:
        """Closes the queue, and drops the rest of each call: the blocks that no thread has taken
        yet. Returns the calls that have ended by this, because no thread is copying their blocks.
        Each other call ends when the last thread has copied its blocks."""
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
        """Returns True if a thread may now take another piece (some blocks of a call): a piece of a
        write if `is_write` is True, otherwise of a read. The piece may have any size."""
        return self._num_moving[is_write] < 2 or self._moving_bytes[is_write] < self._max_bytes

    def _cut_first(self, calls: deque[DiskCall]) -> DiskPiece:
        share_bytes = sum(call.rest_bytes for call in calls) // self._num_threads
        call = calls.popleft()
        piece = call.cut(min(max(share_bytes, MIN_PIECE_BYTES), MAX_PIECE_BYTES))
        if call.has_rest:
            calls.append(call)
        return piece
