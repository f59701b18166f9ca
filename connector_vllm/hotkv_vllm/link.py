"""Opens sessions, waits for the server, and logs the state of a session.

Only `await_server` blocks. A change of state is logged once, not once per request: a lost
connection as a warning, a restored one as information.
"""

import logging
import threading
from collections.abc import Callable

from hotkv_client import targets
from hotkv_client.command.tables import human_bytes
from hotkv_client.fence import SharedFence
from hotkv_client.session import Session
from hotkv_client.types import EngineMemory, LinkState, SessionConfig
from hotkv_proto.layout import Layout
from hotkv_proto.order import NO_ORDER, DeviceOrder

logger = logging.getLogger("vllm.hotkv")
"""A child of vLLM's logger, so vLLM's handlers and level apply."""
for _library in ("hotkv_client", "hotkv_sparse"):
    logging.getLogger(_library).parent = logger

OPENING_S = 10.0
"""How much longer an engine's start waits for a server that has answered but opened no session
yet."""


def open_session(
    config: SessionConfig,
    layout: Layout | None = None,
    fds: dict[str, int] | None = None,
    order: DeviceOrder = NO_ORDER,
    fence: SharedFence | None = None,
) -> Session:
    """Starts a session, which connects in its own thread.

    layout: None without memory.
    fds: of that memory, by the id of its handle.
    fence: in which the scheduler revokes stores; None if only workers revoke them.
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
    """Blocks until the session is connected (True) or the wait is over.

    wait_s: how long to wait for an answer; 0: not at all.
    opening_s: how much longer if the server has answered: mapping the engine's memory takes
        seconds.
    """
    return session.wait_connected(wait_s) or (wait_s > 0 and session.wait_opened(opening_s))


def close_aside(session: Session) -> None:
    """Closes a session in another thread, because closing waits for the server. If the system
    refuses a thread, blocks for at most 5 s: after an exception the caller could not open
    another session."""
    thread = threading.Thread(target=session.close, name="hotkv-close", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        session.close()


def say_on(session: Session, target: str) -> None:
    logger.info(
        "hotkv on: %s of this model's KV are here (%s)", human_bytes(session.stored_bytes), target
    )


class StateLog:
    """Logs a session's state when it changes; the session's thread calls it.

    level: of the lines; INFO becomes WARNING for the line that there is no session.
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
        """Logs that the engine's start has found no server, which the session would report seconds
        later.

        wait_s: how long the start has waited. If 0, logs only that the socket can't be connected
            to.
        """
        late = f"no answer within {wait_s:g} s" if wait_s else ""
        why = targets.why_closed(self._target) or late
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
            # `say_on` logs a healthy start for the user.
            level = logging.DEBUG
        text = {
            LinkState.CONNECTED: "the KV cache server is there",
            LinkState.DRAINING: "the KV cache server drains and takes nothing new",
            LinkState.CLOSED: "session closed",
        }[state]
        logger.log(level, "hotkv %s: %s (%s)", self._who, text, why)


class StreamCount:
    """Counts a session's connections. Called in the session's thread.

    number: from 1; 0 before the first.
    num_changes: of the session's state.
    then: is also called.
    """

    def __init__(self, then: Callable[[LinkState, str], None]) -> None:
        self.number = self.num_changes = 0
        self._then = then

    def __call__(self, state: LinkState, why: str) -> None:
        self.number += state is LinkState.CONNECTED
        self.num_changes += 1
        self._then(state, why)
