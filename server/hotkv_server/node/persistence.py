"""`Persistence` writes the node's state for the next server: its key spaces (each is a model in
a configuration), and the blocks' times of last use. `take_over` restores the blocks and the state
of an earlier server."""

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
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.memory.clerk import Clerk
from hotkv_server.memory.state import KnownKeySpace, ServerState

log = logging.getLogger(__name__)


# Writing: the node saves its key spaces, and the time of last use of each block.
#
# Always true: a key space is written to the state file beside the arena before its first block is
# stored in host memory. The next server can't use the blocks without this record. One write runs at
# a time. A write that has begun runs to its end even if its caller is cancelled. If a write fails,
# the failure is logged and the server continues: at a restart, the blocks of a key space that was
# not written are lost, unless a later write has succeeded. Tiers below host memory record their
# blocks themselves.


CLOSE_S = 5.0
USE_PARTS = 240
"""The times of last use are collected in this many parts, one part at each turn of the timer, and
are written after the last part."""
PART_ENTRIES = 1 << 14
"""Least number of entries (records of the block table) in a part. Collecting the times of so many
entries takes a tenth of a millisecond."""


def state_of(core: CacheCore, slab_bytes: int) -> ServerState:
    """Returns the content of the state file: the size of a slab (a piece of the arena) and the key
    spaces (each is a model in a configuration), which the next server needs to interpret the
    blocks."""
    known = (
        KnownKeySpace(number, record.key_space, record.sketches)
        for number, record in sorted(core.key_spaces.items())
    )
    return ServerState(slab_bytes, tuple(known))


class UseNotes:
    """Collects the times at which blocks were last used. Collects them in parts, so that no turn of
    the event loop takes long."""

    def __init__(self, core: CacheCore) -> None:
        self._core = core
        self._turn = 0
        self._used_s = np.empty(0, np.float64)

    def take(self, num_parts: int) -> NDArray[np.float64] | None:
        """Collects the times of the next part of the block table's entries. All entries are divided
        into `num_parts` parts. The call for the last part returns the times of all entries; the
        other calls return None.

        The result is float64 by entry number, in seconds of the monotonic clock; nan for entries
        that are not ready blocks.
        """
        index = self._core.space.index
        if not self._turn:
            # The array is not filled in advance, because it can have hundreds of megabytes.
            self._used_s = np.empty(index.num_numbers, np.float64)
        length = max(-(-len(self._used_s) // num_parts), PART_ENTRIES)
        first, end = (
            min(self._turn * length, len(self._used_s)),
            min((self._turn + 1) * length, len(self._used_s)),
        )
        if first < end:
            self._used_s[first:end] = np.nan
            entries = index.ready_blocks(0, first, end)
            self._used_s[entries] = self._core.space.policy.last_used_s(entries)
        self._turn = (self._turn + 1) % num_parts
        return None if self._turn else self._used_s


class Persistence:
    """Writes the key spaces (each is a model in a configuration) and the blocks' times of last
    use to files, for the next server. Its methods run on the event loop, except `save_use`; a
    `Clerk` thread writes the files."""

    def __init__(self, core: CacheCore, memory: NodeMemory, clerk: Clerk) -> None:
        self._core = core
        self._memory = memory
        self._clerk = clerk
        self._notes = UseNotes(core)
        # The value of `Catalog.revision` (a number that each change of the key spaces increases)
        # when the key spaces were last written to the file.
        self._saved = core.catalog.revision
        self._saving = asyncio.Lock()
        self._saves: set[asyncio.Task[None]] = set()
        self._noting: Future[None] | None = None

    def __repr__(self) -> str:
        return f"Persistence(revision {self._saved} of {self._core.catalog.revision})"

    def start(self) -> None:
        """Records that the state file has all key spaces of this server, because `take_over` has
        just written them."""
        self._saved = self._core.catalog.revision

    async def close(self) -> None:
        """Waits, at most CLOSE_S, until running writes of the key spaces have ended."""
        if self._saves:
            await asyncio.wait(self._saves, timeout=CLOSE_S)

    async def save_state(self) -> None:
        """Writes the key spaces (each is a model in a configuration) to the state file if they
        have changed since the last write. Waits for the write."""
        if self._saved != self._core.catalog.revision:
            await asyncio.shield(self._begin_save())

    def _begin_save(self) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._write_state())
        self._saves.add(task)
        task.add_done_callback(self._saves.discard)
        return task

    async def _write_state(self) -> None:
        async with self._saving:
            revision = self._core.catalog.revision
            if self._saved == revision:
                return
            state = state_of(self._core, self._memory.slab_bytes)
            try:
                await asyncio.wrap_future(self._clerk.do(lambda: self._memory.save_state(state)))
                self._saved = revision
            except OSError as error:
                log.warning(
                    "state not saved, a restart before it is will lose what is new: %s", error
                )

    def turn(self) -> None:
        """Called at each turn of the timer: collects a part of the times of last use. After the
        last part, begins to write all these times, and the key spaces if they have changed since
        the last write. Never waits for a file."""
        if self._noting is not None and not self._noting.done():
            return
        if (used_s := self._notes.take(USE_PARTS)) is not None:
            self._noting = self._clerk.do(lambda: self._write_use(used_s))
            if self._saved != self._core.catalog.revision and not self._saves:
                self._begin_save()

    def save_use(self) -> None:
        """Collects the times of last use of all blocks and writes them to their file. Blocks the
        calling thread: do not call it on the event loop."""
        used_s = UseNotes(self._core).take(1)
        assert used_s is not None
        self._write_use(used_s)

    def _write_use(self, used_s: NDArray[np.float64]) -> None:
        try:
            self._memory.save_use(used_s)
        except OSError as error:
            log.warning("times of last use not saved: %s", error)


# Recovery: restores the key spaces of an earlier server, then its blocks, then compares some of
# their bytes with the checksums.


def take_over(
    core: CacheCore, memory: NodeMemory, verifier: Verifier, check_s: float | None
) -> None:
    """Fills an empty core (the cache's records) with the blocks that an earlier server left in
    `memory`, if any. Writes the new block table and the state file. Blocks the calling thread.
    Raises OSError if the files can't be written.

    verifier: compares blocks with their checksums.
    check_s: how long to compare restored blocks with their checksums, at most, in seconds. The
        other restored blocks are compared before their first load. None: restored blocks are never
        compared; all count as verified.
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
        memory.adopt(state_of(core, memory.slab_bytes))
        if check_s is not None:
            verifier.verify_for(check_s)
        else:
            core.space.index.unverified[:] = False
        core.take_effects()
        num_later = int(core.space.index.unverified.sum())
        _log(restored, verifier, num_later, time.monotonic() - began_s)
    else:
        memory.save_state(state_of(core, memory.slab_bytes))


def _prefault_claimed(pool: SlabPool, memory: NodeMemory) -> None:
    """Prefaults the slabs (pieces of the arena) that hold restored blocks and lie behind the
    prefaulted part of the arena. Such a slab may have free slots, into which engines may store
    blocks at once. Raises OSError.

    There are such slabs only if the old server ran with `arena.prefault` off.
    """
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
