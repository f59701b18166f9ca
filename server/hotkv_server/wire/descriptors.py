"""The descriptor socket: issues tickets, receives descriptors of engine memory, and sends read-only
descriptors of arena and block table, by SCM_RIGHTS. Users in `arena_writers` get a writable
descriptor of the arena. docs/wire.md has the protocol.

A connection has one request. One asks for a ticket, by which the peer proves its user (SO_PEERCRED)
when it opens a session. One passes descriptors of a session's CUDA memory. One links a session: it
has the descriptors of the session's files, and its connection stays open.

Always true: the server closes a link only after its last access to the session's memory, and the
kernel closes it when this process dies, so a client whose link ends may reuse its memory. A
connection without a valid request is a fault of its peer. Peers with too many faults are not
served for some time; the socket pauses after it has refused peers, and if all together have too
many faults. A turn of the event loop answers one request, or accepts until one peer is served.
"""

import asyncio
import logging
import os
import resource
import socket
import time
from collections import Counter
from pathlib import Path

from google.protobuf.message import DecodeError

from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_proto.messages import fields
from hotkv_proto.messages.errors import error_detail
from hotkv_proto.v1 import session_pb2
from hotkv_proto.words import WORD_COUNT, words_offset_bytes
from hotkv_server.logs import Throttle
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from hotkv_server.security.identity import AccessControl, Peer, Tickets
from hotkv_server.security.path_checks import check_memory
from hotkv_server.wire.errors import as_refusal
from hotkv_server.wire.guard import peers
from hotkv_server.wire.guard.limits import FaultBound

log = logging.getLogger(__name__)
log.addFilter(Throttle())

MAX_DESCRIPTORS = 64
MAX_PACKET_BYTES = 65536
MAX_PENDING = 1024
MAX_PENDING_OF_USER = 256
REQUEST_TIMEOUT_S = 10.0
ACCEPT_PAUSE_S = 0.5
FAULT_PAUSE_S = 0.005
MAX_ACCEPTS = 16
"""Most connections that a turn of the event loop accepts; all but the last were refused."""
SHARE_OF_PEER = 0.4
"""Of `faults_per_s`, for one process."""
ALL = "all peers"
SPARE_DESCRIPTORS = 256
"""Reserved for connections, so that the files of clients' memory can't use up all descriptors.
At most a quarter of the process's limit."""


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class DescriptorServer:
    """Serves the descriptor socket at `path` until it is closed.

    mode: permissions of the socket's file.
    allowed_uids: may link sessions even if no tenant lists them.
    arena_writers: get a writable descriptor of the arena, if their sessions may map it.

    The two may be replaced; a change affects only later links.
    """

    def __init__(
        self,
        node: Node,
        path: Path,
        mode: int,
        allowed_uids: frozenset[int],
        access: AccessControl,
        tickets: Tickets,
        faults_per_s: float,
        arena_writers: frozenset[int] = frozenset(),
    ) -> None:
        self._node = node
        self._path = path
        self.allowed_uids = allowed_uids
        self.arena_writers = arena_writers
        self._access = access
        self._tickets = tickets
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(str(path))
        os.chmod(path, mode)
        self._listener.listen(MAX_PENDING)
        # Connections without a request so far, by task: user ids, the oldest first.
        self._pending: dict[asyncio.Task[None], int] = {}
        self._pending_of_user: Counter[int] = Counter()
        self._faults = FaultBound(SHARE_OF_PEER * faults_per_s)
        self._all_faults = FaultBound(faults_per_s)
        self._answering = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._paused: asyncio.TimerHandle | None = None
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_fd = limit - min(SPARE_DESCRIPTORS, limit // 4)
        self._listen()

    def _listen(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Links of live sessions stay open."""
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for task in list(self._pending):
            task.cancel()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        if self._answering.locked():
            return  # Requests are answered first. The loop calls again in the next turn.
        pause_s = FAULT_PAUSE_S if self._all_faults.is_over(ALL, time.monotonic()) else 0.0
        try:
            for _ in range(MAX_ACCEPTS):
                if self._admit(self._listener.accept()[0]):
                    break
                pause_s = FAULT_PAUSE_S
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass
        except OSError as error:
            # No free descriptor: an immediate retry would fail again, in an endless loop.
            pause_s = ACCEPT_PAUSE_S
            log.error("descriptor socket: can't accept, tries again in %.1f s: %s", pause_s, error)
            self._node.refusals[Reason.OVERLOADED] += 1
        if pause_s:
            self._pause(pause_s)

    def _admit(self, connection: socket.socket) -> bool:
        """Begins to serve a connection. Returns False if it was refused, and is closed."""
        now_s = time.monotonic()
        try:
            process = peers.process_of(connection)
            is_over = self._faults.is_over(process, now_s) or len(self._pending) >= MAX_PENDING
            peer = None if is_over else peers.of_socket(connection)
        except OSError:
            connection.close()
            return False
        if peer is None:
            self._node.refusals[Reason.OVERLOADED] += 1
            connection.close()
            return False
        connection.setblocking(False)
        if self._pending_of_user[peer.uid] >= MAX_PENDING_OF_USER:
            self._node.refusals[Reason.OVERLOADED] += 1
            next(task for task, uid in self._pending.items() if uid == peer.uid).cancel()
        self._pending_of_user[peer.uid] += 1
        task = self._loop.create_task(self._serve(connection, process, peer))
        self._pending[task] = peer.uid
        task.add_done_callback(self._forget)
        return True

    def _pause(self, for_s: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._paused = self._loop.call_later(for_s, self._listen)

    def _forget(self, task: "asyncio.Task[None]") -> None:
        uid = self._pending.pop(task)
        self._pending_of_user[uid] -= 1
        if not self._pending_of_user[uid]:
            del self._pending_of_user[uid]

    async def _serve(
        self, connection: socket.socket, process: tuple[int, int, int], peer: Peer
    ) -> None:
        linked, is_fault = False, True
        try:
            await asyncio.wait_for(self._readable(connection), REQUEST_TIMEOUT_S)
            async with self._answering:
                linked, is_fault = self._answer(connection, peer)
                await asyncio.sleep(0)  # The next answer comes in another turn.
        except (asyncio.TimeoutError, OSError) as error:
            log.warning("descriptor socket: a peer sent no request: %s %s", peer, error)
        finally:
            if is_fault:
                now_s = time.monotonic()
                self._faults.count(process, now_s)
                self._all_faults.count(ALL, now_s)
            if not linked:
                connection.close()

    async def _readable(self, connection: socket.socket) -> None:
        ready = self._loop.create_future()
        self._loop.add_reader(connection.fileno(), _resolve, ready)
        try:
            await ready
        finally:
            self._loop.remove_reader(connection.fileno())

    def _answer(self, connection: socket.socket, peer: Peer) -> tuple[bool, bool]:
        """Returns whether the connection is now a session's link, to stay open, and whether it
        is a fault of the peer."""
        fds: list[int] = []
        kept: set[int] = set()
        try:
            packet, fds, message_flags, _ = socket.recv_fds(
                connection, MAX_PACKET_BYTES, MAX_DESCRIPTORS
            )
            if not packet and not fds:
                log.info("descriptor socket: the peer left before it asked")
                return False, True
            if message_flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
                raise HotKVError(
                    Reason.TOO_LARGE,
                    (
                        f"the packet is longer than {MAX_PACKET_BYTES} bytes or carries over "
                        f"{MAX_DESCRIPTORS} descriptors"
                    ),
                )
            if peer.uid not in self.allowed_uids and not self._access.may_link(peer):
                raise HotKVError(
                    Reason.NOT_ALLOWED,
                    (
                        f"user id {peer.uid} may not link; allow it with security.allowed_uids, or "
                        "list it in one of security.tenants"
                    ),
                )
            if fds and max(fds) >= self._max_fd:
                raise HotKVError(
                    Reason.OVERLOADED,
                    (
                        "the server has nearly all descriptors in use that it may have; raise its "
                        "limit (LimitNOFILE, ulimit -n)"
                    ),
                )
            request = self._parse(packet)
            if request.wants_ticket:
                connection.send(
                    session_pb2.LinkResponse(
                        ticket=self._tickets.issue(peer, time.monotonic())
                    ).SerializeToString()
                )
                return False, False
            session = self._node.sessions.get(request.session_id)
            self._access.admit(peer, session.key_space.tenant)
            if request.backing_ids:
                self._take_backings(session, request, fds, kept)
                connection.send(session_pb2.LinkResponse(linked=True).SerializeToString())
                return False, False
            self._take(session, request, fds, kept)
            try:
                self._send(connection, session, peer)
            except OSError:
                session.forget(request.handle_ids)
                raise
            session.close_link = connection.close
            return True, False
        except ConnectionError:
            log.info("descriptor socket: the peer left before the answer")
            return False, True
        except Exception as error:  # noqa: BLE001 The peer gets every failure as an answer.
            refusal = as_refusal(self._node, error, f"descriptor socket {peer}")
            try:
                connection.send(
                    session_pb2.LinkResponse(error=error_detail(refusal)).SerializeToString()
                )
            except OSError:
                log.info("descriptor socket: the peer left before the answer")
            return False, True
        finally:
            for fd in set(fds) - kept:
                os.close(fd)

    def _take(
        self, session: LiveSession, request: session_pb2.LinkRequest, fds: list[int], kept: set[int]
    ) -> None:
        """Passes a link request's descriptors to the session, which owns none if this raises.

        kept: gets those that the caller must not close: the session owns or has closed them.
        """
        if len(request.handle_ids) != len(fds) or len(set(request.handle_ids)) != len(fds):
            raise invalid(
                f"handle_ids names {len(request.handle_ids)} handles for {len(fds)} descriptors"
            )
        if session.close_link is not None:
            raise HotKVError(Reason.DUPLICATE_ID, "session_id has a link already")
        for handle_id, fd in zip(request.handle_ids, fds, strict=True):
            check_memory(fd, fields.identifier("handle_ids", handle_id))
        received: list[str] = []
        try:
            for handle_id, fd in zip(request.handle_ids, fds, strict=True):
                kept.add(fd)
                session.receive(handle_id, fd)
                received.append(handle_id)
        except (HotKVError, ValueError, OSError) as error:
            session.forget(received)
            raise (
                error
                if isinstance(error, HotKVError)
                else HotKVError(Reason.INVALID_LAYOUT, f"handle_ids: {error}")
            ) from error

    def _take_backings(
        self, session: LiveSession, request: session_pb2.LinkRequest, fds: list[int], kept: set[int]
    ) -> None:
        """As `_take`, for descriptors of device memory, which the driver judges when it maps
        them."""
        named = request.backing_ids
        if request.handle_ids or len(named) != len(fds) or len(set(named)) != len(fds):
            raise invalid(
                f"backing_ids names {len(named)} backings for {len(fds)} descriptors, beside "
                f"{len(request.handle_ids)} handle_ids; name each descriptor once, and files in "
                "the link"
            )
        if max(fds) >= self._max_fd // 2:
            raise HotKVError(
                Reason.OVERLOADED,
                "descriptors of device memory that wait for their registration may use half of "
                "those that the server may have; raise its limit (LimitNOFILE, ulimit -n)",
            )
        ids = [fields.identifier("backing_ids", one) for one in named]
        session.receive_backings(dict(zip(ids, fds, strict=True)))
        kept.update(fds)

    def _parse(self, packet: bytes) -> session_pb2.LinkRequest:
        try:
            return session_pb2.LinkRequest.FromString(packet)
        except DecodeError as error:
            raise invalid("the packet is no LinkRequest") from error

    def _send(self, connection: socket.socket, session: LiveSession, peer: Peer) -> None:
        writes_arena = session.maps_arena and peer.uid in self.arena_writers
        arena, table = self._node.memory.open_for_engine(writes_arena)
        try:
            memory, fds = self._node.memory, list[int]()
            response = session_pb2.LinkResponse(linked=True)
            if session.maps_arena:
                response.arena_byte_count = memory.arena.num_bytes
                if session.knows_words:
                    response.word_byte_offset = words_offset_bytes(memory.arena.num_bytes)
                    response.word_count = WORD_COUNT
                fds.append(arena)
            if session.maps_table:
                response.table_byte_count = memory.table.geometry.file_bytes
                fds.append(table)
            if fds:
                socket.send_fds(connection, [response.SerializeToString()], fds)
            else:
                connection.send(response.SerializeToString())
        finally:
            os.close(arena)
            os.close(table)
