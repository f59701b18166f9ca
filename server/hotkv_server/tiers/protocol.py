"""The protocol of tiers: the calls that each tier offers, on batches of blocks.

Always true for every tier:

- a call never blocks and never raises;
- its `on_done` is called exactly once, from any thread, after the tier has stopped using the
  call's slots. This also holds for calls that are queued when the tier is closed;
- a block is FOUND only if its slot holds, bit for bit, the bytes written under its key;
- a block is STORED only if a read that follows at once would find it.
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
"""Maps the fingerprint of a key space to its epoch."""
NO_EPOCHS: Epochs = MappingProxyType({})


# ------------------------------------------------------------------------------------------- Epochs

# Epochs of key spaces as numbers. The number encodes the time at which the epoch began.
#
# Always true: of two epochs of a key space in a store, the later is greater. An epoch is computed
# from the wall clock, and is greater than all epochs known to the node that makes it. So an epoch
# that a store has lost does not return, neither after a restart nor from an old copy of its data.

RAISES = 1 << 16
"""Epochs that `begun` returns for different ticks of the clock differ by at least this number. The
numbers between them are for `raised`."""
TICK_US = 64
"""Length of such a tick, in microseconds of the wall clock."""


def begun(now_us: int) -> int:
    """Returns the epoch that begins at a time in microseconds of the wall clock. It has 19 digits
    and is less than 2^63."""
    return now_us // TICK_US * RAISES


def raised(now_us: int, *known: int) -> int:
    """Returns the epoch to raise to at a time in microseconds of the wall clock: above all `known`
    epochs."""
    return max([begun(now_us), *(epoch + 1 for epoch in known)])


# -------------------------------------------------------------------------------------------- Calls


class Read(enum.IntEnum):
    """The result of reading a block. Only FOUND fills its slot; other slots have undefined
    bytes."""

    FOUND = 1
    ABSENT = 2
    CORRUPT = 3
    FAILED = 4


class Write(enum.IntEnum):
    """The result of writing a block."""

    STORED = 1
    PRESENT = 2
    FULL = 3
    FAILED = 4
    UNFIT = 5
    """Its encoded form is larger than its `stored_bytes`. The tier wrote nothing."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a call, a row each.

    `keys`: the block's key, the same on all nodes that share a tier; at most MAX_KEY_BYTES. It ends
        with the block's hash, so it may contain any bytes.
    `slots`: offsets in the arena, multiples of SLOT_ALIGN.
    `num_bytes`: sizes of the blocks in the arena, multiples of SLOT_ALIGN.
    `places`: offsets in the tier's space, in multiples of SLOT_ALIGN; empty if the tier places
        blocks itself.
    `stored_bytes`: sizes of the blocks' places in the tier. A block whose place is smaller than its
        `num_bytes` is stored encoded (compressed). Empty: the same as `num_bytes`.
    `seals`: returned by the write of each block; empty for a tier that places blocks itself and
        keeps the seals with its values.
    `depths`: for each block, the number of blocks before it in its sequence. For a tier that evicts
        by itself. Empty: all 0.
    `epochs`: the epochs in the keys, for a `SharedTier`. If the store has another epoch after the
        read, all blocks are ABSENT. Empty: not checked.
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
"""Most bytes in the key of a block."""

OnRead = Callable[[Codes], None]
"""Receives `Read` values, uint8 [n]."""
OnWrite = Callable[[Codes, Seals], None]
"""Receives `Write` values, uint8 [n], and the seals of the STORED blocks, uint64 [n]."""
OnProbe = Callable[[Codes], None]
"""Receives `Read` values, uint8 [n]: FOUND, ABSENT or FAILED. Only a hint."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Epochs that a store has. NO_EPOCH for a key space without an epoch, if the store has no room
    to begin a new epoch.

    `restored_below`: a lower epoch may date from before a flush, because the store has just
        restarted from a copy of its data. 0: no such restart, or the store can't tell.
    """

    epochs: Epochs
    restored_below: int = 0


OnEpochs = Callable[[Shown | None], None]
"""Receives the epochs; None if the store did not answer."""
OnEpoch = Callable[[int | None], None]
"""Receives an epoch or NO_EPOCH; None if the store did not answer."""


@dataclass(frozen=True, slots=True)
class TierFacts:
    """Constant facts about a tier, for the runtime.

    `places`: whether the core chooses the places of blocks and evicts them; else the tier does.
    `capacity_bytes`: 0 if unknown.
    `is_shared`: whether other nodes write to the tier too.
    `batch_bytes`: the best size of a call.
    `linger_s`: longest wait for more blocks before a smaller write.
    """

    name: str
    medium: Medium
    places: bool
    capacity_bytes: int
    is_shared: bool
    batch_bytes: int
    linger_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TierFigures:
    """Sums since the start. Bytes are counted in places if the core chooses them, in slots
    otherwise.

    `queued_bytes`: slot bytes of calls that have not ended.
    """

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
    """Memory of a tier's buffers, indexes and child processes.

    `held_bytes`: in use now.
    `most_bytes`: the upper limit; 0 if the memory is unbounded.
    """

    held_bytes: int
    most_bytes: int


class Tier(Protocol):
    """Moves blocks between slots of the arena and a store. Thread-safe."""

    def facts(self) -> TierFacts:
        """Returns the facts that hold until the tier is closed."""

    def probe(self, keys: Sequence[bytes], deadline_s: float, on_done: OnProbe) -> None:
        """Asks which blocks the tier has. Only for tiers that place blocks themselves.

        `deadline_s`, of time.monotonic: later answers are ignored, so the tier may skip the
        question.
        """

    def read(self, blocks: Blocks, deadline_s: float, on_done: OnRead) -> None:
        """Reads blocks into their slots. A block whose read has not begun at the deadline is
        FAILED."""

    def write(self, blocks: Blocks, on_done: OnWrite) -> None:
        """Stores the bytes of slots. They must not change until `on_done`."""

    def forget(self, keys: Sequence[bytes]) -> None:
        """Removes blocks if that is cheap, and returns at once. Not for tiers whose places the core
        chooses."""

    def problem(self) -> str:
        """Returns why the tier is unusable; empty if no problem is known."""

    def stalled_s(self, now_s: float) -> float:
        """Returns how long the current call has waited for the store; 0 without a call."""

    def is_alive(self) -> bool:
        """Returns whether all threads of the tier are running. True until it is closed."""

    def memory(self) -> TierMemory:
        """Returns the memory that it uses beside slots of the arena."""

    def figures(self) -> TierFigures:
        """Returns sums since the start."""

    def close(self) -> None:
        """Ends all calls and frees memory and connections. Waits for current calls as long as the
        store answers."""


class SharedTier(Tier, Protocol):
    """A tier that also keeps the epochs of key spaces, so that a flush holds on all nodes.

    Once `raise_epoch` is answered, a later read on any node no longer finds blocks of an earlier
    epoch, if it names the epochs of its keys. Calls of `epochs` and `raise_epoch` are executed and
    answered in the order in which they were made.
    """

    def probe(
        self,
        keys: Sequence[bytes],
        deadline_s: float,
        on_done: OnProbe,
        epochs: Epochs = NO_EPOCHS,
    ) -> None:
        """Does the same as `Tier.probe`. `epochs`: see `Blocks`."""

    def epochs(self, fingerprints: Sequence[str], deadline_s: float, on_done: OnEpochs) -> None:
        """Asks for the epochs of key spaces, and begins an epoch for each that has none. Overtakes
        reads and writes."""

    def raise_epoch(self, fingerprint: str, floor: int, on_done: OnEpoch) -> None:
        """Ends the epoch of a key space and reports the next, which is also above `floor`.
        Overtakes reads and writes.

        NO_EPOCH: the store has no room for a new epoch; the old epoch has ended all the same. None:
        the raise may have happened or not; ask again.
        """
