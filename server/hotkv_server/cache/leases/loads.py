"""Loads: copies out of slots that a read lease pins.

Owns nothing: the transfer book has the loads, the lease book the leases. Always true: a load names
each block once; a lease that ends during a load keeps its pins until the load has ended.
"""

import numpy as np

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import MAX_GROUPS
from hotkv_server.cache.arrays import repeats
from hotkv_server.cache.cache_books import CacheBooks
from hotkv_server.cache.leases.leases import ReadLease
from hotkv_server.cache.leases.read_leases import ReadLeases
from hotkv_server.cache.leases.transfers import LoadTransfer
from hotkv_server.cache.values import Entries, LoadPositions, SessionRecord, SlotRun


class Loads:
    """Begins and ends loads."""

    def __init__(self, books: CacheBooks, read_leases: ReadLeases) -> None:
        self._books = books
        self._read_leases = read_leases

    def begin(
        self, session: SessionRecord, transfer_id: str, lease_id: str, runs: list[LoadPositions]
    ) -> list[SlotRun]:
        """Starts a load under a read lease; returns the slots to copy from.

        Raises INVALID_FIELD if the lease does not pin what the runs name, or they name a block
        twice.
        """
        books, owner = self._books, self._books.sessions.owner(session)
        books.transfers.check_new(session.number, transfer_id, owner)
        lease = books.leases.live(session, lease_id)
        if not isinstance(lease, ReadLease):
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"lease_id {lease_id!r} is a write lease; a load needs a read lease",
            )
        books.sessions.check_takes_new("starts no new transfers")
        pinned = dict(lease.groups)
        slots = [self._slots(run, _chosen(run, pinned.get(run.group_index))) for run in runs]
        # Two positions may name one block: the lease may list its hash twice.
        if repeats([run.entries for run in slots]):
            raise HotKVError(
                Reason.INVALID_FIELD,
                "runs.lease_positions name a block twice; a load copies each block once",
            )
        self._read_leases.admit(lease)
        lease.num_copies += 1
        num_blocks = sum(len(run.positions) for run in slots if run.group_index < MAX_GROUPS)
        books.transfers.add(LoadTransfer(session.number, owner, transfer_id, lease, num_blocks))
        return slots

    def _slots(self, run: LoadPositions, chosen: Entries) -> SlotRun:
        offsets = self._books.space.index.offsets(chosen)
        return SlotRun(run.group_index, np.arange(len(chosen)), offsets, chosen)

    def end(self, session_number: int, transfer_id: str, succeeded: bool) -> None:
        """Ends a load, whose copy touches nothing any more, and its lease if that was released."""
        transfer = self._books.transfers.pop(session_number, transfer_id)
        assert isinstance(transfer, LoadTransfer), "a store ended as a load"
        transfer.lease.num_copies -= 1
        if succeeded:
            self._books.counters.loaded_blocks += transfer.num_blocks
        if transfer.lease.released:
            self._read_leases.end(transfer.lease)


def _chosen(run: LoadPositions, pinned: Entries | None) -> Entries:
    """The entries at positions of a lease's list; raises unless it pins each of them."""
    if pinned is None:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"runs.group_index is {run.group_index}, which the lease does not cover",
        )
    if len(run.positions) and (run.positions.min() < 0 or run.positions.max() >= len(pinned)):
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"runs.lease_positions go beyond the {len(pinned)} hashes of the lease",
        )
    chosen = pinned[run.positions]
    if np.any(chosen == 0):
        raise HotKVError(
            Reason.INVALID_FIELD, "runs.lease_positions name a block that the lease does not pin"
        )
    return chosen
