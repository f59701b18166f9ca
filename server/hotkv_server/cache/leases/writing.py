"""`Reservations` opens and ends write leases. `Stores` begins and ends stores under them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.blocks import NO_RETENTION, BlockResult, Retention
from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.table import RESERVED_FLAG
from hotkv_server.cache.arrays import first_occurrences, rows, without
from hotkv_server.cache.leases.books import CacheBooks, Uses
from hotkv_server.cache.leases.leases import (
    ReadLease,
    Reservation,
    StoreTransfer,
    WriteLease,
    lifetime_s,
    write_weight,
)
from hotkv_server.cache.room.removal import Parts, finished
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
class WriteCall:
    """A call that stores or reserves.

    ttl_s: 0 for the default.
    retention: of the lease, if the call opens one.
    promised_bytes: what the call's residency may still pin; 0 without one.
    """

    session: SessionRecord
    lease_id: str
    runs: list[Run]
    ttl_s: float
    now_s: float
    retention: Retention
    promised_bytes: int = 0
    is_private: bool = False

    @property
    def refusable_at_s(self) -> float | None:
        """As in `Policy.victims`: None if the call has reserved room or asks for retention."""
        return None if self.promised_bytes or self.retention != NO_RETENTION else self.now_s


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """Valid until another call of the core changes anything.

    lease: that the call joins; None if it opens one. Then:
    listed: its blocks by `BlockIndex.mixed`, run after run, without sketches.
    words: for each run, an entry number per block, with the high bit set while reserved; 0 without
        an entry.
    weight: `write_weight`.
    most_bytes: that the lease may reserve; `has_promise`: they are promised to the residency.
    """

    call: WriteCall
    record: KeySpaceRecord
    lease: WriteLease | None
    listed: Keys
    words: tuple[Entries, ...] = ()
    weight: int = 0
    most_bytes: int = 0
    has_promise: bool = False


class Reservations:
    def __init__(self, books: CacheBooks, uses: Uses) -> None:
        self._books = books
        self._uses = uses

    def check(self, call: WriteCall) -> CheckedCall:
        """Changes nothing. Raises HotKVError if the call may neither join nor open a lease."""
        books, session, runs = self._books, call.session, call.runs
        record = books.catalog.record(session.key_space_id)
        num_blocks = sum([len(run.hashes) for run in runs])
        self._check_runs(record, runs, num_blocks)
        index = books.space.index
        keys = [
            index.mixed_hashes(record.number, run.group_index, run.hashes)
            for run in runs
            if run.group_index < MAX_GROUPS
        ]
        listed = keys[0] if len(keys) == 1 else np.concatenate([np.empty(0, np.uint64), *keys])
        if (lease := self._joined(session, call.lease_id, listed)) is not None:
            return CheckedCall(call, record, lease, listed)
        weight = write_weight(num_blocks, record.key_space.num_shards)
        books.leases.check_new(session.owner, "runs", weight)
        most_bytes, has_promise = books.leases.unwritten_room(session.owner, call.promised_bytes)
        words = tuple([index.find(record.number, run.group_index, run.hashes) for run in runs])
        return CheckedCall(call, record, None, listed, words, weight, most_bytes, has_promise)

    def lacks_room(self, checked: CheckedCall) -> bool:
        """True if `make_room` must run, and the call be checked again, before `reserve`."""
        if checked.lease is not None:
            return False
        wanted = _wanted(checked.record, checked.call.runs, checked.words)
        needs_room, most_bytes = self._books.space.needs_room, checked.most_bytes
        lacks = [
            needs_room(size, min(count, max(0, most_bytes) // size))
            for (size, _), count in wanted.items()
        ]
        return True in lacks

    def make_room(self, checked: CheckedCall) -> Parts[None]:
        """Makes room for as many blocks as the owner may reserve, and evicts none that the call
        names."""
        call = checked.call
        return self.room_for(
            checked.record,
            call.runs,
            has_promise=call.promised_bytes > 0,
            refusable_at_s=call.refusable_at_s,
            most_bytes=checked.most_bytes,
        )

    def room_for(
        self,
        record: KeySpaceRecord,
        runs: Sequence[Run],
        beside: Entries | None = None,
        *,
        has_promise: bool = False,
        refusable_at_s: float | None = None,
        most_bytes: int | None = None,
        first: int = 0,
    ) -> Parts[None]:
        """Makes room for the blocks of `runs` without an entry; none if the key space lacks a
        group.

        beside: more ready entries that must not be evicted.
        has_promise: the room is reserved for a residency.
        refusable_at_s: as in `Policy.victims`.
        most_bytes: None: no limit.
        first: the first of `runs` to make room for.
        """
        space = self._books.space
        if not all(record.has(run.group_index) for run in runs):
            return
        words, staying = self._staying(record, runs)
        index, beside_bytes = space.index, 0
        if beside is not None:
            staying = np.concatenate((staying, beside))
        wanted = _wanted(record, runs[first:], words[first:])
        for (slot_bytes, is_kind), missing in wanted.items():
            count = missing
            if most_bytes is not None:
                count = min(count, max(0, most_bytes - beside_bytes) // slot_bytes)
            if not space.needs_room(slot_bytes, count):
                continue
            making = space.make_room(
                record.number,
                is_kind * MAX_GROUPS,
                slot_bytes,
                count,
                has_promise=has_promise,
                refusable_at_s=refusable_at_s,
                beside_bytes=beside_bytes,
            )
            beside_bytes += count * slot_bytes
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
                yield

    def _staying(
        self, record: KeySpaceRecord, runs: Sequence[Run]
    ) -> tuple[tuple[Entries, ...], Entries]:
        """`CheckedCall.words`, and the ready entries that must not be evicted: the named ones, the
        blocks of named sketches, and the blocks before them in their chains."""
        space = self._books.space
        listed: list[Entries] = []
        kept: list[Entries] = [np.empty(0, np.uint32)]
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
        return tuple(listed), np.concatenate(kept)

    def reserve(self, checked: CheckedCall) -> Reservation:
        """As far as there is room."""
        call, record = checked.call, checked.record
        runs, index = call.runs, self._books.space.index
        lease = checked.lease or self._new_lease(checked)
        groups = [run.group_index for run in runs]
        answers: dict[int, tuple[NDArray[np.uint8], Entries]] = {}
        reserved, full, seen = list[Entries](), set[int](), set[int]()
        for at in blocks_first(groups):
            if checked.lease is None and groups[at] not in seen:
                words = checked.words[at]
            else:
                words = index.find(record.number, groups[at], runs[at].hashes)
            results = self._results(
                lease, groups[at], words, call.now_s, is_private=call.is_private
            )
            if checked.lease is None:
                reserved.append(self._insert(lease, checked, at, words, results, full))
            answers[at] = results, words
            seen.add(groups[at])
        held: WriteLease | None = lease
        if checked.lease is None:
            lease.entries = (
                reserved[0] if len(reserved) == 1 else np.concatenate([lease.entries, *reserved])
            )
            if len(lease.entries) or lease.whole > 1:
                self._books.leases.add(lease)
            else:
                held = None
        return Reservation(
            held,
            tuple([answers[at][0] for at in range(len(runs))]),
            tuple([answers[at][1] for at in range(len(runs))]),
            max(0.0, lease.expires_s - call.now_s),
        )

    def _check_runs(self, record: KeySpaceRecord, runs: list[Run], num_blocks: int) -> None:
        """Raises HotKVError for an unknown group, too many blocks, or an invalid depth."""
        most_blocks = self._books.config.max_blocks_per_call
        check_named(record, [run.group_index for run in runs], num_blocks, most_blocks)
        for run in runs:
            if run.depth < 0 or run.depth + len(run.hashes) >= 1 << 31:
                raise invalid(
                    "runs.depth is negative or too large; it counts blocks from the start of the "
                    "prompt"
                )

    def _joined(self, session: SessionRecord, lease_id: str, listed: Keys) -> WriteLease | None:
        """The lease that a call joins; None if it is the first with this id. Raises HotKVError
        if it may do neither. `listed`: keys that the call names, all of which the first call
        must have named."""
        books = self._books
        lease = books.leases.of_call(session, lease_id)
        if lease is None:
            books.sessions.check_takes_new("grants no new leases")
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

    def _new_lease(self, checked: CheckedCall) -> WriteLease:
        """The caller adds it to the `LeaseBook`."""
        call, session = checked.call, checked.call.session
        return WriteLease(
            session.engine_id,
            session.owner,
            call.lease_id,
            self._books.leases.next_number(),
            session.number,
            session.key_space_id,
            call.now_s + lifetime_s(self._books.config, call.ttl_s),
            checked.listed,
            checked.weight,
            (1 << checked.record.key_space.num_shards) - 1,
            call.retention,
            has_promise=checked.has_promise,
        )

    def unwritten_bytes(self, lease: WriteLease) -> int:
        return int(self._books.space.index.slot_bytes(lease.entries).sum())

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
        checked: CheckedCall,
        at: int,
        words: Entries,
        results: NDArray[np.uint8],
        full: set[int],
    ) -> Entries:
        """Reserves slots for the blocks of run `at` that have no entry, as far as there is room and
        `most_bytes` allows. Returns the new entries, and writes them into `words` and the outcome
        into `results`. `full`: slot sizes for which this call found no more room; it adds to
        them."""
        call, record, space = checked.call, checked.record, self._books.space
        run = call.runs[at]
        absent = np.flatnonzero(words == 0)
        if not len(absent):
            return words[:0]
        wanted = absent[first_occurrences(rows(run.hashes, absent))]
        if len(wanted) < len(absent):
            # A hash listed twice is reserved once; its second position is IN_FLIGHT.
            results[absent] = BlockResult.IN_FLIGHT
            results[wanted] = BlockResult.NO_SPACE
        is_block = run.group_index < MAX_GROUPS
        if not is_block:
            wanted = self._representable(lease, record, run, wanted, results)
        slot_bytes = record.slot_bytes(run.group_index)
        left_bytes = checked.most_bytes - lease.unwritten_bytes
        may_have = wanted[: max(0, left_bytes) // slot_bytes]
        if len(call.runs) > 1 and slot_bytes not in full:
            self._make_more_room(checked, at, slot_bytes, len(may_have), left_bytes, full)
        entries = space.insert(
            record.number,
            run.group_index,
            rows(run.hashes, may_have),
            slot_bytes,
            run.depth + may_have,
            lease.number,
            has_promise=call.promised_bytes > 0,
        )
        space.reserve.count(space.tenants.number(record.number), slot_bytes, len(entries))
        lease.unwritten_bytes += len(entries) * slot_bytes
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
                    call.now_s,
                    lease.retention,
                )
        return entries

    def _make_more_room(
        self,
        checked: CheckedCall,
        at: int,
        slot_bytes: int,
        count: int,
        left_bytes: int,
        full: set[int],
    ) -> None:
        """`make_room` looks at the runs one by one, and may have counted the same free slab or
        entry number for several of them."""
        space = self._books.space
        if space.has_room(slot_bytes, count):
            return
        making = self.room_for(
            checked.record,
            checked.call.runs,
            has_promise=checked.call.promised_bytes > 0,
            refusable_at_s=checked.call.refusable_at_s,
            most_bytes=left_bytes,
            # Blocks of earlier runs that got no slot would use up `most_bytes`.
            first=at,
        )
        finished(making)
        if not space.has_room(slot_bytes, count):
            full.add(slot_bytes)

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


def _wanted(
    record: KeySpaceRecord, runs: Sequence[Run], words: Sequence[Entries]
) -> dict[tuple[int, int], int]:
    """Numbers of blocks without an entry, by slot size and whether they are sketches (0 or 1)."""
    wanted: dict[tuple[int, int], int] = {}
    for run, found in zip(runs, words, strict=True):
        kind = (record.slot_bytes(run.group_index), int(run.group_index >= MAX_GROUPS))
        wanted[kind] = wanted.get(kind, 0) + len(found) - int(np.count_nonzero(found))
    return wanted


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

    def check(self, call: WriteCall, transfer_id: str, shard_index: int) -> CheckedCall:
        """`Reservations.check`. Raises HotKVError also for a bad transfer id or shard, or while
        the server drains."""
        books, session = self._books, call.session
        books.transfers.check_new(session.number, transfer_id, session.owner)
        books.sessions.check_takes_new("starts no new transfers")
        checked = self._reservations.check(call)
        num_shards = checked.record.key_space.num_shards
        if not 0 <= shard_index < num_shards:
            raise invalid(f"shard_index is {shard_index}; this key space has {num_shards} shards")
        return checked

    def begin(
        self, checked: CheckedCall, transfer_id: str, shard_index: int, pins: StorePins | None
    ) -> list[SlotRun]:
        """As `CacheCore.begin_store`."""
        books, call, runs = self._books, checked.call, checked.call.runs
        reservation = self._reservations.reserve(checked)
        lease = reservation.lease
        reserved = [np.flatnonzero(results == RESERVED) for results in reservation.results]
        if checked.lease is not None or len(runs) > 1:
            reserved = self._without_done(checked.lease, shard_index, reservation, reserved)
        slots = []
        for run, words, positions in zip(runs, reservation.entries, reserved, strict=True):
            entries = words[positions]
            offsets = books.space.index.offsets(entries)
            slots.append(SlotRun(run.group_index, positions, offsets, entries))
        if lease is not None:
            lease.num_copies += 1
        transfer = StoreTransfer(
            call.session.number,
            call.session.owner,
            transfer_id,
            lease,
            shard_index,
            slots,
            list(reservation.results),
            [run.depth for run in runs],
            pins,
            call.is_private,
        )
        books.transfers.add(transfer)
        if pins is not None:
            self._pin_present(pins, call.session.key_space_id, runs, reservation)
        return slots

    def _without_done(
        self,
        joined: WriteLease | None,
        shard_index: int,
        reservation: Reservation,
        reserved: list[Int64s],
    ) -> list[Int64s]:
        """Positions of the reserved blocks that the store must write: not those that are aborted,
        whose shard is written, that another copy writes, or that the call named before.

        joined: lease that the call has not opened.
        """
        busy = np.empty(0, np.uint32)
        if joined is not None:
            busy = self._books.transfers.entries_being_written(joined, shard_index)
            for words, at, results in zip(
                reservation.entries, reserved, reservation.results, strict=True
            ):
                self._skip_done(shard_index, words, at, results)
        _skip_busy(busy, reservation, reserved)
        return [np.flatnonzero(results == RESERVED) for results in reservation.results]

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
        sums, published = sums if succeeded else (), [lease.entries[:0]]
        if sums and lease.whole > 1:
            written_entries = [run.entries for run in transfer.slots]
            lease.add_sums(np.concatenate(written_entries), np.concatenate(sums))
        for at in blocks_first([run.group_index for run in transfer.slots]):
            written = sums[at] if sums else None
            published.append(self._end_run(transfer, lease, at, succeeded, written, now_s))
        lease.entries = without(lease.entries, np.concatenate(published))
        lease.shards_seen |= 1 << transfer.shard_index
        self._settle(lease)
        return transfer.results

    def _end_run(
        self,
        transfer: StoreTransfer,
        lease: WriteLease,
        at: int,
        succeeded: bool,
        sums: Sums | None,
        now_s: float,
    ) -> Entries:
        """Ends run `at` of a store and sets its results. After a good copy, marks the shard as
        written and publishes the blocks that are whole now; after a failed one, marks the entries
        as aborted. Returns the published entries.

        sums: of the run's blocks; None if the copy failed or computed none.
        """
        index = self._books.space.index
        run, depth, results = transfer.slots[at], transfer.depths[at], transfer.results[at]
        group_index, entries, positions = run.group_index, run.entries, run.positions
        mark = 1 << transfer.shard_index if succeeded else ABORTED_MARK
        masks = index.mark_written(entries, mark)
        complete = masks == lease.whole
        done = entries[complete]
        total = lease.sums_of(done) if sums is None or lease.whole > 1 else sums[complete]
        keys = index.mixed(done)
        checks = sealed(total, keys, self._books.config.check_stride)
        if group_index < MAX_GROUPS:
            self._publish_blocks(lease, done, keys, checks, now_s)
            for one in self._books.below if not transfer.is_private else ():
                one.offer_stored(done)
            if transfer.pins is not None:
                transfer.pins.pin(group_index, depth + positions[complete], done)
        else:
            kept = self._publish_sketches(lease, done, checks)
            if transfer.pins is not None:
                record = self._books.catalog.record(lease.key_space_id)
                transfer.pins.pin_linked(
                    record.block_group(group_index), depth + positions[complete][kept]
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
        self._settle(lease)

    def _settle(self, lease: WriteLease) -> None:
        """If no copy runs: drops the lease's aborted entries, and ends the lease if it was
        released, or if nothing is reserved and a store of every shard has ended."""
        if len(lease.entries) and not lease.num_copies:
            marks = self._books.space.index.mark_written(lease.entries, 0)
            aborted = lease.entries[marks & ABORTED_MARK != 0]
            self._reservations.drop(aborted)
            lease.entries = without(lease.entries, aborted)
        is_over = lease.shards_seen == lease.whole and not len(lease.entries)
        if not lease.num_copies and (lease.released or is_over):
            self._reservations.end(lease)
        else:
            self._books.leases.settle(lease, self._reservations.unwritten_bytes(lease))


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
