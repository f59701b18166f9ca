"""Growth of the ledger's sums, evicted blocks and the event loop's longest delay per interval.

Always true: memory is fixed. Growth counts in the interval of `note`; one without a call shows
0. Event loop only; a call takes µs.
"""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.core import CacheCore
from hotkv_server.ledger.book.accounts import HIT, Values
from hotkv_server.ledger.drive import LiveLedger
from hotkv_server.node.event_loop import LoopLag

STEP_S = 5.0
NUM_SAMPLES = 720
"""An hour of STEP_S."""
EVICTED, LAG = "evicted_blocks", "loop_lag_s"
FROM_LEDGER = ("prompt_tokens", "device_hit_tokens", "loaded_bytes", "stored_bytes")
"""Recorded besides the hits of each tier."""


# ------------------------------------------------------------------------------------------ samples


class History:
    """A ring of samples of the latest intervals, which the caller numbers in rising order.

    counters: stored as growth.
    levels: stored as they are.
    number: latest stored interval.
    """

    __slots__ = ("_cells", "_first", "_totals", "counters", "levels", "number")

    def __init__(
        self,
        counters: Sequence[str],
        levels: Sequence[str],
        num_samples: int,
        totals: Values,
        number: int,
    ) -> None:
        """Begins behind interval `number`, at whose end the counters were `totals` [counters]."""
        self.counters, self.levels = tuple(counters), tuple(levels)
        self.number = number
        self._first = number + 1
        self._totals = totals.copy()
        # Row: number modulo `num_samples`. Columns: counters, then levels.
        self._cells: Values = np.zeros((num_samples, len(counters) + len(levels)))

    def __repr__(self) -> str:
        return f"History({len(self)} samples, the latest is {self.number})"

    def __len__(self) -> int:
        return min(self.number - self._first + 1, len(self._cells))

    def note(self, number: int, totals: Values, levels: Sequence[float]) -> None:
        """Stores interval `number`, later than all before.

        totals: [counters]; levels: [levels].
        """
        assert number > self.number, "time went back"
        missed = np.arange(max(self.number + 1, number - len(self._cells) + 1), number)
        self._cells[missed % len(self._cells)] = 0.0
        cell = self._cells[number % len(self._cells)]
        cell[: len(self.counters)] = totals - self._totals
        cell[len(self.counters) :] = levels
        self._totals[:] = totals
        self.number = number

    def samples(self) -> dict[str, NDArray[np.float64]]:
        """Copies [len(self)] by name, oldest first."""
        at = np.arange(self.number - len(self) + 1, self.number + 1) % len(self._cells)
        names = (*self.counters, *self.levels)
        return {name: self._cells[at, place] for place, name in enumerate(names)}


# -------------------------------------------------------------------------------------------- notes


class LiveHistory:
    """The first interval is the one in which the object is made."""

    def __init__(self, core: CacheCore, ledger: LiveLedger, lag: LoopLag) -> None:
        self._core, self._ledger, self._lag = core, ledger, lag
        columns = ledger.accounts.columns
        names = (*FROM_LEDGER, *(HIT + tier for tier in columns.tiers))
        self._places = np.array([columns.at(name) for name in names])
        self.history = History(
            (*names, EVICTED), (LAG,), NUM_SAMPLES, self._totals(), _number(time.monotonic()) - 1
        )

    def __repr__(self) -> str:
        return f"LiveHistory({self.history!r})"

    def turn(self, now_s: float) -> None:
        """Stores the last completed interval, once."""
        # After a blocked event loop, one sample has the growth of several intervals.
        number = _number(now_s) - 1
        if number > self.history.number:
            self.history.note(number, self._totals(), (self._lag.longest_s(STEP_S),))

    def samples(self, now_s: float) -> tuple[dict[str, NDArray[np.float64]], float]:
        """By name; and seconds since the latest interval ended."""
        return self.history.samples(), now_s - (self.history.number + 1) * STEP_S

    def minutes(self) -> dict[str, NDArray[np.float64]]:
        """Growth by name and minute, oldest first; the current minute is last. Includes minutes
        before this server's start."""
        values = self._ledger.minutes()[:, self._places]
        return dict(zip(self.history.counters, values.T, strict=False))

    def _totals(self) -> Values:
        counted = self._ledger.accounts.total.total[self._places]
        totals: Values = np.append(counted, self._core.counters.evicted_blocks)
        return totals


def _number(now_s: float) -> int:
    return int(now_s // STEP_S)
