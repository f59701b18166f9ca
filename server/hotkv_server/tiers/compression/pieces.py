"""Calls of a compressed tier, cut into pieces, and the queue in which they wait for staging memory.

Always true: a piece has an extent of the staging memory from the time it is taken until it is done;
a call ends once, when its last piece is done or dropped. A piece that has its extent never waits
for another one, so whatever waits gets its turn once the store answers. Reads go before writes, and
writes have at most half of the staging memory, or one piece.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv_server.tiers.compression.staging import Extents
from hotkv_server.tiers.protocol import Blocks, Codes, Int64s, Read, Seals, Write

PIECE_BYTES = 4 << 20
"""A few milliseconds of encoding, so that large calls use all threads and all connections of the
store."""
MAX_WAITING_PIECES = 1 << 14
"""A call beyond this many fails at once. The runtime bounds bytes in flight long before."""
LATE_CHECK_S = 0.1
"""How often reads that wait are looked at for their deadlines."""
NO_DEADLINE_S = math.inf
"""Writes have no deadline."""


@dataclass(eq=False, slots=True)
class Call:
    """A read or a write of blocks. `codes` (uint8 [n]) and `seals` (uint64 [n]) are its answer as
    far as it is known; FAILED and 0 at first. `num_asked`: reads of the store for it; `found_key`:
    a key under which one of them found a block."""

    blocks: Blocks
    is_write: bool
    deadline_s: float
    answer: Callable[[Codes, Seals], None] = field(repr=False)
    codes: Codes = field(init=False)
    seals: Seals = field(init=False)
    num_asked: int = field(default=0, init=False)
    found_key: bytes = field(default=b"", init=False)
    num_pieces: int = field(default=0, init=False)
    """Pieces that are not done. The queue's."""

    def __post_init__(self) -> None:
        failed = Write.FAILED if self.is_write else Read.FAILED
        self.codes = np.full(len(self.blocks), failed, np.uint8)
        self.seals = np.zeros(len(self.blocks), np.uint64)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the store is asked for: `rows` of a call, each encoded or plain, `blocks` as the store
    has them. `codes`: its answer to a read."""

    rows: Int64s
    is_encoded: NDArray[np.bool_]
    blocks: Blocks
    codes: Codes = field(default_factory=lambda: np.empty(0, np.uint8))


@dataclass(eq=False, slots=True)
class Piece:
    """Rows `begin`..`end` of a call, of `num_bytes` in slots. `place`: of its extent, from `take`
    on; None if there is nothing to do any more. `asked`: the store's last answer, if it is a read
    that has one."""

    call: Call
    begin: int
    end: int
    num_bytes: int
    place: int | None = None
    asked: Asked | None = None


class PieceQueue:
    """See the module. Thread-safe."""

    def __init__(self, num_bytes: int) -> None:
        self._extents = Extents(num_bytes)
        self._piece_bytes = min(PIECE_BYTES, num_bytes // 4)
        self._changed = threading.Condition()
        self._answered: deque[Piece] = deque()
        self._reads: deque[Piece] = deque()
        self._writes: deque[Piece] = deque()
        self._late: deque[Piece] = deque()
        self._look_at_s = 0.0
        self._writing_bytes = 0
        self._num_open = 0
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def __repr__(self) -> str:
        return (
            f"PieceQueue({len(self._reads)} of reads and {len(self._writes)} of writes wait, "
            f"{self._num_open} under way, {self._extents!r})"
        )

    @property
    def num_open(self) -> int:
        """Pieces that were taken and are not done."""
        return self._num_open

    def add(self, call: Call) -> bool:
        """Adds a call's pieces. Returns False if nothing will come of it: the queue is closed or
        full, or no block fits the staging memory. Blocks that do not fit it stay FAILED."""
        pieces = list(self._cut(call))
        with self._changed:
            num_waiting = len(self._reads) + len(self._writes)
            if self._is_closed or not pieces or num_waiting + len(pieces) > MAX_WAITING_PIECES:
                return False
            call.num_pieces = len(pieces)
            (self._writes if call.is_write else self._reads).extend(pieces)
            self._changed.notify_all()
            return True

    def take(self) -> Piece | None:
        """The next piece: one that the store has answered, or one that gets its extent now, or one
        that is late and gets none. Blocks until there is one. None once the queue is closed and no
        piece is under way."""
        with self._changed:
            while True:
                piece = self._next(time.monotonic())
                if piece is not None or (self._is_closed and not self._num_open):
                    return piece
                self._changed.wait(LATE_CHECK_S if self._reads else None)

    def answered(self, piece: Piece, asked: Asked) -> None:
        """The store has answered a piece; somebody takes it again."""
        with self._changed:
            piece.asked = asked
            self._answered.append(piece)
            self._changed.notify_all()

    def done(self, piece: Piece) -> bool:
        """A piece is done, and its extent is free. Returns True if its call has ended."""
        with self._changed:
            self._num_open -= 1
            if piece.place is not None:
                self._extents.give(piece.place, piece.num_bytes)
                self._writing_bytes -= piece.num_bytes if piece.call.is_write else 0
            self._changed.notify_all()
            return _ends(piece.call)

    def close(self) -> list[Call]:
        """Drops the pieces that wait, and returns the calls that have ended by it; others end when
        their pieces are done."""
        with self._changed:
            self._is_closed = True
            waiting = [*self._late, *self._reads, *self._writes]
            for pieces in (self._late, self._reads, self._writes):
                pieces.clear()
            self._changed.notify_all()
            return [piece.call for piece in waiting if _ends(piece.call)]

    def check_invariants(self) -> None:
        """Raises AssertionError if the staging memory is not whole while no piece is under way."""
        with self._changed:
            self._extents.check_invariants()
            if not self._num_open:
                assert self._extents.free_bytes == self._extents.num_bytes, "an extent is lost"
                assert not self._writing_bytes, "bytes of writes are counted wrong"

    def _cut(self, call: Call) -> Iterator[Piece]:
        begin = total_bytes = 0
        sizes = call.blocks.num_bytes.tolist()
        for at, size in enumerate(sizes):
            fits = 0 < size <= self._extents.num_bytes
            if at > begin and (not fits or total_bytes + size > self._piece_bytes):
                yield Piece(call, begin, at, total_bytes)
                begin, total_bytes = at, 0
            if not fits:
                begin = at + 1
                continue
            total_bytes += size
        if len(sizes) > begin:
            yield Piece(call, begin, len(sizes), total_bytes)

    def _next(self, now_s: float) -> Piece | None:
        if self._answered:
            return self._answered.popleft()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LATE_CHECK_S
            self._drop_late(now_s)
        if self._late:
            self._num_open += 1
            return self._late.popleft()
        waiting = self._reads or self._writes
        if not waiting:
            return None
        piece = waiting[0]
        is_write = piece.call.is_write
        most = max(self._extents.num_bytes // 2, piece.num_bytes)
        if is_write and self._writing_bytes + piece.num_bytes > most:
            return None
        place = self._extents.take(piece.num_bytes)
        if place is None:
            return None
        waiting.popleft()
        piece.place = place
        self._writing_bytes += piece.num_bytes if is_write else 0
        self._num_open += 1
        return piece

    def _drop_late(self, now_s: float) -> None:
        reads = list(self._reads)
        self._reads.clear()
        for piece in reads:
            (self._late if piece.call.deadline_s < now_s else self._reads).append(piece)


def _ends(call: Call) -> bool:
    """One piece less. Returns True if it was the last."""
    call.num_pieces -= 1
    return not call.num_pieces
