"""Connects the connector to hotkv's client: functions that open a session (a connection to the
server for one key space) and wait for its server, and the log of a session's state (`StateLog`).

Only `await_server` blocks. A change of a session's state is logged once, not once per request: a
lost connection as a warning, a restored connection as information.
"""

import logging
import threading

from hotkv_client import channels
from hotkv_client.command.tables import human_bytes
from hotkv_client.fence import SharedFence
from hotkv_client.session import Session
from hotkv_client.types import EngineMemory, LinkState, SessionConfig
from hotkv_proto.layout import Layout
from hotkv_proto.order import NO_ORDER, DeviceOrder

logger = logging.getLogger("vllm.hotkv")
"""The connector's logger: a child of vLLM's logger, so that vLLM's handlers and level apply."""

OPENING_S = 10.0
"""If a server has answered but has not opened the session yet, an engine's start waits this much
longer, seconds."""


def open_session(
    config: SessionConfig,
    layout: Layout | None = None,
    fds: dict[str, int] | None = None,
    order: DeviceOrder = NO_ORDER,
    fence: SharedFence | None = None,
) -> Session:
    """Creates a session, starts it, and returns it. The session connects in its own thread.

    layout: memory to register with the server; None for a session without memory.
    fds: file descriptors of that memory, by the id of its handle.
    order: how the server's transfers wait until the device has finished the work in its queue.
    fence: the page, shared with the scheduler, in which it revokes stores; None if only workers
        revoke stores.
    """
    memory = (
        None
        if layout is None
        else EngineMemory(layout=layout, fds=fds or {}, order=order, fence=fence)
    )
    session = Session(config, memory)
    session.start()
    return session


def await_server(session: Session, wait_s: float, opening_s: float = 0.0) -> bool:
    """Blocks until the session is connected or the wait is over. Returns True if the session is
    connected.

    wait_s: how long to wait for a server to answer; 0: do not wait.
    opening_s: how much longer to wait if a server has answered but has not opened the session yet,
        because it must first map the engine's memory, which takes seconds.
    """
    return session.wait_connected(wait_s) or (wait_s > 0 and session.wait_opened(opening_s))


def close_aside(session: Session) -> None:
    """Closes a session in another thread, because closing waits for the server. If the system
    refuses a thread, does not raise, but closes the session in this thread, which takes at most 5
    seconds. (After an exception the session would stay open in its old key space, and the caller
    could not open another session.)"""
    thread = threading.Thread(target=session.close, name="hotkv-close", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        session.close()


def say_on(session: Session, target: str) -> None:
    """Logs that hotkv is on, and how many bytes of the key space the server has.

    target: the address of the server, `hotkv.target`.
    """
    logger.info(
        "hotkv on: %s of this model's KV are here (%s)", human_bytes(session.stored_bytes), target
    )


class StateLog:
    """Logs a session's state each time it changes. The session's thread calls this object with the
    state and the reason.

    who: names the session's owner in the log, for example `scheduler`.
    target: the address of the server, `hotkv.target`.
    level: level of the log lines. Exception: if it is INFO, the line that says that there is no
        session has the level WARNING.
    why: the reason in the last call.
    """

    def __init__(self, who: str, target: str, level: int) -> None:
        self._who = who
        self._target = target
        self._level = level
        self._last: LinkState | None = None
        self._lock = threading.Lock()
        self.why = ""

    def __call__(self, state: LinkState, why: str) -> None:
        with self._lock:
            self._log(state, why)

    def waited(self, wait_s: float) -> None:
        """Logs that the engine's start has found no server. The session itself would report this
        only seconds later. Does nothing if the session has already reported a state.

        wait_s: how long the start has waited, seconds. If it is 0, logs only that this process
            can't connect to the server's socket.
        """
        late = f"no answer within {wait_s:g} s" if wait_s else ""
        why = channels.why_closed(self._target) or late
        with self._lock:
            if self._last is None and why:
                self._log(LinkState.ABSENT, why)

    def _log(self, state: LinkState, why: str) -> None:
        self.why = why
        if state is self._last:
            return
        is_first, self._last = self._last is None, state
        level = self._level
        if state is LinkState.ABSENT:
            level = logging.WARNING if level == logging.INFO else level
            logger.log(
                level,
                "hotkv %s: no session with a KV cache server at hotkv.target %s (%s): the engine "
                "runs without it and goes on trying; `hotkv doctor` examines this machine",
                self._who,
                self._target,
                why,
            )
            return
        if state is LinkState.CONNECTED and is_first:
            # Logs a healthy start only at DEBUG level, because `say_on` logs it for the user.
            level = logging.DEBUG
        text = {
            LinkState.CONNECTED: "the KV cache server is there",
            LinkState.DRAINING: "the KV cache server drains and takes nothing new",
            LinkState.CLOSED: "session closed",
        }[state]
        logger.log(level, "hotkv %s: %s (%s)", self._who, text, why)
