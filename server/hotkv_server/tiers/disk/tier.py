"""The disk tier: copies blocks between the arena and the slab file, on its own threads. The core
chooses the places and keeps the seals. Always true:

- a found block matches its seal, so the disk may reorder or lose writes;
- a call ends only when no thread uses its slots, even if the disk hangs and the tier is closed.
"""

import errno
import logging
import os
import threading
import time
from collections import Counter

import numpy as np

from hotkv_server.cache.values import DISK_TIER
from hotkv_server.dataplane.plan import Region
from hotkv_server.tiers.compression.staged import Staged
from hotkv_server.tiers.disk.calls import NO_DEADLINE_S, CallQueue, DiskCall
from hotkv_server.tiers.disk.mover import BlockMover
from hotkv_server.tiers.disk.slab_file import BlockIO, FileIO, SlabFile
from hotkv_server.tiers.protocol import (
    OnRead,
    OnWrite,
    PlacedBlocks,
    Read,
    TierFacts,
    TierFigures,
    TierMemory,
    Write,
)

NUM_THREADS = 20
"""They wait for the disk nearly all the time, so small machines can run them too."""
BATCH_BYTES = 16 << 20
"""A call with enough pieces to keep the threads busy."""
CLOSE_WAIT_S = 5.0
SLOW_BYTES_PER_S = 16 << 20
"""Of a slow disk. A piece counts as stalled only after its time at this speed."""
LATE_CHECK_S = 0.1
"""Between two searches for late reads."""
PROBLEM_CALLS = 3
"""So many calls failed in a row with an errno make the disk unusable."""
_ANSWERS = {
    (False, Read.FOUND): "read",
    (False, Read.CORRUPT): "corrupt",
    (False, Read.FAILED): "failed",
    (True, Write.STORED): "written",
    (True, Write.FAILED): "failed",
}
log = logging.getLogger(__name__)


class DiskTier:
    """See the module and `Tier`. Calls for a place may run in any order: read or reuse it only
    after its write has ended. I/O, encoding and seals run without the GIL."""

    def __init__(
        self,
        arena: Region,
        file: SlabFile,
        *,
        num_threads: int = NUM_THREADS,
        io: BlockIO | None = None,
        staged: Staged | None = None,
        close_wait_s: float = CLOSE_WAIT_S,
    ) -> None:
        """Owns `file` and `staged`. Loads numba functions, which takes seconds the first time.

        `arena`: must outlive the tier.
        `io`: None: reads and writes `file`.
        `close_wait_s`: how long `close` waits for a hung disk.
        """
        self._file = file
        self._staged = Staged(arena) if staged is None else staged
        self._mover = BlockMover(arena, file, FileIO(file.fd) if io is None else io, self._staged)
        self._close_wait_s = close_wait_s
        self._facts = TierFacts(DISK_TIER, BATCH_BYTES)
        self._queue = CallQueue(num_threads)
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._num_failed_calls, self._code = 0, 0
        self._num_alive = num_threads
        self._closing = threading.Event()
        # When each thread's piece begins to count as stalled; 0 without a piece.
        self._stalled_from_s = [0.0] * num_threads
        # When a thread last copied a piece.
        self._moved_s = 0.0
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"hotkv-disk-{i}", daemon=True)
            for i in range(num_threads)
        ]
        self._threads.append(
            threading.Thread(target=self._drop_late, name="hotkv-disk-late", daemon=True)
        )
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        threads = f"{len(self._stalled_from_s)} threads"
        return f"DiskTier({self._file!r}, {self._queue!r}, {self._staged!r}, {threads})"

    def prepare_encoding(self) -> None:
        """Allocates staging memory and loads its functions before the first block. May block for
        seconds. Raises OSError if memory is short."""
        self._staged.open()

    def facts(self) -> TierFacts:
        return self._facts

    def read(self, blocks: PlacedBlocks, deadline_s: float, on_done: OnRead) -> None:
        """A block is CORRUPT if its seal differs, the file is too short, or the disk fails only
        at this place; FAILED if the disk can't read at all or no staging memory was free in
        time."""
        self._add(DiskCall(blocks, False, deadline_s, lambda codes, seals: on_done(codes)))

    def write(self, blocks: PlacedBlocks, on_done: OnWrite) -> None:
        """A block is FULL if the file system has no room, which is rare, as space is allocated;
        UNFIT only if its place is smaller than its slot."""
        self._add(DiskCall(blocks, True, NO_DEADLINE_S, on_done))

    def problem(self) -> str:
        """Calls run all the same; the first that succeeds ends the problem."""
        with self._lock:
            if self._num_failed_calls < PROBLEM_CALLS:
                return ""
            words = f"{errno.errorcode.get(self._code, self._code)}, {os.strerror(self._code)}"
            return f"{self._file.path}: the last {self._num_failed_calls} calls failed ({words})"

    def stalled_s(self, now_s: float) -> float:
        """Beyond the piece's time at SLOW_BYTES_PER_S. Begins anew when another piece ends: a
        slow disk does not hang."""
        from_s = min(filter(None, self._stalled_from_s), default=now_s)
        return max(0.0, now_s - max(from_s, self._moved_s))

    def is_alive(self) -> bool:
        return self._closing.is_set() or all(thread.is_alive() for thread in self._threads)

    def memory(self) -> TierMemory:
        return TierMemory(self._staged.held_bytes, self._staged.num_bytes)

    def figures(self) -> TierFigures:
        with self._lock:
            return TierFigures(**self._sums)

    def close(self) -> None:
        """Waits at most `close_wait_s`. If the disk still hangs then, the arena must stay
        mapped; the calls and the file end when it answers. Not from an `on_done`."""
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
            self._stalled_from_s[number] = time.monotonic() + piece.num_bytes / SLOW_BYTES_PER_S
            try:
                if not piece.is_late:
                    self._mover.move(piece)
                    self._moved_s = time.monotonic()
            except Exception:  # Blocks that were not moved stay FAILED; the thread goes on.
                log.exception("%s: a piece of %d blocks", self._file.path, piece.end - piece.begin)
            self._stalled_from_s[number] = 0.0
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
        with self._lock:
            self._sums["queued_bytes"] -= call.blocks.total_bytes
            for code in np.unique(call.codes).tolist():
                if name := _ANSWERS.get((call.is_write, code)):
                    of_code = call.codes == code
                    self._sums[f"{name}_blocks"] += int(of_code.sum())
                    if name in ("read", "written"):
                        self._sums[f"{name}_bytes"] += int(call.blocks.stored_bytes[of_code].sum())
            if not np.isin(call.codes, (Write.FAILED, Write.UNFIT)).all():
                self._num_failed_calls = 0
            elif call.code:
                self._num_failed_calls, self._code = self._num_failed_calls + 1, call.code
        try:
            call.answer(call.codes, call.seals)
        except Exception:  # The thread must go on, because it serves other calls too.
            log.exception("%s: the end of a call", self._file.path)
