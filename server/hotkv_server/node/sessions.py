"""Opens sessions, registers their memory, and closes them.

Always true: capabilities are notified of each new key space, which is saved before any of its
blocks is stored. A closing session keeps memory and leases until no transfer or read touches
them. On the event loop; threads map and unmap memory.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import KeySpace, Sketch
from hotkv_proto.layout import Layout
from hotkv_proto.order import NO_ORDER, DeviceOrder, OrderKind
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.shares import FairBound
from hotkv_server.device.devices import Devices
from hotkv_server.logs import Throttle
from hotkv_server.memory.numa import ANY_PART
from hotkv_server.node.capability import NodeEvents
from hotkv_server.node.event_loop import slices
from hotkv_server.node.live_session import (
    LiveSession,
    SessionMemory,
    check_handles,
    open_session_memory,
)
from hotkv_server.node.names import DisplayNames
from hotkv_server.node.removals import Removals

log = logging.getLogger(__name__)
log.addFilter(Throttle())

MAX_SESSIONS = 256
MAX_UNREAD_ENDS = 512
"""gRPC keeps the stream of an ended session until its client has read the end. Owners share this
number; one that has used up its share can't open a session."""


class Sessions:
    """Iterating yields the open sessions.

    save_state: saves new key spaces.
    confirm_new: asks shared stores for a key space's generation.
    unread_ends: bounds ended streams that clients have not read to their end.
    """

    def __init__(
        self,
        core: CacheCore,
        devices: Devices,
        events: NodeEvents,
        removals: Removals,
        names: DisplayNames,
        save_state: Callable[[], Awaitable[None]],
        confirm_new: Callable[[int], Awaitable[None]],
        run_effects: Callable[[], None],
    ) -> None:
        self._core = core
        self._devices = devices
        self._events = events
        self._removals = removals
        self._names = names
        self._save_state = save_state
        self._confirm_new = confirm_new
        self._run_effects = run_effects
        self._open: dict[str, LiveSession] = {}
        self.unread_ends = FairBound(MAX_UNREAD_ENDS)

    def __repr__(self) -> str:
        return f"Sessions({len(self._open)} open)"

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(list(self._open.values()))

    def get(self, secret_id: str) -> LiveSession:
        """Raises UNKNOWN_SESSION."""
        session = self._open.get(secret_id)
        if session is None or session.closing:
            raise HotKVError(
                Reason.UNKNOWN_SESSION,
                "session_id is unknown or closed; open a session with SessionService.Connect",
            )
        return session

    async def open(
        self,
        engine_id: str,
        role: str,
        key_space: KeySpace,
        client_name: str,
        sketches: tuple[Sketch, ...] = (),
        *,
        wants_evictions: bool = True,
        engine_name: str = "",
        model_names: Sequence[str] = (),
        max_of_tenant: int = 0,
    ) -> LiveSession:
        """Saves the session's key space too. Any client with the secret id may use the session.

        engine_id: sessions of one engine can use each other's leases.
        role: `scheduler`, `worker` or `tool`; only shown to operators.
        sketches: kinds to be stored or loaded.
        model_names: by which requests address the model; the first is shown to people.
        max_of_tenant: 0: no limit.

        Raises OVERLOADED, and the errors of `CacheCore.open_session`.
        """
        self._check_count(key_space.tenant, max_of_tenant)
        await self._removals.forget_for(key_space, sketches)
        # Other sessions may have opened during the wait.
        self._check_count(key_space.tenant, max_of_tenant)
        is_new = not self._core.catalog.number(key_space.fingerprint)
        record = self._core.open_session(engine_id, role, key_space, time.monotonic(), sketches)
        try:
            if is_new:
                self._events.key_space_added(record.key_space_id, key_space, model_names)
            else:
                for name in model_names:
                    self._events.model_named(record.key_space_id, name)
            self._names.tell(
                engine_id,
                engine_name,
                next(iter(model_names), ""),
                key_space,
                {one.record.engine_id for one in self},
            )
        except BaseException:
            self._core.close_session(record.number, time.monotonic())
            if is_new:
                # Forget the new key space, so that its next session makes all these steps again.
                self._removals.forget(record.key_space_id)
            raise
        session = LiveSession(
            record,
            secrets.token_hex(16),
            self._core.key_space(record.key_space_id),
            client_name,
            self._names,
        )
        session.wants_evictions = wants_evictions
        self._open[session.secret_id] = session
        try:
            await self._save_state()
            await self._confirm_new(record.key_space_id)
        except BaseException:
            await self.close(session)
            raise
        log.info(
            "session opened number=%d engine=%s role=%s key_space=%d model=%s",
            record.number,
            session.engine_name,
            role,
            record.key_space_id,
            session.model_name,
        )
        return session

    def _check_count(self, tenant: str, max_of_tenant: int) -> None:
        if len(self._open) >= MAX_SESSIONS:
            raise HotKVError(
                Reason.OVERLOADED, f"{MAX_SESSIONS} sessions are open; close some first"
            )
        num_open = sum(one.key_space.tenant == tenant and not one.closing for one in self)
        if max_of_tenant and num_open >= max_of_tenant:
            raise HotKVError(
                Reason.OVERLOADED,
                f"{num_open} sessions of this tenant are open, which is all it may have; close "
                "some first",
            )

    async def declare(self, key_space: KeySpace) -> int:
        """Registers and saves a key space without a session, and asks shared stores for its
        generation. Raises DRAINING, and the errors of `Catalog.register`."""
        self._core.sessions.check_takes_new("takes no new key spaces")
        await self._removals.forget_for(key_space, ())
        is_new = not self._core.catalog.number(key_space.fingerprint)
        number, _ = self._core.catalog.register(key_space, (), time.monotonic())
        if is_new:
            self._events.key_space_added(number, key_space, ())
        await self._save_state()
        await self._confirm_new(number)
        return number

    async def close(self, session: LiveSession) -> None:
        """Cancels transfers, waits until nothing uses memory or leases, then releases all. If
        the session is closing already, waits for that."""
        if session.closing:
            await session.closed.wait()
            return
        session.closing = True
        try:
            await self._settle(session)
        finally:
            session.closed.set()

    async def _settle(self, session: LiveSession) -> None:
        session.cancel_transfers()
        while session.jobs or session.num_reads:
            session.settled.clear()
            await session.settled.wait()
        await self._end_holds(session)
        if session.memory is not None or session.received_fds or session.received_backings:
            # On another thread: the kernel takes long to free the memory of an engine that has
            # died.
            pool = None if session.memory is None else session.memory.pool
            await asyncio.get_running_loop().run_in_executor(pool, session.release_memory)
        session.release_memory()
        # Again: a call that was waiting for a tier may have acquired a lease meanwhile.
        await self._end_holds(session)
        self._core.close_session(session.record.number, time.monotonic())
        del self._open[session.secret_id]
        self._choose_home(session.record.key_space_id)
        engine_id = session.record.engine_id
        is_last = all(other.record.engine_id != engine_id for other in self)
        try:
            self._events.session_closed(session, is_last)
        finally:
            self._run_effects()
        log.info("session closed number=%d engine=%s", session.record.number, session.engine_name)

    async def _end_holds(self, session: LiveSession) -> None:
        async for _ in slices(self._core.end_pins(session.record.number)):
            pass
        async for _ in slices(self._core.end_leases(session.record.number)):
            pass

    async def close_all(self) -> None:
        await asyncio.gather(*(self.close(session) for session in self))

    async def register_memory(
        self, session: LiveSession, layout: Layout, order: DeviceOrder = NO_ORDER
    ) -> tuple[OrderKind, str]:
        """Maps and opens an engine's memory, whose descriptors must have come over the descriptor
        socket.

        Returns the kind of marks that the server will read, and why offered marks could not be
        opened. Raises INVALID_LAYOUT, INVALID_FIELD, DUPLICATE_ID, UNKNOWN_HANDLE,
        UNKNOWN_SESSION.
        """
        await self._prepare(session, layout)
        _check_first(session, layout)
        check_handles(layout, order, self._devices, session.record.engine_id)
        fds, backings = session.take_descriptors(
            [handle.handle_id for handle in layout.handles if not handle.is_cuda],
            layout.backing_ids,
        )
        memory = await self._open_memory(session, layout, order, fds, backings)
        if session.closing:
            await asyncio.get_running_loop().run_in_executor(memory.pool, memory.close)
            raise HotKVError(Reason.UNKNOWN_SESSION, "session_id was closed meanwhile")
        session.memory = memory
        self._choose_home(session.record.key_space_id)
        log.info(
            "memory registered session=%d bytes=%d huge_bytes=%d device_allocations=%d "
            "device_ranges=%d blocks=%d layout=%s order=%s%s",
            session.record.number,
            layout.num_bytes,
            memory.huge_bytes,
            len(memory.allocations),
            len(memory.ranges),
            layout.num_blocks,
            layout.name,
            memory.order.kind.name.lower(),
            f" because={memory.order.message!r}" if memory.order.message else "",
        )
        return memory.order.kind, memory.order.message

    def _choose_home(self, key_space_id: int) -> None:
        """New slots of the key space lie near the devices of all its sessions."""
        used = {
            device
            for one in self
            if one.record.key_space_id == key_space_id and one.memory is not None
            for device in one.memory.used_devices
        }
        home, homes = self._devices.home(used), self._core.space.homes
        if home == ANY_PART:
            homes.pop(key_space_id, None)
        else:
            homes[key_space_id] = home

    async def _prepare(self, session: LiveSession, layout: Layout) -> None:
        try:
            kinds = self._core.catalog.record(session.record.key_space_id)
            sketches = {session.named(g): kinds.sketch(g) for g in session.record.sketches}
            # In a thread: takes long with thousands of tensors.
            await asyncio.to_thread(layout.prepare, session.key_space.groups, sketches)
        except ValueError as error:
            raise HotKVError(Reason.INVALID_LAYOUT, f"layout.{error}") from error

    async def _open_memory(
        self,
        session: LiveSession,
        layout: Layout,
        order: DeviceOrder,
        fds: dict[str, int],
        backings: dict[str, int],
    ) -> SessionMemory:
        """If this coroutine is cancelled, closes the memory as soon as it is open."""
        loop = asyncio.get_running_loop()
        pool = self._devices.pool(
            self._devices.find(handle.device_uuid) for handle in layout.handles if handle.is_cuda
        )
        opening = loop.run_in_executor(
            pool,
            open_session_memory,
            layout,
            order,
            fds,
            self._devices,
            session.cancel_transfers,
            session.key_space.tenant,
            lambda: session.closing,
            backings,
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The session's stream has broken during the wait.
            opening.add_done_callback(
                lambda done: (
                    None if done.exception() else loop.run_in_executor(pool, done.result().close)
                )
            )
            raise


def _check_first(session: LiveSession, layout: Layout) -> None:
    if session.memory is not None:
        raise HotKVError(
            Reason.DUPLICATE_ID,
            "layout: the session has registered its memory; open another session for other memory",
        )
    if session.close_link is None and any(handle.is_cuda for handle in layout.handles):
        raise HotKVError(
            Reason.INVALID_LAYOUT,
            "layout.handles: memory of a device needs the session's link, which tells the engine "
            "when a dead server has let go of it; link it on the descriptor socket of a unix: "
            "target first",
        )
