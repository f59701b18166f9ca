"""`LeaseBook` and `TransferBook`: all live leases and transfers, which the modules `reading` and
`writing` add and end."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_server.cache.room.shares import FairBound
from hotkv_server.cache.seams import StorePins
from hotkv_server.cache.table.index import Keys
from hotkv_server.cache.values import (
    FIRST_MOVE,
    MAX_TRANSFERS,
    CoreConfig,
    Entries,
    HashList,
    SessionRecord,
    SlotRun,
)
from hotkv_server.integrity.checksums import Sums

# Read leases pin ready entries; write leases own reserved entries.
#
# Always true: a lease does not end before its running copies, even if it has expired. A pinned
# entry is unpinned, and a reserved one published or dropped, exactly once. A call with a live
# lease's id and other blocks is refused. Three `FairBound`s count an owner's leases: their
# number, their `weight`, and the bytes that write leases still reserve.


LEASE_BYTES = 1024
LIST_BYTES = 192
"""Memory of a lease, and of each of its lists."""
LISTS = "lists of leases"
"""Their kind in the bound of clients' memory."""


def content_of(groups: Sequence[HashList]) -> int:
    """64-bit hash of what a call names, in order."""
    return hash(tuple((g.group_index, g.hashes.tobytes()) for g in groups))


@dataclass(slots=True)
class ReadLease:
    """owner: as of `SessionRecord`.
    groups: index and entry numbers for each group of the `acquire` call; 0 for a block not pinned.
    content: `content_of` that call; a repeated call must have the same.
    tenant: number in the `TenantBook`.
    weight: `read_weight`.
    num_copies: loads in flight.
    released: or expired; it still pins while loads are in flight.
    """

    engine_id: str
    owner: str
    lease_id: str
    number: int
    session_number: int
    key_space_id: int
    expires_s: float
    groups: list[tuple[int, Entries]]
    content: int
    pinned_bytes: int
    tenant: int
    weight: int
    admitted: bool = False
    """A load has begun: the engine's scheduler has admitted the request."""
    num_copies: int = 0
    released: bool = False
    has_expired: bool = False

    def entries(self) -> Entries:
        if len(self.groups) == 1:
            listed = self.groups[0][1]
        else:
            listed = np.concatenate(
                [np.empty(0, np.uint32), *(entries for _, entries in self.groups)]
            )
        pinned: Entries = listed[listed != 0]
        return pinned


@dataclass(slots=True)
class WriteLease:
    """The first call decides which entries it owns, for all ranks. Other fields are as in
    `ReadLease`.

    listed: keys that the first call named (`BlockIndex.mixed`).
    weight: `write_weight`.
    whole: mask with a bit for each shard.
    entries: still reserved.
    unwritten_bytes: of their slots.
    has_promise: they are promised to a residency, which has its own bound.
    shards_seen: bitmask of the shards whose store has ended.
    parts: of each ended copy, the entries it wrote, sorted, and the sums of their bytes.
    num_copies: stores in flight.
    """

    engine_id: str
    owner: str
    lease_id: str
    number: int
    session_number: int
    key_space_id: int
    expires_s: float
    listed: Keys
    weight: int
    whole: int
    retention: Retention = NO_RETENTION
    entries: Entries = field(default_factory=lambda: np.empty(0, np.uint32))
    unwritten_bytes: int = 0
    has_promise: bool = False
    parts: list[tuple[Entries, Sums]] = field(default_factory=list)
    shards_seen: int = 0
    num_copies: int = 0
    released: bool = False
    has_expired: bool = False

    def names(self, keys: Keys) -> bool:
        """True if the first call named all these blocks."""
        return np.array_equal(keys, self.listed) or bool(np.isin(keys, self.listed).all())

    def add_sums(self, entries: Entries, sums: Sums) -> None:
        """Records what a copy has written: entries, each once, and the sum of the bytes written
        to each."""
        if not len(entries):
            return
        order = np.argsort(entries)
        self.parts.append((entries[order], sums[order]))

    def sums_of(self, entries: Entries) -> Sums:
        """Sum of the bytes that all copies have written to each entry."""
        total = np.zeros(len(entries), np.uint64)
        for written, sums in self.parts:
            at = np.minimum(np.searchsorted(written, entries), len(written) - 1)
            total += np.where(written[at] == entries, sums[at], np.uint64(0))
        return total


Lease = ReadLease | WriteLease


@dataclass(frozen=True, slots=True)
class Reservation:
    """By run, in the order of the call.

    lease: None if it has nothing to hold: no entry, and no other shard's store to come.
    results: `BlockResult`, uint8.
    entries: 0 for a block without an entry.
    ttl_s: remaining.
    """

    lease: WriteLease | None
    results: tuple[NDArray[np.uint8], ...]
    entries: tuple[Entries, ...]
    ttl_s: float


def num_listed(lease: Lease) -> int:
    """Number of blocks that the lease's first call named."""
    return (
        sum(len(entries) for _, entries in lease.groups)
        if isinstance(lease, ReadLease)
        else len(lease.listed)
    )


def read_weight(num_lists: int, num_blocks: int) -> int:
    """Approximate memory of a read lease, whether or not its blocks are found."""
    return LEASE_BYTES + LIST_BYTES * num_lists + 4 * num_blocks


def write_weight(num_blocks: int, num_shards: int) -> int:
    """Most memory, approximately: a key and an entry number for each block or sketch, and an
    entry number and a sum for each shard of it."""
    return LEASE_BYTES + (12 + 12 * num_shards) * num_blocks


def lifetime_s(config: CoreConfig, ttl_s: float) -> float:
    """`ttl_s`: 0 for the default."""
    return min(ttl_s or config.lease_ttl_s, config.max_lease_ttl_s)


class LeaseBook:
    """bound: number of each owner's leases.
    memory: bytes of each owner, of which its leases' are of the kind LISTS.
    unwritten: bytes that write leases reserve and have not written, without promised ones.
    """

    def __init__(self, max_leases: int, memory: FairBound, unwritten: FairBound) -> None:
        self.bound = FairBound(max_leases)
        self.memory = memory
        self.unwritten = unwritten
        # By owner: unwritten bytes of leases that have a promise.
        self._promised: Counter[str] = Counter()
        self._by_key: dict[tuple[str, str], Lease] = {}
        self._by_number: dict[int, Lease] = {}
        self._by_session: dict[int, dict[int, Lease]] = {}
        # By lease id: number of engines that use it.
        self._num_with_id: Counter[str] = Counter()
        self._next_number = 1
        self._next_end_s = math.inf

    def __len__(self) -> int:
        return len(self._by_key)

    def __repr__(self) -> str:
        return f"LeaseBook({len(self._by_key)} leases)"

    def next_number(self) -> int:
        """Unused, from 1 to below FIRST_MOVE."""
        while self._next_number in self._by_number or self._next_number == 0:
            self._next_number = (self._next_number + 1) % FIRST_MOVE
        number = self._next_number
        self._next_number = (number + 1) % FIRST_MOVE
        return number

    def add(self, lease: Lease) -> None:
        key = (lease.engine_id, lease.lease_id)
        assert key not in self._by_key, "lease id in use"
        self._by_key[key] = lease
        self._by_number[lease.number] = lease
        self._by_session.setdefault(lease.session_number, {})[lease.number] = lease
        self._num_with_id[lease.lease_id] += 1
        self._next_end_s = min(self._next_end_s, lease.expires_s)
        self.bound.take(lease.owner, 1)
        self.memory.take(lease.owner, lease.weight, LISTS)
        if isinstance(lease, WriteLease):
            self._count_unwritten(lease, lease.unwritten_bytes)

    def remove(self, lease: Lease) -> None:
        del self._by_key[lease.engine_id, lease.lease_id]
        del self._by_number[lease.number]
        of_session = self._by_session[lease.session_number]
        del of_session[lease.number]
        if not of_session:
            del self._by_session[lease.session_number]
        self._num_with_id[lease.lease_id] -= 1
        if not self._num_with_id[lease.lease_id]:
            del self._num_with_id[lease.lease_id]
        self.bound.give(lease.owner, 1)
        self.memory.give(lease.owner, lease.weight, LISTS)
        if isinstance(lease, WriteLease):
            self.settle(lease, 0)

    def settle(self, lease: WriteLease, unwritten_bytes: int) -> None:
        """Records that only `unwritten_bytes` of a live lease are still reserved."""
        self._count_unwritten(lease, unwritten_bytes - lease.unwritten_bytes)
        lease.unwritten_bytes = unwritten_bytes

    def _count_unwritten(self, lease: WriteLease, more_bytes: int) -> None:
        if lease.has_promise:
            self._promised[lease.owner] += more_bytes
            if not self._promised[lease.owner]:
                del self._promised[lease.owner]
        elif more_bytes > 0:
            self.unwritten.take(lease.owner, more_bytes)
        elif more_bytes < 0:
            self.unwritten.give(lease.owner, -more_bytes)

    def unwritten_room(self, owner: str, promised_bytes: int) -> tuple[int, bool]:
        """Bytes that a new write lease may reserve, and whether they are promised.
        `promised_bytes`: what the store's residency may still pin; 0 without one.
        """
        room, promised = self.unwritten.room(owner), promised_bytes - self._promised[owner]
        return max(room, promised), promised > room

    def get(self, engine_id: str, lease_id: str) -> Lease | None:
        return self._by_key.get((engine_id, lease_id))

    def of_call(self, session: SessionRecord, lease_id: str) -> Lease | None:
        """The lease that a call repeats or joins; None if new. Raises INVALID_FIELD for an empty
        id, DUPLICATE_ID if the lease is of another key space."""
        if not lease_id:
            raise invalid("lease_id is empty; choose an id that is unique in the engine")
        lease = self.get(session.engine_id, lease_id)
        if lease is not None and lease.key_space_id != session.key_space_id:
            raise HotKVError(
                Reason.DUPLICATE_ID,
                f"lease_id {lease_id!r} is in use under another key space; choose a new id",
            )
        return lease

    def live(self, session: SessionRecord, lease_id: str) -> Lease:
        """Raises FOREIGN_LEASE if the lease belongs to another engine or key space, else
        UNKNOWN_LEASE if it is not live."""
        lease = self.get(session.engine_id, lease_id)
        if lease is not None and lease.key_space_id != session.key_space_id:
            raise HotKVError(
                Reason.FOREIGN_LEASE,
                f"lease_id {lease_id!r} belongs to another key space than this session",
            )
        if lease is not None and not lease.released:
            return lease
        self.check_not_foreign(session, lease_id)
        raise HotKVError(
            Reason.UNKNOWN_LEASE,
            f"lease_id {lease_id!r} is unknown, released or expired; acquire it again",
        )

    def check_not_foreign(self, session: SessionRecord, lease_id: str) -> None:
        """Raises FOREIGN_LEASE if another engine has a lease with this id."""
        if self._num_with_id.get(lease_id, 0) > ((session.engine_id, lease_id) in self._by_key):
            raise HotKVError(
                Reason.FOREIGN_LEASE, f"lease_id {lease_id!r} belongs to another engine"
            )

    def renew(self, engine_id: str, lease_id: str, expires_s: float) -> ReadLease | None:
        """Extends a read lease, never shortens it. None if it has ended or is a write lease."""
        lease = self.get(engine_id, lease_id)
        if not isinstance(lease, ReadLease) or lease.released:
            return None
        lease.expires_s = max(lease.expires_s, expires_s)
        return lease

    def check_new(self, owner: str, field: str, weight: int) -> None:
        """Raises OVERLOADED if the owner has as many leases as it may, or if `weight` more bytes
        exceed its memory limit. `field`: what the error then names."""
        if not self.bound.room(owner):
            raise HotKVError(
                Reason.OVERLOADED,
                f"lease_id: {self.bound.refusal(owner, 'leases')}; release some first",
            )
        if weight > self.memory.room(owner):
            refusal = self.memory.refusal(owner, "bytes", LISTS)
            raise HotKVError(Reason.OVERLOADED, f"{field}: {refusal}; release some first")

    def check_replaces(self, old: Lease | None, owner: str, weight: int) -> None:
        """Raises OVERLOADED unless the owner may have a lease of `weight` in place of `old`,
        which still counts while copies run."""
        ends = old if old is not None and not old.num_copies else None
        if ends is not None:
            self.remove(ends)
        try:
            self.check_new(owner, "groups", weight)
        finally:
            if ends is not None:
                self.add(ends)

    def all(self) -> list[Lease]:
        return list(self._by_key.values())

    def of_session(self, session_number: int) -> list[Lease]:
        return list(self._by_session.get(session_number, {}).values())

    def expired(self, now_s: float) -> list[Lease]:
        """May include released leases, which stay while copies run under them."""
        if now_s < self._next_end_s:
            return []
        # The minimum includes expired leases that still have copies.
        self._next_end_s = min(
            (lease.expires_s for lease in self._by_key.values()), default=math.inf
        )
        return [lease for lease in self._by_key.values() if lease.expires_s <= now_s]

    def check_invariants(self) -> None:
        everything = list(self._by_key.items())
        assert all(
            key == (lease.engine_id, lease.lease_id) and self._by_number[lease.number] is lease
            for key, lease in everything
        )
        assert (
            len(self._by_number) == len(everything) == sum(map(len, self._by_session.values()))
        ), "leases miscounted"
        assert all(
            self._by_session[lease.session_number][lease.number] is lease for _, lease in everything
        ), "leases of sessions disagree"
        assert dict(self._num_with_id) == dict(Counter(lease_id for _, lease_id in self._by_key)), (
            "lease ids miscounted"
        )
        assert all(lease.expires_s >= self._next_end_s for _, lease in everything), (
            "a lease expires unseen"
        )
        self.bound.check(Counter(lease.owner for _, lease in everything))
        listed, unwritten, promised = Counter[str](), Counter[str](), Counter[str]()
        for _, lease in everything:
            listed[lease.owner] += lease.weight
            if isinstance(lease, WriteLease):
                by_owner = promised if lease.has_promise else unwritten
                by_owner[lease.owner] += lease.unwritten_bytes
        self.memory.check(listed, LISTS)
        self.unwritten.check(+unwritten)
        assert self._promised == +promised, "promised bytes of write leases miscounted"


# Transfers in flight. A session never uses a transfer id twice at a time. A lease's `num_copies`
# is the number of its transfers.


@dataclass(slots=True)
class LoadTransfer:
    session_number: int
    owner: str
    transfer_id: str
    lease: ReadLease
    num_blocks: int


@dataclass(slots=True)
class StoreTransfer:
    """A store in flight, of one shard of some blocks.

    lease: None if no block was reserved, so that there is nothing to copy.
    pins: of the store's residency; None without one.
    is_private: as in `StoreOptions`.

    By run of the call:

    slots: what the store writes.
    results: `BlockResult` of all the run's blocks, as far as known.
    depths: of its first block.
    """

    session_number: int
    owner: str
    transfer_id: str
    lease: WriteLease | None
    shard_index: int
    slots: list[SlotRun]
    results: list[NDArray[np.uint8]]
    depths: list[int]
    pins: StorePins | None
    is_private: bool


Transfer = LoadTransfer | StoreTransfer


class TransferBook:
    def __init__(self) -> None:
        self.bound = FairBound(MAX_TRANSFERS)
        self._transfers: dict[tuple[int, str], Transfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def __repr__(self) -> str:
        return f"TransferBook({len(self._transfers)} transfers)"

    def check_new(self, session_number: int, transfer_id: str, owner: str) -> None:
        """Raises HotKVError if the id is empty or in flight, or the owner has too many
        transfers."""
        if not transfer_id:
            raise invalid("transfer_id is empty; choose an id that is unique in the session")
        if (session_number, transfer_id) in self._transfers:
            raise HotKVError(
                Reason.DUPLICATE_ID, f"transfer_id {transfer_id!r} is in flight; choose a new id"
            )
        if not self.bound.room(owner):
            raise HotKVError(
                Reason.OVERLOADED,
                f"transfer_id: {self.bound.refusal(owner, 'transfers')}; wait for some to end",
            )

    def add(self, transfer: Transfer) -> None:
        self._transfers[transfer.session_number, transfer.transfer_id] = transfer
        self.bound.take(transfer.owner, 1)

    def pop(self, session_number: int, transfer_id: str) -> Transfer:
        transfer = self._transfers.pop((session_number, transfer_id))
        self.bound.give(transfer.owner, 1)
        return transfer

    def of_session(self, session_number: int) -> list[Transfer]:
        return [t for t in self._transfers.values() if t.session_number == session_number]

    def count(self, lease: Lease) -> int:
        return sum(t.lease is lease for t in self._transfers.values())

    def check_invariants(self) -> None:
        self.bound.check(Counter(transfer.owner for transfer in self._transfers.values()))

    def entries_being_written(self, lease: WriteLease | None, shard_index: int) -> Entries:
        """Entries of the lease whose shard is being written now; none without a lease."""
        busy = [
            run.entries
            for t in self._transfers.values()
            if isinstance(t, StoreTransfer) and t.lease is lease and t.shard_index == shard_index
            for run in t.slots
        ]
        return np.concatenate(busy) if busy else np.empty(0, np.uint32)
