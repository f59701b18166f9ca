"""Health: starts and watches every loop of the server by name, and watches its threads.

A loop that works in turns is started by `async for _ in health.turns(name, pause_s)`, other work by
`run`. Both watch the task, so a loop can't be left unwatched by mistake.

Always true: a part (loop or thread) that has died stays a problem. A part that is stuck is a
problem until it continues. While there is a problem, the server reports that it does not serve, and
systemd's watchdog gets no signal. If an invariant of the core is broken, the core's answers are no
longer reliable. The server then grants no lease and stores no block, and the process ends. The next
server continues with the files of the arena and the block table, which it checks when it restores
the blocks. On the event loop only.
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
"""Shortest pause between two turns of a loop with a `wake` event, in seconds. Work that arrives in
short succession is then done in one turn."""
MAX_STORIES = 8
BOOKS = (
    "hotkv_server.cache",
    "hotkv_server.hints.book",
    "hotkv_server.residency.book",
    "hotkv_server.tiers.book",
    "hotkv_proto.table",
)
"""Modules whose assertions are invariants of the cache. A failed assertion in another module fails
only its call."""
BOOKS_PART, LOOK_PART = "the books", "the look at all others"
"""Names by which `Health.by_component` shows two parts that nobody passes to `Health.watch`: the
state of the cache (kept by the modules in BOOKS), and the task that checks all other parts."""
ENTRY_NAMES = ("entry", "entries", "bad")
"""Names of variables that, in the code of the cache, hold entry numbers (numbers of records in the
block table). `stories` looks for these variables in tracebacks."""


def _never(now_s: float) -> float:
    return 0.0


def _has_returned(ended: "asyncio.Task[Any]") -> bool:
    return not ended.cancelled() and ended.exception() is None


@dataclass(frozen=True, slots=True)
class Sign:
    """The name of a watched part of the server (a loop or thread), and how `Health` sees that it
    lives.

    is_alive: returns False once the part has died.
    stalled_s: given the time, returns how long the part has been stuck; 0 if it works or waits for
        work.
    limit_s: a part that is stuck for longer is a problem.
    """

    name: str
    is_alive: Callable[[], bool]
    stalled_s: Callable[[float], float]
    limit_s: float


class Health:
    """Watches the parts (loops and threads) of the server, and reports their problems.

    breach: describes the first broken invariant; empty while no invariant has broken.
    broken: event that is set together with `breach`.
    """

    def __init__(self) -> None:
        self.breach = ""
        self.broken = asyncio.Event()
        self._signs: list[Sign] = []
        self._faults: dict[str, Callable[[], str]] = {}
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
    ) -> None:
        """Watches a part of the server (a loop or thread) from now on.

        name: name of the part in messages.
        is_alive: returns False once the part has died.
        stalled_s: given the time, returns how long the part has been stuck, in seconds; 0 if it
            works or waits for work.
        limit_s: the part is a problem if it is stuck for longer.
        """
        self._signs.append(Sign(name, is_alive, stalled_s, limit_s))

    def watch_fault(self, name: str, fault: Callable[[], str]) -> None:
        """Watches a part of the server that reports its own fault. `fault`: returns a sentence
        about the fault; an empty text while the part works."""
        self._faults[name] = fault

    def run(
        self,
        name: str,
        work: Coroutine[Any, Any, None],
        stalled_s: Callable[[float], float] = _never,
        limit_s: float = STALLED_S,
    ) -> "asyncio.Task[None]":
        """Starts a task for `work`, which must not end by itself, and watches the task. If the
        task ends, also by a cancellation, it counts as dead.

        name: name of the task in messages.
        stalled_s: given the time, returns how long the work has been stuck, in seconds; 0 if it
            proceeds or waits for work.
        limit_s: the task is a problem if its work is stuck for longer.
        """
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
        """Runs the caller's `async for` loop in turns: pauses for `pause_s` before each turn. A
        turn is the body of the loop. Watches the current task under the name `name`.

        wake: event that ends a pause early, but not before WAKE_S. Cleared before each turn.

        A turn that lasts longer than `limit_s` counts as stuck. If the task returns, the watch
        ends. If the task raises or is cancelled, it counts as dead. A turn must not wait for a
        tier, a file or anything else that may hang; it must start another task for that.
        """
        task = asyncio.current_task()
        assert task is not None, "only a task has turns"
        begun_s = 0.0
        sign = Sign(
            name,
            # A task that has returned counts as alive, because a check may run between its return
            # and the call of `ended`.
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
        """Returns True if the task is watched and has not ended."""
        return task in self._tasks

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task died name=%s", task.get_name(), exc_info=error)
            self.note(f"the {task.get_name()}", error)

    def check(self, now_s: float) -> None:
        """Checks all watched parts. A part counts as stuck only if two checks in a row find it
        stuck. The reason: the whole process may have been stopped for a while (SIGSTOP, a suspended
        machine). Then the first check afterwards may find parts stuck that work normally."""
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
        """Returns the current problems, a sentence for each. While there is a problem, the server
        does not serve."""
        return tuple(said for said in self.by_component(now_s).values() if said)

    def by_component(self, now_s: float) -> dict[str, str]:
        """Returns the problem of each watched part, by the part's name; an empty text if the part
        works."""
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
        """Handles an unexpected exception that the caller has logged. A failed assertion in code
        that holds the cache's state (modules BOOKS) means that an invariant is broken. Then this
        method sets `breach` and `broken`, which ends the server.

        where: the part of the server that raised the exception, for the message.
        """
        if not isinstance(error, AssertionError) or not is_of_the_books(error):
            return
        log.critical("an invariant broke in %s: %s; the server ends", where, error)
        self.breach = self.breach or f"{where}: {error}"
        self.broken.set()
        for line in stories(error):
            log.critical("the books say of it: %s", line)

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handles an exception of an event loop's callback: logs it and calls `note`. Passed to
        `loop.set_exception_handler`."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if isinstance(error, BaseException):
            self.note(str(context.get("message", "a callback")), error)


def _frames(error: BaseException) -> Iterator[TracebackType]:
    at = error.__traceback__
    while at is not None:
        yield at
        at = at.tb_next


def is_of_the_books(error: BaseException) -> bool:
    """Returns True if the exception passed through code that holds the cache's state: the package
    `cache`, the block table, or the package `book` of a capability (the modules in BOOKS)."""
    return any(
        str(at.tb_frame.f_globals.get("__name__", "")).startswith(BOOKS) for at in _frames(error)
    )


def stories(error: BaseException) -> list[str]:
    """Describes, for the log, the entries (blocks) of the cache that an exception may concern.
    Returns a line with the present state of each entry (`inspect.story`), at most MAX_STORIES
    lines. Returns an empty list if the variables in the traceback do not lead to a `BlockIndex`.

    Finds the entry numbers in local variables of the traceback's frames, innermost frame first.
    ENTRY_NAMES lists the names of variables that hold entry numbers.
    """
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
    """Checks all watched parts every CHECK_S and calls `tell` after each check. Runs until it is
    cancelled. `tell`: reports the result of the check, for example to systemd."""
    while True:
        health.check(time.monotonic())
        await tell()
        await asyncio.sleep(CHECK_S)
