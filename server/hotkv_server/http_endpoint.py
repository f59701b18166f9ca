"""HTTP for probes, Prometheus and pages: /metrics, /livez, /readyz, /api/v1/savings.

Runs on a thread and an event loop of its own and asks the node's loop for figures, so an answer
also proves that the node's loop turns. /livez fails if only a restart helps, /readyz also while the
server drains; both name the problem.

Always true: a request is answered, however many connections others hold open; however many ask for
metrics, the node is asked once at a time.
"""

import asyncio
import contextlib
import json
import math
import socket
import threading
import time
import urllib.parse
from collections.abc import Coroutine
from typing import Any, TypeVar

import h11
from prometheus_client import (
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from hotkv_server.metrics import NodeCollector
from hotkv_server.runtime.node import Node
from hotkv_server.runtime.savings_figures import savings_figures

ANSWER_TIMEOUT_S = 2.0
CONNECTION_S = 10.0
"""How long a connection may last."""
TURN_S = 0.5
MAX_CONNECTIONS = 64
MAX_REQUEST_BYTES = 8192
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
JSON_TYPE = "application/json"
SAVINGS_PATH = "/api/v1/savings"
T = TypeVar("T")


async def _probe(node: Node, *, also_draining: bool) -> tuple[int, bytes]:
    """Status and body of a probe."""
    problems = node.health.problems(time.monotonic())
    if also_draining and node.core.draining:
        problems += ("the server drains",)
    return (503, ("\n".join(problems) + "\n").encode()) if problems else (200, b"ok\n")


async def _savings(node: Node, since_s: float) -> bytes:
    """The ledger in JSON; where there are tenants only its sums, since any client may ask."""
    figures = savings_figures(node.ledger.savings(since_s), has_rows=not node.has_tenants)
    return json.dumps(figures).encode() + b"\n"


def since(query: str) -> float:
    """The seconds of `since_s=`, 0 if it is not there. Raises ValueError."""
    values = urllib.parse.parse_qs(query).get("since_s", ["0"])
    try:
        seconds = float(values[-1])
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError("since_s: give a number of seconds, 0 for all")
    return seconds


class _Connection(asyncio.Protocol):
    """One connection: one request, one answer."""

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST_BYTES)
        self._transport: asyncio.Transport | None = None
        self._answering: asyncio.Task[None] | None = None
        self._deadline = asyncio.get_running_loop().call_later(CONNECTION_S, self.drop)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.cancel()
        if self._answering is not None:
            self._answering.cancel()
        self._server.closed(self)

    @property
    def has_asked(self) -> bool:
        return self._answering is not None

    def drop(self) -> None:
        """Ends the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._answering is not None:
            # Bytes after the request are ignored.
            return
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._send(error.error_status_hint, b"that was no HTTP request\n")
            return
        if isinstance(event, h11.Request):
            self._answering = asyncio.get_running_loop().create_task(self._answer(event))

    async def _answer(self, request: h11.Request) -> None:
        try:
            if request.method != b"GET":
                self._send(405, b"try GET\n")
                return
            path, _, query = request.target.decode("ascii", "replace").partition("?")
            self._send(*await asyncio.wait_for(self._server.answer(path, query), ANSWER_TIMEOUT_S))
        except Exception as error:  # noqa: BLE001 The edge of HTTP: a loop that does not answer is a failed probe.
            self._send(503, f"{type(error).__name__}: the event loop does not answer\n".encode())

    def _send(self, status: int, body: bytes, content_type: str = CONTENT_TYPE) -> None:
        assert self._transport is not None
        headers = [
            ("Content-Type", content_type),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        parts: list[h11.Event] = [
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        with contextlib.suppress(h11.LocalProtocolError):
            self._transport.write(b"".join(self._http.send(part) or b"" for part in parts))
        self._transport.close()


class HttpServer:
    """See the module. Serves until it is closed. Raises OSError if it can't listen."""

    def __init__(self, host: str, port: int, node: Node) -> None:
        self._node = node
        self._node_loop = asyncio.get_running_loop()
        self._collector = NodeCollector(node)
        self._registry = CollectorRegistry()
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._connections: dict[_Connection, None] = {}
        self._generating: asyncio.Task[bytes] | None = None
        self._last_turn_s = time.monotonic()
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address[:2], family=family, backlog=MAX_CONNECTIONS)
        self.port = int(listener.getsockname()[1])
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="hotkv-http", daemon=True
        )
        self._thread.start()

    def _run(self, listener: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            self._loop.create_server(lambda: _Connection(self), sock=listener)
        )
        self._turn()
        self._loop.run_forever()
        server.close()

    def _end(self) -> None:
        for connection in list(self._connections):
            connection.drop()
        # After the callbacks of these drops.
        self._loop.call_soon(self._loop.stop)

    def _turn(self) -> None:
        self._last_turn_s = time.monotonic()
        self._loop.call_later(TURN_S, self._turn)

    def opened(self, connection: _Connection) -> None:
        """Counts a new connection. If there are too many, drops the oldest that has not asked yet,
        or else this one."""
        self._connections[connection] = None
        if len(self._connections) > MAX_CONNECTIONS:
            going = next((one for one in self._connections if not one.has_asked), connection)
            # At once: many may come before `closed` is called for one.
            del self._connections[going]
            going.drop()

    def closed(self, connection: _Connection) -> None:
        """Forgets a connection that has ended."""
        self._connections.pop(connection, None)

    async def answer(self, path: str, query: str = "") -> tuple[int, bytes, str]:
        """Status, body and type for a path."""
        if path == SAVINGS_PATH:
            try:
                since_s = since(query)
            except ValueError as error:
                return 400, f"{error}\n".encode(), CONTENT_TYPE
            return 200, await self._of_node(_savings(self._node, since_s)), JSON_TYPE
        return *await self._text(path), CONTENT_TYPE

    async def _text(self, path: str) -> tuple[int, bytes]:
        match path:
            case "/metrics":
                # All requests that come meanwhile get the same text.
                if self._generating is None or self._generating.done():
                    self._generating = asyncio.create_task(self._metrics())
                return 200, await asyncio.shield(self._generating)
            case "/livez" | "/readyz":
                return await self._of_node(_probe(self._node, also_draining=path == "/readyz"))
        return 404, b"try /metrics, /livez, /readyz or /api/v1/savings\n"

    async def _metrics(self) -> bytes:
        await self._of_node(self._collector.read())
        return generate_latest(self._registry)

    async def _of_node(self, read: Coroutine[Any, Any, T]) -> T:
        """Runs `read` on the node's loop and returns its result."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(read, self._node_loop))

    def is_alive(self) -> bool:
        """False if the thread has died."""
        return self._thread.is_alive()

    def stalled_s(self, now_s: float) -> float:
        """How long ago the thread last took up work or an idle turn."""
        return now_s - self._last_turn_s

    def close(self) -> None:
        """Stops listening, and ends connections."""
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join()
        self._loop.close()
