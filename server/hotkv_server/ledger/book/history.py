"""The latest intervals, one sample each: how much counters grew in it, how levels stood at its end.

Always true: memory is fixed, and the latest `num_samples` intervals are kept. Growth is in the
interval that was noted when it was seen; an interval that nobody noted shows none. Intervals are
numbered by the caller, and numbers do not go back.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_server.ledger.book.buckets import Values


class History:
    """See the module. `number`: the latest interval that was noted."""

    __slots__ = ("_cells", "_first", "_totals", "counters", "levels", "number")

    def __init__(
        self,
        counters: Sequence[str],
        levels: Sequence[str],
        num_samples: int,
        totals: Values,
        number: int,
    ) -> None:
        """`totals` [counters]: as they stand at the end of interval `number`."""
        self.counters, self.levels = tuple(counters), tuple(levels)
        self.number = number
        self._first = number + 1
        self._totals = totals.copy()
        # A ring by the number of the interval: counters, then levels.
        self._cells: Values = np.zeros((num_samples, len(counters) + len(levels)))

    def __repr__(self) -> str:
        return f"History({len(self)} samples, the latest is {self.number})"

    def __len__(self) -> int:
        return min(self.number - self._first + 1, len(self._cells))

    def note(self, number: int, totals: Values, levels: Sequence[float]) -> None:
        """Ends an interval later than all before: its growth is `totals` [counters] less those of
        the last call."""
        assert number > self.number, "time went back"
        missed = np.arange(max(self.number + 1, number - len(self._cells) + 1), number)
        self._cells[missed % len(self._cells)] = 0.0
        cell = self._cells[number % len(self._cells)]
        cell[: len(self.counters)] = totals - self._totals
        cell[len(self.counters) :] = levels
        self._totals[:] = totals
        self.number = number

    def samples(self) -> dict[str, NDArray[np.float64]]:
        """Each counter's and each level's samples [len(self)] by name, the oldest first; copies."""
        at = np.arange(self.number - len(self) + 1, self.number + 1) % len(self._cells)
        names = (*self.counters, *self.levels)
        return {name: self._cells[at, place] for place, name in enumerate(names)}
