"""Splits a tier's calls into parts, each for some of the call's blocks, and queues the parts for
the threads that execute them.

Always true: a call ends once, with its last part; a part ends once, whatever its success. Probes
leave first, then reads, then writes; but after PATIENCE_S without one, a write leaves before
reads. Parts of a kind keep their order.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hotkv_server.tiers.protocol import Codes, Generations, Int64s, Read, Shown
from hotkv_server.tiers.remote.client import Client

PART_BYTES = 2 << 20
"""A part takes a few milliseconds, so reads wait shortly behind writes, and large calls use all
connections."""
PART_BLOCKS = 64
"""Default of a part's most blocks."""
PART_KEYS = 1024
"""Most keys of a part without blocks."""
MAX_QUEUED_PARTS = 1 << 14
"""A call beyond it fails at once; rare, as `tiers.drive` bounds its calls' bytes."""


PATIENCE_S = 0.5
"""After this time without one, a write goes before reads, because its blocks can't be evicted
meanwhile."""


class RemoteCall:
    """A tier's call and its results.

    `num_blocks`: 0 without a result per block.
    `on_end`: called once, on the thread that ends the last part.
    `codes`: uint8 [num_blocks], `Read` or `Write`.
    `generation`: of `raise_generation`; None without an answer.
    `shown`: of `generations`; None without an answer.
    """

    def __init__(self, num_blocks: int, on_end: "Callable[[RemoteCall], None]") -> None:
        # FAILED has the same number in `Read` and `Write`.
        self.codes: Codes = np.full(num_blocks, Read.FAILED, np.uint8)
        self.generation: int | None = None
        self.shown: Shown | None = None
        self._changed: dict[str, int] = {}
        self._on_end = on_end
        self._lock = threading.Lock()
        self._parts_left = 0

    def __repr__(self) -> str:
        return f"RemoteCall({len(self.codes)} blocks, {self._parts_left} parts left)"

    def expect(self, num_parts: int) -> None:
        """Called before the first part begins."""
        self._parts_left = num_parts

    def refuse(self, changed: Generations) -> None:
        """If the store's generations have `changed`, all blocks will be ABSENT."""
        with self._lock:
            self._changed.update(changed)

    @property
    def changed(self) -> Generations:
        """Unexpected generations of the store, by fingerprint."""
        return self._changed

    def part_ended(self) -> None:
        with self._lock:
            self._parts_left -= 1
            if self._parts_left:
                return
        self._on_end(self)


@dataclass(eq=False, slots=True)
class Part:
    """What a thread executes over its connection.

    `do`: asks the store, until the given time, and sets results in `call`.
    `deadline_s`: the part is skipped if it has not begun by then.
    `is_write`: writes or removes blocks.
    `moves_blocks`: uses slots, so it is aborted at its deadline to free them. Others are not,
        because an abort closes the connection.
    """

    call: RemoteCall
    do: Callable[[Client, float], None] = field(repr=False)
    deadline_s: float = float("inf")
    moves_blocks: bool = True
    is_write: bool = False


def cut(
    num_bytes: Int64s, part_bytes: int = PART_BYTES, part_blocks: int = PART_BLOCKS
) -> Iterator[slice]:
    """Slices of at most `part_blocks` blocks and `part_bytes` bytes; a larger block is alone."""
    begin, total = 0, 0
    for at, size in enumerate(num_bytes.tolist()):
        if at > begin and (total + size > part_bytes or at - begin == part_blocks):
            yield slice(begin, at)
            begin, total = at, 0
        total += size
    if len(num_bytes):
        yield slice(begin, len(num_bytes))


def cut_keys(num_keys: int) -> Iterator[slice]:
    for begin in range(0, num_keys, PART_KEYS):
        yield slice(begin, min(begin + PART_KEYS, num_keys))


class PartQueue:
    """Thread-safe."""

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._questions: deque[Part] = deque()
        self._reads: deque[Part] = deque()
        self._writes: deque[Part] = deque()
        # When a write last left, or came into a queue without writes.
        self._written_s = 0.0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._questions) + len(self._reads) + len(self._writes)

    def __repr__(self) -> str:
        return f"PartQueue({len(self._reads)} of reads, {len(self._writes)} of writes)"

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def put(self, parts: Sequence[Part]) -> bool:
        """All parts or none: False if the queue is closed or too full."""
        with self._ready:
            if self._is_closed or len(self) + len(parts) > MAX_QUEUED_PARTS:
                return False
            if not self._writes:
                self._written_s = time.monotonic()
            for part in parts:
                reads = self._reads if part.moves_blocks else self._questions
                (self._writes if part.is_write else reads).append(part)
            # Wake all: if only one thread woke, it might be one that takes no writes.
            self._ready.notify_all()
            return True

    def get(self, until_s: float, *, takes_writes: bool = True) -> Part | None:
        """None if the queue is closed or empty until `until_s`."""
        with self._ready:
            while not (self._questions or self._reads or (takes_writes and self._writes)):
                left_s = until_s - time.monotonic()
                if self._is_closed or left_s <= 0:
                    return None
                self._ready.wait(min(left_s, threading.TIMEOUT_MAX))
            if self._questions:
                return self._questions.popleft()
            now_s, may_write = time.monotonic(), takes_writes and bool(self._writes)
            is_overdue = may_write and now_s - self._written_s > PATIENCE_S
            if self._reads and not is_overdue:
                return self._reads.popleft()
            self._written_s = now_s
            return self._writes.popleft()

    def close(self) -> list[Part]:
        """Returns the parts left."""
        with self._ready:
            self._is_closed = True
            self._ready.notify_all()
            left = [*self._questions, *self._reads, *self._writes]
            self._questions.clear()
            self._reads.clear()
            self._writes.clear()
            return left
