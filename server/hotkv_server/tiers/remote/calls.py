"""Splits calls of a tier into parts, and queues the parts. A part has some of the call's blocks,
and a connection executes one part at a time.

Always true: a call ends once, when all its parts have ended. A part ends once, whether it has
succeeded or failed. Parts of probes, which move no blocks, leave the queue first, then parts of
reads, then parts of writes. But if no part of a write has left the queue for PATIENCE_S, the next
part of a write leaves before parts of reads. Parts of the same kind keep their order.
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
"""Most bytes of blocks in a part of a call. A part of this size takes a few milliseconds. So a read
waits only shortly behind a part of a write, and a large call has parts for all connections."""
PART_BLOCKS = 64
"""Most blocks in a part of a call, unless a tier sets another number."""
PART_KEYS = 1024
"""Most keys in a part of a call that copies no blocks, such as a probe (a question which blocks the
store has)."""
MAX_QUEUED_PARTS = 1 << 14
"""Most parts in the queue; a call that would exceed this number fails at once. The limit is hardly
ever reached, because `tiers.drive` bounds the bytes of its calls."""


PATIENCE_S = 0.5
"""If parts of writes are queued and none has left the queue for this time, the next one goes before
reads. Writes must not wait for ever, because the blocks that they copy can't be evicted from the
arena meanwhile."""


class RemoteCall:
    """A call of a tier, with its results.

    `num_blocks`: number of blocks in the call; 0 for calls that report no result per block.
    `on_end`: called once with this object, by the thread that ends the call's last part.
    `codes`: uint8 [num_blocks], the result of each block, a value of `Read` or `Write`.
    `generation`: the result of `raise_generation`, the new generation (a number that each flush
        raises); None if the store did not answer.
    `shown`: the result of `generations`; None if the store did not answer.
    """

    def __init__(self, num_blocks: int, on_end: "Callable[[RemoteCall], None]") -> None:
        # The result until another is known. FAILED has the same number in `Read` and in `Write`.
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
        """Sets the number of the call's parts (each has some of the call's blocks). Called before
        the first part begins."""
        self._parts_left = num_parts

    def refuse(self, changed: Generations) -> None:
        """Records that the store has other generations (numbers that each flush raises) than the
        call expected, so the call will end with all its blocks ABSENT. `changed`: the store's
        generations; if empty, this method does nothing."""
        with self._lock:
            self._changed.update(changed)

    @property
    def changed(self) -> Generations:
        """The generations (numbers that each flush raises) that the store has in place of the
        expected generations, by fingerprint of the key space (a model in a configuration)."""
        return self._changed

    def part_ended(self) -> None:
        """Counts a part of the call (some of its blocks) as ended. Ends the call if it was the last
        part."""
        with self._lock:
            self._parts_left -= 1
            if self._parts_left:
                return
        self._on_end(self)


@dataclass(eq=False, slots=True)
class Part:
    """A part of a call, which a thread executes over its connection.

    `call`: the call; gets the results of the part.
    `do`: executes the part, given the connection and a time limit (a time of time.monotonic): asks
        the store, and sets the results of the part's blocks in the call.
    `deadline_s`: a time of time.monotonic. If the part has not begun by then, it is skipped.
    `is_write`: True if the part changes the store: it writes or removes blocks.
    `moves_blocks`: True if the part uses slots of the arena. Such a part is aborted at its
        deadline, so that its slots get free. A part that uses no slots is not aborted at its
        deadline, because each abort closes the connection.
    """

    call: RemoteCall
    do: Callable[[Client, float], None] = field(repr=False)
    deadline_s: float = float("inf")
    moves_blocks: bool = True
    is_write: bool = False


def cut(
    num_bytes: Int64s, part_bytes: int = PART_BYTES, part_blocks: int = PART_BLOCKS
) -> Iterator[slice]:
    """Splits the blocks of a call into parts of at most `part_blocks` blocks and `part_bytes`
    bytes. Yields each part as a slice. A block larger than `part_bytes` is a part by itself.

    `num_bytes`: size of each block, int64.
    """
    begin, total = 0, 0
    for at, size in enumerate(num_bytes.tolist()):
        if at > begin and (total + size > part_bytes or at - begin == part_blocks):
            yield slice(begin, at)
            begin, total = at, 0
        total += size
    if len(num_bytes):
        yield slice(begin, len(num_bytes))


def cut_keys(num_keys: int) -> Iterator[slice]:
    """Splits `num_keys` keys into parts of at most PART_KEYS keys. Yields each part as a slice."""
    for begin in range(0, num_keys, PART_KEYS):
        yield slice(begin, min(begin + PART_KEYS, num_keys))


class PartQueue:
    """Parts of calls that wait for a connection. Thread-safe."""

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._questions: deque[Part] = deque()
        self._reads: deque[Part] = deque()
        self._writes: deque[Part] = deque()
        # When a part of a write last left the queue, or came into a queue without writes.
        self._written_s = 0.0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._questions) + len(self._reads) + len(self._writes)

    def __repr__(self) -> str:
        return f"PartQueue({len(self._reads)} of reads, {len(self._writes)} of writes)"

    @property
    def is_closed(self) -> bool:
        """True once `close` was called."""
        return self._is_closed

    def put(self, parts: Sequence[Part]) -> bool:
        """Queues the parts of a call. Returns False, and queues no part, if the queue is closed or
        has no room for all of the parts."""
        with self._ready:
            if self._is_closed or len(self) + len(parts) > MAX_QUEUED_PARTS:
                return False
            if not self._writes:
                self._written_s = time.monotonic()
            for part in parts:
                reads = self._reads if part.moves_blocks else self._questions
                (self._writes if part.is_write else reads).append(part)
            # Wake all threads: a single woken thread might be one that executes no writes.
            self._ready.notify_all()
            return True

    def get(self, until_s: float, *, takes_writes: bool = True) -> Part | None:
        """Waits for the next part, removes it from the queue and returns it. Returns None if the
        queue is closed, or if no part has come until `until_s`, a time of time.monotonic.
        `takes_writes`: False leaves the parts of writes in the queue."""
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
        """Closes the queue. Removes and returns the parts that are still in it."""
        with self._ready:
            self._is_closed = True
            self._ready.notify_all()
            left = [*self._questions, *self._reads, *self._writes]
            self._questions.clear()
            self._reads.clear()
            self._writes.clear()
            return left
