"""Runs servers that kill themselves at a chosen point, each within milliseconds.

`python -m tests.doubles.crashing` loads the modules once and forks a server for each line of
standard input: `{"flags": [...], "point": "publish", "when": "during", "pass": 3, "delay_us": 120,
"log": "/path"}`; `point` null: no kill. It writes `ready`, `started PID` and `ended PID STATUS`. If
it dies, the kernel kills its children.

The child kills itself (SIGKILL) before or after the n-th call (`pass`) of the point's function,
or `delay_us` after it has begun: perhaps within a compiled kernel, which releases the GIL.
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
import traceback
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
    "sums": "hotkv_server.node.transfers:StoreSums.take",
    "restore": "hotkv_server.node.persistence:restore",
    "adopt": "hotkv_server.memory.arena:NodeMemory.adopt",
    "open": "hotkv_server.memory.arena:NodeMemory.open",
    "state": "hotkv_server.memory.arena:write_state",
    "use": "hotkv_server.memory.arena:NodeMemory.save_use",
    "verify": "hotkv_server.integrity.verifier:Verifier.settle",
    "relocate": "hotkv_server.cache.table.index:BlockIndex.relocate",
    "bar": "hotkv_server.cache.room.slabs:SlabPool.bar",
    "punch": "hotkv_server.memory.mapping:FileMapping.punch",
    "grow": "hotkv_server.memory.arena:NodeMemory.grow",
}
"""Functions of stores, loads, evictions, rebalancing (evictions that free a slab for slots of
another size), restarts and resizes."""
MOMENTS = ("before", "during", "after")


@dataclass(frozen=True, slots=True)
class Crash:
    """When a server kills itself.

    point: name in `POINTS`.
    when: `before`, `during` or `after` the `nth` call.
    delay_us: with `during`, since the call began.
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


def _place(point: str) -> tuple[Any, str]:
    """A point's module or class, and the name of its function there. Raises KeyError without."""
    module_name, _, path = POINTS[point].partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = vars(owner)[parent]
    assert vars(owner)[name]
    return owner, name


def arm(crash: Crash) -> None:
    """Patches the point's function."""
    owner, name = _place(crash.point)
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
    """Ends the process."""
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
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


def _preload() -> None:
    """Loads what takes most of a start's time. Raises KeyError for a point that is gone."""
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
    for point in POINTS:
        _place(point)


def main() -> int:
    """When standard input ends, kills the children that still run."""
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
