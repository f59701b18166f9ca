"""A proxy that can slow down, hold, cut off or change bytes, for tests.

Always true: bytes keep their order. The client's pass through `on_command`, the server's through
`on_reply`: *faults*, which a test may replace at any time.
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
"""Takes bytes and yields those to forward. May wait; OSError ends the connection."""


def nothing(piece: bytes) -> Iterator[bytes]:
    yield piece


def throttled(bytes_per_s: float) -> Fault:
    """All connections with this fault share the limit."""
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
    """Ends the connection after `num_bytes`."""
    left = num_bytes

    def fault(piece: bytes) -> Iterator[bytes]:
        nonlocal left
        yield piece[:left]
        left -= len(piece)
        if left <= 0:
            raise ConnectionAbortedError

    return fault


def changed_at(at: int, garbage: bytes) -> Fault:
    """Overwrites bytes from number `at` on, counted since the fault was made."""
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
    """Holds all but the first `num_bytes` until `opened` is set; sets `is_full` once it holds
    some."""

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
    """Listens on a free port of 127.0.0.1.

    target: (host, port), or path of a Unix socket.
    tls: for the side of clients; the server's has none.
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
        """So far."""
        return len(self._pairs)

    def close(self) -> None:
        # `close` alone would not wake `accept`.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def drop(self) -> None:
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
