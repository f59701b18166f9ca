"""Feeds: queues through which the node sends events to clients that stream them.

Always true: a feed is bounded in bytes. A slow reader loses the newest items, and learns how
many; the node never waits for it.
"""

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from hotkv_proto.errors import HotKVError, Reason

FEED_BYTES = 16 << 20
ITEM_BYTES = 256
"""Counts for each item towards FEED_BYTES, beside its arrays."""
MAX_READERS = 64


class Measured(Protocol):
    @property
    def num_bytes(self) -> int: ...


T = TypeVar("T", bound=Measured)


class Feed(Generic[T]):
    """The queue of one reader. On the event loop only."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._num_bytes = 0
        self._lost = 0
        self._ready = asyncio.Event()

    def put(self, item: T) -> bool:
        """False for an item that is dropped because the feed is full. An empty feed takes any size.

        After a drop, all further items are dropped until the reader has learned of it: a slow
        reader's queue might never become empty otherwise, and the loss never be reported.
        """
        num_bytes = item.num_bytes + ITEM_BYTES
        has_room = not self._items or self._num_bytes + num_bytes <= FEED_BYTES
        kept = has_room and not self._lost
        if kept:
            self._items.append(item)
            self._num_bytes += num_bytes
        else:
            self._lost += 1
        self._ready.set()
        return kept

    async def get(self, most: int) -> tuple[list[T], int]:
        """Waits for items, then does as `take`."""
        await self._ready.wait()
        return self.take(most)

    def take(self, most: int, most_bytes: int = sys.maxsize) -> tuple[list[T], int]:
        """Up to `most` items, of at most `most_bytes` if several, and how many were lost, which
        comes once, with the last item in the queue. Does not wait."""
        items: list[T] = []
        num_bytes = 0
        while self._items and len(items) < most:
            num_bytes += self._items[0].num_bytes + ITEM_BYTES
            if items and num_bytes > most_bytes:
                break
            items.append(self._items.popleft())
        self._num_bytes -= sum(item.num_bytes + ITEM_BYTES for item in items)
        # Lost items are newer than every queued item.
        lost, self._lost = (0, self._lost) if self._items else (self._lost, 0)
        if not self._items:
            self._ready.clear()
        return items, lost

    def __len__(self) -> int:
        return len(self._items)


class Feeds(Generic[T]):
    """The feeds of all readers of one kind of item. `lost_items`: over all readers since the
    start."""

    def __init__(self) -> None:
        self._open: set[Feed[T]] = set()
        self.lost_items = 0

    def __len__(self) -> int:
        return len(self._open)

    def __repr__(self) -> str:
        return f"Feeds({len(self._open)} readers, {self.lost_items} lost)"

    def put(self, items: Iterable[T]) -> None:
        for item in items if self._open else ():
            for feed in self._open:
                self.lost_items += not feed.put(item)

    @contextlib.contextmanager
    def reader(self) -> Iterator[Feed[T]]:
        """Raises OVERLOADED if MAX_READERS feeds are open."""
        if len(self._open) >= MAX_READERS:
            raise HotKVError(
                Reason.OVERLOADED, f"{MAX_READERS} readers are connected; end one of them"
            )
        feed: Feed[T] = Feed()
        self._open.add(feed)
        try:
            yield feed
        finally:
            self._open.discard(feed)
