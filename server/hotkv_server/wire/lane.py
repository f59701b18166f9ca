"""The fast lane: sessions of engines on this node, over the Unix stream socket `lane.sock`.

It carries the messages of `SessionService.Connect` in both directions, each behind its length. The
code that serves them is the same as for gRPC. gRPC's part of a call costs several times as much as
the call.

Always true: a connection's peer is known by SO_PEERCRED, so no ticket is needed. Messages are
parsed as on gRPC: bounded in bytes and in parts. A connection buffers one incomplete message,
and reads no further while complete ones wait. A connection that is silent for SILENT_TURNS turns
ends; clients ping more often.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections import deque
from pathlib import Path
from typing import Any

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.lane import LENGTH, LENGTH_BYTES, framed
from hotkv_proto.messages.errors import error_detail
from hotkv_proto.v1 import session_pb2
from hotkv_proto.versions import MAX_MESSAGE_BYTES
from hotkv_server.logs import REQUEST_ID, Throttle
from hotkv_server.node.node import Node
from hotkv_server.security.identity import Peer
from hotkv_server.wire.guard import peers
from hotkv_server.wire.guard.interceptor import lenient
from hotkv_server.wire.session_stream import LAST_WORDS_S, SessionOpener

log = logging.getLogger(__name__)
log.addFilter(Throttle())

TURN_S, SILENT_TURNS = 5.0, 4
"""Silence is counted in turns of TURN_S, not by the clock: when the event loop was late, what
clients sent meanwhile is still unread, and they must not count as silent."""
WINDOW_BYTES = 64 << 10
"""Bytes of complete messages, and of unread answers, beyond which a connection waits."""
BACKLOG = 1024

_parse = lenient(session_pb2.ConnectRequest.FromString)


class LaneConnection(asyncio.Protocol):
    """A connection: an asynchronous iterator over its requests, and a writer of answers."""

    def __init__(self, lane: "LaneServer") -> None:
        self._lane = lane
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._incomplete = bytearray()
        self._frames = deque[bytes]()
        self._frame_bytes = 0
        self._is_paused = self._has_ended = self._is_lost = self._is_full = False
        self._came: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self.silent_turns = 0
        self.peer = Peer("lane.sock")

    def __repr__(self) -> str:
        return f"LaneConnection({self.peer}, {len(self._frames)} requests)"

    # Events of the connection.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(WINDOW_BYTES)
        try:
            with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as one:
                self.peer = peers.of_socket(one)
        except OSError:
            transport.abort()
            return
        self._lane.began(self)

    def data_received(self, data: bytes) -> None:
        self.silent_turns = 0
        buffer = self._incomplete
        buffer += data
        at = 0
        while len(buffer) - at >= LENGTH_BYTES:
            (size,) = LENGTH.unpack_from(buffer, at)
            if size > MAX_MESSAGE_BYTES:
                self._refuse(size)
                return
            end = at + LENGTH_BYTES + size
            if len(buffer) < end:
                break
            self._frames.append(bytes(memoryview(buffer)[at + LENGTH_BYTES : end]))
            self._frame_bytes += size
            at = end
        del buffer[:at]
        if self._frame_bytes > WINDOW_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        if self._frames:
            _wake(self._came)

    def _refuse(self, size: int) -> None:
        self._incomplete.clear()
        self._frames.clear()
        self._has_ended = True
        why = f"a message declares {size} bytes; it has at most {MAX_MESSAGE_BYTES}: send several"
        self.end(HotKVError(Reason.TOO_LARGE, why))
        _wake(self._came)

    def eof_received(self) -> bool:
        """The client has ended its requests; it may still read answers."""
        self._has_ended = True
        _wake(self._came)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._has_ended = self._is_lost = True
        _wake(self._came)
        _wake(self._room)

    def pause_writing(self) -> None:
        self._is_full, self._room = True, self._loop.create_future()

    def resume_writing(self) -> None:
        self._is_full = False
        _wake(self._room)

    # What a session's stream uses.

    def __aiter__(self) -> "LaneConnection":
        return self

    async def __anext__(self) -> Any:
        while not self._frames:
            if self._has_ended:
                raise StopAsyncIteration
            self._came = self._loop.create_future()
            await self._came
        data = self._frames.popleft()
        self._frame_bytes -= len(data)
        if self._is_paused and self._frame_bytes <= WINDOW_BYTES and not self._is_lost:
            self._is_paused = False
            self._transport.resume_reading()
        return _parse(data)

    async def write(self, message: session_pb2.ConnectResponse) -> None:
        """Sends a message; waits while the client has left WINDOW_BYTES unread."""
        if self._is_lost:
            return
        self._transport.write(framed(message.SerializeToString()))
        if self._is_full and self._room is not None:
            await self._room

    def end(self, why: HotKVError | None) -> None:
        """Sends the reason, if there is one, and closes the connection. What the client does not
        read in LAST_WORDS_S is dropped."""
        if self._is_lost:
            return
        if why is not None:
            last = session_pb2.ConnectResponse(error=error_detail(why))
            self._transport.write(framed(last.SerializeToString()))
        self._transport.close()
        self._loop.call_later(LAST_WORDS_S, self.abort)

    def abort(self) -> None:
        """Closes the connection at once."""
        if not self._is_lost:
            self._transport.abort()


def _wake(future: "asyncio.Future[None] | None") -> None:
    if future is not None and not future.done():
        future.set_result(None)


class LaneServer:
    """Listens at `path` from `start` to `stop`. Each connection opens one session.

    most: largest number of connections.
    """

    def __init__(self, node: Node, opener: SessionOpener, path: Path, mode: int, most: int) -> None:
        self._node = node
        self._opener = opener
        self._path = path
        self._most = most
        self._streams: dict[LaneConnection, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        self._turns: asyncio.Task[None] | None = None
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        os.chmod(path, mode)

    def __repr__(self) -> str:
        return f"LaneServer({len(self._streams)} connections)"

    async def start(self) -> None:
        """Begins to accept connections."""
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: LaneConnection(self), sock=self._listener, backlog=BACKLOG
        )
        self._turns = asyncio.create_task(self._end_silent())

    def began(self, stream: LaneConnection) -> None:
        """Serves a new connection, or aborts it if there are too many. The server speaks first:
        a Pong says that it is there."""
        if len(self._streams) >= self._most:
            self._node.refusals[Reason.OVERLOADED] += 1
            stream.abort()
            return
        task = asyncio.create_task(self._serve(stream))
        self._streams[stream] = task
        task.add_done_callback(lambda _: self._streams.pop(stream, None))

    async def _serve(self, stream: LaneConnection) -> None:
        REQUEST_ID.set(secrets.token_hex(8))
        why: HotKVError | None = None
        try:
            await stream.write(session_pb2.ConnectResponse(pong=session_pb2.Pong()))
            why = await self._opener.serve(stream, stream.write, stream, str(stream.peer))
        finally:
            stream.end(why)

    async def _end_silent(self) -> None:
        async for _ in self._node.health.turns("the end of silent clients", TURN_S):
            for stream in list(self._streams):
                stream.silent_turns += 1
                if stream.silent_turns > SILENT_TURNS:
                    stream.abort()

    async def stop(self, grace_s: float) -> None:
        """Stops accepting. Waits `grace_s` for the sessions, then ends them."""
        if self._server is not None:
            self._server.close()
        self._listener.close()
        if self._streams:
            await asyncio.wait(self._streams.values(), timeout=grace_s)
        tasks = list(self._streams.values())
        for stream, task in list(self._streams.items()):
            task.cancel()
            stream.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._turns is not None:
            self._turns.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._turns
        self._path.unlink(missing_ok=True)
