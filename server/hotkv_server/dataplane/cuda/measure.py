"""Measures each method on a device, with memory of its own: nothing of the arena is touched."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from hotkv_server.dataplane.cuda.calibration import PAGE_BYTES, STAGED_RUN_PAGES, Calibration
from hotkv_server.dataplane.cuda.methods import GIVE, TABLE_BYTES, Slot
from hotkv_server.dataplane.cuda.pieces import Piece
from hotkv_server.dataplane.cuda.values import MAX_PIECE_RUNS, Direction, Method
from hotkv_server.device.runtime import DeviceError, DeviceInfo, DeviceRuntime, Priority, Stream

NUM_REPEATS = 3
"""Repetitions, of which the fastest counts; one more before them warms up."""


@dataclass(frozen=True, slots=True)
class _Bench:
    """Scratch memory of `num_bytes` on each side, and a slot whose staging is as large."""

    runtime: DeviceRuntime
    stream: Stream
    slot: Slot
    device: int
    host: int
    num_bytes: int


def measure(
    runtime: DeviceRuntime,
    info: DeviceInfo,
    driver: str,
    num_bytes: int,
    should_stop: Callable[[], bool],
) -> Calibration | None:
    """Measures the speed of each method; 0 for methods that fail. None if it was told to stop.

    Blocks for about a second. Raises DeviceError if there is no memory for it or the device is
    lost.
    """
    speeds: dict[tuple[Direction, Method, int], float] = {}
    with _bench(runtime, info.number, num_bytes) as bench:
        for page_bytes in [size for size in PAGE_BYTES if size <= num_bytes]:
            for direction in Direction:
                for method in Method:
                    if should_stop():
                        return None
                    speeds[direction, method, page_bytes] = _speed(
                        bench, direction, method, page_bytes
                    )
    return Calibration(info.uuid, info.name, driver, speeds)


@contextmanager
def _bench(runtime: DeviceRuntime, device: int, num_bytes: int) -> Iterator[_Bench]:
    with ExitStack() as stack:

        def on_device(size: int) -> int:
            address = runtime.allocate(device, size)
            stack.callback(runtime.free, device, address)
            return address

        def pinned(size: int) -> int:
            address = runtime.allocate_pinned(size)
            stack.callback(runtime.free_pinned, address)
            return address

        slot = Slot(runtime.new_event(device), pinned(TABLE_BYTES), on_device(num_bytes))
        yield _Bench(
            runtime,
            runtime.new_stream(device, Priority.LOW),
            slot,
            on_device(num_bytes),
            pinned(num_bytes),
            num_bytes,
        )


def _speed(bench: _Bench, direction: Direction, method: Method, page_bytes: int) -> float:
    """Speed in GB/s; 0 if the method fails."""
    num_pages = min(
        max(bench.num_bytes // page_bytes * STAGED_RUN_PAGES // (STAGED_RUN_PAGES + 1), 1),
        MAX_PIECE_RUNS,
    )
    # In the host's memory a page is left out after each run, so that runs do not adjoin.
    numbers = np.arange(num_pages, dtype=np.int64)
    host = bench.host + (numbers + numbers // STAGED_RUN_PAGES) * page_bytes
    device = (
        bench.device + np.random.default_rng(1).permutation(num_pages).astype(np.int64) * page_bytes
    )
    piece = Piece(
        direction,
        method,
        device,
        host,
        np.full(num_pages, page_bytes, np.int64),
        np.zeros(num_pages, np.int64),
    )
    best_s = float("inf")
    for repeat in range(NUM_REPEATS + 1):
        begun_s, failure = time.perf_counter(), None
        try:
            GIVE[method](bench.runtime, bench.stream, piece, bench.slot)
        except DeviceError as error:
            failure = error
        # Part of a failed call may be under way even so.
        bench.runtime.record(bench.slot.event, bench.stream)
        bench.runtime.synchronize(bench.slot.event)
        if failure is not None:
            if failure.is_lost:
                raise failure
            return 0.0
        if repeat:
            best_s = min(best_s, time.perf_counter() - begun_s)
    return piece.total_bytes / max(best_s, 1e-9) / 1e9
