"""Frozen values that go into and come out of the core."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.groups import GroupSpec
from hotkv_proto.keys import MAX_GROUPS, KeySpace, Representation
from hotkv_proto.table import Words

Entries = NDArray[np.uint32]
Int64s = NDArray[np.int64]
BoolMask = NDArray[np.bool_]
KEY_SPACE_ROWS = 1 << 13
"""Rows of arrays by key space. Numbers of key spaces are never reused, so the row is the number
modulo this; no two known key spaces share one. A power of two."""
FIRST_MOVE = 1 << 31
"""A reserved entry has the number of its lease, or from this number on that of a move between
tiers."""
MAX_TRANSFERS = 1 << 14
"""Most transfers in flight, of all sessions together."""
MAX_REPRESENTATIONS = 256
"""Most kinds of representations of one key space."""
HOST_TIER, DISK_TIER = "host", "disk"
"""Names of host memory, as a tier, and of the tier below it."""


class Medium(enum.Enum):
    """Where blocks lie. CPU: in host memory, which no tier is. `events.wire` has vLLM's names."""

    CPU = "CPU"
    DISK = "DISK"
    REMOTE = "REMOTE"


@dataclass(frozen=True, slots=True)
class TenantShare:
    """What a tenant may have of the arena. `guaranteed_bytes`: no other tenant's blocks take this
    from it. `burst_bytes`: beyond this its blocks take room from its own; 0 for no such bound."""

    guaranteed_bytes: int = 0
    burst_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Settings of the core; times in seconds.

    `unadmitted_share`: most of the arena that leases without a load may pin; `held_share`: most
    that requests may ask to keep; `residency_share`: most that residencies may be promised and pin;
    `residency_grace_s`: how long an earlier server's readers may go on. `client_memory_bytes`: most
    that clients' leases, transfers and sequences take besides the arena. `check_stride`: of check
    values, see `checks`; 0 for none.
    `tenants`: shares by name; a tenant that is not named has none of its own and no bound.
    `is_backed`: False if the arena has no memory yet; `Space.grow` says how much has.
    """

    arena_bytes: int
    slab_bytes: int
    capacity: int
    lease_ttl_s: float = 30.0
    max_lease_ttl_s: float = 600.0
    unadmitted_share: float = 0.25
    held_share: float = 0.25
    max_blocks_per_call: int = 1 << 18
    max_leases: int = 60_000
    residency_share: float = 0.8
    residency_grace_s: float = 10.0
    client_memory_bytes: int = 96 << 20
    check_stride: int = 0
    tenants: Mapping[str, TenantShare] = field(default_factory=dict)
    is_backed: bool = True


@dataclass(frozen=True, slots=True)
class HashList:
    """Block hashes of one group, in chain order, as words [n, 8]."""

    group_index: int
    hashes: Words


@dataclass(frozen=True, slots=True)
class Run:
    """A chain of consecutive blocks of one group: hashes [n, 8] words, parent [8] words or None at
    the root, depth of the first."""

    group_index: int
    hashes: Words
    parent: Words | None = None
    depth: int = 0


@dataclass(frozen=True, slots=True)
class LoadPositions:
    """Positions in a lease's hash list of one group, int64 [n]."""

    group_index: int
    positions: Int64s


@dataclass(frozen=True, slots=True)
class SlotRun:
    """What one run of a transfer copies: which of its blocks (int64 [m], positions in the run),
    their slot offsets [m] and entries [m]."""

    group_index: int
    positions: Int64s
    offsets: Int64s
    entries: Entries


@dataclass(frozen=True, slots=True)
class Reservation:
    """Answer to reserve: BlockResult values uint8 [n] and entry numbers (0 for none) a run in the
    order asked, and the lifetime."""

    results: tuple[NDArray[np.uint8], ...]
    entries: tuple[Entries, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True)
class EvictionNotice:
    """Effect: tell the sessions of this key space that these blocks were removed. `hashes`: words
    [n, 8]."""

    key_space_id: int
    group_index: int
    hashes: Words


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One live session. `number` is public; the secret id is the runtime's business.
    `representations`: group index of each kind it declares."""

    number: int
    engine_id: str
    role: str
    key_space_id: int
    opened_s: float
    representations: tuple[int, ...] = ()


@dataclass(slots=True)
class Counters:
    """Events since the start, in blocks unless the name says otherwise."""

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
    stored_representations: int = 0
    acquired_representations: int = 0
    missed_representations: int = 0
    expired_leases: int = 0


@dataclass(frozen=True, slots=True)
class KeySpaceRecord:
    """A key space and its number in this server. `representations`: those that sessions have
    declared, numbered from MAX_GROUPS on."""

    number: int
    key_space: KeySpace
    representations: tuple[Representation, ...] = field(default=())

    def has(self, group_index: int) -> bool:
        """Returns True if this is the index of a group or a representation."""
        return 0 <= group_index < len(self.key_space.groups) or 0 <= group_index - MAX_GROUPS < len(
            self.representations
        )

    def shape(self, group_index: int) -> GroupSpec | Representation:
        """The group or representation with this index."""
        return (
            self.key_space.groups[group_index]
            if group_index < MAX_GROUPS
            else self.representation(group_index)
        )

    def representation(self, group_index: int) -> Representation:
        """The representation with this index."""
        return self.representations[group_index - MAX_GROUPS]

    def block_group(self, group_index: int) -> int:
        """The group of the blocks that have this representation; a group is its own."""
        return (
            group_index
            if group_index < MAX_GROUPS
            else self.representation(group_index).group_index
        )
