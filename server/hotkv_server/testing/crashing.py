"""Runs servers that kill themselves at a chosen point, for the kill campaign (tests of restarts
after a kill). Each server starts within milliseconds.

`python -m hotkv_server.testing.crashing` loads the server's modules once. For each line of standard
input it forks a child that runs a server. A line is a JSON object `{"flags": [...], "point":
"publish", "when": "during", "pass": 3, "delay_us": 120, "log": "/path"}`; if `point` is null, the
child does not kill itself. The program writes `ready` once it has loaded the modules, `started PID`
for each child, and `ended PID STATUS` when a child has ended. If the program dies, the kernel kills
its children.

A point is a function of the server (`POINTS`). The child kills itself (SIGKILL) before or after the
n-th call of the function (`pass`), or `delay_us` microseconds after this call has begun. The kill
may hit the middle of a compiled kernel, because kernels release the GIL.
"""

import contextlib
import ctypes
import functools
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

POINTS = {
    "insert": "hotkv_server.cache.table.index:BlockIndex.insert",
    "publish": "hotkv_server.cache.table.index:BlockIndex.publish",
    "unlink": "hotkv_server.cache.table.index:BlockIndex._unlink",
    "release": "hotkv_server.cache.table.index:BlockIndex._release",
    "detach": "hotkv_server.cache.table.index:BlockIndex.detach",
    "evict": "hotkv_server.cache.room.removal:Removal.evict_blocks",
    "rebalance": "hotkv_server.cache.room.removal:Removal.evict",
    "flush": "hotkv_server.cache.room.removal:Removal.flush",
    "allocate": "hotkv_server.cache.room.slabs:SlabPool.allocate",
    "free": "hotkv_server.cache.room.slabs:SlabPool.free",
    "begin_load": "hotkv_server.cache.core:CacheCore.begin_load",
    "end_load": "hotkv_server.cache.core:CacheCore.end_load",
    "begin_store": "hotkv_server.cache.core:CacheCore.begin_store",
    "end_store": "hotkv_server.cache.core:CacheCore.end_store",
    "sketches": "hotkv_server.cache.table.index:Sketches.publish",
    "copy": "hotkv_server.dataplane.host:HostCopyEngine._copy",
    "sums": "hotkv_server.node.transfers:Transfers._take_sums",
    "restore": "hotkv_server.node.persistence:restore",
    "adopt": "hotkv_server.memory.arena:NodeMemory.adopt",
    "open": "hotkv_server.memory.arena:NodeMemory.open",
    "state": "hotkv_server.memory.arena:write_state",
    "use": "hotkv_server.memory.arena:NodeMemory.save_use",
    "verify": "hotkv_server.integrity.verifier:Verifier.settle",
}
"""Functions at which a server may kill itself, by name of the point. They belong to stores, loads,
evictions, rebalancing (evictions that free a piece of the arena for slots of another size) and
restarts."""
MOMENTS = ("before", "during", "after")


@dataclass(frozen=True, slots=True)
class Crash:
    """The moment at which a server kills itself: at a call of one of its functions (the point).

    point: name of the function in `POINTS`.
    when: `before` or `after` the `nth` call of the function, or `during` this call.
    delay_us: with `during`, microseconds after the call has begun.
    """

    point: str
    when: str
    nth: int
    delay_us: int


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_later(delay_us: int) -> None:
    def wait() -> None:
        until_s = time.perf_counter() + delay_us * 1e-6
        while time.perf_counter() < until_s:
            pass
        _die()

    threading.Thread(target=wait, daemon=True).start()


def arm(crash: Crash) -> None:
    """Patches the server's function `crash.point`, so that the process kills itself when `crash`
    says: before, after or during a certain call of the function. Raises KeyError for an unknown
    point."""
    module_name, _, path = POINTS[crash.point].partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    found = vars(owner)[name]
    function: Callable[..., Any] = found.__func__ if isinstance(found, staticmethod) else found
    calls = 0

    @functools.wraps(function)
    def armed(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != crash.nth:
            return function(*args, **kwargs)
        if crash.when == "before":
            _die()
        if crash.when == "during":
            _die_later(crash.delay_us)
        result = function(*args, **kwargs)
        if crash.when == "after":
            _die()
        return result

    setattr(owner, name, staticmethod(armed) if isinstance(found, staticmethod) else armed)


def _run_child(order: dict[str, Any]) -> None:
    """Runs a server in the forked child, until the server stops or kills itself. Ends the
    process."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    status = 1
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDWR)
        for fd, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(fd, target)
        if order.get("point"):
            arm(Crash(order["point"], order["when"], order["pass"], order["delay_us"]))
        from hotkv_server.cli import main

        status = main(["run", *order["flags"]])
    finally:
        os._exit(status)


def _preload() -> None:
    """Loads the modules and kernels whose loading takes most of the time of a server's start.
    Forked servers then need not load them again."""
    from hotkv_proto import native

    for name in (
        "hotkv_proto.table_reading",
        "hotkv_server.cache.table.table_kernels",
        "hotkv_server.cache.room.policies.queue_kernels",
        "hotkv_server.tiers.compression.codec_kernels",
        "hotkv_server.tiers.disk.disk_kernels",
        "hotkv_server.integrity.sum_kernels",
    ):
        native.load(name)
    importlib.import_module("hotkv_server.daemon")
    importlib.import_module("uvloop")


def main() -> int:
    """Forks a child that runs a server for each line of standard input. When standard input ends,
    kills the children that still run."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    _preload()
    children: set[int] = set()
    print("ready", flush=True)
    buffer = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.005)
        if readable:
            data = os.read(0, 1 << 16)
            if not data:
                break
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                sys.stdout.flush()
                pid = os.fork()
                if not pid:
                    _run_child(json.loads(line))
                children.add(pid)
                print(f"started {pid}", flush=True)
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children.discard(pid)
                print(f"ended {pid} {os.waitstatus_to_exitcode(status)}", flush=True)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
