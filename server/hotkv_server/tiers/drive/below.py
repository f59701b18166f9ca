"""Drives the disk tier: copies blocks from host memory down to the disk, soon after they were
stored, and copies blocks back up to host memory when a lease or a prefetch needs them.

Runs on the event loop; the tier calls `on_done` on its own threads.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hotkv_proto import table
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import DISK_TIER, BoolMask, Entries, HashList, Int64s, Medium
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.node.capability import OnReady, Tracer, nobody
from hotkv_server.node.event_loop import in_slices, slices
from hotkv_server.node.persistence import state_of
from hotkv_server.tiers.book.books import books_of
from hotkv_server.tiers.book.moves import Move
from hotkv_server.tiers.drive.breaker import Breaker
from hotkv_server.tiers.drive.flushes import FlushDriver
from hotkv_server.tiers.drive.reads import TierReads
from hotkv_server.tiers.drive.records import LowerMemory
from hotkv_server.tiers.drive.tasks import TierTasks, agreeing, blocks_of, future, on_loop
from hotkv_server.tiers.protocol import Blocks, Codes, Read, Seals, Tier, Write

if TYPE_CHECKING:
    from hotkv_proto.traces import Span

NOTE_S = 10.0
"""Time between two notes of the bytes written to the disk (`note_written`). If the server is
killed, the next server does not count the writes since the last note."""
PAUSE_S = 0.05
"""Time between two checks for blocks to move down."""
MAX_DOWN_BYTES = 64 << 20
"""Most bytes of blocks that are being moved down at a time. These blocks can't be evicted from host
memory."""


class TierBelow:
    """Copies blocks from host memory down to the disk, and from the disk up to host memory; see the
    module. In its methods, `groups` has a list of block hashes for each KV cache group.

    `tier`: reads and writes the bytes of blocks.
    `lower`: records which blocks are on the disk, and which moves are under way.
    `generations`: knows whether blocks on the disk may be older than a flush (deletion of all
        blocks of a key space).
    `verifier`: compares blocks with their checksums.
    `moving_bytes`: most bytes that may be moved down at a time; more than MAX_DOWN_BYTES has no
        effect.
    `memory`: the disk's records, which a thread writes to files; None if the tier's blocks need not
        outlive the process.
    """

    def __init__(
        self,
        core: CacheCore,
        tier: Tier,
        verifier: Verifier,
        generations: FlushDriver,
        moving_bytes: int,
        memory: LowerMemory | None = None,
    ) -> None:
        lower = books_of(core).lower
        assert lower is not None, "a tier without places"
        self.memory = memory
        self.lower = lower
        self.tier = tier
        self.name = DISK_TIER
        self.breaker = Breaker(tier, *([] if memory is None else [memory.stalled_s]))
        self.reads = TierReads()
        self.tracing: Tracer | None = None
        self._core = core
        self._verifier = verifier
        self._generations = generations
        self._most_bytes = min(MAX_DOWN_BYTES, moving_bytes)
        self._down_bytes = 0
        self._asked_revision = -1
        self._noted: list[int] = []
        self._note_at_s = 0.0
        self._on_ready: OnReady = nobody

    def __repr__(self) -> str:
        return f"TierBelow({self.tier!r}, {self.lower!r})"

    def start(self, tasks: TierTasks, tell: Callable[[], None], on_ready: OnReady = nobody) -> None:
        """Starts the task that moves blocks down to the disk.

        `tasks`: runs the task.
        `tell`: sends the core's notices and events about removed blocks. Called after blocks may
            have been evicted or condemned (dropped, because their bytes did not match their
            checksums).
        `on_ready`: called after blocks were moved down, with their entries in the disk's block
            table, the medium (`Medium.DISK`) and the tier's name.
        """
        self._on_ready = on_ready
        if self.memory is not None:
            name = f"the thread that writes the records of {self.name}"
            tasks.health.watch(name, self.memory.is_alive)
        tasks.spawn(self._move_down(tasks, tell))

    # Down

    async def _move_down(self, tasks: TierTasks, tell: Callable[[], None]) -> None:
        down = self.lower.down
        async for _ in tasks.turns(f"the moves to {self.name}", PAUSE_S):
            is_known = self._is_kept()
            if time.monotonic() >= self._note_at_s:
                self.note_written()
            if not len(down.waiting) or not is_known or not self.breaker.lets_pass:
                continue
            taking = down.take(self._most_bytes - self._down_bytes, time.monotonic())
            entries = await in_slices(taking, tell)
            if not len(entries):
                # There is nothing to write. Don't call `take_turn`: if the disk is broken, that
                # would use up the next trial call (which shows whether the disk works again) for
                # nothing. Another caller can make it.
                continue
            if not self._is_kept() or not self.breaker.take_turn():
                # Put the blocks back into the queue. Either the disk has broken, or a key space was
                # added or flushed while `in_slices` ran, and the files for the next server do not
                # say so yet. Without them that server could not read the key space's blocks, which
                # may be among `entries`.
                down.put_back(entries, time.monotonic())
                continue
            for move in await self._begin(entries, tell):
                tasks.spawn(self._write(move, tell))

    def _is_kept(self) -> bool:
        """Returns True if the files for the next server are up to date: they have all key spaces
        (each is a model in a configuration) of this node, and each key space's present seal
        number (`Record.local`, part of the checksums of its blocks). Only then are blocks moved
        to the disk: without these files the next server could not read them."""
        return self._keep_key_spaces() and self._generations.are_seals_saved

    def _keep_key_spaces(self) -> bool:
        """Returns True if the file of the disk's key spaces has all key spaces of this node. If the
        file lacks a key space, makes the thread that writes the disk's records (`LowerMemory`)
        replace the file."""
        memory, revision = self.memory, self._core.catalog.revision
        if memory is None:
            return True
        if self._asked_revision != revision:
            memory.keep(revision, state_of(self._core, memory.slab_bytes))
            self._asked_revision = revision
        return memory.kept_revision == revision

    def note_written(self) -> None:
        """Makes the thread that writes the disk's records (`LowerMemory`) save how many bytes were
        admitted for writing to the disk, and when, in the last 24 hours. So the next server counts
        these bytes in its budget of disk writes."""
        now_s, wall_s = time.monotonic(), time.time()
        found = self.lower.down.gate.written(now_s)
        sizes = [size for _, size in found]
        if self.memory is not None and sizes != self._noted:
            self.memory.keep_written([(wall_s - age_s, size) for age_s, size in found])
            self._noted = sizes
        self._note_at_s = now_s + NOTE_S

    async def _begin(
        self, entries: Entries, tell: Callable[[], None], *, is_plain: bool = False
    ) -> list[Move]:
        """Makes room on the disk, then begins to move blocks down. Skips entries that were evicted
        or reused while room was made. Returns the moves.

        `tell`: sends the core's notices and events about removed blocks (see `start`).
        `is_plain`: True stores the blocks without encoding.
        """
        index, down = self._core.space.index, self.lower.down
        reuses = index.table.records[entries, table.W_REUSES]
        async for _ in slices(down.make_room(entries, is_plain=is_plain)):
            tell()
        same = index.table.records[entries, table.W_REUSES] == reuses
        return down.begin(entries[same & index.is_ready(entries)], is_plain=is_plain)

    async def _write(self, move: Move, tell: Callable[[], None]) -> None:
        """Writes the blocks of a move to the disk. If a block's bytes do not match its checksum
        (checksum), the block does not become ready on the disk. If its encoded form is too large,
        writes the block again, without encoding. `tell`: sends the core's notices and events about
        removed blocks (see `start`)."""
        blocks = self.blocks(move)
        self._down_bytes += blocks.total_bytes
        ended: asyncio.Future[tuple[Codes, Seals]] = future()
        try:
            good = await agreeing(self._core, self._verifier, move.entries, tell)
        except Exception:
            self._down_bytes -= blocks.total_bytes
            is_stored, seals = np.zeros(len(move), np.bool_), np.zeros(len(move), np.uint64)
            self.lower.down.end(move, is_stored, seals, time.monotonic())
            raise
        spans: list[Span] = []
        if self.tracing is not None:
            hashes = self._core.space.index.keys(move.entries)[2]
            spans = self.tracing.begin_writes(hashes, self.name)
        self.tier.write(blocks, on_loop(ended))
        codes, seals = await ended
        for span in spans:
            span.end()
        self._down_bytes -= blocks.total_bytes
        is_stored = np.isin(codes, (Write.STORED, Write.PRESENT)) & good
        going = move.places[is_stored & ~move.is_void]
        is_unfit = (codes == Write.UNFIT) & good
        again = self.lower.down.end(move, is_stored, seals, time.monotonic(), is_unfit)
        if self.memory is not None:
            self.memory.changed(going)
        self._on_ready(going, Medium.DISK, DISK_TIER)
        moves = await self._begin(again, tell, is_plain=True) if len(again) else []
        for plain in moves:
            await self._write(plain, tell)

    # Up

    async def look(self, key_space_id: int, groups: list[HashList], until_s: float) -> None:
        """Waits until the shared stores have confirmed the key space's generations (numbers that
        each flush raises), so that blocks may be loaded from the disk. Waits at most until
        `until_s`, a time of time.monotonic. Does not access the disk, because `lower` records which
        blocks the disk has."""
        if self.has_some(key_space_id, groups):
            await self._generations.confirm_all(key_space_id, until_s)

    def has_some(self, key_space_id: int, groups: list[HashList]) -> bool:
        """Returns True if a block of these lists of hashes is on the disk and not in host
        memory."""
        return any(map(len, self.lower.up.wanted(key_space_id, groups)))

    def wanted(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """Returns, for each list of block hashes in `groups`, the positions of the blocks that are
        on the disk and not in host memory. Returns no positions unless all shared stores have
        confirmed, a short time ago, that the key space was not flushed. The reason: a flush on
        another node must also delete the blocks on this disk."""
        if not self._generations.are_all_confirmed(key_space_id):
            return [np.empty(0, np.int64) for _ in groups]
        return self.lower.up.wanted(key_space_id, groups)

    def lies_here(self, key_space_id: int, groups: list[HashList]) -> list[BoolMask]:
        """Returns, for each list of block hashes in `groups`, a mask: True for each block that is
        ready on the disk. All False unless all shared stores have confirmed, a short time ago, that
        the key space was not flushed. The reason: a flush on another node must also delete the
        blocks on this disk."""
        may = self._generations.are_all_confirmed(key_space_id)
        return [(self.lower.up.find(key_space_id, one) != 0) & may for one in groups]

    def begin_up(self, key_space_id: int, groups: list[HashList], now_s: float) -> Move | None:
        """Begins to load blocks from the disk: reserves slots in host memory, for as many blocks as
        there is room for. Returns None if no block gets a slot (place in the arena), or if the
        shared stores must first confirm again that the key space was not flushed (see `wanted`)."""
        may = self._generations.are_all_confirmed(key_space_id)
        return self.lower.up.begin(key_space_id, groups, now_s) if may else None

    def blocks(self, move: Move) -> Blocks:
        """Describes the blocks of a move. The result is the argument of `Tier.read` or
        `Tier.write`."""
        below = self.lower.space.index
        prefix = self._generations.disk_prefix(move.key_space_id)
        blocks = blocks_of(self._core, move.entries, prefix)
        return replace(
            blocks,
            places=below.offsets(move.places),
            seals=below.checks(move.places),
            stored_bytes=below.slot_bytes(move.places),
        )

    def end_promotion(self, move: Move, codes: Codes, checks: Seals, now_s: float) -> int:
        """Ends a move of n blocks up to host memory, after the tier has read the blocks. Returns
        the number of blocks that the disk has lost: they were damaged or absent.

        `codes`: the result of each block's read, a value of `Read`, uint8 [n].
        `checks`: the checksums of the blocks, uint64 [n]; zeros if the server
            computes no checksums.
        """
        is_lost = np.isin(codes, (Read.CORRUPT, Read.ABSENT))
        self.lower.up.end(move, codes == Read.FOUND, is_lost, checks, now_s)
        return int(is_lost.sum())
