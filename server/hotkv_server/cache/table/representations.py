"""Representations in the index: entries of their own, each with a slot of its own size, linked with
the block that it belongs to.

Always true: a ready representation and one ready block of the same key space and hash name each
other; a block has at most one, the version stored last. The eviction policy does not know
representations, and no notice tells of them: they are removed with their block, or for another
version. One is removed alone only if a block needs its room: when its slab is lent to another slot
size, or nothing else of its size may be evicted. A pinned one that is removed can't be found any
more, and keeps its slot until its last reader is done.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.table import Words
from hotkv_server.cache.table.index import BlockIndex, Keys
from hotkv_server.cache.values import Entries, Int64s

FreeSlots = Callable[[list[Words]], None]
"""Frees the slots of removed records, in parts of one slot size."""


def blocks_first(groups: list[int]) -> list[int]:
    """Places of groups, those of representations last."""
    return sorted(range(len(groups)), key=lambda at: groups[at] >= MAX_GROUPS)


class Representations:
    """Representations of one index. `declared`: False as long as there can be none, so that a
    server without any pays nothing."""

    def __init__(self, index: BlockIndex, free_slots: FreeSlots) -> None:
        self.declared = False
        self._index = index
        self._records = index.table.records
        self._free_slots = free_slots

    def __repr__(self) -> str:
        return f"Representations({len(self.ready())} ready)"

    def declare(self, key_space_id: int, group_index: int, salt: int) -> None:
        """Makes room for representations of one kind."""
        self._index.add_key_space(key_space_id, [salt], group_index)
        self.declared = True

    def among(self, entries: Entries) -> NDArray[np.bool_]:
        """Which of the entries [n] are representations."""
        if not self.declared:
            return np.zeros(len(entries), np.bool_)
        are: NDArray[np.bool_] = (
            self._records[entries, table.W_GROUP_STATE] & np.uint32(0xFFFF) >= MAX_GROUPS
        )
        return are

    def ready(self) -> Entries:
        """All representations that are ready. Linear in capacity."""
        entries = np.flatnonzero(self._index.states() == table.STATE_READY).astype(np.uint32)
        return entries[self.among(entries)]

    def of(self, entries: Entries) -> Entries:
        """The representation of each ready block [n], 0 for none."""
        linked: Entries = self._records[entries, table.W_REPRESENTATION]
        return linked

    def bytes_with(self, entries: Entries) -> Int64s:
        """Slot bytes [n] that are freed with each entry: its own, and for a block those of its
        representation."""
        sizes = self._index.slot_bytes(entries)
        if self.declared:
            sizes += np.where(self.among(entries), 0, self._index.slot_bytes(self.of(entries)))
        return sizes

    def blocks_of(self, entries: Entries) -> Entries:
        """Per entry [n] the block whose heat counts for it: that of a ready representation, else
        the entry itself."""
        if not self.declared:
            return entries
        blocks = self._records[entries, table.W_REPRESENTATION]
        return np.where(self.among(entries) & (blocks != 0), blocks, entries)

    def linked(self, entries: Entries) -> NDArray[np.bool_]:
        """Which of the entries [n] are representations of a block that is ready."""
        are: NDArray[np.bool_] = self.among(entries) & (
            self._records[entries, table.W_REPRESENTATION] != 0
        )
        return are

    def publish(self, entries: Entries, blocks: Entries, checks: Keys | None = None) -> None:
        """Makes reserved representations ready, each for a ready block, in place of the former one.
        `checks`: as in `Space.publish`."""
        former = self.of(blocks)
        self._remove(former[former != 0])
        self._index.publish(
            entries,
            self._index.mixed(entries),
            np.zeros(len(entries), np.uint64) if checks is None else checks,
        )
        self._records[blocks, table.W_REPRESENTATION] = entries
        self._records[entries, table.W_REPRESENTATION] = blocks

    def follow(self, parts: Sequence[Words]) -> None:
        """Removes the representations of blocks that were removed, given the blocks' records."""
        for rows in parts if self.declared else ():
            linked = rows[:, table.W_REPRESENTATION]
            self._remove(linked[linked != 0])

    def drop(self, entries: Entries) -> None:
        """Removes ready representations; their blocks stay."""
        self._records[self._records[entries, table.W_REPRESENTATION], table.W_REPRESENTATION] = 0
        self._remove(entries)

    def _remove(self, entries: Entries) -> None:
        if not len(entries):
            return
        is_pinned = self._index.pins[entries] > 0
        going = entries[~is_pinned]
        self._free_slots(self._index.remove(going, self._index.mixed(going)))
        self._index.detach(entries[is_pinned])

    def check_invariants(self) -> None:
        """Raises AssertionError if links disagree. Linear in capacity."""
        live = np.flatnonzero(self._index.states()).astype(np.uint32)
        is_ready = self._index.states()[live] == table.STATE_READY
        links = self._records[live, table.W_REPRESENTATION]
        assert np.all(links[~is_ready] == 0), "an entry that is not ready is linked"
        mine = self.among(live)
        assert np.all(links[mine & is_ready] != 0), "a representation has no block"
        linked, other = live[links != 0], links[links != 0]
        assert np.array_equal(self._records[other, table.W_REPRESENTATION], linked), (
            "a link does not hold both ways"
        )
        assert np.all(self.among(linked) != self.among(other)), "a link joins two of a kind"
        keys = [*range(8), table.W_KEY_SPACE]
        assert np.array_equal(self._records[linked][:, keys], self._records[other][:, keys]), (
            "a link joins two keys"
        )
