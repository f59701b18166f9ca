"""The node: the core, its memory and its copy engine, driven by one event loop.

Every method runs on the event loop and none blocks it: bytes are moved by the copy engine's threads
(`transfers`), mappings are made in a worker thread.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hotkv.errors import HotKVError, Reason
from hotkv.keys import KeySpace, Representation
from hotkv.layout import Layout
from hotkv.order import NO_ORDER, DeviceOrder, OrderKind
from hotkv.retention import NO_RETENTION, Retention
from hotkv_server.core import incremental
from hotkv_server.core.cache import CacheCore
from hotkv_server.core.values import EvictionNotice, HashList, Run
from hotkv_server.dataplane.engine import CopyEngine
from hotkv_server.dataplane.plan import Region
from hotkv_server.device.devices import NO_DEVICES, Devices
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.runtime.broadcast import Feeds
from hotkv_server.runtime.engine_memory import check_handles, open_engine_memory
from hotkv_server.runtime.events import EventHub, EventPublisher, removed_events
from hotkv_server.runtime.health import Health
from hotkv_server.runtime.in_place import InPlace
from hotkv_server.runtime.lag import LoopLag
from hotkv_server.runtime.recovery import UseNotes, state_of
from hotkv_server.runtime.reports import Report, ReportCounters, WatchedReport
from hotkv_server.runtime.session import Drain, LiveSession
from hotkv_server.runtime.slices import slices
from hotkv_server.runtime.sparse import SparseDecode
from hotkv_server.runtime.transfers import Transfers

log = logging.getLogger(__name__)

TIMER_S = 0.2
USE_PARTS = 300
"""Times of last use are written down once in so many turns of the timer."""
STALLED_TIMER_S = 5.0
STALLED_WORK_S = 60.0
"""Far above what a piece of work on a thread may take, also on a machine that swaps."""
MAX_SESSIONS = 1024
MAX_FORGOTTEN = 64
"""Most key spaces that are forgotten in one turn of the timer, or for one session."""
NOTICE_BLOCKS = 1 << 16
"""Most blocks of one eviction notice: 2 MiB of hashes."""


class Node:
    """See the module. `copy_engine` and `publisher` are closed by whoever made them."""

    def __init__(
        self,
        core: CacheCore,
        memory: NodeMemory,
        copy_engine: CopyEngine,
        publisher: EventPublisher | None = None,
        verifier: Verifier | None = None,
        devices: Devices = NO_DEVICES,
    ) -> None:
        self.core = core
        self.memory = memory
        self.copy_engine = copy_engine
        self.devices = devices
        self.sessions: dict[str, LiveSession] = {}
        self.started_s = time.monotonic()
        self.drained = asyncio.Event()
        self.events = EventHub(publisher)
        self.report_counters = ReportCounters()
        self.watched: Feeds[WatchedReport] = Feeds()
        self.refusals: Counter[Reason] = Counter()
        self.last_tick_s = time.monotonic()
        self.health = Health()
        self.lag = LoopLag()
        self.drain_timeout_s = 0.0
        self._drain_timer: asyncio.TimerHandle | None = None
        self._arena = Region(memory.arena.address, memory.arena.num_bytes, "the arena")
        self.verifier = verifier or Verifier(core, self._arena)
        self.in_place = InPlace(core, self.verifier, self._run_effects)
        self.sparse = SparseDecode(core, memory.arena.array(), self.verifier)
        self.transfers = Transfers(
            core,
            self._arena,
            copy_engine,
            self.verifier,
            self.events,
            self.health,
            self._run_effects,
        )
        self._use_notes = UseNotes(core)
        # Revision of the catalog that is written down; one write at a time.
        self._saved = self.core.catalog.revision
        self._saving = asyncio.Lock()
        self._saves: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"Node({len(self.sessions)} sessions, {self.core!r})"

    def start(self, scrub_bytes_per_s: float = 0.0) -> None:
        """Starts the timer, and the scrubber unless it may read nothing."""
        self.lag.start()
        self._saved = self.core.catalog.revision
        for number, record in self.core.key_spaces.items():
            self.events.add_key_space(number, record.key_space)
        self._tasks.append(asyncio.create_task(self._tick(), name="timer"))
        self.health.watch_task(
            self._tasks[-1], lambda now_s: now_s - self.last_tick_s, STALLED_TIMER_S
        )
        self.health.watch("selection threads", lambda: True, self.sparse.stalled_s, STALLED_WORK_S)
        if scrub_bytes_per_s and self.core.config.check_stride:
            self._tasks.append(
                asyncio.create_task(
                    self.verifier.scrub(scrub_bytes_per_s, self._run_effects), name="scrubber"
                )
            )
            self.health.watch_task(self._tasks[-1], self.verifier.stalled_s, STALLED_WORK_S)

    async def close(self) -> None:
        """Closes all sessions and stops the timer."""
        await asyncio.gather(
            *(self.close_session(session) for session in list(self.sessions.values()))
        )
        await asyncio.gather(*self._saves)
        self.sparse.close()
        self.transfers.close()
        self.lag.close()
        for task in self._tasks:
            task.cancel()

    @property
    def epoch(self) -> int:
        return self.memory.table.geometry.epoch

    @property
    def has_tenants(self) -> bool:
        """Whether sessions must not learn of each other across tenants."""
        return bool(self.core.config.tenants)

    # Sessions

    async def open_session(
        self,
        engine_id: str,
        role: str,
        key_space: KeySpace,
        client_name: str,
        representations: tuple[Representation, ...] = (),
        *,
        hears_evictions: bool = True,
    ) -> LiveSession:
        """Opens a session; whoever holds its secret id may use it. Its key space is written down
        then."""
        await self._forget_for(key_space, representations)
        if len(self.sessions) >= MAX_SESSIONS:
            raise HotKVError(
                Reason.OVERLOADED, f"{MAX_SESSIONS} sessions are open; close some first"
            )
        is_new = not self.core.catalog.knows(key_space)
        record = self.core.open_session(
            engine_id, role, key_space, time.monotonic(), representations
        )
        if is_new:
            self.events.add_key_space(record.key_space_id, key_space)
        session = LiveSession(
            record, secrets.token_hex(16), self.core.key_space(record.key_space_id), client_name
        )
        session.hears_evictions = hears_evictions
        self.sessions[session.secret_id] = session
        try:
            await self._save_state()
        except BaseException:
            await self.close_session(session)
            raise
        log.info(
            "session opened number=%d engine=%s role=%s key_space=%d",
            record.number,
            engine_id,
            role,
            record.key_space_id,
        )
        return session

    async def _forget_for(
        self, key_space: KeySpace, representations: tuple[Representation, ...]
    ) -> None:
        """Forgets what must go for another key space, with its blocks, as far as anything may go;
        opening a session says if not."""
        for _ in range(0 if self.core.draining else MAX_FORGOTTEN):
            number = self.core.catalog.surplus(key_space, representations)
            if not number:
                return
            if self.core.space.tenants.bytes_of(number):
                await self.flush(number)
            if not await self._forget(number):
                return

    async def _forget(self, key_space_id: int) -> bool:
        """False where somebody has it, or a block of it, by now."""
        async for _ in slices(self.sparse.remembered.forget(key_space_id)):
            pass
        if not self.core.catalog.forget(key_space_id):
            return False
        self.events.forget_key_space(key_space_id)
        log.info(
            "key space forgotten key_space=%d known=%d", key_space_id, len(self.core.key_spaces)
        )
        return True

    async def _save_state(self) -> None:
        """Before anything is stored that only it explains. A write that has begun ends, whoever
        waits for it."""
        if self._saved != self.core.catalog.revision:
            task = asyncio.create_task(self._write_state())
            self._saves.add(task)
            task.add_done_callback(self._saves.discard)
            await asyncio.shield(task)

    async def _write_state(self) -> None:
        async with self._saving:
            revision = self.core.catalog.revision
            if self._saved == revision:
                return
            state = state_of(self.core, self.memory.slab_bytes)
            try:
                await asyncio.get_running_loop().run_in_executor(
                    None, self.memory.save_state, state
                )
                self._saved = revision
            except OSError as error:
                log.warning(
                    "state not saved, a restart before it is will lose what is new: %s", error
                )

    def books_bytes(self) -> int:
        """About what is kept for clients besides the arena, as far as it is counted."""
        queued = self.events.publisher.queued_bytes if self.events.publisher is not None else 0
        return (
            self.core.client_memory.total
            + self.core.catalog.weight_bytes
            + self.sparse.remembered.num_bytes
            + queued
        )

    def save_use(self, used_s: NDArray[np.float64] | None = None) -> None:
        """Writes down for the next server when blocks were last used: what `UseNotes` has, or all
        anew."""
        used_s = UseNotes(self.core).take(1) if used_s is None else used_s
        assert used_s is not None
        try:
            self.memory.save_use(used_s)
        except OSError as error:
            log.warning("times of last use not saved: %s", error)

    def session(self, secret_id: str) -> LiveSession:
        """The open session with this secret id. Raises UNKNOWN_SESSION."""
        session = self.sessions.get(secret_id)
        if session is None or session.closing:
            raise HotKVError(
                Reason.UNKNOWN_SESSION,
                "session_id is unknown or closed; open a session with SessionService.Connect",
            )
        return session

    async def close_session(self, session: LiveSession) -> None:
        """Cancels its transfers, waits until nothing touches its memory, then gives everything
        back."""
        if session.closing:
            return
        session.closing = True
        session.cancel_transfers()
        while session.jobs or session.num_reads:
            session.settled.clear()
            await session.settled.wait()
        if session.memory is not None and session.memory.waits_for_devices:
            await asyncio.get_running_loop().run_in_executor(None, session.memory.close)
            session.memory = None
        session.release_memory()
        async for _ in slices(incremental.end_leases(self.core, session.record.number)):
            pass
        self.core.close_session(session.record.number, time.monotonic())
        del self.sessions[session.secret_id]
        is_last = all(
            other.record.engine_id != session.record.engine_id for other in self.sessions.values()
        )
        self.sparse.close_session(session, is_last=is_last)
        self._run_effects()
        log.info(
            "session closed number=%d engine=%s", session.record.number, session.record.engine_id
        )

    async def register_memory(
        self, session: LiveSession, layout: Layout, order: DeviceOrder = NO_ORDER
    ) -> tuple[OrderKind, str]:
        """Maps and opens the memory of a session; descriptors of files have come over the
        descriptor socket before.

        Returns how marks are made in this session, and where less was taken than offered: why.
        """
        try:
            kinds = self.core.catalog.record(session.record.key_space_id)
            representations = {
                session.named(g): kinds.representation(g) for g in session.record.representations
            }
            # In a thread: thousands of tensors take a while.
            await asyncio.to_thread(layout.prepare, session.key_space.groups, representations)
        except ValueError as error:
            raise HotKVError(Reason.INVALID_LAYOUT, f"layout.{error}") from error
        if session.memory is not None:
            raise HotKVError(
                Reason.DUPLICATE_ID,
                (
                    "layout: the session has registered its memory; open another session for other "
                    "memory"
                ),
            )
        if session.close_link is None and any(handle.is_cuda for handle in layout.handles):
            raise HotKVError(
                Reason.INVALID_LAYOUT,
                "layout.handles: memory of a device needs the session's link, which tells the "
                "engine when a dead server has let go of it; "
                "link it on the descriptor socket of a unix: target first",
            )
        check_handles(layout, order, self.devices)
        files = [handle.handle_id for handle in layout.handles if not handle.is_cuda]
        for handle_id in files:
            if handle_id not in session.received_fds:
                raise HotKVError(
                    Reason.UNKNOWN_HANDLE,
                    (
                        f"layout.handles: no descriptor for {handle_id!r} has come over the "
                        "descriptor socket"
                    ),
                )
        fds = {handle_id: session.received_fds.pop(handle_id) for handle_id in files}
        loop = asyncio.get_running_loop()
        tenant = session.key_space.tenant
        opening = loop.run_in_executor(
            None,
            open_engine_memory,
            layout,
            order,
            fds,
            self.devices,
            session.cancel_transfers,
            tenant,
        )
        try:
            memory = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The stream has broken meanwhile; what is being opened is closed again.
            opening.add_done_callback(
                lambda done: (
                    None if done.exception() else loop.run_in_executor(None, done.result().close)
                )
            )
            raise
        if session.closing:
            await loop.run_in_executor(None, memory.close)
            raise HotKVError(Reason.UNKNOWN_SESSION, "session_id was closed meanwhile")
        session.memory = memory
        log.info(
            "memory registered session=%d bytes=%d huge_bytes=%d device_allocations=%d blocks=%d "
            "layout=%s order=%s%s",
            session.record.number,
            layout.num_bytes,
            memory.huge_bytes,
            len(memory.allocations),
            layout.num_blocks,
            layout.name,
            memory.order.kind.name.lower(),
            f" because={memory.order.message!r}" if memory.order.message else "",
        )
        return memory.order.kind, memory.order.message

    # Calls

    def acquire(
        self, session: LiveSession, lease_id: str, groups: list[HashList], ttl_s: float
    ) -> tuple[list[NDArray[np.bool_]], float]:
        """As CacheCore.acquire."""
        grant = self.core.acquire(session.record.number, lease_id, groups, ttl_s, time.monotonic())
        return list(grant.pinned), grant.ttl_s

    async def make_room(self, session: LiveSession, lease_id: str, runs: Sequence[Run]) -> None:
        """Makes room for what is about to be reserved or stored by this call, in this turn of the
        loop. Others are served meanwhile."""
        is_first = self.core.leases.get(session.record.engine_id, lease_id) is None
        if is_first and not self.core.config.makes_room and not self.core.draining:
            async for _ in slices(
                incremental.make_room(self.core, session.record.key_space_id, runs)
            ):
                self._run_effects()

    def reserve(
        self,
        session: LiveSession,
        lease_id: str,
        runs: list[Run],
        ttl_s: float,
        retention: Retention = NO_RETENTION,
    ) -> tuple[list[NDArray[np.uint8]], float]:
        """As CacheCore.reserve."""
        reservation = self.core.reserve(
            session.record.number, lease_id, runs, ttl_s, time.monotonic(), retention
        )
        self._run_effects()
        return list(reservation.results), reservation.ttl_s

    def touch(self, session: LiveSession, groups: list[HashList]) -> None:
        """As CacheCore.touch."""
        self.core.touch(session.record.number, groups, time.monotonic())

    async def report(self, session: LiveSession, reports: Sequence[Report]) -> None:
        """Notes requests that the engine has scheduled: touches what they used, keeps what they ask
        to keep. All or nothing is accepted.

        Others are served meanwhile; for them, requests are noted one after the other.
        """
        for report in reports:
            report.check(session.key_space, self.core.config.max_blocks_per_call)
        now_s, unix_time_s = time.monotonic(), time.time()
        number, hash_bytes = session.record.key_space_id, session.key_space.hash_bytes
        self.watched.put(
            WatchedReport(number, hash_bytes, unix_time_s - report.age_s, report)
            for report in reports
        )
        for report in reports:
            self.report_counters.count(report)
        async for _ in slices(self._uses(session, reports, now_s)):
            pass

    def _uses(
        self, session: LiveSession, reports: Sequence[Report], now_s: float
    ) -> Iterator[None]:
        for report in reports:
            for hash_list in report.used_blocks(session.key_space):
                yield from incremental.use(
                    self.core, session.record.number, hash_list, now_s, report.retention
                )
                yield

    # Draining, effects, time

    def grow(self, num_bytes: int, coming_bytes: int) -> None:
        """As CacheCore.grow."""
        self.core.grow(num_bytes, coming_bytes)

    def drain(self, timeout_s: float) -> None:
        """Takes no new work from now on; `drained` is set when all has ended or the time is up.
        Called again, it can only end sooner."""
        loop = asyncio.get_running_loop()
        if self._drain_timer is not None:
            if self._drain_timer.when() <= loop.time() + timeout_s:
                return
            self._drain_timer.cancel()
        self._drain_timer = loop.call_later(timeout_s, self.drained.set)
        self.core.draining = True
        self.drain_timeout_s = timeout_s
        log.info(
            "draining timeout_s=%.1f leases=%d transfers=%d",
            timeout_s,
            len(self.core.leases),
            len(self.core.transfers),
        )
        for session in self.sessions.values():
            session.notify(Drain(timeout_s))

    def abandon(self) -> None:
        """An invariant has broken: nothing is granted or kept from now on. The process ends, and
        closes nothing."""
        self.core.draining = True
        for session in self.sessions.values():
            for job in session.jobs.values():
                job.cancel()

    async def evict(
        self, key_space_id: int, group_index: int, hashes: NDArray[np.uint32]
    ) -> tuple[int, int]:
        """As `incremental.evict`; between the parts others are served."""
        return await self._evicted(incremental.evict(self.core, key_space_id, group_index, hashes))

    async def evict_all(self, key_space_id: int) -> tuple[int, int]:
        """As `incremental.evict_all`; between the parts others are served."""
        return await self._evicted(incremental.evict_all(self.core, key_space_id))

    async def _evicted(self, evicting: Iterator[tuple[int, int]]) -> tuple[int, int]:
        dropped = kept = 0
        async for counts, _ in slices(evicting):
            dropped, kept = (
                dropped + sum(count for count, _ in counts),
                kept + sum(count for _, count in counts),
            )
            self._run_effects()
        return dropped, kept

    async def flush(self, key_space_id: int) -> int:
        """As `incremental.flush`; between the parts others are served. What they store meanwhile
        may be flushed, too."""
        self._run_effects()
        num_stored, num_blocks = self.core.counters.stored_blocks, 0
        async for counts, has_more in slices(incremental.flush(self.core, key_space_id)):
            num_blocks += sum(counts)
            # What goes is told of before anybody stores it anew.
            is_clear = not has_more and self.core.counters.stored_blocks == num_stored
            self._run_effects(flushed_key_space_id=key_space_id if is_clear else 0)
        async for _ in slices(self.sparse.remembered.forget(key_space_id)):
            pass
        log.info("key space flushed key_space=%d blocks=%d", key_space_id, num_blocks)
        return num_blocks

    def _run_effects(self, flushed_key_space_id: int = 0) -> None:
        notices = [piece for notice in self.core.take_effects() for piece in _pieces(notice)]
        if self.events.is_heard:
            self.events.publish(removed_events(notices, flushed_key_space_id))
        for notice in notices:
            for session in self.sessions.values():
                if (
                    session.hears_evictions
                    and session.record.key_space_id == notice.key_space_id
                    and not session.closing
                ):
                    session.notify(notice)
        if self.core.draining and not len(self.core.transfers):
            self.drained.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TIMER_S)
            self.last_tick_s = time.monotonic()
            async for _ in slices(incremental.expire(self.core, self.last_tick_s)):
                self._run_effects()
            for number in list(
                itertools.islice(self.core.catalog.outlived(self.last_tick_s), MAX_FORGOTTEN)
            ):
                await self._forget(number)
            if (used_s := self._use_notes.take(USE_PARTS)) is not None:
                asyncio.get_running_loop().run_in_executor(None, self.save_use, used_s)
                await self._save_state()
            if self.events.publisher is not None:
                self.events.publisher.settle()


def _pieces(notice: EvictionNotice) -> Iterator[EvictionNotice]:
    """A notice in parts that fit a message."""
    for start in range(0, len(notice.hashes), NOTICE_BLOCKS):
        yield replace(notice, hashes=notice.hashes[start : start + NOTICE_BLOCKS])
