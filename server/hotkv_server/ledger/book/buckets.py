"""Sums over time: how much of each column was counted in each minute and each hour, and in all.

Always true: memory is fixed; a count is in the bucket of its minute, in that of its hour and in the
sum of all. Time is the wall clock's, in whole minutes since 1970, so that buckets outlive the
server. A clock that goes back a little counts as if it stood still; one that goes back by more than
an hour begins all buckets anew, because the old ones would hide the new ones for as long.
"""

import math

import numpy as np
from numpy.typing import NDArray

NUM_MINUTES = 120
NUM_HOURS = 192
"""Two hours in minutes, eight days in hours."""
NUM_CELLS = 1 + NUM_MINUTES + NUM_HOURS
FIRST_HOUR = 1 + NUM_MINUTES
MAX_BACK_MINUTES = 60
Values = NDArray[np.float64]


def window_s(seconds: float) -> int:
    """The seconds that sums over the last `seconds` cover: whole minutes, rounded up, beyond two
    hours whole hours, at most eight days; 0 for all that was ever counted."""
    if (minutes := math.ceil(seconds / 60)) <= NUM_MINUTES:
        return 60 * minutes
    return 3600 * min(math.ceil(seconds / 3600), NUM_HOURS)


class Buckets:
    """Sums of some columns. `cells` [NUM_CELLS, columns]: the sum of all, then minutes, then hours,
    each a ring by its number. `minute`: the newest."""

    __slots__ = ("cells", "minute")

    def __init__(self, num_columns: int, minute: int) -> None:
        self.cells: Values = np.zeros((NUM_CELLS, num_columns))
        self.minute = minute

    def __repr__(self) -> str:
        return f"Buckets({self.cells.shape[1]} columns, minute {self.minute})"

    @property
    def total(self) -> Values:
        """The sum of all [columns]; not a copy."""
        total: Values = self.cells[0]
        return total

    def add(self, values: Values, minute: int) -> None:
        """Counts `values` [columns] in this minute."""
        self.advance(minute)
        cells, at = self.cells, self.minute
        cells[0] += values
        cells[1 + at % NUM_MINUTES] += values
        cells[FIRST_HOUR + at // 60 % NUM_HOURS] += values

    def advance(self, minute: int) -> None:
        """Lets time pass until this minute: buckets that are too old are empty afterwards."""
        passed = minute - self.minute
        if passed < -MAX_BACK_MINUTES:
            self.cells[1:] = 0.0
            self.minute = minute
        if passed <= 0:
            return
        for newer in range(self.minute + 1, minute + 1)[-NUM_MINUTES:]:
            self.cells[1 + newer % NUM_MINUTES] = 0.0
        for newer in range(self.minute // 60 + 1, minute // 60 + 1)[-NUM_HOURS:]:
            self.cells[FIRST_HOUR + newer % NUM_HOURS] = 0.0
        self.minute = minute

    def since(self, seconds: float, minute: int) -> Values:
        """The sums [columns] of the last `window_s(seconds)` before the end of this minute; 0 for
        all that was ever counted."""
        self.advance(minute)
        if not (window := window_s(seconds)):
            return self.total.copy()
        if (count := window // 60) <= NUM_MINUTES:
            at = 1 + np.arange(self.minute - count + 1, self.minute + 1) % NUM_MINUTES
        else:
            count, hour = window // 3600, self.minute // 60
            at = FIRST_HOUR + np.arange(hour - count + 1, hour + 1) % NUM_HOURS
        sums: Values = self.cells[at].sum(axis=0)
        return sums

    def minutes(self, minute: int) -> Values:
        """The sums [NUM_MINUTES, columns] of the last minutes, the oldest first, this one last."""
        self.advance(minute)
        at = 1 + np.arange(self.minute - NUM_MINUTES + 1, self.minute + 1) % NUM_MINUTES
        newest: Values = self.cells[at]
        return newest

    def merge(self, other: "Buckets") -> None:
        """Counts all that the other has counted, in the same minutes and hours."""
        latest = max(self.minute, other.minute)
        self.advance(latest)
        other.advance(latest)
        self.cells += other.cells
