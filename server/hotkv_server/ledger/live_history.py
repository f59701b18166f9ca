"""Notes every few seconds how the ledger's sums and evictions grew, and how late the loop was.

Always true: a note costs some microseconds, and nothing waits for it. On the event loop only.
"""

import time

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.core import CacheCore
from hotkv_server.ledger.book.buckets import Values
from hotkv_server.ledger.book.columns import HIT
from hotkv_server.ledger.book.history import History
from hotkv_server.ledger.drive import LiveLedger
from hotkv_server.node.event_loop import LoopLag

STEP_S = 5.0
NUM_SAMPLES = 720
"""An hour."""
EVICTED, LAG = "evicted_blocks", "loop_lag_s"
FROM_LEDGER = ("prompt_tokens", "device_hit_tokens", "loaded_bytes", "stored_bytes")
"""Besides the hits of each tier."""


class LiveHistory:
    """See the module. The first interval is the one in which this object is made."""

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
        """Ends the interval before the one of `now_s`, unless it was ended already."""
        # The first turn after a loop that stood still notes what had come until then.
        number = _number(now_s) - 1
        if number > self.history.number:
            self.history.note(number, self._totals(), (self._lag.longest_s(STEP_S),))

    def samples(self, now_s: float) -> tuple[dict[str, NDArray[np.float64]], float]:
        """The samples by name, and how many seconds ago the latest interval ended."""
        return self.history.samples(), now_s - (self.history.number + 1) * STEP_S

    def minutes(self) -> dict[str, NDArray[np.float64]]:
        """The same of the ledger alone, a sample a minute, the one that has not ended last. It
        reaches back beyond this server's start."""
        values = self._ledger.minutes()[:, self._places]
        return dict(zip(self.history.counters, values.T, strict=False))

    def _totals(self) -> Values:
        counted = self._ledger.accounts.total.total[self._places]
        totals: Values = np.append(counted, self._core.counters.evicted_blocks)
        return totals


def _number(now_s: float) -> int:
    return int(now_s // STEP_S)
