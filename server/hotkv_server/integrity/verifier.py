"""Verifies blocks: compares their bytes with their checksums. After a restart, as
many blocks as time allows are compared at the start, and the other blocks at their first use. In
the background, the *scrub* compares all blocks again and again.

Always true while checksums are turned on (setting `integrity.stride`): a block that an earlier
server left is compared before it is loaded, and before clients learn the place of its slot. A block
that does not match is condemned: lookups no longer find it, and each load of it fails, even under
an older lease.

Bytes are read on other threads. A block that is not pinned may be evicted while it is read. So a
mismatch counts only if the entry (record in the block table) still belongs to the same block
afterwards.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import Entries, SlotRun
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.evidence import Evidence, condemn, evidence
from hotkv_server.integrity.sums import holds

log = logging.getLogger(__name__)

BATCH_BYTES = 64 << 20
"""Most bytes of slots that are compared at a time."""
SCANNED_ENTRIES = 1 << 17
"""Most entries that the scrub (the background comparison of all blocks) examines in one turn of the
event loop, to find ready entries. This takes a millisecond."""
MIN_PAUSE_S = 0.05
"""Least pause between two batches of the scrub (the background comparison of all blocks), in
seconds."""
PASS_PAUSE_S = 5.0
"""Pause between two passes of the scrub (the background comparison) over all blocks, in seconds.
Without it, the blocks of a small cache would be read every second."""


@dataclass(frozen=True, slots=True)
class Case:
    """Blocks of the same shape to compare with their checksums. The shape is the
    number and sizes of a block's shards (the parts from the ranks).

    `evidence`: describes the n blocks, with their checksums.
    `reuses` [n]: the reuse count of each entry when the case was made. A reuse count counts how
        often an entry number was used, so it shows whether the entry still belongs to the same
        block.
    """

    evidence: Evidence
    reuses: Entries


class Verifier:
    """Verifies blocks: compares their bytes with their checksums, and condemns
    (drops) blocks that do not match. Only `judge` may be called on any thread, the other methods
    only on the thread of the event loop.

    `verified_blocks`, `condemned_blocks`: counts of blocks that matched, and of blocks that were
        condemned, since the start.
    `passes`: number of passes over all blocks that the scrub (the background comparison) has
        completed.
    """

    def __init__(self, core: CacheCore, arena: Region) -> None:
        self._core = core
        self._arena = arena
        self._next_entry, self._pass_end = 1, 0
        self.verified_blocks = 0
        self.condemned_blocks = 0
        self.passes = 0
        self._reading_since_s = 0.0

    def __repr__(self) -> str:
        return (
            f"Verifier(verified {self.verified_blocks}, condemned {self.condemned_blocks}, "
            f"passes {self.passes})"
        )

    def cases(self, entries: Entries) -> list[Case]:
        """Describes entries (records in the block table) so that `judge` can compare them with
        their checksums. Returns a `Case` for each group of blocks of the same shape:
        number and sizes of shards (the ranks' parts of a block). `entries`: ready entries, or
        detached entries (removed, but still pinned)."""
        records = self._core.space.index.table.records
        return [
            Case(found, records[found.entries, table.W_REUSES].copy())
            for found in evidence(self._core, entries)
        ]

    def unverified(self, slots: Sequence[SlotRun]) -> list[Case]:
        """Returns the blocks of a load that were not yet compared with their checksums
        (checksums), in the form that `judge` accepts. `judge` must compare them before the load
        copies its blocks. Usually the list is empty.

        `slots`: the blocks of the load.
        """
        index = self._core.space.index
        waiting = [run.entries[index.unverified[run.entries]] for run in slots]
        return [
            case for entries in waiting if len(entries) for case in self.cases(np.unique(entries))
        ]

    def is_doubtful(self, slots: Sequence[SlotRun]) -> bool:
        """Returns True if a block of a load was condemned (dropped as damaged) since it was
        compared for this load. The load must then fail. Called after the copy. `slots`: the blocks
        of the load."""
        return any(self._core.space.index.unverified[run.entries].any() for run in slots)

    def judge(self, cases: Sequence[Case]) -> list[NDArray[np.bool_]]:
        """Compares blocks with their checksums. Returns, for each case, a mask of
        the entries (records in the block table) whose bytes match. Reads the bytes, without the
        GIL, and blocks the calling thread. Callable on any thread."""
        return [holds(self._arena, case.evidence) for case in cases]

    def settle(self, cases: Sequence[Case], verdicts: Sequence[NDArray[np.bool_]]) -> Entries:
        """Processes a result of `judge`: marks the blocks that match as verified, and condemns
        (drops) the blocks that do not match. Returns the entries (records in the block table) that
        do not match, without duplicates; they include blocks that another comparison has condemned
        meanwhile.

        `cases`: the arguments of `judge`.
        `verdicts`: the result of `judge`.
        """
        records, index = self._core.space.index.table.records, self._core.space.index
        disagreeing = [np.empty(0, np.uint32)]
        for case, good in zip(cases, verdicts, strict=True):
            entries = case.evidence.entries
            # Skip an entry whose number belongs to another block by now. Don't skip an entry that
            # was removed while a lease pins it (a detached entry), because it can still be loaded.
            same = index.can_be_read(entries) & (records[entries, table.W_REUSES] == case.reuses)
            index.unverified[entries[same & good]] = False
            self.verified_blocks += int((same & good).sum())
            disagreeing.append(entries[same & ~good])
        bad = np.unique(np.concatenate(disagreeing))
        ready = bad[index.is_ready(bad)]
        if len(ready):
            self.condemned_blocks += len(ready)
            log.error(
                "condemned blocks=%d first=%s: their bytes are not those of their checksums",
                len(ready),
                self._name(int(ready[0])),
            )
            condemn(self._core, ready)
        return bad

    async def compare(self, entries: Entries) -> Entries:
        """Compares those blocks among `entries` that are still unverified (not compared since a
        restart) with their checksums, and condemns (drops) blocks that do not match.
        Returns the entries (records in the block table) that do not match, without duplicates. All
        `entries` must be pinned, for example by a lease.
        """
        waiting = np.unique(entries[self._core.space.index.unverified[entries]])
        if not len(waiting):
            return waiting
        cases = self.cases(waiting)
        return self.settle(
            cases, await asyncio.get_running_loop().run_in_executor(None, self.judge, cases)
        )

    def _name(self, entry: int) -> str:
        (key_space,), (group,), hashes = self._core.space.index.keys(np.array([entry], np.uint32))
        return f"key_space={key_space}/group={group}/hash={hashes[0].tobytes().hex()[:16]}"

    # At start

    def verify_for(self, budget_s: float) -> None:
        """Compares blocks of an earlier server with their checksums, in random
        order, for at most `budget_s` seconds. Blocks the calling thread."""
        deadline_s = time.monotonic() + budget_s
        index = self._core.space.index
        waiting = np.random.default_rng().permutation(
            np.flatnonzero(index.unverified).astype(np.uint32)
        )
        at = 0
        while at < len(waiting) and time.monotonic() < deadline_s:
            batch = waiting[at : at + self._batch_length(waiting[at:])]
            at += len(batch)
            # Skip entries that are no longer unverified: when a block was condemned (dropped as
            # damaged), its sketch was dropped with it.
            cases = self.cases(batch[index.unverified[batch]])
            self.settle(cases, self.judge(cases))

    def _batch_length(self, entries: Entries) -> int:
        """Returns how many of the first `entries` form a batch, which `judge` compares at a time.
        Their slots (places for blocks) have at most BATCH_BYTES in total. A batch has at least one
        entry (record in the block table)."""
        upto = np.cumsum(
            self._core.space.index.slot_bytes(entries[: BATCH_BYTES // table.SLOT_ALIGN])
        )
        return max(1, int(np.searchsorted(upto, BATCH_BYTES, side="right")))

    # In the background

    def next_batch(self) -> Entries | None:
        """Returns the ready entries (records in the block table) that the scrub (the background
        comparison of all blocks) compares next, in the order of their numbers. Returns None at the
        end of a pass; the next call begins the next pass. Checks at most SCANNED_ENTRIES entries,
        so the result may be empty.

        Entry numbers that are used for the first time during a pass belong to the next pass.
        Otherwise new stores could prolong a pass for ever.
        """
        index, first = self._core.space.index, self._next_entry
        self._pass_end = self._pass_end or index.num_numbers
        if first >= self._pass_end:
            self._next_entry, self._pass_end = 1, 0
            self.passes += 1
            return None
        end = min(first + SCANNED_ENTRIES, self._pass_end)
        ready = first + np.flatnonzero(index.states(first, end) == table.STATE_READY).astype(
            np.uint32
        )
        batch = ready[: self._batch_length(ready)]
        self._next_entry = int(batch[-1]) + 1 if len(batch) < len(ready) else end
        return batch

    def stalled_s(self, now_s: float) -> float:
        """Returns for how many seconds the scrub (the background comparison of all blocks) has read
        its present batch of blocks; 0 between batches. `now_s`: a time of time.monotonic."""
        return now_s - self._reading_since_s if self._reading_since_s else 0.0

    async def scrub(self, bytes_per_s: float, tell: Callable[[], None]) -> None:
        """Runs the scrub until it is cancelled: compares all blocks again and again.

        `bytes_per_s`: bytes of slots (places for blocks) that are compared per second.
        `tell`: function that sends notices and events about removed blocks to clients. Called after
            each batch, because blocks may have been condemned (dropped).
        """
        while True:
            batch = self.next_batch()
            if batch is None or not len(batch):
                await asyncio.sleep(PASS_PAUSE_S if batch is None else MIN_PAUSE_S)
                continue
            began_s = time.monotonic()
            num_bytes = int(self._core.space.index.slot_bytes(batch).sum())
            cases = self.cases(batch)
            self._reading_since_s = began_s
            verdicts = await asyncio.get_running_loop().run_in_executor(None, self.judge, cases)
            self._reading_since_s = 0.0
            self.settle(cases, verdicts)
            tell()
            pause_s = num_bytes / bytes_per_s - (time.monotonic() - began_s)
            await asyncio.sleep(max(pause_s, MIN_PAUSE_S))
