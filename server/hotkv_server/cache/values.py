"""Frozen values that the core (`CacheCore`) accepts and returns.

Terms: a run is a chain of consecutive blocks of one group, or of their sketches. A
sketch is a compact summary of a block's attention keys, for sparse attention.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.groups import GroupSpec
from hotkv_proto.keys import MAX_GROUPS, KeySpace, Sketch
from hotkv_proto.table import Words

Entries = NDArray[np.uint32]
Int64s = NDArray[np.int64]
BoolMask = NDArray[np.bool_]
KEY_SPACE_ROWS = 1 << 13
"""Number of rows in arrays that have a row for each key space; a power of two. The row of a key
space is its number modulo KEY_SPACE_ROWS. Numbers are never reused, and no two known key spaces
share a row."""
FIRST_MOVE = 1 << 31
"""First number for moves of blocks between tiers. A reserved entry (record of a block that is being
written) stores the number of its owner, a write lease or a move: a lease's number is below
FIRST_MOVE, a move's number is FIRST_MOVE or higher."""
MAX_TRANSFERS = 1 << 14
"""Most transfers in flight, over all sessions."""
MAX_SKETCHES = 256
"""Most kinds of sketches (compact summaries of blocks' attention keys, for sparse attention)
that sessions may declare for a key space."""
HOST_TIER, DISK_TIER = "host", "disk"
"""Names of the host-memory tier and of the disk tier below it."""


class Medium(enum.Enum):
    """The kind of storage that holds a block. CPU is host memory; DISK and REMOTE are tiers below
    it. `events.wire` maps the members to vLLM's names."""

    CPU = "CPU"
    DISK = "DISK"
    REMOTE = "REMOTE"


@dataclass(frozen=True, slots=True)
class TenantShare:
    """A tenant's share of the arena.

    guaranteed_bytes: while the tenant holds no more than this, stores of other tenants do not evict
        its blocks.
    burst_bytes: above this, the tenant's stores evict only its own blocks. 0: no limit.
    """

    guaranteed_bytes: int = 0
    burst_bytes: int = 0


MAX_BLOCKS_PER_CALL = 1 << 17
"""Most blocks that a call may name. A lookup of that many blocks takes about 20 ms, during which
the event loop serves no other call."""


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Settings of the core (`CacheCore`, which decides which blocks are cached). Times are in
    seconds. Shares are fractions of the arena, 0 to 1.

    capacity: largest number of entries, that is of blocks and sketches (compact summaries of
        attention keys) together.
    unadmitted_share: largest share that read leases may pin while no load has begun under them.
    held_share: largest share that may be pinned because requests asked to retain their blocks.
    unwritten_share: largest share that the write leases of an owner may reserve and not have
        written. All owners together may have twice as much.
    residency_share: largest share that residencies (requests whose KV stays in host memory) may
        reserve and pin.
    residency_grace_s: how long after a restart clients of the earlier server may continue to read
        the blocks of their residencies in the arena.
    client_memory_bytes: limit of the memory, outside the arena, for clients' leases, transfers and
        sequences.
    check_stride: stride of checksums, see `integrity.checksums`; 0 turns checksums off.
    tenants: shares by tenant name. A tenant that is not listed has no guarantee and no limit.
    is_backed: True if the whole arena has memory (is prefaulted) at the start. If False, calls of
        `Space.grow` later report how much of the arena has memory.
    """

    arena_bytes: int
    slab_bytes: int
    capacity: int
    lease_ttl_s: float = 30.0
    max_lease_ttl_s: float = 600.0
    unadmitted_share: float = 0.25
    held_share: float = 0.25
    unwritten_share: float = 1.0
    max_blocks_per_call: int = MAX_BLOCKS_PER_CALL
    max_leases: int = 60_000
    residency_share: float = 0.8
    residency_grace_s: float = 10.0
    client_memory_bytes: int = 96 << 20
    check_stride: int = 0
    tenants: Mapping[str, TenantShare] = field(default_factory=dict)
    is_backed: bool = True


@dataclass(frozen=True, slots=True)
class HashList:
    """Hashes of consecutive blocks of a prompt in one group, each a row of eight uint32 words.

    depths: for each block, the number of blocks before it in its sequence (prompt). None if the
        list begins with the first block of a sequence and has no gaps, or if the depths are not
        known.
    """

    group_index: int
    hashes: Words
    depths: Int64s | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A chain of consecutive blocks of a group.

    hashes: each a row of eight uint32 words.
    parent: hash of the block before the first block; None if the run begins its sequence.
    depth: number of blocks that precede the first block in its sequence.
    """

    group_index: int
    hashes: Words
    parent: Words | None = None
    depth: int = 0


@dataclass(frozen=True, slots=True)
class LoadPositions:
    """The blocks of one group that a load copies. `positions`: positions of these blocks in the
    group's list of hashes in the `acquire` call of the read lease, int64."""

    group_index: int
    positions: Int64s


@dataclass(frozen=True, slots=True)
class SlotRun:
    """The blocks of one run (chain of consecutive blocks) that a transfer copies, and their slots
    in the arena.

    positions: positions of the copied blocks in the run, int64.
    offsets: offsets of the blocks' slots in the arena, in bytes, int64.
    entries: the blocks' entry numbers, uint32.
    """

    group_index: int
    positions: Int64s
    offsets: Int64s
    entries: Entries


@dataclass(frozen=True, slots=True)
class Reservation:
    """The result of `CacheCore.reserve`. Runs are in the order of the call.

    results: for each run (consecutive blocks of a group), its blocks' `BlockResult` values, uint8.
    entries: for each run, its blocks' entry numbers, uint32; 0 for a block without an entry.
    ttl_s: remaining lifetime of the lease.
    """

    results: tuple[NDArray[np.uint8], ...]
    entries: tuple[Entries, ...]
    ttl_s: float


class Cause(enum.IntEnum):
    """Why a block was removed, or was not stored. NONE: the cause is unknown. The server remembers
    the causes of the latest removals only, and only since its start."""

    NONE = 0
    ROOM = 1
    """The block was evicted to make room for other blocks."""
    OPERATOR = 2
    """A call of an operator evicted the block."""
    FLUSH = 3
    """The block was deleted in a flush, which deletes all blocks of a key space."""
    DAMAGE = 4
    """The block's bytes contradicted its checksum."""
    HINT = 5
    """A hint demoted the block to a tier below host memory."""
    EXPIRY = 6
    """The block never became ready, because the lease of its store expired."""
    NO_ROOM = 7
    """The block was not stored, because its store found no room."""


@dataclass(frozen=True, slots=True)
class EvictionNotice:
    """Blocks of one group that were evicted, or flushed (deleted with all blocks of the key space).
    The node reports them to the sessions of the key space. `hashes`: each a row of eight uint32
    words."""

    key_space_id: int
    group_index: int
    hashes: Words


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A live session: the connection of an engine's scheduler or worker, or of a tool, for one key
    space.

    number: the session's public number. The secret id that its client uses in calls is known only
        to the node.
    sketches: group index of each kind of sketch (compact summary of a block's
        attention keys, for sparse attention) that the session declares.
    """

    number: int
    engine_id: str
    role: str
    key_space_id: int
    opened_s: float
    sketches: tuple[int, ...] = ()


@dataclass(slots=True)
class Counters:
    """Numbers of events since the server's start. They count blocks unless the name says otherwise.

    lookup_blocks: blocks that lookups named.
    lookup_hit_blocks: blocks that lookups named and that were ready.
    acquired_blocks: blocks that calls for read leases named and that were pinned.
    missed_blocks: blocks that calls for read leases named and that were not pinned.
    stored_blocks: blocks that became ready after a store.
    present_blocks, no_space_blocks, in_flight_blocks: blocks that stores and reservations named, by
        their `BlockResult` (PRESENT, NO_SPACE, IN_FLIGHT).
    aborted_blocks: blocks that were reserved, and removed before they became ready.
    held_blocks: blocks that were pinned because a request asked to retain them.
    condemned_blocks: blocks that were dropped because their bytes contradicted their checksum
        (checksum).
    """

    lookup_blocks: int = 0
    lookup_hit_blocks: int = 0
    acquired_blocks: int = 0
    missed_blocks: int = 0
    stored_blocks: int = 0
    present_blocks: int = 0
    no_space_blocks: int = 0
    in_flight_blocks: int = 0
    aborted_blocks: int = 0
    evicted_blocks: int = 0
    loaded_blocks: int = 0
    held_blocks: int = 0
    flushed_blocks: int = 0
    condemned_blocks: int = 0
    restored_blocks: int = 0
    stored_sketches: int = 0
    acquired_sketches: int = 0
    missed_sketches: int = 0
    expired_leases: int = 0


@dataclass(frozen=True, slots=True)
class KeySpaceRecord:
    """A key space (a model in a configuration) and its number in this server.

    sketches: kinds of sketches (compact summaries of blocks' attention keys, for
        sparse attention) that sessions have declared; their group indices start at MAX_GROUPS.
    num_flushes: number of flushes (deletions of all blocks of the key space) that have begun.
    """

    number: int
    key_space: KeySpace
    sketches: tuple[Sketch, ...] = field(default=())
    num_flushes: int = 0

    def has(self, group_index: int) -> bool:
        """Returns True if the key space (a model in a configuration) has something with this
        index: a group, or a kind of sketch (compact summary of a block's attention keys,
        for sparse attention)."""
        return 0 <= group_index < len(self.key_space.groups) or 0 <= group_index - MAX_GROUPS < len(
            self.sketches
        )

    def shape(self, group_index: int) -> GroupSpec | Sketch:
        """Returns the group, or the kind of sketch (compact summary of a block's attention
        keys), with this index."""
        return (
            self.key_space.groups[group_index]
            if group_index < MAX_GROUPS
            else self.sketch(group_index)
        )

    def sketch(self, group_index: int) -> Sketch:
        """Returns the kind of sketch (compact summary of a block's attention keys) with
        this index."""
        return self.sketches[group_index - MAX_GROUPS]

    def block_group(self, group_index: int) -> int:
        """Returns the group of the blocks that have sketches (compact summaries of attention
        keys) of the kind `group_index`. If `group_index` is the index of a group, returns it
        unchanged."""
        return group_index if group_index < MAX_GROUPS else self.sketch(group_index).group_index
