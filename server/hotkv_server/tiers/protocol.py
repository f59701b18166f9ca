"""The protocol of tiers: what each can do, in batches of blocks.

Always true, of every tier: a call never blocks and never raises. Its `on_done` is called exactly
once, from any thread, and only when the tier touches none of the call's slots any more; also for
calls that wait in a queue when the tier is closed. A block is FOUND only if its slot holds, bit for
bit, what was written under its key. STORED is said only when the very next read would find it.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.values import Medium
from hotkv_server.tiers.book.epochs import NO_EPOCH as NO_EPOCH

Int64s = NDArray[np.int64]
Seals = NDArray[np.uint64]
Codes = NDArray[np.uint8]
Epochs: TypeAlias = Mapping[str, int]
"""Epochs by the fingerprint of their key space."""
NO_EPOCHS: Epochs = MappingProxyType({})


# ------------------------------------------------------------------------------------------- Epochs

# Epochs of key spaces as numbers: each says when it began or was raised.
#
# Always true: of two epochs of a key space in one store, the later one is greater. An epoch has
# the wall clock's time, but is above all that are known to whoever makes it. So an epoch that a
# store has lost does not come again, neither after a restart nor from an old copy of its data.

RAISES = 1 << 16
"""One epoch and the next one that may begin lie so far apart, unless they begin within TICK_US."""
TICK_US = 64


def begun(now_us: int) -> int:
    """Returns the epoch that begins at a time in microseconds of the wall clock. Of 19 digits, less
    than 2^63."""
    return now_us // TICK_US * RAISES


def raised(now_us: int, *known: int) -> int:
    """Returns the epoch that follows all that are known, at a time in microseconds of the wall
    clock."""
    return max([begun(now_us), *(epoch + 1 for epoch in known)])


# -------------------------------------------------------------------------------------------- Calls


class Read(enum.IntEnum):
    """What has become of a block that was to be read. Only FOUND has filled its slot; the bytes of
    other slots are undefined."""

    FOUND = 1
    ABSENT = 2
    CORRUPT = 3
    FAILED = 4


class Write(enum.IntEnum):
    """What has become of a block that was to be written."""

    STORED = 1
    PRESENT = 2
    FULL = 3
    FAILED = 4
    UNFIT = 5
    """Its encoded form does not fit its `stored_bytes`; nothing was written."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one call, one row each.

    `keys`: of a block and all nodes that share a tier, at most MAX_KEY_BYTES. `slots`: offsets in
    the arena, and `num_bytes` there, multiples of SLOT_ALIGN both. `places`: offsets in the tier's
    own space, in multiples of SLOT_ALIGN; empty for a tier that places by itself. `stored_bytes`:
    of the places; a block with fewer of them than of `num_bytes` lies there encoded. Empty: as
    many. `seals`: what the tier said when the block was written; for a tier that places by itself
    and keeps them with its values, empty.

    `depths`: blocks that are before each in its sequence, for a tier that evicts by itself; empty
    if all are 0. `epochs`: those that the keys were made with, for a tier that is a `SharedTier`:
    if one of them is another in the store once the blocks have been read, all blocks are ABSENT.
    Empty: not looked at.
    """

    keys: Sequence[bytes]
    slots: Int64s
    num_bytes: Int64s
    places: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    seals: Seals = field(default_factory=lambda: np.empty(0, np.uint64))
    depths: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    epochs: Epochs = field(default_factory=lambda: NO_EPOCHS)
    stored_bytes: Int64s = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks in their slots."""
        return int(self.num_bytes.sum())

    @property
    def place_bytes(self) -> Int64s:
        """Bytes of each block as it is stored."""
        return self.stored_bytes if len(self.stored_bytes) else self.num_bytes


MAX_KEY_BYTES = 250
"""Longest key of a block."""

OnRead = Callable[[Codes], None]
"""Given `Read` values uint8 [n]."""
OnWrite = Callable[[Codes, Seals], None]
"""Given `Write` values uint8 [n], and seals uint64 [n] of those that are STORED."""
OnProbe = Callable[[Codes], None]
"""Given `Read` values uint8 [n]: FOUND, ABSENT or FAILED. A hint."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Epochs as a store has them; NO_EPOCH where it has none and no room to begin one.

    `restored_below`: an epoch less than this may be one of before a flush, because the store has
    just started from a copy of its data. 0: none, or the store can't tell.
    """

    epochs: Epochs
    restored_below: int = 0


OnEpochs = Callable[[Shown | None], None]
"""Given None if the store has not answered."""
OnEpoch = Callable[[int | None], None]
"""Given an epoch, NO_EPOCH, or None if the store has not answered."""


@dataclass(frozen=True, slots=True)
class TierFacts:
    """What the runtime has to know of a tier.

    `places`: whether the core chooses where blocks lie in it, and evicts; else it does so itself.
    `capacity_bytes`: 0 if it is not known. `is_shared`: whether other nodes write it too.
    `batch_bytes`: how much to give it in one call.
    """

    name: str
    medium: Medium
    places: bool
    capacity_bytes: int
    is_shared: bool
    batch_bytes: int


@dataclass(frozen=True, slots=True)
class TierFigures:
    """Sums since the start, of blocks and of bytes in slots, or in places if the core chooses them.
    `queued_bytes`: in slots, of calls that have not ended."""

    read_blocks: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    absent_blocks: int = 0
    corrupt_blocks: int = 0
    failed_blocks: int = 0
    queued_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierMemory:
    """Bytes that a tier has taken, of buffers, indexes and child processes, and the most that it
    takes; 0 if nothing bounds them."""

    held_bytes: int
    most_bytes: int


class Tier(Protocol):
    """Moves blocks between slots of the arena and a store. Thread-safe."""

    def facts(self) -> TierFacts:
        """What holds for the tier until it is closed."""

    def probe(self, keys: Sequence[bytes], deadline_s: float, on_done: OnProbe) -> None:
        """Asks which blocks are there. `deadline_s`, of time.monotonic: nobody waits for answers
        that come later, so the tier need not ask any more. Only for tiers that place by
        themselves."""

    def read(self, blocks: Blocks, deadline_s: float, on_done: OnRead) -> None:
        """Fills slots. What has not begun at the deadline is FAILED."""

    def write(self, blocks: Blocks, on_done: OnWrite) -> None:
        """Stores slots' bytes, which stay as they are until `on_done`."""

    def forget(self, keys: Sequence[bytes]) -> None:
        """Removes blocks if that costs little; nobody waits. Not for tiers in which the core
        chooses places."""

    def problem(self) -> str:
        """Why the tier can't be used at all, in words; empty if nothing is known against it."""

    def stalled_s(self, now_s: float) -> float:
        """How long the call that is under way has waited for the store; 0 if none is."""

    def is_alive(self) -> bool:
        """Returns whether all its threads are, until it is closed."""

    def memory(self) -> TierMemory:
        """Returns the memory that it takes besides slots of the arena."""

    def figures(self) -> TierFigures:
        """Sums since the start."""

    def close(self) -> None:
        """Ends all calls, waits for those under way as long as the store answers, and gives memory
        and connections back."""


class SharedTier(Tier, Protocol):
    """A tier that also keeps the epochs of key spaces, so that a flush counts on all nodes.

    After `raise_epoch` has been answered, no node's read that begins later finds a block of an
    earlier epoch, if the read names the epochs of its keys. Calls of `epochs` and `raise_epoch` are
    executed, and answered, in the order in which they were made.
    """

    def probe(
        self,
        keys: Sequence[bytes],
        deadline_s: float,
        on_done: OnProbe,
        epochs: Epochs = NO_EPOCHS,
    ) -> None:
        """As `Tier.probe`. `epochs`: as in `Blocks`."""

    def epochs(self, fingerprints: Sequence[str], deadline_s: float, on_done: OnEpochs) -> None:
        """Asks for the epochs of key spaces. Those that are not there begin. Overtakes reads and
        writes."""

    def raise_epoch(self, fingerprint: str, floor: int, on_done: OnEpoch) -> None:
        """Ends the epoch of a key space, and gives the next one, which is above `floor`, too.
        NO_EPOCH if the store has no room for it: then too, nothing of the old epoch passes. None:
        it may have happened or not; ask again. Overtakes reads and writes."""
