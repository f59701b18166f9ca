"""`CacheCore`, the core of the cache: its sessions, key spaces (each is a model in a
configuration), leases and transfers, and the slots (places in the arena) that hold blocks.

Every method of `CacheCore` is a decision: it checks its arguments, changes the state and returns a
result. The core collects notices of evicted blocks until `take_effects` returns them. A call that
raises has changed nothing. No clock, no I/O, no locks: only the node's event loop calls the core,
and it passes the current time as `now_s`.

Always true: after a store has ended, the next lookup finds its blocks. A pinned block is never
evicted. If a pinned block is flushed (deleted with all blocks of its key space), the bytes in its
slot stay unchanged until its last pin is released. A lease that ends during a copy keeps its slots
until the copy ends. A block becomes ready only when every shard (the part of the block from one
rank) is written.

Terms: a run is a chain of consecutive blocks of one group, or of their sketches. A
sketch is a compact summary of a block's attention keys, for sparse attention.
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
from hotkv_server.cache.leases.leases import Lease, ReadLease, WriteLease, num_listed
from hotkv_server.cache.leases.reading import Loads, ReadLeases
from hotkv_server.cache.leases.writing import Reservations, Stores
from hotkv_server.cache.readers import ReaderMemory
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
    Reservation,
    Run,
    SessionRecord,
    SlotRun,
)
from hotkv_server.integrity.checksums import Sums

LEASED_BLOCKS = 1 << 16
"""When many leases are ended, `_portions` splits the work into parts, so that other calls can run
in between. A part is full once the sizes of its leases together reach this number. The size of a
lease is the number of blocks that it lists, plus LEASE_BLOCKS."""
LEASE_BLOCKS = 1 << 10
"""Time to end a lease that lists no blocks, as the number of listed blocks that take equally long
(see LEASED_BLOCKS)."""
BLOCKS = 1 << 12
"""Most blocks that one part of a long operation (an eviction, a flush, a use with pins) processes.
Other calls can run between two parts."""
SCANNED_ENTRIES = 1 << 17
"""Number of entry numbers (row numbers of the block table) that one part of a long operation
examines, for example to find all blocks of a key space."""


class CacheCore(CacheBooks):
    """A node's cache: its state (inherited from `CacheBooks`) and the operations on it. The module
    docstring lists the rules that all methods keep."""

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

    def __repr__(self) -> str:
        return (
            f"CacheCore({len(self.sessions)} sessions, {len(self.leases)} leases, "
            f"{len(self.transfers)} transfers, {self.grace!r}, {self.space!r})"
        )

    # Sessions and key spaces

    @property
    def draining(self) -> bool:
        """True while the server drains before it stops: it refuses new sessions (connections),
        leases and transfers."""
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
        """Opens a session (connection of an engine's scheduler or worker). Registers its key space
        (a model in a configuration) and its kinds of sketches if they are not registered
        yet.

        engine_id: id that all sessions of one engine share; they can use each other's leases.
        role: `scheduler`, `worker` or `tool`; only shown to operators.
        sketches: kinds of sketches (compact summaries of blocks' attention keys, for
            sparse attention) that the session will store or load.
        """
        self.space.removal.now_s = now_s
        return self.sessions.open(engine_id, role, key_space, now_s, sketches)

    def close_session(self, number: int, now_s: float) -> None:
        """Ends a session (connection of an engine's scheduler or worker), its leases and its pins.
        Does nothing if the session is unknown. The caller must end all transfers of the session
        first."""
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
        """The known key spaces (each is a model in a configuration), by number."""
        return self.catalog.records

    def key_space(self, number: int) -> KeySpace:
        """Returns the key space (a model in a configuration) with this number. Raises
        UNKNOWN_KEY_SPACE."""
        return self.catalog.record(number).key_space

    # Lookup and uses

    def lookup(self, key_space_id: int, groups: list[HashList]) -> list[BoolMask]:
        """Returns for each list of block hashes a mask of the blocks that are ready. The answer is
        only a hint: a lookup does not pin the blocks, and does not count as a use of them."""
        return self._uses.lookup(key_space_id, groups)

    def touch(
        self,
        session_number: int,
        groups: list[HashList],
        now_s: float,
        retention: Retention = NO_RETENTION,
    ) -> None:
        """Records that the engine used these blocks from its own device cache. The eviction policy
        then retains them longer than without this use. With the policy `Hotness`, the use counts as
        2^`retention.priority` uses. If `retention.pin` is set, also pins the blocks for
        `retention.ttl_s` seconds, until the budget for such pins (`CoreConfig.held_share`) is used
        up."""
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
        """Acquires a read lease: pins the named blocks that are ready. Pins only the first of them
        if the tenant's budget (`CoreConfig.unadmitted_share`) is too small. A lease counts against
        this budget until the first load under it begins. Repeating the call returns the same
        blocks. Raises DUPLICATE_ID if the engine already uses `lease_id` for another lease: a lease
        on other blocks, a write lease, or a lease that was released while its copy still runs.

        lease_id: id that the engine chooses for the lease.
        groups: the blocks, a list for each group.
        ttl_s: lifetime of the lease in seconds; 0 for the default.
        may_pin: False: a new lease pins no block, even if blocks are ready.
        """
        session = self.sessions.record(session_number)
        return self._read_leases.acquire(session, lease_id, groups, ttl_s, now_s, may_pin)

    def slot_offsets(self, session_number: int, lease_id: str) -> tuple[Int64s, ...]:
        """Returns the arena offsets of the blocks of a read lease, in bytes: an array for each
        group, in the order of the `acquire` call. The offset is -1 for a block that the lease does
        not pin, and for a block that must still be compared with its checksum. The
        offsets stay valid while the lease lasts."""
        return self._read_leases.slot_offsets(self.sessions.record(session_number), lease_id)

    def make_room_above(
        self, key_space_id: int, runs: Sequence[Run], beside: Sequence[HashList], now_s: float
    ) -> Iterator[None]:
        """Frees slots in host memory for blocks that are about to be promoted from a lower tier.
        The generator yields after each part of the work.

        runs: the blocks to promote. Blocks of `runs` that are in host memory already are not
            evicted.
        beside: lists of other blocks of the same prompts. If such a block is ready, it is not
            evicted either, and counts as used at `now_s`, because the prompts need it after the
            promotion.
        """
        record, staying = self.catalog.record(key_space_id), [np.empty(0, np.uint32)]
        for one in beside:
            if record.has(one.group_index):
                words = self.space.index.find(key_space_id, one.group_index, one.hashes)
                staying.append(words[table.is_ready(words)])
                if one.group_index < MAX_GROUPS:
                    self.space.policy.refresh(staying[-1], now_s)
        return self._reservations.room_for(key_space_id, runs, np.concatenate(staying))

    def reserve(
        self,
        session_number: int,
        lease_id: str,
        runs: list[Run],
        ttl_s: float,
        now_s: float,
        retention: Retention = NO_RETENTION,
    ) -> Parts[Reservation]:
        """Reserves slots (places in the arena) for the blocks of `runs`, except blocks that are
        ready or being stored already. Reserves fewer slots if not enough room can be made. The
        generator first evicts blocks to make room and yields after each part; it returns the
        reservation.

        The first call under a lease id decides which blocks the lease owns; later calls join the
        lease. A call that joins and names other blocks is refused. Blocks are reserved before
        sketches (compact summaries of attention keys), whatever the order of the runs. A
        sketch is reserved only if its block is ready or reserved under this lease.

        lease_id: id that the engine chooses for the write lease.
        ttl_s: lifetime of the lease in seconds; 0 for the default.
        retention: how long to retain the blocks; only the value of the first call under the lease
            id applies. The retention takes effect at once for blocks that are ready, and for other
            blocks when they become ready.
        """
        session = self.sessions.record(session_number)
        asked = yield from self._reservations.make_room(
            session, lease_id, runs, ttl_s, now_s, retention
        )
        session = self.sessions.record(session_number)
        return self._reservations.reserve(session, lease_id, asked, now_s, retention)

    def release(self, session_number: int, lease_id: str) -> bool:
        """Ends a lease before it expires. If copies are running under the lease, it ends when the
        copies end. Returns False if no engine has a lease with this id. Raises FOREIGN_LEASE if the
        session's engine has no lease with this id, but another engine has one."""
        session = self.sessions.record(session_number)
        lease = self.leases.get(session.engine_id, lease_id)
        if lease is None:
            self.leases.check_not_foreign(session, lease_id)
            return False
        self.end_lease(lease)
        return True

    def end_lease(self, lease: Lease) -> None:
        """Ends a live lease. If copies are running under the lease, it ends when the copies end."""
        if isinstance(lease, ReadLease):
            self._read_leases.end(lease)
        else:
            self._reservations.end(lease)

    def used_bytes(self, key_space_id: int) -> int:
        """Returns the bytes of host memory that the slots of a key space (a model in a
        configuration) use."""
        return self.space.tenants.bytes_of(key_space_id)

    # Transfers

    def begin_load(
        self, session_number: int, transfer_id: str, lease_id: str, runs: list[LoadPositions]
    ) -> list[SlotRun]:
        """Starts a load under a read lease. Returns the slots (places in the arena) to copy from,
        for each of `runs` in order. The caller copies the blocks and then calls `end_load`.

        transfer_id: id that the client chooses for the load, unique in the session.
        runs: the blocks, by their positions in the lease.
        """
        session = self.sessions.record(session_number)
        return self._loads.begin(session, transfer_id, lease_id, runs)

    def end_load(self, session_number: int, transfer_id: str, succeeded: bool) -> None:
        """Ends a load after its copy has finished. `succeeded`: True if the copy wrote all bytes;
        the blocks then count as loaded."""
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
        """Starts a store and reserves slots (places in the arena) for its blocks. Returns the slots
        to copy to. The generator first evicts blocks to make room and yields after each part. The
        caller copies the blocks and then calls `end_store`.

        If `options` names a residency (a request whose KV stays in host memory), the store's blocks
        are pinned for this residency. A block that is ready already, and need not be compared with
        its checksum, is pinned at once. A block that this store copies is pinned when
        the store makes it ready.

        transfer_id: id that the client chooses for the store, unique in the session.
        lease_id: id of the write lease. The first call with this id opens the lease; calls of other
            ranks with the same id join it.
        shard_index: number of the shard that this store writes.
        ttl_s: lifetime of the lease in seconds; 0 for the default.
        """
        session = self.sessions.record(session_number)
        pins = self._store_pins(session, options.residency_id)
        self._stores.check(session, transfer_id, shard_index)
        asked = yield from self._reservations.make_room(
            session,
            lease_id,
            runs,
            ttl_s,
            now_s,
            options.retention,
            promised_bytes=0 if pins is None else pins.left_bytes(),
        )
        session = self.sessions.record(session_number)
        pins = self._store_pins(session, options.residency_id)
        return self._stores.begin(
            session, transfer_id, lease_id, asked, shard_index, now_s, options, pins
        )

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
        """Ends a store after its copy has finished. Makes a block ready if all its shards (the
        parts of a block from the ranks) are written now. Returns `BlockResult` values, an array for
        each run (chain of consecutive blocks) of `begin_store`.

        A sketch (compact summary of a block's attention keys, for sparse attention) whose
        block is not ready by now is dropped; the sketch's result is ABORTED.

        succeeded: True if the copy wrote all bytes. If False, the blocks that it was to write are
            dropped; their result is ABORTED.
        sums: sums of the copied bytes, for checksums; an array for each run in the
            order of `begin_store`. May be empty.
        """
        return self._stores.end(session_number, transfer_id, succeeded, now_s, sums)

    def still_ready(
        self, key_space_id: int, runs: Sequence[Run], results: Sequence[NDArray[np.uint8]]
    ) -> tuple[NDArray[np.uint8], ...]:
        """Corrects the results of a store before they are sent to the engine: if a block with the
        result STORED or PRESENT was removed since the store ended, its result becomes ABORTED.
        Returns the corrected `results`, an array of `BlockResult` values for each run."""
        now = []
        for run, told in zip(runs, results, strict=True):
            words = self.space.index.find(key_space_id, run.group_index, run.hashes)
            is_gone = (told <= BlockResult.PRESENT) & ~table.is_ready(words)
            now.append(np.where(is_gone, np.uint8(BlockResult.ABORTED), told))
        return tuple(now)

    # Long operations. Each generator does a part of the work in each step and then yields; any
    # other method may be called between two steps. A part takes milliseconds, however large the
    # cache is. A generator skips entries and leases that have changed since its first step, unless
    # its docstring says otherwise.

    def expire(self, now_s: float) -> Iterator[None]:
        """Ends the leases and retention pins (which requests asked for) that have expired. When the
        grace after a restart (`CoreConfig.residency_grace_s`) is over, also unpins the blocks that
        `Grace` has pinned for clients of the earlier server. An expired lease with running copies
        ends when the copies end."""
        self.space.removal.now_s = now_s
        yield from self.retention_pins.expire(now_s)
        yield from self.grace.expire(now_s, self.is_read)
        for part in _portions(
            [lease for lease in self.leases.expired(now_s) if not lease.released]
        ):
            # A client may have renewed an expired lease since this generator's first part: skip
            # such leases.
            ending = [lease for lease in part if lease.expires_s <= now_s]
            for lease in ending:
                lease.has_expired = True
            self.counters.expired_leases += self._end(ending)
            yield

    def end_leases(self, session_number: int) -> Iterator[None]:
        """Ends all leases of a session (connection of an engine), part by part. The session is
        about to be closed and acquires no new leases."""
        for part in _portions(self.leases.of_session(session_number)):
            self._end(part)
            yield

    def end_pins(self, session_number: int) -> Iterator[None]:
        """Releases all pins that `Pinner` objects hold for a session, for example for its
        residencies (requests whose KV stays in host memory). The session is about to be closed and
        starts no new work."""
        for pinner in self.pinners:
            yield from pinner.end(self.sessions.record(session_number))

    def use(
        self, session_number: int, hash_list: HashList, now_s: float, retention: Retention
    ) -> Iterator[None]:
        """Does the work of `touch` for the blocks of `hash_list`, part by part. The first part
        records the use. If `retention` asks for pins, each later part pins some of the blocks."""
        self.touch(session_number, [hash_list], now_s, replace(retention, pin=False))
        for start in range(0, len(hash_list.hashes) if retention.pin else 0, BLOCKS):
            yield
            part = HashList(hash_list.group_index, hash_list.hashes[start : start + BLOCKS])
            if session_number in self.sessions:
                self._uses.hold(self.sessions.record(session_number), part, now_s + retention.ttl_s)

    def evict(
        self, key_space_id: int, group_index: int, hashes: table.Words
    ) -> Iterator[tuple[int, int]]:
        """Evicts, in parts, the named blocks that are ready and not pinned. Yields for each part
        how many blocks it evicted, and how many stayed because they were pinned or reserved."""
        for entries in self._named_parts(key_space_id, group_index, hashes):
            dropped = self.space.removal.evict(entries, Cause.OPERATOR)
            yield dropped, len(entries) - dropped

    def would_evict(
        self, key_space_id: int, group_index: int = 0, hashes: table.Words | None = None
    ) -> Iterator[tuple[int, int, int]]:
        """Predicts the result of `evict`, or of `evict_all` if `hashes` is None. Changes nothing.
        Works in parts. Yields for each part three numbers: blocks that would be evicted, blocks
        that would stay, and bytes that would become free.

        key_space_id: 0 for all key spaces, if `hashes` is None.
        hashes: hashes of the blocks to evict, in the group `group_index`, each a row of eight
            uint32 words. None: all blocks.
        """
        if hashes is not None:
            parts = self._named_parts(key_space_id, group_index, hashes)
        else:
            if key_space_id:
                self.key_space(key_space_id)
            parts = self._ready_blocks(key_space_id)
        for entries in parts:
            going = self.space.removal.going(entries)
            index, kept_too = self.space.index, self.space.books.sketches.of(going)
            # A block's eviction also evicts its sketch (compact summary of its keys).
            # `kept_too`: the sketches whose slots stay in use at first, because they are
            # pinned or being written.
            kept_too = kept_too[~index.evictable(kept_too)]
            num_bytes = self.space.books.sketches.bytes_with(going).sum()
            num_bytes -= index.slot_bytes(kept_too).sum()
            yield len(going), len(entries) - len(going), int(num_bytes)

    def _named_parts(
        self, key_space_id: int, group_index: int, hashes: table.Words
    ) -> Iterator[Entries]:
        """Yields the entries (records in the block table) of the named blocks part by part. Skips
        an entry that was removed from the index after the generator started, even if another block
        has the entry's number now."""
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
        """Evicts, in parts, the blocks of a key space (a model in a configuration; 0: of all
        key spaces) that are ready when the generator starts, and not pinned. Yields for each part
        how many blocks it evicted, and how many stayed because they were pinned.

        May also evict a block that is stored while the eviction runs.
        """
        if key_space_id:
            self.key_space(key_space_id)
        for entries in self._ready_blocks(key_space_id):
            dropped = self.space.removal.evict(entries, Cause.OPERATOR)
            yield dropped, len(entries) - dropped

    def flush(self, key_space_id: int) -> Iterator[int]:
        """Removes, in parts, all blocks of a key space (a model in a configuration) that exist
        when the generator starts. Yields for each part how many of the removed blocks were ready.

        After the last part, a lookup no longer finds these blocks. While the flush runs, no move
        between tiers makes any of them ready. The flush first aborts the write leases of the key
        space. A block that is reserved when the flush starts may still become ready before its
        lease is aborted; then it is removed like the other blocks. A block that is stored while the
        flush runs may be removed too.
        """
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
            # Abort all leases before the first block is removed. If a block becomes ready before
            # its lease is aborted, the scan below finds it.
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
                # Flush pinned blocks too. They can still be loaded under the leases that pin them.
                self.retention_pins.unpin(entries)
                self.space.removal.flush(entries)
                self.counters.flushed_blocks += len(entries)
                yield len(entries)

    def _named(self, key_space_id: int, group_index: int, hashes: table.Words) -> Entries:
        """Returns the entries (records in the block table) of the blocks with these hashes that are
        ready or reserved, each entry once."""
        record, most = self.catalog.record(key_space_id), self.config.max_blocks_per_call
        check_named(record, [group_index], len(hashes), most, only_blocks=True)
        words = self.space.index.find(key_space_id, group_index, hashes)
        return np.unique(words[words != 0] & ~table.RESERVED_FLAG)

    def _ready_blocks(self, key_space_id: int) -> Iterator[Entries]:
        """Yields the ready blocks of a key space (0: of all key spaces) in parts. The parts include
        every block that was ready when the generator started and was not removed since. They may
        include blocks that were stored later. Each block is ready when it is yielded."""
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
        """Ends the given leases, except those that have ended already. Returns how many it
        ended."""
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
        """Returns a mask of the entries (blocks or sketches) that clients may read directly
        in the arena. These are the entries that a `Pinner` pins, for example for a residency (a
        request whose KV stays in host memory)."""
        found = np.zeros(len(entries), np.bool_)
        for pinner in self.pinners:
            found |= pinner.is_read(entries)
        return found

    def condemned(self, entries: Entries) -> None:
        """Notifies the pinners (which pin blocks, for example for residencies) that the bytes of
        these blocks contradict their checksums. If clients of an earlier server may
        have read one of the blocks in the arena, also revokes the validity words of these clients
        (`ReaderWords`): numbers in shared memory by which the clients notice that they must discard
        what they read."""
        if self.grace.among(entries).any():
            self.grace.revoke()
        for pinner in self.pinners:
            pinner.condemned(entries)

    def take_effects(self) -> list[EvictionNotice]:
        """Returns the eviction notices that were added since the last call. The node sends them to
        the clients of the same key space."""
        self.counters.evicted_blocks = self.space.removal.evicted_blocks
        return self.space.removal.take_effects()

    def check_invariants(self) -> None:
        """Raises AssertionError if the cache's sessions, leases, slots (places in the arena), pins
        and entries (records in the block table) disagree. Takes time linear in the index's
        capacity."""
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
    """Returns, by entry number, how many pins each block or sketch (compact form of keys)
    has that are neither pins of leases nor retention pins (which requests asked for). These are the
    pins of `Grace`, of `Pinner` objects and of the tiers below host memory."""
    pins = np.zeros(core.space.index.capacity + 1, np.int64)
    np.add.at(pins, core.grace.entries, 1)
    for pinner in core.pinners:
        pins += pinner.pins()
    for one in core.below:
        pins += one.pins()
    return pins


def _check_kinds(core: CacheCore) -> None:
    """Raises AssertionError unless each sketch (compact summary of a block's attention
    keys, for sparse attention) belongs to the group of its block."""
    for entry in core.space.sketches.ready():
        (key_space_id, _), (kind, group), _ = core.space.index.keys(
            np.append(entry, core.space.sketches.of(entry))
        )
        assert core.catalog.record(int(key_space_id)).block_group(int(kind)) == group, (
            "a sketch belongs to another group"
        )


def _portions(leases: Sequence[Lease]) -> Iterator[Sequence[Lease]]:
    """Splits leases into parts, so that ending the leases of one part takes only milliseconds. All
    parts cause about the same work (LEASED_BLOCKS)."""
    first, weight = 0, 0
    for at, lease in enumerate(leases):
        weight += LEASE_BLOCKS + num_listed(lease)
        if weight >= LEASED_BLOCKS or at == len(leases) - 1:
            yield leases[first : at + 1]
            first, weight = at + 1, 0
