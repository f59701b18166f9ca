"""`ReadLeases` acquires and ends read leases. `Loads` begins and ends loads under them."""

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.blocks import LeaseGrant
from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_proto.keys import MAX_GROUPS
from hotkv_server.cache.arrays import first_numbers
from hotkv_server.cache.leases.books import CacheBooks
from hotkv_server.cache.leases.leases import (
    LoadTransfer,
    ReadLease,
    content_of,
    lifetime_s,
    read_weight,
)
from hotkv_server.cache.sessions import check_named
from hotkv_server.cache.values import (
    Entries,
    HashList,
    Int64s,
    KeySpaceRecord,
    LoadPositions,
    SessionRecord,
    SlotRun,
)

# Read leases.
#
# Always true: a read lease holds a pin on each entry that it lists. Under leases without a load
# so far, a tenant pins at most `unadmitted_share` of what is left for it when every other tenant
# uses its guarantee (`TenantBook.sure_bytes`). These bytes are counted here.


class ReadLeases:
    def __init__(self, books: CacheBooks) -> None:
        self._books = books
        # By tenant: bytes that are pinned by leases without a load so far.
        self._unadmitted: dict[int, int] = {}

    def acquire(
        self,
        session: SessionRecord,
        lease_id: str,
        groups: list[HashList],
        ttl_s: float,
        now_s: float,
        may_pin: bool,
    ) -> LeaseGrant:
        """As `CacheCore.acquire`. A repeated call gets the remaining lifetime."""
        books = self._books
        indices = [g.group_index for g in groups]
        num_blocks = sum(len(g.hashes) for g in groups)
        record = books.catalog.record(session.key_space_id)
        check_named(record, indices, num_blocks, books.config.max_blocks_per_call)
        if len(set(indices)) != len(indices):
            raise invalid("groups lists a group twice; give each group one list")
        existing, content = books.leases.of_call(session, lease_id), content_of(groups)
        if existing is not None:
            if (
                not isinstance(existing, ReadLease)
                or existing.released
                or existing.content != content
            ):
                raise HotKVError(
                    Reason.DUPLICATE_ID,
                    f"lease_id {lease_id!r} is in use for another call; choose a new id",
                )
            return _grant(existing, now_s)
        owner = session.owner
        books.sessions.check_takes_new("grants no new leases")
        ttl_s, weight = lifetime_s(books.config, ttl_s), read_weight(len(groups), num_blocks)
        books.leases.check_new(owner, "groups", weight)
        tenant = books.space.tenants.number(record.number)
        pinned, pinned_bytes = self._within_budget(record, tenant, groups, may_pin)
        lease = ReadLease(
            session.engine_id,
            owner,
            lease_id,
            books.leases.next_number(),
            session.number,
            session.key_space_id,
            now_s + ttl_s,
            pinned,
            content,
            pinned_bytes,
            tenant,
            weight,
        )
        books.leases.add(lease)
        self._count_unadmitted(lease, pinned_bytes)
        books.space.index.pin(lease.entries(), 1)
        for group_index, entries in pinned:
            self._note_use(group_index, entries, now_s)
        return LeaseGrant(lease_id, tuple(entries != 0 for _, entries in pinned), ttl_s)

    def _within_budget(
        self, record: KeySpaceRecord, tenant: int, groups: list[HashList], may_pin: bool
    ) -> tuple[list[tuple[int, Entries]], int]:
        """Chooses what a new lease pins within `CoreConfig.unadmitted_share`. Returns (group,
        entries) for each of `groups`, with 0 for a block that is not ready or exceeds the
        budget, and the bytes of all chosen entries."""
        index, tenants = self._books.space.index, self._books.space.tenants
        budget = int(
            self._books.config.unadmitted_share * tenants.sure_bytes(tenant)
        ) - self._unadmitted.get(tenant, 0)
        budget = min(budget, self._books.pin_budget.for_others(tenant)) if may_pin else 0
        pinned: list[tuple[int, Entries]] = []
        total = 0
        for g in groups:
            entries = index.find(record.number, g.group_index, g.hashes)
            ready = table.is_ready(entries)
            entries[~ready] = 0
            size, num_ready = record.slot_bytes(g.group_index), int(ready.sum())
            room = max(0, budget - total) // size
            if num_ready > room:
                entries[np.flatnonzero(ready)[room:]] = 0
            total += min(num_ready, room) * size
            pinned.append((g.group_index, entries))
        return pinned, total

    def _note_use(self, group_index: int, entries: Entries, now_s: float) -> None:
        """`entries`: 0 for a block that is not pinned."""
        counters, found = self._books.counters, entries[entries != 0]
        if group_index < MAX_GROUPS:
            self._books.space.touch(found, now_s)
            for one in self._books.below:
                one.offer_used(found)
            counters.acquired_blocks += len(found)
            counters.missed_blocks += len(entries) - len(found)
        else:
            counters.acquired_sketches += len(found)
            counters.missed_sketches += len(entries) - len(found)

    def slot_offsets(self, session: SessionRecord, lease_id: str) -> tuple[Int64s, ...]:
        lease = self._books.leases.live(session, lease_id)
        if not isinstance(lease, ReadLease):
            raise invalid(
                f"lease_id {lease_id!r} is a write lease; only blocks under a read lease stay "
                "where they are"
            )
        index = self._books.space.index
        return tuple(
            np.where((e != 0) & ~index.unverified[e], index.offsets(e), -1) for _, e in lease.groups
        )

    def admit(self, lease: ReadLease) -> None:
        """Records that a load begins; from the first on, the lease leaves the budget
        `unadmitted_share`."""
        if not lease.admitted:
            lease.admitted = True
            self._count_unadmitted(lease, -lease.pinned_bytes)

    def end(self, lease: ReadLease) -> None:
        """Ends a live lease and releases its pins, or lets it end with its running copies."""
        lease.released = True
        if lease.num_copies:
            return
        entries = lease.entries()
        self._books.space.index.pin(entries, -1)
        self._books.space.removal.reap(entries)
        if not lease.admitted:
            self._count_unadmitted(lease, -lease.pinned_bytes)
        self._books.leases.remove(lease)

    def _count_unadmitted(self, lease: ReadLease, num_bytes: int) -> None:
        self._unadmitted[lease.tenant] = self._unadmitted.get(lease.tenant, 0) + num_bytes
        self._books.pin_budget.count(lease.tenant, unadmitted=num_bytes)

    def check_invariants(self, others: NDArray[np.int64]) -> None:
        """`others`: by entry number, the pins that belong neither to leases nor to retentions."""
        index, tenants = self._books.space.index, self._books.space.tenants
        pins = others.copy()
        unadmitted: dict[int, int] = {}
        for lease in self._books.leases.all():
            if isinstance(lease, ReadLease):
                np.add.at(pins, lease.entries(), 1)
                tenant = tenants.number(lease.key_space_id)
                waiting = 0 if lease.admitted else lease.pinned_bytes
                unadmitted[tenant] = unadmitted.get(tenant, 0) + waiting
        np.add.at(pins, self._books.retention_pins.entries(), 1)
        assert np.array_equal(pins, index.pins), "pins and read leases disagree"
        assert all(
            unadmitted.get(tenant, 0) == count for tenant, count in self._unadmitted.items()
        ), "unadmitted bytes miscounted"
        assert self._books.pin_budget.unadmitted_bytes == sum(unadmitted.values()), (
            "unadmitted bytes of all tenants miscounted"
        )


def _grant(lease: ReadLease, now_s: float) -> LeaseGrant:
    """Answer to a repeated `acquire` call."""
    return LeaseGrant(
        lease.lease_id,
        tuple(entries != 0 for _, entries in lease.groups),
        max(0.0, lease.expires_s - now_s),
    )


# A load names each block once. A lease that ends during it keeps its pins until it has ended.

WHY_NOT = {
    1: "runs.lease_positions go beyond the {} hashes of the lease",
    2: "runs.lease_positions name a block that the lease does not pin",
    # Different positions may name one block: the lease's list may have its hash twice.
    3: "runs.lease_positions name a block twice; a load copies each block once",
}
"""By the numbers of `BlockIndex.choose`."""


class Loads:
    def __init__(self, books: CacheBooks, read_leases: ReadLeases) -> None:
        self._books = books
        self._read_leases = read_leases

    def begin(
        self, session: SessionRecord, transfer_id: str, lease_id: str, runs: list[LoadPositions]
    ) -> list[SlotRun]:
        """As `CacheCore.begin_load`. Raises INVALID_FIELD for a block that the lease does not
        pin, or that `runs` names twice."""
        books, owner = self._books, session.owner
        books.transfers.check_new(session.number, transfer_id, owner)
        lease = books.leases.live(session, lease_id)
        if not isinstance(lease, ReadLease):
            raise invalid(f"lease_id {lease_id!r} is a write lease; a load needs a read lease")
        books.sessions.check_takes_new("starts no new transfers")
        slots = self._slots(dict(lease.groups), runs)
        self._read_leases.admit(lease)
        lease.num_copies += 1
        num_blocks = sum(len(run.positions) for run in slots if run.group_index < MAX_GROUPS)
        books.transfers.add(LoadTransfer(session.number, owner, transfer_id, lease, num_blocks))
        return slots

    def _slots(self, pinned: dict[int, Entries], runs: list[LoadPositions]) -> list[SlotRun]:
        index, slots = self._books.space.index, list[SlotRun]()
        try:
            for run in runs:
                listed = pinned.get(run.group_index)
                if listed is None:
                    raise invalid(
                        f"runs.group_index is {run.group_index}, which the lease does not cover"
                    )
                entries, offsets, why = index.choose(listed, run.positions)
                slots.append(
                    SlotRun(run.group_index, first_numbers(len(entries)), offsets, entries)
                )
                if why:
                    raise invalid(WHY_NOT[why].format(len(listed)))
        finally:
            for slot in slots:
                index.unmark(slot.entries)
        return slots

    def end(self, session_number: int, transfer_id: str, succeeded: bool) -> None:
        """Also ends the lease if it was released meanwhile and no other copy runs under it."""
        transfer = self._books.transfers.pop(session_number, transfer_id)
        assert isinstance(transfer, LoadTransfer), "a store ended as a load"
        transfer.lease.num_copies -= 1
        if succeeded:
            self._books.counters.loaded_blocks += transfer.num_blocks
        if transfer.lease.released:
            self._read_leases.end(transfer.lease)
