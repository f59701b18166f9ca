"""Holds: entries that requests asked to keep for a time, pinned until it is over.

Always true: an entry is held once, until the latest time anybody asked for; a held entry has exactly one pin from here; held bytes never
exceed the budget, nor those of a tenant what is its share of it; what does not fit is not held. Holds belong to nobody: they outlive the
session that asked.
"""

import numpy as np
from numpy.typing import NDArray

from hotkv_server.core.index import BlockIndex
from hotkv_server.core.tenants import TenantBook
from hotkv_server.core.values import Entries


class Holds:
    """Held entries in rising order and their ends, seconds of `now_s`. None ends before `_next_end_s`."""

    def __init__(self, index: BlockIndex, tenants: TenantBook, share: float) -> None:
        self.held_bytes = 0
        self._index = index
        self._tenants = tenants
        self._share = share
        self._entries = np.empty(0, np.uint32)
        self._until_s = np.empty(0, np.float64)
        self._next_end_s = np.inf

    @property
    def budget_bytes(self) -> int:
        """Most that may be held: a share of the arena as far as it has memory. Only grows."""
        return int(self._share * self._tenants.capacity_bytes)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Holds({len(self)} entries, {self.held_bytes}/{self.budget_bytes} B)"

    def hold(self, entries: Entries, until_s: float) -> int:
        """Keeps ready entries of one tenant until then; returns how many of them are held, from the first on where the budget ends."""
        entries = entries[np.sort(np.unique(entries, return_index=True)[1])]
        places = np.searchsorted(self._entries, entries)
        known = np.append(self._entries, np.uint32(0))[places] == entries
        self._until_s[places[known]] = np.maximum(self._until_s[places[known]], until_s)
        fresh = entries[~known]
        sizes = np.cumsum(self._index.slot_bytes(fresh))
        num_fitting = int(np.searchsorted(sizes, self._room_bytes(fresh), side="right"))
        if num_fitting:
            fitting = np.sort(fresh[:num_fitting])
            self._index.pin(fitting, 1)
            self.held_bytes += int(sizes[num_fitting - 1])
            places = np.searchsorted(self._entries, fitting)
            self._entries = np.insert(self._entries, places, fitting)
            self._until_s = np.insert(self._until_s, places, until_s)
            self._next_end_s = min(self._next_end_s, until_s)
        return int(known.sum()) + num_fitting

    def _room_bytes(self, fresh: Entries) -> int:
        """What may still be held for the tenant of these entries."""
        room_bytes = self.budget_bytes - self.held_bytes
        if not self._tenants.is_used or not len(fresh):
            return room_bytes
        tenant = self._tenants.of(self._index.keys(fresh[:1])[0])
        mine = self._entries[self._tenants.of(self._index.keys(self._entries)[0]) == tenant]
        bound = int(self._share * self._tenants.surely_bytes(int(tenant[0])))
        return min(room_bytes, max(0, bound - int(self._index.slot_bytes(mine).sum())))

    def expire(self, now_s: float) -> None:
        """Lets go of entries whose time is over."""
        if now_s >= self._next_end_s:
            self._keep(self._until_s > now_s)

    def let_go(self, entries: Entries) -> None:
        """Lets go of these entries at once; those that are not held are passed over."""
        if len(self._entries):
            self._keep(~np.isin(self._entries, entries))

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        gone = self._entries[~kept]
        self._index.pin(gone, -1)
        self.held_bytes -= int(self._index.slot_bytes(gone).sum())
        self._entries, self._until_s = self._entries[kept], self._until_s[kept]
        self._next_end_s = float(self._until_s.min(initial=np.inf))

    def entries(self) -> Entries:
        """All held entries, in rising order."""
        return self._entries

    def check_invariants(self) -> None:
        """Raises AssertionError where the books disagree."""
        assert np.all(np.diff(self._entries.astype(np.int64)) > 0), "an entry is held twice"
        assert self.held_bytes == int(self._index.slot_bytes(self._entries).sum()) <= self.budget_bytes, "held bytes miscounted"
        assert np.all(self._index.pins[self._entries] > 0), "a held entry is not pinned"
