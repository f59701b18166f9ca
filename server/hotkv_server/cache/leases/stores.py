"""Stores: copies into slots that a write lease reserved, and publishing what is whole.

Owns nothing: the transfer book has the stores, the lease book the leases. Always true: a block
becomes ready only when every shard is written, a representation only if its block is ready by then;
no two copies write one shard of one block; an aborted entry keeps its slot until no copy can touch
it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.blocks import NO_RETENTION, BlockResult, Retention
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import MAX_GROUPS
from hotkv_server.cache.arrays import without
from hotkv_server.cache.cache_books import CacheBooks
from hotkv_server.cache.leases.leases import WriteLease
from hotkv_server.cache.leases.transfers import StoreTransfer
from hotkv_server.cache.leases.uses import Uses
from hotkv_server.cache.pinner import StorePins
from hotkv_server.cache.room.reservations import Asked, Reservations
from hotkv_server.cache.table.representations import blocks_first
from hotkv_server.cache.values import (
    BoolMask,
    Entries,
    Int64s,
    Reservation,
    Run,
    SessionRecord,
    SlotRun,
)
from hotkv_server.integrity.check_values import Sums, sealed

ABORTED_MARK = 1 << 31
"""Set in the shard mask of a reserved entry that will not be published."""


class Stores:
    """Begins and ends stores."""

    def __init__(self, books: CacheBooks, reservations: Reservations, uses: Uses) -> None:
        self._books = books
        self._reservations = reservations
        self._uses = uses

    def check(self, session: SessionRecord, transfer_id: str, shard_index: int) -> None:
        """Raises HotKVError unless a session may start this store."""
        books = self._books
        books.transfers.check_new(session.number, transfer_id, books.sessions.owner(session))
        num_shards = books.catalog.record(session.key_space_id).key_space.num_shards
        if not 0 <= shard_index < num_shards:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"shard_index is {shard_index}; this key space has {num_shards} shards",
            )
        books.sessions.check_takes_new("starts no new transfers")

    def begin(
        self,
        session: SessionRecord,
        transfer_id: str,
        lease_id: str,
        asked: Asked,
        shard_index: int,
        ttl_s: float,
        now_s: float,
        retention: Retention = NO_RETENTION,
        pins: StorePins | None = None,
    ) -> list[SlotRun]:
        """As `CacheCore.begin_store`, without making room."""
        self.check(session, transfer_id, shard_index)
        books, owner, runs = self._books, self._books.sessions.owner(session), asked.runs
        joined = books.leases.get(session.engine_id, lease_id) is not None
        reservation = self._reservations.reserve(
            session, lease_id, asked, ttl_s, now_s, retention, has_promise=pins is not None
        )
        lease = books.leases.get(session.engine_id, lease_id)
        writes = lease if isinstance(lease, WriteLease) else None
        transfer = StoreTransfer(session.number, owner, transfer_id, writes, shard_index, pins)
        busy = (
            books.transfers.entries_being_written(writes, shard_index)
            if joined
            else np.empty(0, np.uint32)
        )
        slots = []
        for run, results, words in zip(runs, reservation.results, reservation.entries, strict=True):
            positions = np.flatnonzero(results == BlockResult.RESERVED)
            if joined:
                self._skip_done(shard_index, words, positions, results)
            if joined or len(busy):
                positions = _skip_busy(busy, words, positions, results)
            entries = words[positions]
            busy = np.concatenate((busy, entries)) if len(runs) > 1 else busy
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
        """Pins blocks of a store that are ready already. One that has not been compared with its
        check value is not pinned."""
        index = self._books.space.index
        for run, results in zip(runs, reservation.results, strict=True):
            present = np.flatnonzero(results == BlockResult.PRESENT)
            if run.group_index >= MAX_GROUPS or not len(present):
                continue
            # Anew: a later run may have taken their room.
            words = index.find(key_space_id, run.group_index, run.hashes[present])
            good = table.is_ready(words)
            good[good] = ~index.unverified[words[good]]
            positions = run.depth + present[good]
            pins.pin(run.group_index, positions, words[good])
            pins.pin_linked(run.group_index, positions)

    def _skip_done(
        self, shard_index: int, words: Entries, positions: Int64s, results: NDArray[np.uint8]
    ) -> None:
        """Says in `results` which reserved blocks are aborted, or have this shard written."""
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
        """Ends a store, whose copy touches nothing any more: publishes the blocks that have every
        shard written, then their representations. Returns BlockResult values, one array a run."""
        transfer = self._books.transfers.pop(session_number, transfer_id)
        assert isinstance(transfer, StoreTransfer), "a load ended as a store"
        lease = transfer.lease
        if lease is None:
            return transfer.results
        lease.num_copies -= 1
        whole = self._whole(lease)
        for at in blocks_first(transfer.groups):
            written = sums[at] if sums and succeeded else None
            self._end_run(transfer, lease, at, succeeded, whole, written, now_s)
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
    ) -> None:
        """Marks what one run has written, publishes what is whole, and notes the results."""
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
        total = lease.sums_of(done) if sums is None else lease.sums_with(entries, sums, complete)
        keys = index.mixed(done)
        checks = sealed(total, keys, self._books.config.check_stride)
        if transfer.groups[at] < MAX_GROUPS:
            self._publish_blocks(lease, done, keys, checks, now_s)
            if transfer.pins is not None:
                transfer.pins.pin(
                    transfer.groups[at], transfer.depths[at] + positions[complete], done
                )
        else:
            kept = self._publish_representations(lease, done, checks)
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
        lease.entries = without(lease.entries, entries[complete])

    def _publish_blocks(
        self, lease: WriteLease, entries: Entries, keys: Sums, checks: Sums, now_s: float
    ) -> None:
        """Makes blocks ready that have every shard written."""
        self._books.space.publish(entries, now_s, lease.retention, checks, keys)
        if len(entries):
            self._books.space.refresh_ancestors(int(entries[0]), now_s)
        self._uses.retain(entries, lease.retention, now_s)
        for one in self._books.below:
            one.offer_stored(entries)
        self._books.counters.stored_blocks += len(entries)

    def _publish_representations(
        self, lease: WriteLease, entries: Entries, checks: Sums
    ) -> BoolMask:
        """Makes representations of one kind ready if their blocks are; marks the others as aborted.
        Returns which are ready."""
        if not len(entries):
            return np.empty(0, np.bool_)
        space = self._books.space
        _, groups, hashes = space.index.keys(entries)
        record = self._books.catalog.record(lease.key_space_id)
        blocks = space.index.find(lease.key_space_id, record.block_group(int(groups[0])), hashes)
        has_block = table.is_ready(blocks)
        space.index.mark_written(entries[~has_block], ABORTED_MARK)
        space.representations.publish(entries[has_block], blocks[has_block], checks[has_block])
        self._books.counters.stored_representations += int(has_block.sum())
        return has_block

    def abort(self, lease: WriteLease) -> None:
        """Marks everything that is reserved or being written under a lease: it never becomes
        ready."""
        self._books.space.index.mark_written(lease.entries, ABORTED_MARK)
        self._settle(lease, self._whole(lease))

    def _settle(self, lease: WriteLease, whole: int) -> None:
        """Drops aborted entries once no copy can touch them, and ends the lease once every shard
        was seen and no entry is outstanding."""
        if lease.num_copies:
            return
        if len(lease.entries):
            marks = self._books.space.index.mark_written(lease.entries, 0)
            aborted = lease.entries[marks & ABORTED_MARK != 0]
            self._reservations.drop(aborted)
            lease.entries = without(lease.entries, aborted)
        if lease.released or (lease.shards_seen == whole and not len(lease.entries)):
            self._reservations.end(lease)

    def _whole(self, lease: WriteLease) -> int:
        """The mask of all shards."""
        return (1 << self._books.catalog.record(lease.key_space_id).key_space.num_shards) - 1


def _skip_busy(
    busy: Entries, words: Entries, positions: Int64s, results: NDArray[np.uint8]
) -> Int64s:
    """The positions that are still to be copied: each block once, and none that another copy
    writes. Says so in `results`."""
    entries = words[positions]
    again = np.ones(len(entries), np.bool_)
    again[np.unique(entries, return_index=True)[1]] = False
    results[positions[again | np.isin(entries, busy)]] = BlockResult.IN_FLIGHT
    todo: Int64s = positions[results[positions] == BlockResult.RESERVED]
    return todo
