"""Calibration: the measured speeds of a device's copy methods, by direction and page size. (A page
is the bytes of a block in one layer.) The copy engine uses them to choose its method.

A calibration is valid for one device and one driver. `measure` makes it, and it can be saved as
JSON.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotkv_server.dataplane.cuda.methods import GIVE, TABLE_BYTES, Slot
from hotkv_server.dataplane.cuda.pieces import Piece
from hotkv_server.dataplane.cuda.values import MAX_PIECE_RUNS, Direction, Method
from hotkv_server.device.runtime import DeviceError, DeviceInfo, DeviceRuntime, Priority, Stream

# ------------------------------------------------------------------------ What is known of a device

PAGE_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
"""Page sizes (a page is the bytes of a block in one layer) for which speeds are measured. For other
page sizes, the speeds of the nearest size are used."""
STAGED_RUN_PAGES = 8
"""The method STAGED is measured with runs (contiguous byte ranges in the arena) of this many pages.
So it is chosen only for runs that are at least as long."""
WORTH = {Method.BATCH: 1.0, Method.MEMCPY: 1.0, Method.STAGED: 0.9, Method.KERNEL: 0.5}
"""Factors by which the measured speeds are multiplied before they are compared. The methods are in
the order of preference: those that use least of the device's time come first.

The method KERNEL uses much of the device's time: without MPS a device runs kernels of only one
process at a time, so the kernels of vLLM wait while the server's kernel waits for PCIe. The kernels
of the method STAGED are short, because they only move bytes on the device."""
NEGLIGIBLE_RATIO = 0.03
"""A copy method that uses less of the device's time (see `WORTH`) is preferred to the fastest
method if it is slower by at most this share."""
FORMAT = 2
"""Version of the JSON format. (Speeds in format 1 were measured with one piece at a time.)"""
DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")


def driver_version(path: Path = DRIVER_VERSION_FILE) -> str:
    """Returns the version of the kernel's NVIDIA driver; empty if it can't be read."""
    try:
        return path.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError):
        return ""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measured speeds of a device's copy methods. The copy engine uses them to choose its
    method.

    `uuid`, `name`: the device.
    `driver`: version of the driver.
    `speeds`: by direction, method and page size in bytes, the speed in GB/s (1e9 bytes per second);
        0 for a method that does not work on this device.
    """

    uuid: bytes
    name: str
    driver: str
    speeds: Mapping[tuple[Direction, Method, int], float]

    def __repr__(self) -> str:
        return (
            f"Calibration({self.name}, {len(self.speeds)} speeds, best "
            f"{max(self.speeds.values(), default=0.0):.1f} GB/s)"
        )

    def holds_for(self, info: DeviceInfo, driver: str) -> bool:
        """Returns True if this calibration was made on this device with this driver."""
        return (self.uuid, self.name, self.driver) == (info.uuid, info.name, driver)

    def choose(self, direction: Direction, page_bytes: int, slot_run_bytes: int = 0) -> Method:
        """Returns the method to use for a direction and page size. Compares the measured speeds,
        each multiplied by the method's factor in `WORTH`. Of the methods that are slower than the
        best by at most NEGLIGIBLE_RATIO, returns the first in the order of `WORTH`.

        `slot_run_bytes`: mean length of the runs (contiguous byte ranges) in the arena. If they
            are shorter than STAGED_RUN_PAGES pages, the method STAGED is not considered.
        """
        sizes = {size for _, _, size in self.speeds}
        if not sizes:
            return rule_of_thumb(page_bytes)
        nearest = min(sizes, key=lambda size: (abs(math.log2(size / max(page_bytes, 1))), size))
        may_stage = slot_run_bytes >= STAGED_RUN_PAGES * page_bytes
        found = {
            method: worth * self.speeds.get((direction, method, nearest), 0.0)
            for method, worth in WORTH.items()
            if method is not Method.STAGED or may_stage
        }
        best = max(found.values())
        return (
            next(
                method for method, speed in found.items() if speed >= (1 - NEGLIGIBLE_RATIO) * best
            )
            if best
            else Method.MEMCPY
        )

    def table(self) -> str:
        """Returns the speeds as a text table in GB/s, with a line for each direction and page size
        and a column for each method. An asterisk marks the fastest method of a line."""
        lines = [f"{'':6}{'page':>9}" + "".join(f"{method.value:>10}" for method in Method)]
        for direction in Direction:
            for size in sorted({size for _, _, size in self.speeds}):
                found = [self.speeds.get((direction, method, size), 0.0) for method in Method]
                cells = [
                    f"{speed:.1f}{'*' if speed == max(found) and speed else ' '}" for speed in found
                ]
                lines.append(
                    f"{direction.value:6}{size >> 10:>5} KiB"
                    + "".join(f"{cell:>10}" for cell in cells)
                )
        return "\n".join(lines)

    def to_json(self) -> str:
        speeds = [
            {
                "direction": direction.value,
                "method": method.value,
                "page_bytes": size,
                "gb_per_s": round(speed, 3),
            }
            for (direction, method, size), speed in sorted(
                self.speeds.items(),
                key=lambda item: (item[0][0].value, item[0][1].value, item[0][2]),
            )
        ]
        return json.dumps(
            {
                "format": FORMAT,
                "uuid": self.uuid.hex(),
                "name": self.name,
                "driver": self.driver,
                "speeds": speeds,
            }
        )

    @staticmethod
    def from_json(text: str) -> "Calibration":
        """Parses a result of `to_json`. Raises ValueError that names the wrong field."""
        try:
            fields = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"calibration is not JSON: {error}") from error
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise ValueError(f"calibration.format must be {FORMAT}")
        for name in ("uuid", "name", "driver"):
            if not isinstance(fields.get(name), str):
                raise ValueError(f"calibration.{name} must be a string")
        try:
            uuid = bytes.fromhex(fields["uuid"])
        except ValueError as error:
            raise ValueError("calibration.uuid must be hexadecimal") from error
        if not isinstance(fields.get("speeds"), list):
            raise ValueError("calibration.speeds must be a list")
        speeds = dict(
            _read_speed(f"calibration.speeds[{i}]", entry)
            for i, entry in enumerate(fields["speeds"])
        )
        return Calibration(uuid, fields["name"], fields["driver"], speeds)


def _read_speed(field: str, entry: object) -> tuple[tuple[Direction, Method, int], float]:
    if not isinstance(entry, dict):
        raise ValueError(f"{field} must be an object")
    try:
        direction, method = Direction(entry.get("direction")), Method(entry.get("method"))
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error
    page_bytes, speed = entry.get("page_bytes"), entry.get("gb_per_s")
    if (
        isinstance(page_bytes, bool)
        or not isinstance(page_bytes, int)
        or not 0 < page_bytes < 1 << 63
    ):
        raise ValueError(f"{field}.page_bytes must be a positive integer")
    # An integer in JSON may be too large for a float.
    if (
        not isinstance(speed, int | float)
        or isinstance(speed, bool)
        or not 0 <= speed <= sys.float_info.max
    ):
        raise ValueError(f"{field}.gb_per_s must be a number that is not negative")
    return (direction, method, page_bytes), float(speed)


def rule_of_thumb(page_bytes: int) -> Method:
    """Returns the method to use without a calibration: MEMCPY for pages of 256 KiB or more,
    BATCH for smaller pages. Both methods work on every device."""
    return Method.MEMCPY if page_bytes >= 256 << 10 else Method.BATCH


# ---------------------------------------------------------------------------------------- Measuring
# The measurement copies scratch memory only, and does not touch the arena.

NUM_REPEATS = 3
"""Largest number of measured repetitions, of which the fastest counts. Before them, the scratch
memory is copied once without measuring, as a warm-up."""
LONG_S = 0.05
"""If a measured repetition takes longer than this, in seconds, no further repetition is made."""
DEPTH = 4
"""Number of pieces (parts of jobs) in the device's queue during a measurement, as many as a lane
has by default. With one piece at a time, the time to submit it and to wait for it would count as
copying time."""
NUM_ROUNDS = 4
"""Number of times that a repetition copies the scratch memory, if the method is not slow. With
several rounds, the time until the first piece is submitted and the wait for the last piece count
little."""


@dataclass(frozen=True, slots=True)
class _Bench:
    """The memory for a measurement.

    `slots`: DEPTH slots of the copy engine (`methods.Slot`), with staging memory.
    `device`, `host`: addresses of `num_bytes` of scratch memory on the device and in pinned host
        memory.
    """

    runtime: DeviceRuntime
    stream: Stream
    slots: list[Slot]
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
    """Measures the speeds of all methods on a device, and returns the calibration. Blocks for about
    a second. Raises DeviceError if memory is short or the device is lost.

    `info`: the device.
    `driver`: version of the driver, for the calibration.
    `num_bytes`: size of the scratch memory on the device and in host memory.
    `should_stop`: called between measurements. If it returns True, the measuring stops, and the
        result is None.
    """
    speeds: dict[tuple[Direction, Method, int], float] = {}
    sizes = [size for size in PAGE_BYTES if size <= num_bytes]
    staging_bytes = max([num_bytes // DEPTH, *sizes])
    with _bench(runtime, info.number, num_bytes, staging_bytes) as bench:
        for page_bytes in sizes:
            for direction in Direction:
                for method in Method:
                    if should_stop():
                        return None
                    speeds[direction, method, page_bytes] = _speed(
                        bench, direction, method, page_bytes
                    )
    return Calibration(info.uuid, info.name, driver, speeds)


@contextmanager
def _bench(
    runtime: DeviceRuntime, device: int, num_bytes: int, staging_bytes: int
) -> Iterator[_Bench]:
    with ExitStack() as stack:

        def on_device(size: int) -> int:
            address = runtime.allocate(device, size)
            stack.callback(runtime.free, device, address)
            return address

        def pinned(size: int) -> int:
            address = runtime.allocate_pinned(size)
            stack.callback(runtime.free_pinned, address)
            return address

        yield _Bench(
            runtime,
            runtime.new_stream(device, Priority.LOW),
            [
                Slot(runtime.new_event(device), pinned(TABLE_BYTES), on_device(staging_bytes))
                for _ in range(DEPTH)
            ],
            on_device(num_bytes),
            pinned(num_bytes),
            num_bytes,
        )


def _speed(bench: _Bench, direction: Direction, method: Method, page_bytes: int) -> float:
    """Measures how fast a copy method copies pages of `page_bytes` bytes in one direction. Returns
    the speed in GB/s; 0 if the method fails."""
    pieces = _pieces(bench, direction, method, page_bytes)
    begun_s = time.perf_counter()
    if not _copied(bench, pieces):
        return 0.0
    rounds = NUM_ROUNDS if time.perf_counter() - begun_s < LONG_S / NUM_ROUNDS else 1
    best_s = float("inf")
    for _ in range(NUM_REPEATS):
        begun_s = time.perf_counter()
        if not _copied(bench, pieces * rounds):
            return 0.0
        taken_s = time.perf_counter() - begun_s
        best_s = min(best_s, taken_s)
        if taken_s > LONG_S:
            break
    num_bytes = rounds * sum(piece.total_bytes for piece in pieces)
    return num_bytes / max(best_s, 1e-9) / 1e9


def _pieces(bench: _Bench, direction: Direction, method: Method, page_bytes: int) -> list[Piece]:
    """Divides the scratch memory of the measurement (`bench`) into pieces (parts that are copied at
    once), about DEPTH pieces in total. A piece has pages of `page_bytes`. On the device, these
    pages are scattered. In host memory, each run of at most STAGED_RUN_PAGES pages is followed by
    an unused page."""
    num_pages = max(bench.num_bytes // page_bytes * STAGED_RUN_PAGES // (STAGED_RUN_PAGES + 1), 1)
    num_pages = min(num_pages, DEPTH * MAX_PIECE_RUNS)
    # In host memory, leave a page unused after each run (contiguous byte range), so that the runs
    # do not adjoin.
    numbers = np.arange(num_pages, dtype=np.int64)
    host = bench.host + (numbers + numbers // STAGED_RUN_PAGES) * page_bytes
    device = (
        bench.device + np.random.default_rng(1).permutation(num_pages).astype(np.int64) * page_bytes
    )
    size = min(max(bench.num_bytes // DEPTH // page_bytes, 1), MAX_PIECE_RUNS)
    return [
        Piece(
            direction,
            method,
            device[at : at + size],
            host[at : at + size],
            np.full(len(host[at : at + size]), page_bytes, np.int64),
            np.zeros(len(host[at : at + size]), np.int64),
        )
        for at in range(0, num_pages, size)
    ]


def _copied(bench: _Bench, pieces: Sequence[Piece]) -> bool:
    """Copies the pieces (parts that are copied at once) of a measurement, DEPTH at a time, and
    waits for them. Returns False if the method fails. Raises DeviceError if the device is lost."""
    runtime, failure = bench.runtime, None
    for number, piece in enumerate(pieces):
        slot = bench.slots[number % DEPTH]
        if number >= DEPTH:
            runtime.synchronize(slot.event)
        try:
            GIVE[piece.method](runtime, bench.stream, piece, slot)
        except DeviceError as error:
            failure = error
        # Record the event even after a failure: a part of the failed call may still be under way.
        runtime.record(slot.event, bench.stream)
        if failure is not None:
            break
    for slot in bench.slots[: len(pieces)]:
        runtime.synchronize(slot.event)
    if failure is not None and failure.is_lost:
        raise failure
    return failure is None
