"""Frozen values that the core accepts and returns. Hashes are rows of eight uint32 words. A
*run* is a chain of consecutive blocks of one group, or of their sketches."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.groups import GroupSpec
from hotkv_proto.keys import MAX_GROUPS, KeySpace, Sketch
from hotkv_proto.table import SLOT_ALIGN, Words

Entries = NDArray[np.uint32]
Int64s = NDArray[np.int64]
BoolMask = NDArray[np.bool_]
KEY_SPACE_ROWS = 1 << 13
"""A power of two; a key space's row is its number modulo this. No two known key spaces share
one."""
FIRST_MOVE = 1 << 31
"""A reserved entry stores its owner's number: of a write lease if lower, else of a move."""
MAX_TRANSFERS = 1 << 14
"""In flight, over all sessions."""
MAX_SKETCHES = 256
"""Kinds of sketches of one key space."""
HOST_TIER, DISK_TIER = "host", "disk"
"""Names of the host-memory tier and of the disk tier below it."""


class Medium(enum.Enum):
    """CPU is host memory; DISK and REMOTE are tiers below. `events.wire` has vLLM's names."""

    CPU = "CPU"
    DISK = "DISK"
    REMOTE = "REMOTE"


@dataclass(frozen=True, slots=True)
class TenantShare:
    """guaranteed_bytes: up to this, other tenants' stores do not evict the tenant's blocks.
    burst_bytes: above this, the tenant's stores evict only its own. 0: no limit.
    """

    guaranteed_bytes: int = 0
    burst_bytes: int = 0


MAX_BLOCKS_PER_CALL = 1 << 17
"""Looked up in about 20 ms, in which the event loop serves no other call."""


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Shares are fractions of the arena, 0 to 1.

    capacity: most entries, of blocks and sketches.
    unadmitted_share: for read leases before their first load.
    held_share: for retentions.
    unwritten_share: for what one owner's write leases reserve and have not written; twice as much
        for all owners.
    residency_share: for what residencies reserve and pin.
    residency_grace_s: after a restart, for clients of the earlier server to read their residencies.
    client_memory_bytes: outside the arena, for clients' leases, transfers and sequences.
    check_stride: see `integrity.checksums`; 0 turns checksums off.
    tenants: an unlisted tenant has no guarantee and no limit.
    part_starts: first byte of each part of the arena (`slabs.SlabPool`).
    is_backed: the whole arena has memory at the start; else `Space.grow` reports it.
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
    part_starts: tuple[int, ...] = (0,)
    is_backed: bool = True


@dataclass(frozen=True, slots=True)
class HashList:
    """depths: None if unknown, or if the list begins with the prompt and has no gaps."""

    group_index: int
    hashes: Words
    depths: Int64s | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """parent: None if the run begins its prompt.
    depth: of the first block.
    """

    group_index: int
    hashes: Words
    parent: Words | None = None
    depth: int = 0


@dataclass(frozen=True, slots=True)
class LoadPositions:
    """`positions`: in the group's list of the `acquire` call."""

    group_index: int
    positions: Int64s


@dataclass(frozen=True, slots=True)
class SlotRun:
    """What a transfer copies of one run: positions in the run, offsets in the arena in bytes."""

    group_index: int
    positions: Int64s
    offsets: Int64s
    entries: Entries


class Cause(enum.IntEnum):
    """Why a block was removed, or not stored; only of the latest removals since the start."""

    NONE = 0
    ROOM = 1
    """Evicted to make room."""
    OPERATOR = 2
    """Evicted by an operator's call."""
    FLUSH = 3
    DAMAGE = 4
    """Contradicted its checksum."""
    HINT = 5
    """Demoted by a hint."""
    EXPIRY = 6
    """Never became ready: its write lease expired."""
    NO_ROOM = 7
    """Not stored: its store found no room."""


@dataclass(frozen=True, slots=True)
class EvictionNotice:
    """For the sessions of the key space, also of flushed blocks."""

    key_space_id: int
    group_index: int
    hashes: Words


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """number: public; the client uses a secret id, which only the node knows.
    owner: whose `FairBound`s it counts against: its tenant, or its engine without tenants.
    sketches: group index of each kind that the session declares.
    """

    number: int
    engine_id: str
    owner: str
    role: str
    key_space_id: int
    opened_s: float
    sketches: tuple[int, ...] = ()


@dataclass(slots=True)
class Counters:
    """Since the server's start, in blocks unless the name says otherwise.

    acquired_blocks, missed_blocks: named by calls for read leases, and pinned or not.
    present_blocks, no_space_blocks, in_flight_blocks: results of stores and reservations.
    aborted_blocks: reserved, and removed before they became ready.
    held_blocks: pinned by retentions.
    condemned_blocks: contradicted their checksum.
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


def aligned(num_bytes: int) -> int:
    """To a multiple of SLOT_ALIGN, upwards."""
    return -(-num_bytes // SLOT_ALIGN) * SLOT_ALIGN


@dataclass(frozen=True, slots=True)
class KeySpaceRecord:
    """sketches: declared kinds; their group indices start at MAX_GROUPS."""

    number: int
    key_space: KeySpace
    sketches: tuple[Sketch, ...] = field(default=())
    num_flushes: int = 0

    def has(self, group_index: int) -> bool:
        """A group or a kind of sketch."""
        return 0 <= group_index < len(self.key_space.groups) or 0 <= group_index - MAX_GROUPS < len(
            self.sketches
        )

    def shape(self, group_index: int) -> GroupSpec | Sketch:
        return (
            self.key_space.groups[group_index]
            if group_index < MAX_GROUPS
            else self.sketch(group_index)
        )

    def slot_bytes(self, group_index: int) -> int:
        """Of a block or sketch in the arena: a multiple of SLOT_ALIGN."""
        return -(-self.shape(group_index).slot_bytes // SLOT_ALIGN) * SLOT_ALIGN

    def sketch(self, group_index: int) -> Sketch:
        return self.sketches[group_index - MAX_GROUPS]

    def block_group(self, group_index: int) -> int:
        """Group of the blocks whose sketches have this index; a group's index itself."""
        return group_index if group_index < MAX_GROUPS else self.sketch(group_index).group_index
