"""Records for fixed intervals of time the growth of the ledger's sums, the number of evicted
blocks, and the longest delay of the event loop.

Always true: memory is fixed, and the latest `num_samples` intervals are stored. Growth is counted
in the interval in which `note` is called; an interval without a call shows 0. A call takes some
microseconds and never waits. Use on the event loop only.
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
"""Number of intervals of STEP_S that are stored: an hour."""
EVICTED, LAG = "evicted_blocks", "loop_lag_s"
FROM_LEDGER = ("prompt_tokens", "device_hit_tokens", "loaded_bytes", "stored_bytes")
"""Columns (counts) of the ledger whose growth is recorded, in addition to the hits of each tier."""


# ------------------------------------------------------------------------------------------ samples


class History:
    """A ring buffer with a sample for each of the latest intervals of time.

    The caller numbers the intervals; the numbers of successive calls increase.

    counters: names of values that are stored as growth within the interval.
    levels: names of values that are stored as they are.
    number: number of the latest stored interval.
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
        """Makes an empty ring buffer for `num_samples` intervals. The first interval to store is
        the interval after `number`. For `counters` and `levels` see the class.

        totals: values of the counters at the end of interval `number` [counters].
        """
        self.counters, self.levels = tuple(counters), tuple(levels)
        self.number = number
        self._first = number + 1
        self._totals = totals.copy()
        # A ring: the row of an interval is its number modulo `num_samples`. The columns are the
        # counters, then the levels.
        self._cells: Values = np.zeros((num_samples, len(counters) + len(levels)))

    def __repr__(self) -> str:
        return f"History({len(self)} samples, the latest is {self.number})"

    def __len__(self) -> int:
        return min(self.number - self._first + 1, len(self._cells))

    def note(self, number: int, totals: Values, levels: Sequence[float]) -> None:
        """Stores the sample of interval `number`, which must be later than all intervals before.

        totals: values of the counters [counters]. Their growth since the last call is stored.
        levels: values to store as they are [levels].
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
        """Returns copies of the samples [len(self)] of each counter and level, by name, the oldest
        sample first."""
        at = np.arange(self.number - len(self) + 1, self.number + 1) % len(self._cells)
        names = (*self.counters, *self.levels)
        return {name: self._cells[at, place] for place, name in enumerate(names)}


# -------------------------------------------------------------------------------------------- notes


class LiveHistory:
    """Records the history of a running node's ledger: the growth of its counts in each interval of
    time. The first interval is the interval in which the object is created."""

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
        """Stores a sample for the last completed interval before `now_s` (the growth of the
        ledger's counts in it), unless the sample is stored already."""
        # If the event loop was blocked for several intervals, the next turn stores the growth of
        # all of them.
        number = _number(now_s) - 1
        if number > self.history.number:
            self.history.note(number, self._totals(), (self._lag.longest_s(STEP_S),))

    def samples(self, now_s: float) -> tuple[dict[str, NDArray[np.float64]], float]:
        """Returns the samples of each count (a value for each interval of time), by name, and the
        number of seconds since the latest interval ended."""
        return self.history.samples(), now_s - (self.history.number + 1) * STEP_S

    def minutes(self) -> dict[str, NDArray[np.float64]]:
        """Returns, by name, the growth of the ledger's columns in each of the last minutes, the
        oldest minute first. The current minute comes last. Minutes before this server's start are
        included."""
        values = self._ledger.minutes()[:, self._places]
        return dict(zip(self.history.counters, values.T, strict=False))

    def _totals(self) -> Values:
        counted = self._ledger.accounts.total.total[self._places]
        totals: Values = np.append(counted, self._core.counters.evicted_blocks)
        return totals


def _number(now_s: float) -> int:
    return int(now_s // STEP_S)
