"""The life of a session: a sequence of connections, with back-off between them.

`SessionLife` owns the session's thread, the session's state, the engine's memory, and the session's
fence (a page shared with the server, through which stores are revoked). If a connection fails for
any reason, the thread opens a new connection; only `close` ends the thread. Always true: at most
one connection is open, and the session's state is CONNECTED only while a connection is open.
"""

import logging
import random
import threading
import time
from collections.abc import Callable

import grpc

from hotkv_client import channels
from hotkv_client.connection import Connection
from hotkv_client.fence import Fence, SharedFence
from hotkv_client.link import descriptor_socket, fetch_ticket
from hotkv_client.types import EngineMemory, LinkState, SessionConfig
from hotkv_client.wire import answers as _answers
from hotkv_proto.errors import HotKVError, Reason

CLOSE_WAIT_S = 5.0
logger = logging.getLogger(__name__)


class SessionLife:
    """Maintains a session's connection from `start` to `close`.

    memory: the engine memory that each connection registers; None for a session without memory.
    connection: the open connection; None while no connection is open.
    opened: the server's answer when the latest connection was opened.
    fence: the page, shared with the server, through which stores are revoked. It is `memory.fence`
        if that is set, else the session's own page; None for a session without memory.
    state: whether a server is connected.
    """

    def __init__(self, config: SessionConfig, memory: EngineMemory | None) -> None:
        self._config = config
        self.memory = memory
        self.fence: Fence | SharedFence | None = None if memory is None else memory.fence or Fence()
        self.connection: Connection | None = None
        self.opened = _answers.NOT_OPENED
        self.state = LinkState.ABSENT
        # The connection while a server is opening the session on it; None otherwise.
        self._opening: Connection | None = None
        self._changed = threading.Condition()
        self._awaited: grpc.Future[bytes] | None = None
        self._closed = threading.Event()
        self.thread = threading.Thread(
            target=self._run, name=f"hotkv-session-{config.role.name.lower()}", daemon=True
        )

    def start(self) -> None:
        """Starts to connect in the background."""
        self.thread.start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Blocks until the session is connected or closed, at most `timeout_s`. Returns whether it
        is connected."""
        with self._changed:
            ends = LinkState.CONNECTED, LinkState.CLOSED
            self._changed.wait_for(lambda: self.state in ends, timeout_s)
            return self.state is LinkState.CONNECTED

    def wait_opened(self, timeout_s: float) -> bool:
        """If a server has accepted the connection but has not opened the session yet, waits until
        the opening has succeeded or failed, for at most `timeout_s`. Otherwise returns at once.
        Returns whether the session is connected."""
        with self._changed:
            self._changed.wait_for(lambda: self._opening is None, timeout_s)
            return self.state is LinkState.CONNECTED

    def close(self) -> None:
        """Ends the connection and the thread. Then drops the session's own fence (the page through
        which stores are revoked); a fence that another process shares stays.

        Blocks until the thread has ended, for at most 5 seconds. If a callback of the session calls
        this method, it does not block, and the thread ends after the callback.
        """
        self._closed.set()
        with self._changed:
            connection, awaited, opening = self.connection, self._awaited, self._opening
        if connection is not None:
            connection.outbox.put(None)
        elif opening is not None:
            # Does not wait until the session is open: the server may need long to map the engine's
            # memory.
            opening.channel.close()
        if awaited is not None:
            # Ends the thread's wait for a server, which would otherwise last until its timeout.
            awaited.cancel()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(CLOSE_WAIT_S)
        if isinstance(self.fence, Fence) and not self.thread.is_alive():
            # Drops the fence: the thread has ended and has revoked the stores in flight, so the
            # fence is unused.
            self.fence = None
        self._set_state(LinkState.CLOSED, "closed")

    def _run(self) -> None:
        delay_s = self._config.reconnect_initial_s
        while not self._closed.is_set():
            started_s = time.monotonic()
            try:
                reason = self._connect_and_serve()
            except (HotKVError, OSError, ValueError) as error:
                reason = str(error)
            except Exception as error:
                logger.exception("a session with the server broke; another one is opened")
                reason = f"{type(error).__name__}: {error}"
            if self._closed.is_set():
                return
            self._set_state(LinkState.ABSENT, reason)
            if time.monotonic() - started_s > 2 * self._config.reconnect_max_s:
                delay_s = self._config.reconnect_initial_s
            self._closed.wait(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, self._config.reconnect_max_s)

    def _connect_and_serve(self) -> str:
        """Opens a connection and serves it until it ends. Returns the reason why the connection
        ended."""
        config, why_no_ticket = self._config, ""
        connection = Connection(config, self.memory, self.fence)
        try:
            try:
                has_answered = self._await_server(connection.channel)
            except grpc.FutureCancelledError:
                return "closed"
            if not has_answered:
                why_not = f"no server answers at {config.target}"
                if not channels.is_unix(config.target):
                    why_not += ", or it and this client do not accept each other's TLS certificates"
                elif why_closed := channels.why_closed(config.target):
                    why_not += f": {why_closed}"
                return why_not
            with self._changed:
                self._opening = connection
            if self._closed.is_set():
                return "closed"
            ticket, why_no_ticket = self._ticket()
            connection.open(ticket)
            with self._changed:
                self.connection = connection
                self.opened = connection.opened
            self._set_state(LinkState.CONNECTED, f"connected to {config.target}")
            self._end_opening()
            if self._closed.is_set():
                connection.outbox.put(None)
            connection.serve(self._notice)
            return "the server closed the session"
        except grpc.RpcError as error:
            refusal = _answers.as_error(error)
            if refusal.reason is Reason.UNAUTHENTICATED and why_no_ticket:
                return f"{refusal} (no ticket: {why_no_ticket})"
            return str(refusal)
        finally:
            self._lose(connection)

    def _await_server(self, channel: grpc.Channel) -> bool:
        """Blocks until a server answers, at most `connect_timeout_s`. Returns whether one answers.

        Raises grpc.FutureCancelledError after `close`.
        """
        asked = channels.ask(channel, self._config.connect_timeout_s)
        with self._changed:
            self._awaited = asked
        # `close` sets `_closed` first and reads `_awaited` after that. So if `close` has missed
        # this call, this method sees `_closed` and cancels the call itself.
        if self._closed.is_set():
            asked.cancel()
        try:
            # `exception` waits for the call's end. If the call failed because the server refused
            # it, a server has answered all the same.
            asked.exception()
            return asked.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        finally:
            with self._changed:
                self._awaited = None

    def _ticket(self) -> tuple[bytes, str]:
        """Fetches a ticket, which proves to the server which user this process runs as.

        Returns the ticket and an empty reason, or an empty ticket and the reason why the server
        gave no ticket. Over TCP both are empty. A server without tenants needs no ticket, so a
        missing ticket is not a failure here.
        """
        path = descriptor_socket(self._config.target)
        if path is None:
            return b"", ""
        try:
            return fetch_ticket(path, self._config.connect_timeout_s), ""
        except (HotKVError, OSError) as error:
            return b"", str(error)

    def _notice(self, response: _answers.Response) -> None:
        match response.WhichOneof("body"):
            case "eviction_notice":
                if self._config.on_evicted is not None:
                    hash_bytes = self._config.key_space.hash_bytes
                    _tell(self._config.on_evicted, _answers.evicted(response, hash_bytes))
            case "drain_notice":
                self._set_state(LinkState.DRAINING, "the server is draining")

    def _lose(self, connection: Connection) -> None:
        """Removes the connection from the session, so that no further call uses it. Then ends the
        connection."""
        with self._changed:
            if self.connection is connection:
                self.connection = None
            if self.state in (LinkState.CONNECTED, LinkState.DRAINING):
                self.state = LinkState.ABSENT
        self._end_opening()
        connection.end()

    def _end_opening(self) -> None:
        with self._changed:
            self._opening = None
            self._changed.notify_all()

    def _set_state(self, state: LinkState, reason: str) -> None:
        with self._changed:
            if self.state is LinkState.CLOSED or (
                self.state is state and state is not LinkState.ABSENT
            ):
                return
            self.state = state
            self._changed.notify_all()
        if self._config.on_state is not None:
            _tell(self._config.on_state, state, reason)


def _tell(listener: Callable[..., None], *news: object) -> None:
    """Calls a callback of `SessionConfig` with the arguments `news`. Logs an exception of the
    callback and does not raise it."""
    try:
        listener(*news)
    except Exception:
        logger.exception("a listener of the session raised")
