"""Moves blocks between host memory and the tier below it.

Down in the background, soon after they were stored; up when a lease asks for them, which waits for
a bounded time. Always true: nobody waits for a tier longer than `lookup_wait_s`, and hits in host
memory never do; a slot is the tier's from the beginning of a move until the tier says that it
touches it no more. On the event loop only; the tier answers on threads of its own.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from hotkv.keys import MAX_GROUPS
from hotkv_server.core import incremental
from hotkv_server.core.arrays import rows
from hotkv_server.core.cache import CacheCore
from hotkv_server.core.moves import Move, MoveCounters
from hotkv_server.core.values import BoolMask, HashList, Run
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.check_values import sealed
from hotkv_server.integrity.sums import sums_of
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.runtime.breaker import Breaker
from hotkv_server.runtime.session import LiveSession
from hotkv_server.runtime.slices import slices
from hotkv_server.tiers.protocol import Blocks, Codes, Read, Seals, Tier, Write

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSE_S = 0.05
"""Between two looks for blocks to move down."""
MAX_DOWN_BYTES = 64 << 20
"""Most bytes on their way down: their slots can't be evicted meanwhile."""
MOVING_SHARE = 0.125
"""Largest share of the arena that may be on its way down, and again on its way up."""
MAX_WAITING = 256
"""Leases of one session that wait for the tier at a time; others get what is in host memory."""
CLOSE_S = 2.0
"""Longest wait for what a closed tier has answered to be taken in. A disk that hangs answers no
more; its slots are nobody's then, as the process ends."""
UP_TIMEOUT_S = 30.0
"""A tier need not begin a read any more after this long: the slots are wanted back."""


@dataclass(slots=True)
class Coming:
    """A move up, and who waits for it."""

    move: Move
    num_bytes: int
    done: "asyncio.Future[None]"
    num_waiting: int = 0


@dataclass(slots=True)
class Held:
    """What a caller of `bring_up` holds until its lease is there."""

    waits: list[Coming] = field(default_factory=list)


class Tiers:
    """See the module. `core.lower` says what lies below; `tier` has its bytes."""

    def __init__(
        self,
        core: CacheCore,
        tier: Tier,
        verifier: Verifier,
        arena: Region,
        lookup_wait_s: float,
    ) -> None:
        assert core.lower is not None, "a tier without places"
        self._core = core
        self._lower = core.lower
        self.tier = tier
        self.breaker = Breaker(tier)
        self._verifier = verifier
        self._arena = arena
        self._lookup_wait_s = lookup_wait_s
        self._coming: dict[int, Coming] = {}
        self._waiting: Counter[int] = Counter()
        self._down_bytes = self._up_bytes = 0
        self._moving_bytes = int(MOVING_SHARE * core.config.arena_bytes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._tell: Callable[[], None] = lambda: None
        self._is_closing = False

    def __repr__(self) -> str:
        return f"Tiers({self.tier!r}, {self._lower!r})"

    def start(self, tell: Callable[[], None]) -> None:
        """Starts moving blocks down. `tell` is called when blocks may have been evicted or
        condemned."""
        self._tell = tell
        self._spawn(self._move_down())

    async def close(self) -> None:
        """Begins no move any more and ends those under way. Waits as long as the tier's `close`."""
        self._is_closing = True
        await asyncio.get_running_loop().run_in_executor(None, self.tier.close)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def moved(self) -> MoveCounters:
        """Blocks moved since the start."""
        return self._lower.moves.counters

    @property
    def used_bytes(self) -> int:
        """Bytes of places in use."""
        return self._lower.space.used_bytes()

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all places."""
        return self._lower.space.pool.capacity_bytes

    @property
    def num_waiting(self) -> int:
        """Blocks that wait to be moved down."""
        return len(self._lower.down.waiting)

    # Down

    async def _move_down(self) -> None:
        while True:
            await asyncio.sleep(PAUSE_S)
            if self._is_closing:
                return
            self._lower.space.removal.take_effects()
            if not len(self._lower.down.waiting) or not self.breaker.take_turn():
                continue
            entries = self._lower.down.take(
                min(MAX_DOWN_BYTES, self._moving_bytes) - self._down_bytes, time.monotonic()
            )
            if not len(entries):
                continue
            for move in self._lower.down.begin(entries):
                self._spawn(self._write(move))

    async def _write(self, move: Move) -> None:
        """Writes the blocks of a move. Only what agrees with its check value is written as such."""
        blocks = self._blocks(move)
        self._down_bytes += blocks.total_bytes
        ended: asyncio.Future[tuple[Codes, Seals]] = self._future()
        good = await self._agreeing(move)
        self.tier.write(blocks, _on_loop(ended))
        codes, seals = await ended
        self._down_bytes -= blocks.total_bytes
        is_stored = np.isin(codes, (Write.STORED, Write.PRESENT)) & good
        self._lower.down.end(move, is_stored, seals, time.monotonic())

    async def _agreeing(self, move: Move) -> BoolMask:
        """Which blocks of a move down have the bytes of their check values."""
        if not self._core.config.check_stride:
            return np.ones(len(move), np.bool_)
        cases = self._verifier.cases(move.entries)
        verdicts = await self._elsewhere(self._verifier.judge, cases)
        bad = self._verifier.settle(cases, verdicts)
        self._tell()
        agreeing: BoolMask = ~np.isin(move.entries, bad)
        return agreeing

    # Up

    def has_some(self, session: LiveSession, groups: list[HashList]) -> bool:
        """Whether a block of these lists is not in host memory but below, or on its way up. False
        for a session of which many leases wait already."""
        if self._is_closing or not self.breaker.lets_pass:
            return False
        if self._waiting[session.record.number] >= MAX_WAITING:
            return False
        key_space_id = session.record.key_space_id
        wanted = self._lower.up.wanted(key_space_id, groups)
        return any(map(len, wanted)) or bool(self._lower.up.numbers(key_space_id, groups))

    async def bring_up(self, session: LiveSession, groups: list[HashList]) -> Held:
        """Waits until those of the blocks that lie below are in host memory and pinned, or the time
        is up. `let_go` gives the pins back."""
        number, held = session.record.number, Held()
        self._waiting[number] += 1
        try:
            await self._wait_for(held, session.record.key_space_id, groups)
        finally:
            self._waiting[number] -= 1
            if not self._waiting[number]:
                del self._waiting[number]
        return held

    async def _wait_for(self, held: Held, key_space_id: int, groups: list[HashList]) -> None:
        until_s = time.monotonic() + self._lookup_wait_s
        await self._begin_up(key_space_id, groups)
        for number in self._lower.up.numbers(key_space_id, groups):
            one = self._coming[number]
            one.num_waiting += 1
            held.waits.append(one)
        waits = [one.done for one in held.waits]
        if waits:
            await asyncio.wait(waits, timeout=max(0.0, until_s - time.monotonic()))

    def let_go(self, held: Held) -> None:
        """The caller has leased what it wants, or gives up."""
        for one in held.waits:
            one.num_waiting -= 1
            if not one.num_waiting and one.done.done():
                self._end_up(one)

    def lies_below(self, key_space_id: int, groups: list[HashList]) -> list[BoolMask]:
        """Which blocks are ready below or on their way up, one mask a list."""
        masks = []
        for one in groups:
            if one.group_index >= MAX_GROUPS or not self.breaker.lets_pass:
                masks.append(np.zeros(len(one.hashes), np.bool_))
                continue
            masks.append(
                (self._lower.find(key_space_id, one.group_index, one.hashes) != 0)
                | self._lower.up.is_coming(key_space_id, one.group_index, one.hashes)
            )
        return masks

    async def _begin_up(self, key_space_id: int, groups: list[HashList]) -> None:
        """Begins to read what lies below of these lists, as far as there is room."""
        if self._is_closing or self._core.draining:
            return
        wanted = self._lower.up.wanted(key_space_id, groups)
        runs = [
            Run(one.group_index, rows(one.hashes, positions))
            for one, positions in zip(groups, wanted, strict=True)
            if len(positions)
        ]
        if not runs or self._up_bytes >= self._moving_bytes:
            return
        if not self._core.config.makes_room:
            async for _ in slices(incremental.make_room(self._core, key_space_id, runs)):
                self._tell()
        if not self.breaker.take_turn():
            return
        move = self._lower.up.begin(key_space_id, groups, time.monotonic())
        self._tell()
        if move is None:
            return
        blocks = self._blocks(move)
        coming = Coming(move, blocks.total_bytes, self._future())
        self._coming[move.number] = coming
        self._up_bytes += coming.num_bytes
        self._spawn(self._read(coming, blocks))

    async def _read(self, coming: Coming, blocks: Blocks) -> None:
        move = coming.move
        ended: asyncio.Future[tuple[Codes]] = self._future()
        self.tier.read(blocks, time.monotonic() + UP_TIMEOUT_S, _on_loop(ended))
        (codes,) = await ended
        checks = await self._elsewhere(_checks, self._core, self._arena, move)
        self._up_bytes -= coming.num_bytes
        is_found, is_lost = codes == Read.FOUND, np.isin(codes, (Read.CORRUPT, Read.ABSENT))
        if is_lost.any():
            log.error("tier=%s lost blocks=%d", self.tier.facts().name, int(is_lost.sum()))
        self._lower.up.end(move, is_found, is_lost, checks, time.monotonic())
        coming.done.set_result(None)
        if not coming.num_waiting:
            self._end_up(coming)

    def _end_up(self, coming: Coming) -> None:
        if self._coming.pop(coming.move.number, None) is not None:
            self._lower.up.let_go(coming.move)

    # Both

    def _blocks(self, move: Move) -> Blocks:
        """The rows of a move as the tier takes them."""
        host, below = self._core.space.index, self._lower.space.index
        fingerprint = self._core.key_space(move.key_space_id).fingerprint
        _, groups, hashes = host.keys(move.entries)
        keys = [
            b"hotkv/1/%s/%d/%s" % (fingerprint.hex().encode(), group, words.tobytes())
            for group, words in zip(groups.tolist(), hashes, strict=True)
        ]
        return Blocks(
            keys,
            host.offsets(move.entries),
            host.slot_bytes(move.entries),
            below.offsets(move.places),
            below.checks(move.places),
        )

    def _future(self) -> "asyncio.Future[Any]":
        return asyncio.get_running_loop().create_future()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Nobody waits for it: told at once, not when it is collected.
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a move between tiers broke", "exception": error}
            )

    async def _elsewhere(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(None, call, *arguments)


def _on_loop(ended: "asyncio.Future[Any]") -> Callable[..., None]:
    """Sets the future's result to what a thread passes."""
    loop = ended.get_loop()

    def set_result(answer: object) -> None:
        if not ended.done():
            ended.set_result(answer)

    def call(*answer: object) -> None:
        try:
            loop.call_soon_threadsafe(set_result, answer)
        except RuntimeError:
            # The loop has ended.
            return

    return call


def _checks(core: CacheCore, arena: Region, move: Move) -> Seals:
    """Check values of the slots of a move up. From any thread: its entries and slots are the
    move's alone."""
    index, stride = core.space.index, core.config.check_stride
    checks = np.zeros(len(move), np.uint64)
    if not stride:
        return checks
    _, groups, _ = index.keys(move.entries)
    offsets, keys = index.offsets(move.entries), index.mixed(move.entries)
    record = core.catalog.record(move.key_space_id)
    for group in np.unique(groups).tolist():
        at = np.flatnonzero(groups == group)
        strides = np.full(len(at), stride, np.int64)
        sums = sums_of(arena, offsets[at], record.shape(group).shard_bytes, strides)
        checks[at] = sealed(sums, keys[at], stride)
    return checks
