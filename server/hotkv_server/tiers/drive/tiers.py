"""All tiers of a node as one object: promotes blocks that a lease asks for, starts and closes the
tiers.

Always true: a lease waits for tiers at most `lookup_wait_s`; hits in host memory don't wait. A
slot belongs to the tier from the beginning of a move until the tier reports that it has stopped
using it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotkv_server.cache.arrays import rows
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import BoolMask, HashList, Medium, Run
from hotkv_server.dataplane.plan import Region
from hotkv_server.node.capability import LocalFlush, OnReady, Tracer, nobody
from hotkv_server.node.event_loop import Breaks, slices
from hotkv_server.node.health import Health
from hotkv_server.node.live_session import LiveSession
from hotkv_server.tiers.book.books import books_of
from hotkv_server.tiers.book.moves import Move
from hotkv_server.tiers.drive.below import TierBelow
from hotkv_server.tiers.drive.flushes import FlushDriver
from hotkv_server.tiers.drive.lookups import TierLookups, TierSource, WaitingCalls
from hotkv_server.tiers.drive.shared import TierShared
from hotkv_server.tiers.drive.tasks import (
    TierTasks,
    aside,
    checksums,
    elsewhere,
    future,
    on_loop,
)
from hotkv_server.tiers.protocol import Blocks, Codes, Read, Tier

log = logging.getLogger(__name__)

MOVING_SHARE = 0.125
"""Largest share of the arena for moves down to one tier, and for loads from all tiers until
their blocks are leased. Abandoned loads of a hung tier don't count there; once they use this
share, no more loads from that tier begin."""
MOVE_BLOCKS = 1 << 12
"""Blocks of one move up. Beginning or ending so many takes milliseconds of the event loop."""
PREFETCH_BYTES = 256 << 20
"""Most bytes that a prefetch loads at a time, and only while less than half of the limit is
used, so that leases find room beside it."""
PREFETCH_PAUSE_S = 0.05
"""Between two tries of a prefetch to find room."""
CLOSE_TIERS_S = 10.0
"""Longest wait for the tiers to close; some wait for their calls under way."""
RECORDS_WAIT_S = 1.0
"""Longest wait of a flush for the file of the disk's records."""
SAY_S = 0.2
"""Between two checks whether a tier hangs or works again."""
UP_TIMEOUT_S = 30.0
"""A read that has not begun after this time may be skipped, which frees its slots."""


@dataclass(slots=True, eq=False)
class Coming:
    """A move up that is under way, or whose blocks callers have not yet leased.

    `num_bytes`: counts in the limit: bytes of its slots, once ended of the found blocks; 0 if
        abandoned.
    `num_waiting`: callers that wait, or have not yet leased.
    """

    source: TierSource
    move: Move
    done: "asyncio.Future[None]"
    num_bytes: int = 0
    num_waiting: int = 0


@dataclass(slots=True)
class Held:
    """Moves up that a caller waited for, whose blocks stay pinned until `Tiers.unpin`."""

    waits: list[Coming] = field(default_factory=list)

    def add(self, coming: Coming) -> None:
        if coming not in self.waits:
            coming.num_waiting += 1
            self.waits.append(coming)


class Tiers:
    """See the module.

    `below`: the disk, which lookups ask first; None without one.
    `shared`: in the order in which lookups ask them.
    """

    def __init__(
        self,
        core: CacheCore,
        arena: Region,
        lookup_wait_s: float,
        generations: FlushDriver,
        below: TierBelow | None = None,
        shared: Sequence[TierShared] = (),
    ) -> None:
        self.generations = generations
        self.below = below
        self.shared = tuple(shared)
        for one in self.shared:
            one.below = None if below is None else below.breaker
        self._sources: list[TierSource] = [] if below is None else [below]
        self._sources.extend(shared)
        self._core = core
        self._arrivals = books_of(core).arrivals
        self._arena = arena
        self._lookup_wait_s = lookup_wait_s
        self._coming: dict[int, Coming] = {}
        self._waiting = WaitingCalls()
        self._up_bytes = 0
        self._most_bytes = moving_bytes(core)
        self._tasks = TierTasks()
        self.lookups = TierLookups(
            core,
            self._sources,
            self.shared,
            generations,
            self._waiting,
            self._tasks,
            lookup_wait_s,
            self._are_moves_well,
        )
        self._tell: Callable[[], None] = lambda: None
        self._on_ready: OnReady = nobody
        self._tracing: Tracer | None = None

    def __repr__(self) -> str:
        return f"Tiers({self._sources!r})"

    def start(
        self,
        health: Health,
        tell: Callable[[], None],
        flush: LocalFlush,
        on_ready: OnReady = nobody,
        on_flushed: Callable[[int], None] = lambda key_space_id: None,
    ) -> None:
        """Starts the tasks of all tiers.

        `tell`: sends the core's notices and events, after blocks were evicted or condemned.
        `flush`, `on_flushed`: see `FlushDriver.start`.
        `on_ready`: called when blocks have arrived in a tier or in host memory.
        """
        self._tell, self._on_ready = tell, on_ready
        self._tasks.health = health

        async def flush_here(key_space_id: int, *, elsewhere: bool) -> int:
            num_blocks = await flush(key_space_id, elsewhere=elsewhere)
            if self.below is not None and self.below.memory is not None:
                # Otherwise the next server could restore flushed blocks after a kill. Bounded,
                # because a disk may hang.
                written = asyncio.wrap_future(self.below.memory.written())
                await asyncio.wait([written], timeout=RECORDS_WAIT_S)
            return num_blocks

        self.generations.start(self._tasks, flush_here, on_flushed)
        if self.below is not None:
            self.below.start(self._tasks, tell, on_ready)
        for one in self.shared:
            one.out.on_ready = on_ready
            one.out.start(self._tasks, tell)
        for source in self._sources:
            health.watch(f"the threads of the tier {source.name}", source.tier.is_alive)
        self._tasks.spawn(self._say())

    async def _say(self) -> None:
        async for _ in self._tasks.turns("the look at tiers", SAY_S):
            for source in self._sources:
                source.breaker.say()
            for coming in self._coming.values():
                if coming.source.breaker.hangs and coming.num_bytes and not coming.done.done():
                    self._arrivals.forsake(coming.move)
                    self._count(coming, 0)
                    self._tell()

    def trace(self, tracing: Tracer) -> None:
        self._tracing = tracing
        if self.below is not None:
            self.below.tracing = tracing
        for one in self.shared:
            one.out.tracing = tracing

    async def close(self) -> None:
        """Refuses new moves, closes the tiers, ends the tasks. Waits at most CLOSE_TIERS_S and
        CLOSE_S."""
        self._tasks.is_closing = True
        if self.below is not None:
            self.below.note_written()
        closing = [asyncio.create_task(aside(one.tier.close)) for one in self._sources]
        if closing:
            _, late = await asyncio.wait(closing, timeout=CLOSE_TIERS_S)
            for one in late:
                one.cancel()
        await self._tasks.close()

    @property
    def names(self) -> list[str]:
        """In the order of lookups. `Space.origins` numbers them from 1."""
        return [one.name for one in self._sources]

    def set_write_budget(self, bytes_per_day: int | None) -> None:
        """None for no limit. Nothing happens without a disk."""
        if self.below is not None:
            self.below.lower.down.gate.set_budget(bytes_per_day)

    def fetch_ahead(
        self,
        session: LiveSession,
        groups: list[HashList],
        ready: Sequence[BoolMask],
        elsewhere: Sequence[BoolMask],
    ) -> None:
        """Begins to load a lookup's hit before the engine asks for its lease. Not for clients
        without support of tiers, which lease only blocks in host memory.

        `ready`, `elsewhere`: for each list, the blocks in host memory and in tiers.
        """
        if self._tasks.is_closing or not session.knows_tiers or self._waiting.has_many(session):
            return
        hit = self.lookups.hit(session.record.key_space_id, groups, ready, elsewhere)
        if any(len(one.hashes) for one in hit):
            self._tasks.spawn(self._fetch(session, hit, groups))

    async def _fetch(
        self, session: LiveSession, hit: list[HashList], groups: list[HashList]
    ) -> None:
        with self._waiting.counted(session):
            await self._begin_up(session.record.key_space_id, hit, groups)

    async def prefetch(self, key_space_id: int, groups: list[HashList], until_s: float) -> None:
        """Loads what host memory has room for, part after part, and waits until `until_s`."""
        record = self._core.catalog.record(key_space_id)
        slot_bytes = max((record.shape(one.group_index).slot_bytes for one in groups), default=1)
        part_bytes = min(PREFETCH_BYTES, self._most_bytes // 2)
        for part in _parts(groups, min(MOVE_BLOCKS, max(1, part_bytes // slot_bytes))):
            await self._prefetch_part(key_space_id, part, groups, until_s)
            if time.monotonic() >= until_s:
                return

    async def _prefetch_part(
        self, key_space_id: int, part: list[HashList], groups: list[HashList], until_s: float
    ) -> None:
        """Loads `part` and evicts no block of `groups` for it."""
        most_bytes = self._most_bytes // 2
        await self._begin_up(key_space_id, part, groups, tries=False, most_bytes=most_bytes)
        await self.generations.settle(key_space_id, until_s)
        await self.lookups.look(key_space_id, part, until_s)
        while not (self._tasks.is_closing or self._core.draining):
            is_full = self._up_bytes >= most_bytes
            # Read before the loads begin: loads that wait for memory still to be prefaulted
            # reduce `coming_bytes`, perhaps to 0.
            is_growing = self._core.space.room.coming_bytes > 0
            await self._begin_up(key_space_id, part, groups, most_bytes=most_bytes)
            # Room may be short because the arena is still growing, or because one tier's loads
            # have left none to the next.
            is_short = is_growing or self._up_bytes >= most_bytes
            waits = [one.done for one in self._under_way(key_space_id, part)]
            left_s = until_s - time.monotonic()
            if waits and left_s > 0:
                await asyncio.wait(waits, timeout=left_s)
            may_load_more = is_full or (is_short and self._are_left(key_space_id, part))
            if left_s <= 0 or not may_load_more:
                return
            await asyncio.sleep(PREFETCH_PAUSE_S)

    def _are_left(self, key_space_id: int, groups: list[HashList]) -> bool:
        """Tiers are known to have blocks that host memory lacks."""
        return any(
            len(positions)
            for source in self._sources
            if source.breaker.lets_pass
            for positions in source.wanted(key_space_id, groups)
        )

    # Leases

    def must_promote(self, session: LiveSession, groups: list[HashList]) -> bool:
        """Whether a lease should first `promote`. False if MAX_WAITING calls of the session wait
        already."""
        if self._tasks.is_closing or self._waiting.has_many(session):
            return False
        key_space_id = session.record.key_space_id
        return any(
            one.breaker.lets_pass and one.must_promote(key_space_id, groups)
            for one in self._sources
        ) or bool(self._under_way(key_space_id, groups))

    async def promote(self, session: LiveSession, groups: list[HashList]) -> Held:
        """Loads blocks, for at most `lookup_wait_s`. They stay pinned until `unpin`; if this
        call raises or is cancelled, they are unpinned at once."""
        held, key_space_id = Held(), session.record.key_space_id
        until_s = time.monotonic() + self._lookup_wait_s
        with self._waiting.counted(session):
            try:
                # Known blocks first: other tiers may answer `look` slowly.
                await self._begin_up(key_space_id, groups, held=held, tries=False)
                self._hold(held, key_space_id, groups)
                await self.lookups.look(key_space_id, groups, until_s)
                await self._begin_up(key_space_id, groups, held=held)
                self._hold(held, key_space_id, groups)
                if waits := [one.done for one in held.waits if one.source.breaker.lets_pass]:
                    await asyncio.wait(waits, timeout=max(0.0, until_s - time.monotonic()))
            except BaseException:
                self.unpin(held)
                raise
        return held

    def unpin(self, held: Held) -> None:
        """To be called once the lease is acquired or given up. A move's blocks stay pinned for
        its last caller."""
        for one in held.waits:
            one.num_waiting -= 1
            if not one.num_waiting and one.done.done():
                self._end_promotion(one)

    def _under_way(self, key_space_id: int, groups: list[HashList]) -> list[Coming]:
        """Moves up with a block of these lists, but not from a tier that lookups skip."""
        if not self._coming:
            return []
        coming = [self._coming[n] for n in self._arrivals.numbers(key_space_id, groups)]
        return [one for one in coming if one.source.breaker.lets_pass]

    def _are_moves_well(self) -> bool:
        """No move up is from a tier that lookups skip."""
        coming = (one for one in self._coming.values() if one.num_bytes and not one.done.done())
        return all(source.breaker.lets_pass for source in {one.source for one in coming})

    async def _begin_up(
        self,
        key_space_id: int,
        groups: list[HashList],
        beside: Sequence[HashList] = (),
        *,
        held: Held | None = None,
        tries: bool = True,
        most_bytes: int | None = None,
    ) -> None:
        """Loads blocks that tiers are known to have, as far as there is room. Evicts no block of
        `groups` or `beside`.

        `held`: gets the moves, which keeps their blocks pinned.
        `tries`: also makes a due trial call of a broken tier.
        `most_bytes`: no load begins while loads use so much; None: the limit of MOVING_SHARE.
        """
        most_bytes = self._most_bytes if most_bytes is None else most_bytes
        for source in self._sources:
            if not source.breaker.lets_pass or (not tries and source.breaker.is_open):
                continue
            if self._tasks.is_closing or self._core.draining:
                return
            runs = [
                Run(one.group_index, rows(one.hashes, positions))
                for one, positions in zip(groups, source.wanted(key_space_id, groups), strict=True)
                if len(positions)
            ]
            if not runs or self._up_bytes >= most_bytes:
                continue
            if self._forsaken_bytes(source) >= self._most_bytes:
                continue
            making = self._core.make_room_above(
                key_space_id, runs, [*groups, *beside], time.monotonic()
            )
            async for _ in slices(making):
                self._tell()
            if not source.breaker.take_turn():
                continue
            breaks = Breaks()
            for part in _parts(groups, MOVE_BLOCKS):
                self._begin_move(source, key_space_id, part)
                if held is not None:
                    self._hold(held, key_space_id, part)
                await breaks.between()

    def _hold(self, held: Held, key_space_id: int, groups: list[HashList]) -> None:
        for one in self._under_way(key_space_id, groups):
            held.add(one)

    def _begin_move(self, source: TierSource, key_space_id: int, groups: list[HashList]) -> None:
        if self._tasks.is_closing or self._core.draining:
            return
        move = source.begin_up(key_space_id, groups, time.monotonic())
        if move is not None:
            blocks = source.blocks(move)
            coming = self._coming[move.number] = Coming(source, move, future())
            self._count(coming, blocks.total_bytes)
            source.reads.queued_bytes += blocks.total_bytes
            self._tasks.spawn(self._read(coming, blocks))

    async def _read(self, coming: Coming, blocks: Blocks) -> None:
        source, move = coming.source, coming.move
        ended: asyncio.Future[tuple[Codes]] = future()
        span = None if self._tracing is None else self._tracing.child("tier.read")
        began_s = time.monotonic()
        tier: Tier[Any] = source.tier
        tier.read(blocks, began_s + UP_TIMEOUT_S, on_loop(ended))
        (codes,) = await ended
        num_found_bytes = int(blocks.num_bytes[codes == Read.FOUND].sum())
        source.reads.add(time.monotonic() - began_s, num_found_bytes)
        if span is not None:
            span.attributes = {
                "hotkv.tier": source.name,
                "hotkv.blocks": len(move),
                "hotkv.found_blocks": int((codes == Read.FOUND).sum()),
                "hotkv.bytes": num_found_bytes,
            }
            span.end()
        try:
            checks = await elsewhere(checksums, self._core, self._arena, move)
        except Exception:  # For example, memory is short. End the move all the same.
            log.exception("tier=%s blocks=%d can't be checked", source.name, len(codes))
            codes, checks = np.full_like(codes, Read.FAILED), np.zeros(len(codes), np.uint64)
        source.reads.queued_bytes -= blocks.total_bytes
        num_lost = source.end_promotion(move, codes, checks, time.monotonic())
        self._count(coming, int(self._core.space.index.slot_bytes(move.kept).sum()))
        self._core.space.origins[move.kept] = 1 + self._sources.index(source)
        try:
            self._on_ready(move.kept, Medium.CPU, "")
            if source is self.below:
                for one in self.shared:
                    one.out.offer_old(move.key_space_id, move.kept)
            if num_lost:
                log.error("tier=%s lost blocks=%d", source.tier.facts().name, num_lost)
        finally:
            coming.done.set_result(None)
            if not coming.num_waiting:
                self._end_promotion(coming)

    def _end_promotion(self, coming: Coming) -> None:
        del self._coming[coming.move.number]
        self._count(coming, 0)
        self._arrivals.release(coming.move)

    def _forsaken_bytes(self, source: TierSource) -> int:
        """Bytes of slots that abandoned moves still use. They are not in `_count`, so that the
        other tiers stay usable."""
        index = self._core.space.index
        moves = (one.move for one in self._coming.values() if one.source is source)
        return sum(int(index.slot_bytes(move.forsaken).sum()) for move in moves)

    def _count(self, coming: Coming, num_bytes: int) -> None:
        """Sets what a move counts in the limit for all moves up."""
        self._up_bytes += num_bytes - coming.num_bytes
        coming.num_bytes = num_bytes


def _parts(groups: list[HashList], most_blocks: int) -> Iterator[list[HashList]]:
    """Splits lists into parts for separate moves.

    A part begins with the last block of the part before: the parent of its first new block.
    """
    if sum(len(one.hashes) for one in groups) <= most_blocks:
        yield groups
        return
    for one in groups:
        depths = np.arange(len(one.hashes)) if one.depths is None else one.depths
        for start in range(0, len(one.hashes), most_blocks):
            at = slice(max(0, start - 1), start + most_blocks)
            yield [HashList(one.group_index, one.hashes[at], depths[at])]


def moving_bytes(core: CacheCore) -> int:
    """Most bytes in moves down to one tier, or in all moves up together."""
    return int(MOVING_SHARE * core.config.arena_bytes)
