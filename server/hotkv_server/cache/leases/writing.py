"""`Reservations` opens and ends write leases. `Stores` begins and ends stores under them."""

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

# Reservations.
#
# Always true: the first call under a lease id decides which blocks the lease owns, for all
# shards. Every reserved entry belongs to one write lease or one move. A block that is ready or
# reserved is not reserved again.


_END = object()
NO_SPACE, RESERVED = np.uint8(BlockResult.NO_SPACE), np.uint8(BlockResult.RESERVED)
"""As numpy numbers: with members of the enum, numpy searches each for array attributes."""


@dataclass(frozen=True, slots=True)
class Named:
    """What a call names, when it was looked up.

    words: for each run, an entry number per block, with the high bit set while reserved; 0 without
        an entry.
    staying: ready entries that must not be evicted: the named ones, the blocks of named
        sketches, and the blocks before them in their chains.
    """

    words: tuple[Entries, ...]
    staying: Entries


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A call that stores or reserves, between `Reservations.make_room` and `reserve`.

    listed: its blocks by `BlockIndex.mixed`, run after run, without sketches.
    named: None if it joins a lease, or if other calls may have run since the look-up.
    weight: of the new lease; valid only if `named` is not None.
    """

    runs: list[Run]
    listed: Keys
    named: Named | None
    ttl_s: float
    weight: int


class Reservations:
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
        """Checks a call and makes room for as many of its blocks as the owner may reserve. Raises
        what `reserve` would raise before it evicts anything. Evicts no block that `runs` names.
        Makes no room for a lease that exists, whose blocks are reserved already.

        ttl_s: 0 for the default.
        retention: if not NO_RETENTION, the policy may not refuse room.
        promised_bytes: what the call's residency may still pin; 0 without one.
        """
        record = self._books.catalog.record(session.key_space_id)
        ttl_s = lifetime_s(self._books.config, ttl_s)
        self._check_runs(record, runs)
        listed, named, weight = self._listed(session.key_space_id, runs), None, 0
        if self._joined(session, lease_id, listed) is None:
            weight = self._check_weight(session, record, runs)
            has_promise, owner = promised_bytes > 0, session.owner
            named = yield from self.room_for(
                session.key_space_id,
                runs,
                has_promise=has_promise,
                refusable_at_s=_keep_at_s(retention, has_promise, now_s),
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
        refusable_at_s: float | None = None,
        most_bytes: int | None = None,
        first: int = 0,
    ) -> Parts[Named | None]:
        """Makes room for the blocks of `runs` without an entry. Returns their entries; None if it
        yielded, so that other calls may have run, or if the key space lacks a group.

        beside: more ready entries that must not be evicted.
        has_promise: the room is reserved for a residency.
        refusable_at_s: as in `Policy.victims`.
        most_bytes: None: no limit.
        first: the first of `runs` to make room for.
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
                refusable_at_s=refusable_at_s,
                beside_bytes=beside_bytes,
            )
            beside_bytes += count * aligned(slot_bytes)
            while True:
                # A pin keeps this part from evicting `staying`. At worst it keeps another block
                # that has an entry's number by now.
                index.pin(staying, 1)
                has_more = next(making, _END) is not _END
                index.pin(staying, -1)
                # Free the slots of entries that were removed, and so detached, while they were
                # pinned here.
                space.removal.reap(staying)
                if not has_more:
                    break
                had_parts = True
                yield
        return None if had_parts else named

    def _named(self, record: KeySpaceRecord, runs: Sequence[Run]) -> Named:
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
        """For a call that `make_room` has just checked (`asked`), as far as there is room.
        `retention` is ignored if the call joins a lease."""
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
        """Raises HotKVError for an unknown group, too many blocks, or an invalid depth."""
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
        """The lease that a call joins; None if it is the first with this id. Raises HotKVError
        if it may do neither. `listed`: keys that the call names, all of which the first call
        must have named."""
        books = self._books
        lease = books.leases.of_call(session, lease_id)
        if lease is None:
            books.sessions.check_takes_new("grants no new leases")
            books.leases.check_count(session.owner)
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
        """Keys (`BlockIndex.mixed_hashes`, uint64) of the blocks, run after run, without
        sketches."""
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
        """The caller adds the lease to the `LeaseBook`. Raises OVERLOADED as `_check_weight`."""
        weight = asked.weight
        if asked.named is None:
            weight = self._check_weight(session, record, asked.runs)
        return WriteLease(
            session.engine_id,
            session.owner,
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
        return int(self._books.space.index.slot_bytes(lease.entries).sum())

    def _check_weight(
        self, session: SessionRecord, record: KeySpaceRecord, runs: Sequence[Run]
    ) -> int:
        """`write_weight` of a new lease. Raises OVERLOADED if the owner's leases would use too
        much memory."""
        weight = write_weight(sum(len(run.hashes) for run in runs), record.key_space.num_shards)
        self._books.leases.check_room(session.owner, "runs", weight)
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
        """`BlockResult` of each block: PRESENT if ready, RESERVED under this lease, IN_FLIGHT
        under another, NO_SPACE without an entry. Records a use of the ready blocks. Clears
        RESERVED_FLAG in `words`."""
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
        """Reserves slots for the blocks of `runs[at]` that have no entry, as far as there is
        room and `most_bytes` allows. Returns the new entries, and writes them into `words` and
        the outcome into `results`. `full`: slot sizes for which this call found no more room; it
        adds to them."""
        run, space = runs[at], self._books.space
        absent = np.flatnonzero(words == 0)
        if not len(absent):
            return absent.astype(np.uint32)
        wanted = absent[first_occurrences(rows(run.hashes, absent))]
        if len(wanted) < len(absent):
            # A hash listed twice is reserved once; its second position is IN_FLIGHT.
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
            # `make_room` looks at the runs one by one, and may have counted the same free slab
            # or entry number for several of them; make more room.
            making = self.room_for(
                record.number,
                runs,
                has_promise=has_promise,
                refusable_at_s=_keep_at_s(lease.retention, has_promise, now_s),
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
        space.reserve.count(space.tenants.number(record.number), size, len(entries))
        lease.unwritten_bytes += len(entries) * size
        words[wanted[: len(entries)]] = entries
        results[wanted[: len(entries)]] = BlockResult.RESERVED
        if is_block:
            space.chains.link(record.number, run.group_index, words, run.parent)
            self._books.counters.no_space_blocks += len(wanted) - len(entries)
            # The policy learns nothing of blocks that the owner may not reserve: a client could
            # name any number.
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
        """Those of the positions `wanted` whose sketches may be reserved: their block is ready,
        or reserved under this lease. If it is reserved under another, the result is IN_FLIGHT."""
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
        """Removes reserved entries that will not be written. `cause`: remembered unless NONE."""
        if not len(entries):
            return
        space = self._books.space
        self._books.counters.aborted_blocks += int((~space.sketches.among(entries)).sum())
        space.removal.drop(entries, cause)

    def end(self, lease: WriteLease) -> None:
        """Ends a live lease and drops what is still reserved, or lets it end with its running
        copies."""
        lease.released = True
        if lease.num_copies:
            return
        self.drop(lease.entries, Cause.EXPIRY if lease.has_expired else Cause.NONE)
        self._books.leases.remove(lease)

    def check_invariants(self) -> None:
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
    """`room_for`'s `refusable_at_s`: None if the call has reserved room or asks for retention."""
    return None if has_promise or retention != NO_RETENTION else now_s


# Stores copy blocks into slots that a write lease has reserved.
#
# Always true: a block becomes ready only when every shard is written, a sketch only if its block
# is ready by then. No two copies write the same shard of a block. An aborted entry keeps its
# slot until no copy can touch it.


ABORTED_MARK = 1 << 31
"""In an entry's mask of written shards: it will never become ready."""


class Stores:
    def __init__(self, books: CacheBooks, reservations: Reservations, uses: Uses) -> None:
        self._books = books
        self._reservations = reservations
        self._uses = uses

    def check(self, session: SessionRecord, transfer_id: str, shard_index: int) -> None:
        """Raises HotKVError for a bad transfer id or shard, or while the server drains."""
        books = self._books
        books.transfers.check_new(session.number, transfer_id, session.owner)
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
        """As `CacheCore.begin_store`, for a call that `Reservations.make_room` has checked."""
        if asked.named is None:
            # Other calls may have run since the checks.
            self.check(session, transfer_id, shard_index)
        books, owner, runs = self._books, session.owner, asked.runs
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
        """Pins the ready, verified blocks for the store's residency."""
        index = self._books.space.index
        for run, results in zip(runs, reservation.results, strict=True):
            present = np.flatnonzero(results == BlockResult.PRESENT)
            if not len(present):
                continue
            # Reserving a later run may have evicted some.
            words = index.find(key_space_id, run.group_index, run.hashes[present])
            good = table.is_ready(words)
            good[good] = ~index.unverified[words[good]]
            positions = run.depth + present[good]
            pins.pin(run.group_index, positions, words[good])
            pins.pin_linked(run.group_index, positions)

    def _skip_done(
        self, shard_index: int, words: Entries, positions: Int64s, results: NDArray[np.uint8]
    ) -> None:
        """Of reserved blocks that need no copy: ABORTED if the entry is aborted, WRITTEN if the
        shard is written.

        `words`: of the whole run; `positions`: reserved blocks.
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
        """As `CacheCore.end_store`. Publishes blocks before their sketches."""
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
        """Ends run `at` of a store and sets its results. After a good copy, marks the shard as
        written and publishes the blocks that are whole now; after a failed one, marks the entries
        as aborted. Returns the published entries.

        whole: one bit per shard.
        sums: of the run's blocks; None if the copy failed or computed none.
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
        """`keys`: `BlockIndex.mixed` of the entries."""
        self._books.space.publish(entries, now_s, lease.retention, checks, keys)
        if len(entries):
            self._books.space.refresh_ancestors(int(entries[0]), now_s)
        self._uses.retain(entries, lease.retention, now_s)
        self._books.counters.stored_blocks += len(entries)

    def _publish_sketches(self, lease: WriteLease, entries: Entries, checks: Sums) -> BoolMask:
        """Makes sketches of one kind ready whose blocks are, and marks the others as aborted.
        Mask of the ready ones."""
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
        """No entry that the lease still reserves will become ready; they are dropped once no
        copy runs."""
        self._books.space.index.mark_written(lease.entries, ABORTED_MARK)
        self._settle(lease, self._whole(lease))

    def _settle(self, lease: WriteLease, whole: int) -> None:
        """If no copy runs: drops the lease's aborted entries, and ends the lease if it was
        released, or if nothing is reserved and a store of every shard has ended."""
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
        """Mask with one bit per shard."""
        return (1 << self._books.catalog.record(lease.key_space_id).key_space.num_shards) - 1


def _skip_busy(busy: Entries, reservation: Reservation, reserved: list[Int64s]) -> None:
    """Sets IN_FLIGHT for reserved blocks that another copy writes (`busy`), or that the call
    named before."""
    pairs = zip(reservation.entries, reserved, strict=True)
    entries = np.concatenate([busy, *(words[positions] for words, positions in pairs)])
    again = np.ones(len(entries), np.bool_)
    again[np.unique(entries, return_index=True)[1]] = False
    end = len(busy)
    for results, positions in zip(reservation.results, reserved, strict=True):
        start, end = end, end + len(positions)
        results[positions[again[start:end]]] = BlockResult.IN_FLIGHT
