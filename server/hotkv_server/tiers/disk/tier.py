"""The disk tier: moves blocks between slots of the arena and the slab file, on its own threads.

The cache core chooses the place of each block in the file, and keeps the block's seal (checksum).
Always true:

- a read finds a block only if all its bytes match its seal. So the disk may reorder or lose writes
  without harm;
- a call ends only when no thread uses its slots any more, even if the disk hangs and the tier is
  closed.
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
    Blocks,
    OnRead,
    OnWrite,
    Read,
    TierFacts,
    TierFigures,
    TierMemory,
    Write,
)

NUM_THREADS = 20
"""Number of threads. Each thread copies one piece (part of a call) at a time. The threads wait for
the disk nearly all the time, so small machines can run them too."""
BATCH_BYTES = 16 << 20
"""Best size of a call: it has enough pieces (parts) to keep the threads busy."""
CLOSE_WAIT_S = 5.0
"""Longest time that `close` waits for a disk that hangs."""
SLOW_BYTES_PER_S = 16 << 20
"""Speed at which a slow disk reads or writes a large block, while it also reads or writes others. A
piece (part of a call) counts as stalled only after the time that it takes at this speed."""
LATE_CHECK_S = 0.1
"""Time between two checks for reads whose deadline has passed. The checks are needed while all
threads are busy."""
PROBLEM_CALLS = 3
"""The disk counts as unusable when this number of calls in a row have failed with an errno."""
_ANSWERS = {
    (False, Read.FOUND): "read",
    (False, Read.CORRUPT): "corrupt",
    (False, Read.FAILED): "failed",
    (True, Write.STORED): "written",
    (True, Write.FAILED): "failed",
}
log = logging.getLogger(__name__)


class DiskTier:
    """The disk tier: copies blocks between the arena and the slab file on its own threads; see the
    module and `Tier`. In its calls, `Blocks.places` are offsets in the slab file, which the core
    has chosen.

    Calls for the same place may run in any order. So the caller must read or reuse a place only
    after the write to it has ended. Reading, writing, encoding and the computation of seals run
    without the GIL; Python holds the GIL for microseconds per piece.
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
    ) -> None:
        """Takes ownership of the file. Loads compiled functions (numba), which takes seconds the
        first time.

        `arena`: memory with the slots; must outlive the tier.
        `num_threads`: number of threads that move blocks.
        `io`: moves the blocks; None: reads and writes `file`.
        `staged`: encodes and decodes blocks in its staging memory; None: a new `Staged`. The tier
            closes `staged`.
        `close_wait_s`: longest time that `close` waits for a disk that hangs.
        """
        self._file = file
        self._staged = Staged(arena) if staged is None else staged
        self._mover = BlockMover(arena, file, FileIO(file.fd) if io is None else io, self._staged)
        self._close_wait_s = close_wait_s
        self._facts = TierFacts(DISK_TIER, True, BATCH_BYTES)
        self._queue = CallQueue(num_threads)
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._num_failed_calls, self._code = 0, 0
        self._num_alive = num_threads
        self._closing = threading.Event()
        # For each thread, the time from which its present piece (some blocks of a call) counts as
        # stalled; 0 while it waits for a piece.
        self._stalled_from_s = [0.0] * num_threads
        # When a thread last ended a piece after it had copied the blocks.
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
        """Allocates the staging memory and loads the compiled functions (numba) for encoding, so
        that the first block to encode or decode does not wait for them. May block for seconds.
        Raises OSError if memory is short."""
        self._staged.open()

    def facts(self) -> TierFacts:
        """Returns the tier's properties; see `Tier.facts`."""
        return self._facts

    def read(self, blocks: Blocks, deadline_s: float, on_done: OnRead) -> None:
        """Reads blocks into their slots (places in the arena); see `Tier.read`.

        A block is CORRUPT in three cases: the block's bytes don't match its seal (checksum); the
        file ends before these bytes; or the disk can read other places of the file, but not the
        block's place. A block is FAILED if the disk can't read at all, or if no staging memory was
        free until the deadline.
        """
        self._add(DiskCall(blocks, False, deadline_s, lambda codes, seals: on_done(codes)))

    def write(self, blocks: Blocks, on_done: OnWrite) -> None:
        """Writes blocks from their slots (places in the arena); see `Tier.write`. Queued reads
        usually go first (see `disk.calls`).

        A block is FULL if the file system has no room. This is rare, because disk space for the
        file is allocated. A block can be UNFIT only if its place is smaller than its slot.
        """
        self._add(DiskCall(blocks, True, NO_DEADLINE_S, on_done))

    def problem(self) -> str:
        """Returns why the tier is unusable; see `Tier.problem`. The tier executes calls even while
        it has a problem; the first call that succeeds ends the problem."""
        with self._lock:
            if self._num_failed_calls < PROBLEM_CALLS:
                return ""
            words = f"{errno.errorcode.get(self._code, self._code)}, {os.strerror(self._code)}"
            return f"{self._file.path}: the last {self._num_failed_calls} calls failed ({words})"

    def stalled_s(self, now_s: float) -> float:
        """Returns for how many seconds the oldest piece under way (a part of a read or write) has
        waited for the disk; see `Tier.stalled_s`. The time that even a slow disk needs for the
        piece (at SLOW_BYTES_PER_S) is subtracted. The wait begins anew whenever another piece ends:
        a slow disk takes long for many large pieces, but as long as pieces end, it does not hang.
        """
        from_s = min(filter(None, self._stalled_from_s), default=now_s)
        return max(0.0, now_s - max(from_s, self._moved_s))

    def is_alive(self) -> bool:
        """Returns False if a thread of the tier has died; see `Tier.is_alive`."""
        return self._closing.is_set() or all(thread.is_alive() for thread in self._threads)

    def memory(self) -> TierMemory:
        """Returns the size of the tier's staging memory; see `Tier.memory`."""
        return TierMemory(self._staged.held_bytes, self._staged.num_bytes)

    def figures(self) -> TierFigures:
        """Returns the tier's counts since its start; see `Tier.figures`."""
        with self._lock:
            return TierFigures(**self._sums)

    def close(self) -> None:
        """Ends all calls and closes the file; see `Tier.close`. If the disk hangs, waits at most
        `close_wait_s`.

        If the disk still hangs after this wait, calls are still under way, so the arena must stay
        mapped. Once the disk answers, these calls end and the file is closed. Don't call `close`
        from an `on_done`.
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
        """Counts the results of a call that has ended in the figures, and calls its `answer`."""
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
        except Exception:  # The thread must go on, because it serves other calls too.
            log.exception("%s: the end of a call", self._file.path)
