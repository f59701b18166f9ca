"""Splits calls of a tier into parts, and queues the parts. A connection executes a part at a time.

Always true: a call ends once, when all its parts have ended. A part ends once, whether it succeeded
or not. Parts that move no blocks (probes) leave the queue first, then parts of reads, then parts of
writes. Parts of the same kind keep their order.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hotkv_server.tiers.protocol import Codes, Epochs, Int64s, Read, Seals, Shown
from hotkv_server.tiers.remote.client import Client

PART_BYTES = 2 << 20
"""Most bytes of blocks in a part (blocks of a call that a connection moves at once). Such a part
takes a few milliseconds, so a read hardly waits behind a part of a write, and a large call has
parts for all connections."""
PART_BLOCKS = 64
PART_KEYS = 1024
"""Most keys in a part of a call that moves no blocks."""
MAX_QUEUED_PARTS = 1 << 14
"""Most parts of calls in the queue; a call that would exceed this number fails at once. The drive
bounds the bytes of its calls, so this limit is hardly ever reached."""


class RemoteCall:
    """A tier's call for `num_blocks` blocks, with its results.

    `on_end`: called once with the call, by the thread that ends its last part.
    """

    def __init__(self, num_blocks: int, on_end: "Callable[[RemoteCall], None]") -> None:
        # FAILED has the same number for reads and writes.
        self.codes: Codes = np.full(num_blocks, Read.FAILED, np.uint8)
        self.seals: Seals = np.zeros(num_blocks, np.uint64)
        self.epoch: int | None = None
        self.shown: Shown | None = None
        self._changed: dict[str, int] = {}
        self._on_end = on_end
        self._lock = threading.Lock()
        self._parts_left = 0

    def __repr__(self) -> str:
        return f"RemoteCall({len(self.codes)} blocks, {self._parts_left} parts left)"

    def expect(self, num_parts: int) -> None:
        """Sets the number of parts of the call. To be called before any part begins."""
        self._parts_left = num_parts

    def refuse(self, changed: Epochs) -> None:
        """Adds epochs (numbers that flushes raise) that the store has in place of the expected
        epochs. If there are any, the call ends with all its blocks ABSENT. Empty: does nothing."""
        with self._lock:
            self._changed.update(changed)

    @property
    def changed(self) -> Epochs:
        """The store's epochs that differ from the expected epochs, by fingerprint."""
        return self._changed

    def part_ended(self) -> None:
        """Counts a part as ended, and ends the call after its last part."""
        with self._lock:
            self._parts_left -= 1
            if self._parts_left:
                return
        self._on_end(self)


@dataclass(eq=False, slots=True)
class Part:
    """Part of a call, which a connection executes at once.

    `do`: function of a client and a time limit. The function asks the server, and sets the results
        of the part's blocks in the call.
    `deadline_s`: a time of time.monotonic. The part is skipped if it has not begun by then.
    `moves_blocks`: True if the part uses slots of the arena. Such a part is also broken off at its
        deadline, so that its slots get free. Another part waits longer for the server's answer,
        because breaking off costs the connection.
    """

    call: RemoteCall
    do: Callable[[Client, float], None] = field(repr=False)
    deadline_s: float = float("inf")
    moves_blocks: bool = True


def cut(
    num_bytes: Int64s, part_bytes: int = PART_BYTES, part_blocks: int = PART_BLOCKS
) -> Iterator[slice]:
    """Splits rows of blocks into parts of at most `part_blocks` and `part_bytes`. A larger block is
    a part by itself."""
    begin, total = 0, 0
    for at, size in enumerate(num_bytes.tolist()):
        if at > begin and (total + size > part_bytes or at - begin == part_blocks):
            yield slice(begin, at)
            begin, total = at, 0
        total += size
    if len(num_bytes):
        yield slice(begin, len(num_bytes))


def cut_keys(num_keys: int) -> Iterator[slice]:
    """Splits rows of keys into parts of at most PART_KEYS."""
    for begin in range(0, num_keys, PART_KEYS):
        yield slice(begin, min(begin + PART_KEYS, num_keys))


class PartQueue:
    """Parts of calls that wait for a connection. Thread-safe."""

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._questions: deque[Part] = deque()
        self._reads: deque[Part] = deque()
        self._writes: deque[Part] = deque()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._questions) + len(self._reads) + len(self._writes)

    def __repr__(self) -> str:
        return f"PartQueue({len(self._reads)} of reads, {len(self._writes)} of writes)"

    @property
    def is_closed(self) -> bool:
        """True once `close` was called."""
        return self._is_closed

    def put(self, parts: Sequence[Part], *, is_read: bool) -> bool:
        """Adds all the parts. Returns False, and adds no part, if the queue is full or closed."""
        with self._ready:
            if self._is_closed or len(self) + len(parts) > MAX_QUEUED_PARTS:
                return False
            for part in parts:
                reads = self._reads if part.moves_blocks else self._questions
                (reads if is_read else self._writes).append(part)
            # Wake all: a single woken thread might be a thread that does no writes.
            self._ready.notify_all()
            return True

    def get(self, until_s: float, *, takes_writes: bool = True) -> Part | None:
        """Waits for the next part and returns it. Returns None if the queue is closed, or if it has
        no part at `until_s`, a time of time.monotonic. `takes_writes`: False skips parts of
        writes."""
        with self._ready:
            while not (self._questions or self._reads or (takes_writes and self._writes)):
                left_s = until_s - time.monotonic()
                if self._is_closed or left_s <= 0:
                    return None
                self._ready.wait(min(left_s, threading.TIMEOUT_MAX))
            return (self._questions or self._reads or self._writes).popleft()

    def close(self) -> list[Part]:
        """Closes the queue. Returns the parts that are left in it."""
        with self._ready:
            self._is_closed = True
            self._ready.notify_all()
            left = [*self._questions, *self._reads, *self._writes]
            self._questions.clear()
            self._reads.clear()
            self._writes.clear()
            return left
