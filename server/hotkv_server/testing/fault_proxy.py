"""Runs a proxy between a client and a server, for tests. The proxy can slow down, hold, cut off or
change the bytes that it forwards.

Always true: bytes are forwarded in order. Bytes from the client pass through `on_command`, bytes
from the server through `on_reply`. Both attributes are *faults*: functions that receive a piece of
bytes and yield the bytes to forward. A test may replace the functions at any time. If a fault
raises OSError, the connection ends.
"""

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

PIECE_BYTES = 1 << 16
Fault = Callable[[bytes], Iterator[bytes]]
"""A function that receives bytes and yields the bytes to forward. It may wait before it yields, and
raises OSError to end the connection."""


def nothing(piece: bytes) -> Iterator[bytes]:
    """Forwards the bytes unchanged: the fault of a `FaultProxy` that does nothing."""
    yield piece


def throttled(bytes_per_s: float) -> Fault:
    """Returns a fault (a function for `FaultProxy`) that limits the bytes forwarded per second. All
    connections that use the fault share this limit."""
    lock = threading.Lock()

    def fault(piece: bytes) -> Iterator[bytes]:
        step = max(1, min(len(piece), int(bytes_per_s / 20)))
        for at in range(0, len(piece), step):
            part = piece[at : at + step]
            with lock:
                time.sleep(len(part) / bytes_per_s)
            yield part

    return fault


def cut_after(num_bytes: int) -> Fault:
    """Returns a fault (a function for `FaultProxy`) that forwards `num_bytes` bytes and then ends
    the connection."""
    left = num_bytes

    def fault(piece: bytes) -> Iterator[bytes]:
        nonlocal left
        yield piece[:left]
        left -= len(piece)
        if left <= 0:
            raise ConnectionAbortedError

    return fault


def changed_at(at: int, garbage: bytes) -> Fault:
    """Returns a fault (a function for `FaultProxy`) that overwrites the forwarded bytes with
    `garbage`, from byte number `at` on. It counts the bytes that have passed since the fault was
    made."""
    passed = 0

    def fault(piece: bytes) -> Iterator[bytes]:
        nonlocal passed
        begin, passed = passed, passed + len(piece)
        changed = bytearray(piece)
        for offset, byte in enumerate(garbage, at - begin):
            if 0 <= offset < len(changed):
                changed[offset] = byte
        yield bytes(changed)

    return fault


class Dam:
    """A fault (a function for `FaultProxy`) that forwards the first `num_bytes` bytes, and holds
    all later bytes until the event `opened` is set. It sets the event `is_full` once it holds
    bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.is_full, self.opened = threading.Event(), threading.Event()
        self._left = num_bytes

    def __call__(self, piece: bytes) -> Iterator[bytes]:
        ahead, rest = piece[: self._left], piece[self._left :]
        self._left -= len(ahead)
        yield ahead
        if rest:
            self.is_full.set()
            self.opened.wait()
            yield rest


class FaultProxy:
    """A proxy for tests. It listens on a free port of 127.0.0.1 and forwards connections to a
    server. The functions `on_command` and `on_reply` can delay or change the bytes.

    target: the server's (host, port), or the path of its Unix socket.
    tls: TLS context for the connection with clients; None: without TLS. The connection with the
        server has no TLS.
    """

    def __init__(self, target: tuple[str, int] | str, tls: ssl.SSLContext | None = None) -> None:
        self.on_command: Fault = nothing
        self.on_reply: Fault = nothing
        self._target = target
        self._tls = tls
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="fault-proxy", daemon=True).start()

    def __repr__(self) -> str:
        return f"FaultProxy(port={self.port}, {len(self._pairs)} connections so far)"

    @property
    def num_connections(self) -> int:
        """Returns the number of accepted connections."""
        return len(self._pairs)

    def close(self) -> None:
        """Stops listening and ends all connections."""
        # `close` alone would not wake the thread that accepts connections.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def drop(self) -> None:
        """Ends all connections."""
        for pair in self._pairs:
            for end in pair:
                _end(end)

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            if isinstance(self._target, str):
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._target)
            else:
                server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        for end in (client, server):
            if end.family == socket.AF_INET:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pairs.append((client, server))
        # Only one thread at a time may use an SSL object.
        lock = threading.Lock()
        commands = threading.Thread(
            target=self._pump,
            args=(client, server, lock, lambda piece: self.on_command(piece)),
            daemon=True,
        )
        commands.start()
        self._pump(server, client, lock, lambda piece: self.on_reply(piece))

    def _pump(
        self, source: socket.socket, sink: socket.socket, lock: threading.Lock, fault: Fault
    ) -> None:
        with contextlib.suppress(OSError, ValueError):
            while piece := _receive(source, lock):
                for passing in fault(piece):
                    with lock if isinstance(sink, ssl.SSLSocket) else contextlib.nullcontext():
                        sink.sendall(passing)
        _end(source)
        _end(sink)


def _receive(source: socket.socket, lock: threading.Lock) -> bytes:
    if not isinstance(source, ssl.SSLSocket):
        return source.recv(PIECE_BYTES)
    if not source.pending():
        select.select([source], [], [])
    with lock:
        return source.recv(PIECE_BYTES)


def _end(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
