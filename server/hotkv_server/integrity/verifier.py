"""Compares blocks with their checksums: after a restart as many as time allows at the start, the
others at their first use; and in the *scrub*, in the background, all again and again.

Always true while checksums are on: a block of an earlier server is compared before it is loaded,
and before clients learn its place. Each load of a condemned block fails, even under an older
lease. Blocks may be evicted while they are read, so a mismatch counts only at the same reuse
count.
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
SCANNED_ENTRIES = 1 << 17
"""In one turn of the event loop: a millisecond."""
MIN_PAUSE_S = 0.05
PASS_PAUSE_S = 5.0
"""Between two passes, or a small cache would be read every second."""


@dataclass(frozen=True, slots=True)
class Case:
    """`reuses`: reuse counts when the case was made."""

    evidence: Evidence
    reuses: Entries


class Verifier:
    """Only `judge` may be called on any thread, the rest only on the event loop's. `passes`: of
    the scrub."""

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
        records = self._core.space.index.table.records
        return [
            Case(found, records[found.entries, table.W_REUSES].copy())
            for found in evidence(self._core, entries)
        ]

    def unverified(self, slots: Sequence[SlotRun]) -> list[Case]:
        """What `judge` must compare before a load copies; usually nothing."""
        index = self._core.space.index
        waiting = [run.entries[index.unverified[run.entries]] for run in slots]
        return [
            case for entries in waiting if len(entries) for case in self.cases(np.unique(entries))
        ]

    def is_doubtful(self, slots: Sequence[SlotRun]) -> bool:
        """True if a block was condemned since it was compared for this load, which must fail."""
        return any(self._core.space.index.unverified[run.entries].any() for run in slots)

    def judge(self, cases: Sequence[Case]) -> list[NDArray[np.bool_]]:
        """Masks of the entries that match. Blocks, without the GIL."""
        return [holds(self._arena, case.evidence) for case in cases]

    def settle(self, cases: Sequence[Case], verdicts: Sequence[NDArray[np.bool_]]) -> Entries:
        """Verifies or condemns. Returns what does not match, each once, also what another
        comparison has condemned meanwhile."""
        records, index = self._core.space.index.table.records, self._core.space.index
        disagreeing = [np.empty(0, np.uint32)]
        for case, good in zip(cases, verdicts, strict=True):
            entries = case.evidence.entries
            # Skip numbers that another block has now; a detached entry can still be loaded.
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
        """`settle` for pinned entries that are unverified."""
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
        """Verifies blocks of an earlier server, in random order. Blocks for at most `budget_s`."""
        deadline_s = time.monotonic() + budget_s
        index = self._core.space.index
        waiting = np.random.default_rng().permutation(
            np.flatnonzero(index.unverified).astype(np.uint32)
        )
        at = 0
        while at < len(waiting) and time.monotonic() < deadline_s:
            batch = waiting[at : at + self._batch_length(waiting[at:])]
            at += len(batch)
            # A condemned block's sketch was dropped with it.
            cases = self.cases(batch[index.unverified[batch]])
            self.settle(cases, self.judge(cases))

    def _batch_length(self, entries: Entries) -> int:
        """How many of the first entries have at most BATCH_BYTES."""
        upto = np.cumsum(
            self._core.space.index.slot_bytes(entries[: BATCH_BYTES // table.SLOT_ALIGN])
        )
        return max(1, int(np.searchsorted(upto, BATCH_BYTES, side="right")))

    # In the background

    def next_batch(self) -> Entries | None:
        """For the scrub, perhaps nothing; None at the end of a pass. Numbers first used during a
        pass belong to the next, or stores could prolong it for ever."""
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
        """Of the scrub's present batch; 0 between batches. `now_s`: monotonic."""
        return now_s - self._reading_since_s if self._reading_since_s else 0.0

    async def scrub(self, bytes_per_s: float, tell: Callable[[], None]) -> None:
        """Until cancelled. `tell`: sends notices and events after each batch."""
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
