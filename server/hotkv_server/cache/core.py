"""`CacheCore`, the core of the cache: its sessions, key spaces, leases, transfers and slots.

Each method is a decision: it checks its arguments, changes the state and returns a result. A call
that raises has changed nothing. Only the node's event loop calls the core.

Always true: after a store has ended, the next lookup finds its blocks. A pinned block is never
evicted; when flushed, its bytes stay unchanged until its last pin is released. A lease that ends
during a copy keeps its slots until the copy ends. A block becomes ready only when every shard is
written.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.blocks import (
    NO_OPTIONS,
    NO_RETENTION,
    BlockResult,
    LeaseGrant,
    Retention,
    StoreOptions,
)
from hotkv_proto.keys import MAX_GROUPS, KeySpace, Sketch
from hotkv_proto.table import BlockTable
from hotkv_server.cache.leases.books import CacheBooks, Uses
from hotkv_server.cache.leases.leases import Lease, ReadLease, Reservation, WriteLease, num_listed
from hotkv_server.cache.leases.reading import Loads, ReadLeases
from hotkv_server.cache.leases.writing import CheckedCall, Reservations, Stores, WriteCall
from hotkv_server.cache.readers import ReaderMemory
from hotkv_server.cache.resizing import Resizing
from hotkv_server.cache.room.policies.protocol import Policy
from hotkv_server.cache.room.removal import Parts
from hotkv_server.cache.seams import StorePins
from hotkv_server.cache.sessions import check_named
from hotkv_server.cache.values import (
    BoolMask,
    Cause,
    CoreConfig,
    Entries,
    EvictionNotice,
    HashList,
    Int64s,
    KeySpaceRecord,
    LoadPositions,
    Run,
    SessionRecord,
    SlotRun,
)
from hotkv_server.integrity.checksums import Sums

LEASED_BLOCKS = 1 << 16
"""Weight of a part when many leases end: listed blocks, plus LEASE_BLOCKS a lease."""
LEASE_BLOCKS = 1 << 10
"""Time to end an empty lease, in listed blocks."""
BLOCKS = 1 << 12
"""Blocks in a part of a long operation at most."""
SCANNED_ENTRIES = 1 << 17
"""Entry numbers in a part of a scan."""


class CacheCore(CacheBooks):
    def __init__(
        self,
        config: CoreConfig,
        block_table: BlockTable,
        policy: Policy,
        readers: ReaderMemory | None = None,
    ) -> None:
        super().__init__(config, block_table, policy, readers)
        self._read_leases = ReadLeases(self)
        self._uses = Uses(self)
        self._loads = Loads(self, self._read_leases)
        self._reservations = Reservations(self, self._uses)
        self._stores = Stores(self, self._reservations, self._uses)
        self.resizing = Resizing(self)

    def __repr__(self) -> str:
        return (
            f"CacheCore({len(self.sessions)} sessions, {len(self.leases)} leases, "
            f"{len(self.transfers)} transfers, {self.grace!r}, {self.space!r})"
        )

    # Sessions and key spaces

    @property
    def draining(self) -> bool:
        """While true, new sessions, leases and transfers are refused."""
        return self.sessions.draining

    @draining.setter
    def draining(self, on: bool) -> None:
        self.sessions.draining = on

    def open_session(
        self,
        engine_id: str,
        role: str,
        key_space: KeySpace,
        now_s: float,
        sketches: tuple[Sketch, ...] = (),
    ) -> SessionRecord:
        """Registers key space and kinds of sketches if they are new.

        engine_id: shared by the sessions of one engine, which can use each other's leases.
        role: `scheduler`, `worker` or `tool`; only shown to operators.
        """
        self.space.removal.now_s = now_s
        return self.sessions.open(engine_id, role, key_space, now_s, sketches)

    def close_session(self, number: int, now_s: float) -> None:
        """Ends a session with its leases and pins. Its transfers must have ended."""
        if number not in self.sessions:
            return
        assert not self.transfers.of_session(number), "session closed with transfers in flight"
        for lease in self.leases.of_session(number):
            self.end_lease(lease)
        for pinner in self.pinners:
            for _ in pinner.end(self.sessions.record(number)):
                pass
        self.sessions.close(number, now_s)

    @property
    def key_spaces(self) -> dict[int, KeySpaceRecord]:
        return self.catalog.records

    def key_space(self, number: int) -> KeySpace:
        """Raises UNKNOWN_KEY_SPACE."""
        return self.catalog.record(number).key_space

    # Lookup and uses

    def lookup(self, key_space_id: int, groups: list[HashList]) -> list[BoolMask]:
        """Masks of ready blocks. Only a hint: pins nothing and counts no use."""
        return self._uses.lookup(key_space_id, groups)

    def touch(
        self,
        session_number: int,
        groups: list[HashList],
        now_s: float,
        retention: Retention = NO_RETENTION,
    ) -> None:
        """The engine used these blocks in its own device cache: they are evicted later. With
        `Hotness`, the use counts as 2^`retention.priority` uses. `retention.pin` also pins,
        within `CoreConfig.held_share`."""
        self._uses.touch(self.sessions.record(session_number), groups, now_s, retention)

    # Leases

    def acquire(
        self,
        session_number: int,
        lease_id: str,
        groups: list[HashList],
        ttl_s: float,
        now_s: float,
        *,
        may_pin: bool = True,
    ) -> LeaseGrant:
        """Pins the ready blocks; only the first of them if `CoreConfig.unadmitted_share` is used
        up, which a lease counts against until its first load. Repeating the call returns the same
        blocks. Raises DUPLICATE_ID if the engine uses `lease_id` for other blocks, a write lease,
        or a released lease whose copy still runs.

        groups: a list for each group.
        ttl_s: 0 for the default.
        may_pin: False: a new lease pins nothing.
        """
        session = self.sessions.record(session_number)
        return self._read_leases.acquire(session, lease_id, groups, ttl_s, now_s, may_pin)

    def slot_offsets(self, session_number: int, lease_id: str) -> tuple[Int64s, ...]:
        """Arena offsets in bytes, an array for each group of `acquire`. -1 if not pinned or not
        yet verified. Valid while the lease lasts."""
        return self._read_leases.slot_offsets(self.sessions.record(session_number), lease_id)

    def make_room_above(
        self, key_space_id: int, runs: Sequence[Run], beside: Sequence[HashList], now_s: float
    ) -> Iterator[None]:
        """Frees slots in host memory for a promotion of `runs`, of which nothing is evicted.
        `beside`: other blocks of these prompts, needed after it: the ready ones are not evicted
        and count as used at `now_s`.
        """
        record, staying = self.catalog.record(key_space_id), [np.empty(0, np.uint32)]
        for one in beside:
            if record.has(one.group_index):
                words = self.space.index.find(key_space_id, one.group_index, one.hashes)
                staying.append(words[table.is_ready(words)])
                if one.group_index < MAX_GROUPS:
                    self.space.policy.refresh(staying[-1], now_s)
        return self._reservations.room_for(record, runs, np.concatenate(staying))

    def reserve(
        self,
        session_number: int,
        lease_id: str,
        runs: list[Run],
        ttl_s: float,
        now_s: float,
        retention: Retention = NO_RETENTION,
    ) -> Parts[Reservation]:
        """Reserves slots for blocks that are neither ready nor being stored; fewer if room is
        short.

        The first call under a lease id decides which blocks the lease owns; later ones join it, and
        are refused if they name others. Blocks are reserved before sketches, which need their block
        ready, or reserved under this lease.

        ttl_s: 0 for the default.
        retention: only of the first call; for blocks that are not ready, once they are.
        """
        call = WriteCall(
            self.sessions.record(session_number), lease_id, runs, ttl_s, now_s, retention
        )
        checked = self._reservations.check(call)
        if self._reservations.lacks_room(checked):
            yield from self._reservations.make_room(checked)
            # Other calls may have run.
            self.sessions.record(session_number)
            checked = self._reservations.check(call)
        return self._reservations.reserve(checked)

    def release(self, session_number: int, lease_id: str) -> bool:
        """False if no engine has a lease with this id; raises FOREIGN_LEASE if only another has."""
        session = self.sessions.record(session_number)
        lease = self.leases.get(session.engine_id, lease_id)
        if lease is None:
            self.leases.check_not_foreign(session, lease_id)
            return False
        self.end_lease(lease)
        return True

    def end_lease(self, lease: Lease) -> None:
        """Ends a live lease, or lets it end with its running copies."""
        if isinstance(lease, ReadLease):
            self._read_leases.end(lease)
        else:
            self._reservations.end(lease)

    def used_bytes(self, key_space_id: int) -> int:
        return self.space.tenants.bytes_of(key_space_id)

    # Transfers

    def begin_load(
        self, session_number: int, transfer_id: str, lease_id: str, runs: list[LoadPositions]
    ) -> list[SlotRun]:
        """Slots to copy from. The caller copies and then calls `end_load`. `transfer_id` is
        unique in the session."""
        session = self.sessions.record(session_number)
        return self._loads.begin(session, transfer_id, lease_id, runs)

    def end_load(self, session_number: int, transfer_id: str, succeeded: bool) -> None:
        """`succeeded`: all bytes were written."""
        self._loads.end(session_number, transfer_id, succeeded)

    def begin_store(
        self,
        session_number: int,
        transfer_id: str,
        lease_id: str,
        runs: list[Run],
        shard_index: int,
        ttl_s: float,
        now_s: float,
        options: StoreOptions = NO_OPTIONS,
    ) -> Parts[list[SlotRun]]:
        """Reserves slots and returns those to copy to. The caller copies and then calls
        `end_store`. If `options` names a residency, its blocks are pinned: ready and verified ones
        at once, others when the store makes them ready.

        transfer_id: unique in the session.
        lease_id: the first call opens the write lease; other ranks' join it.
        ttl_s: 0 for the default.
        """

        def check() -> tuple[CheckedCall, StorePins | None]:
            session = self.sessions.record(session_number)
            residency_id = options.residency_id
            pins = self._store_pins(session, residency_id) if residency_id else None
            call = WriteCall(
                session,
                lease_id,
                runs,
                ttl_s,
                now_s,
                options.retention,
                0 if pins is None else pins.left_bytes(),
                options.is_private,
            )
            return self._stores.check(call, transfer_id, shard_index), pins

        checked, pins = check()
        if self._reservations.lacks_room(checked):
            yield from self._reservations.make_room(checked)
            # Other calls may have run.
            checked, pins = check()
        return self._stores.begin(checked, transfer_id, shard_index, pins)

    def _store_pins(self, session: SessionRecord, residency_id: str) -> StorePins | None:
        found = (pinner.of_store(session, residency_id) for pinner in self.pinners)
        return next((pins for pins in found if pins is not None), None)

    def end_store(
        self,
        session_number: int,
        transfer_id: str,
        succeeded: bool,
        now_s: float,
        sums: Sequence[Sums] = (),
    ) -> list[NDArray[np.uint8]]:
        """Makes blocks ready whose shards are all written now. Returns `BlockResult` values for
        each run. A sketch whose block is not ready by now is dropped as ABORTED.

        succeeded: all bytes were written. If False, the store's blocks are dropped as ABORTED.
        sums: an array for each run, or nothing.
        """
        return self._stores.end(session_number, transfer_id, succeeded, now_s, sums)

    def still_ready(
        self, key_space_id: int, runs: Sequence[Run], results: Sequence[NDArray[np.uint8]]
    ) -> tuple[NDArray[np.uint8], ...]:
        """Corrects results before they are sent: what was removed since becomes ABORTED."""
        now = []
        for run, told in zip(runs, results, strict=True):
            words = self.space.index.find(key_space_id, run.group_index, run.hashes)
            is_gone = (told <= BlockResult.PRESENT) & ~table.is_ready(words)
            now.append(np.where(is_gone, np.uint8(BlockResult.ABORTED), told))
        return tuple(now)

    # Long operations: generators that yield after a few milliseconds, for other calls. They skip
    # entries and leases that have changed since, unless a docstring says otherwise.

    def expire(self, now_s: float) -> Iterator[None]:
        """Ends leases and retentions that have expired, and the grace when it is over."""
        self.space.removal.now_s = now_s
        yield from self.retention_pins.expire(now_s)
        yield from self.grace.expire(now_s, self.is_read)
        for part in _portions(
            [lease for lease in self.leases.expired(now_s) if not lease.released]
        ):
            # A lease may have been renewed since the first part.
            ending = [lease for lease in part if lease.expires_s <= now_s]
            for lease in ending:
                lease.has_expired = True
            self.counters.expired_leases += self._end(ending)
            yield

    def make_room_ahead(self, now_s: float) -> Iterator[None]:
        """Evicts for the next stores (`Space.make_room_ahead`); ends when the server drains."""
        for _ in () if self.draining else self.space.make_room_ahead(now_s):
            yield
            if self.draining:
                return

    def end_leases(self, session_number: int) -> Iterator[None]:
        """In parts, before the session is closed."""
        for part in _portions(self.leases.of_session(session_number)):
            self._end(part)
            yield

    def end_pins(self, session_number: int) -> Iterator[None]:
        """Releases what `Pinner`s pin for a session about to be closed."""
        for pinner in self.pinners:
            yield from pinner.end(self.sessions.record(session_number))

    def use(
        self, session_number: int, hash_list: HashList, now_s: float, retention: Retention
    ) -> Iterator[None]:
        """`touch` in parts: the first records the use, the others pin."""
        self.touch(session_number, [hash_list], now_s, replace(retention, pin=False))
        for start in range(0, len(hash_list.hashes) if retention.pin else 0, BLOCKS):
            yield
            part = HashList(hash_list.group_index, hash_list.hashes[start : start + BLOCKS])
            if session_number in self.sessions:
                self._uses.hold(self.sessions.record(session_number), part, now_s + retention.ttl_s)

    def evict(
        self, key_space_id: int, group_index: int, hashes: table.Words
    ) -> Iterator[tuple[int, int]]:
        """Evicts named blocks that are ready and unpinned. Yields how many went and stayed."""
        for entries in self._named_parts(key_space_id, group_index, hashes):
            dropped = self.space.removal.evict(entries, Cause.OPERATOR)
            yield dropped, len(entries) - dropped

    def would_evict(
        self, key_space_id: int, group_index: int = 0, hashes: table.Words | None = None
    ) -> Iterator[tuple[int, int, int]]:
        """Predicts `evict`, or `evict_all` if `hashes` is None (`key_space_id` 0: of all).
        Yields (blocks that would go, that would stay, bytes that would become free)."""
        if hashes is not None:
            parts = self._named_parts(key_space_id, group_index, hashes)
        else:
            if key_space_id:
                self.key_space(key_space_id)
            parts = self._ready_blocks(key_space_id)
        for entries in parts:
            going = self.space.removal.going(entries)
            index, kept_too = self.space.index, self.space.books.sketches.of(going)
            # `kept_too`: sketches whose slots outlast their blocks, pinned or being written.
            kept_too = kept_too[~index.evictable(kept_too)]
            num_bytes = self.space.books.sketches.bytes_with(going).sum()
            num_bytes -= index.slot_bytes(kept_too).sum()
            yield len(going), len(entries) - len(going), int(num_bytes)

    def _named_parts(
        self, key_space_id: int, group_index: int, hashes: table.Words
    ) -> Iterator[Entries]:
        """Skips an entry that was removed meanwhile, even if another block has its number now."""
        index = self.space.index
        named = self._named(key_space_id, group_index, hashes)
        reuses = index.table.records[named, table.W_REUSES]
        for start in range(0, len(named), BLOCKS):
            entries = named[start : start + BLOCKS]
            same = index.table.records[entries, table.W_REUSES] == reuses[start : start + BLOCKS]
            yield entries[
                same & (index.table.records[entries, table.W_GROUP_STATE] >> np.uint32(16) != 0)
            ]

    def evict_all(self, key_space_id: int) -> Iterator[tuple[int, int]]:
        """`evict` for a key space (0: for all), perhaps also blocks stored meanwhile."""
        if key_space_id:
            self.key_space(key_space_id)
        for entries in self._ready_blocks(key_space_id):
            dropped = self.space.removal.evict(entries, Cause.OPERATOR)
            yield dropped, len(entries) - dropped

    def flush(self, key_space_id: int) -> Iterator[int]:
        """Removes all blocks that exist at the start, perhaps also later ones. Yields the ready
        ones removed. While it runs, no move makes a block of the key space ready."""
        record = self.catalog.record(key_space_id)
        self.catalog.records[key_space_id] = replace(record, num_flushes=record.num_flushes + 1)
        writing = [
            lease
            for lease in self.leases.all()
            if isinstance(lease, WriteLease) and lease.key_space_id == key_space_id
        ]
        with ExitStack() as while_flushed:
            for one in self.below:
                while_flushed.enter_context(one.stopped(key_space_id))
            # Before the scan, which then finds all blocks that became ready before.
            for part in _portions(writing):
                for lease in part:
                    if (
                        isinstance(lease, WriteLease)
                        and self.leases.get(lease.engine_id, lease.lease_id) is lease
                    ):
                        self._stores.abort(lease)
                yield 0
            for one in self.below:
                for _ in one.flush(key_space_id, SCANNED_ENTRIES):
                    yield 0
            for entries in self._ready_blocks(key_space_id):
                # Also pinned blocks; they can still be loaded.
                self.retention_pins.unpin(entries)
                self.space.removal.flush(entries)
                self.counters.flushed_blocks += len(entries)
                yield len(entries)

    def _named(self, key_space_id: int, group_index: int, hashes: table.Words) -> Entries:
        """Each once."""
        record, most = self.catalog.record(key_space_id), self.config.max_blocks_per_call
        check_named(record, [group_index], len(hashes), most, only_blocks=True)
        words = self.space.index.find(key_space_id, group_index, hashes)
        return np.unique(words[words != 0] & ~table.RESERVED_FLAG)

    def _ready_blocks(self, key_space_id: int) -> Iterator[Entries]:
        """All (key space 0: of all) that were ready at the start and are still, perhaps also
        later ones."""
        for start in range(0, self.space.index.num_numbers, SCANNED_ENTRIES):
            found = self.space.index.ready_blocks(key_space_id, start, start + SCANNED_ENTRIES)
            for at in range(0, max(1, len(found)), BLOCKS):
                yield (
                    self._still_ready(found[at : at + BLOCKS], key_space_id)
                    if at
                    else found[:BLOCKS]
                )

    def _still_ready(self, entries: Entries, key_space_id: int) -> Entries:
        records = self.space.index.table.records
        states, groups = (
            records[entries, table.W_GROUP_STATE] >> np.uint32(16),
            records[entries, table.W_GROUP_STATE] & np.uint32(0xFFFF),
        )
        mask = (states == table.STATE_READY) & (groups < MAX_GROUPS)
        if key_space_id:
            mask &= records[entries, table.W_KEY_SPACE] == key_space_id
        ready: Entries = entries[mask]
        return ready

    def _end(self, leases: Sequence[Lease]) -> int:
        """Leases ended here; the others had ended already."""
        live = [
            lease
            for lease in leases
            if not lease.released and self.leases.get(lease.engine_id, lease.lease_id) is lease
        ]
        for lease in live:
            self.end_lease(lease)
        return len(live)

    # Notices and checks

    def is_read(self, entries: Entries) -> BoolMask:
        """Entries that clients may read in the arena."""
        found = np.zeros(len(entries), np.bool_)
        for pinner in self.pinners:
            found |= pinner.is_read(entries)
        return found

    def condemned(self, entries: Entries) -> None:
        """Called when the bytes of these blocks contradict their checksums. If readers of an
        earlier server may have read one, revokes their words."""
        if self.grace.among(entries).any():
            self.grace.revoke()
        for pinner in self.pinners:
            pinner.condemned(entries)

    @property
    def has_effects(self) -> bool:
        return bool(self.space.removal.effects)

    def take_effects(self) -> list[EvictionNotice]:
        self.counters.evicted_blocks = self.space.removal.evicted_blocks
        return self.space.removal.take_effects()

    def check_invariants(self) -> None:
        """Linear in the index's capacity, as all methods of this name."""
        self.space.check_invariants()
        self.catalog.check_invariants([s.key_space_id for s in self.sessions.records.values()])
        for lease in self.leases.all():
            assert lease.num_copies == self.transfers.count(lease), "copies miscounted"
            assert not lease.released or lease.num_copies, "a released lease without copies is kept"
        self.pin_budget.check_invariants()
        self.retention_pins.check_invariants()
        self.leases.check_invariants()
        self.transfers.check_invariants()
        self._read_leases.check_invariants(_other_pins(self))
        self.grace.check_invariants()
        for pinner in self.pinners:
            pinner.check_invariants(self.sessions.records)
        self._reservations.check_invariants()
        for one in self.below:
            one.check_invariants()
        _check_kinds(self)


def _other_pins(core: CacheCore) -> Int64s:
    """By entry number, all pins but those of leases and retentions."""
    pins = np.zeros(core.space.index.capacity + 1, np.int64)
    np.add.at(pins, core.grace.entries, 1)
    for pinner in core.pinners:
        pins += pinner.pins()
    for one in core.below:
        pins += one.pins()
    return pins


def _check_kinds(core: CacheCore) -> None:
    for entry in core.space.sketches.ready():
        (key_space_id, _), (kind, group), _ = core.space.index.keys(
            np.append(entry, core.space.sketches.of(entry))
        )
        assert core.catalog.record(int(key_space_id)).block_group(int(kind)) == group, (
            "a sketch belongs to another group"
        )


def _portions(leases: Sequence[Lease]) -> Iterator[Sequence[Lease]]:
    """Parts whose leases end within milliseconds."""
    first, weight = 0, 0
    for at, lease in enumerate(leases):
        weight += LEASE_BLOCKS + num_listed(lease)
        if weight >= LEASED_BLOCKS or at == len(leases) - 1:
            yield leases[first : at + 1]
            first, weight = at + 1, 0
