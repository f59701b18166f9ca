"""The node: connects the parts of a cache server on one event loop, runs the timer, and drains.

Every method runs on the event loop, except `save_use`. Other threads copy blocks
(`node.transfers`) and map the memory of engines (`node.sessions`).
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import NO_RETENTION, Flushed, Retention
from hotkv_proto.errors import Reason
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import Entries, Medium, Run
from hotkv_server.dataplane.engines import CopyEngine
from hotkv_server.dataplane.plan import Region
from hotkv_server.device.devices import NO_DEVICES, Devices
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.memory.clerk import Clerk
from hotkv_server.node.arena_size import ArenaSize
from hotkv_server.node.capability import BlocksBelow, Capability, NodeEvents, Offers, Topic
from hotkv_server.node.event_loop import LoopLag, in_slices, slices
from hotkv_server.node.growth import ArenaGrowth
from hotkv_server.node.health import Health
from hotkv_server.node.in_place import InPlace
from hotkv_server.node.live_session import Drain, LiveSession
from hotkv_server.node.names import DisplayNames
from hotkv_server.node.persistence import Persistence
from hotkv_server.node.removals import Effects, Removals
from hotkv_server.node.reports import Reports
from hotkv_server.node.sessions import Sessions
from hotkv_server.node.survey import LiveSurvey
from hotkv_server.node.transfers import Timings, Transfers

log = logging.getLogger(__name__)

TIMER_S = 0.25
ROOM_S = 1.0
"""Between two turns that make room ahead, unless stores take much."""
STALLED_TIMER_S = 5.0
DEFAULT_DRAIN_S = 10.0
"""Equals the default of the setting `drain_timeout_s`."""
STALLED_WORK_S = 60.0
"""One piece of copying, comparing or publishing takes far less, even on a machine that swaps."""


class Node:
    """A cache server without its gRPC services.

    capabilities: to be added before `start`.
    events: to be subscribed before `start`.
    copy_engine: closed by its maker, not by the node.
    tiers: None without tiers below host memory.
    drained: set when a drain has ended, by its last transfer or its time limit.
    topics: of the process around the node, such as its settings.
    refusals: refused calls by reason.
    last_tick_s: of the monotonic clock.
    """

    def __init__(
        self,
        core: CacheCore,
        memory: NodeMemory,
        copy_engine: CopyEngine,
        verifier: Verifier | None = None,
        devices: Devices = NO_DEVICES,
        tiers: BlocksBelow | None = None,
    ) -> None:
        self.core = core
        self.memory = memory
        self.copy_engine = copy_engine
        self.devices = devices
        self.tiers = tiers
        self.capabilities: list[Capability] = []
        self.topics: dict[str, Topic] = {}
        self.events, self.offers = NodeEvents(), Offers()
        self.started_s = self.last_tick_s = time.monotonic()
        self.refusals: Counter[Reason] = Counter()
        self.health = Health()
        self.lag = LoopLag()
        self.timings = Timings()
        self.drained = asyncio.Event()
        self.drain_timeout_s = DEFAULT_DRAIN_S
        self._drain_timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._flushes: set[asyncio.Task[int]] = set()
        arena = Region(memory.arena.address, memory.arena.num_bytes, "the arena")
        self.verifier = verifier or Verifier(core, arena)
        self.survey = LiveSurvey(core)
        self._room_taken = asyncio.Event()
        self.effects = Effects(
            core, self.events, lambda: self.sessions, self.drained, self._room_taken
        )
        self.reports = Reports(core.use, self.events)
        self.clerk = Clerk("files")
        self.names = DisplayNames(memory.directory, self.clerk.do)
        self._persistence = Persistence(core.catalog, core.space, memory, self.clerk)
        self.in_place = InPlace(core, self.verifier, self.effects.run)
        self.growth = ArenaGrowth(core.space, core.catalog)
        self.arena_size = ArenaSize(core, memory, self.effects.run)
        self.transfers = Transfers(
            core,
            self.growth,
            arena,
            copy_engine,
            self.verifier,
            self.events,
            self.health,
            self.effects.run,
            self.timings,
        )
        self.removals = Removals(core, self.events, self.effects.run)
        self.sessions = Sessions(
            core,
            devices,
            self.events,
            self.removals,
            self.names,
            self._persistence.save_state,
            self._confirm_new,
            self.effects.run,
        )

    def __repr__(self) -> str:
        return f"Node({len(self.sessions)} sessions, {self.core!r})"

    def start(self, scrub_bytes_per_s: float = 0.0) -> None:
        """`scrub_bytes_per_s`: 0 starts no scrubber."""
        self.lag.start()
        if self.core.grace.is_on:
            # Engines can reconnect from now on, so the grace for their blocks begins.
            self.core.grace.until_s = time.monotonic() + self.core.config.residency_grace_s
        for one in self.capabilities:
            one.start(self.health)
        for number, record in self.core.key_spaces.items():
            self.events.key_space_added(number, record.key_space, ())
        if self.tiers is not None:
            if self.offers.tracer is not None:
                self.tiers.trace(self.offers.tracer)
            removals = self.removals
            self.tiers.start(
                self.health,
                self.effects.run,
                removals.flush,
                self._moved,
                removals.flushed_elsewhere,
            )
        self._persistence.start()
        self._tasks.append(asyncio.create_task(self._tick(), name="timer"))
        self._tasks.append(asyncio.create_task(self._make_room_ahead(), name="the making of room"))
        self.health.watch("the thread that writes files", self.clerk.is_alive)
        self.health.watch("the thread that looks at the loop", self.lag.is_alive)
        if scrub_bytes_per_s and self.core.config.check_stride:
            scrub = self.verifier.scrub(scrub_bytes_per_s, self.effects.run)
            stalled_s = self.verifier.stalled_s
            self._tasks.append(self.health.run("scrubber", scrub, stalled_s, STALLED_WORK_S))

    async def close(self) -> None:
        """If a capability raises, closes the rest first."""
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(self._close_rest)
            for one in reversed(self.capabilities):
                closing.push_async_callback(one.close)
            await self.sessions.close_all()
            await self.arena_size.close()

    async def _close_rest(self) -> None:
        if self.tiers is not None:
            await self.tiers.close()
        self.survey.close()
        await self._persistence.close()
        self.transfers.close()
        self.lag.close()
        for task in self._tasks:
            task.cancel()

    def save_use(self) -> None:
        """Blocks."""
        self._persistence.save_use()
        self.events.saving()

    @property
    def epoch(self) -> int:
        return self.memory.table.geometry.epoch

    @property
    def has_tenants(self) -> bool:
        """If True, tenants must not learn of each other's sessions."""
        return bool(self.core.config.tenants)

    # Room for stores

    async def reserve(
        self,
        session: LiveSession,
        lease_id: str,
        runs: list[Run],
        ttl_s: float,
        retention: Retention = NO_RETENTION,
    ) -> tuple[list[NDArray[np.uint8]], float]:
        """Reserves slots, in slices, for blocks that are neither ready nor being stored. Evicts to
        make room; reserves fewer if that is not enough.

        ttl_s: 0 for the default.

        Returns `BlockResult` values, an array for each run, and the write lease's remaining
        lifetime in seconds.
        """
        reserving = self.core.reserve(
            session.record.number, lease_id, runs, ttl_s, time.monotonic(), retention
        )
        reservation = await in_slices(reserving, self.effects.run)
        return list(reservation.results), reservation.ttl_s

    def _moved(self, entries: Entries, medium: Medium, tier: str) -> None:
        self.effects.run()
        self.events.blocks_moved(entries, medium, tier)

    async def _confirm_new(self, key_space_id: int) -> None:
        if self.tiers is not None:
            await self.tiers.generations.confirm_new(key_space_id)

    async def flush(self, key_space_id: int) -> Flushed:
        """Afterwards no node finds an older block, except in the result's `pending_tiers`, which
        are flushed as soon as they answer. Runs to its end even if the caller is cancelled."""
        self.core.key_space(key_space_id)
        if self.tiers is not None:
            return await self.tiers.generations.flush(key_space_id)
        flushing = asyncio.create_task(self.removals.flush(key_space_id))
        self._flushes.add(flushing)
        flushing.add_done_callback(self._flushes.discard)
        return Flushed(await asyncio.shield(flushing))

    # Draining and time

    def drain(self, timeout_s: float | None = None) -> None:
        """Sets `drained` when all transfers have ended, or after `timeout_s` (default:
        `drain_timeout_s`). A later call can only shorten the time."""
        timeout_s = self.drain_timeout_s if timeout_s is None else timeout_s
        loop = asyncio.get_running_loop()
        earlier = self._drain_timer
        if earlier is not None and earlier.when() <= loop.time() + timeout_s:
            return
        self._drain_timer = loop.call_later(timeout_s, self.drained.set)
        self.core.draining = True
        self.drain_timeout_s = timeout_s
        log.info(
            "draining timeout_s=%.1f leases=%d transfers=%d",
            timeout_s,
            len(self.core.leases),
            len(self.core.transfers),
        )
        for session in self.sessions:
            session.notify(Drain(timeout_s))

    def abandon(self) -> None:
        """An invariant of the core is broken: refuses new work and cancels all transfers. The
        process exits without closing anything."""
        self.core.draining = True
        for session in self.sessions:
            session.cancel_transfers()

    async def _tick(self) -> None:
        """Waits for no file or tier: leases would not expire meanwhile."""
        async for _ in self.health.turns("timer", TIMER_S, STALLED_TIMER_S):
            self.last_tick_s = time.monotonic()
            async for _ in slices(self.core.expire(self.last_tick_s)):
                self.effects.run()
            self.removals.forget_outlived(self.last_tick_s)
            await self.removals.keep_bounds(self.last_tick_s)
            self._persistence.turn()
            for one in self.capabilities:
                await one.tick(self.last_tick_s)

    async def _make_room_ahead(self) -> None:
        async for _ in self.health.turns("the making of room", ROOM_S, wake=self._room_taken):
            async for _ in slices(self.core.make_room_ahead(time.monotonic())):
                self.effects.run()
