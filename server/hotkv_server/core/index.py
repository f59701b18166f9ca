"""The block index: the one writer of the shared block table, and what the server alone knows of each entry.

Always true: an entry number is free, reserved, ready or detached; a key has at most one entry that is reserved or ready; only ready
entries can be found by readers. Entries are rows of arrays, never Python objects. Nothing here evicts or allocates slots.
"""

import numpy as np
from numpy.typing import NDArray

from hotkv import native, table
from hotkv.table import RESERVED_FLAG, SLOT_ALIGN, BlockTable, Words
from hotkv_server.core import twins

Entries = NDArray[np.uint32]
Int64s = NDArray[np.int64]


class BlockIndex:
    """Entries by key. `salts` [key space, group]: mixed into hashes; row 0 is never used."""

    def __init__(self, block_table: BlockTable) -> None:
        self.table = block_table
        self.capacity = block_table.geometry.capacity
        self.pins = np.zeros(self.capacity + 1, np.uint32)
        self._free = np.arange(self.capacity, 0, -1, dtype=np.uint32)
        self._num_free = self.capacity
        self._salts = np.zeros((1, 1), np.uint64)
        self._kernels = native.load("hotkv.kernels")

    def __repr__(self) -> str:
        return f"BlockIndex({self.num_entries}/{self.capacity} entries)"

    @property
    def num_entries(self) -> int:
        """Entries that are not free."""
        return self.capacity - self._num_free

    def add_key_space(self, key_space_id: int, salts: list[int]) -> None:
        """Declares a key space and the salts of its groups."""
        rows, columns = max(self._salts.shape[0], key_space_id + 1), max(self._salts.shape[1], len(salts))
        grown = np.zeros((rows, columns), np.uint64)
        grown[: self._salts.shape[0], : self._salts.shape[1]] = self._salts
        grown[key_space_id, : len(salts)] = salts
        self._salts = grown

    def find(self, key_space_id: int, group_index: int, hashes: Words) -> Entries:
        """Entry words [n]: 0 for a miss, high bit set while reserved. `hashes`: [n, 8] words."""
        salt = int(self._salts[key_space_id, group_index])
        return self.table.find(hashes, salt, key_space_id, group_index)[0]

    def probe(self, key_space_id: int, group_index: int, hashes: Words) -> Entries:
        """Entry words [n] by tag alone, as readers of the table see them; faster than `find`, and a hint."""
        return self.table.probe(hashes.view(np.uint64)[:, 0], int(self._salts[key_space_id, group_index]))

    def insert(
        self, key_space_id: int, group_index: int, hashes: Words, offsets: Int64s, slot_bytes: int, depths: Int64s, lease_number: int
    ) -> Entries:
        """Adds reserved entries for keys that are not in the index; fewer, from the first on, where the index is full."""
        count = min(len(hashes), self._num_free)
        entries = self._free[self._num_free - count : self._num_free][::-1].copy()
        records = np.zeros((count, table.RECORD_WORDS), np.uint32)
        records[:, :8] = hashes[:count]
        records[:, table.W_CHECK] = lease_number
        records[:, table.W_KEY_SPACE] = key_space_id
        records[:, table.W_GROUP_STATE] = group_index | table.STATE_RESERVED << 16
        records[:, table.W_OFFSET] = offsets[:count] // SLOT_ALIGN
        records[:, table.W_SIZE] = slot_bytes // SLOT_ALIGN
        records[:, table.W_GENERATION] = self.table.records[entries, table.W_GENERATION] + 1
        records[:, table.W_DEPTH] = depths[:count]
        mixed = table.mix(records[:, :8], int(self._salts[key_space_id, group_index]))
        module = self._kernels or twins
        inserted = int(module.insert(self.table.buckets, self.table.records, mixed, entries, records))
        # The stack's top was handed out first, so what was not inserted is still in place below it.
        self._num_free -= inserted
        return entries[:inserted]

    def set_parents(self, entries: Entries, parents: Entries) -> None:
        """Notes the entry before each reserved one in its chain. A hint: that entry may go, and its number be used anew."""
        self.table.records[entries, table.W_PARENT] = parents

    def owners(self, entries: Entries) -> NDArray[np.uint32]:
        """Number of the write lease of reserved entries; meaningless for others."""
        owners: NDArray[np.uint32] = self.table.records[entries, table.W_CHECK]
        return owners

    def mark_written(self, entries: Entries, mark: int) -> NDArray[np.uint32]:
        """Adds `mark` to the shard masks of reserved entries and returns the masks; they lie in the check value's upper half."""
        self.table.records[entries, table.W_CHECK + 1] |= np.uint32(mark)
        masks: NDArray[np.uint32] = self.table.records[entries, table.W_CHECK + 1]
        return masks

    def publish(self, entries: Entries, checks: NDArray[np.uint64]) -> None:
        """Makes reserved entries ready: from here on every reader finds them."""
        module = self._kernels or twins
        done = int(module.publish(self.table.buckets, self.table.records, self.mixed(entries), entries, checks))
        assert done == len(entries), "published an entry that is not in the table"

    def remove(self, entries: Entries) -> None:
        """Drops entries, reserved or ready; their numbers are free again."""
        self._unlink(entries)
        self._release(entries)

    def detach(self, entries: Entries) -> None:
        """Takes ready entries out of the table; their numbers and slots stay taken until `remove_detached`."""
        groups = self.table.records[entries, table.W_GROUP_STATE] & np.uint32(0xFFFF)
        self._unlink(entries)
        self.table.records[entries, table.W_GROUP_STATE] = groups | np.uint32(table.STATE_DETACHED << 16)

    def remove_detached(self, entries: Entries) -> None:
        """Drops detached entries; their numbers are free again."""
        assert np.all(self.states()[entries] == table.STATE_DETACHED), "dropped an entry that is in the table"
        self.table.records[entries, table.W_GROUP_STATE] = 0
        self._release(entries)

    def _unlink(self, entries: Entries) -> None:
        module = self._kernels or twins
        done = int(module.remove(self.table.buckets, self.table.records, self.mixed(entries), entries))
        assert done == len(entries), "removed an entry that is not in the table"

    def _release(self, entries: Entries) -> None:
        self._free[self._num_free : self._num_free + len(entries)] = entries
        self._num_free += len(entries)

    def pin(self, entries: Entries, change: int) -> None:
        """Adds `change` (1 or -1) to the pins of entries; an entry listed twice counts twice."""
        if change > 0:
            np.add.at(self.pins, entries, np.uint32(1))
        else:
            assert np.all(self.pins[entries] > 0), "pin given back twice"
            np.subtract.at(self.pins, entries, np.uint32(1))

    def offsets(self, entries: Entries) -> Int64s:
        """Slot offsets in bytes."""
        offsets: Int64s = self.table.records[entries, table.W_OFFSET].astype(np.int64) * SLOT_ALIGN
        return offsets

    def slot_bytes(self, entries: Entries) -> Int64s:
        """Slot sizes in bytes, rounded up to SLOT_ALIGN."""
        sizes: Int64s = self.table.records[entries, table.W_SIZE].astype(np.int64) * SLOT_ALIGN
        return sizes

    def states(self) -> NDArray[np.uint32]:
        """State of every entry number: 0 free, STATE_RESERVED, STATE_READY or STATE_DETACHED."""
        return self.table.records[:, table.W_GROUP_STATE] >> np.uint32(16)

    def ready_entries(self, slot_bytes: int = 0, key_space_id: int = 0) -> Entries:
        """Numbers of ready entries, of one slot size or key space if given. Linear in capacity."""
        records = self.table.records
        mask = self.states() == table.STATE_READY
        if slot_bytes:
            mask &= records[:, table.W_SIZE] == slot_bytes // SLOT_ALIGN
        if key_space_id:
            mask &= records[:, table.W_KEY_SPACE] == key_space_id
        return np.flatnonzero(mask).astype(np.uint32)

    def keys(self, entries: Entries) -> tuple[NDArray[np.uint32], NDArray[np.uint32], Words]:
        """Key space ids [n], group indices [n] and hash words [n, 8] of entries."""
        rows = self.table.records[entries]
        return rows[:, table.W_KEY_SPACE], rows[:, table.W_GROUP_STATE] & np.uint32(0xFFFF), np.ascontiguousarray(rows[:, :8])

    def mixed(self, entries: Entries) -> NDArray[np.uint64]:
        """Keys of entries as 64 bits [n]: the hash mixed with key space and group, as the table does."""
        key_spaces, groups, hashes = self.keys(entries)
        prefixes = hashes[:, 0].astype(np.uint64) | (hashes[:, 1].astype(np.uint64) << np.uint64(32))
        mixed: NDArray[np.uint64] = table.mix_prefixes(prefixes ^ self._salts[key_spaces, groups], 0)
        return mixed

    def check_invariants(self) -> None:
        """Raises AssertionError where table, states and free stack disagree. Linear in capacity."""
        buckets = self.table.buckets
        words = buckets[:, table.ENTRIES :].reshape(-1)
        linked = words[words != 0]
        numbers = linked & ~RESERVED_FLAG
        states = self.states()
        detached = np.flatnonzero(states == table.STATE_DETACHED)
        assert len(np.unique(numbers)) == len(numbers) == self.num_entries - len(detached), "entries linked twice or miscounted"
        assert np.all(self.pins[detached] > 0), "a detached entry that nobody reads was kept"
        assert np.all(states[numbers] == np.where(linked >= RESERVED_FLAG, table.STATE_RESERVED, table.STATE_READY)), (
            "state and flag differ"
        )
        free = self._free[: self._num_free]
        assert len(np.unique(free)) == len(free) and not np.isin(free, numbers).any(), "entry both free and linked"
        assert np.all(buckets[:, table.SEQ] % 2 == 0), "a bucket was left locked"
        assert np.all(self.pins[free] == 0), "a free entry is pinned"
        mixed = self.mixed(numbers)
        homes = table.home_buckets(mixed, len(buckets))
        at = np.flatnonzero(words != 0) // table.WAYS
        distance = (at - homes) % len(buckets)
        overflow = np.zeros(len(buckets), np.int64)
        for home, steps in zip(homes[distance > 0], distance[distance > 0], strict=True):
            overflow[(home + np.arange(steps)) % len(buckets)] += 1
        assert np.array_equal(overflow, buckets[:, table.OVERFLOW]), "overflow counts are wrong"
