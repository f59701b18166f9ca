"""The two ways of a session's messages to the server: `LaneStream` over the Unix stream socket
`lane.sock` of a server on this node, `GrpcStream` over gRPC otherwise.

Always true: messages are sent in the order of `put`, which never blocks. A stream that breaks, or
that the server ends with an error, raises HotKVError from its iterator; one that the server closes
ends it.
"""

import contextlib
import logging
import os
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import grpc

from hotkv_client import channels, targets
from hotkv_client.types import SessionConfig
from hotkv_client.wire import answers as _answers
from hotkv_client.wire import call_messages as _wire
from hotkv_client.wire.call_errors import as_error
from hotkv_proto.errors import HotKVError, Reason, SessionLostError
from hotkv_proto.lane import LENGTH, LENGTH_BYTES, framed
from hotkv_proto.lane import SOCKET_NAME as SOCKET_NAME

log = logging.getLogger(__name__)

PING_S, SILENT_TURNS = 5.0, 3
"""A lane that has nothing to read for PING_S sends a ping; after SILENT_TURNS such pauses in a row
the server counts as lost. Pauses are counted, not seconds: this process may have been stopped."""
PING_ID = (1 << 63) - 1
READ_BYTES = 256 << 10


class MessageStream(Protocol):
    """A session's messages, in both directions. `put` is thread-safe; one thread reads."""

    def has_answered(self, timeout_s: float) -> bool:
        """Blocks until a server answers, at most `timeout_s`. Returns False after `cancel` too."""

    def begin(self, request: _wire.Request) -> None:
        """Sends the first message, which opens the session."""

    def put(self, request: _wire.Request | None) -> None:
        """Sends a message; None ends the requests. Never blocks."""

    @property
    def num_unsent(self) -> int:
        """Messages that the server's side has not taken yet."""

    def __iter__(self) -> Iterator[_answers.Response]: ...

    def cancel(self) -> None:
        """Breaks the stream; its reader ends soon. From any thread."""

    def close(self) -> None:
        """Frees the stream's resources, once no thread reads."""


class GrpcStream:
    """A bidirectional call of SessionService.Connect, on a channel of its own."""

    def __init__(self, config: SessionConfig) -> None:
        self._metadata = channels.metadata(config.target, config.credentials)
        self.channel = channels.open_channel(config.target, config.credentials)
        # Make the stub while the channel is open: for a closed channel gRPC crashes the process.
        self._stub = _wire.Stub(self.channel)
        self._outbox: queue.SimpleQueue[_wire.Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._asked: Any = None
        self._call: Any = None
        self._is_cancelled = False

    def has_answered(self, timeout_s: float) -> bool:
        asked = channels.ask(self.channel, timeout_s)
        with self._lock:
            self._asked = asked
            if self._is_cancelled:
                asked.cancel()
        try:
            # `exception` waits for the call's end. A server that refuses the call has answered.
            asked.exception()
            return asked.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        except grpc.FutureCancelledError:
            return False

    def begin(self, request: _wire.Request) -> None:
        self._outbox.put(request)
        call = _wire.connect(self._stub, iter(self._outbox.get, None), self._metadata)
        with self._lock:
            self._call = call
            if self._is_cancelled:
                call.cancel()

    def put(self, request: _wire.Request | None) -> None:
        self._outbox.put(request)

    @property
    def num_unsent(self) -> int:
        return self._outbox.qsize()

    def __iter__(self) -> Iterator[_answers.Response]:
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise as_error(error) from error

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            for one in (self._asked, self._call):
                if one is not None:
                    one.cancel()

    def close(self) -> None:
        self._outbox.put(None)
        self.channel.close()


class LaneStream:
    """A connection to `lane.sock`. `put` writes to the socket itself; what the socket does not take
    is written by the reading thread.

    Raises OSError if nobody listens.
    """

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except BaseException:
            self._socket.close()
            raise
        self._lock = threading.Lock()
        self._unsent = deque[memoryview]()
        self._has_ended = self._is_cancelled = False
        self._incoming = bytearray()
        self._reads = select.poll()
        self._reads.register(self._socket, select.POLLIN)
        self._reads.register(self._wake, select.POLLIN)

    def has_answered(self, timeout_s: float) -> bool:
        """The server's first message is empty: it says that the server is there."""
        until_s = time.monotonic() + timeout_s
        while not self._is_cancelled and (left_s := until_s - time.monotonic()) > 0:
            if self._poll(left_s) and (not self._receive() or self._next() is not None):
                return not self._is_cancelled
        return False

    def begin(self, request: _wire.Request) -> None:
        self.put(request)

    def put(self, request: _wire.Request | None) -> None:
        with self._lock:
            if self._has_ended:
                return
            if request is None:
                self._has_ended = True
                if not self._unsent:
                    self._end_requests()
                return
            frame = memoryview(framed(request.SerializeToString()))
            if not self._unsent:
                frame = frame[self._send(frame) :]
                if not frame:
                    return
                self._wake_reader()
            self._unsent.append(frame)

    def _send(self, frame: memoryview) -> int:
        """Returns how many bytes the socket took. A broken socket takes all: its reader notices."""
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            return len(frame)

    def _end_requests(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _wake_reader(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    @property
    def num_unsent(self) -> int:
        return len(self._unsent)

    def __iter__(self) -> Iterator[_answers.Response]:
        silent_turns = 0
        while True:
            while (response := self._next()) is not None:
                if response.request_id == PING_ID:
                    continue
                if (refusal := _answers.end(response)) is not None:
                    raise refusal
                yield response
            if self._poll(PING_S):
                silent_turns = 0
                if not self._receive():
                    break
            elif (silent_turns := silent_turns + 1) > SILENT_TURNS:
                raise SessionLostError("the server has not answered pings; it hangs")
            else:
                ping = _wire.ping()
                ping.request_id = PING_ID
                self.put(ping)
        if self._is_cancelled:
            raise SessionLostError("the session was cancelled")

    def _poll(self, timeout_s: float) -> bool:
        """Waits until there is something to read; meanwhile sends what the socket did not take.
        Returns False if nothing came."""
        until_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
                self._reads.modify(self._socket, events)
            ready = dict(self._reads.poll(max(0.0, until_s - time.monotonic()) * 1000))
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            seen = ready.get(self._socket.fileno(), 0)
            if seen & select.POLLOUT:
                self._send_more()
            if seen & ~select.POLLOUT or self._is_cancelled:
                return True
            if time.monotonic() >= until_s:
                return False

    def _send_more(self) -> None:
        with self._lock:
            while self._unsent:
                frame = self._unsent[0]
                sent = self._send(frame)
                if sent < len(frame):
                    self._unsent[0] = frame[sent:]
                    return
                self._unsent.popleft()
            if self._has_ended:
                self._end_requests()

    def _receive(self) -> bool:
        """Reads what has come; False at the end of the stream."""
        if self._is_cancelled:
            return False
        try:
            data = self._socket.recv(READ_BYTES)
        except OSError:
            return False
        self._incoming += data
        return bool(data)

    def _next(self) -> _answers.Response | None:
        """The next whole message that was received."""
        buffer = self._incoming
        if len(buffer) < LENGTH_BYTES:
            return None
        (size,) = LENGTH.unpack_from(buffer)
        if size > channels.MAX_ANSWER_BYTES:
            raise HotKVError(Reason.INTERNAL, f"the server's message declares {size} bytes")
        end = LENGTH_BYTES + size
        if len(buffer) < end:
            return None
        response = _answers.parsed(bytes(buffer[LENGTH_BYTES:end]))
        del buffer[:end]
        return response

    def cancel(self) -> None:
        self._is_cancelled = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._wake_reader()

    def close(self) -> None:
        with self._lock:
            self._has_ended = True
            self._unsent.clear()
            self._socket.close()
            os.close(self._wake)


def open_stream(config: SessionConfig) -> MessageStream:
    """A lane if a server on this node has one, else gRPC. Raises HotKVError for credentials that
    can't be used."""
    if config.use_lane and targets.is_unix(config.target):
        path = Path(config.target.removeprefix("unix:").removeprefix("//")).with_name(SOCKET_NAME)
        with contextlib.suppress(OSError):
            return LaneStream(path)
    return GrpcStream(config)
