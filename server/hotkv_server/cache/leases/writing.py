"""`Reservations` opens and ends write leases, which reserve slots (places in the arena). `Stores`
begins and ends stores under write leases. Calls name blocks in runs: a run is a chain of
consecutive blocks of one group, or of their sketches (compact summaries of a block's
attention keys, for sparse attention)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.blocks import NO_OPTIONS, NO_RETENTION, BlockResult, Retention, StoreOptions
from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.table import RESERVED_FLAG
from hotkv_server.cache.arrays import first_occurrences, rows, without
from hotkv_server.cache.leases.books import CacheBooks, Uses
from hotkv_server.cache.leases.leases import (
    ReadLease,
    StoreTransfer,
    WriteLease,
    lifetime_s,
    write_weight,
)
from hotkv_server.cache.room.removal import Parts, finished
from hotkv_server.cache.room.slabs import aligned
from hotkv_server.cache.room.space import MAX_REFRESHED
from hotkv_server.cache.seams import StorePins
from hotkv_server.cache.sessions import check_named
from hotkv_server.cache.table.index import Keys, blocks_first
from hotkv_server.cache.values import (
    BoolMask,
    Cause,
    Entries,
    Int64s,
    KeySpaceRecord,
    Reservation,
    Run,
    SessionRecord,
    SlotRun,
)
from hotkv_server.integrity.checksums import Sums, sealed

# Reservations: a write lease owns the blocks that it reserves until each is published (made ready)
# or dropped.
#
# This section owns no state: `LeaseBook` has the write leases, the index the reserved entries.
# Always true: the first call under a lease id decides which blocks the lease owns, for all shards
# (the parts from each rank). Every reserved entry belongs to a single write lease, or to a single
# move of blocks between tiers. A block that is ready or reserved is not reserved again.


_END = object()
NO_SPACE, RESERVED = np.uint8(BlockResult.NO_SPACE), np.uint8(BlockResult.RESERVED)
"""`BlockResult` values as numpy numbers. With members of the enum, numpy would be slower, because
it searches every member for array attributes."""


@dataclass(frozen=True, slots=True)
class Named:
    """The entries of the blocks that a call names, at the time they were looked up.

    words: for each run (chain of consecutive blocks), an entry word per block: the entry number,
        with the high bit set while the entry is reserved; 0 for a block without an entry.
    staying: ready entries that must not be evicted to make room for the call: the named entries,
        the blocks of named sketches (compact summaries of blocks' attention keys), and the
        entries before them in their chains.
    """

    words: tuple[Entries, ...]
    staying: Entries


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A call of a client that stores blocks or reserves slots for them. `Reservations.make_room`
    has checked the call and made room for its blocks; `Reservations.reserve` executes it.

    runs: the blocks that the call names.
    listed: keys of the call's blocks (`BlockIndex.mixed`), run after run, without the keys of
        sketches (compact summaries of blocks' attention keys).
    named: the entries of the call's blocks. None if the call joins a lease, or if other calls may
        have run since the entries were looked up.
    ttl_s: lifetime of the call's lease.
    weight: bytes that the call's new lease counts against the memory limit of its owner, a tenant
        or engine (`write_weight`). Valid only if `named` is not None.
    """

    runs: list[Run]
    listed: Keys
    named: Named | None
    ttl_s: float
    weight: int


class Reservations:
    """Opens and ends write leases: makes room for the blocks to store, reserves their slots (places
    in the arena), and frees the slots that are not written."""

    def __init__(self, books: CacheBooks, uses: Uses) -> None:
        self._books = books
        self._uses = uses

    def make_room(
        self,
        session: SessionRecord,
        lease_id: str,
        runs: list[Run],
        ttl_s: float,
        now_s: float,
        retention: Retention,
        *,
        promised_bytes: int = 0,
    ) -> Parts[CheckedCall]:
        """Checks a client's call that stores or reserves the blocks of `runs`, then makes room for
        as many of these blocks as the owner may reserve. Yields after each part of the work, so
        that other calls can run in between. The caller calls `reserve` with the result right after
        the last part. Never evicts a block that `runs` names. Makes no room if the lease exists:
        its blocks are reserved already.

        Raises the errors that `reserve` would raise, before the first eviction.

        ttl_s: lifetime of the call's lease in seconds; 0 for the default.
        retention: how long to retain the blocks. Unless it is NO_RETENTION, the eviction policy may
            not refuse room to the blocks.
        promised_bytes: bytes that the call's residency may still pin; 0 without a residency.
        """
        record = self._books.catalog.record(session.key_space_id)
        ttl_s = lifetime_s(self._books.config, ttl_s)
        self._check_runs(record, runs)
        listed, named, weight = self._listed(session.key_space_id, runs), None, 0
        if self._joined(session, lease_id, listed) is None:
            weight = self._check_weight(session, record, runs)
            has_promise, owner = promised_bytes > 0, self._books.sessions.owner(session)
            named = yield from self.room_for(
                session.key_space_id,
                runs,
                has_promise=has_promise,
                keep_at_s=_keep_at_s(retention, has_promise, now_s),
                most_bytes=self._books.leases.unwritten_room(owner, promised_bytes)[0],
            )
        return CheckedCall(runs, listed, named, ttl_s, weight)

    def room_for(
        self,
        key_space_id: int,
        runs: Sequence[Run],
        beside: Entries | None = None,
        *,
        has_promise: bool = False,
        keep_at_s: float | None = None,
        most_bytes: int | None = None,
        first: int = 0,
    ) -> Parts[Named | None]:
        """Makes room for the blocks of `runs` that have no entry (record in the block table);
        yields after each part of the work. Returns the entries of the named blocks; None if other
        calls may have run between two parts, or if the key space lacks a group of `runs`.

        beside: ready entries that must not be evicted, in addition to the blocks of `runs`.
        has_promise: True if the room was reserved for a residency (a request whose KV stays in host
            memory).
        keep_at_s: the current time, if the policy may refuse to evict entries that it expects to be
            used soon; None if it may not.
        most_bytes: most bytes to make room for; None: no limit.
        first: number of the first of `runs` to make room for.
        """
        record, space = self._books.catalog.record(key_space_id), self._books.space
        if not all(record.has(run.group_index) for run in runs):
            return None
        named = self._named(record, runs)
        wanted: dict[tuple[int, int], int] = {}
        for run, words in zip(runs[first:], named.words[first:], strict=True):
            kind = (record.shape(run.group_index).slot_bytes, int(run.group_index >= MAX_GROUPS))
            wanted[kind] = wanted.get(kind, 0) + int(np.count_nonzero(words == 0))
        index, staying, had_parts = space.index, named.staying, False
        if beside is not None:
            staying = np.concatenate((staying, beside))
        beside_bytes = 0
        for (slot_bytes, is_kind), missing in wanted.items():
            count = missing
            if most_bytes is not None:
                count = min(count, max(0, most_bytes - beside_bytes) // aligned(slot_bytes))
            if not space.needs_room(slot_bytes, count):
                continue
            making = space.make_room(
                key_space_id,
                is_kind * MAX_GROUPS,
                slot_bytes,
                count,
                has_promise=has_promise,
                keep_at_s=keep_at_s,
                beside_bytes=beside_bytes,
            )
            beside_bytes += count * aligned(slot_bytes)
            while True:
                # Pin the entries of `staying`, so that this part does not evict them. Since the
                # last part, other calls may have removed such an entry, and reused its number for
                # another block. Pinning that block does no harm: at worst this part does not evict
                # it.
                index.pin(staying, 1)
                has_more = next(making, _END) is not _END
                index.pin(staying, -1)
                # If another call has removed one of these entries while it was pinned here, the
                # entry has become detached: lookups no longer find it, but it has kept its slot.
                # Free such slots now.
                space.removal.reap(staying)
                if not has_more:
                    break
                had_parts = True
                yield
        return None if had_parts else named

    def _named(self, record: KeySpaceRecord, runs: Sequence[Run]) -> Named:
        """Looks up the entries (records in the block table) of the blocks of these runs (chains of
        consecutive blocks)."""
        space = self._books.space
        listed: list[Entries] = []
        kept: list[Entries] = []
        for run in runs:
            words = space.index.find(record.number, run.group_index, run.hashes)
            listed.append(words)
            block_group = record.block_group(run.group_index)
            if run.group_index >= MAX_GROUPS:
                blocks = space.index.find(record.number, block_group, run.hashes)
                kept.append(blocks[table.is_ready(blocks)])
            kept.append(
                space.chains.ending_with(record.number, block_group, run.parent, MAX_REFRESHED)
            )
            kept.append(words[table.is_ready(words)])
        return Named(tuple(listed), np.concatenate(kept) if kept else np.empty(0, np.uint32))

    def reserve(
        self,
        session: SessionRecord,
        lease_id: str,
        asked: CheckedCall,
        now_s: float,
        retention: Retention = NO_RETENTION,
        *,
        promised_bytes: int = 0,
        is_private: bool = False,
    ) -> Reservation:
        """Reserves slots (places in the arena) for the blocks of a call that `make_room` has
        checked, as far as there is room. The caller calls this method right after the last part of
        `make_room`.

        asked: the result of `make_room`.
        retention: how long to retain the blocks; ignored if the call joins a lease.
        promised_bytes: bytes that the call's residency may still pin; 0 without a residency.
        is_private: True if the blocks are copied to no tier (`StoreOptions.is_private`).
        """
        books, runs = self._books, asked.runs
        record, index = books.catalog.record(session.key_space_id), books.space.index
        named = asked.named
        lease = None if named is not None else self._joined(session, lease_id, asked.listed)
        if lease is None:
            lease = self._new_lease(session, lease_id, record, asked, now_s, retention)
            room = books.leases.unwritten_room(lease.owner, promised_bytes)
            most_bytes, lease.has_promise = room
            named = named or self._named(record, runs)
            index.pin(named.staying, 1)
        groups = [run.group_index for run in runs]
        answers: dict[int, tuple[NDArray[np.uint8], Entries]] = {}
        reserved, full, seen = [lease.entries], set[int](), set[int]()
        for at in blocks_first(groups):
            if named is not None and groups[at] not in seen:
                words = named.words[at]
            else:
                words = index.find(record.number, groups[at], runs[at].hashes)
            results = self._results(lease, groups[at], words, now_s, is_private=is_private)
            if named is not None:
                reserved.append(
                    self._insert(
                        lease,
                        record,
                        runs,
                        at,
                        words,
                        results,
                        now_s,
                        most_bytes,
                        full,
                        has_promise=promised_bytes > 0,
                    )
                )
            answers[at] = results, words
            seen.add(groups[at])
        if named is not None:
            lease.entries = np.concatenate(reserved)
            index.pin(named.staying, -1)
            if len(lease.entries) or record.key_space.num_shards > 1:
                books.leases.add(lease)
        return Reservation(
            tuple(answers[at][0] for at in range(len(runs))),
            tuple(answers[at][1] for at in range(len(runs))),
            max(0.0, lease.expires_s - now_s),
        )

    def _check_runs(self, record: KeySpaceRecord, runs: list[Run]) -> None:
        """Raises HotKVError if a call may not name these runs (chains of consecutive blocks): an
        unknown group, too many blocks, or an invalid depth (number of blocks before the run)."""
        check_named(
            record,
            [run.group_index for run in runs],
            sum(len(run.hashes) for run in runs),
            self._books.config.max_blocks_per_call,
        )
        if any(run.depth < 0 or run.depth + len(run.hashes) >= 1 << 31 for run in runs):
            raise invalid(
                "runs.depth is negative or too large; it counts blocks from the start of the prompt"
            )

    def _joined(self, session: SessionRecord, lease_id: str, listed: Keys) -> WriteLease | None:
        """Returns the lease that a call joins; None if the call is the first with this lease id.
        Raises HotKVError if the call may not open or join the lease. `listed`: keys of the blocks
        that the call names; the first call under the lease must have named all of them."""
        books = self._books
        lease = books.leases.of_call(session, lease_id)
        if lease is None:
            books.sessions.check_takes_new("grants no new leases")
            books.leases.check_count(books.sessions.owner(session))
            return None
        if isinstance(lease, ReadLease):
            raise HotKVError(
                Reason.DUPLICATE_ID, f"lease_id {lease_id!r} is a read lease; choose a new id"
            )
        if not lease.names(listed):
            raise HotKVError(
                Reason.DUPLICATE_ID,
                f"lease_id {lease_id!r} is in use for other blocks; choose a new id",
            )
        return lease

    def _listed(self, key_space_id: int, runs: list[Run]) -> Keys:
        """Returns the keys (uint64) by which the index finds the blocks of these runs (chains of
        consecutive blocks), run after run. A key is the block's hash, mixed with its key space and
        group (`BlockIndex.mixed_hashes`). Skips runs of sketches (compact summaries of
        blocks' attention keys, for sparse attention)."""
        index = self._books.space.index
        keys = [
            index.mixed_hashes(key_space_id, run.group_index, run.hashes)
            for run in runs
            if run.group_index < MAX_GROUPS
        ]
        return np.concatenate([np.empty(0, np.uint64), *keys])

    def _new_lease(
        self,
        session: SessionRecord,
        lease_id: str,
        record: KeySpaceRecord,
        asked: CheckedCall,
        now_s: float,
        retention: Retention,
    ) -> WriteLease:
        """Returns a new write lease for the checked call `asked`. The caller adds the lease to the
        `LeaseBook`. Raises OVERLOADED if the leases of the same owner (tenant or engine) would then
        use too much memory."""
        weight = asked.weight
        if asked.named is None:
            weight = self._check_weight(session, record, asked.runs)
        return WriteLease(
            session.engine_id,
            self._books.sessions.owner(session),
            lease_id,
            self._books.leases.next_number(),
            session.number,
            session.key_space_id,
            now_s + asked.ttl_s,
            asked.listed,
            weight,
            retention,
        )

    def unwritten_bytes(self, lease: WriteLease) -> int:
        """Returns the bytes of the slots that the lease still reserves."""
        return int(self._books.space.index.slot_bytes(lease.entries).sum())

    def _check_weight(
        self, session: SessionRecord, record: KeySpaceRecord, runs: Sequence[Run]
    ) -> int:
        """Returns the bytes of memory that a new lease counts against the limit of its owner
        (tenant or engine). The lease is on the blocks and sketches (compact summaries of
        blocks' attention keys) of `runs`. Raises OVERLOADED if the owner's leases would then use
        too much memory."""
        weight = write_weight(sum(len(run.hashes) for run in runs), record.key_space.num_shards)
        self._books.leases.check_room(self._books.sessions.owner(session), "runs", weight)
        return weight

    def _results(
        self,
        lease: WriteLease,
        group_index: int,
        words: Entries,
        now_s: float,
        *,
        is_private: bool,
    ) -> NDArray[np.uint8]:
        """Returns the BlockResult values of a run (chain of consecutive blocks). A block is PRESENT
        if it is ready, RESERVED if it is reserved under this lease, IN_FLIGHT if it is reserved
        under another lease, and NO_SPACE if it has no entry (record in the block table). Records a
        use of the ready blocks, and offers them to the tiers unless `is_private` is True. Clears
        RESERVED_FLAG in `words` (the run's entry words), so that the words are plain entry
        numbers."""
        results = np.full(len(words), NO_SPACE, np.uint8)
        if not words.any():
            return results
        ready, reserved = table.is_ready(words), words >= RESERVED_FLAG
        words &= ~RESERVED_FLAG
        mine = reserved & (self._books.space.index.owners(words) == lease.number)
        results[ready], results[reserved], results[mine] = (
            BlockResult.PRESENT,
            BlockResult.IN_FLIGHT,
            BlockResult.RESERVED,
        )
        if group_index < MAX_GROUPS:
            present, counters = words[ready], self._books.counters
            counters.in_flight_blocks += int((reserved & ~mine).sum())
            counters.present_blocks += len(present)
            if len(present):
                self._uses.note(present, lease.retention, now_s, is_private=is_private)
        return results

    def _insert(
        self,
        lease: WriteLease,
        record: KeySpaceRecord,
        runs: list[Run],
        at: int,
        words: Entries,
        results: NDArray[np.uint8],
        now_s: float,
        most_bytes: int,
        full: set[int],
        *,
        has_promise: bool,
    ) -> Entries:
        """Reserves slots for the blocks of the run `runs[at]` that have no entry, as far as there
        is room and the lease stays within `most_bytes`. Writes the new entry numbers into `words`
        and the outcome into `results`. Returns the new entries.

        has_promise: True if the room was reserved for a residency (a request whose KV stays in host
            memory).
        full: slot sizes for which this call could make no more room; this method adds to them.
        """
        run, space = runs[at], self._books.space
        absent = np.flatnonzero(words == 0)
        if not len(absent):
            return absent.astype(np.uint32)
        wanted = absent[first_occurrences(rows(run.hashes, absent))]
        if len(wanted) < len(absent):
            # A hash that the run lists twice is reserved once; the result at its second position is
            # IN_FLIGHT.
            results[absent] = BlockResult.IN_FLIGHT
            results[wanted] = BlockResult.NO_SPACE
        is_block = run.group_index < MAX_GROUPS
        if not is_block:
            wanted = self._representable(lease, record, run, wanted, results)
        slot_bytes = record.shape(run.group_index).slot_bytes
        size, left_bytes = aligned(slot_bytes), most_bytes - lease.unwritten_bytes
        may_have = wanted[: max(0, left_bytes) // size]
        has_room = slot_bytes in full or space.has_room(slot_bytes, len(may_have))
        if len(runs) > 1 and not has_room:
            # Room may be missing, because `make_room` looks at one run after the other and may have
            # counted the same free slab (piece of the arena) or entry number for several runs: make
            # more room.
            making = self.room_for(
                record.number,
                runs,
                has_promise=has_promise,
                keep_at_s=_keep_at_s(lease.retention, has_promise, now_s),
                most_bytes=left_bytes,
                # Blocks of earlier runs that got no slot would use up `most_bytes`.
                first=at,
            )
            finished(making)
            if not space.has_room(slot_bytes, len(may_have)):
                full.add(slot_bytes)
        entries = space.insert(
            record.number,
            run.group_index,
            rows(run.hashes, may_have),
            slot_bytes,
            run.depth + may_have,
            lease.number,
            has_promise=has_promise,
        )
        lease.unwritten_bytes += len(entries) * size
        words[wanted[: len(entries)]] = entries
        results[wanted[: len(entries)]] = BlockResult.RESERVED
        if is_block:
            space.chains.link(record.number, run.group_index, words, run.parent)
            self._books.counters.no_space_blocks += len(wanted) - len(entries)
            # The policy learns nothing of blocks that the owner may not reserve: a client could
            # name any number of them.
            left = may_have[len(entries) :]
            if len(left):
                space.decline(
                    record.number,
                    run.group_index,
                    rows(run.hashes, left),
                    run.depth + int(left[0]),
                    now_s,
                    lease.retention,
                )
        return entries

    def _representable(
        self,
        lease: WriteLease,
        record: KeySpaceRecord,
        run: Run,
        wanted: Int64s,
        results: NDArray[np.uint8],
    ) -> Int64s:
        """Returns the positions of the blocks whose sketches (compact summaries of blocks'
        attention keys, for sparse attention) may be reserved. A sketch may be reserved if
        its block is ready, or reserved under this lease. If its block is reserved under another
        lease, sets the `results` at this position to IN_FLIGHT. `wanted`: the positions to examine
        in the run (chain of consecutive blocks)."""
        index = self._books.space.index
        words = index.find(
            lease.key_space_id, record.block_group(run.group_index), run.hashes[wanted]
        )
        ready, reserved = table.is_ready(words), words >= RESERVED_FLAG
        mine = reserved & (index.owners(words & ~RESERVED_FLAG) == lease.number)
        results[wanted[reserved & ~mine]] = BlockResult.IN_FLIGHT
        representable: Int64s = wanted[ready | mine]
        return representable

    def drop(self, entries: Entries, cause: Cause = Cause.NONE) -> None:
        """Removes reserved entries (records in the block table) that will not be written, and frees
        their slots (places in the arena). `cause`: remembered as the reason (`Removal.causes`)
        unless it is NONE."""
        if not len(entries):
            return
        space = self._books.space
        self._books.counters.aborted_blocks += int((~space.sketches.among(entries)).sum())
        space.removal.drop(entries, cause)

    def end(self, lease: WriteLease) -> None:
        """Ends a live lease and drops its entries (records in the block table) that are still
        reserved. If copies are running under the lease, it ends when the copies end."""
        lease.released = True
        if lease.num_copies:
            return
        self.drop(lease.entries, Cause.EXPIRY if lease.has_expired else Cause.NONE)
        self._books.leases.remove(lease)

    def check_invariants(self) -> None:
        """Raises AssertionError if the reserved entries (table records of blocks that are not ready
        yet) disagree with their owners: write leases, and moves of blocks between tiers. Takes time
        linear in the capacity."""
        index = self._books.space.index
        owned = [np.empty(0, np.uint32), *(one.reserved() for one in self._books.below)]
        for lease in self._books.leases.all():
            if isinstance(lease, WriteLease):
                owned.append(lease.entries)
                assert np.all(index.owners(lease.entries) == lease.number), (
                    "a write lease owns an entry that is not its own"
                )
                assert lease.unwritten_bytes == self.unwritten_bytes(lease), (
                    "unwritten bytes of a write lease miscounted"
                )
        reserved = np.flatnonzero(index.states() == table.STATE_RESERVED)
        assert np.array_equal(np.sort(np.concatenate(owned)), reserved), (
            "reserved entries and write leases disagree"
        )


def _keep_at_s(retention: Retention, has_promise: bool, now_s: float) -> float | None:
    """Returns the current time if the eviction policy may refuse room to the blocks of a call, so
    that older blocks stay. Returns None if the policy must make room, because the call has reserved
    room (`has_promise`) or asks to retain its blocks. The result is the argument `keep_at_s` of the
    policy."""
    return None if has_promise or retention != NO_RETENTION else now_s


# Stores copy blocks into slots that a write lease has reserved. A block is published (made ready)
# when all its shards (the parts from each rank) are written.
#
# This section owns no state: `TransferBook` has the stores, `LeaseBook` the leases. Always true: a
# block becomes ready only when every shard is written. A sketch (compact form of a block's
# keys) becomes ready only if its block is ready by then. No two copies write the same shard of the
# same block. An aborted entry keeps its slot until no copy can touch it.


ABORTED_MARK = 1 << 31
"""A bit that marks a reserved entry (record of a block that is being stored) as aborted: it will
never become ready. It is set in the entry's mask of written shards (the ranks' parts of a block).
"""


class Stores:
    """Begins and ends stores, and publishes the blocks that they complete."""

    def __init__(self, books: CacheBooks, reservations: Reservations, uses: Uses) -> None:
        self._books = books
        self._reservations = reservations
        self._uses = uses

    def check(self, session: SessionRecord, transfer_id: str, shard_index: int) -> None:
        """Raises HotKVError if the session may not start this store: the transfer id may not be
        used (`TransferBook.check_new`), the key space has no shard (a rank's part of each block)
        with this number, or the server drains (starts no new transfers)."""
        books = self._books
        books.transfers.check_new(session.number, transfer_id, books.sessions.owner(session))
        num_shards = books.catalog.record(session.key_space_id).key_space.num_shards
        if not 0 <= shard_index < num_shards:
            raise invalid(f"shard_index is {shard_index}; this key space has {num_shards} shards")
        books.sessions.check_takes_new("starts no new transfers")

    def begin(
        self,
        session: SessionRecord,
        transfer_id: str,
        lease_id: str,
        asked: CheckedCall,
        shard_index: int,
        now_s: float,
        options: StoreOptions = NO_OPTIONS,
        pins: StorePins | None = None,
    ) -> list[SlotRun]:
        """Starts a store: reserves slots (places in the arena) for its blocks, for which
        `Reservations.make_room` has made room. Returns the slots to copy to.

        asked: the result of `Reservations.make_room`: the checked call.
        shard_index: number of the shard (a rank's part of each block) that the store writes.
        pins: object that pins the store's blocks for a residency (a request whose KV stays in host
            memory); None if the store names no residency.
        """
        if asked.named is None:
            # Repeat the checks of the call: `make_room` ran in parts, and other calls may have run
            # between two parts (`asked.named` is then None).
            self.check(session, transfer_id, shard_index)
        books, owner, runs = self._books, self._books.sessions.owner(session), asked.runs
        joined = asked.named is None and books.leases.get(session.engine_id, lease_id) is not None
        reservation = self._reservations.reserve(
            session,
            lease_id,
            asked,
            now_s,
            options.retention,
            promised_bytes=0 if pins is None else pins.left_bytes(),
            is_private=options.is_private,
        )
        lease = books.leases.get(session.engine_id, lease_id)
        writes = lease if isinstance(lease, WriteLease) else None
        transfer = StoreTransfer(
            session.number, owner, transfer_id, writes, shard_index, pins, options.is_private
        )
        busy = (
            books.transfers.entries_being_written(writes, shard_index)
            if joined
            else np.empty(0, np.uint32)
        )
        reserved = [np.flatnonzero(results == RESERVED) for results in reservation.results]
        if joined:
            for words, at, results in zip(
                reservation.entries, reserved, reservation.results, strict=True
            ):
                self._skip_done(shard_index, words, at, results)
        if joined or len(runs) > 1:
            _skip_busy(busy, reservation, reserved)
        slots = []
        for run, results, words in zip(runs, reservation.results, reservation.entries, strict=True):
            positions = np.flatnonzero(results == RESERVED)
            entries = words[positions]
            transfer.add_run(run.group_index, entries, positions, results, run.depth)
            offsets = books.space.index.offsets(entries)
            slots.append(SlotRun(run.group_index, positions, offsets, entries))
        if writes is not None:
            writes.num_copies += 1
        books.transfers.add(transfer)
        if pins is not None:
            self._pin_present(pins, session.key_space_id, runs, reservation)
        return slots

    def _pin_present(
        self, pins: StorePins, key_space_id: int, runs: list[Run], reservation: Reservation
    ) -> None:
        """Pins the named blocks that are ready already for the residency of a store. (A residency
        is a request whose KV stays in host memory.) Skips blocks that must still be compared with
        their checksum.

        pins: the object that pins blocks for the residency.
        reservation: the answer of `Reservations.reserve` for `runs`, which says which blocks are
            ready.
        """
        index = self._books.space.index
        for run, results in zip(runs, reservation.results, strict=True):
            present = np.flatnonzero(results == BlockResult.PRESENT)
            if not len(present):
                continue
            # Look the blocks up again: reserving a later run may have evicted some of them.
            words = index.find(key_space_id, run.group_index, run.hashes[present])
            good = table.is_ready(words)
            good[good] = ~index.unverified[words[good]]
            positions = run.depth + present[good]
            pins.pin(run.group_index, positions, words[good])
            pins.pin_linked(run.group_index, positions)

    def _skip_done(
        self, shard_index: int, words: Entries, positions: Int64s, results: NDArray[np.uint8]
    ) -> None:
        """Sets the `results` of reserved blocks that this store need not copy: ABORTED if the
        block's entry is aborted, WRITTEN if the store's shard (a rank's part of a block) is written
        already.

        words: the entry number of each block of the run (chain of consecutive blocks).
        positions: positions in the run of the reserved blocks.
        """
        masks = self._books.space.index.mark_written(words[positions], 0)
        results[positions[masks & ABORTED_MARK != 0]] = BlockResult.ABORTED
        results[positions[masks & (1 << shard_index) != 0]] = BlockResult.WRITTEN

    def end(
        self,
        session_number: int,
        transfer_id: str,
        succeeded: bool,
        now_s: float,
        sums: Sequence[Sums] = (),
    ) -> list[NDArray[np.uint8]]:
        """Ends a store after its copy has finished. Publishes the blocks that now have every shard
        (a rank's part) written, then their sketches (compact summaries of attention keys).
        Returns `BlockResult` values, an array for each run (chain of consecutive blocks) of the
        call.

        succeeded: True if the copy wrote all bytes. If False, the blocks that it was to write are
            dropped.
        sums: sums of the copied bytes, for checksums; an array for each run. May be
            empty.
        """
        transfer = self._books.transfers.pop(session_number, transfer_id)
        assert isinstance(transfer, StoreTransfer), "a load ended as a store"
        lease = transfer.lease
        if lease is None:
            return transfer.results
        lease.num_copies -= 1
        whole = self._whole(lease)
        sums, published = sums if succeeded else (), [lease.entries[:0]]
        if sums and whole > 1:
            lease.add_sums(np.concatenate(transfer.entries), np.concatenate(sums))
        for at in blocks_first(transfer.groups):
            written = sums[at] if sums else None
            published.append(self._end_run(transfer, lease, at, succeeded, whole, written, now_s))
        lease.entries = without(lease.entries, np.concatenate(published))
        self._books.leases.settle(lease, self._reservations.unwritten_bytes(lease))
        lease.shards_seen |= 1 << transfer.shard_index
        self._settle(lease, whole)
        return transfer.results

    def _end_run(
        self,
        transfer: StoreTransfer,
        lease: WriteLease,
        at: int,
        succeeded: bool,
        whole: int,
        sums: Sums | None,
        now_s: float,
    ) -> Entries:
        """Ends the run (chain of consecutive blocks) at position `at` of a store, and sets the
        run's results.

        If the copy succeeded, marks this store's shard (a rank's part) of each block as written.
        Publishes the blocks whose shards are all written now, and offers them to the tiers unless
        the store is private. Pins them if the store names a residency (a request whose KV stays in
        host memory). If the copy failed, marks the entries (records in the block table) as aborted.
        Returns the published entries.

        whole: the mask of all shards: bit n stands for shard n.
        sums: sums of the copied bytes of each block of the run, for checksums; None
            if the copy failed or no sums were computed.
        """
        index = self._books.space.index
        entries, positions, results = (
            transfer.entries[at],
            transfer.positions[at],
            transfer.results[at],
        )
        mark = 1 << transfer.shard_index if succeeded else ABORTED_MARK
        masks = index.mark_written(entries, mark)
        complete = masks == whole
        done = entries[complete]
        total = lease.sums_of(done) if sums is None or whole > 1 else sums[complete]
        keys = index.mixed(done)
        checks = sealed(total, keys, self._books.config.check_stride)
        if transfer.groups[at] < MAX_GROUPS:
            self._publish_blocks(lease, done, keys, checks, now_s)
            for one in self._books.below if not transfer.is_private else ():
                one.offer_stored(done)
            if transfer.pins is not None:
                transfer.pins.pin(
                    transfer.groups[at], transfer.depths[at] + positions[complete], done
                )
        else:
            kept = self._publish_sketches(lease, done, checks)
            if transfer.pins is not None:
                record = self._books.catalog.record(lease.key_space_id)
                transfer.pins.pin_linked(
                    record.block_group(transfer.groups[at]),
                    transfer.depths[at] + positions[complete][kept],
                )
            masks[complete] |= np.where(kept, np.uint32(0), np.uint32(ABORTED_MARK))
            complete[complete] = kept
        results[positions] = BlockResult.STORED
        if not complete.all():
            results[positions[~complete]] = (
                BlockResult.WRITTEN if succeeded else BlockResult.ABORTED
            )
            results[positions[masks & ABORTED_MARK != 0]] = BlockResult.ABORTED
        published: Entries = entries[complete]
        return published

    def _publish_blocks(
        self, lease: WriteLease, entries: Entries, keys: Sums, checks: Sums, now_s: float
    ) -> None:
        """Makes blocks ready: blocks whose shards (the ranks' parts of a block) are all written.
        `keys`: the entries' keys (`BlockIndex.mixed`). `checks`: their checksums."""
        self._books.space.publish(entries, now_s, lease.retention, checks, keys)
        if len(entries):
            self._books.space.refresh_ancestors(int(entries[0]), now_s)
        self._uses.retain(entries, lease.retention, now_s)
        self._books.counters.stored_blocks += len(entries)

    def _publish_sketches(self, lease: WriteLease, entries: Entries, checks: Sums) -> BoolMask:
        """Makes those sketches (compact summaries of attention keys) ready whose blocks are
        ready, and marks the other sketches as aborted. All given sketches are of one
        kind. `checks`: their checksums. Returns a mask of the entries (records in
        the block table) that became ready."""
        if not len(entries):
            return np.empty(0, np.bool_)
        space = self._books.space
        _, groups, hashes = space.index.keys(entries)
        record = self._books.catalog.record(lease.key_space_id)
        blocks = space.index.find(lease.key_space_id, record.block_group(int(groups[0])), hashes)
        has_block = table.is_ready(blocks)
        space.index.mark_written(entries[~has_block], ABORTED_MARK)
        space.sketches.publish(entries[has_block], blocks[has_block], checks[has_block])
        self._books.counters.stored_sketches += int(has_block.sum())
        return has_block

    def abort(self, lease: WriteLease) -> None:
        """Marks all entries (records in the block table) that a lease still reserves as aborted, so
        that they never become ready. They are dropped once no copy runs under the lease."""
        self._books.space.index.mark_written(lease.entries, ABORTED_MARK)
        self._settle(lease, self._whole(lease))

    def _settle(self, lease: WriteLease, whole: int) -> None:
        """Drops the aborted entries (records in the block table) of a lease. Then ends the lease in
        two cases: it was released; or it has no reserved entry left, and a store of every shard (a
        rank's part of each block) has ended. Does nothing while a copy runs under the lease.
        `whole`: the mask of all shards (`_whole`)."""
        if lease.num_copies:
            return
        if len(lease.entries):
            marks = self._books.space.index.mark_written(lease.entries, 0)
            aborted = lease.entries[marks & ABORTED_MARK != 0]
            self._reservations.drop(aborted)
            lease.entries = without(lease.entries, aborted)
            self._books.leases.settle(lease, self._reservations.unwritten_bytes(lease))
        if lease.released or (lease.shards_seen == whole and not len(lease.entries)):
            self._reservations.end(lease)

    def _whole(self, lease: WriteLease) -> int:
        """Returns the mask of all shards (the ranks' parts) of the lease's blocks: bit n stands for
        shard n."""
        return (1 << self._books.catalog.record(lease.key_space_id).key_space.num_shards) - 1


def _skip_busy(busy: Entries, reservation: Reservation, reserved: list[Int64s]) -> None:
    """Sets the result IN_FLIGHT for blocks that a store must not write: blocks that another copy is
    writing, and a block that the same call has named before.

    busy: entries (records in the block table) that another copy writes.
    reserved: for each run (chain of consecutive blocks), the positions of the blocks that the store
        may write.
    """
    pairs = zip(reservation.entries, reserved, strict=True)
    entries = np.concatenate([busy, *(words[positions] for words, positions in pairs)])
    again = np.ones(len(entries), np.bool_)
    again[np.unique(entries, return_index=True)[1]] = False
    end = len(busy)
    for results, positions in zip(reservation.results, reserved, strict=True):
        start, end = end, end + len(positions)
        results[positions[again[start:end]]] = BlockResult.IN_FLIGHT
