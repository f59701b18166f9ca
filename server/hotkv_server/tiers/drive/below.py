"""Drives the disk tier: demotes blocks soon after they were stored, promotes them for a lease or
a prefetch."""

import asyncio
import time
from collections.abc import Callable
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
from hotkv_server.tiers.protocol import Codes, PlacedBlocks, Read, Seals, Tier, Write

if TYPE_CHECKING:
    from hotkv_proto.traces import Span

NOTE_S = 10.0
"""Between two calls of `note_written`. A kill loses the count of later writes."""
PAUSE_S = 0.05
"""Between two checks for blocks to demote."""
MAX_DOWN_BYTES = 64 << 20
"""Most bytes in moves down at a time, which can't be evicted."""


class TierBelow:
    """See the module.

    `moving_bytes`: most bytes in moves down at a time, below MAX_DOWN_BYTES.
    `memory`: None if the blocks need not outlive the process.
    """

    def __init__(
        self,
        core: CacheCore,
        tier: Tier[PlacedBlocks],
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
        """`tell`: see `Tiers.start`. `on_ready`: called after moves down, with the entries in
        the disk's block table."""
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
                # Nothing to write: `take_turn` would waste the next trial call of a broken disk.
                continue
            if not self._is_kept() or not self.breaker.take_turn():
                # The disk has broken, or a key space was added or flushed during `in_slices` and
                # is not in the files yet: the next server could not read its blocks.
                down.put_back(entries, time.monotonic())
                continue
            for move in await self._begin(entries, tell):
                tasks.spawn(self._write(move, tell))

    def _is_kept(self) -> bool:
        """The files have all key spaces and seal numbers, without which the next server could
        not read the blocks."""
        return self._keep_key_spaces() and self._generations.are_seals_saved

    def _keep_key_spaces(self) -> bool:
        memory, revision = self.memory, self._core.catalog.revision
        if memory is None:
            return True
        if self._asked_revision != revision:
            memory.keep(revision, state_of(self._core.catalog, memory.slab_bytes))
            self._asked_revision = revision
        return memory.kept_revision == revision

    def note_written(self) -> None:
        """Saves the admitted writes of the last 24 hours for the next server's budget."""
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
        """Makes room and begins the moves, without entries evicted or reused meanwhile."""
        index, down = self._core.space.index, self.lower.down
        reuses = index.table.records[entries, table.W_REUSES]
        async for _ in slices(down.make_room(entries, is_plain=is_plain)):
            tell()
        same = index.table.records[entries, table.W_REUSES] == reuses
        return down.begin(entries[same & index.is_ready(entries)], is_plain=is_plain)

    async def _write(self, move: Move, tell: Callable[[], None]) -> None:
        """A block with a wrong checksum does not become ready on the disk. One whose encoded
        form is too large is written again, plain."""
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
        """Waits for confirmations until `until_s`, without access to the disk."""
        if self.must_promote(key_space_id, groups):
            await self._generations.confirm_all(key_space_id, until_s)

    def must_promote(self, key_space_id: int, groups: list[HashList]) -> bool:
        return any(map(len, self.lower.up.wanted(key_space_id, groups)))

    def wanted(self, key_space_id: int, groups: list[HashList]) -> list[Int64s]:
        """For each list, positions of the blocks to load. None unless all stores have confirmed:
        another node's flush must delete the blocks on this disk too."""
        if not self._generations.are_all_confirmed(key_space_id):
            return [np.empty(0, np.int64) for _ in groups]
        return self.lower.up.wanted(key_space_id, groups)

    def lies_here(self, key_space_id: int, groups: list[HashList]) -> list[BoolMask]:
        """Masks of the blocks ready on the disk; all False unless all stores have confirmed."""
        may = self._generations.are_all_confirmed(key_space_id)
        return [(self.lower.up.find(key_space_id, one) != 0) & may for one in groups]

    def begin_up(self, key_space_id: int, groups: list[HashList], now_s: float) -> Move | None:
        """None if no block gets a slot, or a store must confirm again."""
        may = self._generations.are_all_confirmed(key_space_id)
        return self.lower.up.begin(key_space_id, groups, now_s) if may else None

    def blocks(self, move: Move) -> PlacedBlocks:
        below = self.lower.space.index
        prefix = self._generations.disk_prefix(move.key_space_id)
        one = blocks_of(self._core, move.entries, prefix)
        return PlacedBlocks(
            one.keys,
            one.slots,
            one.num_bytes,
            below.offsets(move.places),
            below.slot_bytes(move.places),
            below.checks(move.places),
        )

    def end_promotion(self, move: Move, codes: Codes, checks: Seals, now_s: float) -> int:
        """Ends a move that the tier has read; returns the number of damaged or absent blocks.
        `checks`: from `tasks.checksums`.
        """
        is_lost = np.isin(codes, (Read.CORRUPT, Read.ABSENT))
        self.lower.up.end(move, codes == Read.FOUND, is_lost, checks, now_s)
        return int(is_lost.sum())
