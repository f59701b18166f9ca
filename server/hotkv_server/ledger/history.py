"""Samples at fixed intervals how the ledger's sums and the evictions grew, and how late the loop
was.

Always true: memory is fixed, and the latest `num_samples` intervals are stored. Growth counts in
the interval in which it was noted; an interval without a note shows 0. A note takes some
microseconds and never waits. On the event loop only.
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
"""An hour."""
EVICTED, LAG = "evicted_blocks", "loop_lag_s"
FROM_LEDGER = ("prompt_tokens", "device_hit_tokens", "loaded_bytes", "stored_bytes")
"""Columns of the ledger, in addition to the hits of each tier."""


# ------------------------------------------------------------------------------------------ samples


class History:
    """The latest intervals, a sample each. The caller numbers the intervals, and numbers do not go
    back. `number`: the latest noted."""

    __slots__ = ("_cells", "_first", "_totals", "counters", "levels", "number")

    def __init__(
        self,
        counters: Sequence[str],
        levels: Sequence[str],
        num_samples: int,
        totals: Values,
        number: int,
    ) -> None:
        """Starts at the end of interval `number`, when the counters are `totals` [counters]."""
        self.counters, self.levels = tuple(counters), tuple(levels)
        self.number = number
        self._first = number + 1
        self._totals = totals.copy()
        # A ring by the number of the interval; columns are counters, then levels.
        self._cells: Values = np.zeros((num_samples, len(counters) + len(levels)))

    def __repr__(self) -> str:
        return f"History({len(self)} samples, the latest is {self.number})"

    def __len__(self) -> int:
        return min(self.number - self._first + 1, len(self._cells))

    def note(self, number: int, totals: Values, levels: Sequence[float]) -> None:
        """Ends an interval later than all before. Its growth is `totals` [counters] minus the
        totals of the last call."""
        assert number > self.number, "time went back"
        missed = np.arange(max(self.number + 1, number - len(self._cells) + 1), number)
        self._cells[missed % len(self._cells)] = 0.0
        cell = self._cells[number % len(self._cells)]
        cell[: len(self.counters)] = totals - self._totals
        cell[len(self.counters) :] = levels
        self._totals[:] = totals
        self.number = number

    def samples(self) -> dict[str, NDArray[np.float64]]:
        """Returns copies of the samples [len(self)] of each counter and level by name, the oldest
        first."""
        at = np.arange(self.number - len(self) + 1, self.number + 1) % len(self._cells)
        names = (*self.counters, *self.levels)
        return {name: self._cells[at, place] for place, name in enumerate(names)}


# -------------------------------------------------------------------------------------------- notes


class LiveHistory:
    """The history of a ledger. The first interval is the interval in which this object is
    created."""

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
        """Ends the interval before the current interval (at `now_s`), unless it has ended
        already."""
        # After a loop that stood still, the first turn notes all growth until then.
        number = _number(now_s) - 1
        if number > self.history.number:
            self.history.note(number, self._totals(), (self._lag.longest_s(STEP_S),))

    def samples(self, now_s: float) -> tuple[dict[str, NDArray[np.float64]], float]:
        """Returns the samples by name, and how many seconds ago the latest interval ended."""
        return self.history.samples(), now_s - (self.history.number + 1) * STEP_S

    def minutes(self) -> dict[str, NDArray[np.float64]]:
        """Returns a sample per minute of the ledger's columns by name; the current minute comes
        last. Includes minutes before this server's start."""
        values = self._ledger.minutes()[:, self._places]
        return dict(zip(self.history.counters, values.T, strict=False))

    def _totals(self) -> Values:
        counted = self._ledger.accounts.total.total[self._places]
        totals: Values = np.append(counted, self._core.counters.evicted_blocks)
        return totals


def _number(now_s: float) -> int:
    return int(now_s // STEP_S)
