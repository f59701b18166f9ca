"""SessionService: opens a session for each stream of Connect, and serves its calls."""

import asyncio
import contextlib
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import hotkv_proto
from hotkv_proto.errors import HotKVError, Reason, check_most, invalid
from hotkv_proto.keys import KeySpace, signed_salt
from hotkv_proto.messages import fields
from hotkv_proto.messages.cache import load_response, packed_words, store_response
from hotkv_proto.messages.errors import error_detail
from hotkv_proto.messages.layout import (
    read_device_order,
    read_key_space,
    read_layout,
    read_sketches,
)
from hotkv_proto.messages.report_messages import memory_registered_message
from hotkv_proto.v1 import cache_pb2, session_pb2, session_pb2_grpc
from hotkv_proto.versions import (
    NEWEST_VERSION,
    OLDEST_VERSION,
    Feature,
    Role,
    agreed_features,
    agreed_version,
)
from hotkv_server.cache.values import EvictionNotice
from hotkv_server.logs import Throttle
from hotkv_server.node.capability import SessionCall
from hotkv_server.node.event_loop import Breaks
from hotkv_server.node.live_session import OUTBOX_MESSAGES, LiveSession, Notice, unread
from hotkv_server.node.node import Node
from hotkv_server.node.removals import NOTICE_BLOCKS
from hotkv_server.node.transfers import TransferEnd
from hotkv_server.security.identity import Peer
from hotkv_server.wire import calls
from hotkv_server.wire.edge import Edge, calls_of
from hotkv_server.wire.errors import abort, as_refusal
from hotkv_server.wire.guard.limits import Pace

log = logging.getLogger(__name__)
log.addFilter(Throttle())

Write = Callable[[session_pb2.ConnectResponse], Awaitable[None]]
"""Sends a message; waits while the client reads too slowly."""


# Always true: a call with a request id is answered once, before the next request is served. Only
# these are answered later: transfers; lookups and leases that wait for a tier; leases and
# residencies whose blocks must be compared with their checksums; calls that a capability answers
# with a task.


class SessionCalls:
    """Serves the calls on one session's stream.

    pace: delays answers to malformed messages.
    send: sends answers that are ready only after `handle` has returned; the flag says that it may
        wait for others.
    """

    def __init__(
        self,
        node: Node,
        session: LiveSession,
        pace: Pace,
        send: Callable[[session_pb2.ConnectResponse, bool], None],
    ) -> None:
        self._node = node
        self._session = session
        self._pace = pace
        self._send = send
        self._traceable = calls_of(node)
        # By the name of a message's field.
        self._functions: dict[str, SessionCall] = {
            "lookup": partial(self._traceable.lookup, node),
            "acquire_lease": partial(self._traceable.acquire, node),
            "reserve_blocks": partial(calls.reserve, node),
            "release_lease": partial(calls.release, node),
            "cancel_transfer": partial(calls.cancel, node),
            "report_use": partial(calls.report_use, node),
        }
        for one in node.capabilities:
            self._functions |= one.session_calls()

    def refused(self, error: Exception) -> session_pb2.ConnectResponse:
        return session_pb2.ConnectResponse(
            error=error_detail(as_refusal(self._node, error, self._session.name))
        )

    async def handle(
        self, request: session_pb2.ConnectRequest
    ) -> session_pb2.ConnectResponse | None:
        """A call without a result gets a `Pong`. None if the answer is sent later. Raises the
        call's errors."""
        node, session = self._node, self._session
        match request.WhichOneof("body"):
            case "load":
                load = self._traceable.load(node, session, request.load)
                # Without a reference to the request: its message may be large.
                load.add_done_callback(partial(self._answer_load, request.request_id))
                return None
            case "store":
                store = await self._traceable.store(node, session, request.store)
                groups = [run.group_index for run in request.store.runs]
                store.add_done_callback(partial(self._answer_store, request.request_id, groups))
                return None
            case "flush":
                return session_pb2.ConnectResponse(flushed=await calls.flush(node, session))
            case "ping":
                return session_pb2.ConnectResponse(pong=session_pb2.Pong())
            case "register_memory":
                memory = request.register_memory
                taken = await node.sessions.register_memory(
                    session,
                    read_layout(memory.layout),
                    read_device_order(memory.order),
                )
                return session_pb2.ConnectResponse(
                    memory_registered=memory_registered_message(*taken)
                )
            case "malformed":
                raise await self._slowed(request.error())
            case "open_session":
                raise invalid(
                    "open_session was sent twice; open another stream for another session"
                )
            case body if (call := self._functions.get(body or "")) is not None:
                assert body is not None
                return await self._served(request, body, call(session, getattr(request, body)))
            case _:
                raise invalid("body is empty or of a newer protocol")

    async def _served(
        self, request: session_pb2.ConnectRequest, body: str, answer: Any
    ) -> session_pb2.ConnectResponse | None:
        """Makes the stream's message from what a `SessionCall` returned; None if it is sent later.

        body: the message's field, and the answer's.
        """
        if inspect.isawaitable(answer) and not isinstance(answer, asyncio.Task):
            answer = await answer
        if isinstance(answer, asyncio.Task):
            answer.add_done_callback(partial(self._answer_task, request.request_id, body))
            return None
        if isinstance(answer, session_pb2.ConnectResponse):
            return answer
        if answer is None:
            return session_pb2.ConnectResponse(pong=session_pb2.Pong())
        return session_pb2.ConnectResponse(**{body: answer})

    async def _slowed(self, error: HotKVError) -> HotKVError:
        await self._pace.turn()
        return error

    def _answer_task(self, request_id: int, body: str, done: "asyncio.Task[Any]") -> None:
        """Sends nothing if the task was cancelled, or refused because its session has ended."""
        if done.cancelled():
            return
        if self._session.closing and isinstance(done.exception(), HotKVError):
            return
        try:
            response = session_pb2.ConnectResponse(**{body: done.result()})
        except Exception as error:  # noqa: BLE001 The client gets every failure as an answer.
            response = self.refused(error)
        self._answer(request_id, response)

    def _answer(
        self, request_id: int, response: session_pb2.ConnectResponse, *, may_wait: bool = False
    ) -> None:
        """With request id 0 the client wants no answer. `may_wait`: for others to go with it."""
        if request_id:
            response.request_id = request_id
            self._send(response, may_wait)

    def _answer_load(self, request_id: int, done: "asyncio.Future[TransferEnd]") -> None:
        if not done.cancelled():
            answer = load_response(done.result())
            self._answer(
                request_id,
                session_pb2.ConnectResponse(load=answer),
                may_wait=done.result().is_told,
            )

    def _answer_store(
        self, request_id: int, groups: list[int], done: "asyncio.Future[TransferEnd]"
    ) -> None:
        if not done.cancelled():
            end, session = done.result(), self._session
            if session.wants_evictions and not session.closing:
                # Notices of earlier evictions precede this answer, which must not report as
                # stored what was removed meanwhile.
                still = self._node.core.still_ready(
                    session.record.key_space_id, end.runs, end.results
                )
                end = replace(end, results=still)
            answer = store_response(end, groups)
            self._answer(
                request_id, session_pb2.ConnectResponse(store=answer), may_wait=end.is_told
            )


# Always true: requests are read one at a time, and none while the client has left many answers
# unread (`SessionOutbox.has_much`). The first message says that the session is open. An answer
# is never sent before a notice that came earlier.


LAST_WORDS_S = 2.0
UNHURRIED_S = 0.002
"""Longest wait of an answer that the client knows already."""
NOTICE_PAUSE_S = 0.02
"""Shortest pause between two messages with notices. Answers do not wait: waiting notices are
sent before them."""


UNREAD_ANSWERS, UNREAD_BYTES = 256, 4 << 20
"""While a client has left this much unread, no further request is read from it."""
KEPT_BYTES, SLOW_READER_S = 64 << 10, 5.0
"""A session ends if its client reads nothing for SLOW_READER_S while it has left more than
KEPT_BYTES or at least UNREAD_ANSWERS messages unread."""
OUTBOX_BYTES = 32 << 20


class SessionOutbox:
    """The queue of messages to a session's client, bounded in messages and bytes. The session ends
    if it is full, or the client reads too slowly (KEPT_BYTES).

    write: sends a message, and waits while the client reads too slowly.
    """

    def __init__(
        self,
        write: Write,
        on_end: Callable[[HotKVError], None],
    ) -> None:
        self._write = write
        self._on_end = on_end
        # Each with its size in bytes. The first of them are being written.
        self._messages: deque[tuple[session_pb2.ConnectResponse, int]] = deque()
        self._came: asyncio.Future[None] | None = None
        self._later: asyncio.TimerHandle | None = None
        self._unread_bytes = 0
        self._num_written = 0
        self._watch: asyncio.TimerHandle | None = None
        self._was_read = asyncio.Event()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"SessionOutbox({len(self._messages)} messages, {self._unread_bytes} bytes)"

    def put(self, message: session_pb2.ConnectResponse, *, may_wait: bool = False) -> None:
        """Does nothing after `close`. Ends the session if the queue is full. `may_wait`: for the
        next message, at most UNHURRIED_S."""
        if self._is_closed:
            return
        if len(self._messages) >= OUTBOX_MESSAGES:
            self._on_end(unread())
            return
        num_bytes = message.ByteSize()
        self._messages.append((message, num_bytes))
        self._unread_bytes += num_bytes
        if not may_wait:
            self._wake()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(UNHURRIED_S, self._wake)
        if self._unread_bytes > OUTBOX_BYTES:
            self._on_end(unread())
        elif self._watch is None and (self._unread_bytes > KEPT_BYTES or self.has_much()):
            self._look_later()

    def _wake(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    async def room(self) -> None:
        """Waits while the client has much unread."""
        while self.has_much():
            self._was_read.clear()
            await self._was_read.wait()

    async def send_all(self) -> None:
        """Runs until cancelled."""
        while True:
            while not self._messages:
                # Also woken for a message that has gone with an earlier one.
                self._came = asyncio.get_running_loop().create_future()
                await self._came
            await self._write(self._messages[0][0])
            self._unread_bytes -= self._messages.popleft()[1]
            self._num_written += 1
            self._was_read.set()

    async def drained(self, timeout_s: float) -> None:
        """Waits until all is written, at most `timeout_s`."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._emptied(), timeout_s)

    async def _emptied(self) -> None:
        while self._messages:
            self._was_read.clear()
            await self._was_read.wait()

    def close(self) -> None:
        """Ignores later messages; `send_all` still sends the queued ones."""
        self._is_closed = True
        self._wake()
        if self._watch is not None:
            self._watch.cancel()

    def drop(self) -> None:
        """To be called after `close`, when `send_all` has ended."""
        self._messages.clear()
        self._unread_bytes = 0

    def has_much(self) -> bool:
        """True if no further request is read from the client."""
        return len(self._messages) >= UNREAD_ANSWERS or self._unread_bytes >= UNREAD_BYTES

    def _look_later(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(
            SLOW_READER_S, self._judge, self._num_written
        )

    def _judge(self, num_written: int) -> None:
        """Ends the session if its client, with much unread, has read no message for
        SLOW_READER_S."""
        self._watch = None
        if self._unread_bytes > KEPT_BYTES or self.has_much():
            if self._num_written == num_written:
                self._on_end(unread())
            else:
                self._look_later()


class SessionStream:
    def __init__(self, node: Node, session: LiveSession, write: Write, pace: Pace) -> None:
        self._session = session
        self._outbox = SessionOutbox(write, self._end)
        self._calls = SessionCalls(node, session, pace, self._send)
        self._ended = asyncio.Event()
        self._why: HotKVError | None = None
        self._has_logged_refusal = False
        session.on_end = self._end

    async def run(
        self,
        requests: AsyncIterator[session_pb2.ConnectRequest],
        opened: session_pb2.ConnectResponse,
    ) -> HotKVError | None:
        """Serves the session until client or server ends it. Returns the reason if the server did.

        opened: the first message to send.
        """
        # First, even if notices have come while the session opened.
        self._outbox.put(opened)
        reader = asyncio.create_task(self._read(requests))
        endings = {
            reader,
            asyncio.create_task(self._outbox.send_all()),
            asyncio.create_task(self._ended.wait()),
        }
        notices = asyncio.create_task(self._forward_notices())
        try:
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                # The client has ended its requests, but may read the queued answers.
                await self._outbox.drained(LAST_WORDS_S)
        finally:
            self._outbox.close()
            for task in (*endings, notices):
                task.cancel()
            await asyncio.gather(*endings, notices, return_exceptions=True)
            # Free these now: the call stays open until the client reads the end of the stream.
            self._outbox.drop()
            while not self._session.notices.empty():
                self._session.notices.get_nowait()
        return self._why

    async def _read(self, requests: AsyncIterator[session_pb2.ConnectRequest]) -> None:
        # Requests that came together are read without a pause.
        breaks = Breaks()
        while True:
            await breaks.between()
            # Before the next request is read, as it may be large.
            if self._outbox.has_much():
                await self._outbox.room()
            request = await anext(requests, None)
            if request is None:
                return
            await self._serve(request)
            # Free it now: the next may come much later.
            del request

    async def _serve(self, request: session_pb2.ConnectRequest) -> None:
        try:
            response = await self._calls.handle(request)
        except Exception as error:  # noqa: BLE001 The client gets every failure as an answer.
            response = self._calls.refused(error)
            if not request.request_id and not self._has_logged_refusal:
                self._has_logged_refusal = True
                log.warning(
                    "refused without an answer session=%d: %s",
                    self._session.record.number,
                    response.error.message,
                )
        if response is not None and request.request_id:
            response.request_id = request.request_id
            self._send(response)

    def _end(self, why: HotKVError) -> None:
        self._why = self._why or why
        self._ended.set()

    def _send(self, message: session_pb2.ConnectResponse, may_wait: bool = False) -> None:
        """Queues waiting notices first."""
        if not self._session.notices.empty():
            self._send_notices([])
        self._outbox.put(message, may_wait=may_wait)

    async def _forward_notices(self) -> None:
        """Combines the notices of NOTICE_PAUSE_S into one message, as a session may get many."""
        while True:
            self._send_notices([await self._session.notices.get()])
            await asyncio.sleep(NOTICE_PAUSE_S)

    def _send_notices(self, notices: list[Notice]) -> None:
        """Sends all waiting notices too, evictions in few messages."""
        while not self._session.notices.empty():
            notices.append(self._session.notices.get_nowait())
        groups, num_blocks = list[cache_pb2.GroupHashes](), 0
        for notice in notices:
            if isinstance(notice, EvictionNotice):
                packed = packed_words(notice.hashes, self._session.key_space.hash_bytes)
                if groups and num_blocks + len(notice.hashes) > NOTICE_BLOCKS:
                    self._put_evicted(groups)
                    groups, num_blocks = [], 0
                groups.append(cache_pb2.GroupHashes(group_index=notice.group_index, hashes=packed))
                num_blocks += len(notice.hashes)
            else:
                drain = session_pb2.DrainNotice(deadline_ms=int(notice.deadline_s * 1000))
                self._outbox.put(session_pb2.ConnectResponse(drain_notice=drain))
        if groups:
            self._put_evicted(groups)

    def _put_evicted(self, groups: list[cache_pb2.GroupHashes]) -> None:
        notice = session_pb2.EvictionNotice(groups=groups)
        self._outbox.put(session_pb2.ConnectResponse(eviction_notice=notice))


# Always true: however the stream ends, its session is closed. A session acts for one tenant, if
# tenants are configured, and its peer has proven the right to. The engine's id and name then
# begin with the tenant's name, so that other tenants' engines can't name its leases.


FIRST_MESSAGE_TIMEOUT_S = 10.0
MAX_MODEL_NAMES = 16


class SessionOpener:
    """Opens and runs the sessions of a listener, over gRPC or the lane."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._node = edge.node
        self.unread_ends = edge.node.sessions.unread_ends

    async def serve(
        self,
        requests: AsyncIterator[session_pb2.ConnectRequest],
        write: Write,
        context: Any,
        who: str,
        on_open: Callable[[str], None] = lambda owner: None,
    ) -> HotKVError | None:
        """Serves a session from its first request to its end. Returns why the server refused or
        ended it; None if the client ended it.

        context: the connection, by which `Edge.identify` knows the peer.
        on_open: gets the session's owner once it is open.
        """
        try:
            with self._edge.guests.stay():
                first = await _first(requests)
            opening = first.open_session
            who = (
                f"{who} engine={(opening.engine_name or opening.engine_id)[:64]!r} "
                f"tenant={opening.key_space.tenant[:64]!r}"
            )
            peer = self._edge.identify(opening, context)
            who = f"{who} {peer}"
            session = await self._open(opening, peer)
        except Exception as error:  # noqa: BLE001 The client gets every failure as an answer.
            await self._edge.pace.turn()
            return as_refusal(self._node, error, who)
        # Now: after the session its key space may be forgotten.
        on_open(session.record.owner)
        stream = SessionStream(self._node, session, write, self._edge.pace)
        why: HotKVError | None = None
        try:
            why = await stream.run(requests, self._opened(first, session))
        finally:
            # Shielded: a broken stream can't interrupt the closing.
            await asyncio.shield(self._node.sessions.close(session))
        if why is None:
            return None
        log.warning("session ended number=%d: %s", session.record.number, why.message)
        return as_refusal(self._node, why, session.name)

    async def _open(self, opening: session_pb2.OpenSession, peer: Peer) -> LiveSession:
        _version(opening)
        try:
            role = Role(opening.role).name.lower()
        except ValueError:
            raise invalid(
                f"role is {opening.role}; allowed are 1 (scheduler), 2 (worker) and 3 (tool)"
            ) from None
        fields.name("engine_id", opening.engine_id)
        fields.name("client_name", opening.client_name)
        fields.name("engine_name", opening.engine_name)
        check_most(MAX_MODEL_NAMES, len(opening.model_names), "model_names has {} entries")
        for name in opening.model_names:
            fields.name("model_names", name)
        key_space, sketches = (
            read_key_space(opening.key_space),
            read_sketches(opening.sketches),
        )
        tenant = self._edge.access.admit(peer, key_space.tenant)
        self._check_unread(opening.engine_id if tenant is None else tenant.name)
        engine_id, engine_name = (
            text if tenant is None or not text else f"{tenant.name}/{text}"
            for text in (opening.engine_id, opening.engine_name)
        )
        session = await self._node.sessions.open(
            engine_id, role, key_space, opening.client_name, sketches,
            wants_evictions=not opening.without_eviction_notices,
            engine_name=engine_name,
            model_names=opening.model_names,
            max_of_tenant=0 if tenant is None else tenant.max_sessions,
        )  # fmt: skip
        if tenant is not None:
            session.peer, session.maps_arena = peer, False
            try:
                # Again: the settings may have changed during the wait. From here on, a change
                # ends the session.
                tenant = self._edge.access.admit(peer, key_space.tenant)
            except HotKVError:
                await self._node.sessions.close(session)
                raise
        features = agreed_features(opening.features)
        session.knows_words = Feature.RESIDENCY in features
        session.knows_tiers = Feature.TIERS in features
        if tenant is not None:
            session.maps_table = tenant.sees_table
            log.info(
                "session admitted number=%d tenant=%r %s", session.record.number, tenant.name, peer
            )
        return session

    def _check_unread(self, owner: str) -> None:
        if not self.unread_ends.room(owner):
            what = "ended sessions with unread answers"
            raise HotKVError(
                Reason.OVERLOADED, f"{self.unread_ends.refusal(owner, what)}; read them"
            )

    def _opened(
        self, first: session_pb2.ConnectRequest, session: LiveSession
    ) -> session_pb2.ConnectResponse:
        opening = first.open_session
        features = agreed_features(opening.features)
        if self._node.tiers is None or not self._node.tiers.names:
            features -= {Feature.TIERS}
        if not self._node.offers.engines_publish_events:
            features -= {Feature.EVENTS}
        return session_pb2.ConnectResponse(
            request_id=first.request_id,
            session_opened=session_pb2.SessionOpened(
                protocol_version=_version(opening),
                session_id=session.secret_id,
                key_space_id=session.record.key_space_id,
                epoch=self._node.epoch,
                has_descriptor_socket=self._edge.has_descriptor_socket,
                server_name=f"hotkv-server {hotkv_proto.__version__}",
                wants_token_ids=self._node.offers.wants_token_ids,
                features=[session_pb2.Feature.ValueType(int(f)) for f in sorted(features)],
                salts=_salts(opening, session.key_space),
                stored_byte_count=self._node.core.used_bytes(session.record.key_space_id),
            ),
        )


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """Implements the service SessionService of session.proto."""

    def __init__(self, opener: SessionOpener) -> None:
        self._opener = opener

    async def Connect(  # type: ignore[override]
        self, request_iterator: AsyncIterator[session_pb2.ConnectRequest], context: Any
    ) -> None:
        owners = list[str]()
        why = await self._opener.serve(
            request_iterator, context.write, context, f"peer={context.peer()}", owners.append
        )
        unread = self._opener.unread_ends
        for owner in owners:
            # gRPC ends the call only when its client has read the end.
            unread.take(owner, 1)
            context.add_done_callback(lambda _, owner=owner: unread.give(owner, 1))
        if why is not None:
            await abort(context, why)


def _version(opening: session_pb2.OpenSession) -> int:
    """Raises VERSION_MISMATCH."""
    oldest = opening.protocol_version
    newest = opening.newest_protocol_version or oldest
    version = agreed_version(oldest, newest)
    if version is None:
        raise HotKVError(
            Reason.VERSION_MISMATCH,
            f"protocol_version is {oldest}, newest_protocol_version {newest}; this server "
            f"{hotkv_proto.__version__} speaks {OLDEST_VERSION} to {NEWEST_VERSION}: upgrade the "
            "older side",
        )
    return version


def _salts(opening: session_pb2.OpenSession, space: KeySpace) -> list[int]:
    """What the client mixes into each hash that it looks up in the block table, so that equal
    hashes of two groups stay distinct: for each group, then for each kind of sketch that it
    declares."""
    salts = [
        *map(space.group_salt, range(len(space.groups))),
        *map(space.sketch_salt, read_sketches(opening.sketches)),
    ]
    return [signed_salt(salt) for salt in salts]


async def _first(requests: AsyncIterator[session_pb2.ConnectRequest]) -> session_pb2.ConnectRequest:
    """The first message must be `open_session`, within FIRST_MESSAGE_TIMEOUT_S; else raises
    INVALID_FIELD."""
    try:
        first = await asyncio.wait_for(anext(requests), FIRST_MESSAGE_TIMEOUT_S)
    except (StopAsyncIteration, asyncio.TimeoutError):
        first = session_pb2.ConnectRequest()
    if first.WhichOneof("body") != "open_session":
        raise invalid("open_session is missing; send it as the first message")
    return first
