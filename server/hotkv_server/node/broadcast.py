"""Feeds: queues through which the node sends its events to readers (clients that stream events).

Always true: a feed is bounded in bytes. A reader that is too slow loses the newest items, and is
notified how many items it has lost. The node never waits for a reader.
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
"""Bytes that each item counts towards FEED_BYTES (the limit of a feed), in addition to the bytes of
its arrays."""
MAX_READERS = 64


class Measured(Protocol):
    """An item of a `Feed` (a queue of events for one reader), which knows its size in bytes."""

    @property
    def num_bytes(self) -> int:
        """Size of the item's arrays, in bytes."""


T = TypeVar("T", bound=Measured)


class Feed(Generic[T]):
    """The queue of items for one reader, bounded by FEED_BYTES. On the event loop only."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._num_bytes = 0
        self._lost = 0
        self._ready = asyncio.Event()

    def put(self, item: T) -> bool:
        """Queues an item. If the feed is full, drops the item and returns False.

        An empty feed accepts an item of any size. Once the feed has dropped an item, it drops all
        further items until the reader has read the queued items and learned how many items were
        dropped (`get`). Otherwise the queue of a slow reader might never become empty, and the
        reader would never learn of the loss.
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
        """Waits until the feed has items. Returns 1 to `most` items, and the number of items that
        were dropped since the last report of a loss.

        A loss is reported together with the last item in the queue; until then the number is 0.
        """
        await self._ready.wait()
        return self.take(most)

    def take(self, most: int, most_bytes: int = sys.maxsize) -> tuple[list[T], int]:
        """Returns up to `most` items without waiting; an empty list if the feed is empty. If it
        returns several items, they have at most `most_bytes` together.

        Also returns how many items were lost since the last report of a loss. A loss is reported
        together with the last item in the queue; until then the number is 0.
        """
        items: list[T] = []
        num_bytes = 0
        while self._items and len(items) < most:
            num_bytes += self._items[0].num_bytes + ITEM_BYTES
            if items and num_bytes > most_bytes:
                break
            items.append(self._items.popleft())
        self._num_bytes -= sum(item.num_bytes + ITEM_BYTES for item in items)
        # A lost item is newer than every queued item: report the loss with the last queued item.
        lost, self._lost = (0, self._lost) if self._items else (self._lost, 0)
        if not self._items:
            self._ready.clear()
        return items, lost

    def __len__(self) -> int:
        return len(self._items)


class Feeds(Generic[T]):
    """The feeds (queues) of all readers of one kind of item. `lost_items`: number of items that
    were lost, summed over all readers since the start."""

    def __init__(self) -> None:
        self._open: set[Feed[T]] = set()
        self.lost_items = 0

    def __len__(self) -> int:
        return len(self._open)

    def __repr__(self) -> str:
        return f"Feeds({len(self._open)} readers, {self.lost_items} lost)"

    def put(self, items: Iterable[T]) -> None:
        """Queues the items (for example events) in the feed (queue) of every reader."""
        for item in items if self._open else ():
            for feed in self._open:
                self.lost_items += not feed.put(item)

    @contextlib.contextmanager
    def reader(self) -> Iterator[Feed[T]]:
        """Opens a feed (a queue of items) for a reader, and closes it at the end of the `with`
        block. Raises OVERLOADED if MAX_READERS feeds are open."""
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
