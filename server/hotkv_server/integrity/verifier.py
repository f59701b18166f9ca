"""Compares blocks with their check values: as many as time allows at the start, the rest at their
first use, and all of them again in the background.

Always true: a block of an earlier server is compared before it is loaded and before clients learn
its place. A block that disagrees is condemned: it is no longer found, and each load of it fails,
also under an older lease. Bytes are read on other threads. A block that is not pinned may be
evicted while it is read, so a disagreement counts only if the entry is still the same afterwards.
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
"""Entries that a scrub looks at per turn of the event loop; this takes a millisecond."""
MIN_PAUSE_S = 0.05
PASS_PAUSE_S = 5.0
"""Pause between two passes over all blocks. Reading a small cache takes less time than this, and it
need not be read every second."""


@dataclass(frozen=True, slots=True)
class Case:
    """Entries to compare, and their generations [n] when the case was made. A generation counts how
    often an entry number was used, so a later entry with the same number is recognized."""

    evidence: Evidence
    generations: Entries


class Verifier:
    """Verifies blocks; see the module. All methods but `judge` belong to the event loop's
    thread."""

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
        """Returns the cases of entries that are ready or detached, in parts of the same shape."""
        records = self._core.space.index.table.records
        return [
            Case(found, records[found.entries, table.W_GENERATION].copy())
            for found in evidence(self._core, entries)
        ]

    def unverified(self, slots: Sequence[SlotRun]) -> list[Case]:
        """Returns the cases (blocks not yet compared with their check values) that a load must
        compare before it copies; usually empty."""
        index = self._core.space.index
        waiting = [run.entries[index.unverified[run.entries]] for run in slots]
        return [
            case for entries in waiting if len(entries) for case in self.cases(np.unique(entries))
        ]

    def is_doubtful(self, slots: Sequence[SlotRun]) -> bool:
        """Returns whether a block of the load has been condemned since it was compared."""
        return any(self._core.space.index.unverified[run.entries].any() for run in slots)

    def judge(self, cases: Sequence[Case]) -> list[NDArray[np.bool_]]:
        """Compares blocks with their check values; returns for each case a mask of the entries that
        agree. Blocks for as long as reading takes. From any thread, without the GIL."""
        return [holds(self._arena, case.evidence) for case in cases]

    def settle(self, cases: Sequence[Case], verdicts: Sequence[NDArray[np.bool_]]) -> Entries:
        """Marks blocks that agree as verified and condemns the others. Returns the others, without
        duplicates, including blocks that were condemned elsewhere during the comparison."""
        records, index = self._core.space.index.table.records, self._core.space.index
        disagreeing = [np.empty(0, np.uint32)]
        for case, good in zip(cases, verdicts, strict=True):
            entries = case.evidence.entries
            # An entry that was read under a lease still exists; it may be detached by now.
            same = index.can_be_read(entries) & (
                records[entries, table.W_GENERATION] == case.generations
            )
            index.unverified[entries[same & good]] = False
            self.verified_blocks += int((same & good).sum())
            disagreeing.append(entries[same & ~good])
        bad = np.unique(np.concatenate(disagreeing))
        ready = bad[index.is_ready(bad)]
        if len(ready):
            self.condemned_blocks += len(ready)
            first = self._name(int(ready[0]))
            log.error(
                "condemned blocks=%d first=%s: their bytes are not those of their check values",
                len(ready),
                first,
            )
            condemn(self._core, ready)
        return bad

    async def compare(self, entries: Entries) -> Entries:
        """Compares the unverified entries. Returns the entries that disagree, without duplicates. A
        lease must pin all of them."""
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

    def verify_for(self, budget_s: float) -> int:
        """Compares blocks of an earlier server, in random order, for at most `budget_s`. Returns
        the number of unverified blocks that are left. Blocks the calling thread."""
        deadline_s = time.monotonic() + budget_s
        index = self._core.space.index
        waiting = np.random.default_rng().permutation(
            np.flatnonzero(index.unverified).astype(np.uint32)
        )
        at = 0
        while at < len(waiting) and time.monotonic() < deadline_s:
            batch = waiting[at : at + self._batch_length(waiting[at:])]
            at += len(batch)
            # Representations of a condemned block were dropped with it.
            cases = self.cases(batch[index.unverified[batch]])
            self.settle(cases, self.judge(cases))
        return int(index.unverified.sum())

    def _batch_length(self, entries: Entries) -> int:
        """Returns how many of the first entries take BATCH_BYTES together; at least 1."""
        upto = np.cumsum(
            self._core.space.index.slot_bytes(entries[: BATCH_BYTES // table.SLOT_ALIGN])
        )
        return max(1, int(np.searchsorted(upto, BATCH_BYTES, side="right")))

    # In the background

    def next_batch(self) -> Entries | None:
        """Returns the ready entries that a scrub compares next, by number; None at the end of a
        pass; the next call begins another pass. Looks at no more than SCANNED_ENTRIES entries, so a
        batch may be empty.

        Numbers that come into use during a pass belong to the next pass: otherwise a pass would
        follow the stores, a few blocks at a time, and never end."""
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
        """Returns how long the scrub has been reading the present batch; 0 between batches."""
        return now_s - self._reading_since_s if self._reading_since_s else 0.0

    async def scrub(self, bytes_per_s: float, tell: Callable[[], None]) -> None:
        """Compares all blocks again and again, `bytes_per_s` of slots per second. Calls `tell`
        after each batch, because blocks may have been condemned. Runs until it is cancelled."""
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
