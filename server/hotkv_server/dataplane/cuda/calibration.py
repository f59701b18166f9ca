"""Measured speeds of a device's copy methods, by direction and page size, from which the copy
engine chooses its method. Valid for one device and driver. `measure` makes it; it is saved as
JSON."""

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotkv_server.dataplane.cuda.methods import GIVE, TABLE_BYTES, Slot
from hotkv_server.dataplane.cuda.pieces import Piece
from hotkv_server.dataplane.cuda.recalibration import Passes, merged
from hotkv_server.dataplane.cuda.values import MAX_PIECE_RUNS, Direction, Method
from hotkv_server.device.runtime import DeviceError, DeviceInfo, DeviceRuntime, Priority, Stream

# ------------------------------------------------------------------------ What is known of a device

PAGE_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
"""Page sizes that are measured; others use the nearest."""
STAGED_RUN_PAGES = 8
"""STAGED is measured with runs of so many pages, so it is chosen only for runs as long."""
WORTH = {Method.BATCH: 1.0, Method.MEMCPY: 1.0, Method.STAGED: 0.9, Method.KERNEL: 0.5}
"""Factors of the speeds before they are compared. In the order of preference: those that use least
of the device's time first.

Kernels take multiprocessors from the engine's: KERNEL for as long as it waits for PCIe, STAGED
shortly, to move bytes on the device.
"""
NEGLIGIBLE_RATIO = 0.03
"""A method earlier in `WORTH` is preferred to the fastest if it is slower by at most this share."""
FORMAT = 2
"""Version of the JSON. (Speeds of format 1 were measured with one piece at a time.)"""
DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")


def driver_version(path: Path = DRIVER_VERSION_FILE) -> str:
    """Version of the kernel's NVIDIA driver; empty if it can't be read."""
    try:
        return path.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError):
        return ""


@dataclass(frozen=True, slots=True)
class Calibration:
    """`speeds`: by direction, method and page bytes, in GB/s (1e9 bytes); 0 for a method that
    does not work here."""

    uuid: bytes
    name: str
    driver: str
    speeds: Mapping[tuple[Direction, Method, int], float]

    def __repr__(self) -> str:
        return (
            f"Calibration({self.name}, {len(self.speeds)} speeds, best "
            f"{max(self.speeds.values(), default=0.0):.1f} GB/s)"
        )

    def merged(self, equals: "Sequence[Calibration]") -> "Calibration":
        """With those of equal devices (`recalibration.merged`)."""
        tables = [self.speeds, *(other.speeds for other in equals)]
        return Calibration(self.uuid, self.name, self.driver, merged(tables))

    def is_equal(self, other: "Calibration") -> bool:
        """True if it is of a device of the same model and driver."""
        return (self.name, self.driver) == (other.name, other.driver)

    def holds_for(
        self, info: DeviceInfo, driver: str, methods: Sequence[Method] = tuple(Method)
    ) -> bool:
        """True if exactly these methods were measured."""
        return (self.uuid, self.name, self.driver) == (info.uuid, info.name, driver) and {
            method for _, method, _ in self.speeds
        } == set(methods)

    def choose(self, direction: Direction, page_bytes: int, slot_run_bytes: int = 0) -> Method:
        """Best method by speed times `WORTH`, or an earlier one within NEGLIGIBLE_RATIO.
        `slot_run_bytes`: mean length of the runs in the arena; STAGED needs STAGED_RUN_PAGES
        pages.
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
        """In GB/s; an asterisk marks the fastest of a line."""
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
        """Raises ValueError that names the wrong field."""
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
    """The method without a calibration; both methods work on every device."""
    return Method.MEMCPY if page_bytes >= 256 << 10 else Method.BATCH


# ---------------------------------------------------------------------------------------- Measuring
# The measurement copies scratch memory only, and does not touch the arena. One device is measured
# at a time: together they would share memory and PCIe, and equal devices get different speeds.

log = logging.getLogger(__name__)

_measuring = threading.Lock()
STOP_S = 0.05
"""Between two looks, while another device is measured, whether to stop."""

NUM_REPEATS = 3
"""Most measured repetitions, the fastest of which counts. One unmeasured goes before, as a
warm-up."""
LONG_S = 0.05
"""No further repetition after one that took longer."""
DEPTH = 4
"""Pieces in flight while measuring, as in a lane by default; with one, the time to submit it and
wait for it would count."""
NUM_ROUNDS = 4
"""Copies of the scratch memory in a repetition, if the method is not slow, so that its begin and
end count little."""


@dataclass(frozen=True, slots=True)
class _Bench:
    """`slots`: DEPTH, with staging memory.
    `device`, `host`: addresses of `num_bytes` of scratch memory, on the device and pinned.
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
    methods: Sequence[Method] = tuple(Method),
) -> Calibration | None:
    """Waits until no other device is measured, then blocks for some seconds, until two passes
    agree (`Passes`). Raises DeviceError if memory is short or the device is lost. `num_bytes`: of
    the scratch memory; `should_stop`: called in between, True makes it return None."""
    while not _measuring.acquire(timeout=STOP_S):
        if should_stop():
            return None
    try:
        return _measured(runtime, info, driver, num_bytes, should_stop, methods)
    finally:
        _measuring.release()


def _measured(
    runtime: DeviceRuntime,
    info: DeviceInfo,
    driver: str,
    num_bytes: int,
    should_stop: Callable[[], bool],
    methods: Sequence[Method],
) -> Calibration | None:
    passes = Passes()
    sizes = [size for size in PAGE_BYTES if size <= num_bytes]
    staging_bytes = max([num_bytes // DEPTH, *sizes]) if Method.STAGED in methods else 0
    with _bench(runtime, info.number, num_bytes, staging_bytes) as bench:
        while not passes.is_done:
            speeds: dict[tuple[Direction, Method, int], float] = {}
            for page_bytes in sizes:
                for direction in Direction:
                    for method in methods:
                        if should_stop():
                            return None
                        speeds[direction, method, page_bytes] = _speed(
                            bench, direction, method, page_bytes
                        )
            passes.add(speeds)
    if not passes.is_stable:
        log.warning(
            "copy speeds vary device=%d passes=%d: something else uses the device or its bus",
            info.number,
            passes.num_passes,
        )
    return Calibration(info.uuid, info.name, driver, passes.speeds)


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
                Slot(
                    runtime.new_event(device),
                    pinned(TABLE_BYTES),
                    on_device(staging_bytes) if staging_bytes else 0,
                )
                for _ in range(DEPTH)
            ],
            on_device(num_bytes),
            pinned(num_bytes),
            num_bytes,
        )


def _speed(bench: _Bench, direction: Direction, method: Method, page_bytes: int) -> float:
    """GB/s; 0 if the method fails."""
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
    """About DEPTH pieces of the scratch memory. Pages are scattered on the device; in host
    memory, each run of at most STAGED_RUN_PAGES is followed by an unused page."""
    num_pages = max(bench.num_bytes // page_bytes * STAGED_RUN_PAGES // (STAGED_RUN_PAGES + 1), 1)
    num_pages = min(num_pages, DEPTH * MAX_PIECE_RUNS)
    # A page unused after each run, so that runs do not adjoin.
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
            len(host[at : at + size]) * page_bytes,
        )
        for at in range(0, num_pages, size)
    ]


def _copied(bench: _Bench, pieces: Sequence[Piece]) -> bool:
    """Copies pieces, DEPTH at a time, and waits. False if the method fails. Raises DeviceError
    if the device is lost."""
    runtime, failure = bench.runtime, None
    for number, piece in enumerate(pieces):
        slot = bench.slots[number % DEPTH]
        if number >= DEPTH:
            runtime.synchronize(slot.event)
        try:
            GIVE[piece.method](runtime, bench.stream, piece, slot)
        except DeviceError as error:
            failure = error
        # Even after a failure: part of the call may be under way.
        runtime.record(slot.event, bench.stream)
        if failure is not None:
            break
    for slot in bench.slots[: len(pieces)]:
        runtime.synchronize(slot.event)
    if failure is not None and failure.is_lost:
        raise failure
    return failure is None
