"""Runs the real server with one fault.

`python -m tests.doubles.faults KIND ARGUMENTS... run FLAGS...` calls `KINDS[KIND]`, which
patches the server, then acts as `hotkv-server run FLAGS...`. Most faults begin when a file
appears.
"""

import asyncio
import builtins
import ctypes
import errno
import functools
import importlib
import io
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotkv_server import daemon
from hotkv_server.dataplane import host
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.memory import arena
from hotkv_server.memory.filling import Filling
from hotkv_server.node import event_loop, growth, health, node, persistence
from hotkv_server.tiers.disk.slab_file import FileIO
from hotkv_server.tiers.disk.tier import DiskTier
from hotkv_server.tiers.drive import below
from hotkv_server.tiers.drive import records as lower
from hotkv_server.tiers.s3 import tier as s3_tier
from hotkv_server.wire import calls, session_stream
from tests.doubles import with_constants
from tests.doubles.crashing import POINTS

LOOK_S = 0.02


def command(kind: str, *arguments: object) -> list[str]:
    """Command of a server with this fault. The caller appends flags."""
    return [sys.executable, "-m", "tests.doubles.faults", kind, *map(str, arguments), "run"]


# --------------------------------------------------------------------------- A function that breaks

HANG_S, HUNG_S = 3600.0, 1.0


class Death(BaseException):
    """Ends a thread or task: no BaseException is caught by the server's `except Exception`."""


def break_function(point: str, how: str, file: str) -> None:
    """The function at `point` (`module:Class.name`, or a name in `crashing.POINTS`) fails once
    `file` exists.

    how: `assert` (AssertionError), `refuse` (RuntimeError, as if the system refused a thread),
        `die` (ends its thread or task), `fault` (native code ends the process) or `hang` (never
        returns; if that stops the event loop, its stacks are logged after HUNG_S). Raises
        ValueError for others.
    """
    if how not in ("assert", "refuse", "die", "fault", "hang"):
        raise ValueError(f"HOW is {how!r}; allowed are assert, refuse, die, fault and hang")
    module_name, _, path = POINTS.get(point, point).partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function: Callable[..., Any] = vars(owner)[name]
    trigger = Path(file)
    event_loop.HUNG_S = event_loop.ARM_S = HUNG_S

    @functools.wraps(function)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        if trigger.exists():
            if how == "assert":
                raise AssertionError(f"injected at {point}")
            if how == "refuse":
                raise RuntimeError(f"injected at {point}")
            if how == "die":
                raise Death(point)
            if how == "fault":
                ctypes.string_at(0)
            time.sleep(HANG_S)
        return function(*args, **kwargs)

    setattr(owner, name, faulty)


# -------------------------------------------------------------------------------- A disk that hangs

STALLED_S, CLOSE_WAIT_S = 3.0, 1.0
CALLS = {
    "open": ("open",),
    "pread": ("pread", "preadv", "read"),
    "pwrite": ("pwrite", "pwritev", "write"),
    "fsync": ("fsync", "fdatasync"),
    "fallocate": ("posix_fallocate", "ftruncate", "truncate"),
    "rename": ("rename", "replace"),
    "stat": ("stat", "lstat", "fstat", "statvfs", "fstatvfs"),
    "unlink": ("unlink", "remove"),
}
"""Functions of `os` to patch, by kind of call."""


def hang_disk(folder: str, signs: str) -> None:
    """While a file `signs`/CALL exists, calls of this kind (in CALLS) on files below `folder` hang,
    on any thread; the first creates `signs`/CALL.met.

    Also shortens three waits: times of last use are saved every second, `Health` reports a stuck
    part after STALLED_S, and a stopping server waits only CLOSE_WAIT_S for the disk.
    """
    persistence.USE_PARTS = 5
    lower.CLOSE_WAIT_S = CLOSE_WAIT_S
    assert DiskTier.__init__.__kwdefaults__ is not None
    DiskTier.__init__.__kwdefaults__["close_wait_s"] = CLOSE_WAIT_S
    node.STALLED_TIMER_S = health.STALLED_S = STALLED_S
    real_readlink, real_open, access = os.readlink, os.open, os.access

    def is_below(file: Any) -> bool:
        try:
            path = real_readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file
            return os.fsdecode(path).startswith(folder)
        except (OSError, TypeError):
            return False

    def hang(call: str, file: Any) -> None:
        sign = f"{signs}/{call}"
        if not access(sign, os.F_OK) or not is_below(file):
            return
        os.close(real_open(f"{sign}.met", os.O_CREAT | os.O_WRONLY, 0o600))
        while access(sign, os.F_OK):
            time.sleep(LOOK_S)

    def hanging(call: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(file: Any, *arguments: Any, **named: Any) -> Any:
            hang(call, file)
            return function(file, *arguments, **named)

        return called

    def hanging_blocks(call: str, move: Callable[..., Any]) -> Callable[..., Any]:
        """`FileIO` moves blocks in compiled kernels, which call the C library: patching `os`
        does not reach them."""

        def moved(self: FileIO, *arguments: Any) -> Any:
            hang(call, self._fd)
            return move(self, *arguments)

        return moved

    assert os.path.exists(signs), f"{signs} is missing"
    for call, names in CALLS.items():
        for name in names:
            setattr(os, name, hanging(call, getattr(os, name)))
    io.open = builtins.open = hanging("open", builtins.open)
    FileIO.read_many = hanging_blocks("pread", FileIO.read_many)  # type: ignore[method-assign]
    FileIO.write_many = hanging_blocks("pwrite", FileIO.write_many)  # type: ignore[method-assign]


# ------------------------------------------------------------------------ A server that waits less


def hurry() -> None:
    """Shortens waits: until a pack of S3 is full, between saves of the number of bytes written
    to disk, and for a client that reads nothing."""
    s3_tier.LINGER_S = 0.2
    below.NOTE_S = 0.2
    session_stream.SLOW_READER_S = 1.0


# ---------------------------------------------------------------------------- A server that is slow


def slow_down(file: str, times: str, wait_s: str) -> None:
    """While `file` exists, copies take `times` as long, lookups and leases `wait_s` longer."""
    trigger, copy = Path(file), HostCopyEngine._copy

    def slow_copy(self: HostCopyEngine, *arguments: Any, **named: Any) -> None:
        began_s = time.perf_counter()
        copy(self, *arguments, **named)
        if trigger.exists():
            time.sleep((float(times) - 1) * (time.perf_counter() - began_s))

    def later(call: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*arguments: Any) -> Any:
            return asyncio.create_task(wait(arguments)) if trigger.exists() else call(*arguments)

        async def wait(arguments: tuple[Any, ...]) -> Any:
            await asyncio.sleep(float(wait_s))
            answered = call(*arguments)
            return await answered if isinstance(answered, asyncio.Task) else answered

        return answer

    HostCopyEngine._copy = slow_copy  # type: ignore[method-assign]
    for name in ("lookup", "acquire"):
        setattr(calls, name, later(getattr(calls, name)))


# ----------------------------------------------------------- An arena that fills when it is told to


def dam(file: str, patience_s: str = "0.1") -> None:
    """Controls prefaulting: a start prefaults one piece; each later one waits until the number
    in `file` reaches its end. The word `short` makes the next piece fail for lack of memory.
    Stores wait up to `patience_s` for memory."""
    growth.PATIENCE_S = float(patience_s)
    said_in, bring_in_next = Path(file), Filling._bring_in_next
    arena.FIRST_FILL_S, arena.FIRST_FILL_BYTES = 0.0, 0

    def dammed(filling: Filling, start: int, length: int) -> None:
        while filling._thread is not None and not filling._stop.is_set():
            said = said_in.read_text().strip()
            if said == "short":
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            if start + length <= int(said or 0):
                break
            time.sleep(LOOK_S)
        bring_in_next(filling, start, length)

    Filling._bring_in_next = dammed  # type: ignore[method-assign, assignment]


# ------------------------------------------------------------------- The server's tasks and threads


def tell_tasks(file: str) -> None:
    """On SIGUSR1 the server writes JSON to `file`:

    tasks: `name`, `of` (file of its function) and `knows` (whether `Health` watches it) of each.
    threads: names.
    parts: names of what `Health` watches.
    """
    watch_all, target = daemon.watch_all, Path(file)

    def watch(opened: daemon.OpenedNode, *rest: Any) -> None:
        watch_all(opened, *rest)
        watched = opened.node.health

        def tell() -> None:
            scratch = target.with_suffix(".new")
            scratch.write_text(json.dumps(_told(watched)))
            scratch.replace(target)

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)

    daemon.watch_all = watch  # type: ignore[assignment]


def _told(watched: health.Health) -> dict[str, Any]:
    tasks = []
    for task in asyncio.all_tasks():
        code = getattr(task.get_coro(), "cr_code", None)
        of = code.co_filename if code is not None else type(task.get_coro()).__module__
        name = task.get_name() if code is None else f"{task.get_name()} {code.co_qualname}"
        tasks.append({"name": name, "of": of, "knows": watched.knows(task)})
    return {
        "tasks": tasks,
        "threads": [thread.name for thread in threading.enumerate()],
        "parts": list(watched.by_component(0.0)),
    }


# ------------------------------------------------------------ A loop that is looked at all the time


def watch_loop() -> None:
    """Samples what the event loop runs all the time, not only while it is late."""
    event_loop.HELD_S, event_loop.TICK_S = -math.inf, 0.0005


KINDS: dict[str, Callable[..., None]] = {
    "break": break_function,
    "hang-disk": hang_disk,
    "hurry": hurry,
    "slow-down": slow_down,
    "dam": dam,
    "tell-tasks": tell_tasks,
    "watch-loop": watch_loop,
}


def main() -> int:
    kind, *arguments = sys.argv[1:]
    # Copies are made by threads, which can hang and die.
    host.PROMPT_JOB_BYTES = -1
    first_flag = arguments.index("run")
    KINDS[kind](*arguments[:first_flag])
    return with_constants.run(arguments[first_flag:])


if __name__ == "__main__":
    sys.exit(main())
