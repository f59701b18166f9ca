"""SessionService: one stream is one session.

Calls are answered in the order they come, except transfers, which are answered when they end, and
leases whose blocks have to be compared with their check values first. While a client has many
answers to read its calls wait; one that does not read is closed. However the stream ends, the
session is settled and closed.

A session acts for one tenant. Where there are tenants its peer has proven that it may, and its
engine id is made the tenant's own: no other tenant can name its leases.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import hotkv
from hotkv.errors import HotKVError, Reason
from hotkv.keys import KeySpace, signed_salt
from hotkv.v1 import cache_pb2, session_pb2, session_pb2_grpc
from hotkv.versions import (
    NEWEST_VERSION,
    OLDEST_VERSION,
    Feature,
    agreed_features,
    agreed_version,
)
from hotkv_server.core.values import EvictionNotice
from hotkv_server.rpc import calls, convert
from hotkv_server.rpc.errors import abort, as_refusal, detail
from hotkv_server.rpc.guests import Guests
from hotkv_server.rpc.throttle import Pace
from hotkv_server.runtime.node import NOTICE_BLOCKS, Node
from hotkv_server.runtime.session import OUTBOX_MESSAGES, UNREAD, LiveSession, Notice
from hotkv_server.runtime.transfers import TransferEnd
from hotkv_server.security.identity import AccessControl, Peer, Tenant

log = logging.getLogger(__name__)

FIRST_MESSAGE_TIMEOUT_S = 10.0
LAST_WORDS_S = 2.0
UNREAD_ANSWERS, UNREAD_BYTES = 256, 4 << 20
"""A client that has so many to read, or so much, is asked for nothing more until it has read
some."""
KEPT_BYTES, SLOW_READER_S = 64 << 10, 5.0
"""One that leaves more than this unread, and reads none of it for so long, is closed."""
OUTBOX_BYTES = 32 << 20
NOTICE_PAUSE_S = 0.02
"""Between two messages with notices that nothing else calls for."""

Identify = Callable[[session_pb2.OpenSession, Any], Peer]
"""What the peer of a call has proven, given its first message and its context. Raises HotKVError
for a proof that is of no use."""


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """See session.proto."""

    def __init__(
        self,
        node: Node,
        gate: AccessControl,
        identify: Identify,
        pace: Pace,
        guests: Guests,
        *,
        has_descriptor_socket: bool,
    ) -> None:
        self._node = node
        self._gate = gate
        self._pace = pace
        self._guests = guests
        self._identify = identify
        self._has_descriptor_socket = has_descriptor_socket

    async def Connect(  # type: ignore[override]
        self, request_iterator: AsyncIterator[session_pb2.ConnectRequest], context: Any
    ) -> None:
        who = f"peer={context.peer()}"
        try:
            with self._guests.stay():
                first = await _first(request_iterator)
            who = (
                f"{who} engine={first.open_session.engine_id[:64]!r} "
                f"tenant={first.open_session.key_space.tenant[:64]!r}"
            )
            peer = self._identify(first.open_session, context)
            who = f"{who} {peer}"
            session = await self._open(first.open_session, peer)
        except Exception as error:  # noqa: BLE001 The edge of the stream: every failure is an answer.
            await self._pace.turn()
            await abort(context, as_refusal(self._node, error, who))
        stream = _Stream(self._node, session, context, self._pace)
        why: HotKVError | None = None
        try:
            why = await stream.run(request_iterator, self._opened(first, session))
        finally:
            # Shielded, so that a broken stream cannot cut the settling short.
            await asyncio.shield(self._node.close_session(session))
        if why is not None:
            # Last, because it waits for the client to read.
            log.warning("session ended number=%d: %s", session.record.number, why.message)
            await abort(context, as_refusal(self._node, why, session.name))

    async def _open(self, opening: session_pb2.OpenSession, peer: Peer) -> LiveSession:
        _version(opening)
        if opening.role not in convert.ROLES.values():
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"role is {opening.role}; allowed are 1 (scheduler), 2 (worker) and 3 (tool)",
            )
        convert.name("engine_id", opening.engine_id)
        convert.name("client_name", opening.client_name)
        key_space, representations = (
            convert.key_space(opening.key_space),
            convert.representations(opening.representations),
        )
        tenant = self._gate.admit(peer, key_space.tenant)
        self._check_sessions(tenant)
        engine_id = (
            opening.engine_id
            if tenant is None or not opening.engine_id
            else f"{tenant.name}/{opening.engine_id}"
        )
        role = convert.enum_word(session_pb2.SessionRole, opening.role)
        session = await self._node.open_session(
            engine_id, role, key_space, opening.client_name, representations,
            hears_evictions=not opening.without_eviction_notices,
        )  # fmt: skip
        if tenant is not None:
            session.maps_arena, session.maps_table = False, tenant.sees_table
            log.info(
                "session admitted number=%d tenant=%r %s", session.record.number, tenant.name, peer
            )
        return session

    def _check_sessions(self, tenant: Tenant | None) -> None:
        if tenant is None or not tenant.max_sessions:
            return
        num_open = sum(
            session.key_space.tenant == tenant.name for session in self._node.sessions.values()
        )
        if num_open >= tenant.max_sessions:
            raise HotKVError(
                Reason.OVERLOADED,
                (
                    f"{num_open} sessions of this tenant are open, which is all it may have; close "
                    "some first"
                ),
            )

    def _opened(
        self, first: session_pb2.ConnectRequest, session: LiveSession
    ) -> session_pb2.ConnectResponse:
        opening = first.open_session
        features = agreed_features(opening.features)
        return session_pb2.ConnectResponse(
            request_id=first.request_id,
            session_opened=session_pb2.SessionOpened(
                protocol_version=_version(opening),
                session_id=session.secret_id,
                key_space_id=session.record.key_space_id,
                epoch=self._node.epoch,
                has_descriptor_socket=self._has_descriptor_socket,
                server_name=f"hotkv-server {hotkv.__version__}",
                wants_token_ids=self._node.events.publisher is not None,
                features=[session_pb2.Feature.ValueType(int(f)) for f in sorted(features)],
                salts=_salts(opening, session.key_space) if Feature.TABLE_SALTS in features else (),
            ),
        )


def _version(opening: session_pb2.OpenSession) -> int:
    """The protocol version of a session. Raises VERSION_MISMATCH."""
    oldest = opening.protocol_version
    newest = opening.newest_protocol_version or oldest
    version = agreed_version(oldest, newest)
    if version is None:
        raise HotKVError(
            Reason.VERSION_MISMATCH,
            f"protocol_version is {oldest}, newest_protocol_version {newest}; this server "
            f"{hotkv.__version__} speaks {OLDEST_VERSION} to {NEWEST_VERSION}: upgrade the older "
            "side",
        )
    return version


def _salts(opening: session_pb2.OpenSession, space: KeySpace) -> list[int]:
    """Salts of the block table, as signed numbers, by group index as the session names it."""
    salts = [
        *map(space.group_salt, range(len(space.groups))),
        *map(space.representation_salt, convert.representations(opening.representations)),
    ]
    return [signed_salt(salt) for salt in salts]


async def _first(requests: AsyncIterator[session_pb2.ConnectRequest]) -> session_pb2.ConnectRequest:
    """The message that opens the session, without a proof that it may. Raises INVALID_FIELD."""
    try:
        first = await asyncio.wait_for(anext(requests), FIRST_MESSAGE_TIMEOUT_S)
    except (StopAsyncIteration, asyncio.TimeoutError):
        first = session_pb2.ConnectRequest()
    if first.WhichOneof("body") != "open_session":
        raise HotKVError(
            Reason.INVALID_FIELD, "open_session is missing; send it as the first message"
        )
    return first


class _Stream:
    """The reading and writing of one session's stream."""

    def __init__(self, node: Node, session: LiveSession, context: Any, pace: Pace) -> None:
        self._node = node
        self._session = session
        self._context = context
        self._pace = pace
        self._outbox: asyncio.Queue[session_pb2.ConnectResponse] = asyncio.Queue(OUTBOX_MESSAGES)
        self._unread_bytes = 0
        self._num_written = 0
        self._watch: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        self._why: HotKVError | None = None
        self._was_read = asyncio.Event()
        self._has_logged_refusal = False
        session.on_end = self._end

    async def run(
        self,
        requests: AsyncIterator[session_pb2.ConnectRequest],
        opened: session_pb2.ConnectResponse,
    ) -> HotKVError | None:
        """Until the client ends the stream, or the server does; why for the latter."""
        self._send(opened)
        reader = asyncio.create_task(self._read(requests))
        endings = {
            reader,
            asyncio.create_task(self._write()),
            asyncio.create_task(self._ended.wait()),
        }
        notices = asyncio.create_task(self._forward_notices())
        try:
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                # What is on its way is still sent, to a client that reads.
                await asyncio.wait({asyncio.create_task(self._outbox.join())}, timeout=LAST_WORDS_S)
        finally:
            if self._watch is not None:
                self._watch.cancel()
            for task in (*endings, notices):
                task.cancel()
            await asyncio.gather(*endings, notices, return_exceptions=True)
        return self._why

    async def _read(self, requests: AsyncIterator[session_pb2.ConnectRequest]) -> None:
        while True:
            # Before a message is taken: it may be large.
            while self._has_much_unread():
                self._was_read.clear()
                await self._was_read.wait()
            request = await anext(requests, None)
            if request is None:
                return
            self._session.heard_s = time.monotonic()
            try:
                response = await self._handle(request)
            except Exception as error:  # noqa: BLE001 The edge of the stream: every failure is an answer.
                response = self._refused(error)
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
            # The next one may be long in coming.
            del request, response

    def _refused(self, error: Exception) -> session_pb2.ConnectResponse:
        return session_pb2.ConnectResponse(
            error=detail(as_refusal(self._node, error, self._session.name))
        )

    async def _write(self) -> None:
        while True:
            message = await self._outbox.get()
            await self._context.write(message)
            self._unread_bytes -= message.ByteSize()
            self._num_written += 1
            self._outbox.task_done()
            self._was_read.set()
            del message

    def _end(self, why: HotKVError) -> None:
        self._why = self._why or why
        self._ended.set()

    def _has_much_unread(self) -> bool:
        return self._outbox.qsize() >= UNREAD_ANSWERS or self._unread_bytes >= UNREAD_BYTES

    def _judge(self, num_written: int) -> None:
        """Closes the session if its client has read nothing since so much was written, and much
        waits."""
        self._watch = None
        if self._unread_bytes > KEPT_BYTES or self._has_much_unread():
            if self._num_written == num_written:
                self._end(UNREAD)
            else:
                self._watch = asyncio.get_running_loop().call_later(
                    SLOW_READER_S, self._judge, self._num_written
                )

    def _send(self, message: session_pb2.ConnectResponse) -> None:
        """After all notices from before."""
        if not self._session.notices.empty():
            self._send_notices([])
        self._put(message)

    def _put(self, message: session_pb2.ConnectResponse) -> None:
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._end(UNREAD)
            return
        self._unread_bytes += message.ByteSize()
        if self._unread_bytes > OUTBOX_BYTES:
            self._end(UNREAD)
        elif self._watch is None and (self._unread_bytes > KEPT_BYTES or self._has_much_unread()):
            self._watch = asyncio.get_running_loop().call_later(
                SLOW_READER_S, self._judge, self._num_written
            )

    async def _forward_notices(self) -> None:
        """One store may evict blocks that many sessions know: they are told together of what goes
        in a while."""
        while True:
            self._send_notices([await self._session.notices.get()])
            await asyncio.sleep(NOTICE_PAUSE_S)

    def _send_notices(self, notices: list[Notice]) -> None:
        """These and all that wait, with those of evictions in few messages."""
        while not self._session.notices.empty():
            notices.append(self._session.notices.get_nowait())
        groups, num_blocks = list[cache_pb2.GroupHashes](), 0
        for notice in notices:
            if isinstance(notice, EvictionNotice):
                packed = convert.unpadded(notice.hashes, self._session.key_space.hash_bytes)
                if groups and num_blocks + len(notice.hashes) > NOTICE_BLOCKS:
                    self._put_evicted(groups)
                    groups, num_blocks = [], 0
                groups.append(cache_pb2.GroupHashes(group_index=notice.group_index, hashes=packed))
                num_blocks += len(notice.hashes)
            else:
                self._put(
                    session_pb2.ConnectResponse(
                        drain_notice=session_pb2.DrainNotice(
                            deadline_ms=int(notice.deadline_s * 1000)
                        )
                    )
                )
        if groups:
            self._put_evicted(groups)

    def _put_evicted(self, groups: list[cache_pb2.GroupHashes]) -> None:
        self._put(
            session_pb2.ConnectResponse(eviction_notice=session_pb2.EvictionNotice(groups=groups))
        )

    async def _handle(
        self, request: session_pb2.ConnectRequest
    ) -> session_pb2.ConnectResponse | None:
        node, session = self._node, self._session
        match request.WhichOneof("body"):
            case "lookup":
                return session_pb2.ConnectResponse(
                    lookup=calls.lookup(node, session, request.lookup)
                )
            case "acquire_lease":
                acquired = calls.acquire(node, session, request.acquire_lease)
                if not isinstance(acquired, asyncio.Task):
                    return session_pb2.ConnectResponse(acquire_lease=acquired)
                acquired.add_done_callback(lambda done: self._answer_lease(request, done))
                return None
            case "reserve_blocks":
                return session_pb2.ConnectResponse(
                    reserve_blocks=await calls.reserve(node, session, request.reserve_blocks)
                )
            case "release_lease":
                return session_pb2.ConnectResponse(
                    release_lease=calls.release(node, session, request.release_lease)
                )
            case "load":
                load = calls.load(node, session, request.load)
                # What answers a transfer does not keep its message.
                load.add_done_callback(
                    partial(self._answer_load, request.request_id, request.load.transfer_id)
                )
                return None
            case "store":
                store = await calls.store(node, session, request.store)
                groups = [run.group_index for run in request.store.runs]
                store.add_done_callback(
                    partial(
                        self._answer_store, request.request_id, request.store.transfer_id, groups
                    )
                )
                return None
            case "cancel_transfer":
                return session_pb2.ConnectResponse(
                    cancel_transfer=calls.cancel(node, session, request.cancel_transfer)
                )
            case "report_use":
                await calls.report_use(node, session, request.report_use)
                return None
            case "create_sequence":
                return session_pb2.ConnectResponse(
                    create_sequence=calls.create_sequence(node, session, request.create_sequence)
                )
            case "append_blocks":
                return session_pb2.ConnectResponse(
                    append_blocks=calls.append_blocks(node, session, request.append_blocks)
                )
            case "delete_sequence":
                return session_pb2.ConnectResponse(
                    delete_sequence=await calls.delete_sequence(
                        node, session, request.delete_sequence
                    )
                )
            case "report_sparse":
                calls.report_sparse(node, session, request.report_sparse)
                return None
            case "flush":
                return session_pb2.ConnectResponse(flushed=await calls.flush(node, session))
            case "ping":
                return session_pb2.ConnectResponse(pong=session_pb2.Pong())
            case "register_memory":
                memory = request.register_memory
                taken = await node.register_memory(
                    session, convert.layout(memory.layout), convert.device_order(memory.order)
                )
                return session_pb2.ConnectResponse(
                    memory_registered=convert.memory_registered(*taken)
                )
            case "malformed":
                raise await self._slowed(request.error)
            case "open_session":
                raise HotKVError(
                    Reason.INVALID_FIELD,
                    "open_session was sent twice; open another stream for another session",
                )
            case _:
                raise HotKVError(Reason.INVALID_FIELD, "body is empty or of a newer protocol")

    async def _slowed(self, error: HotKVError) -> HotKVError:
        """The error, when it may be answered."""
        await self._pace.turn()
        return error

    def _answer_lease(
        self,
        request: session_pb2.ConnectRequest,
        done: "asyncio.Task[cache_pb2.AcquireLeaseResponse]",
    ) -> None:
        if done.cancelled():
            return
        try:
            answer = session_pb2.ConnectResponse(acquire_lease=done.result())
        except Exception as error:  # noqa: BLE001 The edge of the stream: every failure is an answer.
            answer = self._refused(error)
        answer.request_id = request.request_id
        self._send(answer)

    def _answer_load(
        self, request_id: int, transfer_id: str, done: "asyncio.Future[TransferEnd]"
    ) -> None:
        if not done.cancelled():
            answer = convert.load_response(transfer_id, done.result())
            self._send(session_pb2.ConnectResponse(request_id=request_id, load=answer))

    def _answer_store(
        self,
        request_id: int,
        transfer_id: str,
        groups: list[int],
        done: "asyncio.Future[TransferEnd]",
    ) -> None:
        if not done.cancelled():
            answer = convert.store_response(transfer_id, groups, done.result())
            self._send(session_pb2.ConnectResponse(request_id=request_id, store=answer))
