"""Empties the shared cache of this key space (a model in a configuration) when vLLM's caller asks
for it (`reset_prefix_cache` with `reset_external`).

A *flush* is the call to the server that deletes all blocks of the key space.

Always true: after the reset, this engine stores no block that was computed before the reset. To
ensure this, the engine first waits until its stores of old blocks have ended. Then it sends a
flush, and begins no load or store until the server has confirmed this flush. If a flush fails, or
there is no server, later steps send it again.

An idle engine takes steps until its last stores have ended and the last flush is sent
(`CacheReset.wants_steps`). If the flush waited for the engine's next request, it would also delete
the blocks that other engines have stored since the reset.

A pause or a sleep of an engine is not such a reset (`checks.is_pausing`).
"""

import time
from concurrent.futures import Future, wait
from typing import Protocol

from hotkv_client import Flushed
from hotkv_client.session import Session
from hotkv_vllm.link import logger

RETRY_S = 1.0


class HeldStores(Protocol):
    """The part of `StorePlanner` that a reset uses.

    in_flight: the stores in flight. Its truth value is False if there are none.
    is_held: the reset sets this to True while the engine must not begin stores.
    """

    is_held: bool

    @property
    def in_flight(self) -> object: ...


class CacheReset:
    """Carries out a reset of the shared cache over several steps. Scheduler thread only.

    under_way: True from the call of `begin` or `hold` until the server has confirmed the last flush
        (deletion of the key space's blocks) that the reset needs.
    """

    def __init__(self, session: Session, stores: HeldStores) -> None:
        self._session = session
        self._stores = stores
        self._answer: Future[Flushed] | None = None
        self._retry_at_s = 0.0
        self._steps_until_s = 0.0
        self.under_way = False

    def __repr__(self) -> str:
        return f"CacheReset(under_way={self.under_way}, waiting={self._answer is not None})"

    def begin(self, timeout_s: float) -> bool:
        """Asks the server to flush the key space (delete its blocks), and waits for the answer, at
        most `timeout_s`. Returns False if a connected server has not confirmed the flush in this
        time.

        Returns True if the session has no server. Then no load is possible, and `step` requests the
        flush when the server is back.
        """
        self.hold()
        answer = self._session.flush()
        wait([answer], timeout_s)
        accepted = _is_good(answer)
        if not accepted and not self._session.connected:
            logger.info(
                "hotkv: there is no server whose cache could be emptied; that is done when it is "
                "back, before anything is loaded"
            )
            return True
        if not accepted:
            self._retry_at_s = time.monotonic() + RETRY_S
            if not answer.done() and not self._stores.in_flight:
                # All stores had ended before this flush was sent, so it deletes all old blocks. If
                # the server confirms this flush later, the reset is finished. A second flush would
                # delete blocks that other engines have stored since.
                self._answer = answer
            logger.warning(
                "hotkv: the shared cache was not emptied (%s); it is not used until that is done",
                _why(answer),
            )
        elif not self._stores.in_flight:
            # No stores are in flight, so this flush has deleted all old blocks, and the reset is
            # finished. (If stores were in flight, one could reach the server after this flush, so
            # `step` would send another flush.)
            _warn_of_pending(answer)
            self._done()
        else:
            self._steps_until_s = time.monotonic() + timeout_s
        return accepted

    def wants_steps(self) -> bool:
        """Returns True if vLLM must plan steps, even if the engine is idle, because a reset is not
        finished: stores that were in flight at the reset have not ended, or the server has not yet
        confirmed the flush (deletion of the key space's blocks) that follows these stores.

        Returns False once `timeout_s` has passed since `begin` (or `steps_s` since `hold`). Also
        returns False without a connection to the server. In both cases the reset continues with the
        engine's next request."""
        return self.under_way and time.monotonic() < self._steps_until_s and self._session.connected

    def hold(self, steps_s: float = 0.0) -> None:
        """Stops loads and stores and leaves the flush (deletion of the key space's blocks in the
        server) to the next steps. Used if the callback `reset_cache` has raised, and if it was
        called before the session was opened.

        steps_s: for how many seconds `wants_steps` may ask vLLM to take steps although no request
            runs.
        """
        self.under_way = self._stores.is_held = True
        self._answer = None
        self._retry_at_s = 0.0
        self._steps_until_s = time.monotonic() + steps_s

    def step(self, now_s: float) -> None:
        """Continues the reset, if one is under way. Once the stores in flight have ended, asks the
        server to flush the key space (delete its blocks). Ends the reset when the server has
        confirmed the flush. Does not wait."""
        if not self.under_way or self._stores.in_flight:
            return
        if self._answer is None:
            if now_s >= self._retry_at_s and self._session.connected:
                self._answer = self._session.flush()
        elif self._answer.done():
            if _is_good(self._answer):
                _warn_of_pending(self._answer)
                self._done()
            else:
                self._answer = None
                self._retry_at_s = now_s + RETRY_S

    def _done(self) -> None:
        self.under_way = self._stores.is_held = False
        self._answer = None


def _is_good(answer: "Future[Flushed]") -> bool:
    return answer.done() and answer.exception() is None


def _warn_of_pending(answer: "Future[Flushed]") -> None:
    """Logs a warning with the names of the tiers in which the key space's blocks are not deleted
    yet."""
    if pending := answer.result().pending_tiers:
        logger.warning(
            "hotkv: the shared cache was emptied, but not yet in the tiers %s, which do not "
            "answer: until they do, other nodes may load blocks of before",
            ", ".join(pending),
        )


def _why(answer: "Future[Flushed]") -> str:
    return str(answer.exception()) if answer.done() else "no answer in time"
