"""Decides whether measured speeds can be trusted: when a measurement is stable, and when real
copies are so slow that it is made again. No clock, no threads.
"""

import bisect
import math
from collections.abc import Mapping, Sequence

from hotkv_server.dataplane.cuda.values import Direction, Method

Speeds = Mapping[tuple[Direction, Method, int], float]
"""GB/s (1e9 bytes) by direction, method and page bytes; 0 for a method that does not work."""

# ---------------------------------------------------------------------------------------- Stability

MAX_PASSES = 5
STABLE_RATIO = 0.1
"""By so much of the faster, two passes may differ in a speed. Only of methods that reach RIVAL of
the best one's speed: others can't be chosen, and slow ones vary."""
RIVAL = 0.5


def agree(one: Speeds, other: Speeds) -> bool:
    """True if both have about the same speeds. Both must have the same keys."""
    for key, speed in one.items():
        direction, _, page_bytes = key
        best = max(
            max(speeds.get((direction, method, page_bytes), 0.0) for method in Method)
            for speeds in (one, other)
        )
        faster = max(speed, other[key])
        if faster >= RIVAL * best and abs(speed - other[key]) > STABLE_RATIO * faster:
            return False
    return True


def merged(tables: Sequence[Speeds]) -> Speeds:
    """The faster of each, where all have one: whatever disturbs a measurement makes it slower.
    Devices that are equal choose by it, and so choose the same methods."""
    keys = set(tables[0]).intersection(*tables[1:])
    return {key: max(table[key] for table in tables) for key in keys}


class Passes:
    """Passes of one measurement, until two successive ones agree, or MAX_PASSES.

    `speeds`: the faster of the last two passes if they agree, else of all: whatever disturbs a
        copy makes it slower. 0 for a method that has failed in one of them.
    """

    def __init__(self) -> None:
        self.is_stable = False
        self.num_passes = 0
        self.speeds: Speeds = {}
        self._last: Speeds = {}

    def __repr__(self) -> str:
        return f"Passes({self.num_passes}, {'stable' if self.is_stable else 'not stable'})"

    @property
    def is_done(self) -> bool:
        return self.is_stable or self.num_passes >= MAX_PASSES

    def add(self, found: Speeds) -> None:
        self.is_stable = self.num_passes > 0 and agree(self._last, found)
        before = self._last if self.is_stable else self.speeds
        self.speeds = {
            key: max(speed, before.get(key, speed)) if speed and before.get(key, speed) else 0.0
            for key, speed in found.items()
        }
        self._last = found
        self.num_passes += 1


# -------------------------------------------------------------------------------------------- Drift

SLOW_RATIO = 0.5
"""A copy is slow if it reaches less than this share of the measured speed."""
SLOW_PIECES, SLOW_S = 32, 30.0
"""So many pieces in a row must be slow, over so long a time."""
MIN_PIECE_BYTES = 1 << 20
"""Smaller ones show the time of a call rather than a speed."""
REST_S, MAX_REST_S = 3600.0, 24 * 3600.0
"""Shortest time between two measurements. It doubles, up to the second, when one finds the speeds
that were known: then the copies are slow for another reason, such as a shared bus."""


class Drift:
    """Compares real copies of a device with its measured speeds."""

    def __init__(self) -> None:
        self._speeds: Speeds = {}
        # By direction and method: page sizes, and their speeds.
        self._rows: dict[tuple[Direction, Method], tuple[list[int], list[float]]] = {}
        self._rest_s = REST_S
        self._since_s = -math.inf
        self._slow: dict[Direction, tuple[int, float]] = {}

    def __repr__(self) -> str:
        return f"Drift({len(self._speeds)} speeds, slow {self._slow})"

    def calibrated(self, speeds: Speeds, now_s: float) -> None:
        """`speeds`: of a measurement, or of an earlier start."""
        is_known = speeds.keys() == self._speeds.keys() and agree(speeds, self._speeds)
        self._rest_s = min(2 * self._rest_s, MAX_REST_S) if is_known else REST_S
        self._speeds, self._since_s = speeds, now_s
        self._rows.clear()
        for (direction, method, size), speed in sorted(speeds.items(), key=lambda item: item[0][2]):
            sizes, found = self._rows.setdefault((direction, method), ([], []))
            sizes.append(size)
            found.append(speed)
        self._slow.clear()

    def put_off(self) -> None:
        """The device was not idle: only further slow copies ask again."""
        self._slow.clear()

    def copied(
        self,
        direction: Direction,
        method: Method,
        page_bytes: int,
        num_bytes: int,
        seconds: float,
        now_s: float,
    ) -> bool:
        """True if the speeds should be measured again; also later, until `calibrated` or `put_off`.

        page_bytes: mean size of a run.
        seconds: in which the device copied nothing else.
        """
        expected = self._expected(direction, method, page_bytes)
        if num_bytes < MIN_PIECE_BYTES or expected == 0.0:
            return False
        if num_bytes >= SLOW_RATIO * expected * 1e9 * seconds:
            self._slow.pop(direction, None)
            return False
        count, begun_s = self._slow.get(direction, (0, now_s))
        self._slow[direction] = (count + 1, begun_s)
        return (
            count + 1 >= SLOW_PIECES
            and now_s - begun_s >= SLOW_S
            and now_s - self._since_s >= self._rest_s
        )

    def _expected(self, direction: Direction, method: Method, page_bytes: int) -> float:
        """The lower of the speeds of the two nearest page sizes; 0 if it was not measured."""
        rows = self._rows.get((direction, method))
        if rows is None:
            return 0.0
        sizes, speeds = rows
        above = min(bisect.bisect_left(sizes, page_bytes), len(sizes) - 1)
        below = max(bisect.bisect_right(sizes, page_bytes) - 1, 0)
        return min(speeds[above], speeds[below])
