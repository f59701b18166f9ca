"""How long calls and transfers took and how large they were: histograms for metrics.

Always true: memory is fixed. On the event loop only.
"""

import asyncio
import time
from collections import Counter
from typing import TypeVar

from hotkv_server.cache.histogram import SECONDS, SIZES_BYTES, Histogram
from hotkv_server.dataplane.engines import Outcome

Answer = TypeVar("Answer")
LOAD, STORE = "load", "store"


class Timings:
    """See the module. Calls, in seconds from message to answer: `lookup_s`; `lease_s`, reads from
    tiers included. Transfers: `ends` counts all by direction and outcome. Of those that were done,
    `load_s` and `store_s` are seconds from call to end, waits included, and `load_bytes` and
    `store_bytes` sizes. `wait_s`: how long copies waited for a thread or device."""

    def __init__(self) -> None:
        self.lookup_s, self.lease_s = Histogram(SECONDS), Histogram(SECONDS)
        self.load_s, self.store_s = Histogram(SECONDS), Histogram(SECONDS)
        self.load_bytes, self.store_bytes = Histogram(SIZES_BYTES), Histogram(SIZES_BYTES)
        self.wait_s = Histogram(SECONDS)
        self.ends: Counter[tuple[str, Outcome]] = Counter()

    def __repr__(self) -> str:
        return f"Timings({self.lookup_s.count} lookups, {self.ends.total()} transfers)"

    def answered(self, times: Histogram, began_s: float, answer: Answer) -> Answer:
        """Counts the time since `began_s` when there is an answer: now, or, if it is a task, when
        that has ended. Returns it."""
        if isinstance(answer, asyncio.Task):
            answer.add_done_callback(lambda done: times.add(time.monotonic() - began_s))
        else:
            times.add(time.monotonic() - began_s)
        return answer

    def moved(
        self,
        outcome: Outcome,
        num_bytes: int,
        began_s: float,
        waited_s: float | None,
        *,
        to_engine: bool,
    ) -> None:
        """Counts a transfer that has ended. `waited_s`: None if no copy of it has begun."""
        self.ends[LOAD if to_engine else STORE, outcome] += 1
        if waited_s is not None:
            self.wait_s.add(waited_s)
        if outcome is Outcome.DONE:
            (self.load_s if to_engine else self.store_s).add(time.monotonic() - began_s)
            (self.load_bytes if to_engine else self.store_bytes).add(num_bytes)
