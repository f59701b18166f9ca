"""Feeds: broadcast what happens in the node to readers.

Always true: a feed is bounded in bytes; a reader that is too slow misses the newest items and is
told how many; the node never waits for a reader.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from hotkv_proto.errors import HotKVError, Reason

FEED_BYTES = 16 << 20
ITEM_BYTES = 256
"""Added for each item to its own bytes."""
MAX_READERS = 64


class Measured(Protocol):
    """An item of a feed."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""


T = TypeVar("T", bound=Measured)


class Feed(Generic[T]):
    """Items for one reader, in order. On the event loop only."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._num_bytes = 0
        self._lost = 0
        self._ready = asyncio.Event()

    def put(self, item: T) -> bool:
        """Queues the item for the reader; False if it is lost. A single item is kept whatever its
        size."""
        num_bytes = item.num_bytes + ITEM_BYTES
        kept = not self._items or self._num_bytes + num_bytes <= FEED_BYTES
        if kept:
            self._items.append(item)
            self._num_bytes += num_bytes
        else:
            self._lost += 1
        self._ready.set()
        return kept

    async def get(self, most: int) -> tuple[list[T], int]:
        """Waits for items. Returns one at least, and how many were lost after those of the call
        before."""
        await self._ready.wait()
        items = [self._items.popleft() for _ in range(min(most, len(self._items)))]
        self._num_bytes -= sum(item.num_bytes + ITEM_BYTES for item in items)
        # Lost items came after all that were kept, so their number goes with the last of those.
        lost, self._lost = (0, self._lost) if self._items else (self._lost, 0)
        if not self._items:
            self._ready.clear()
        return items, lost

    def __len__(self) -> int:
        return len(self._items)


class Feeds(Generic[T]):
    """All feeds of one kind of item."""

    def __init__(self) -> None:
        self._open: set[Feed[T]] = set()
        self.lost_items = 0

    def __len__(self) -> int:
        return len(self._open)

    def __repr__(self) -> str:
        return f"Feeds({len(self._open)} readers, {self.lost_items} lost)"

    def put(self, items: Iterable[T]) -> None:
        """Gives the items to every reader."""
        for item in items if self._open else ():
            for feed in self._open:
                self.lost_items += not feed.put(item)

    @contextlib.contextmanager
    def reader(self) -> Iterator[Feed[T]]:
        """A feed from now on until the end of the block. Raises OVERLOADED if there are
        MAX_READERS."""
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
