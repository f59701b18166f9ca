"""Empties the shared cache of this key space, for vLLM's `reset_prefix_cache` with
`reset_external`.

This engine stores no block that was computed before the reset: it waits for its stores in flight,
sends a flush, and begins no load or store until the server has confirmed it; failed flushes are
retried. An idle engine takes steps until then: a flush with its next request would also delete what
other engines have stored meanwhile.

A pause or a sleep is no such reset (`checks.is_pausing`).
"""

import time
from concurrent.futures import Future, wait
from typing import Protocol

from hotkv_client import Flushed
from hotkv_client.session import Session
from hotkv_vllm.link import logger

RETRY_S = 1.0


class HeldStores(Protocol):
    """Part of `StorePlanner`.

    in_flight: false if there are none.
    is_held: the engine must not begin stores.
    """

    is_held: bool

    @property
    def in_flight(self) -> object: ...


class CacheReset:
    """under_way: until the server has confirmed the last flush that the reset needs."""

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
        """Flushes, and waits at most `timeout_s`. False if a connected server has not confirmed it.

        True without a server: no load is possible, and `step` flushes when it is back.
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
                # All stores had ended before, so this flush suffices if it is confirmed later. A
                # second one would delete what other engines have stored since.
                self._answer = answer
            logger.warning(
                "hotkv: the shared cache was not emptied (%s); it is not used until that is done",
                _why(answer),
            )
        elif not self._stores.in_flight:
            # No stores were in flight, so the reset is finished. Otherwise one could reach the
            # server after this flush, and `step` sends another.
            _warn_of_pending(answer)
            self._done()
        else:
            self._steps_until_s = time.monotonic() + timeout_s
        return accepted

    def wants_steps(self) -> bool:
        """Whether an idle engine must take steps. False without a connection, and once the time
        given to `begin` or `hold` has passed: the reset then goes on with the next request."""
        return self.under_way and time.monotonic() < self._steps_until_s and self._session.connected

    def hold(self, steps_s: float = 0.0) -> None:
        """Stops loads and stores and leaves the flush to later steps: for a `reset_cache` that
        raised, or that came before the session.

        steps_s: how long `wants_steps` may ask for steps.
        """
        self.under_way = self._stores.is_held = True
        self._answer = None
        self._retry_at_s = 0.0
        self._steps_until_s = time.monotonic() + steps_s

    def step(self, now_s: float) -> None:
        """Flushes once the stores in flight have ended. Does not wait."""
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
    if pending := answer.result().pending_tiers:
        logger.warning(
            "hotkv: the shared cache was emptied, but not yet in the tiers %s, which do not "
            "answer: until they do, other nodes may load blocks of before",
            ", ".join(pending),
        )


def _why(answer: "Future[Flushed]") -> str:
    return str(answer.exception()) if answer.done() else "no answer in time"
