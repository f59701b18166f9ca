"""The protocol of tiers. Each call is for a batch of blocks, and reports to `on_done`.

Always true for every tier:

- a call never blocks and never raises;
- `on_done` is called exactly once, from any thread, after the tier has stopped using the call's
  slots, also when the tier is closed;
- FOUND: the slot holds, bit for bit, what was written under the key;
- STORED: a read that follows at once would find the block.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from hotkv_server.tiers.book.generations import NO_GENERATION as NO_GENERATION

Int64s = NDArray[np.int64]
Seals = NDArray[np.uint64]
Codes = NDArray[np.uint8]
Generations: TypeAlias = Mapping[str, int]
"""By fingerprint."""
NO_GENERATIONS: Generations = MappingProxyType({})


# -------------------------------------------------------------------------------------------
# Generations

# A generation encodes the time at which it began. Always true: of a key space's generations in
# one store, the later is the greater, because a node makes each new one greater than all that it
# knows. A store may lose one, in a restart or with an old copy of its data; as the clock has
# advanced, its number does not return.

RAISES = 1 << 16
"""Numbers per tick: `begun` returns the tick's first; `raised` counts on from there if there are
several flushes in a tick."""
TICK_US = 64


def begun(now_us: int) -> int:
    """A new generation, at most 19 digits and below 2^63; not smaller for a later wall-clock
    time."""
    return now_us // TICK_US * RAISES


def raised(now_us: int, *known: int) -> int:
    """A flush's generation, greater than all `known` of the key space."""
    return max([begun(now_us), *(generation + 1 for generation in known)])


# -------------------------------------------------------------------------------------------- Calls


class Read(enum.IntEnum):
    """After a result other than FOUND the slot's bytes are undefined.

    CORRUPT: the stored bytes don't match their seal.
    FAILED: an error or a time limit.
    """

    FOUND = 1
    ABSENT = 2
    CORRUPT = 3
    FAILED = 4


class Write(enum.IntEnum):
    """The result of writing a block.

    PRESENT: the store keeps a value that it had under the key.
    FULL: the store has no room.
    FAILED: an error or a time limit.
    """

    STORED = 1
    PRESENT = 2
    FULL = 3
    FAILED = 4
    UNFIT = 5
    """The encoded form exceeds `PlacedBlocks.stored_bytes`, or the memory for encoding."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The n blocks of a call. Offsets and sizes are multiples of SLOT_ALIGN.

    `keys`: the same on all nodes, any bytes, at most MAX_KEY_BYTES.
    `slots`: byte offsets in the arena.
    `num_bytes`: sizes in the arena.
    """

    keys: Sequence[bytes]
    slots: Int64s
    num_bytes: Int64s

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())


@dataclass(frozen=True, slots=True)
class PlacedBlocks(Blocks):
    """For the disk tier.

    `places`: byte offsets in its file.
    `stored_bytes`: sizes of the places; a block with less than `num_bytes` is encoded.
    `seals`: for a read, what the writes returned.
    """

    places: Int64s
    stored_bytes: Int64s
    seals: Seals


@dataclass(frozen=True, slots=True)
class SharedBlocks(Blocks):
    """For a shared tier.

    `depths`: a tier that evicts may begin with the deepest.
    `generations`: what the caller takes for those of the keys' key spaces. If the store's differ
        after a read, all blocks are ABSENT. Empty: not compared.
    """

    depths: Int64s
    generations: Generations = field(default_factory=lambda: NO_GENERATIONS)


AnyBlocks = TypeVar("AnyBlocks", bound=Blocks, contravariant=True)


MAX_KEY_BYTES = 250

OnRead = Callable[[Codes], None]
"""`Read` values, uint8 [n]."""
OnWrite = Callable[[Codes, Seals], None]
"""`Write` values, uint8 [n], and seals of STORED blocks, uint64 [n]; zeros from a shared tier."""
OnProbe = Callable[[Codes], None]
"""FOUND, ABSENT or FAILED, uint8 [n]: a hint, as the store may change at any time."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A store's answer to a question for generations.

    `generations`: NO_GENERATION if the store has none and can't begin one (no room, or no
        permission).
    `restored_below`: nonzero just after a restart: lower generations began before it, and may be
        an old copy's, which lacks flushes.
    """

    generations: Generations
    restored_below: int = 0


OnGenerations = Callable[[Shown | None], None]
"""None if the store did not answer."""
OnGeneration = Callable[[int | None], None]
"""The new generation or NO_GENERATION; None if the store did not answer."""


MAX_STALL_S = 1.0


@dataclass(frozen=True, slots=True)
class TierFacts:
    """Properties that never change.

    `name`: in metrics and messages, such as "valkey".
    `batch_bytes`: most efficient size of a call.
    `linger_s`: how long a writer waits for `batch_bytes`.
    `max_stall_s`: a tier with a longer call hangs: its reads are abandoned, and lookups skip it.
    """

    name: str
    batch_bytes: int
    linger_s: float = 0.0
    max_stall_s: float = MAX_STALL_S


@dataclass(frozen=True, slots=True)
class TierFigures:
    """Since the start. Bytes read and written are stored bytes for the disk, else bytes in the
    arena.

    `queued_bytes`: of calls that have not ended.
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
    """Of buffers, indexes and child processes. `most_bytes`: limit of `held_bytes`; 0 if there
    is none."""

    held_bytes: int
    most_bytes: int


class Tier(Protocol[AnyBlocks]):
    """See the module. Thread-safe."""

    def facts(self) -> TierFacts: ...

    def read(self, blocks: AnyBlocks, deadline_s: float, on_done: OnRead) -> None:
        """A block whose read has not begun by the deadline is FAILED."""

    def write(self, blocks: AnyBlocks, on_done: OnWrite) -> None:
        """The slots must not change before `on_done`."""

    def problem(self) -> str:
        """Why the tier is unusable, or ""."""

    def stalled_s(self, now_s: float) -> float:
        """How long the call that has waited longest for the store has waited; 0 if none waits.
        `now_s`: time.monotonic.
        """

    def is_alive(self) -> bool:
        """False if a thread has died; True once closed."""

    def memory(self) -> TierMemory: ...

    def figures(self) -> TierFigures: ...

    def close(self) -> None:
        """Ends all calls and frees memory and connections. Blocks until calls under way have
        ended, within the tier's time limits."""


class SharedTier(Tier[SharedBlocks], Protocol):
    """Always true: once `raise_generation` is answered, a read with its `generations` that
    begins later, on any node, finds no block of the old generation. `generations` and
    `raise_generation` run in the order of the calls, not behind queued reads and writes."""

    def probe(
        self,
        keys: Sequence[bytes],
        deadline_s: float,
        on_done: OnProbe,
        generations: Generations = NO_GENERATIONS,
    ) -> None:
        """Which blocks the tier has.

        `deadline_s`: time.monotonic; later answers are ignored, so after it the tier may report
            FAILED without asking the store.
        `generations`: if the store's differ, all blocks are ABSENT.
        """

    def forget(self, keys: Sequence[bytes]) -> None:
        """Starts to remove blocks. If that is expensive, a tier may leave some."""

    def generations(
        self, fingerprints: Sequence[str], deadline_s: float, on_done: OnGenerations
    ) -> None:
        """Reports the generations of key spaces, and begins those that are missing.
        `deadline_s`: time.monotonic; after it reports None.
        """

    def raise_generation(
        self, fingerprint: str, floor: int, on_done: OnGeneration, is_retry: bool = False
    ) -> None:
        """Begins a generation above the present one and `floor`. Reports NO_GENERATION if there is
        no room (the old generation has ended all the same), None if the store did not answer: then
        call again, because it may have raised or not.

        `floor`: the highest that the caller knows.
        `is_retry`: the last call for the same flushes failed.
        """
