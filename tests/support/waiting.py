"""Waiting with a deadline, and processes that stop or end."""

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

WAIT_S = 120.0
LONGEST_PAUSE_S = 0.05
PR_SET_PDEATHSIG = 1


def wait_for(reached: Callable[[], object], what: str = "it", within_s: float = WAIT_S) -> None:
    """Raises AssertionError with `what`."""
    until_s, pause_s = time.monotonic() + within_s, 0.001
    while not reached():
        assert time.monotonic() < until_s, f"{what}: not within {within_s:g} s"
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)


async def eventually(
    reached: Callable[[], object], what: str = "it", *, within_s: float = WAIT_S
) -> None:
    """As `wait_for`, while the event loop runs."""
    until_s = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < until_s, f"{what}: not within {within_s:g} s"
        await asyncio.sleep(0.001)


def stop(pid: int) -> None:
    """Returns once all threads are stopped, which takes a while on a busy machine."""

    def has_stopped() -> bool:
        stats = Path(f"/proc/{pid}/task").glob("*/stat")
        try:
            return all(stat.read_text().rsplit(")", 1)[1].split()[0] in "TZ" for stat in stats)
        except OSError:
            # The thread has just ended.
            return False

    os.kill(pid, signal.SIGSTOP)
    wait_for(has_stopped)


def end_with_the_parent(number: int = signal.SIGKILL) -> None:
    """For the calling process only: not its children, nor a new program."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
