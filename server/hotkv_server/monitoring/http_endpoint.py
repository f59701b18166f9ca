"""Serves HTTP: /metrics for Prometheus, /livez and /readyz for probes, the status page and its API.

Runs on a thread with its own event loop, and asks the node's loop for figures, so an answer proves
that the node's loop runs. /livez fails if a part has a problem that only a restart solves, /readyz
also during a drain; the text names the problem. `pages.routes` makes the answers.

Always true: a request is answered, however many connections others hold open. Requests that wait
have places by their kind (`PLACES`), connections that send or read have places of their own. If
a kind has no free place, the request that has waited longest yields its place. So no kind keeps
out another, such as probes.
"""

import asyncio
import contextlib
import dataclasses
import enum
import ipaddress
import logging
import socket
import threading
import time

import h11

from hotkv_server.logs import Throttle
from hotkv_server.monitoring.pages.routes import CHECK_PATH, SAVINGS_PATH, Reply, Request, Routes
from hotkv_server.node.node import Node
from hotkv_server.security.page_access import PageAccess

log = logging.getLogger(__name__)
log.addFilter(Throttle())

ANSWER_TIMEOUT_S = 2.0
SAVINGS_TIMEOUT_S = 8.0
"""Longer, because the node may pause up to `MAX_REST_S` (of `pages.routes`) first."""
CONNECTION_S = 10.0
TURN_S = 0.5
"""How often the thread's loop records that it runs."""
MAX_CONNECTIONS = 256
"""That send their request or read their answer."""
BACKLOG = 64
"""Connections that a turn of the loop accepts. A request that came with its connection is read
within three turns, so that newer connections don't end it before."""
MAX_REQUEST_BYTES = 8192
MAX_BODY_BYTES = 4 << 20


class QueueKind(enum.Enum):
    """By its kind a request gets a place while it waits."""

    PROBE = enum.auto()
    SAVINGS = enum.auto()
    QUESTION = enum.auto()
    PAGE = enum.auto()


KINDS = {
    "/livez": QueueKind.PROBE,
    "/readyz": QueueKind.PROBE,
    "/metrics": QueueKind.PROBE,
    SAVINGS_PATH: QueueKind.SAVINGS,
    CHECK_PATH: QueueKind.QUESTION,
}
"""All other paths are PAGE."""
PLACES = {QueueKind.PROBE: 64, QueueKind.SAVINGS: 32, QueueKind.QUESTION: 64, QueueKind.PAGE: 64}
"""A question has its place while its body still comes."""
YIELDED = Reply.text(503, "too many requests of this kind wait; ask again", {"Retry-After": "1"})
OPEN_HERE = PageAccess()


def _request(event: h11.Request) -> Request:
    path, _, query = event.target.decode("ascii", "replace").partition("?")
    named = {name: value.decode("latin-1") for name, value in event.headers}
    return Request(
        path,
        query,
        named.get(b"host", ""),
        named.get(b"authorization", ""),
        named.get(b"accept", ""),
    )


class _Connection(asyncio.Protocol):
    """Reads one request, sends one answer, and closes."""

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST_BYTES)
        self._transport: asyncio.Transport | None = None
        self._answering: asyncio.Task[None] | None = None
        self._is_head = False
        self._question: Request | None = None
        self._refusal: Reply | None = None
        self._body = bytearray()
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

    def yield_place(self) -> None:
        """Tells the client to ask again."""
        if self._answering is not None:
            self._answering.cancel()
        self._send(YIELDED)

    def drop(self) -> None:
        """At once: loses what is not sent yet."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._answering is not None:
            return
        try:
            self._http.receive_data(data)
            while self._answering is None:
                event = self._http.next_event()
                if event in (h11.NEED_DATA, h11.PAUSED):
                    return
                self._heard(event)
        except h11.RemoteProtocolError as error:
            self._reply(
                Reply.text(error.error_status_hint, "that was no HTTP request"), has_more=True
            )

    def _heard(self, event: object) -> None:
        """Begins to answer a GET or HEAD at once, a POST once its body is complete. Does not
        keep the body of a client that has no right to ask."""
        if isinstance(event, h11.Request):
            request, self._is_head = _request(event), event.method == b"HEAD"
            if event.method == b"POST" and request.path == CHECK_PATH:
                sight = self._server.routes.sight(request)
                self._refusal = sight if isinstance(sight, Reply) else None
                self._question = request
                self._server.waits(self, QueueKind.QUESTION)
            elif event.method in (b"GET", b"HEAD") and request.path != CHECK_PATH:
                self._begin(request)
            else:
                self._refuse(405, "try GET, or POST to ask about blocks")
        elif isinstance(event, h11.Data):
            if self._refusal is None:
                self._body += event.data
            if len(self._body) > MAX_BODY_BYTES:
                self._refuse(413, f"a question has at most {MAX_BODY_BYTES} bytes")
        elif self._refusal is not None:
            self._reply(self._refusal)
        elif self._question is not None:
            self._begin(dataclasses.replace(self._question, body=bytes(self._body)))

    def _begin(self, request: Request) -> None:
        self._server.waits(self, KINDS.get(request.path, QueueKind.PAGE))
        self._answering = asyncio.get_running_loop().create_task(self._answer(request))

    def _refuse(self, status: int, why: str) -> None:
        self._reply(Reply.text(status, why, {"Allow": "GET, HEAD, POST"}), has_more=True)

    def _reply(self, reply: Reply, *, has_more: bool = False) -> None:
        """`has_more`: the client may still be sending."""

        async def send() -> None:
            self._send(reply, has_more=has_more)

        self._answering = asyncio.get_running_loop().create_task(send())

    async def _answer(self, request: Request) -> None:
        timeout_s = SAVINGS_TIMEOUT_S if request.path == SAVINGS_PATH else ANSWER_TIMEOUT_S
        try:
            answer = self._server.routes.answer(request)
            self._send(await asyncio.wait_for(answer, timeout_s))
        except asyncio.TimeoutError:
            # A probe must fail if the node's event loop does not answer.
            self._send(Reply.text(503, "TimeoutError: the event loop does not answer", {}))
        except Exception as error:
            # No other code handles the exceptions of this task.
            log.exception("no answer to a request of HTTP")
            text = f"{type(error).__name__}: a defect; the server's log says more"
            self._send(Reply.text(500, text, {}))

    def _send(self, reply: Reply, *, has_more: bool = False) -> None:
        assert self._transport is not None
        self._server.answered(self)
        headers = [
            ("Content-Type", reply.content_type),
            ("Content-Length", str(len(reply.body))),
            ("Connection", "close"),
            *reply.headers.items(),
        ]
        parts: list[h11.Event] = [
            h11.Response(status_code=reply.status, headers=headers),
            *([] if self._is_head else [h11.Data(data=reply.body)]),
            h11.EndOfMessage(),
        ]
        with contextlib.suppress(h11.LocalProtocolError):
            self._transport.write(b"".join(self._http.send(part) or b"" for part in parts))
        if has_more:
            # Closing now would reset the connection, and the client might lose the answer. So
            # ends only this direction; the client or `_deadline` ends the rest.
            try:
                self._transport.write_eof()
            except OSError:
                self._transport.abort()  # The client has ended the connection.
        else:
            self._transport.close()


async def _give_up() -> None:
    """Cancels requests that may be waiting for the node."""
    waiting = asyncio.all_tasks() - {asyncio.current_task()}
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


class HttpServer:
    """Serves until it is closed. The constructor raises OSError."""

    def __init__(self, host: str, port: int, node: Node, access: PageAccess = OPEN_HERE) -> None:
        """To be called on the node's event loop.

        access: `is_local` and `own_name` are set here, by the bound address and `host`.
        """
        # The oldest first.
        self._connections: dict[_Connection, None] = {}
        self._waiting: dict[QueueKind, dict[_Connection, None]] = {kind: {} for kind in QueueKind}
        self._last_turn_s = time.monotonic()
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # `::` includes IPv4 addresses.
        both = address[0] == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both
        )
        self.port = int(listener.getsockname()[1])
        is_local = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        access = dataclasses.replace(access, is_local=is_local, own_name=host)
        self.routes = Routes(node, asyncio.get_running_loop(), access)
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="hotkv-http", daemon=True
        )
        self._thread.start()

    def _run(self, listener: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            self._loop.create_server(lambda: _Connection(self), sock=listener, backlog=BACKLOG)
        )
        self._turn()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(_give_up())

    def _end(self) -> None:
        for connections in (self._connections, *self._waiting.values()):
            for connection in list(connections):
                connection.drop()
        # After the callbacks of the dropped connections.
        self._loop.call_soon(self._loop.stop)

    def _turn(self) -> None:
        self._last_turn_s = time.monotonic()
        self._loop.call_later(TURN_S, self._turn)

    def opened(self, connection: _Connection) -> None:
        """Beyond MAX_CONNECTIONS, drops the oldest."""
        self._connections[connection] = None
        if len(self._connections) > MAX_CONNECTIONS:
            going = next(iter(self._connections))
            # Now: more may open before `closed` is called.
            del self._connections[going]
            going.drop()

    def waits(self, connection: _Connection, kind: QueueKind) -> None:
        """Gives a connection a place until `answered`. If its kind has too many, the oldest
        yields."""
        self._connections.pop(connection, None)
        waiting = self._waiting[kind]
        waiting[connection] = None
        if len(waiting) > PLACES[kind]:
            next(iter(waiting)).yield_place()

    def answered(self, connection: _Connection) -> None:
        for waiting in self._waiting.values():
            if connection in waiting:
                del waiting[connection]
                self.opened(connection)

    def closed(self, connection: _Connection) -> None:
        for connections in (self._connections, *self._waiting.values()):
            connections.pop(connection, None)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stalled_s(self, now_s: float) -> float:
        return now_s - self._last_turn_s

    def close(self) -> None:
        """Blocks."""
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join()
        self._loop.close()
