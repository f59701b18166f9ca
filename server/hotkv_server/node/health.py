"""Watches every loop and thread of the server by name.

Always true: a dead part stays a problem, a stuck one is a problem until it continues. With a
problem, the server reports that it does not serve, and systemd's watchdog gets no signal. A part
that serves only some sessions, such as a device, is *partial*: its problem changes neither. When
an invariant of the core breaks, the server grants no lease, stores no block, and the process
ends; the next server checks the files as it restores them. On the event loop only.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.inspect import story
from hotkv_server.cache.table.index import BlockIndex

log = logging.getLogger(__name__)

CHECK_S = 0.5
STALLED_S = 10.0
WAKE_S = 0.002
"""Shortest pause of a loop with a `wake` event: work in short succession is done in one turn."""
MAX_STORIES = 8
BOOKS = (
    "hotkv_server.cache",
    "hotkv_server.hints.book",
    "hotkv_server.tiers.book",
    "hotkv_proto.table",
)
"""A failed assertion in these modules, or in a `book` of another package, is a broken invariant;
elsewhere it fails only its call."""
BOOKS_PART, LOOK_PART = "the books", "the look at all others"
"""Parts that nobody passes to `watch`: the state of the cache, and the task that checks all
others."""
ENTRY_NAMES = ("entry", "entries", "bad")
"""Variables of the cache's code that hold entry numbers, for `stories`."""


def _never(now_s: float) -> float:
    return 0.0


def _has_returned(ended: "asyncio.Task[Any]") -> bool:
    return not ended.cancelled() and ended.exception() is None


@dataclass(frozen=True, slots=True)
class Sign:
    """is_alive: False once the part has died.
    stalled_s: given the time, how long it has been stuck; 0 if it works or waits for work.
    limit_s: stuck for longer is a problem.
    """

    name: str
    is_alive: Callable[[], bool]
    stalled_s: Callable[[float], float]
    limit_s: float


class Health:
    """breach: the first broken invariant; empty while there is none.
    broken: set with `breach`.
    """

    def __init__(self) -> None:
        self.breach = ""
        self.broken = asyncio.Event()
        self._signs: list[Sign] = []
        self._faults: dict[str, Callable[[], str]] = {}
        self._partial: set[str] = set()
        self._problems: dict[str, str] = {}
        self._stalled: frozenset[str] = frozenset()
        self._checked_s: float | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        found = "; ".join(self._problems.values())
        return f"Health({len(self._signs)} signs, {found or 'all well'})"

    def watch(
        self,
        name: str,
        is_alive: Callable[[], bool],
        stalled_s: Callable[[float], float] = _never,
        limit_s: float = STALLED_S,
        *,
        is_partial: bool = False,
    ) -> None:
        """Arguments as in `Sign`. `is_partial`: it serves only some sessions."""
        self._signs.append(Sign(name, is_alive, stalled_s, limit_s))
        if is_partial:
            self._partial.add(name)

    def watch_fault(self, name: str, fault: Callable[[], str], *, is_partial: bool = False) -> None:
        """`fault`: a sentence about the part's fault; empty while it works. It replaces what
        `watch` finds for a part of the same name."""
        self._faults[name] = fault
        if is_partial:
            self._partial.add(name)

    def run(
        self,
        name: str,
        work: Coroutine[Any, Any, None],
        stalled_s: Callable[[float], float] = _never,
        limit_s: float = STALLED_S,
    ) -> "asyncio.Task[None]":
        """At any end of `work`, also by a cancellation, it counts as dead."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        self.watch(name, lambda: not task.done(), stalled_s, limit_s)
        return task

    async def turns(
        self,
        name: str,
        pause_s: float,
        limit_s: float = STALLED_S,
        wake: asyncio.Event | None = None,
    ) -> AsyncIterator[None]:
        """A turn is the body of the caller's `async for` loop, after a pause. Watches the current
        task.

        wake: ends a pause early, but not before WAKE_S. Cleared before each turn.

        A turn must wait for nothing that may hang. The watch ends if the task returns; a task
        that raises or is cancelled is dead.
        """
        task = asyncio.current_task()
        assert task is not None, "only a task has turns"
        begun_s = 0.0
        sign = Sign(
            name,
            # Alive when it has returned: a check may run before `ended` is called.
            lambda: not task.done() or _has_returned(task),
            lambda now_s: now_s - begun_s if begun_s else 0.0,
            limit_s,
        )
        self._signs.append(sign)
        self._tasks.add(task)

        def ended(done: "asyncio.Task[Any]") -> None:
            if _has_returned(done):
                self._signs.remove(sign)
            self._ended(done)

        task.add_done_callback(ended)
        while True:
            if wake is None:
                await asyncio.sleep(pause_s)
            else:
                await asyncio.sleep(WAKE_S)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(wake.wait(), pause_s)
                wake.clear()
            begun_s = time.monotonic()
            yield
            begun_s = 0.0

    def knows(self, task: "asyncio.Task[Any]") -> bool:
        """True while a watched task runs."""
        return task in self._tasks

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task died name=%s", task.get_name(), exc_info=error)
            self.note(f"the {task.get_name()}", error)

    def check(self, now_s: float) -> None:
        """A part is stuck only if two checks in a row find it so: after SIGSTOP or a suspension
        of the machine, one check may err."""
        found = {sign.name: f"{sign.name} has died" for sign in self._signs if not sign.is_alive()}
        found |= {name: said for name, fault in self._faults.items() if (said := fault())}
        times_s = {sign.name: sign.stalled_s(now_s) for sign in self._signs}
        stalled = {sign.name for sign in self._signs if times_s[sign.name] > sign.limit_s}
        for name in sorted(stalled & self._stalled - found.keys()):
            found[name] = f"{name} has been stuck for {times_s[name]:.0f} s"
        if found.keys() != self._problems.keys():
            log.log(
                logging.ERROR if found else logging.INFO,
                "health problems=%s",
                "; ".join(found.values()) or "none",
            )
        self._problems, self._stalled, self._checked_s = found, frozenset(stalled), now_s

    def problems(self, now_s: float) -> tuple[str, ...]:
        """Of parts that all sessions need."""
        found = self.by_component(now_s).items()
        return tuple(said for name, said in found if said and name not in self._partial)

    def partial_problems(self) -> dict[str, str]:
        """By name; only of partial parts that do not work."""
        return {name: said for name, said in self._problems.items() if name in self._partial}

    def by_component(self, now_s: float) -> dict[str, str]:
        """Empty for a part that works."""
        late_s = 0.0 if self._checked_s is None else now_s - self._checked_s
        return {
            BOOKS_PART: f"an invariant broke in {self.breach}" if self.breach else "",
            **{sign.name: "" for sign in self._signs},
            **dict.fromkeys(self._faults, ""),
            **self._problems,
            LOOK_PART: f"nobody has looked for {late_s:.0f} s" if late_s > STALLED_S else "",
        }

    # Broken invariants

    def note(self, where: str, error: BaseException) -> None:
        """Handles an exception that the caller has logged. A failed assertion in BOOKS sets
        `breach` and `broken`, which ends the server."""
        if not isinstance(error, AssertionError) or not is_invariant_failure(error):
            return
        log.critical("an invariant broke in %s: %s; the server ends", where, error)
        self.breach = self.breach or f"{where}: {error}"
        self.broken.set()
        for line in stories(error):
            log.critical("the books say of it: %s", line)

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        error = context.get("exception")
        if isinstance(error, BaseException):
            self.note(str(context.get("message", "a callback")), error)


def _frames(error: BaseException) -> Iterator[TracebackType]:
    at = error.__traceback__
    while at is not None:
        yield at
        at = at.tb_next


def is_invariant_failure(error: BaseException) -> bool:
    """True if the exception passed through the modules in BOOKS."""
    names = [str(at.tb_frame.f_globals.get("__name__", "")) for at in _frames(error)]
    return any(name.startswith(BOOKS) or ".book." in name for name in names)


def stories(error: BaseException) -> list[str]:
    """At most MAX_STORIES lines on entries that an exception may concern, found in local
    variables of the traceback, innermost frame first. Empty if they lead to no `BlockIndex`."""
    index: BlockIndex | None = None
    found: dict[int, None] = {}
    for at in reversed(list(_frames(error))):
        values = at.tb_frame.f_locals
        for name in ENTRY_NAMES:
            value = values.get(name)
            if isinstance(value, int | np.ndarray) and np.asarray(value).dtype.kind in "iu":
                found.update(dict.fromkeys(int(entry) for entry in np.ravel(value)[:MAX_STORIES]))
        owner = values.get("self")
        owner = owner.space if isinstance(owner, CacheCore) else owner
        owner = owner if isinstance(owner, BlockIndex) else getattr(owner, "index", None)
        index = owner if isinstance(owner, BlockIndex) else index
    return [] if index is None else [story(index, entry) for entry in list(found)[:MAX_STORIES]]


async def keep_checking(health: Health, tell: Callable[[], Awaitable[None]]) -> None:
    """Every CHECK_S, with a call of `tell`, until cancelled."""
    while True:
        health.check(time.monotonic())
        await tell()
        await asyncio.sleep(CHECK_S)
