"""The protocol of tiers: the calls that each tier offers, on batches of blocks.

Always true for every tier:

- a call never blocks and never raises;
- its `on_done` is called exactly once, from any thread, after the tier has stopped using the
  call's slots (places in the arena). This also holds for calls that are queued when the tier is
  closed;
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
"""Maps the fingerprint of a key space to its epoch (a number that each flush raises)."""
NO_EPOCHS: Epochs = MappingProxyType({})


# ------------------------------------------------------------------------------------------- Epochs

# An epoch is a number that a shared store keeps for each key space, and that each flush of the key
# space raises. It encodes the time at which the epoch began.
#
# Always true: of two epochs of a key space in a store, the later is greater. An epoch is computed
# from the wall clock, and is greater than all epochs known to the node that makes it. So if a store
# loses its epoch, in a restart or by returning to an old copy of its data, no later epoch repeats
# the lost number.

RAISES = 1 << 16
"""Least difference between epochs that `begun` returns for different ticks of the clock. `raised`
uses the numbers between two ticks."""
TICK_US = 64
"""Length of a tick of the clock in `begun`, in microseconds."""


def begun(now_us: int) -> int:
    """Returns the number of an epoch that begins at `now_us`, in microseconds of the wall clock.
    The number has 19 digits and is less than 2^63. A flush ends an epoch and begins the next."""
    return now_us // TICK_US * RAISES


def raised(now_us: int, *known: int) -> int:
    """Returns the next epoch for a flush at `now_us`, in microseconds of the wall clock. The next
    epoch is greater than all `known` epochs."""
    return max([begun(now_us), *(epoch + 1 for epoch in known)])


# -------------------------------------------------------------------------------------------- Calls


class Read(enum.IntEnum):
    """The result of reading a block. Only FOUND fills the block's slot; other slots have undefined
    bytes."""

    FOUND = 1
    ABSENT = 2
    CORRUPT = 3
    FAILED = 4


class Write(enum.IntEnum):
    """The result of writing a block. PRESENT: the store already had a value under the key, and
    keeps it. FULL: the store has no room."""

    STORED = 1
    PRESENT = 2
    FULL = 3
    FAILED = 4
    UNFIT = 5
    """The block's encoded form is larger than its `stored_bytes`. The tier wrote nothing."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The n blocks of a call. Row i of each field belongs to block i; `epochs` is for the call.

    `keys`: the key of each block, the same on all nodes that share a tier; at most MAX_KEY_BYTES
        long. A key ends with the block's hash, so it may contain any bytes.
    `slots`: byte offsets of the blocks in the arena, multiples of SLOT_ALIGN.
    `num_bytes`: sizes of the blocks in the arena, multiples of SLOT_ALIGN.
    `places`: byte offsets of the blocks in the tier's space, multiples of SLOT_ALIGN. Empty if the
        tier chooses the places itself.
    `seals`: check values that the writes of the blocks returned; a read compares them. Empty for a
        tier that chooses places itself, because it stores each seal with the block.
    `depths`: for each block, the number of blocks before it in its sequence. A tier that evicts by
        itself may use the depths. Empty: all 0.
    `epochs`: the epochs (numbers that flushes raise) that are part of the keys, for a `SharedTier`.
        If the store has another epoch after a read, all blocks are ABSENT. Empty: not checked.
    `stored_bytes`: bytes reserved for each block at its place in the tier. A block is stored
        encoded (compressed) if this is less than its `num_bytes`. Empty: the same as `num_bytes`.
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
"""Receives `Write` values, uint8 [n], and the seals (check values) of the STORED blocks, uint64
[n]."""
OnProbe = Callable[[Codes], None]
"""Receives `Read` values, uint8 [n]: FOUND, ABSENT or FAILED. They are only a hint: the store may
lose or get a block at any time."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A store's answer when it is asked for the epochs of key spaces. Every flush of a key space
    raises its epoch.

    `epochs`: the epoch of each key space. NO_EPOCH if the store knows none and has no room to
        record one.
    `restored_below`: nonzero if the store has just restarted, perhaps from an old copy of its data.
        Epochs below this number can't be trusted, since a later flush may be missing from the copy.
        0: no such restart, or the store can't tell.
    """

    epochs: Epochs
    restored_below: int = 0


OnEpochs = Callable[[Shown | None], None]
"""Receives the epochs (numbers that flushes raise); None if the store did not answer."""
OnEpoch = Callable[[int | None], None]
"""Receives an epoch (number that each flush raises) or NO_EPOCH; None if the store did not
answer."""


@dataclass(frozen=True, slots=True)
class TierFacts:
    """Constant facts about a tier, for its callers.

    `name`: the tier's name in metrics and messages, such as "valkey".
    `places`: True if the cache core chooses the place of each block in the tier and evicts blocks;
        False if the tier does both.
    `capacity_bytes`: size of the store; 0 if unknown.
    `is_shared`: True if other nodes read and write the same store.
    `batch_bytes`: bytes of blocks with which a call is most efficient.
    `linger_s`: longest time to wait for more blocks before a write of less than `batch_bytes`.
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
    """Counts of blocks and bytes since the tier's start. A block counts with its bytes in the tier
    if the core chooses places, and with its bytes in the arena otherwise.

    `queued_bytes`: bytes in the arena of the blocks whose calls have not ended. This figure falls
        when calls end.
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

    `held_bytes`: bytes in use now.
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

        `deadline_s`: a time of time.monotonic. After it the caller ignores the answer, so the tier
        may report FAILED without asking its store.
        """

    def read(self, blocks: Blocks, deadline_s: float, on_done: OnRead) -> None:
        """Reads blocks into their slots. A block whose read has not begun at the deadline is
        FAILED. `deadline_s`: a time of time.monotonic."""

    def write(self, blocks: Blocks, on_done: OnWrite) -> None:
        """Stores the bytes of the blocks' slots. The bytes must not change until `on_done`."""

    def forget(self, keys: Sequence[bytes]) -> None:
        """Starts to remove blocks if that is cheap for the store, and does not wait for the
        removal. Tiers whose places the core chooses ignore this call."""

    def problem(self) -> str:
        """Returns why the tier is unusable; empty if no problem is known."""

    def stalled_s(self, now_s: float) -> float:
        """Returns for how many seconds the call under way has waited for the store; 0 if no call
        waits. `now_s`: a time of time.monotonic."""

    def is_alive(self) -> bool:
        """Returns False if a thread of the tier has died. True once the tier is closed."""

    def memory(self) -> TierMemory:
        """Returns the memory that the tier uses in addition to slots of the arena."""

    def figures(self) -> TierFigures:
        """Returns the tier's counts since its start."""

    def close(self) -> None:
        """Ends all calls and frees memory and connections. Blocks until the calls under way have
        ended, at most for the tier's time limits."""


class SharedTier(Tier, Protocol):
    """A tier that also keeps the epochs of key spaces (numbers that flushes raise), so that a flush
    holds on all nodes.

    A read whose `Blocks.epochs` is set finds no block of an epoch that a `raise_epoch` has ended,
    on any node, if it begins after the answer to `raise_epoch`. Calls of `epochs` and `raise_epoch`
    are executed and answered in the order in which they were made.
    """

    def probe(
        self,
        keys: Sequence[bytes],
        deadline_s: float,
        on_done: OnProbe,
        epochs: Epochs = NO_EPOCHS,
    ) -> None:
        """Asks which blocks the tier has, as `Tier.probe` does. `epochs`: the epochs (numbers that
        flushes raise) that are part of the keys; if the store has another epoch, all blocks are
        ABSENT."""

    def epochs(self, fingerprints: Sequence[str], deadline_s: float, on_done: OnEpochs) -> None:
        """Asks for the epochs of key spaces, and begins an epoch for each that has none. Does not
        wait behind queued reads and writes."""

    def raise_epoch(self, fingerprint: str, floor: int, on_done: OnEpoch) -> None:
        """Ends the epoch of a key space and reports the next epoch, which is also above `floor`.
        Does not wait behind queued reads and writes.

        Reports NO_EPOCH if the store has no room for a new epoch; the old epoch has ended all the
        same. Reports None if the store did not answer: the epoch may have been raised or not, so
        call again.
        """
