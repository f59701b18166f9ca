"""A queue that serves owners in turn: an owner with many items makes no other owner wait."""

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by owner: first in, first out for each owner; owners take turns, an item each.
    Thread-safe."""

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._items: dict[str, deque[T]] = {}
        # Owners with items, the next one to be served first.
        self._turns: deque[str] = deque()
        self._size = 0
        self._is_closed = False

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"FairQueue({self._size} items of {len(self._turns)} owners)"

    def put(self, owner: str, items: list[T]) -> None:
        """Adds items; does not block."""
        if not items:
            return
        with self._ready:
            waiting = self._items.get(owner)
            if waiting is None:
                self._items[owner] = deque(items)
                self._turns.append(owner)
            else:
                waiting.extend(items)
            self._size += len(items)
            self._ready.notify(len(items))

    def close(self) -> None:
        """Ends the queue: once it is empty, `get` returns None."""
        with self._ready:
            self._is_closed = True
            self._ready.notify_all()

    def get(self) -> T | None:
        """The next item, or None at the end. Blocks until there is one."""
        with self._ready:
            while not self._turns:
                if self._is_closed:
                    return None
                self._ready.wait()
            owner = self._turns.popleft()
            waiting = self._items[owner]
            item = waiting.popleft()
            self._size -= 1
            if waiting:
                self._turns.append(owner)
            else:
                del self._items[owner]
            return item
