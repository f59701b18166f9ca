"""The life of a session: connections, with back-off between them.

`SessionLife` owns the session's thread, state, engine memory and fence. If a connection fails
for any reason, the thread opens a new one, until `close`. Always true: at most one connection is
open, and the state is CONNECTED only while one is.
"""

import logging
import random
import threading
import time
from collections.abc import Callable

from hotkv_client import targets
from hotkv_client.connection import Connection
from hotkv_client.fence import Fence, SharedFence
from hotkv_client.streams import LaneStream
from hotkv_client.targets import descriptor_socket
from hotkv_client.tickets import fetch_ticket
from hotkv_client.types import EngineMemory, LinkState, SessionConfig
from hotkv_client.wire import answers as _answers
from hotkv_proto.errors import HotKVError, Reason

CLOSE_WAIT_S = 5.0
logger = logging.getLogger(__name__)


class SessionLife:
    """Keeps a session connected from `start` to `close`.

    memory, fence: None for a session without memory. The fence is `memory.fence` or the session's
        own.
    connection: None while none is open.
    opened: the server's latest answer to an opening.
    """

    def __init__(self, config: SessionConfig, memory: EngineMemory | None) -> None:
        self._config = config
        self.memory = memory
        self.fence: Fence | SharedFence | None = None if memory is None else memory.fence or Fence()
        self.connection: Connection | None = None
        self.opened = _answers.NOT_OPENED
        self.state = LinkState.ABSENT
        # While a server is opening the session on it.
        self._opening: Connection | None = None
        self._changed = threading.Condition()
        self._awaited: Connection | None = None
        self._closed = threading.Event()
        self.thread = threading.Thread(
            target=self._run, name=f"hotkv-session-{config.role.name.lower()}", daemon=True
        )

    def start(self) -> None:
        self.thread.start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Blocks until the session is connected or closed, at most `timeout_s`."""
        with self._changed:
            ends = LinkState.CONNECTED, LinkState.CLOSED
            self._changed.wait_for(lambda: self.state in ends, timeout_s)
            return self.state is LinkState.CONNECTED

    def wait_opened(self, timeout_s: float) -> bool:
        """Waits for a server that has accepted the connection but not opened the session, at
        most `timeout_s`. Returns whether the session is connected."""
        with self._changed:
            self._changed.wait_for(lambda: self._opening is None, timeout_s)
            return self.state is LinkState.CONNECTED

    def close(self) -> None:
        """Ends connection and thread, then drops the session's own fence.

        Blocks until the thread has ended, at most 5 seconds; not in a callback of the session,
        after which the thread ends.
        """
        self._closed.set()
        with self._changed:
            connection, awaited, opening = self.connection, self._awaited, self._opening
        if connection is not None:
            connection.stream.put(None)
        elif opening is not None:
            # The server may need long to map the engine's memory.
            opening.stream.cancel()
        if awaited is not None:
            # Otherwise the thread would wait for a server until the timeout.
            awaited.stream.cancel()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(CLOSE_WAIT_S)
        if isinstance(self.fence, Fence) and not self.thread.is_alive():
            # The thread has ended and revoked the stores in flight.
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
        """Returns why the connection ended."""
        config, why_no_ticket = self._config, ""
        connection = Connection(config, self.memory, self.fence)
        try:
            has_answered = self._await_server(connection)
            if self._closed.is_set():
                return "closed"
            if not has_answered:
                why_not = f"no server answers at {config.target}"
                if not targets.is_unix(config.target):
                    why_not += ", or it and this client do not accept each other's TLS certificates"
                elif why_closed := targets.why_closed(config.target):
                    why_not += f": {why_closed}"
                return why_not
            with self._changed:
                self._opening = connection
            if self._closed.is_set():
                return "closed"
            ticket, why_no_ticket = self._ticket(connection)
            connection.open(ticket)
            with self._changed:
                self.connection = connection
                self.opened = connection.opened
            self._set_state(LinkState.CONNECTED, f"connected to {config.target}")
            self._end_opening()
            if self._closed.is_set():
                connection.stream.put(None)
            connection.serve(self._notice)
            return "the server closed the session"
        except HotKVError as refusal:
            if refusal.reason is Reason.UNAUTHENTICATED and why_no_ticket:
                return f"{refusal} (no ticket: {why_no_ticket})"
            return str(refusal)
        finally:
            self._lose(connection)

    def _await_server(self, connection: Connection) -> bool:
        """Whether one answers within `connect_timeout_s`; False after `close`."""
        with self._changed:
            self._awaited = connection
        # `close` sets `_closed` before it reads `_awaited`. If it has missed this, this sees
        # `_closed`.
        if self._closed.is_set():
            return False
        try:
            return connection.stream.has_answered(self._config.connect_timeout_s)
        finally:
            with self._changed:
                self._awaited = None

    def _ticket(self, connection: Connection) -> tuple[bytes, str]:
        """The ticket, which proves this process's user, or why there is none; both empty over
        TCP and on the lane. A server without tenants needs none, so this is no failure."""
        path = descriptor_socket(self._config.target)
        if path is None or isinstance(connection.stream, LaneStream):
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
        """Removes the connection, so that no call uses it, and ends it."""
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
    """Logs an exception of a callback of `SessionConfig`."""
    try:
        listener(*news)
    except Exception:
        logger.exception("a listener of the session raised")
