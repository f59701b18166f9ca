"""HTTP for probes, Prometheus and people: /metrics, /livez, /readyz, the status page and its API.

Runs on its own thread and event loop, and asks the node's loop for figures. So an answer also
proves that the node's loop runs. /livez fails if only a restart helps; /readyz fails also while the
server drains. Both name the problem. `pages` has the contents of each path.

Always true: a request is answered, however many connections other clients hold open.
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import socket
import threading
import time

import h11

from hotkv_server.node.node import Node
from hotkv_server.security.page_access import PageAccess
from hotkv_server.told.pages.routes import CHECK_PATH, Reply, Request, Routes

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 2.0
CONNECTION_S = 10.0
"""Longest time that a connection may last."""
TURN_S = 0.5
MAX_CONNECTIONS = 64
MAX_REQUEST_BYTES = 8192
MAX_BODY_BYTES = 4 << 20
OPEN_HERE = PageAccess()
"""Access to the pages from this machine, without a token."""


def _request(event: h11.Request) -> Request:
    """Returns the parts of a request that the pages use."""
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
    """A connection: one request, one answer."""

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_REQUEST_BYTES)
        self._transport: asyncio.Transport | None = None
        self._answering: asyncio.Task[None] | None = None
        self._is_head = False
        self._question: Request | None = None
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

    @property
    def is_being_answered(self) -> bool:
        """Returns True from the request until its whole answer is handed to the transport."""
        return self._answering is not None and not self._answering.done()

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
            while self._answering is None:
                event = self._http.next_event()
                if event in (h11.NEED_DATA, h11.PAUSED):
                    return
                self._heard(event)
        except h11.RemoteProtocolError as error:
            self._send(Reply.text(error.error_status_hint, "that was no HTTP request"))

    def _heard(self, event: object) -> None:
        """Reads a part of the request. Begins to answer a GET at once, a question when its body is
        whole."""
        if isinstance(event, h11.Request):
            request, self._is_head = _request(event), event.method == b"HEAD"
            if event.method == b"POST" and request.path == CHECK_PATH:
                self._question = request
            elif event.method in (b"GET", b"HEAD") and request.path != CHECK_PATH:
                self._begin(request)
            else:
                self._refuse(405, "try GET, or POST to ask about blocks")
        elif isinstance(event, h11.Data):
            self._body += event.data
            if len(self._body) > MAX_BODY_BYTES:
                self._refuse(413, f"a question has at most {MAX_BODY_BYTES} bytes")
        elif self._question is not None:
            self._begin(dataclasses.replace(self._question, body=bytes(self._body)))

    def _begin(self, request: Request) -> None:
        self._answering = asyncio.get_running_loop().create_task(self._answer(request))

    def _refuse(self, status: int, why: str) -> None:
        async def refuse() -> None:
            self._send(Reply.text(status, why, {"Allow": "GET, HEAD, POST"}))

        self._answering = asyncio.get_running_loop().create_task(refuse())

    async def _answer(self, request: Request) -> None:
        try:
            answer = self._server.routes.answer(request)
            self._send(await asyncio.wait_for(answer, ANSWER_TIMEOUT_S))
        except asyncio.TimeoutError:
            # If the node's loop does not answer, the probe must fail.
            self._send(Reply.text(503, "TimeoutError: the event loop does not answer", {}))
        except Exception as error:
            # The edge of HTTP: every failure is an answer.
            log.exception("no answer to a request of HTTP")
            text = f"{type(error).__name__}: a defect; the server's log says more"
            self._send(Reply.text(500, text, {}))

    def _send(self, reply: Reply) -> None:
        assert self._transport is not None
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
        self._transport.close()


async def _give_up() -> None:
    """Cancels all other tasks of this loop: they wait for the node."""
    waiting = asyncio.all_tasks() - {asyncio.current_task()}
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


class HttpServer:
    """Serves HTTP (see the module) until it is closed. Raises OSError if it can't listen."""

    def __init__(self, host: str, port: int, node: Node, access: PageAccess = OPEN_HERE) -> None:
        """Starts to listen.

        access: to the pages. `is_local` and `own_name` are set here.
        """
        self._connections: dict[_Connection, None] = {}
        self._last_turn_s = time.monotonic()
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # `::` means every address, IPv4 included.
        both = address[0] == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            address[:2], family=family, backlog=MAX_CONNECTIONS, dualstack_ipv6=both
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
            self._loop.create_server(lambda: _Connection(self), sock=listener)
        )
        self._turn()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(_give_up())

    def _end(self) -> None:
        for connection in list(self._connections):
            connection.drop()
        # After the callbacks of these drops.
        self._loop.call_soon(self._loop.stop)

    def _turn(self) -> None:
        self._last_turn_s = time.monotonic()
        self._loop.call_later(TURN_S, self._turn)

    def opened(self, connection: _Connection) -> None:
        """Counts a new connection. If there are too many, drops the oldest that is not being
        answered, or else the new connection."""
        self._connections[connection] = None
        if len(self._connections) > MAX_CONNECTIONS:
            idle = (one for one in self._connections if not one.is_being_answered)
            going = next(idle, connection)
            # At once: more connections may come before `closed` is called.
            del self._connections[going]
            going.drop()

    def closed(self, connection: _Connection) -> None:
        """Forgets a connection that has ended."""
        self._connections.pop(connection, None)

    def is_alive(self) -> bool:
        """Returns False if the thread has died."""
        return self._thread.is_alive()

    def stalled_s(self, now_s: float) -> float:
        """Returns how long ago the thread's loop last turned."""
        return now_s - self._last_turn_s

    def close(self) -> None:
        """Stops listening and ends all connections."""
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join()
        self._loop.close()
