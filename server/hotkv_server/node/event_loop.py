"""Long work in slices (`slices`, `in_slices`), calls that may wait (`begun`), and how late the
loop is (`LoopLag`)."""

import asyncio
import contextlib
import faulthandler
import itertools
import logging
import os
import re
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hotkv_server.cache.room.removal import Parts

log = logging.getLogger(__name__)

# Slices: other tasks run between two.


SLICE_S = 0.004
"""A slice ends with the first step that ends after this time; most steps take less."""
T = TypeVar("T")


class Breaks:
    """Lets other tasks run, after each SLICE_S, while a coroutine does long work of many short
    parts."""

    def __init__(self) -> None:
        self._ends_s = time.perf_counter() + SLICE_S

    async def between(self) -> None:
        if time.perf_counter() >= self._ends_s:
            await asyncio.sleep(0)
            self._ends_s = time.perf_counter() + SLICE_S


async def slices(steps: Iterator[T]) -> AsyncIterator[tuple[list[T], bool]]:
    """Runs an iterator in slices. Yields, at least once, a slice's values, and True if another
    follows. The body of the caller's `async for` loop runs before other tasks do."""
    has_more = True
    taken: list[T]
    while has_more:
        ends_s, taken = time.perf_counter() + SLICE_S, []
        has_more = False
        for step in steps:
            taken.append(step)
            if time.perf_counter() >= ends_s:
                has_more = True
                break
        yield taken, has_more
        if has_more:
            await asyncio.sleep(0)


async def in_slices(
    parts: Parts[T], after_slice: Callable[[], object], *, and_last: bool = True
) -> T:
    """after_slice: called before other tasks run, also if the generator raises.
    and_last: False: not after the last slice; the caller does that."""
    while True:
        ends_s = time.perf_counter() + SLICE_S
        try:
            next(parts)
            while time.perf_counter() < ends_s:
                next(parts)
        except StopIteration as end:
            result: T = end.value
            if and_last:
                after_slice()
            return result
        except BaseException:
            after_slice()
            raise
        after_slice()
        await asyncio.sleep(0)


# Lag: how late the event loop runs its callbacks, and which function held it longest.
#
# A timer is due every TICK_S; when it is late, all callbacks are. While it is late by more than
# HELD_S, a thread looks again and again which function of hotkv the loop runs; the one seen for
# most of the delay held it.
#
# The thread reads stacks as faulthandler writes them, in one native call. It must not follow
# `f_back` of a running thread's frame: that thread frees the frames that are read next.
#
# While no delay is longer than QUIET_LAG_S, the timer is due only every QUIET_TICK_S, to save
# processor time; a delay then counts once for each TICK_S in it.
#
# If the loop hangs, the thread logs all stacks once, after HUNG_S. If native code holds the GIL,
# faulthandler's own timer, which the thread restarts every ARM_S, writes them to stderr.


TICK_S, QUIET_TICK_S = 0.02, 0.32
QUIET_LAG_S = 0.005
"""After a longer delay, measures every TICK_S again."""
WINDOW_S = 60.0
HELD_S = 0.02
"""While the loop is late by more, the thread looks which function it runs."""
MAX_PAUSE_S = 0.2
"""Pauses between two looks grow up to this, because a look holds the GIL for about a
millisecond."""
HUNG_S = 10.0
ARM_S = 5.0
"""Not at every look, because each restart of faulthandler's timer starts a thread."""


@dataclass(frozen=True, slots=True)
class Lag:
    """Of the event loop in the last WINDOW_S.

    held_by: function of hotkv that ran for most of the longest recorded delay; may be empty. The
        function that runs the loop stands for native code, or a process without processor time.
        With over 100 threads, a coroutine.
    """

    p50_s: float
    p99_s: float
    longest_s: float
    held_by: str


class Stacks:
    """Stacks of this process's threads. While faulthandler writes them, the GIL is held, so no
    frame changes."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("hotkv-stacks")

    def read(self) -> str:
        """The newest 100 threads, in faulthandler's words."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        faulthandler.dump_traceback(self._fd, all_threads=True)
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        os.close(self._fd)


_FRAME = re.compile(r' +File "(?:.*/)?([^"]*)\.py", line \d+ in (.*)')
_OWN_FRAME = re.compile(r' +File "(?:.*/)?(hotkv_\w+/[^"]*)\.py", line \d+ in (.*)')


def running_function(stacks: str, thread_id: int) -> str:
    """The innermost function of hotkv on a thread's stack, as module:name; else the innermost of
    all; empty if the thread is missing."""
    _, _, stack = stacks.partition(f"hread 0x{thread_id:016x} ")
    stack = stack.partition("\n\n")[0]
    if found := _OWN_FRAME.search(stack) or _FRAME.search(stack):
        module = found[1].replace("/", ".").removesuffix(".__init__")
        return f"{module}:{found[2]}"
    return ""


def _running_task(loop: asyncio.AbstractEventLoop) -> str:
    """Empty for a callback."""
    task = asyncio.current_task(loop)
    return "" if task is None else getattr(task.get_coro(), "__qualname__", "")


class LoopLag:
    """`start` and `read` are called on the loop that is measured."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque([0.0], maxlen=int(WINDOW_S / TICK_S))
        self._held: deque[tuple[float, float, str]] = deque(maxlen=64)
        self._due_s = 0.0
        self._num_ticks = 1
        self._seen = defaultdict[str, float](float)
        """Seconds of the present delay, by function."""
        self._armed_s = 0.0
        self._hung_since_s = 0.0
        """When the timer was due whose delay has been logged as a hang."""
        self._ended = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._loop_thread = 0
        self._loop: Any = None
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"LoopLag({len(self._samples)} samples)"

    def start(self) -> None:
        self._loop_thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        self._wait(self._loop)
        self._thread = threading.Thread(
            target=self._work, args=(Stacks(),), name="hotkv-lag", daemon=True
        )
        self._thread.start()

    def is_alive(self) -> bool:
        """True before `start` and after `close`."""
        return self._ended.is_set() or self._thread is None or self._thread.is_alive()

    def close(self) -> None:
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()

    def read(self) -> Lag:
        samples, since_s = np.fromiter(self._samples, np.float64), time.monotonic() - WINDOW_S
        p50_s, p99_s, longest_s = np.percentile(samples, (50, 99, 100)).tolist()
        named = [(lag_s, name) for at_s, lag_s, name in self._held if at_s > since_s]
        return Lag(p50_s, p99_s, longest_s, max(named)[1] if named else "")

    def longest_s(self, seconds: float) -> float:
        """About the longest delay in the last `seconds`."""
        newest = itertools.islice(reversed(self._samples), max(1, int(seconds / TICK_S)))
        return max(newest, default=0.0)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        pause_s = self._num_ticks * TICK_S
        self._due_s = time.monotonic() + pause_s
        self._timer = loop.call_later(pause_s, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = time.monotonic()
        lag_s = max(0.0, now_s - self._due_s)
        self._samples.extend([lag_s] * self._num_ticks)
        most = round(QUIET_TICK_S / TICK_S)
        self._num_ticks = 1 if lag_s > QUIET_LAG_S else min(2 * self._num_ticks, most)
        seen, self._seen = self._seen, defaultdict(float)
        if seen and lag_s >= HELD_S:
            self._held.append((now_s, lag_s, max(seen, key=seen.__getitem__)))
        self._wait(loop)

    def _work(self, stacks: Stacks) -> None:
        pause_s = 0.0
        while not self._ended.wait(pause_s):
            pause_s = self._look(stacks)
        faulthandler.cancel_dump_traceback_later()
        stacks.close()

    def _look(self, stacks: Stacks) -> float:
        """Returns the seconds until the next look."""
        now_s, due_s, seen = time.monotonic(), self._due_s, self._seen
        if now_s > self._armed_s + ARM_S and sys.stderr is not None:
            self._armed_s = now_s
            # The call starts a thread, which the system may refuse.
            with contextlib.suppress(RuntimeError):
                faulthandler.dump_traceback_later(HUNG_S + ARM_S)
        late_s = now_s - due_s
        if late_s <= HELD_S:
            return self._num_ticks * TICK_S
        found = stacks.read()
        # Of more than 100 threads, faulthandler leaves out the oldest, which runs the loop.
        name = running_function(found, self._loop_thread) or _running_task(self._loop)
        seen[name] += late_s - sum(seen.values())
        if late_s > HUNG_S and self._hung_since_s != due_s:
            self._hung_since_s = due_s
            log.error("the event loop has not answered for %.0f s; stacks:\n%s", late_s, found)
        return min(max(TICK_S, late_s), MAX_PAUSE_S)


async def begun(call: Callable[..., Any], *arguments: Any) -> "asyncio.Task[Any]":
    """Starts a session's call as a task, up to its first wait. The session's next calls see what
    it did until then, and don't wait for its end."""
    task = asyncio.create_task(call(*arguments))
    await asyncio.sleep(0)
    return task
