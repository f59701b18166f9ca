"""What the node leaves the next server: its key spaces, and the blocks' times of last use."""

import asyncio
import logging
import time
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.errors import HotKVError
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.restore import Restored, restore
from hotkv_server.cache.room.slabs import SlabPool
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.sessions import Catalog
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.memory.clerk import Clerk
from hotkv_server.memory.state import KnownKeySpace, ServerState

log = logging.getLogger(__name__)


# Writing. Always true: a key space is in the state file before its first block is in host
# memory; the next server can't use the blocks without it. One write runs at a time, to its end
# even if its caller is cancelled. A failed write is only logged: unless a later one succeeds, a
# restart loses the blocks. Tiers record their blocks themselves.


CLOSE_S = 5.0
USE_PARTS = 240
"""The times of last use are collected in this many turns of the timer, then written."""
PART_ENTRIES = 1 << 14
"""Least entries of a part, which take a tenth of a millisecond."""


def state_of(catalog: Catalog, slab_bytes: int) -> ServerState:
    known = (
        KnownKeySpace(number, record.key_space, record.sketches)
        for number, record in sorted(catalog.records.items())
    )
    return ServerState(slab_bytes, tuple(known))


class UseNotes:
    def __init__(self, space: Space) -> None:
        self._space = space
        self._turn = 0
        self._used_s = np.empty(0, np.float64)

    def take(self, num_parts: int) -> NDArray[np.float64] | None:
        """Collects the next of `num_parts` parts; the last call returns all times, the others None.

        float64 by entry number, monotonic seconds; nan for entries that are not ready blocks.
        """
        index = self._space.index
        if not self._turn:
            # Not filled in advance: it can have hundreds of megabytes.
            self._used_s = np.empty(index.num_numbers, np.float64)
        length = max(-(-len(self._used_s) // num_parts), PART_ENTRIES)
        first, end = (
            min(self._turn * length, len(self._used_s)),
            min((self._turn + 1) * length, len(self._used_s)),
        )
        if first < end:
            self._used_s[first:end] = np.nan
            entries = index.ready_blocks(0, first, end)
            self._used_s[entries] = self._space.policy.last_used_s(entries)
        self._turn = (self._turn + 1) % num_parts
        return None if self._turn else self._used_s


class Persistence:
    """On the event loop, except `save_use`; a `Clerk` thread writes the files."""

    def __init__(self, catalog: Catalog, space: Space, memory: NodeMemory, clerk: Clerk) -> None:
        self._catalog = catalog
        self._space = space
        self._memory = memory
        self._clerk = clerk
        self._notes = UseNotes(space)
        # `Catalog.revision` when the key spaces were last written.
        self._saved = catalog.revision
        self._saving = asyncio.Lock()
        self._saves: set[asyncio.Task[None]] = set()
        self._noting: Future[None] | None = None

    def __repr__(self) -> str:
        return f"Persistence(revision {self._saved} of {self._catalog.revision})"

    def start(self) -> None:
        self._saved = self._catalog.revision

    async def close(self) -> None:
        """Waits at most CLOSE_S for running writes of the key spaces."""
        if self._saves:
            await asyncio.wait(self._saves, timeout=CLOSE_S)

    async def save_state(self) -> None:
        """Writes the key spaces if they have changed, and waits for that."""
        if self._saved != self._catalog.revision:
            await asyncio.shield(self._begin_save())

    def _begin_save(self) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._write_state())
        self._saves.add(task)
        task.add_done_callback(self._saves.discard)
        return task

    async def _write_state(self) -> None:
        async with self._saving:
            revision = self._catalog.revision
            if self._saved == revision:
                return
            state = state_of(self._catalog, self._memory.slab_bytes)
            try:
                await asyncio.wrap_future(self._clerk.do(lambda: self._memory.save_state(state)))
                self._saved = revision
            except OSError as error:
                log.warning(
                    "state not saved, a restart before it is will lose what is new: %s", error
                )

    def turn(self) -> None:
        """Called at each turn of the timer; never waits for a file. After the last part, begins
        to write the times of last use, and changed key spaces."""
        if self._noting is not None and not self._noting.done():
            return
        if (used_s := self._notes.take(USE_PARTS)) is not None:
            self._noting = self._clerk.do(lambda: self._write_use(used_s))
            if self._saved != self._catalog.revision and not self._saves:
                self._begin_save()

    def save_use(self) -> None:
        """Blocks."""
        used_s = UseNotes(self._space).take(1)
        assert used_s is not None
        self._write_use(used_s)

    def _write_use(self, used_s: NDArray[np.float64]) -> None:
        try:
            self._memory.save_use(used_s)
        except OSError as error:
            log.warning("times of last use not saved: %s", error)


# Recovery: key spaces first, then blocks, then a check of some of their bytes.


def take_over(
    core: CacheCore, memory: NodeMemory, verifier: Verifier, check_s: float | None
) -> None:
    """Restores what an earlier server left, if anything, and writes the new block table and state
    file. Blocks. Raises OSError.

    check_s: most time for checksums; other blocks are compared before their first load. None:
        all count as verified.
    """
    core.space.grow(memory.filling.filled_bytes, memory.filling.coming_bytes)
    core.space.index.back(memory.records.num_entries)
    if memory.why_empty:
        log.warning("starting empty reason=%r", memory.why_empty)
    left = memory.leftover
    if left is not None:
        began_s = time.monotonic()
        numbers: dict[int, int] = {}
        for known in left.state.key_spaces:
            try:
                numbers[known.number], _ = core.catalog.register(
                    known.key_space, known.sketches, began_s, known.number
                )
            except HotKVError as error:
                log.warning(
                    "key space dropped number=%d model=%r reason=%r",
                    known.number,
                    known.key_space.model,
                    error.message,
                )
        states = left.table.records[:, table.W_GROUP_STATE] >> np.uint32(16)
        num_back = int(np.isin(states, (table.STATE_READY, table.STATE_DETACHED)).sum())
        memory.records.back(num_back)
        core.space.index.back(memory.records.num_entries)
        restored = restore(core, left.table.records, numbers, left.last_used_s, began_s, left.marks)
        _prefault_claimed(core.space.pool, memory)
        memory.adopt(state_of(core.catalog, memory.slab_bytes))
        if check_s is not None:
            verifier.verify_for(check_s)
        else:
            core.space.index.unverified[:] = False
        core.take_effects()
        num_later = int(core.space.index.unverified.sum())
        _log(restored, verifier, num_later, time.monotonic() - began_s)
    else:
        memory.save_state(state_of(core.catalog, memory.slab_bytes))


def _prefault_claimed(pool: SlabPool, memory: NodeMemory) -> None:
    """Engines may store at once into free slots of slabs with restored blocks. If the old server
    ran with `arena.prefault` off, some lie behind the prefaulted part. Raises OSError."""
    first = memory.filling.filled_bytes // pool.slab_bytes
    slabs = first + np.flatnonzero(pool.slab_owner()[first:] >= 0)
    for run in np.split(slabs, np.flatnonzero(np.diff(slabs) > 1) + 1) if len(slabs) else ():
        memory.filling.bring_in(int(run[0]) * pool.slab_bytes, len(run) * pool.slab_bytes)


def _log(restored: Restored, verifier: Verifier, num_later: int, took_s: float) -> None:
    if restored.lost_readers:
        log.warning("blocks of residencies could not be kept: their engines have been told")
    dropped = (f"{why.replace(' ', '_')}:{count}" for why, count in restored.dropped.items())
    log.info(
        "restored blocks=%d sketches=%d verified=%d condemned=%d unverified=%d kept=%d "
        "dropped=%s took_s=%.2f",
        restored.blocks,
        restored.sketches,
        verifier.verified_blocks,
        verifier.condemned_blocks,
        num_later,
        restored.kept,
        ",".join(dropped) or "0",
        took_s,
    )
