"""The core: sessions, key spaces, leases and transfers over one space of slots.

Every method is a decision: it checks its arguments, changes the books and returns a result; what
others must be told is in `take_effects`. A call that raises has changed nothing. No clock, no I/O,
no locks: one owner calls it, with `now_s`.

Always true: an acknowledged block is found by the very next lookup; a pinned slot is never evicted,
and when its block is flushed it stays as it is; a lease that ends during a copy keeps its slots
until the copy ends; a block becomes ready only when every shard is written.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv import table
from hotkv.errors import HotKVError, Reason
from hotkv.keys import MAX_GROUPS, KeySpace, Representation
from hotkv.results import BlockResult
from hotkv.retention import NO_RETENTION, Retention
from hotkv.table import RESERVED_FLAG, BlockTable, Words
from hotkv_server.core.arrays import first_occurrences, repeats, rows, without
from hotkv_server.core.bounds import Account, FairBound
from hotkv_server.core.catalog import Catalog
from hotkv_server.core.leases import (
    Lease,
    LeaseBook,
    ReadLease,
    WriteLease,
    content_of,
    read_weight,
    write_weight,
)
from hotkv_server.core.pins import RetentionPins
from hotkv_server.core.policies.protocol import Policy
from hotkv_server.core.representations import blocks_first
from hotkv_server.core.space import MAX_REFRESHED, Space
from hotkv_server.core.transfers import LoadTransfer, StoreTransfer, TransferBook
from hotkv_server.core.values import (
    BoolMask,
    CoreConfig,
    Counters,
    Entries,
    EvictionNotice,
    Grant,
    HashList,
    Int64s,
    KeySpaceRecord,
    LoadPositions,
    Reservation,
    Run,
    SessionRecord,
    SlotRun,
)
from hotkv_server.integrity.check_values import Sums, sealed

ABORTED_MARK = 1 << 31
"""Set in the shard mask of a reserved entry that will not be published."""


def _invalid(message: str, reason: Reason = Reason.INVALID_FIELD) -> HotKVError:
    return HotKVError(reason, message)


class CacheCore:
    """The cache of one node. See the module for its rules."""

    def __init__(self, config: CoreConfig, block_table: BlockTable, policy: Policy) -> None:
        self.config = config
        self.counters = Counters()
        modes = {"is_backed": config.is_backed, "makes_room": config.makes_room}
        self.space = Space(
            block_table, config.arena_bytes, config.slab_bytes, policy, config.tenants, **modes
        )
        self.catalog = Catalog(self.space, len(config.tenants))
        self.retention_pins = RetentionPins(self.space.index, self.space.tenants, config.held_share)
        self.client_memory = FairBound(config.client_memory_bytes)
        self.leases = LeaseBook(config.max_leases, Account(self.client_memory))
        self.transfers = TransferBook()
        self.sessions: dict[int, SessionRecord] = {}
        self.draining = False
        self._next_session = 1
        # Per tenant: bytes that leases without a load pin.
        self._unadmitted: dict[int, int] = {}

    def __repr__(self) -> str:
        return (
            f"CacheCore({len(self.sessions)} sessions, {len(self.leases)} leases, "
            f"{len(self.transfers)} transfers, {self.space!r})"
        )

    def grow(self, num_bytes: int, coming_bytes: int = 0) -> None:
        """As Space.grow: so much of the arena, from its start, has memory now, and about so much
        more within moments. Never shrinks it."""
        self.space.grow(num_bytes, coming_bytes)

    def back_entries(self, num_entries: int) -> None:
        """So many entries have memory in the block table now; until the first call all have."""
        self.space.index.back(num_entries)

    # Sessions and key spaces

    def open_session(
        self,
        engine_id: str,
        role: str,
        key_space: KeySpace,
        now_s: float,
        representations: tuple[Representation, ...] = (),
    ) -> SessionRecord:
        """Opens a session; its key space and representations are registered on first sight."""
        if not engine_id:
            raise _invalid("engine_id is empty; give one id to all sessions of an engine")
        if self.draining:
            raise HotKVError(Reason.DRAINING, "the server is draining and takes no new sessions")
        key_space_id, groups = self.catalog.register(key_space, representations, now_s)
        self.catalog.enter(key_space_id)
        record = SessionRecord(self._next_session, engine_id, role, key_space_id, now_s, groups)
        self._next_session += 1
        self.sessions[record.number] = record
        return record

    def close_session(self, number: int, now_s: float) -> None:
        """Ends a session whose transfers have ended: its leases go back. Closing an unknown session
        is no error."""
        if number not in self.sessions:
            return
        assert not self.transfers.of_session(number), "session closed with transfers in flight"
        for lease in self.leases.of_session(number):
            self.end_lease(lease)
        self.catalog.leave(self.sessions.pop(number).key_space_id, now_s)

    @property
    def key_spaces(self) -> dict[int, KeySpaceRecord]:
        """Those that are known, by number."""
        return self.catalog.records

    def key_space(self, number: int) -> KeySpace:
        """The key space with this number. Raises UNKNOWN_KEY_SPACE."""
        return self.catalog.record(number).key_space

    def owner(self, session: SessionRecord) -> str:
        """For whom it counts what a session takes of what all share: its tenant, or where there are
        none its engine."""
        return (
            self.key_space(session.key_space_id).tenant
            if self.space.tenants.is_used
            else session.engine_id
        )

    def _session(self, number: int) -> SessionRecord:
        if number not in self.sessions:
            raise HotKVError(
                Reason.UNKNOWN_SESSION, "session_id is unknown or closed; open a new session"
            )
        return self.sessions[number]

    def _check_groups(
        self,
        record: KeySpaceRecord,
        lists: list[int],
        num_blocks: int,
        *,
        only_blocks: bool = False,
    ) -> None:
        for group_index in lists:
            if not record.has(group_index):
                raise _invalid(
                    f"groups.group_index is {group_index}; this key space has "
                    f"{len(record.key_space.groups)} groups"
                )
            if only_blocks and group_index >= MAX_GROUPS:
                raise _invalid(
                    "groups.group_index names a representation; those go with their blocks, so "
                    "name these"
                )
        if num_blocks > self.config.max_blocks_per_call:
            raise _invalid(
                f"the call names {num_blocks} blocks; at most "
                f"{self.config.max_blocks_per_call} "
                "are accepted",
                Reason.TOO_LARGE,
            )

    # Lookup and read leases

    def lookup(self, key_space_id: int, groups: list[HashList]) -> list[BoolMask]:
        """Which blocks are ready, one mask a list. A hint: nothing is pinned or touched."""
        self._check_groups(
            self.catalog.record(key_space_id),
            [g.group_index for g in groups],
            sum(len(g.hashes) for g in groups),
        )
        masks = [
            table.is_ready(self.space.index.probe(key_space_id, g.group_index, g.hashes))
            for g in groups
        ]
        of_blocks = [
            mask for g, mask in zip(groups, masks, strict=True) if g.group_index < MAX_GROUPS
        ]
        self.counters.lookup_blocks += sum(len(mask) for mask in of_blocks)
        self.counters.lookup_hit_blocks += sum(int(mask.sum()) for mask in of_blocks)
        return masks

    def touch(
        self,
        session_number: int,
        groups: list[HashList],
        now_s: float,
        retention: Retention = NO_RETENTION,
    ) -> None:
        """Notes that the engine used these blocks from its own device cache; keeps them as
        `retention` asks."""
        session = self._session(session_number)
        num_blocks = sum(len(g.hashes) for g in groups)
        self._check_groups(
            self.catalog.record(session.key_space_id),
            [g.group_index for g in groups],
            num_blocks,
            only_blocks=True,
        )
        for g in groups:
            words = self.space.index.find(session.key_space_id, g.group_index, g.hashes)
            self._retain(words[table.is_ready(words)], retention, now_s)

    def hold(self, session_number: int, hash_list: HashList, until_s: float) -> None:
        """Keeps those of the blocks that are ready until then, as far as the budget goes; a touch
        has checked the list before."""
        words = self.space.index.find(
            self._session(session_number).key_space_id, hash_list.group_index, hash_list.hashes
        )
        self.counters.held_blocks += self.retention_pins.hold(words[table.is_ready(words)], until_s)

    def _retain(self, entries: Entries, retention: Retention, now_s: float) -> None:
        """Touches ready entries, in chain order, as much and for as long as the retention says."""
        self.space.touch(entries, now_s, retention)
        if retention.pin:
            self.counters.held_blocks += self.retention_pins.hold(entries, now_s + retention.ttl_s)

    def acquire(
        self, session_number: int, lease_id: str, groups: list[HashList], ttl_s: float, now_s: float
    ) -> Grant:
        """Pins the ready ones among the blocks. The same call again returns the same grant; the id
        with other blocks is refused."""
        session = self._session(session_number)
        indices = [g.group_index for g in groups]
        self._check_groups(
            self.catalog.record(session.key_space_id), indices, sum(len(g.hashes) for g in groups)
        )
        if len(set(indices)) != len(indices):
            raise _invalid("groups lists a group twice; give each group one list")
        existing, content = self._existing_lease(session, lease_id), content_of(groups)
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
            return Grant(
                tuple(entries != 0 for _, entries in existing.groups),
                max(0.0, existing.expires_s - now_s),
            )
        ttl_s, owner = self._ttl(ttl_s), self.owner(session)
        weight = read_weight(len(groups), sum(len(g.hashes) for g in groups))
        self.leases.check_room(owner, "groups", weight)
        tenant = self.space.tenants.number(session.key_space_id)
        budget = int(
            self.config.unadmitted_share * self.space.tenants.surely_bytes(tenant)
        ) - self._unadmitted.get(tenant, 0)
        pinned: list[tuple[int, Entries]] = []
        total = 0
        for g in groups:
            words = self.space.index.find(session.key_space_id, g.group_index, g.hashes)
            entries = np.where(table.is_ready(words), words, 0).astype(np.uint32)
            upto = total + np.cumsum(
                np.where(entries != 0, self.space.index.slot_bytes(entries), 0)
            )
            entries[upto > budget] = 0
            total = int(upto[upto <= budget].max(initial=total))
            pinned.append((g.group_index, entries))
        number, expires_s = self.leases.next_number(), now_s + ttl_s
        lease = ReadLease(
            session.engine_id,
            owner,
            lease_id,
            number,
            session_number,
            session.key_space_id,
            expires_s,
            pinned,
            content,
            total,
            weight,
        )
        self.leases.add(lease)
        self._count_unadmitted(lease, total)
        self.space.index.pin(lease.entries(), 1)
        for group_index, entries in pinned:
            found = entries[entries != 0]
            if group_index < MAX_GROUPS:
                self.space.touch(found, now_s)
                self.counters.acquired_blocks += len(found)
                self.counters.missed_blocks += len(entries) - len(found)
            else:
                self.counters.acquired_representations += len(found)
                self.counters.missed_representations += len(entries) - len(found)
        return Grant(tuple(entries != 0 for _, entries in pinned), ttl_s)

    def slot_offsets(self, session_number: int, lease_id: str) -> tuple[Int64s, ...]:
        """Where the blocks of a read lease lie, while it lasts: a list a group as it was asked for,
        -1 where not pinned or not verified."""
        lease = self._lease(self._session(session_number), lease_id)
        if not isinstance(lease, ReadLease):
            raise _invalid(
                f"lease_id {lease_id!r} is a write lease; only blocks under a read lease stay "
                "where they are"
            )
        index = self.space.index
        return tuple(
            np.where((e != 0) & ~index.unverified[e], index.offsets(e), -1) for _, e in lease.groups
        )

    def _count_unadmitted(self, lease: ReadLease, num_bytes: int) -> None:
        tenant = self.space.tenants.number(lease.key_space_id)
        self._unadmitted[tenant] = self._unadmitted.get(tenant, 0) + num_bytes

    def release(self, session_number: int, lease_id: str) -> bool:
        """Gives a lease back; during copies it takes effect when they end. False where there is
        none."""
        session = self._session(session_number)
        lease = self.leases.get(session.engine_id, lease_id)
        if lease is None:
            if self.leases.elsewhere(session.engine_id, lease_id):
                raise HotKVError(
                    Reason.FOREIGN_LEASE, f"lease_id {lease_id!r} belongs to another engine"
                )
            return False
        self.end_lease(lease)
        return True

    def _existing_lease(self, session: SessionRecord, lease_id: str) -> Lease | None:
        """The engine's lease with this id; checks that a new one may be made where there is
        none."""
        if not lease_id:
            raise _invalid("lease_id is empty; choose an id that is unique in the engine")
        lease = self.leases.get(session.engine_id, lease_id)
        if lease is not None and lease.key_space_id != session.key_space_id:
            raise HotKVError(
                Reason.DUPLICATE_ID,
                f"lease_id {lease_id!r} is in use under another key space; choose a new id",
            )
        if lease is None:
            if self.draining:
                raise HotKVError(Reason.DRAINING, "the server is draining and grants no new leases")
            owner = self.owner(session)
            if not self.leases.bound.room(owner):
                raise HotKVError(
                    Reason.OVERLOADED,
                    f"lease_id: {self.leases.bound.refusal(owner, 'leases')}; release some first",
                )
        return lease

    def _lease(self, session: SessionRecord, lease_id: str) -> Lease:
        lease = self.leases.get(session.engine_id, lease_id)
        if lease is not None and lease.key_space_id != session.key_space_id:
            raise HotKVError(
                Reason.FOREIGN_LEASE,
                f"lease_id {lease_id!r} belongs to another key space than this session",
            )
        if lease is not None and not lease.released:
            return lease
        if self.leases.elsewhere(session.engine_id, lease_id):
            raise HotKVError(
                Reason.FOREIGN_LEASE, f"lease_id {lease_id!r} belongs to another engine"
            )
        raise HotKVError(
            Reason.UNKNOWN_LEASE,
            f"lease_id {lease_id!r} is unknown, released or expired; acquire it again",
        )

    def _ttl(self, ttl_s: float) -> float:
        if ttl_s < 0:
            raise _invalid("ttl_ms is negative; give 0 for the default")
        return min(ttl_s or self.config.lease_ttl_s, self.config.max_lease_ttl_s)

    def end_lease(self, lease: Lease) -> None:
        """Ends a lease that is in the book; during copies it takes effect when they end."""
        lease.released = True
        if lease.num_copies:
            return
        if isinstance(lease, ReadLease):
            self.space.index.pin(lease.entries(), -1)
            self.space.reap(lease.entries())
            if not lease.admitted:
                self._count_unadmitted(lease, -lease.pinned_bytes)
        else:
            self._drop(lease.entries)
        self.leases.remove(lease)

    def _drop(self, entries: Entries) -> None:
        """Removes reserved entries that will not be written."""
        if not len(entries):
            return
        self.counters.aborted_blocks += int((~self.space.representations.among(entries)).sum())
        self.space.drop(entries)

    def late(self, now_s: float) -> list[Lease]:
        """Leases whose time is up and that have not ended."""
        return [lease for lease in self.leases.expired(now_s) if not lease.released]

    # Write leases and transfers

    def reserve(
        self,
        session_number: int,
        lease_id: str,
        runs: list[Run],
        ttl_s: float,
        now_s: float,
        retention: Retention = NO_RETENTION,
    ) -> Reservation:
        """Reserves slots for blocks that are neither ready nor in flight. The first call under a
        lease id decides; later ones join.

        A call that joins and names blocks that the first did not is refused. A representation is
        reserved where its block is ready or reserved under this lease; whatever the order of runs,
        blocks come first. `retention`: of the first call; holds for blocks that are ready at once,
        for others when they become so.
        """
        session = self._session(session_number)
        record = self.catalog.record(session.key_space_id)
        self._check_groups(
            record, [run.group_index for run in runs], sum(len(run.hashes) for run in runs)
        )
        if any(run.depth < 0 or run.depth + len(run.hashes) >= 1 << 31 for run in runs):
            raise _invalid(
                "runs.depth is negative or too large; it counts blocks from the start of the prompt"
            )
        lease = self._existing_lease(session, lease_id)
        if isinstance(lease, ReadLease):
            raise HotKVError(
                Reason.DUPLICATE_ID, f"lease_id {lease_id!r} is a read lease; choose a new id"
            )
        listed = self.space.index.mixed_runs(session.key_space_id, runs)
        if lease is not None and not lease.names(listed):
            raise HotKVError(
                Reason.DUPLICATE_ID,
                f"lease_id {lease_id!r} is in use for other blocks; choose a new id",
            )
        ttl_s = self._ttl(ttl_s)
        deciding = lease is None
        if lease is None:
            owner, expires_s, weight = (
                self.owner(session),
                now_s + ttl_s,
                write_weight(len(listed), record.key_space.num_shards),
            )
            self.leases.check_room(owner, "runs", weight)
            number, named = self.leases.next_number(), (listed, weight, retention)
            lease = WriteLease(
                session.engine_id,
                owner,
                lease_id,
                number,
                session_number,
                session.key_space_id,
                expires_s,
                *named,
            )
        answers = {
            at: self._reserve_run(lease, record, runs[at], deciding, now_s)
            for at in blocks_first([r.group_index for r in runs])
        }
        if deciding and (len(lease.entries) or record.key_space.num_shards > 1):
            self.leases.add(lease)
        results, entries = (
            tuple(answers[at][0] for at in range(len(runs))),
            tuple(answers[at][1] for at in range(len(runs))),
        )
        return Reservation(results, entries, max(0.0, lease.expires_s - now_s))

    def _reserve_run(
        self, lease: WriteLease, record: KeySpaceRecord, run: Run, deciding: bool, now_s: float
    ) -> tuple[NDArray[np.uint8], Entries]:
        """BlockResult values and entry numbers of one run."""
        index, is_block = self.space.index, run.group_index < MAX_GROUPS
        words = index.find(lease.key_space_id, run.group_index, run.hashes)
        results, present = np.full(len(words), BlockResult.NO_SPACE, np.uint8), words[:0]
        if words.any():
            ready, reserved = table.is_ready(words), words >= RESERVED_FLAG
            words &= ~RESERVED_FLAG
            mine = reserved & (index.owners(words) == lease.number)
            results[ready], results[reserved], results[mine] = (
                BlockResult.PRESENT,
                BlockResult.IN_FLIGHT,
                BlockResult.RESERVED,
            )
            self.counters.in_flight_blocks += int((reserved & ~mine).sum()) if is_block else 0
            present = words[ready]
        if len(present) and is_block:
            self._retain(present, lease.retention, now_s)
            self.counters.present_blocks += len(present)
        absent = np.flatnonzero(words == 0)
        if not deciding or not len(absent):
            return results, words
        wanted = absent[first_occurrences(rows(run.hashes, absent))]
        if len(wanted) < len(absent):
            # A hash listed twice is reserved once; the second is in flight.
            results[absent] = BlockResult.IN_FLIGHT
            results[wanted] = BlockResult.NO_SPACE
        # Blocks of this run that are ready, and those before it, stay while room is made for the
        # rest.
        staying = np.concatenate(
            (
                index.chain_to(
                    record.number, record.block_group(run.group_index), run.parent, MAX_REFRESHED
                ),
                present,
            )
        )
        if not is_block:
            wanted, blocks = self._representable(lease, record, run, wanted, results)
            staying = np.concatenate((staying, self.space.representations.of(present), blocks))
        index.pin(staying, 1)
        slot_bytes, hashes = record.shape(run.group_index).slot_bytes, rows(run.hashes, wanted)
        entries = self.space.insert(
            lease.key_space_id,
            run.group_index,
            hashes,
            slot_bytes,
            run.depth + wanted,
            lease.number,
        )
        index.pin(staying, -1)
        words[wanted[: len(entries)]] = entries
        results[wanted[: len(entries)]] = BlockResult.RESERVED
        lease.entries = np.concatenate((lease.entries, entries))
        if is_block:
            index.link(lease.key_space_id, run.group_index, words, run.parent)
            self.counters.no_space_blocks += len(wanted) - len(entries)
        return results, words

    def _representable(
        self,
        lease: WriteLease,
        record: KeySpaceRecord,
        run: Run,
        wanted: Int64s,
        results: NDArray[np.uint8],
    ) -> tuple[Int64s, Entries]:
        """Which of the wanted representations have a block to go with, and those blocks that are
        ready.

        Where somebody else is writing the block, the result says so.
        """
        words = self.space.index.find(
            lease.key_space_id, record.block_group(run.group_index), run.hashes[wanted]
        )
        ready, reserved = table.is_ready(words), words >= RESERVED_FLAG
        mine = reserved & (self.space.index.owners(words & ~RESERVED_FLAG) == lease.number)
        results[wanted[reserved & ~mine]] = BlockResult.IN_FLIGHT
        return wanted[ready | mine], words[ready]

    def begin_load(
        self, session_number: int, transfer_id: str, lease_id: str, runs: list[LoadPositions]
    ) -> list[SlotRun]:
        """Starts a load under a read lease; returns the slots to copy from."""
        session = self._session(session_number)
        self.transfers.check_new(session_number, transfer_id, self.owner(session))
        lease = self._lease(session, lease_id)
        if not isinstance(lease, ReadLease):
            raise _invalid(f"lease_id {lease_id!r} is a write lease; a load needs a read lease")
        if self.draining:
            raise HotKVError(Reason.DRAINING, "the server is draining and starts no new transfers")
        pinned = dict(lease.groups)
        slots = []
        for run in runs:
            entries = pinned.get(run.group_index)
            if entries is None:
                raise _invalid(
                    f"runs.group_index is {run.group_index}, which the lease does not cover"
                )
            if len(run.positions) and (
                run.positions.min() < 0 or run.positions.max() >= len(entries)
            ):
                raise _invalid(
                    f"runs.lease_positions go beyond the {len(entries)} hashes of the lease"
                )
            chosen = entries[run.positions]
            if np.any(chosen == 0):
                raise _invalid("runs.lease_positions name a block that the lease does not pin")
            slots.append(
                SlotRun(
                    run.group_index,
                    np.arange(len(chosen)),
                    self.space.index.offsets(chosen),
                    chosen,
                )
            )
        # Also where the lease lists its hash twice, at places of their own.
        if repeats([run.entries for run in slots]):
            raise _invalid("runs.lease_positions name a block twice; a load copies each block once")
        if not lease.admitted:
            lease.admitted = True
            self._count_unadmitted(lease, -lease.pinned_bytes)
        lease.num_copies += 1
        num_blocks = sum(len(run.positions) for run in slots if run.group_index < MAX_GROUPS)
        self.transfers.add(
            LoadTransfer(session_number, self.owner(session), transfer_id, lease, num_blocks)
        )
        return slots

    def begin_store(
        self,
        session_number: int,
        transfer_id: str,
        lease_id: str,
        runs: list[Run],
        shard_index: int,
        ttl_s: float,
        now_s: float,
        retention: Retention = NO_RETENTION,
    ) -> list[SlotRun]:
        """Starts a store, reserving what no earlier call under the lease has; returns the slots to
        copy to."""
        session = self._session(session_number)
        self.transfers.check_new(session_number, transfer_id, self.owner(session))
        num_shards = self.key_space(session.key_space_id).num_shards
        if not 0 <= shard_index < num_shards:
            raise _invalid(f"shard_index is {shard_index}; this key space has {num_shards} shards")
        if self.draining:
            raise HotKVError(Reason.DRAINING, "the server is draining and starts no new transfers")
        joined = self.leases.get(session.engine_id, lease_id) is not None
        reservation = self.reserve(session_number, lease_id, runs, ttl_s, now_s, retention)
        lease = self.leases.get(session.engine_id, lease_id)
        writes = lease if isinstance(lease, WriteLease) else None
        transfer = StoreTransfer(
            session_number, self.owner(session), transfer_id, writes, shard_index
        )
        busy = (
            self.transfers.entries_being_written(transfer.lease, shard_index)
            if joined
            else np.empty(0, np.uint32)
        )
        slots = []
        for run, results, words in zip(runs, reservation.results, reservation.entries, strict=True):
            positions = np.flatnonzero(results == BlockResult.RESERVED)
            entries = words[positions]
            if joined:
                masks = self.space.index.mark_written(entries, 0)
                results[positions[masks & ABORTED_MARK != 0]] = BlockResult.ABORTED
                results[positions[masks & (1 << shard_index) != 0]] = BlockResult.WRITTEN
            if joined or len(busy):
                # A block that another copy writes, or that is listed twice, is copied once.
                again = np.ones(len(entries), np.bool_)
                again[np.unique(entries, return_index=True)[1]] = False
                results[positions[again | np.isin(entries, busy)]] = BlockResult.IN_FLIGHT
                todo = results[positions] == BlockResult.RESERVED
                entries, positions = entries[todo], positions[todo]
            busy = np.concatenate((busy, entries)) if len(runs) > 1 else busy
            transfer.add_run(run.group_index, entries, positions, results)
            slots.append(
                SlotRun(run.group_index, positions, self.space.index.offsets(entries), entries)
            )
        if transfer.lease is not None:
            transfer.lease.num_copies += 1
        self.transfers.add(transfer)
        return slots

    def end_load(self, session_number: int, transfer_id: str, succeeded: bool) -> None:
        """The copy of a load has ended and touches nothing any more."""
        transfer = self.transfers.pop(session_number, transfer_id)
        assert isinstance(transfer, LoadTransfer), "a store ended as a load"
        transfer.lease.num_copies -= 1
        if succeeded:
            self.counters.loaded_blocks += transfer.num_blocks
        if transfer.lease.released:
            self.end_lease(transfer.lease)

    def end_store(
        self,
        session_number: int,
        transfer_id: str,
        succeeded: bool,
        now_s: float,
        sums: Sequence[Sums] = (),
    ) -> list[NDArray[np.uint8]]:
        """The copy of a store has ended; publishes what has all its shards written. Returns
        BlockResult values a run.

        A representation whose block is not ready by now is not kept: ABORTED. `sums`: for check
        values, of what was copied, one array a run in the order of `begin_store`; or none.
        """
        transfer = self.transfers.pop(session_number, transfer_id)
        assert isinstance(transfer, StoreTransfer), "a load ended as a store"
        lease = transfer.lease
        if lease is None:
            return transfer.results
        lease.num_copies -= 1
        whole = (1 << self.key_space(lease.key_space_id).num_shards) - 1
        for at in blocks_first(transfer.groups):
            entries, positions, results = (
                transfer.entries[at],
                transfer.positions[at],
                transfer.results[at],
            )
            masks = self.space.index.mark_written(
                entries, 1 << transfer.shard_index if succeeded else ABORTED_MARK
            )
            complete = masks == whole
            done = entries[complete]
            total = (
                lease.sums_with(entries, sums[at], complete)
                if sums and succeeded
                else lease.sums_of(done)
            )
            keys = self.space.index.mixed(done)
            checks = sealed(total, keys, self.config.check_stride)
            if transfer.groups[at] < MAX_GROUPS:
                self._publish_blocks(lease, done, keys, checks, now_s)
            else:
                kept = self._publish_representations(lease, done, checks)
                masks[complete] |= np.where(kept, np.uint32(0), np.uint32(ABORTED_MARK))
                complete[complete] = kept
            results[positions] = BlockResult.STORED
            if not complete.all():
                results[positions[~complete]] = (
                    BlockResult.WRITTEN if succeeded else BlockResult.ABORTED
                )
                results[positions[masks & ABORTED_MARK != 0]] = BlockResult.ABORTED
            lease.entries = without(lease.entries, entries[complete])
        lease.shards_seen |= 1 << transfer.shard_index
        self._settle_write(lease, whole)
        return transfer.results

    def _publish_blocks(
        self, lease: WriteLease, entries: Entries, keys: Sums, checks: Sums, now_s: float
    ) -> None:
        """Makes blocks ready that all shards have been written of."""
        self.space.publish(entries, now_s, lease.retention, checks, keys)
        if len(entries):
            self.space.refresh_ancestors(int(entries[0]), now_s)
        if lease.retention.pin:
            self.counters.held_blocks += self.retention_pins.hold(
                entries, now_s + lease.retention.ttl_s
            )
        self.counters.stored_blocks += len(entries)

    def _publish_representations(
        self, lease: WriteLease, entries: Entries, checks: Sums
    ) -> BoolMask:
        """Makes representations of one kind ready whose blocks are; the others are marked as
        aborted. Returns which are ready."""
        if not len(entries):
            return np.empty(0, np.bool_)
        _, groups, hashes = self.space.index.keys(entries)
        blocks = self.space.index.find(
            lease.key_space_id,
            self.catalog.record(lease.key_space_id).block_group(int(groups[0])),
            hashes,
        )
        has_block = table.is_ready(blocks)
        self.space.index.mark_written(entries[~has_block], ABORTED_MARK)
        self.space.representations.publish(entries[has_block], blocks[has_block], checks[has_block])
        self.counters.stored_representations += int(has_block.sum())
        return has_block

    def _settle_write(self, lease: WriteLease, whole: int) -> None:
        """Drops aborted entries once no copy can touch them, and ends the lease when every shard
        was seen and none is outstanding."""
        if lease.num_copies:
            return
        if len(lease.entries):
            aborted = lease.entries[
                self.space.index.mark_written(lease.entries, 0) & ABORTED_MARK != 0
            ]
            self._drop(aborted)
            lease.entries = without(lease.entries, aborted)
        if lease.released or (lease.shards_seen == whole and not len(lease.entries)):
            self.end_lease(lease)

    # For operators

    def named(self, key_space_id: int, group_index: int, hashes: Words) -> Entries:
        """Entries of blocks by their hashes, ready or reserved, each once."""
        self._check_groups(
            self.catalog.record(key_space_id), [group_index], len(hashes), only_blocks=True
        )
        words = self.space.index.find(key_space_id, group_index, hashes)
        return np.unique(words[words != 0] & ~RESERVED_FLAG)

    def abort(self, lease: WriteLease) -> None:
        """What is reserved or being written under a lease never becomes ready."""
        self.space.index.mark_written(lease.entries, ABORTED_MARK)
        self._settle_write(lease, (1 << self.key_space(lease.key_space_id).num_shards) - 1)

    def flush(self, entries: Entries) -> None:
        """Forgets ready blocks of a key space: the very next lookup finds none of them.

        Also pinned ones: what a lease was promised can still be loaded under it, by nobody else.
        """
        self.retention_pins.let_go(entries)
        self.space.flush(entries)
        self.counters.flushed_blocks += len(entries)

    def take_effects(self) -> list[EvictionNotice]:
        """What must be told since the last call."""
        effects, self.space.effects = self.space.effects, []
        self.counters.evicted_blocks = self.space.evicted_blocks
        return effects

    def check_invariants(self) -> None:
        """Raises AssertionError where any book disagrees with another. Linear in capacity."""
        self.space.check_invariants()
        self.catalog.check_invariants([session.key_space_id for session in self.sessions.values()])
        pins = np.zeros(self.space.index.capacity + 1, np.int64)
        unadmitted: dict[int, int] = {}
        owned: list[Entries] = []
        for lease in self.leases.all():
            assert lease.num_copies == self.transfers.count(lease), "copies miscounted"
            assert not lease.released or lease.num_copies, (
                "a released lease without copies was kept"
            )
            if isinstance(lease, ReadLease):
                np.add.at(pins, lease.entries(), 1)
                tenant = self.space.tenants.number(lease.key_space_id)
                unadmitted[tenant] = unadmitted.get(tenant, 0) + (
                    0 if lease.admitted else lease.pinned_bytes
                )
            else:
                owned.append(lease.entries)
                assert np.all(self.space.index.owners(lease.entries) == lease.number), (
                    "a write lease owns an entry that is not its own"
                )
        self.retention_pins.check_invariants()
        self.leases.check_invariants()
        self.transfers.check_invariants()
        np.add.at(pins, self.retention_pins.entries(), 1)
        assert np.array_equal(pins, self.space.index.pins), "pins and read leases disagree"
        assert all(
            unadmitted.get(tenant, 0) == count for tenant, count in self._unadmitted.items()
        ), "unadmitted bytes miscounted"
        for entry in self.space.representations.ready():
            (key_space_id, _), (kind, group), _ = self.space.index.keys(
                np.append(entry, self.space.representations.of(entry))
            )
            assert self.catalog.record(int(key_space_id)).block_group(int(kind)) == group, (
                "a representation belongs to another group"
            )
        reserved = np.flatnonzero(self.space.index.states() == table.STATE_RESERVED)
        everything = np.concatenate(owned) if owned else np.empty(0, np.uint32)
        assert np.array_equal(np.sort(everything), reserved), (
            "reserved entries and write leases disagree"
        )
