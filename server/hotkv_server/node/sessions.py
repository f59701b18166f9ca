"""The open sessions of a node: opens them, registers their memory, and closes them.

Always true: when a key space (a model in a configuration) is registered, capabilities are
notified of it. A key space is saved before any of its blocks is stored. A closing session keeps its
memory and leases until no transfer or read touches them, and then releases all of them. All methods
run on the event loop; threads map and unmap the memory.
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
from hotkv_server.node.capability import Capability, tell_all
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
"""When a session has ended, gRPC keeps its stream until the client has read the end of the stream.
This is the most streams that gRPC keeps in this way. Tenants (or engines, if there are no tenants)
share the number (`FairBound`). A client whose tenant or engine has used up its share can't open a
session."""


class Sessions:
    """Opens and closes sessions, and registers their memory. Iterating yields the open sessions.

    devices: the GPUs on which engines may have memory.
    removals: forgets key spaces (each is a model in a configuration) to make room for a new key
        space.
    names: remembers the names of engines and models.
    save_state: function that saves new key spaces.
    confirm_new: function that asks shared tiers for the generation of a key space.
    run_effects: function that carries out the effects of the core's decisions, for example sends
        notices of evictions.
    unread_ends: bounds the number of streams that stay open after their session has ended because
        the client has not read the last messages yet.
    """

    def __init__(
        self,
        core: CacheCore,
        devices: Devices,
        capabilities: Sequence[Capability],
        removals: Removals,
        names: DisplayNames,
        save_state: Callable[[], Awaitable[None]],
        confirm_new: Callable[[int], Awaitable[None]],
        run_effects: Callable[[], None],
    ) -> None:
        self._core = core
        self._devices = devices
        self._capabilities = capabilities
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
        """Returns the open session with this secret id. Raises UNKNOWN_SESSION."""
        session = self._open.get(secret_id)
        if session is None or session.closing:
            raise HotKVError(
                Reason.UNKNOWN_SESSION,
                "session_id is unknown or closed; open a session with SessionService.Connect",
            )
        return session

    def owner(self, session: LiveSession) -> str:
        """Returns the owner of an open session: the tenant, or without tenants the engine.
        `FairBound` bounds the leases and transfers of each owner."""
        return self._core.sessions.owner(session.record)

    async def open(
        self,
        engine_id: str,
        role: str,
        key_space: KeySpace,
        client_name: str,
        sketches: tuple[Sketch, ...] = (),
        *,
        hears_evictions: bool = True,
        engine_name: str = "",
        model_names: Sequence[str] = (),
        max_of_tenant: int = 0,
    ) -> LiveSession:
        """Opens a session and saves its key space (a model in a configuration). The result has
        a secret id: any client that presents it may use the session.

        engine_id: id that all sessions of one engine share; they can use each other's leases.
        role: `scheduler`, `worker` or `tool`; only shown to operators.
        client_name: name of the client's program, which is shown to operators.
        sketches: kinds of sketches (compact forms of keys, for sparse attention) that
            the session will store or load.
        engine_name: name by which the engine is shown to people; empty if the engine has no name.
        model_names: names by which requests address the model; the first is shown to people.
        hears_evictions: True if the session gets eviction notices.
        max_of_tenant: most sessions of the key space's tenant; 0: no limit.

        Raises OVERLOADED, and the errors of `CacheCore.open_session`.
        """
        self._check_count(key_space.tenant, max_of_tenant)
        await self._removals.forget_for(key_space, sketches)
        # Other sessions may have opened during the wait.
        self._check_count(key_space.tenant, max_of_tenant)
        is_new = not self._core.catalog.number(key_space.fingerprint)
        record = self._core.open_session(engine_id, role, key_space, time.monotonic(), sketches)

        def named(one: Capability) -> None:
            for name in model_names:
                one.model_named(record.key_space_id, name)

        try:
            if is_new:
                self._add(record.key_space_id, key_space, model_names)
            else:
                tell_all(self._capabilities, named)
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
                # A step after the registration of the new key space has failed. Forget the key
                # space, so that the next session of it makes all these steps again.
                self._removals.forget(record.key_space_id)
            raise
        session = LiveSession(
            record,
            secrets.token_hex(16),
            self._core.key_space(record.key_space_id),
            client_name,
            self._names,
        )
        session.hears_evictions = hears_evictions
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
        """Raises OVERLOADED if no further session of `tenant` may open: too many sessions are open
        in all, or the tenant has `max_of_tenant` open sessions (0: no limit)."""
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
        """Registers a key space (a model in a configuration) without opening a session, saves
        it, and asks shared tiers for its generation (number that each flush raises). Returns the
        number of the key space.

        Raises DRAINING, and the errors of `Catalog.register`.
        """
        self._core.sessions.check_takes_new("takes no new key spaces")
        await self._removals.forget_for(key_space, ())
        is_new = not self._core.catalog.number(key_space.fingerprint)
        number, _ = self._core.catalog.register(key_space, (), time.monotonic())
        if is_new:
            self._add(number, key_space)
        await self._save_state()
        await self._confirm_new(number)
        return number

    def _add(self, number: int, key_space: KeySpace, model_names: Sequence[str] = ()) -> None:
        tell_all(
            self._capabilities, lambda one: one.key_space_added(number, key_space, model_names)
        )

    async def close(self, session: LiveSession) -> None:
        """Closes a session in three steps: cancels its transfers; waits until no transfer or read
        uses its memory or leases; then ends its pins and leases, and releases its memory. If the
        session is being closed already, waits until it is closed."""
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
        if session.memory is not None or session.received_fds:
            # Release the memory on another thread: the kernel takes long to free the memory of an
            # engine that has died.
            await asyncio.get_running_loop().run_in_executor(None, session.release_memory)
        session.release_memory()
        # Release leases again: a call that was waiting for a tier may have acquired a lease
        # meanwhile.
        await self._end_holds(session)
        self._core.close_session(session.record.number, time.monotonic())
        del self._open[session.secret_id]
        engine_id = session.record.engine_id
        is_last = all(other.record.engine_id != engine_id for other in self)
        try:
            tell_all(self._capabilities, lambda one: one.session_closed(session, is_last=is_last))
        finally:
            self._run_effects()
        log.info("session closed number=%d engine=%s", session.record.number, session.engine_name)

    async def _end_holds(self, session: LiveSession) -> None:
        async for _ in slices(self._core.end_pins(session.record.number)):
            pass
        async for _ in slices(self._core.end_leases(session.record.number)):
            pass

    async def close_all(self) -> None:
        """Closes every session."""
        await asyncio.gather(*(self.close(session) for session in self))

    async def register_memory(
        self, session: LiveSession, layout: Layout, order: DeviceOrder = NO_ORDER
    ) -> tuple[OrderKind, str]:
        """Maps and opens the memory of a session's engine. The descriptors of the memory's files
        must have arrived over the descriptor socket.

        layout: the memory and the tensors in it.
        order: the marks that the engine offers. A mark is a point in the work of the engine's
            device that a transfer must not precede.

        Returns the kind of marks that the server will read. If the server could not open marks that
        the engine offered, also returns the reason, otherwise an empty text. Raises INVALID_LAYOUT,
        INVALID_FIELD, DUPLICATE_ID, UNKNOWN_HANDLE, UNKNOWN_SESSION.
        """
        await self._prepare(session, layout)
        _check_first(session, layout)
        check_handles(layout, order, self._devices)
        fds = session.take_files(
            [handle.handle_id for handle in layout.handles if not handle.is_cuda]
        )
        memory = await self._open_memory(session, layout, order, fds)
        if session.closing:
            await asyncio.get_running_loop().run_in_executor(None, memory.close)
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

    async def _prepare(self, session: LiveSession, layout: Layout) -> None:
        """Checks the layout against the key space, and computes where the parts of each block lie
        in the engine's memory (`Layout.prepare`). Raises INVALID_LAYOUT."""
        try:
            kinds = self._core.catalog.record(session.record.key_space_id)
            sketches = {session.named(g): kinds.sketch(g) for g in session.record.sketches}
            # Run this in a thread, because it takes long with thousands of tensors.
            await asyncio.to_thread(layout.prepare, session.key_space.groups, sketches)
        except ValueError as error:
            raise HotKVError(Reason.INVALID_LAYOUT, f"layout.{error}") from error

    async def _open_memory(
        self, session: LiveSession, layout: Layout, order: DeviceOrder, fds: dict[str, int]
    ) -> SessionMemory:
        """Runs `open_session_memory` on a thread. If this coroutine is cancelled meanwhile, the
        memory is closed as soon as it is open."""
        loop = asyncio.get_running_loop()
        opening = loop.run_in_executor(
            None,
            open_session_memory,
            layout,
            order,
            fds,
            self._devices,
            session.cancel_transfers,
            session.key_space.tenant,
            lambda: session.closing,
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The session's stream has broken during the wait.
            opening.add_done_callback(
                lambda done: (
                    None if done.exception() else loop.run_in_executor(None, done.result().close)
                )
            )
            raise


def _check_first(session: LiveSession, layout: Layout) -> None:
    """Raises HotKVError if the session already has memory, or if its layout has device memory and
    the session has no link (connection on the descriptor socket)."""
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
