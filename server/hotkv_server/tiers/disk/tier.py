"""The disk tier: moves blocks between slots of the arena and the slab file, on threads of its own.

The core chooses where blocks lie in the file and keeps their seals. Always true: a block is FOUND
only if all its bytes reproduce its seal, so nothing else of the disk has to be trusted, neither
order nor durability of writes. A call ends when no thread touches its slots any more, and not
before, even if the disk hangs and the tier is closed.
"""

import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from hotkv_server.cache.values import Medium
from hotkv_server.dataplane.plan import Region
from hotkv_server.tiers.compression.staged import Staged
from hotkv_server.tiers.disk.calls import NO_DEADLINE_S, CallQueue, DiskCall
from hotkv_server.tiers.disk.mover import BlockMover
from hotkv_server.tiers.disk.slab_file import BlockIO, FileIO, SlabFile
from hotkv_server.tiers.protocol import (
    Blocks,
    OnProbe,
    OnRead,
    OnWrite,
    Read,
    TierFacts,
    TierFigures,
    TierMemory,
    Write,
)

NUM_THREADS = 20
"""I/O under way at once. They wait for the disk nearly all the time, on small machines too."""
BATCH_BYTES = 16 << 20
"""Enough in one call for all threads to have several pieces."""
CLOSE_WAIT_S = 5.0
LATE_CHECK_S = 0.1
"""How often reads are dropped whose deadline has passed, if no thread is there to do it."""
PROBLEM_CALLS = 3
"""So many calls in a row that an errno ended mean that the disk can't be used."""
_ANSWERS = {
    (False, Read.FOUND): "read",
    (False, Read.CORRUPT): "corrupt",
    (False, Read.FAILED): "failed",
    (True, Write.STORED): "written",
    (True, Write.FAILED): "failed",
}
log = logging.getLogger(__name__)


class DiskTier:
    """See the module. A `Tier` in which the core chooses places: offsets in the slab file.

    Calls that overlap in the file are done in any order: a place is read or given to another block
    only after its write has ended. The GIL is held for microseconds a piece: reading, writing,
    sealing, encoding and decoding give it up for the whole of it.
    """

    def __init__(
        self,
        arena: Region,
        file: SlabFile,
        *,
        num_threads: int = NUM_THREADS,
        io: BlockIO | None = None,
        staged: Staged | None = None,
        close_wait_s: float = CLOSE_WAIT_S,
        name: str = "disk",
    ) -> None:
        """Takes the file over. `arena` outlives the tier. `io`: moves the blocks instead of the
        file's own I/O. `staged`: encodes and decodes; the tier closes it. `close_wait_s`: see
        `close`. Loads kernels, which takes seconds the first time."""
        self._file = file
        self._staged = Staged(arena) if staged is None else staged
        self._mover = BlockMover(arena, file, FileIO(file.fd) if io is None else io, self._staged)
        self._close_wait_s = close_wait_s
        self._facts = TierFacts(name, Medium.DISK, True, file.num_bytes, False, BATCH_BYTES)
        self._queue = CallQueue(num_threads)
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._num_failed_calls, self._code = 0, 0
        self._num_alive = num_threads
        self._closing = threading.Event()
        # When each thread began its piece; 0 while it waits for one.
        self._begun_s = [0.0] * num_threads
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"hotkv-{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        self._threads.append(
            threading.Thread(target=self._drop_late, name=f"hotkv-{name}-late", daemon=True)
        )
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        threads = f"{len(self._begun_s)} threads"
        return f"DiskTier({self._file!r}, {self._queue!r}, {self._staged!r}, {threads})"

    def prepare_encoding(self) -> None:
        """Takes the staging memory and loads kernels, for which the first block to be encoded or
        decoded would have to wait. Blocks. Raises OSError if memory is short."""
        self._staged.open()

    def facts(self) -> TierFacts:
        """See `Tier`."""
        return self._facts

    def probe(self, keys: Sequence[bytes], deadline_s: float, on_done: OnProbe) -> None:
        """Knows of no keys: all FAILED."""
        on_done(np.full(len(keys), Read.FAILED, np.uint8))

    def read(self, blocks: Blocks, deadline_s: float, on_done: OnRead) -> None:
        """See `Tier`. CORRUPT: the bytes are not those that were sealed, or the file ends before
        them. FAILED: the disk says that it can't read them, or there was no memory to decode them
        in until the deadline."""
        self._add(DiskCall(blocks, False, deadline_s, lambda codes, seals: on_done(codes)))

    def write(self, blocks: Blocks, on_done: OnWrite) -> None:
        """See `Tier`. FULL: the file system has no room; few need any to write allocated blocks.
        UNFIT: of blocks whose places are smaller than their slots. Reads go first, see `calls`."""
        self._add(DiskCall(blocks, True, NO_DEADLINE_S, on_done))

    def forget(self, keys: Sequence[bytes]) -> None:
        """Nothing to do: a place is free when the core says so."""

    def problem(self) -> str:
        """See `Tier`. Calls are still tried; one that the disk does clears it."""
        with self._lock:
            if self._num_failed_calls < PROBLEM_CALLS:
                return ""
            words = f"{errno.errorcode.get(self._code, self._code)}, {os.strerror(self._code)}"
            return f"{self._file.path}: the last {self._num_failed_calls} calls failed ({words})"

    def stalled_s(self, now_s: float) -> float:
        """See `Tier`: of the thread that has been on its piece for longest."""
        return max(0.0, now_s - min(filter(None, self._begun_s), default=now_s))

    def is_alive(self) -> bool:
        """See `Tier`."""
        return self._closing.is_set() or all(thread.is_alive() for thread in self._threads)

    def memory(self) -> TierMemory:
        """See `Tier`: the staging memory."""
        return TierMemory(self._staged.held_bytes, self._staged.num_bytes)

    def figures(self) -> TierFigures:
        """See `Tier`."""
        with self._lock:
            return TierFigures(**self._sums)

    def close(self) -> None:
        """See `Tier`. Waits at most `close_wait_s` for a disk that hangs.

        After that the calls whose slots it may still touch have not ended: they end, and the file
        is closed, when the disk answers. Until then the arena must stay mapped. Not to be called by
        an `on_done`.
        """
        self._closing.set()
        self._staged.stop()
        for call in self._queue.close():
            self._end(call)
        until_s = time.monotonic() + self._close_wait_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            log.error("%s: the disk hangs, its calls are left to themselves", self._file.path)

    def _add(self, call: DiskCall) -> None:
        with self._lock:
            self._sums["queued_bytes"] += call.blocks.total_bytes
        if not len(call.blocks) or not self._queue.add(call):
            self._end(call)

    def _work(self, number: int) -> None:
        while (piece := self._queue.take()) is not None:
            self._begun_s[number] = time.monotonic()
            try:
                if not piece.is_late:
                    self._mover.move(piece)
            except Exception:  # The edge of the effect executor: blocks not moved are FAILED.
                log.exception("%s: a piece of %d blocks", self._file.path, piece.end - piece.begin)
            self._begun_s[number] = 0.0
            if self._queue.done(piece):
                self._end(piece.call)
            del piece
        with self._lock:
            self._num_alive -= 1
            is_last = not self._num_alive
        if is_last:
            self._staged.close()
            self._file.close()

    def _drop_late(self) -> None:
        while not self._closing.wait(LATE_CHECK_S):
            for call in self._queue.drop_late(time.monotonic()):
                self._end(call)

    def _end(self, call: DiskCall) -> None:
        """Counts a call that nobody touches any more, and answers it."""
        with self._lock:
            self._sums["queued_bytes"] -= call.blocks.total_bytes
            for code in np.unique(call.codes).tolist():
                if name := _ANSWERS.get((call.is_write, code)):
                    of_code = call.codes == code
                    self._sums[f"{name}_blocks"] += int(of_code.sum())
                    if name in ("read", "written"):
                        self._sums[f"{name}_bytes"] += int(call.blocks.place_bytes[of_code].sum())
            if not np.isin(call.codes, (Write.FAILED, Write.UNFIT)).all():
                self._num_failed_calls = 0
            elif call.code:
                self._num_failed_calls, self._code = self._num_failed_calls + 1, call.code
        try:
            call.answer(call.codes, call.seals)
        except Exception:  # The edge of the effect executor: the thread serves other calls too.
            log.exception("%s: the end of a call", self._file.path)
