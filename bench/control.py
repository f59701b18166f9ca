"""Measures what the server adds to a device's copies: `python -m bench.control [--mib N] [--order
flags|events|host] [--json]`. It needs a C compiler and no GPU.

The server's real CUDA code runs on `tests/device/timed_gpu.c`, whose copies take the time of PCIe 5
and no processor time. Loads and stores, and a plain loop of the same copies, take turns. Figures:

control_load_ms, control_store_ms: medians of the time beyond the plain loop.
first_piece_us, last_piece_us: from the engine's call of a load to the first copy's submission, and
    from the end of the last copy to the engine's knowledge of it.
gb_per_cpu_s: copied bytes over the processor time of the server, stores with their checksums.
The arena is never full: a server makes room ahead (`cache.room.reserve`).

pinning_ping_ms, pinning_ping_most_ms: pings of another session while each piece's pinning holds
    the driver for REGISTER_S and loads wait for marks, median and most.
pinning_over_idle: the median over that of pings afterwards, to a server that does nothing else.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from bench.cost import thread_times
from bench.gpu.engine import Engine, GpuServer, MadeUp, Shape, done
from bench.report import at_least, at_most, median, parser, print_figures, print_report, say
from bench.servers import MIB, ROOM_BYTES, new_hashes
from demo.processes import ends_cleanly, runtime_folder
from hotkv_server.dataplane.engines import CopyEngines
from hotkv_server.device import start as device_start
from hotkv_server.device.runtime import Priority
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.transfers import Transfer
from hotkv_server.wire.session_stream import SessionCalls
from tests.device.timed_gpu import TimedGpus, runtime
from tests.doubles import with_constants

BYTES_PER_S = 53e9
MOVED_BYTES = 64 << 10
"""Marks and tables are copied; blocks only take their time."""
PAGE_BYTES, LAYERS = 64 << 10, 32
BLOCK_BYTES = LAYERS * PAGE_BYTES
RESIDENT_BLOCKS, RESIDENT_BYTES = 1 << 16, 4096
"""Stored before: an arena is not empty. With few blocks the policy's shadow caches sample all."""
PINNED_ARENAS = 5
"""Size of the arena while it is pinned, in transfers."""
REGISTER_S, PIN_PIECE_BYTES = 0.5, 64 * MIB
PING_PAUSE_S, IDLE_PINGS = 0.02, 200
STAMPED: dict[str, tuple[Any, str]] = {
    "server has the message": (SessionCalls, "handle"),
    "planned, room made": (CopyEngines, "submit"),
    "mark passed": (CopyEngines, "_start"),
    "copies reported": (Transfer, "_copied"),
    "event loop knows": (Transfer, "_ended"),
    "word written": (LiveSession, "tell_done"),
}
"""A stage begins with the call of a method."""
FIRST, LAST, KNOWN = "first copy submitted", "last copy ended", "engine knows"
BOUNDS = {
    "control_load_ms": at_most(1.0),
    "control_store_ms": at_most(1.5),
    "first_piece_us": at_most(350.0),
    "gb_per_cpu_s": at_least(400.0),
}
ORDER = (*list(STAMPED)[:3], FIRST, LAST, *list(STAMPED)[3:], KNOWN)


# ------------------------------------------------------------------------------------ In the server


def stamp_calls(
    into: list[tuple[str, int]],
    more: Mapping[str, Sequence[tuple[Any, str]]] = MappingProxyType({}),
) -> None:
    """`more`: stages beside those of STAMPED, which begin with any of the methods."""

    def stamping(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def stamped(*arguments: Any) -> Any:
            into.append((stage, time.monotonic_ns()))
            return call(*arguments)

        return stamped

    methods = {stage: [method] for stage, method in STAMPED.items()} | dict(more)
    for stage, found in methods.items():
        for owner, name in found:
            setattr(owner, name, stamping(stage, getattr(owner, name)))


def serve(control: Path, flags: list[str]) -> int:
    """Writes the stamps beside `control` at the end."""
    stamps: list[tuple[str, int]] = []
    stamp_calls(stamps)
    device_start.new_runtime = lambda: runtime(control)
    status = with_constants.run(flags)
    control.with_suffix(".stamps").write_text(json.dumps(stamps))
    return status


# ------------------------------------------------------------------------------------ In the engine


class Side(MadeUp):
    def __init__(self, gpus: TimedGpus) -> None:
        super().__init__()
        self._gpus = gpus

    def server_command(self) -> list[str]:
        return [*self._gpus.command("bench.control"), *with_constants.copies_by("batch")]


class PlainLoop:
    """The same copies, one call for each block, in this process."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        folder.mkdir()
        gpus = TimedGpus(folder, bytes_per_s=BYTES_PER_S, moved_bytes=MOVED_BYTES)
        self._runtime = runtime(gpus.path)
        self._stream = self._runtime.new_stream(0, Priority.HIGH)
        self._event = self._runtime.new_event(0)
        self._device = self._runtime.allocate(0, num_bytes)
        self._host = self._runtime.allocate_pinned(num_bytes)
        self._num_bytes = num_bytes

    def ms(self, what: str) -> float:
        dst, src = self._device, self._host
        if what == "store":
            dst, src = src, dst
        began_s = time.perf_counter()
        for at in range(0, self._num_bytes, BLOCK_BYTES):
            self._runtime.copy(self._stream, dst + at, src + at, BLOCK_BYTES)
        self._runtime.record(self._event, self._stream)
        self._runtime.synchronize(self._event)
        return 1e3 * (time.perf_counter() - began_s)


class Times(Protocol):
    """When a device has copied, as `TimedGpus` tells it; 0 if it can't."""

    def forget_times(self) -> None: ...
    def times_ns(self, way: str) -> tuple[int, int]: ...


class Turns:
    """Loads and stores of one engine, and the times of each.

    `took_ms`: by "load" or "store".
    `points`: for each turn its kind, and the known stages with their times, in monotonic ns.
    """

    def __init__(self, gpus: Times, server: GpuServer, engine: Engine) -> None:
        self._gpus, self._engine, self._pid = gpus, engine, server.pid
        num_blocks = engine.shape.num_blocks // 2
        ids = np.random.default_rng(1).permutation(engine.shape.num_blocks).astype(np.int32)
        self._mine, self._others = ids[:num_blocks], ids[num_blocks:]
        names = new_hashes(num_blocks)
        done(engine.store(names, self._mine))
        self._lease = engine.lease(names)
        self.took_ms: dict[str, list[float]] = {"load": [], "store": []}
        self.points: list[tuple[str, dict[str, int]]] = []
        self.num_bytes, self.cpu_s = 0, 0.0

    def turn(self, what: str) -> None:
        fresh = new_hashes(len(self._mine))
        self._gpus.forget_times()
        cpu_s = sum(thread_times(self._pid).values())
        mark = self._engine.marks.make(self._engine.session.order_kind)
        began_ns = time.monotonic_ns()
        if what == "load":
            flying = self._engine.load(self._lease, self._others, mark.after)
        else:
            flying = self._engine.store(fresh, self._mine, mark.after)
        while not flying.done():
            os.sched_yield()
        known_ns = time.monotonic_ns()
        self.num_bytes += done(flying).num_bytes
        self._engine.marks.done(mark)
        self.cpu_s += sum(thread_times(self._pid).values()) - cpu_s
        first_ns, last_ns = self._gpus.times_ns(what)
        self.took_ms[what].append((known_ns - began_ns) / 1e6)
        told = {FIRST: first_ns, LAST: last_ns} if first_ns else {}
        self.points.append((what, {"": began_ns, **told, KNOWN: known_ns}))

    def load(self) -> None:
        mark = self._engine.marks.make(self._engine.session.order_kind)
        done(self._engine.load(self._lease, self._others[:8], mark.after))
        self._engine.marks.done(mark)


@contextmanager
def serving(
    folder: Path, order: str, num_bytes: int, arenas: int, register_s: float = 0.0
) -> Iterator[tuple[TimedGpus, GpuServer, Turns]]:
    """`arenas`: size of the arena, in transfers; `register_s`: of a piece of it, which is then not
    pinned yet."""
    gpus = TimedGpus(
        folder, bytes_per_s=BYTES_PER_S, register_s=register_s, moved_bytes=MOVED_BYTES
    )
    side = Side(gpus)
    flags: tuple[str, ...] = ()
    if register_s:
        pieces = with_constants.constant("device.start.PIN_PIECE_BYTES", PIN_PIECE_BYTES)
        flags = (*pieces, "--arena.prefault", "false")
    with GpuServer(side, folder, arenas * num_bytes, *flags) as server:
        server.wait_ready(90)
        if not register_s:
            server.wait_settled(calibrated=False)
            fill(side, server)
        shape = Shape(PAGE_BYTES, LAYERS, 2 * num_bytes // BLOCK_BYTES, "BLHNC")
        engine = Engine(side, server.target, shape, order=order).connected()
        yield gpus, server, Turns(gpus, server, engine)
        engine.close()


def fill(side: Side, server: GpuServer) -> None:
    shape = Shape(RESIDENT_BYTES, 1, RESIDENT_BLOCKS, "BLHNC")
    engine = Engine(side, server.target, shape, model="resident").connected()
    ids = np.arange(RESIDENT_BLOCKS, dtype=np.int32)
    for part in np.array_split(ids, 8):
        done(engine.store(new_hashes(len(part)), part))
    engine.close()


def measure_turns(
    folder: Path, order: str, num_bytes: int, rounds: int
) -> tuple[dict[str, float], list[tuple[str, ...]]]:
    """Figures, and the rows of stages."""
    plain_ms: dict[str, list[float]] = {"load": [], "store": []}
    with serving(folder, order, num_bytes, rounds + 4) as (gpus, _, turns):
        plain = PlainLoop(folder / "plain", num_bytes)
        for number in range(rounds):
            if number % 10 == 0:
                say(f"round {number + 1} of {rounds}")
            for what in plain_ms:
                time.sleep(0.005)
                turns.turn(what)
                time.sleep(0.005)
                plain_ms[what].append(plain.ms(what))
    stamps = json.loads(gpus.path.with_suffix(".stamps").read_text())
    rows, by_stage = list[tuple[str, ...]](), stages(turns.points, stamps)
    figures = {"gb_per_cpu_s": turns.num_bytes / turns.cpu_s / 1e9}
    for what, found in by_stage.items():
        rows += [
            (what, stage, f"{median(found[stage]):.0f}", f"{min(found[stage]):.0f}")
            for stage in ORDER
            if stage in found
        ]
        took, plain_one = median(turns.took_ms[what]), median(plain_ms[what])
        suffix = "" if what == "load" else "_of_store"
        figures |= {
            f"control_{what}_ms": took - plain_one,
            f"{what}_ms": took,
            f"plain_{what}_ms": plain_one,
            f"first_piece{suffix}_us": median(found[FIRST]),
            f"last_piece{suffix}_us": median(np.subtract(found[KNOWN], found[LAST]).tolist()),
        }
    return figures, rows


def stages(
    points: list[tuple[str, dict[str, int]]], stamps: list[tuple[str, int]]
) -> dict[str, dict[str, list[float]]]:
    """Microseconds since the engine's call, by kind of turn and stage."""
    found: dict[str, dict[str, list[float]]] = {"load": {}, "store": {}}
    for what, known in points:
        within = dict[str, int]()
        for stage, at_ns in stamps:
            if known[""] <= at_ns <= known[KNOWN]:
                within.setdefault(stage, at_ns)
        for stage, at_ns in {**within, **known}.items():
            found[what].setdefault(stage, []).append((at_ns - known[""]) / 1e3)
    return found


def measure_pinning(folder: Path, order: str, num_bytes: int) -> dict[str, float]:
    """Pings of a session while the server pins its arena, and loads of another wait for marks."""
    with serving(folder, order, num_bytes, PINNED_ARENAS, REGISTER_S) as (gpus, server, turns):
        shape = Shape(PAGE_BYTES, LAYERS, 4, "BLHNC")
        other = Engine(Side(gpus), server.target, shape, model="other").connected()
        ended = threading.Event()

        def load() -> None:
            while not ended.is_set():
                turns.load()

        loading, pings = threading.Thread(target=load), list[float]()
        loading.start()
        num_pieces = PINNED_ARENAS * num_bytes // PIN_PIECE_BYTES
        try:
            while gpus.num_calls("cuMemHostRegister_v2") < num_pieces:
                pings.append(other.session.ping(30.0))
                time.sleep(PING_PAUSE_S)
        finally:
            ended.set()
            loading.join()
        idle = list[float]()
        for _ in range(IDLE_PINGS):
            idle.append(other.session.ping(30.0))
            time.sleep(PING_PAUSE_S)
        other.close()
    return {
        "pinning_ping_ms": 1e3 * median(pings),
        "pinning_ping_most_ms": 1e3 * max(pings),
        "pinning_over_idle": median(pings) / median(idle),
    }


def main() -> int:
    if sys.argv[2:3] == ["run"]:
        return serve(Path(sys.argv[1]), sys.argv[2:])
    options = parser("Measure what the server adds to a device's copies.")
    options.add_argument("--mib", type=int, default=256, help="of a transfer")
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--order", choices=("flags", "events", "host"), default="flags")
    chosen = options.parse_args()
    num_bytes = chosen.mib * MIB
    arenas = chosen.rounds + 4
    with ends_cleanly(), runtime_folder(arenas * num_bytes + ROOM_BYTES) as folder:
        figures, rows = measure_turns(folder, chosen.order, num_bytes, chosen.rounds)
    say("pinning")
    with ends_cleanly(), runtime_folder(PINNED_ARENAS * num_bytes + ROOM_BYTES) as folder:
        figures |= measure_pinning(folder, chosen.order, num_bytes)
    print_report(("", "stage", "median us", "least us"), rows, {}, as_json=False)
    print_figures(figures, BOUNDS, as_json=chosen.json)
    print(f"load average {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
