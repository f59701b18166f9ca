"""Keeps the items that took longest.

Always true: `slowest` has the KEPT longest of all items that were noted in its present window and
in the one before, and none that is older.
"""

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

WINDOW_S = 1800.0
KEPT = 64
"""Of a kind, in a window."""
MAX_OPEN = 4096
"""Requests that wait for their load's end. Beyond it the oldest is noted without."""

Item = TypeVar("Item")


class SlowBook(Generic[Item]):
    def __init__(self) -> None:
        # Heaps of (seconds, number, item): the shortest first, of equal ones the oldest.
        self._now: list[tuple[float, int, Item]] = []
        self._before: list[tuple[float, int, Item]] = []
        self._window = 0
        self._number = 0

    def __repr__(self) -> str:
        return f"SlowBook({len(self._now)} and {len(self._before)} items)"

    def admits(self, took_s: float, now_s: float) -> bool:
        """False if the item would not be kept, so need not be made."""
        self._turn(now_s)
        return took_s > 0 and (len(self._now) < KEPT or took_s > self._now[0][0])

    def note(self, item: Item, took_s: float, now_s: float) -> None:
        if not self.admits(took_s, now_s):
            return
        self._number += 1
        push = heapq.heappush if len(self._now) < KEPT else heapq.heapreplace
        push(self._now, (took_s, self._number, item))

    def slowest(self, count: int, now_s: float) -> list[tuple[float, Item]]:
        """Seconds and item, the longest first, of equal ones the newest."""
        self._turn(now_s)
        found = heapq.nlargest(min(count, KEPT), (*self._now, *self._before))
        return [(took_s, item) for took_s, _, item in found]

    def _turn(self, now_s: float) -> None:
        window = int(now_s // WINDOW_S)
        if window != self._window:
            self._before = self._now if window == self._window + 1 else []
            self._now, self._window = [], window

    def check_invariants(self) -> None:
        for heap in (self._now, self._before):
            assert len(heap) <= KEPT, "a window is bounded"
            assert not heap or heap[0] == min(heap), "the shortest is on top"


class Open(Generic[Item]):
    """Items that wait for their end, at most MAX_OPEN."""

    def __init__(self) -> None:
        self._items: OrderedDict[Hashable, Item] = OrderedDict()

    def __repr__(self) -> str:
        return f"Open({len(self._items)} items)"

    def begin(self, key: Hashable, item: Item) -> Item | None:
        """Returns the oldest item if there is no room for both."""
        self._items[key] = item
        if len(self._items) <= MAX_OPEN:
            return None
        return self._items.popitem(last=False)[1]

    def end(self, key: Hashable) -> Item | None:
        """None if it was not begun, or had no room."""
        return self._items.pop(key, None)
