"""Helpers for the event loop: `slices` and `in_slices` run long work in slices, `begun` begins a
call that may wait, and `LoopLag` measures how late the loop is."""

import asyncio
import contextlib
import faulthandler
import itertools
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from hotkv_server.cache.room.removal import Parts

# Slices: long work runs on the event loop for SLICE_S at a time. Other tasks run between two
# slices.


SLICE_S = 0.004
"""Length of a slice, in seconds: how long a piece of long work runs until other tasks run. A slice
ends with the first step of the work that ends after this time; most steps take less."""
T = TypeVar("T")


class Breaks:
    """Lets other tasks of the event loop run while a coroutine does long work that consists of many
    short parts. A pause follows each slice of SLICE_S."""

    def __init__(self) -> None:
        self._ends_s = time.perf_counter() + SLICE_S

    async def between(self) -> None:
        """Lets other tasks run if the slice (SLICE_S) is over. The coroutine awaits this method
        between two parts of its work."""
        if time.perf_counter() >= self._ends_s:
            await asyncio.sleep(0)
            self._ends_s = time.perf_counter() + SLICE_S


async def slices(steps: Iterator[T]) -> AsyncIterator[tuple[list[T], bool]]:
    """Runs an iterator in slices of SLICE_S, between which other tasks run. Yields for each slice
    the values that the iterator yielded in it, and True if another slice follows.

    Yields at least once. The body of the caller's `async for` loop runs after each slice, before
    other tasks run.
    """
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


async def in_slices(parts: Parts[T], after_slice: Callable[[], object]) -> T:
    """Runs a generator to its end in slices of SLICE_S, between which other tasks run. Returns the
    generator's result.

    after_slice: called after each slice, before other tasks run; called also if the generator
        raises.
    """
    while True:
        ends_s = time.perf_counter() + SLICE_S
        try:
            next(parts)
            while time.perf_counter() < ends_s:
                next(parts)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            after_slice()
        await asyncio.sleep(0)


# Lag: how late the event loop runs its callbacks, and which function blocked it longest.
#
# A timer is due every TICK_S; when the timer runs late, every other callback of the loop is as
# late. While the timer is late by more than HELD_S, a thread looks every TICK_S at which function
# of hotkv the loop is running. The function that it saw most often is the one that held the loop.
# Figures cover the last WINDOW_S.
#
# While no delay is longer than QUIET_LAG_S, the timer is due only every QUIET_TICK_S, so that an
# idle server uses little processor time. Each delay that it measures then stands for the delays
# that were not measured: it counts once for each TICK_S in QUIET_TICK_S.
#
# If the loop hangs, faulthandler writes the stacks of all threads to stderr, once, between HUNG_S
# and HUNG_S + ARM_S after the timer last ran. faulthandler does not need the GIL, so it works
# whatever blocks the loop.


TICK_S, QUIET_TICK_S = 0.02, 0.32
QUIET_LAG_S = 0.005
"""After a delay longer than this, `LoopLag` measures every TICK_S again, not every QUIET_TICK_S."""
WINDOW_S = 60.0
HELD_S = 0.02
"""While the loop is late by more than this, in seconds, the thread of `LoopLag` counts which
functions the loop is running."""
HUNG_S = 10.0
ARM_S = 5.0
"""Interval at which a working loop restarts faulthandler's timer, so that the timer does not run
out. Not at every tick, because each restart starts a thread."""


@dataclass(frozen=True, slots=True)
class Lag:
    """Delays of the event loop in the last WINDOW_S, in seconds.

    p50_s, p99_s: percentiles of the delays.
    held_by: function that the loop was running for most of the longest delay that the thread of
        `LoopLag` has recorded; empty if no delay was recorded.
    """

    p50_s: float
    p99_s: float
    longest_s: float
    held_by: str


class LoopLag:
    """Measures how late an event loop runs its callbacks. Call `start` and `read` on that loop."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque([0.0], maxlen=int(WINDOW_S / TICK_S))
        self._held: deque[tuple[float, float, str]] = deque(maxlen=64)
        self._due_s = 0.0
        self._num_ticks = 1
        self._armed_s = 0.0
        self._seen: Counter[str] = Counter()
        self._ended = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._loop_thread = 0
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"LoopLag({len(self._samples)} samples)"

    def start(self) -> None:
        """Begins to measure the running event loop. Call it on that loop's thread."""
        self._loop_thread = threading.get_ident()
        self._wait(asyncio.get_running_loop())
        self._thread = threading.Thread(target=self._look, name="hotkv-lag", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Returns False if the thread that watches the loop has died. Returns True before `start`
        and after `close`."""
        return self._ended.is_set() or self._thread is None or self._thread.is_alive()

    def close(self) -> None:
        """Stops the timer and the thread that measure the delays of the event loop."""
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()

    def read(self) -> Lag:
        """Returns how late the event loop was in the last WINDOW_S."""
        samples, since_s = np.fromiter(self._samples, np.float64), time.monotonic() - WINDOW_S
        p50_s, p99_s, longest_s = np.percentile(samples, (50, 99, 100)).tolist()
        named = [(lag_s, name) for at_s, lag_s, name in self._held if at_s > since_s]
        return Lag(p50_s, p99_s, longest_s, max(named)[1] if named else "")

    def longest_s(self, seconds: float) -> float:
        """Returns about the longest delay of the event loop in the last `seconds` seconds."""
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
        seen, self._seen = self._seen, Counter()
        if seen and lag_s >= HELD_S:
            self._held.append((now_s, lag_s, max(seen, key=seen.__getitem__)))
        if now_s > self._armed_s + ARM_S and sys.stderr is not None:
            self._armed_s = now_s
            # The call starts a thread, which the system may refuse.
            with contextlib.suppress(RuntimeError):
                faulthandler.dump_traceback_later(HUNG_S + ARM_S)
        self._wait(loop)

    def _look(self) -> None:
        """Watches the loop, on the thread of this object. While the loop is late, counts which
        functions the loop is running."""
        while not self._ended.wait(TICK_S if self._seen else self._num_ticks * TICK_S):
            if time.monotonic() > self._due_s + HELD_S:
                self._seen[_function_of(sys._current_frames().get(self._loop_thread))] += 1


def _function_of(frame: FrameType | None) -> str:
    """Returns the innermost function of hotkv on the stack whose innermost frame is `frame`, as
    module:name. If the stack has no function of hotkv, returns the innermost function."""
    innermost = frame
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("hotkv"):
            return f"{module}:{frame.f_code.co_name}"
        frame = frame.f_back
    return (
        ""
        if innermost is None
        else f"{innermost.f_globals.get('__name__', '')}:{innermost.f_code.co_name}"
    )


async def begun(call: Callable[..., Any], *arguments: Any) -> "asyncio.Task[Any]":
    """Starts a session's call as a task, and runs the task up to its first wait. Returns the task.
    The session's next calls don't wait for the end of the task. But they see the changes that the
    task has made up to its first wait."""
    task = asyncio.create_task(call(*arguments))
    await asyncio.sleep(0)
    return task
