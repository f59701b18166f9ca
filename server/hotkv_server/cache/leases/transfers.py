"""Transfers in flight: the lease that each uses, and the entries that a store is writing.

Always true: a transfer id is used once at a time in its session; every transfer counts in its
lease's `num_copies`, and for its owner, see `bounds`.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.errors import HotKVError, Reason
from hotkv_server.cache.leases.leases import Lease, ReadLease, WriteLease
from hotkv_server.cache.pinner import StorePins
from hotkv_server.cache.room.bounds import FairBound
from hotkv_server.cache.values import MAX_TRANSFERS, Entries, Int64s


@dataclass(slots=True)
class LoadTransfer:
    """A load under a read lease."""

    session_number: int
    owner: str
    transfer_id: str
    lease: ReadLease
    num_blocks: int


@dataclass(slots=True)
class StoreTransfer:
    """A store of one shard; `lease` is None if no block was reserved.

    Per run: its group, the entries that are written, their positions, results so far, the depth of
    its first block. `pins`: for what the blocks are pinned that the store makes ready.
    """

    session_number: int
    owner: str
    transfer_id: str
    lease: WriteLease | None
    shard_index: int
    pins: StorePins | None = None
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
        """Adds the next run in the order of the call."""
        self.depths.append(depth)
        self.groups.append(group_index)
        self.entries.append(entries)
        self.positions.append(positions)
        self.results.append(results)


Transfer = LoadTransfer | StoreTransfer


class TransferBook:
    """All transfers in flight."""

    def __init__(self) -> None:
        self.bound = FairBound(MAX_TRANSFERS)
        self._transfers: dict[tuple[int, str], Transfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def __repr__(self) -> str:
        return f"TransferBook({len(self._transfers)} transfers)"

    def check_new(self, session_number: int, transfer_id: str, owner: str) -> None:
        """Raises unless the owner may start a transfer with this id."""
        if not transfer_id:
            raise HotKVError(
                Reason.INVALID_FIELD,
                "transfer_id is empty; choose an id that is unique in the session",
            )
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
        """Takes a transfer in, and counts it for its owner."""
        self._transfers[transfer.session_number, transfer.transfer_id] = transfer
        self.bound.take(transfer.owner, 1)

    def pop(self, session_number: int, transfer_id: str) -> Transfer:
        """Forgets a transfer that has ended; returns it."""
        transfer = self._transfers.pop((session_number, transfer_id))
        self.bound.give(transfer.owner, 1)
        return transfer

    def of_session(self, session_number: int) -> list[Transfer]:
        """Transfers of a session."""
        return [t for t in self._transfers.values() if t.session_number == session_number]

    def count(self, lease: Lease) -> int:
        """How many transfers use a lease."""
        return sum(t.lease is lease for t in self._transfers.values())

    def check_invariants(self) -> None:
        """Raises AssertionError if the books disagree."""
        self.bound.check(Counter(transfer.owner for transfer in self._transfers.values()))

    def entries_being_written(self, lease: WriteLease | None, shard_index: int) -> Entries:
        """Entries of this lease whose shard is being copied right now."""
        busy = [
            entries
            for t in self._transfers.values()
            if isinstance(t, StoreTransfer)
            and lease is not None
            and t.lease is lease
            and t.shard_index == shard_index
            for entries in t.entries
        ]
        return np.concatenate(busy) if busy else np.empty(0, np.uint32)
