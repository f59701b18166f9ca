"""Calibration: the best method on this machine, as measured, by direction and page size.

A calibration holds for one device under one driver. It is a value: `measure` makes it, and it can
be kept as JSON.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hotkv_server.dataplane.cuda.values import Direction, Method
from hotkv_server.device.runtime import DeviceInfo

PAGE_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
"""Page sizes that are measured; for others the nearest one counts."""
STAGED_RUN_PAGES = 8
"""Staging is measured with runs of so many pages in the arena, and may be chosen for runs that are
as long or longer."""
WORTH = {Method.BATCH: 1.0, Method.MEMCPY: 1.0, Method.STAGED: 0.9, Method.KERNEL: 0.5}
"""Weight of a method's speed, the most frugal method first. Kernels take the device's time: without
MPS it runs those of one process at a time, so the engine's stand still while one of ours waits for
PCIe; staging's kernels move bytes on the device only.
"""
NEGLIGIBLE_RATIO = 0.03
"""How much slower than the best a more frugal method may be and still be chosen."""
FORMAT = 1
DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")


def driver_version(path: Path = DRIVER_VERSION_FILE) -> str:
    """Version of the kernel's NVIDIA driver; empty if it can't be read."""
    try:
        return path.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError):
        return ""


@dataclass(frozen=True, slots=True)
class Calibration:
    """See the module. `speeds`: (direction, method, page bytes) -> GB/s (1e9 bytes a second); 0 for
    methods that do not work here."""

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
        """True if it was made on this device, under this driver."""
        return (self.uuid, self.name, self.driver) == (info.uuid, info.name, driver)

    def choose(self, direction: Direction, page_bytes: int, slot_run_bytes: int = 0) -> Method:
        """The most frugal of the best methods (by `WORTH`) for pages of that size, in runs of
        `slot_run_bytes` in the arena."""
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
        """A table for people, in GB/s: a line for each direction and page size, a column for each
        method; the fastest of a line is marked."""
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
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str) -> "Calibration":
        """Reads what `to_json` writes. Raises ValueError that names the field."""
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
            _speed(f"calibration.speeds[{i}]", entry) for i, entry in enumerate(fields["speeds"])
        )
        return Calibration(uuid, fields["name"], fields["driver"], speeds)


def _speed(field: str, entry: object) -> tuple[tuple[Direction, Method, int], float]:
    if not isinstance(entry, dict):
        raise ValueError(f"{field} must be an object")
    try:
        direction, method = Direction(entry.get("direction")), Method(entry.get("method"))
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error
    page_bytes, speed = entry.get("page_bytes"), entry.get("gb_per_s")
    if not isinstance(page_bytes, int) or isinstance(page_bytes, bool) or page_bytes <= 0:
        raise ValueError(f"{field}.page_bytes must be a positive integer")
    if (
        not isinstance(speed, int | float)
        or isinstance(speed, bool)
        or not math.isfinite(speed)
        or speed < 0
    ):
        raise ValueError(f"{field}.gb_per_s must be a number that is not negative")
    return (direction, method, page_bytes), float(speed)


def rule_of_thumb(page_bytes: int) -> Method:
    """The method before anything is measured: long runs one by one, short ones in one call. Both
    work on every device."""
    return Method.MEMCPY if page_bytes >= 256 << 10 else Method.BATCH
