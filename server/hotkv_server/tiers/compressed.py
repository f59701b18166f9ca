"""A tier that stores bfloat16 blocks in 12 bits a value, over another tier that places by itself.

Blocks that do not win by encoding (fp8, float32, noise, small slots) are stored plain. Under which
key a block lies says how: under its own it is plain, just as the tier below stores it by itself;
with ENCODED_SUFFIX it is encoded, in `form.room_bytes` of its size. So a reader knows the stored
size before it reads; it asks for the encoded form first and, if that is absent, for the plain one.
Equal blocks are encoded alike, so all nodes store one block under one key.

Always true: a call's slots are touched by threads of this tier only, never by the tier below, which
moves the staging memory; so a call ends at once when the tier below has ended its part.
"""

import dataclasses
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_server.dataplane.plan import Region
from hotkv_server.tiers.compression.pieces import NO_DEADLINE_S, Asked, Call, Piece, PieceQueue
from hotkv_server.tiers.compression.stager import Stager, encoded_key
from hotkv_server.tiers.compression.staging import open_staging
from hotkv_server.tiers.protocol import (
    NO_EPOCHS,
    Blocks,
    Codes,
    Epochs,
    OnEpoch,
    OnEpochs,
    OnProbe,
    OnRead,
    OnWrite,
    Read,
    SharedTier,
    TierFacts,
    TierFigures,
    TierMemory,
    Write,
)

NUM_THREADS = 2
CLOSE_WAIT_S = 5.0
"""How long `close` waits for calls that the tier below has not ended by then."""
_READ_NAMES = {
    Read.FOUND: "read",
    Read.ABSENT: "absent",
    Read.CORRUPT: "corrupt",
    Read.FAILED: "failed",
}
_WRITE_NAMES = {Write.STORED: "written", Write.FAILED: "failed"}
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredFigures:
    """Of blocks that were STORED since the start: how many in which form, their bytes in slots, and
    what was stored for them."""

    encoded_blocks: int = 0
    plain_blocks: int = 0
    slot_bytes: int = 0
    stored_bytes: int = 0


class CompressedTier:
    """See the module and `SharedTier`.

    `queued_bytes` and all other figures are of blocks as they are in slots. Seals are those of the
    stored bytes. A read that asks the store more than once looks at the epochs again at its end, so
    that a flush refuses all its blocks or none.
    """

    def __init__(
        self,
        inner_factory: Callable[[Region, int], SharedTier],
        arena: Region,
        staging_bytes: int,
        threads: int = NUM_THREADS,
        *,
        close_wait_s: float = CLOSE_WAIT_S,
    ) -> None:
        """`inner_factory` makes the tier below over the staging memory as its arena, given it and
        the descriptor of its file; this tier closes both. `staging_bytes`: a multiple of
        SLOT_ALIGN; blocks of more than that are FAILED. Takes the memory, and loads kernels,
        which takes seconds the first time. Raises OSError if memory is short; ValueError if the
        core chooses places in the tier below."""
        self._memory = open_staging(staging_bytes)
        staging = Region(self._memory.address, staging_bytes, "staging")
        self._close_wait_s = close_wait_s
        try:
            self._inner = inner_factory(staging, self._memory.fd)
        except BaseException:
            self._memory.close()
            raise
        if self._inner.facts().places:
            self._inner.close()
            self._memory.close()
            raise ValueError("a compressed tier needs one below it that places by itself")
        self._stager = Stager(arena, staging, self._inner.forget)
        self._queue = PieceQueue(staging_bytes)
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._stored: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._work, name=f"hotkv-compress-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"CompressedTier({self._inner!r}, {self._stager!r}, {self._queue!r})"

    def facts(self) -> TierFacts:
        """See `Tier`: those of the tier below. Its capacity is in stored bytes."""
        return self._inner.facts()

    def probe(
        self,
        keys: Sequence[bytes],
        deadline_s: float,
        on_done: OnProbe,
        epochs: Epochs = NO_EPOCHS,
    ) -> None:
        """See `SharedTier`. Asks for both forms at once."""

        def end(codes: Codes) -> None:
            encoded, plain = codes[: len(keys)], codes[len(keys) :]
            both = np.full(len(keys), Read.ABSENT, np.uint8)
            both[(encoded == Read.FAILED) | (plain == Read.FAILED)] = Read.FAILED
            both[(encoded == Read.FOUND) | (plain == Read.FOUND)] = Read.FOUND
            on_done(both)

        self._probe_below([*map(encoded_key, keys), *keys], deadline_s, end, epochs)

    def read(self, blocks: Blocks, deadline_s: float, on_done: OnRead) -> None:
        """See `Tier`. CORRUPT: as the tier below says, or what it has is no encoded form; then it
        forgets it."""
        self._add(Call(blocks, False, deadline_s, lambda codes, seals: on_done(codes)))

    def write(self, blocks: Blocks, on_done: OnWrite) -> None:
        """See `Tier`."""
        self._add(Call(blocks, True, NO_DEADLINE_S, on_done))

    def forget(self, keys: Sequence[bytes]) -> None:
        """See `Tier`."""
        self._inner.forget([*map(encoded_key, keys), *keys])

    def epochs(self, fingerprints: Sequence[str], deadline_s: float, on_done: OnEpochs) -> None:
        """See `SharedTier`."""
        self._inner.epochs(fingerprints, deadline_s, on_done)

    def raise_epoch(self, fingerprint: str, floor: int, on_done: OnEpoch) -> None:
        """See `SharedTier`."""
        self._inner.raise_epoch(fingerprint, floor, on_done)

    def problem(self) -> str:
        """See `Tier`."""
        return self._inner.problem()

    def stalled_s(self, now_s: float) -> float:
        """See `Tier`."""
        return self._inner.stalled_s(now_s)

    def is_alive(self) -> bool:
        """See `Tier`."""
        mine = self._queue.is_closed or all(thread.is_alive() for thread in self._threads)
        return mine and self._inner.is_alive()

    def memory(self) -> TierMemory:
        """See `Tier`: the staging memory, and what the tier below takes."""
        below, staging_bytes = self._inner.memory(), self._memory.num_bytes
        return TierMemory(
            below.held_bytes + staging_bytes,
            below.most_bytes + staging_bytes if below.most_bytes else 0,
        )

    def figures(self) -> TierFigures:
        """See `Tier`."""
        with self._lock:
            return TierFigures(**self._sums)

    def stored(self) -> StoredFigures:
        """What encoding has saved."""
        with self._lock:
            return StoredFigures(**self._stored)

    def close(self) -> None:
        """See `Tier`. Waits as long as the tier below does, and `close_wait_s` for calls that it
        leaves to themselves. Those have not ended then, and the staging memory stays until `close`
        is called again after their end. Not to be called by an `on_done`."""
        for call in self._queue.close():
            self._finish(call)
        self._inner.close()
        for thread in self._threads:
            thread.join(self._close_wait_s)
        if self._queue.num_open:
            log.error("%d pieces of calls have not ended", self._queue.num_open)
        else:
            self._memory.close()

    def _add(self, call: Call) -> None:
        with self._lock:
            self._sums["queued_bytes"] += call.blocks.total_bytes
        if not self._queue.add(call):
            self._end(call)

    def _work(self) -> None:
        while (piece := self._queue.take()) is not None:
            asked = None
            try:
                if piece.place is not None:
                    asked = self._stager.next_question(piece, piece.place)
            except Exception:  # The edge of the effect executor: blocks not settled are FAILED.
                log.exception("a piece of %d blocks", piece.end - piece.begin)
            if asked is None:
                self._done(piece)
            else:
                self._ask(piece, asked)
            del piece

    def _ask(self, piece: Piece, asked: Asked) -> None:
        call = piece.call
        if call.is_write:

            def written(codes: Codes, seals: NDArray[np.uint64]) -> None:
                call.codes[asked.rows], call.seals[asked.rows] = codes, seals
                self._count_stored(call, asked, codes)
                self._done(piece)

            self._inner.write(asked.blocks, written)
            return
        with self._lock:
            call.num_asked += 1
        self._inner.read(
            asked.blocks,
            call.deadline_s,
            lambda codes: self._queue.answered(piece, dataclasses.replace(asked, codes=codes)),
        )

    def _done(self, piece: Piece) -> None:
        if self._queue.done(piece):
            self._finish(piece.call)

    def _finish(self, call: Call) -> None:
        """Ends a call all of whose pieces are done. A flush may have come between two questions of
        a read: then the epochs are looked at once more, by a block that was found."""
        if call.blocks.epochs and call.num_asked > 1 and call.found_key:
            self._probe_below(
                [call.found_key],
                call.deadline_s,
                lambda codes: self._end_read(call, int(codes[0])),
                call.blocks.epochs,
            )
        else:
            self._end(call)

    def _end_read(self, call: Call, code: int) -> None:
        """Ends a read of several questions, given what its epochs are at its end: FOUND if they are
        as expected."""
        if code == Read.ABSENT:
            call.codes[:] = Read.ABSENT
        elif code != Read.FOUND:
            call.codes[call.codes == Read.FOUND] = Read.FAILED
        self._end(call)

    def _probe_below(
        self, keys: Sequence[bytes], deadline_s: float, on_done: OnProbe, epochs: Epochs
    ) -> None:
        if epochs:
            self._inner.probe(keys, deadline_s, on_done, epochs)
        else:
            self._inner.probe(keys, deadline_s, on_done)

    def _end(self, call: Call) -> None:
        """Counts a call that nobody touches any more, and answers it."""
        names = _WRITE_NAMES if call.is_write else _READ_NAMES
        with self._lock:
            self._sums["queued_bytes"] -= call.blocks.total_bytes
            for code, name in names.items():
                is_so = call.codes == code
                self._sums[f"{name}_blocks"] += int(is_so.sum())
                if name in ("read", "written"):
                    self._sums[f"{name}_bytes"] += int(call.blocks.num_bytes[is_so].sum())
        try:
            call.answer(call.codes, call.seals)
        except Exception:  # The edge of the effect executor: the thread serves other calls too.
            log.exception("the end of a call")

    def _count_stored(self, call: Call, asked: Asked, codes: Codes) -> None:
        is_stored = codes == Write.STORED
        num_encoded = int((is_stored & asked.is_encoded).sum())
        with self._lock:
            self._stored["encoded_blocks"] += num_encoded
            self._stored["plain_blocks"] += int(is_stored.sum()) - num_encoded
            self._stored["slot_bytes"] += int(call.blocks.num_bytes[asked.rows[is_stored]].sum())
            self._stored["stored_bytes"] += int(asked.blocks.num_bytes[is_stored].sum())
