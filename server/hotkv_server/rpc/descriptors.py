"""The descriptor socket: engine memory comes in, read-only arena and table go out, by SCM_RIGHTS.

One connection is the link of one session. It is closed by us only when nothing touches the session's memory any more, and by the kernel
when this process dies; so its end tells the client that its memory is its own again. Peers must have an allowed user id.
"""

import asyncio
import logging
import os
import socket
import struct
from pathlib import Path

from google.protobuf.message import DecodeError

from hotkv.errors import HotKVError, Reason
from hotkv.v1 import session_pb2
from hotkv_server.rpc.errors import as_refusal, detail
from hotkv_server.runtime.node import Node

log = logging.getLogger(__name__)

MAX_DESCRIPTORS = 64
MAX_PACKET_BYTES = 65536
MAX_PENDING = 256
REQUEST_TIMEOUT_S = 10.0


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class DescriptorServer:
    """Listens on `path`; serves links until closed."""

    def __init__(self, node: Node, path: Path, mode: int, allowed_uids: frozenset[int]) -> None:
        self._node = node
        self._path = path
        self._allowed_uids = allowed_uids
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(str(path))
        os.chmod(path, mode)
        self._listener.listen(64)
        self._pending: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Stops listening; links of live sessions stay."""
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for task in self._pending:
            task.cancel()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        if len(self._pending) >= MAX_PENDING:
            connection.close()
            return
        task = self._loop.create_task(self._serve(connection))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _serve(self, connection: socket.socket) -> None:
        linked = False
        try:
            await asyncio.wait_for(self._readable(connection), REQUEST_TIMEOUT_S)
            linked = self._link(connection)
        except (asyncio.TimeoutError, OSError) as error:
            log.warning("descriptor socket: a peer sent no request: %s", error)
        finally:
            if not linked:
                connection.close()

    async def _readable(self, connection: socket.socket) -> None:
        ready = self._loop.create_future()
        self._loop.add_reader(connection.fileno(), _resolve, ready)
        try:
            await ready
        finally:
            self._loop.remove_reader(connection.fileno())

    def _link(self, connection: socket.socket) -> bool:
        """Answers one request; True where the connection is now a session's link."""
        fds: list[int] = []
        kept: set[int] = set()
        try:
            packet, fds, message_flags, _ = socket.recv_fds(connection, MAX_PACKET_BYTES, MAX_DESCRIPTORS)
            if message_flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
                raise HotKVError(
                    Reason.TOO_LARGE, f"the packet is longer than {MAX_PACKET_BYTES} bytes or carries over {MAX_DESCRIPTORS} descriptors"
                )
            self._check_peer(connection)
            request = self._parse(packet)
            session = self._node.session(request.session_id)
            if len(request.handle_ids) != len(fds) or len(set(request.handle_ids)) != len(fds):
                raise HotKVError(Reason.INVALID_FIELD, f"handle_ids names {len(request.handle_ids)} handles for {len(fds)} descriptors")
            if session.close_link is not None:
                raise HotKVError(Reason.DUPLICATE_ID, "session_id has a link already")
            for handle_id, fd in zip(request.handle_ids, fds, strict=True):
                kept.add(fd)
                session.receive(handle_id, fd)
            self._send(
                connection,
                session_pb2.LinkResponse(
                    arena_byte_count=self._node.memory.arena.num_bytes, table_byte_count=self._node.memory.table.geometry.file_bytes
                ),
            )
            session.close_link = connection.close
            return True
        except Exception as error:  # noqa: BLE001 The edge of the descriptor socket: every failure is an answer.
            refusal = as_refusal(error)
            log.warning("descriptor socket: refused a link: %s", refusal)
            try:
                connection.send(session_pb2.LinkResponse(error=detail(refusal)).SerializeToString())
            except OSError:
                log.info("descriptor socket: the peer was gone before the answer")
            return False
        finally:
            for fd in set(fds) - kept:
                os.close(fd)

    def _parse(self, packet: bytes) -> session_pb2.LinkRequest:
        try:
            return session_pb2.LinkRequest.FromString(packet)
        except DecodeError as error:
            raise HotKVError(Reason.INVALID_FIELD, "the packet is no LinkRequest") from error

    def _check_peer(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid not in self._allowed_uids:
            raise HotKVError(Reason.NOT_ALLOWED, f"user id {uid} of process {pid} may not link; allow it with security.allowed_uids")

    def _send(self, connection: socket.socket, response: session_pb2.LinkResponse) -> None:
        arena, table = self._node.memory.open_read_only()
        try:
            socket.send_fds(connection, [response.SerializeToString()], [arena, table])
        finally:
            os.close(arena)
            os.close(table)
