"""The protocol of tiers (`Tier`, `SharedTier`) and the values in its calls. Each call is for a
batch of blocks, and reports its result to a function, `on_done`.

Always true for every tier:

- a call never blocks and never raises;
- the tier calls `on_done` exactly once, from any thread, after it has stopped using the call's
  slots (places in the arena). This also holds for calls that are queued when the tier is closed;
- a read reports a block as FOUND only if the block's slot holds, bit for bit, the bytes that were
  written under its key;
- a write reports a block as STORED only if a read that follows at once would find the block.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hotkv_server.tiers.book.generations import NO_GENERATION as NO_GENERATION

Int64s = NDArray[np.int64]
Seals = NDArray[np.uint64]
Codes = NDArray[np.uint8]
Generations: TypeAlias = Mapping[str, int]
"""Maps the fingerprint (name) of a key space to its generation (a number that each flush
raises)."""
NO_GENERATIONS: Generations = MappingProxyType({})


# -------------------------------------------------------------------------------------------
# Generations

# A generation is a number that a shared store keeps for each key space (a model in a
# configuration). Each flush, which deletes all blocks of the key space, raises it. The number
# encodes the time at which the generation began.
#
# Always true: of two generations of a key space in a store, the later is greater. A node computes
# an generation from the wall clock, and makes it greater than all generations that the node knows.
# A store may lose a generation, in a restart or when it returns to an old copy of its data. Because
# the clock has advanced, no later generation repeats the lost number.

RAISES = 1 << 16
"""Generations (numbers that each flush raises) are computed from the clock. `begun` returns
multiples of RAISES, one for each tick of the clock. `raised` may return the numbers in between, so
that several flushes within a tick begin different generations."""
TICK_US = 64
"""Length of a tick of the clock that `begun` reads, in microseconds."""


def begun(now_us: int) -> int:
    """Returns the number for a key space's new generation (a number that each flush raises).

    `now_us`: when the generation begins, in microseconds of the wall clock. A later time gives a
        number at least as great. The number has at most 19 digits and is less than 2^63.
    """
    return now_us // TICK_US * RAISES


def raised(now_us: int, *known: int) -> int:
    """Returns the number for the generation that a flush (deletion of all blocks of a key space)
    begins.

    `now_us`: time of the flush, in microseconds of the wall clock.
    `known`: the generations of the key space that the caller knows. The number is greater than all
        of them.
    """
    return max([begun(now_us), *(generation + 1 for generation in known)])


# -------------------------------------------------------------------------------------------- Calls


class Read(enum.IntEnum):
    """The result of reading a block. After a result other than FOUND, the bytes in the block's slot
    (place in the arena) are undefined.

    FOUND: the slot has the block's bytes.
    ABSENT: the tier does not have the block.
    CORRUPT: the stored bytes are damaged; they don't match their seal (checksum).
    FAILED: the tier has no answer, because of an error or a time limit.
    """

    FOUND = 1
    ABSENT = 2
    CORRUPT = 3
    FAILED = 4


class Write(enum.IntEnum):
    """The result of writing a block.

    STORED: the tier has written the block.
    PRESENT: the store already had a value under the key, and keeps that value.
    FULL: the store has no room.
    FAILED: the block was not written, because of an error or a time limit.
    """

    STORED = 1
    PRESENT = 2
    FULL = 3
    FAILED = 4
    UNFIT = 5
    """The tier wrote nothing, because the encoded (compressed) form of the block is larger than the
    block's `Blocks.stored_bytes`, or than the memory in which the tier encodes blocks."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The n blocks of a call. Item i of each field belongs to block i, except that `generations`
    holds for all blocks.

    `keys`: the key of each block, the same on all nodes that share a tier; at most MAX_KEY_BYTES
        long. A key ends with the block's hash, so it may contain any bytes.
    `slots`: byte offsets of the blocks in the arena, multiples of SLOT_ALIGN.
    `num_bytes`: sizes of the blocks in the arena, multiples of SLOT_ALIGN.
    `places`: byte offsets of the blocks in the disk tier's file, multiples of SLOT_ALIGN. Empty for
        a tier that decides itself where it stores a block.
    `seals`: for a read from the disk tier, the checksums that the writes of the
        blocks returned. Empty for other tiers, because they store each seal with its block.
    `depths`: for each block, the number of blocks before it in its sequence. A tier that evicts
        blocks itself may use the depths, to evict the end of a sequence first. Empty: all 0.
    `generations`: for a `SharedTier`, the generations in the blocks' keys. After a read the tier
        compares these generations with the generations that the store has now; if one differs, all
        blocks are ABSENT.
        Empty: the tier compares nothing.
    `stored_bytes`: for the disk tier, the bytes that each block may use in the file. If this is
        less than the block's `num_bytes`, the tier encodes (compresses) the block. Empty: the same
        as `num_bytes`.
    """

    keys: Sequence[bytes]
    slots: Int64s
    num_bytes: Int64s
    places: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    seals: Seals = field(default_factory=lambda: np.empty(0, np.uint64))
    depths: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    generations: Generations = field(default_factory=lambda: NO_GENERATIONS)
    stored_bytes: Int64s = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def total_bytes(self) -> int:
        """Sum of `num_bytes`: the bytes of all blocks in the arena."""
        return int(self.num_bytes.sum())

    @property
    def place_bytes(self) -> Int64s:
        """Bytes that each block may use in the tier, int64 [n]: `stored_bytes`, or `num_bytes` if
        `stored_bytes` is empty."""
        return self.stored_bytes if len(self.stored_bytes) else self.num_bytes


MAX_KEY_BYTES = 250
"""Most bytes in the key of a block."""

OnRead = Callable[[Codes], None]
"""Called with the results of a read: a value of `Read` for each block, uint8 [n]."""
OnWrite = Callable[[Codes, Seals], None]
"""Called with the results of a write: a value of `Write` for each block, uint8 [n], and the seals
(checksums) of the STORED blocks, uint64 [n]; zeros from a shared tier."""
OnProbe = Callable[[Codes], None]
"""Called with the results of `SharedTier.probe`: for each block FOUND, ABSENT or FAILED (values of
`Read`), uint8 [n]. The results are only a hint, because the store may lose or get a block at any
time."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A store's answer when a tier asks the store for key spaces' generations (numbers that each
    flush raises).

    `generations`: the generation of each key space; NO_GENERATION if the store has no generation
        for the key space and can't begin one: it has no room, or forbids hotkv's user to write.
    `restored_below`: nonzero if the store has just restarted, perhaps with an old copy of its data.
        Generations below this number began before the restart. The caller must not trust them,
        because the old copy may lack flushes. 0: the store has not just restarted, or does not
        report its restarts.
    """

    generations: Generations
    restored_below: int = 0


OnGenerations = Callable[[Shown | None], None]
"""Called with the result of `SharedTier.generations` (the store's answer about generations, numbers
that each flush raises); None if the store did not answer."""
OnGeneration = Callable[[int | None], None]
"""Called with the result of `SharedTier.raise_generation`: the new generation (a number that each
flush raises), or NO_GENERATION; None if the store did not answer."""


MAX_STALL_S = 1.0
"""Default of `TierFacts.max_stall_s`."""


@dataclass(frozen=True, slots=True)
class TierFacts:
    """Properties of a tier that never change.

    `name`: the tier's name in metrics and messages, such as "valkey".
    `places`: True for the disk tier: the cache core chooses the place of each block and evicts
        blocks. False for a shared tier, which itself places and evicts blocks.
    `batch_bytes`: a call is most efficient with about this many bytes of blocks.
    `linger_s`: a caller with less than `batch_bytes` of blocks to write waits up to this time for
        more blocks.
    `max_stall_s`: the tier counts as hanging if a call waits for the store for longer than this
        (`Tier.stalled_s`). The server then abandons reads under way, and lookups skip the tier.
    """

    name: str
    places: bool
    batch_bytes: int
    linger_s: float = 0.0
    max_stall_s: float = MAX_STALL_S


@dataclass(frozen=True, slots=True)
class TierFigures:
    """Counts of blocks and bytes since the tier's start. `read_bytes` and `written_bytes` count
    stored bytes for the disk tier, and bytes in the arena for other tiers.

    `queued_bytes`: sizes of the blocks whose calls have not ended, as bytes of the arena. It falls
        when a call ends; the other counts only grow.
    """

    read_blocks: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    corrupt_blocks: int = 0
    failed_blocks: int = 0
    queued_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierMemory:
    """Memory that a tier uses for buffers, indexes and child processes.

    `held_bytes`: bytes in use now.
    `most_bytes`: the upper limit of `held_bytes`; 0 if there is no limit.
    """

    held_bytes: int
    most_bytes: int


class Tier(Protocol):
    """Copies blocks between slots of the arena and a store; see the module. Thread-safe."""

    def facts(self) -> TierFacts:
        """Returns the tier's properties; they never change."""

    def read(self, blocks: Blocks, deadline_s: float, on_done: OnRead) -> None:
        """Reads blocks from the store into their slots (places in the arena). If the read of a
        block has not begun by the deadline, the block's result is FAILED.
        `deadline_s`: a time of time.monotonic."""

    def write(self, blocks: Blocks, on_done: OnWrite) -> None:
        """Writes the blocks from their slots (places in the arena) to the store. The caller must
        not change the slots before the tier calls `on_done`."""

    def problem(self) -> str:
        """Returns the reason why the tier is unusable; empty if no problem is known."""

    def stalled_s(self, now_s: float) -> float:
        """Returns the longest time, in seconds, that a call under way has already waited for the
        store; 0 if no call waits. `now_s`: a time of time.monotonic."""

    def is_alive(self) -> bool:
        """Returns False if a thread of the tier has died. True once the tier is closed."""

    def memory(self) -> TierMemory:
        """Returns the memory that the tier uses in addition to slots of the arena."""

    def figures(self) -> TierFigures:
        """Returns the tier's counts since its start."""

    def close(self) -> None:
        """Ends all calls, then frees memory and connections. Blocks until the calls under way have
        ended; the tier's own time limits bound this wait."""


class SharedTier(Tier, Protocol):
    """A tier whose store several nodes share. The store also keeps a number for each key space, its
    generation. Each flush (deletion of all blocks of the key space) raises the generation. In this
    way a flush takes effect on all nodes.

    Always true: once the tier has answered `raise_generation`, the old generation has ended. A read
    with `Blocks.generations` that begins after this answer, on any node, finds no block of the old
    generation. The tier executes and answers calls of `generations` and `raise_generation` in the
    order of the calls.
    """

    def probe(
        self,
        keys: Sequence[bytes],
        deadline_s: float,
        on_done: OnProbe,
        generations: Generations = NO_GENERATIONS,
    ) -> None:
        """Asks the tier which of these blocks it has.

        `deadline_s`: a time of time.monotonic. The caller ignores a later answer, so the tier may
            then report FAILED without asking its store.
        `generations`: the generations (numbers that each flush raises) in the blocks' keys. If the
            store has another generation, all blocks are ABSENT.
        """

    def forget(self, keys: Sequence[bytes]) -> None:
        """Starts to remove blocks from the store, and does not wait for the removal. A tier for
        which removal is expensive may leave some of these blocks in the store."""

    def generations(
        self, fingerprints: Sequence[str], deadline_s: float, on_done: OnGenerations
    ) -> None:
        """Asks the store for key spaces' generations (numbers that each flush raises). Begins a
        generation for each key space that has no generation in the store. Does not wait behind
        queued reads and writes.

        `fingerprints`: names of the key spaces.
        `deadline_s`: a time of time.monotonic, after which the tier gives up and reports None.
        """

    def raise_generation(
        self, fingerprint: str, floor: int, on_done: OnGeneration, is_retry: bool = False
    ) -> None:
        """Flushes a key space (a model in a configuration) in the store, which deletes all its
        blocks there. For this, raises the key space's generation (a number that each flush raises):
        ends the old generation, and begins and reports a new one, which is greater than the old
        generation and `floor`. Does not wait behind queued reads and writes.

        `floor`: the highest generation of the key space that the caller knows.
        `is_retry`: True if the last call for the same flushes has failed.

        Reports NO_GENERATION if the store has no room for the new generation; even then the old
        generation has ended. Reports None if the store did not answer. The caller must then call
        again, because it does not know whether the generation was raised.
        """
