"""`LeaseBook` and `TransferBook`: all live read leases, write leases and transfers. The modules
`reading` and `writing` add and end them. Calls name blocks in runs; a run is a chain of consecutive
blocks of one group."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_server.cache.room.shares import BoundShare, FairBound
from hotkv_server.cache.seams import StorePins
from hotkv_server.cache.table.index import Keys
from hotkv_server.cache.values import (
    FIRST_MOVE,
    MAX_TRANSFERS,
    CoreConfig,
    Entries,
    HashList,
    Int64s,
    SessionRecord,
)
from hotkv_server.integrity.checksums import Sums

# Read leases pin ready entries; write leases own reserved entries.
#
# An entry is a block's record in the block table. Always true: every lease has an owning engine, a
# session (connection of the engine) that acquired it, and an expiry. A lease with running copies
# does not end before the copies end, even if it has expired. An entry that a read lease pins is
# unpinned exactly once. An entry that a write lease reserves is published (made ready) or dropped
# exactly once. A lease records which blocks its first call named, so that a call with the same id
# and other blocks is refused. An owner's leases count against three bounds (`FairBound`): on their
# number, on their `weight`, and on the bytes of the slots that its write leases still reserve.


LEASE_BYTES = 1024
LIST_BYTES = 192
"""Memory that a lease uses, in bytes: LEASE_BYTES for the lease itself, and LIST_BYTES for each of
its lists of blocks."""


def content_of(groups: Sequence[HashList]) -> int:
    """Returns a 64-bit hash of the groups and block hashes that a call names, in their order. Two
    different calls have the same value with probability 2⁻⁶⁴."""
    return hash(tuple((g.group_index, g.hashes.tobytes()) for g in groups))


@dataclass(slots=True)
class ReadLease:
    """A lease that pins ready blocks or sketches (compact forms of keys), so that an engine
    can load them. An entry is their record in the block table.

    owner: the tenant, or the engine if no tenants are configured; `FairBound` counts the lease for
        it.
    groups: for each group of the `acquire` call, its index and the entry number of each hash; 0 if
        the block is not pinned.
    content: hash of the blocks that the `acquire` call named (`content_of`). A repeated call must
        have the same content.
    pinned_bytes: bytes of the pinned slots (places in the arena).
    weight: bytes that the lease counts against its owner's memory limit (`read_weight`).
    num_copies: number of loads in flight under the lease.
    released: True once the lease was released or has expired. While loads are in flight, the lease
        still pins its blocks.
    has_expired: True if the lease ended because its lifetime was over.
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
    weight: int
    admitted: bool = False
    """True once a load has begun under the lease: the engine's scheduler has then admitted the
    request for which the lease was acquired."""
    num_copies: int = 0
    released: bool = False
    has_expired: bool = False

    def entries(self) -> Entries:
        """Returns all entries (records of blocks in the block table) that this lease pins."""
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
    """A lease that owns reserved entries (table records of blocks that are being stored) until each
    is published (made ready) or dropped. The first call under the lease decides which blocks the
    lease owns, for all ranks.

    owner: the tenant, or the engine if no tenants are configured; `FairBound` counts the lease for
        it.
    listed: keys of the blocks that the first call named, as `BlockIndex.mixed` returns them.
    weight: bytes that the lease counts against its owner's memory limit (`write_weight`).
    entries: entry numbers that are still reserved.
    unwritten_bytes: bytes of the slots of `entries`.
    has_promise: True if these bytes are promised to a residency, which has a bound of its own.
    shards_seen: bitmask of shards whose store has ended.
    parts: a pair for each copy that has ended: the entries that the copy has written, and for each
        of them the sum of its written bytes, for checksums.
    num_copies: number of stores in flight under the lease.
    released: True once the lease was released or has expired. While stores are in flight, the lease
        still owns its entries.
    has_expired: True if the lease ended because its lifetime was over.
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
        """Returns True if the first call under the lease named all blocks with these keys."""
        return np.array_equal(keys, self.listed) or bool(np.isin(keys, self.listed).all())

    def add_sums(self, entries: Entries, sums: Sums) -> None:
        """Records that a copy has written these entries (records in the block table), each listed
        once. `sums`: for each entry, the sum of the bytes that the copy has written to it, from
        which the block's checksum is computed later."""
        if not len(entries):
            return
        order = np.argsort(entries)
        self.parts.append((entries[order], sums[order]))

    def sums_of(self, entries: Entries) -> Sums:
        """Returns for each entry (record in the block table) the sum of the bytes that all copies
        under the lease have written to it."""
        total = np.zeros(len(entries), np.uint64)
        for written, sums in self.parts:
            at = np.minimum(np.searchsorted(written, entries), len(written) - 1)
            total += np.where(written[at] == entries, sums[at], np.uint64(0))
        return total


Lease = ReadLease | WriteLease


def num_listed(lease: Lease) -> int:
    """Returns how many blocks the call that acquired the lease named."""
    return (
        sum(len(entries) for _, entries in lease.groups)
        if isinstance(lease, ReadLease)
        else len(lease.listed)
    )


def read_weight(num_lists: int, num_blocks: int) -> int:
    """Returns the approximate bytes of memory of a read lease whose call names `num_blocks` blocks
    in `num_lists` lists, whether or not the blocks are found."""
    return LEASE_BYTES + LIST_BYTES * num_lists + 4 * num_blocks


def write_weight(num_blocks: int, num_shards: int) -> int:
    """Returns the most bytes of memory, approximately, that a write lease uses: a key and an entry
    number for each block, and an entry number and a sum for each block and shard (a rank's part of
    a block). `num_blocks`: number of blocks and sketches (compact summaries of blocks'
    attention keys) that the first call names."""
    return LEASE_BYTES + (12 + 12 * num_shards) * num_blocks


def lifetime_s(config: CoreConfig, ttl_s: float) -> float:
    """Returns the lifetime of a lease, in seconds, for a call that asks for `ttl_s`. If `ttl_s` is
    0, returns the default. The result is at most `config.max_lease_ttl_s`."""
    return min(ttl_s or config.lease_ttl_s, config.max_lease_ttl_s)


class LeaseBook:
    """All live leases. Finds them by engine and lease id, by session (connection of an engine), and
    by number.

    bound: limits the number of leases of each owner (tenant or engine).
    memory: limits the bytes of memory that the leases of each owner use.
    unwritten: limits the bytes of the arena that write leases of each owner reserve and have not
        written; without the leases that have a promise.
    """

    def __init__(self, max_leases: int, memory: BoundShare, unwritten: FairBound) -> None:
        self.bound = FairBound(max_leases)
        self.memory = memory
        self.unwritten = unwritten
        # For each owner: the unwritten bytes of its leases that have a promise.
        self._promised: Counter[str] = Counter()
        self._by_key: dict[tuple[str, str], Lease] = {}
        self._by_number: dict[int, Lease] = {}
        self._by_session: dict[int, dict[int, Lease]] = {}
        # For each lease id: the number of engines that have a lease with this id.
        self._num_with_id: Counter[str] = Counter()
        self._next_number = 1
        # No lease expires before this time.
        self._next_end_s = math.inf

    def __len__(self) -> int:
        return len(self._by_key)

    def __repr__(self) -> str:
        return f"LeaseBook({len(self._by_key)} leases)"

    def next_number(self) -> int:
        """Returns a number for a new lease, which no lease of this object has. It is below
        FIRST_MOVE: the numbers from FIRST_MOVE on are for moves of blocks between tiers."""
        while self._next_number in self._by_number or self._next_number == 0:
            self._next_number = (self._next_number + 1) % FIRST_MOVE
        number = self._next_number
        self._next_number = (number + 1) % FIRST_MOVE
        return number

    def add(self, lease: Lease) -> None:
        """Adds a lease and counts it for its owner (a tenant or engine)."""
        key = (lease.engine_id, lease.lease_id)
        assert key not in self._by_key, "lease id in use"
        self._by_key[key] = lease
        self._by_number[lease.number] = lease
        self._by_session.setdefault(lease.session_number, {})[lease.number] = lease
        self._num_with_id[lease.lease_id] += 1
        self._next_end_s = min(self._next_end_s, lease.expires_s)
        self.bound.take(lease.owner, 1)
        self.memory.take(lease.owner, lease.weight)
        if isinstance(lease, WriteLease):
            self._count_unwritten(lease, lease.unwritten_bytes)

    def remove(self, lease: Lease) -> None:
        """Removes a lease that has ended."""
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
        self.memory.give(lease.owner, lease.weight)
        if isinstance(lease, WriteLease):
            self.settle(lease, 0)

    def settle(self, lease: WriteLease, unwritten_bytes: int) -> None:
        """Records that only `unwritten_bytes` of a live lease's slots are still reserved."""
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
        """Returns how many bytes of the arena a new write lease of the owner may reserve, and
        whether they are promised (`WriteLease.has_promise`).

        promised_bytes: bytes that the residency of the store may still pin; 0 without a residency.
        """
        room, promised = self.unwritten.room(owner), promised_bytes - self._promised[owner]
        return max(room, promised), promised > room

    def get(self, engine_id: str, lease_id: str) -> Lease | None:
        """Returns the engine's lease with this id, or None."""
        return self._by_key.get((engine_id, lease_id))

    def of_call(self, session: SessionRecord, lease_id: str) -> Lease | None:
        """Returns the engine's lease with this id; None if the engine has no such lease. A new call
        that names the id of an existing lease repeats or joins that lease. Raises INVALID_FIELD if
        the id is empty. Raises DUPLICATE_ID if the engine's lease with this id belongs to another
        key space (a model in a configuration)."""
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
        """Returns the engine's lease with this id. Raises FOREIGN_LEASE if the lease belongs to
        another engine or key space (a model in a configuration). Raises UNKNOWN_LEASE if the
        lease does not exist, was released or has expired."""
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
        """Extends the engine's read lease, so that it expires at `expires_s` or later, and returns
        the lease; None if the lease has ended or is a write lease."""
        lease = self.get(engine_id, lease_id)
        if not isinstance(lease, ReadLease) or lease.released:
            return None
        lease.expires_s = max(lease.expires_s, expires_s)
        return lease

    def check_count(self, owner: str) -> None:
        """Raises OVERLOADED if the owner (a tenant or engine) already has as many leases as it may
        have."""
        if not self.bound.room(owner):
            raise HotKVError(
                Reason.OVERLOADED,
                f"lease_id: {self.bound.refusal(owner, 'leases')}; release some first",
            )

    def check_room(self, owner: str, field: str, weight: int) -> None:
        """Raises OVERLOADED if one more lease of `weight` bytes would exceed the memory that the
        leases of the owner (a tenant or engine) may use. `field`: the call's field that the error
        names."""
        if weight > self.memory.room(owner):
            refusal = self.memory.refusal(owner, "bytes of lists of leases")
            raise HotKVError(Reason.OVERLOADED, f"{field}: {refusal}; release some first")

    def check_replaces(self, old: Lease | None, owner: str, weight: int) -> None:
        """Raises OVERLOADED unless the owner (a tenant or engine) may have a new lease that
        replaces the lease `old`.

        If copies run under the lease `old`, it still counts against the owner's limits, because the
        lease is removed only when the copies end.

        old: the lease to replace; None if the new lease replaces no lease.
        weight: bytes of memory that the new lease would use.
        """
        ends = old if old is not None and not old.num_copies else None
        if ends is not None:
            self.remove(ends)
        try:
            self.check_count(owner)
            self.check_room(owner, "groups", weight)
        finally:
            if ends is not None:
                self.add(ends)

    def all(self) -> list[Lease]:
        """Returns all live leases."""
        return list(self._by_key.values())

    def of_session(self, session_number: int) -> list[Lease]:
        """Returns the leases that a session acquired."""
        return list(self._by_session.get(session_number, {}).values())

    def expired(self, now_s: float) -> list[Lease]:
        """Returns the leases whose expiry time has passed. They may include released leases, which
        are removed only when no copy runs under them."""
        if now_s < self._next_end_s:
            return []
        # The minimum includes leases that have expired: they stay in the `LeaseBook` as long as
        # copies run under them.
        self._next_end_s = min(
            (lease.expires_s for lease in self._by_key.values()), default=math.inf
        )
        return [lease for lease in self._by_key.values() if lease.expires_s <= now_s]

    def check_invariants(self) -> None:
        """Raises AssertionError if the tables or counts of live leases disagree."""
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
        self.memory.check(listed)
        self.unwritten.check(+unwritten)
        assert self._promised == +promised, "promised bytes of write leases miscounted"


# Transfers (loads and stores) in flight: the lease that each transfer uses, and the entries that a
# store writes.
#
# Always true: a session (connection of an engine) never uses a transfer id twice at the same time.
# `num_copies` of a lease is the number of its transfers in flight. A `FairBound` limits the
# transfers in flight of each owner (tenant or engine).


@dataclass(slots=True)
class LoadTransfer:
    """A load in flight under a read lease."""

    session_number: int
    owner: str
    transfer_id: str
    lease: ReadLease
    num_blocks: int


@dataclass(slots=True)
class StoreTransfer:
    """A store in flight: copies one shard (a rank's part) of some blocks.

    lease: the write lease; None if no block was reserved, so that there is nothing to copy.
    pins: pins the blocks that the store makes ready; None if the store pins no blocks.
    is_private: True if the blocks are copied to no tier (`StoreOptions.is_private`).

    These lists have one element for each run (chain of consecutive blocks) of the call:

    groups: index of the run's group.
    entries: the entries (records in the block table) that the store writes.
    positions: positions in the run of the blocks of these entries.
    results: `BlockResult` value of each block of the run, as far as it is known.
    depths: number of blocks before the run in its sequence (prompt).
    """

    session_number: int
    owner: str
    transfer_id: str
    lease: WriteLease | None
    shard_index: int
    pins: StorePins | None = None
    is_private: bool = False
    groups: list[int] = field(default_factory=list)
    entries: list[Entries] = field(default_factory=list)
    positions: list[Int64s] = field(default_factory=list)
    results: list[NDArray[np.uint8]] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def add_run(
        self,
        group_index: int,
        entries: Entries,
        positions: Int64s,
        results: NDArray[np.uint8],
        depth: int,
    ) -> None:
        """Adds the next run (chain of consecutive blocks) of the call. The arguments become the
        last elements of the lists `groups`, `entries`, `positions`, `results` and `depths`."""
        self.depths.append(depth)
        self.groups.append(group_index)
        self.entries.append(entries)
        self.positions.append(positions)
        self.results.append(results)


Transfer = LoadTransfer | StoreTransfer


class TransferBook:
    """All transfers in flight. `bound` limits how many transfers each owner (tenant or engine) has
    at a time."""

    def __init__(self) -> None:
        self.bound = FairBound(MAX_TRANSFERS)
        self._transfers: dict[tuple[int, str], Transfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def __repr__(self) -> str:
        return f"TransferBook({len(self._transfers)} transfers)"

    def check_new(self, session_number: int, transfer_id: str, owner: str) -> None:
        """Raises HotKVError if a session (connection of an engine) may not start a transfer (load
        or store) with this id: the id is empty, the session has a transfer in flight with this id,
        or the owner (tenant or engine) has too many transfers."""
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
        """Adds a transfer (a load or store in flight) and counts it for its owner (a tenant or
        engine)."""
        self._transfers[transfer.session_number, transfer.transfer_id] = transfer
        self.bound.take(transfer.owner, 1)

    def pop(self, session_number: int, transfer_id: str) -> Transfer:
        """Removes a transfer that has ended and returns it."""
        transfer = self._transfers.pop((session_number, transfer_id))
        self.bound.give(transfer.owner, 1)
        return transfer

    def of_session(self, session_number: int) -> list[Transfer]:
        """Returns the transfers of a session."""
        return [t for t in self._transfers.values() if t.session_number == session_number]

    def count(self, lease: Lease) -> int:
        """Returns how many transfers run under a lease."""
        return sum(t.lease is lease for t in self._transfers.values())

    def check_invariants(self) -> None:
        """Raises AssertionError if the transfers in flight of an owner (a tenant or engine) are
        miscounted."""
        self.bound.check(Counter(transfer.owner for transfer in self._transfers.values()))

    def entries_being_written(self, lease: WriteLease | None, shard_index: int) -> Entries:
        """Returns the blocks of this lease, as entry numbers, of which stores are now writing the
        shard `shard_index` (a rank's part of each block). Returns no entries (records in the block
        table) if `lease` is None, because a store without a lease writes nothing."""
        busy = [
            entries
            for t in self._transfers.values()
            if isinstance(t, StoreTransfer) and t.lease is lease and t.shard_index == shard_index
            for entries in t.entries
        ]
        return np.concatenate(busy) if busy else np.empty(0, np.uint32)
