"""Times the stages of stores and loads on a GPU, from the engine's call to its knowledge of the
end, beside plain copies; and what pinning a large arena costs other calls.

`python -m bench.gpu.stages [--json] [--quick]`, on a machine with a GPU, a minute and 34 GiB of
host memory. Blocks of 2 MiB in the layout of vLLM's engines on CUDA (BLHNC), 256 MiB a transfer,
the server's own choice of copy methods and marks. All times of all transfers go to `stages.json` in
OUT, if that is set.

The stages are those of `bench.control`, which measures them on a stand-in for the device; here
`copies reported` takes the place of the end of the last copy.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.control import (
    BLOCK_BYTES,
    FIRST,
    LAYERS,
    ORDER,
    PAGE_BYTES,
    Times,
    Turns,
    stages,
    stamp_calls,
)
from bench.gpu.engine import (
    Cuda,
    Engine,
    GpuServer,
    MadeUp,
    PlainCopies,
    Shape,
    Side,
    about,
    find_side,
    operation_bytes,
)
from bench.gpu.facts import facts, told
from bench.gpu.figures import Figure, gpu_parser, print_figures
from bench.report import median, say
from bench.servers import GIB, MIB, ROOM_BYTES
from demo.processes import ends_cleanly, runtime_folder
from hotkv_client.command.tables import table
from hotkv_server.device import start as device_start
from hotkv_server.device.cupy_runtime import CupyRuntime
from tests.device.timed_gpu import TimedGpus, runtime
from tests.doubles import with_constants

ARENAS = 5
CONTROL_TARGET_MS = 1.0
"""Of a transfer beyond a plain copy."""
PINNED_BYTES = 32 * GIB
PING_PAUSE_S = 0.01
COPIES, STAMPS = ("copy", "copy_batch", "copy_kernel"), ".stamps"


class Unstamped:
    """In place of `TimedGpus`: only the server knows when a real device copies."""

    def forget_times(self) -> None:
        pass

    def times_ns(self, way: str) -> tuple[int, int]:
        return 0, 0


def serve(control: Path, flags: list[str]) -> int:
    """Writes the stamps beside `control` at the end. If `control` is a file, on its stand-in for a
    device."""
    stamps: list[tuple[str, int]] = []
    stamp_calls(stamps, {FIRST: [(CupyRuntime, name) for name in COPIES]})
    if control.exists():
        device_start.new_runtime = lambda: runtime(control)
    status = with_constants.run(flags)
    control.with_suffix(STAMPS).write_text(json.dumps(stamps))
    return status


class Stamping(Cuda):
    """Its server writes stamps beside `control`."""

    def __init__(self, control: Path) -> None:
        super().__init__()
        self._control = control

    def server_command(self) -> list[str]:
        command = [sys.executable, "-m", "bench.gpu.stages", str(self._control), "run"]
        return [*command, "--copy.cuda", "on"]


class StandIn(MadeUp):
    """The server's own CUDA code on `tests/device/timed_gpu.c`; copies take PCIe's time."""

    def __init__(self, gpus: TimedGpus) -> None:
        super().__init__()
        self._gpus = gpus

    def server_command(self) -> list[str]:
        return [*self._gpus.command("bench.gpu.stages"), *with_constants.copies_by("batch")]


@contextmanager
def serving(side: Side, folder: Path, num_bytes: int) -> Iterator[tuple[GpuServer, Turns, Path]]:
    """Last of the three: the stamps, which are there once the server has ended."""
    times: Times
    if side.is_made_up:
        gpus = TimedGpus(folder)
        side, control, times = StandIn(gpus), gpus.path, gpus
    else:
        side, control, times = Stamping(folder / "control"), folder / "control", Unstamped()
    with GpuServer(side, folder, ARENAS * num_bytes) as server:
        server.wait_settled(calibrated=not side.is_made_up)
        shape = Shape(PAGE_BYTES, LAYERS, 2 * num_bytes // BLOCK_BYTES, "BLHNC")
        engine = Engine(side, server.target, shape, order="auto").connected()
        try:
            yield server, Turns(times, server, engine), control.with_suffix(STAMPS)
        finally:
            engine.close()


def measure(side: Side, num_bytes: int, rounds: int) -> tuple[list[Figure], dict[str, Any]]:
    """Prints the table of stages."""
    plain_ms: dict[str, list[float]] = {"load": [], "store": []}
    room = ARENAS * num_bytes + ROOM_BYTES
    with ends_cleanly(), runtime_folder(room) as folder:
        with serving(side, folder, num_bytes) as (server, turns, stamps):
            plain = PlainCopies(side, num_bytes)
            for _ in range(rounds):
                for what in plain_ms:
                    turns.turn(what)
                    took_s = plain.seconds(load=what == "load", store=what == "store")
                    plain_ms[what].append(1e3 * took_s)
            found = facts(server)
        stamped = json.loads(stamps.read_text())
    if out := os.environ.get("OUT"):
        text = json.dumps({"turns": turns.points, "stamps": stamped})
        (Path(out) / "stages.json").write_text(text)
    by_stage, rows, figures = stages(turns.points, stamped), [], list[Figure]()
    for what, times in by_stage.items():
        rows += [
            (what, stage, f"{median(times[stage]):.0f}", f"{min(times[stage]):.0f}")
            for stage in ORDER
            if stage in times
        ]
        took, plain_one = median(turns.took_ms[what]), median(plain_ms[what])
        size = f"{num_bytes >> 20} MiB"
        figures += [
            Figure(
                f"{what} of {size}, beyond a plain copy, ms",
                took - plain_one,
                CONTROL_TARGET_MS,
                True,
            ),
            Figure(f"plain {what} of {size}, ms", plain_one),
        ]
    figures.append(Figure("ping, us", found["ping_us"]))
    print(table(("", "stage", "median us since the call", "least"), rows))
    print(told(found))
    return figures, found


def measure_pinning(side: Side, num_bytes: int) -> list[Figure]:
    """Pings of a session until the server has pinned its arena."""
    with (
        ends_cleanly(),
        runtime_folder(num_bytes + ROOM_BYTES) as folder,
        GpuServer(side, folder, num_bytes) as server,
    ):
        server.wait_ready(90)
        engine = Engine(side, server.target, Shape(PAGE_BYTES, LAYERS, 4, "BLHNC")).connected()
        ended, pings = threading.Event(), list[float]()

        def watch() -> None:
            try:
                server.wait_settled(calibrated=False)
            finally:
                ended.set()

        watching = threading.Thread(target=watch)
        watching.start()
        while not ended.is_set():
            pings.append(engine.session.ping(30.0))
            time.sleep(PING_PAUSE_S)
        watching.join()
        took_s = server.devices()["registering_s"]
        engine.close()
    size = f"{num_bytes >> 30} GiB"
    return [
        Figure(f"pinning {size}, s", took_s),
        Figure(f"pinning {size}: median ping, us", 1e6 * median(pings)),
        Figure(f"pinning {size}: longest ping, ms", 1e3 * max(pings)),
    ]


def main() -> int:
    if sys.argv[2:3] == ["run"]:
        return serve(Path(sys.argv[1]), sys.argv[2:])
    options = gpu_parser("Stages of stores and loads on a GPU.").parse_args()
    side, short = find_side(options.made_up), options.quick or options.made_up
    num_bytes = operation_bytes((16 if options.made_up else 256) * MIB, ARENAS)
    figures, found = list[Figure](), dict[str, Any]()
    try:
        figures, found = measure(side, num_bytes, 4 if short else 40)
        say("pinning")
        figures += measure_pinning(side, GIB if options.made_up else PINNED_BYTES)
    finally:
        print_figures(figures, {**about(side), "server": found}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
