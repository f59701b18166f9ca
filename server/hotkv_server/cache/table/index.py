"""`BlockIndex` finds, adds and removes entries by key in the shared block table, which only this
module writes. `Chains` links the blocks of a prompt. `Sketches` links each block with its
sketch: a compact summary of its attention keys, by which sparse attention selects blocks.

Always true: an entry number is free, reserved, ready or detached (removed from the table while
pinned). A key has at most one reserved or ready entry. Clients that read the table can find only
ready entries. Entries are rows of arrays, never Python objects. This module neither evicts entries
nor allocates slots (places for blocks).
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import native, table
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.table import RESERVED_FLAG, SLOT_ALIGN, BlockTable, Words
from hotkv_server.cache.values import KEY_SPACE_ROWS, MAX_SKETCHES, BoolMask, Entries, Int64s

Keys = NDArray[np.uint64]


class BlockIndex:
    """Finds blocks in the block table by key. Each block, and each sketch (compact summary
    of a block's attention keys), has an entry: a record in the table, which has a number. This
    object also stores data about each entry that only the server needs.

    num_entries: number of entries that are not free; at most `limit`.
    limit: number of entries whose records have memory.
    num_unpins: number of calls that released pins.
    pins: number of pins on each entry, by entry number.
    unverified: by entry number, True if the bytes must be compared with the checksum
        before a load: the entry came from an old table, or its bytes did not match and a lease
        still pins it.

    `_salts`: salts that are mixed into hashes, by group and by key space (its number modulo
        KEY_SPACE_ROWS).
    """

    def __init__(self, block_table: BlockTable) -> None:
        self.table = block_table
        self.capacity = block_table.geometry.capacity
        self.pins = np.zeros(self.capacity + 1, np.uint32)
        self.unverified = np.zeros(self.capacity + 1, np.bool_)
        self.num_entries = self.num_unpins = 0
        self.limit = self.capacity
        self._num_backed = 0
        # The free entry numbers form a list: the offset field of a free number's record has the
        # next free number. `_free_head` is the first (0: none). All numbers from `_next_unused` on
        # are free too.
        self._free_head = 0
        self._next_unused = 1
        # A page of this array uses no memory until it is written. So the array takes 64 KiB for
        # each group index that any key space uses, however many key spaces come and go.
        self._salts = np.zeros((MAX_GROUPS + MAX_SKETCHES, KEY_SPACE_ROWS), np.uint64)
        self._kernels = native.require("hotkv_server.cache.table.table_kernels")

    def back(self, num_entries: int) -> None:
        """Sets how many entries (records in the block table) have memory for their records, and so
        how many entries may be in use (`limit`). `num_entries`: at least the number of entries in
        use. Until the first call, all entries count as having memory."""
        assert num_entries >= self.num_entries, "entries in use have lost their memory"
        # Touch the pages of `pins` now, a few at a time, so that the first large lease need not
        # wait until the kernel has allocated them.
        self.pins[self._num_backed + 1 : num_entries + 1] += np.uint32(0)
        self.limit, self._num_backed = num_entries, max(num_entries, self._num_backed)

    def __repr__(self) -> str:
        return f"BlockIndex({self.num_entries}/{self.capacity} entries)"

    def add_key_space(self, key_space_id: int, salts: list[int], first_group: int = 0) -> None:
        """Registers the salts of a key space's groups, beginning with the group `first_group`. A
        salt is a number that is mixed into the hashes of a group. So equal hashes in two groups, or
        in two key spaces (each is a model in a configuration), have different keys."""
        self._salts[first_group : first_group + len(salts), key_space_id % KEY_SPACE_ROWS] = salts

    def _salt(self, key_space_id: int, group_index: int) -> int:
        return int(self._salts[group_index, key_space_id % KEY_SPACE_ROWS])

    def find(self, key_space_id: int, group_index: int, hashes: Words) -> Entries:
        """Returns an entry word for each hash: the entry number, with the high bit set while the
        entry is reserved; 0 if the hash has no entry. `hashes`: each a row of eight uint32 words.
        """
        salt = self._salt(key_space_id, group_index)
        return self.table.find(hashes, salt, key_space_id, group_index)

    def probe(self, key_space_id: int, group_index: int, hashes: Words) -> Entries:
        """Returns entry words as `find` does, but compares only 32 bits of each key (the tag), as
        clients that map the table do. Faster than `find`, but in rare cases wrong: the entry
        (record in the block table) may be the entry of another hash whose key has the same 32 bits.
        """
        return self.table.probe(hashes.view(np.uint64)[:, 0], self._salt(key_space_id, group_index))

    def insert(
        self,
        key_space_id: int,
        group_index: int,
        hashes: Words,
        offsets: Int64s,
        slot_bytes: int,
        depths: Int64s,
        lease_number: int,
    ) -> Entries:
        """Adds reserved entries (records in the block table) for keys that have no entry, in order,
        until the index is full. Returns the numbers of the new entries.

        offsets, depths: two values for each key, int64: the offset of its slot (place for a block)
            in bytes, and the number of blocks before its block in the chain.
        lease_number: number of the write lease, or of the move between tiers, that owns the
            entries.
        """
        count = min(len(hashes), self.limit - self.num_entries)
        entries = np.empty(count, np.uint32)
        fitted, self._free_head, self._next_unused = self._kernels.insert(
            self.table.buckets,
            self.table.records,
            hashes,
            offsets,
            depths,
            np.uint64(self._salt(key_space_id, group_index)),
            lease_number,
            key_space_id,
            group_index,
            slot_bytes // SLOT_ALIGN,
            self._free_head,
            self._next_unused,
            entries,
        )
        self.num_entries += fitted
        return entries[:fitted]

    def owners(self, entries: Entries) -> NDArray[np.uint32]:
        """Returns for each reserved entry (record in the block table) the number of its owner: a
        write lease, or a move of blocks between tiers. Meaningless for entries in other states."""
        owners: NDArray[np.uint32] = self.table.records[entries, table.W_CHECK]
        return owners

    def mark_written(self, entries: Entries, mark: int) -> NDArray[np.uint32]:
        """Marks a shard (the part of a block from one rank) of reserved entries (records in the
        block table) as written. Returns for each entry the mask of its written shards, in which bit
        n stands for shard n.

        mark: the bit to set in each mask; 0 sets none, so that the call only returns the masks.

        A reserved entry has no checksum yet, so its mask is stored in the upper half
        of that field of the record.
        """
        masks = np.empty(len(entries), np.uint32)
        self._kernels.mark_written(self.table.records, entries, mark, masks)
        return masks

    def publish(self, entries: Entries, keys: Keys, checks: NDArray[np.uint64]) -> None:
        """Makes reserved entries (records in the block table) ready: from here on, lookups find
        them.

        keys: the entries' keys, as `mixed` returns them.
        checks: the entries' checksums.
        """
        done = int(
            self._kernels.publish(self.table.buckets, self.table.records, keys, entries, checks)
        )
        assert done == len(entries), "published an entry that is not in the table"

    def remove(self, entries: Entries, keys: Keys) -> list[Words]:
        """Removes reserved or ready entries (records in the block table) and frees their numbers.
        Returns the records that the entries had, in arrays as `parts` makes them. `keys`: the
        entries' keys, as `mixed` returns them."""
        rows = self._unlink(entries, keys)
        self._release(entries)
        return self.parts(rows)

    def parts(self, rows: Words) -> list[Words]:
        """Splits records (each a row of 18 uint32 words) into arrays in which all records have the
        same key space (a model in a configuration), group and slot size."""
        if not len(rows) or self._kernels.is_uniform(rows):
            return [rows] if len(rows) else []
        owners = rows[:, [table.W_KEY_SPACE, table.W_GROUP_STATE, table.W_SIZE]] & np.array(
            [0xFFFF_FFFF, 0xFFFF, 0xFFFF_FFFF], np.uint32
        )
        _, part_of = np.unique(owners, axis=0, return_inverse=True)
        return [np.ascontiguousarray(rows[part_of == part]) for part in range(part_of.max() + 1)]

    def detach(self, entries: Entries) -> None:
        """Removes ready or reserved entries (records in the block table) from the table, so that
        lookups miss them. The entries keep their numbers and slots (places for blocks) until
        `remove_detached`."""
        self._unlink(entries, self.mixed(entries), table.STATE_DETACHED)
        self.table.records[entries, table.W_SKETCH] = 0

    def remove_detached(self, entries: Entries) -> None:
        """Removes detached entries (flushed while pinned) and frees their numbers."""
        assert np.all(self._states_of(entries) == table.STATE_DETACHED), (
            "dropped an entry that is in the table"
        )
        self.table.records[entries, table.W_GROUP_STATE] = 0
        self._release(entries)

    def _unlink(self, entries: Entries, keys: Keys, state: int = 0) -> Words:
        rows = np.empty((len(entries), table.RECORD_WORDS), np.uint32)
        done = int(
            self._kernels.unlink(
                self.table.buckets, self.table.records, keys, entries, rows, np.uint32(state)
            )
        )
        assert done == len(entries), "removed an entry that is not in the table"
        return rows

    def _release(self, entries: Entries) -> None:
        self._free_head = int(self._kernels.release(self.table.records, entries, self._free_head))
        self.unverified[entries] = False
        self.num_entries -= len(entries)

    def pin(self, entries: Entries, change: int) -> None:
        """Adds `change` (1 or -1) to the number of pins of each entry (table record of a block);
        twice for an entry that is listed twice."""
        if not len(entries):
            return
        self.num_unpins += change < 0
        good = self._kernels.add_pins(self.pins, entries, change)
        assert good, "pin given back twice"

    def evictable(self, entries: Entries, slot_bytes: int = 0) -> NDArray[np.bool_]:
        """Returns a mask of the entries (table records of blocks) that are ready and not pinned. If
        `slot_bytes` is given, they must also have that slot size."""
        out = np.empty(len(entries), np.bool_)
        self._kernels.evictable(
            self.table.records, self.pins, entries, slot_bytes // SLOT_ALIGN, out
        )
        return out

    def offsets(self, entries: Entries) -> Int64s:
        """Returns the offsets of the entries' slots (places for blocks) in the arena, in bytes."""
        offsets: Int64s = self.table.records[entries, table.W_OFFSET].astype(np.int64) * SLOT_ALIGN
        return offsets

    def slot_bytes(self, entries: Entries) -> Int64s:
        """Returns the sizes of the entries' slots (places for blocks) in bytes, rounded up to
        SLOT_ALIGN."""
        sizes: Int64s = self.table.records[entries, table.W_SIZE].astype(np.int64) * SLOT_ALIGN
        return sizes

    def depths(self, entries: Entries) -> Int64s:
        """Returns for each entry (record in the block table) how many blocks precede it in its
        sequence."""
        depths: Int64s = self.table.records[entries, table.W_DEPTH].astype(np.int64)
        return depths

    def checks(self, entries: Entries) -> NDArray[np.uint64]:
        """Returns the checksums of ready entries (records in the block table); 0
        without a checksum."""
        words = np.ascontiguousarray(self.table.records[entries, table.W_CHECK : table.W_CHECK + 2])
        return words.view(np.uint64)[:, 0]

    @property
    def num_numbers(self) -> int:
        """Upper end of the entry numbers in use: every entry number that was ever used is less than
        this."""
        return self._next_unused

    def states(self, first: int = 0, end: int | None = None) -> NDArray[np.uint32]:
        """Returns the states of the entry numbers from `first` to `end` - 1 that were ever used: 0
        (free), STATE_RESERVED, STATE_READY or STATE_DETACHED. `end`: None for no upper bound."""
        upto = self._next_unused if end is None else min(end, self._next_unused)
        return self.table.records[first:upto, table.W_GROUP_STATE] >> np.uint32(16)

    def is_ready(self, entries: Entries) -> NDArray[np.bool_]:
        """Returns a mask of the entries (records in the block table) that are ready."""
        ready: NDArray[np.bool_] = self._states_of(entries) == table.STATE_READY
        return ready

    def can_be_read(self, entries: Entries) -> NDArray[np.bool_]:
        """Returns a mask of the entries (records in the block table) that are ready or detached
        (removed from the table while pinned). Their slots (places for blocks) hold whole blocks,
        except slots of entries that `Removal.forsake` has detached."""
        states = self._states_of(entries)
        mask: BoolMask = (states == table.STATE_READY) | (states == table.STATE_DETACHED)
        return mask

    def _states_of(self, entries: Entries) -> NDArray[np.uint32]:
        states: NDArray[np.uint32] = self.table.records[entries, table.W_GROUP_STATE]
        return states >> np.uint32(16)

    def ready_blocks(
        self, key_space_id: int = 0, first: int = 0, end: int | None = None
    ) -> Entries:
        """Returns the entries (records in the block table) with numbers from `first` to `end` - 1
        that are ready blocks, not sketches (compact summaries of attention keys).
        `key_space_id`: 0 for all key spaces.
        `end`: None for no upper bound."""
        upto = self._next_unused if end is None else min(end, self._next_unused)
        records = self.table.records[first:upto]
        states = records[:, table.W_GROUP_STATE]
        is_block = states & np.uint32(0xFFFF) < MAX_GROUPS
        mask = (states >> np.uint32(16) == table.STATE_READY) & is_block
        if key_space_id:
            mask &= records[:, table.W_KEY_SPACE] == key_space_id
        return (first + np.flatnonzero(mask)).astype(np.uint32)

    def keys(self, entries: Entries) -> tuple[NDArray[np.uint32], NDArray[np.uint32], Words]:
        """Returns key space ids, group indices and hashes (eight uint32 words each) of entries
        (records in the block table)."""
        rows = self.table.records[entries]
        return (
            rows[:, table.W_KEY_SPACE],
            rows[:, table.W_GROUP_STATE] & np.uint32(0xFFFF),
            np.ascontiguousarray(rows[:, :8]),
        )

    def key_spaces(self, entries: Entries) -> NDArray[np.uint32]:
        """Returns the key space id of each entry (record in the block table)."""
        key_spaces: NDArray[np.uint32] = self.table.records[entries, table.W_KEY_SPACE]
        return key_spaces

    def mixed(self, entries: Entries) -> Keys:
        """Returns the keys (uint64) by which the table finds these entries (records in the block
        table). A key is computed from the block's hash and the salt (a number) of its key space and
        group."""
        out = np.empty(len(entries), np.uint64)
        self._kernels.mixed_keys(self.table.records, self._salts, entries, out)
        return out

    def mixed_hashes(self, key_space_id: int, group_index: int, hashes: Words) -> Keys:
        """Returns the keys (uint64) by which the table would find blocks with these hashes, whether
        or not the index has the blocks. `mixed` returns the same keys for entries (records in the
        block table)."""
        return table.mix(hashes, self._salt(key_space_id, group_index))

    def check_invariants(self) -> None:
        """Raises AssertionError if the buckets of the table, the states of the entries and the list
        of free entry numbers disagree. Takes time linear in the capacity."""
        _check_buckets(self, self.states())
        _check_numbers(self, self.states())


def _check_numbers(index: BlockIndex, states: NDArray[np.uint32]) -> None:
    """Raises AssertionError unless the list of free numbers contains exactly the free entries, the
    number of entries is right, and free entries are neither pinned nor marked unverified. Reserved
    entries must not be marked unverified either. `states`: state of each entry, by entry number."""
    free: list[int] = []
    number = index._free_head
    while number and len(free) <= index.capacity:
        free.append(number)
        number = int(index.table.records[number, table.W_OFFSET])
    assert np.array_equal(np.sort(free), 1 + np.flatnonzero(states[1:] == 0)), (
        "the chain of free numbers is broken"
    )
    assert index.num_entries == len(states) - 1 - len(free), "entries miscounted"
    assert np.all(index.pins[free] == 0), "a free entry is pinned"
    assert not np.any(index.unverified[np.flatnonzero(states == table.STATE_RESERVED)]), (
        "a reserved entry counts as not verified"
    )
    assert not np.any(index.unverified[free]), "a free entry counts as not verified"


def _check_buckets(index: BlockIndex, states: NDArray[np.uint32]) -> None:
    """Raises AssertionError unless the buckets of the table contain exactly the reserved and ready
    entries (records in the block table), each key once. `states`: state of each entry, by entry
    number."""
    buckets = index.table.buckets
    words = buckets[:, table.ENTRIES :].reshape(-1)
    linked = words[words != 0]
    numbers = linked & ~RESERVED_FLAG
    detached = np.flatnonzero(states == table.STATE_DETACHED)
    assert len(np.unique(numbers)) == len(numbers) == index.num_entries - len(detached), (
        "entries linked twice or miscounted"
    )
    assert np.all(index.pins[detached] > 0), "a detached entry that nobody reads was kept"
    keys = np.ascontiguousarray(
        index.table.records[numbers][:, [*range(8), table.W_KEY_SPACE, table.W_GROUP_STATE]]
    )
    keys[:, -1] &= np.uint32(0xFFFF)
    assert len(np.unique(keys.view("V40"))) == len(numbers), "a key has two entries"
    is_reserved = linked >= RESERVED_FLAG
    expected = np.where(is_reserved, table.STATE_RESERVED, table.STATE_READY)
    assert np.all(states[numbers] == expected), "state and flag differ"
    assert np.all(buckets[:, table.SEQ] % 2 == 0), "a bucket was left locked"
    homes = table.home_buckets(index.mixed(numbers), len(buckets))
    at = np.flatnonzero(words != 0) // table.WAYS
    distance = (at - homes) % len(buckets)
    overflow = np.zeros(len(buckets), np.int64)
    for home, steps in zip(homes[distance > 0], distance[distance > 0], strict=True):
        overflow[(home + np.arange(steps)) % len(buckets)] += 1
    assert np.array_equal(overflow, buckets[:, table.OVERFLOW]), "overflow counts are wrong"


# Chains link each block with the block before it in the prompt that it was stored for.
#
# The link is a field of a block's record, its parent: the entry number of the block before it. Only
# `Chains` sets this field; in a new entry it is 0. A link may be out of date: the entry that it
# names may have been removed, and its number reused for another block. So a link counts only if
# that entry is ready, has the same key space and group, and a depth (number of blocks before it in
# the prompt) that is one less.


class Chains:
    """Links from the entry (record in the block table) of each block to the entry before it in its
    chain (prompt)."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._records = index.table.records
        self._kernels = native.require("hotkv_server.cache.table.table_kernels")

    def __repr__(self) -> str:
        return f"Chains({self._index!r})"

    def set_parents(self, entries: Entries, parents: Entries) -> None:
        """Links each entry (record in the block table) of `entries` with the entry before it in its
        chain (prompt). `parents`: the entries before them; 0 for no entry."""
        self._records[entries, table.W_PARENT] = parents

    def link(
        self, key_space_id: int, group_index: int, words: Entries, parent: Words | None
    ) -> None:
        """Links consecutive blocks of a prompt: the entry (table record) of each block with the
        entry of the block before it. Entries that existed before this call are linked again,
        because the block before them may have been evicted and stored under another entry number.

        words: entry words of the chain's blocks; 0 for a block without an entry.
        parent: hash of the block before these blocks; None if the first of these blocks begins the
            chain.
        """
        first = np.uint32(0)
        if parent is not None:
            found = self._index.find(key_space_id, group_index, parent.reshape(1, 8))
            first = found[0] & ~RESERVED_FLAG
        self._kernels.link(self._records, words, first)

    def ending_with(
        self, key_space_id: int, group_index: int, last: Words | None, most: int
    ) -> Entries:
        """Returns the entries (records in the block table) of the block with the hash `last` and of
        up to `most` ready blocks before it in its prompt (see `ancestors`), in the order of the
        prompt. Returns an empty array if the block is not ready or `last` is None."""
        if last is None:
            return np.empty(0, np.uint32)
        end = self._index.find(key_space_id, group_index, last.reshape(1, 8))
        if not table.is_ready(end)[0]:
            return np.empty(0, np.uint32)
        return np.append(self.ancestors(int(end[0]), most), end)

    def ancestors(self, entry: int, most: int) -> Entries:
        """Returns the ready entries (records in the block table) before this entry (a block) in its
        prompt, in the order of the prompt. Follows the links from each block to the block before
        it, over at most `most` entries. Stops at the first link that is not valid."""
        nearest_first = np.empty(most, np.uint32)
        count = int(self._kernels.ancestors(self._records, entry, nearest_first))
        return nearest_first[:count][::-1].copy()


# Sketches (compact forms of blocks' keys, for sparse attention) are entries of their own,
# with slots of another size. Each is linked with its block.
#
# Always true: a ready sketch and a ready block of the same key space and hash name each
# other. A block has at most one sketch, the version stored last. The eviction policy does
# not see sketches, and no eviction notice reports them. A sketch is removed with its
# block, or when a new version replaces it. A sketch is removed without its block only if a
# block needs the room. There are two cases: the slab (piece of the arena) with the sketch
# gets another slot size, or no other entry of this slot size may be evicted. If a sketch is
# pinned when it is removed, it can't be found any more, but keeps its slot until its last pin is
# released.


FreeSlots = Callable[[list[Words]], None]
"""Function that frees the slots of removed records. Each of its arrays has records of one slot size
(`BlockIndex.parts`)."""


def blocks_first(groups: list[int]) -> list[int]:
    """Returns the positions 0 to len(`groups`) - 1 in another order: first the positions with a
    group of blocks, then the positions with a group of sketches (compact summaries of
    attention keys). `groups`: the group index of each run (chain of consecutive blocks) of a
    call."""
    return sorted(range(len(groups)), key=lambda at: groups[at] >= MAX_GROUPS)


class Sketches:
    """The sketches (compact summaries of blocks' attention keys, for sparse attention) in an
    index, each linked with its block.

    declared: True once a session has declared a kind of sketch. While it is False, methods
        skip the work for sketches.
    """

    def __init__(self, index: BlockIndex, free_slots: FreeSlots) -> None:
        self.declared = False
        self._index = index
        self._records = index.table.records
        self._free_slots = free_slots

    def __repr__(self) -> str:
        return f"Sketches({len(self.ready())} ready)"

    def declare(self, key_space_id: int, group_index: int, salt: int) -> None:
        """Registers a kind of sketch (compact summary of a block's attention keys, for
        sparse attention) of a key space (a model in a configuration).

        group_index: the index of the kind, MAX_GROUPS or higher.
        salt: number that is mixed into the hashes of blocks to make the keys of their
            sketches of this kind; differs from the salts of the groups.
        """
        self._index.add_key_space(key_space_id, [salt], group_index)
        self.declared = True

    def among(self, entries: Entries) -> NDArray[np.bool_]:
        """Returns a mask of the entries (records in the block table) that are sketches
        (compact summaries of blocks' attention keys)."""
        if not self.declared:
            return np.zeros(len(entries), np.bool_)
        are: NDArray[np.bool_] = (
            self._records[entries, table.W_GROUP_STATE] & np.uint32(0xFFFF) >= MAX_GROUPS
        )
        return are

    def ready(self) -> Entries:
        """Returns the entries (records in the block table) of all sketches (compact
        summaries of attention keys) that are ready. Takes time linear in the capacity."""
        entries = np.flatnonzero(self._index.states() == table.STATE_READY).astype(np.uint32)
        return entries[self.among(entries)]

    def of(self, entries: Entries) -> Entries:
        """Returns for each ready block the entry (record in the block table) of its sketch
        (compact summary of its attention keys); 0 for a block without a sketch."""
        linked: Entries = self._records[entries, table.W_SKETCH]
        return linked

    def bytes_with(self, entries: Entries) -> Int64s:
        """Returns for each entry (record in the block table) how many bytes of slots (places for
        blocks) its removal would free: its own slot, and for a block also the slot of its
        sketch (compact summary of its attention keys)."""
        sizes = self._index.slot_bytes(entries)
        if self.declared:
            sizes += np.where(self.among(entries), 0, self._index.slot_bytes(self.of(entries)))
        return sizes

    def blocks_of(self, entries: Entries) -> Entries:
        """Returns for each entry (record in the block table) the entry whose heat decides when it
        is evicted (the lowest heat first). For a ready sketch (compact summary of a block's
        attention keys) this is the entry of its block, otherwise the entry itself."""
        if not self.declared:
            return entries
        blocks = self._records[entries, table.W_SKETCH]
        return np.where(self.among(entries) & (blocks != 0), blocks, entries)

    def linked(self, entries: Entries) -> NDArray[np.bool_]:
        """Returns a mask of the entries (records in the block table) that are sketches
        (compact summaries of attention keys) and are linked with a ready block."""
        are: NDArray[np.bool_] = self.among(entries) & (self._records[entries, table.W_SKETCH] != 0)
        return are

    def publish(self, entries: Entries, blocks: Entries, checks: Keys | None = None) -> None:
        """Makes reserved sketches (compact summaries of attention keys) ready, each for a
        ready block, and removes the blocks' former sketches. `checks`: the sketches'
        checksums, uint64; all 0 if not given."""
        former = self.of(blocks)
        self._remove(former[former != 0])
        self._index.publish(
            entries,
            self._index.mixed(entries),
            np.zeros(len(entries), np.uint64) if checks is None else checks,
        )
        self._records[blocks, table.W_SKETCH] = entries
        self._records[entries, table.W_SKETCH] = blocks

    def follow(self, parts: Sequence[Words]) -> None:
        """Removes the sketches (compact summaries of attention keys) of blocks that were
        just removed. `parts`: the records that the blocks had."""
        for rows in parts if self.declared else ():
            linked = rows[:, table.W_SKETCH]
            self._remove(linked[linked != 0])

    def drop(self, entries: Entries) -> None:
        """Removes ready sketches (compact summaries of blocks' attention keys); their blocks
        stay."""
        self._records[self._records[entries, table.W_SKETCH], table.W_SKETCH] = 0
        self._remove(entries)

    def _remove(self, entries: Entries) -> None:
        if not len(entries):
            return
        is_pinned = self._index.pins[entries] > 0
        going = entries[~is_pinned]
        self._free_slots(self._index.remove(going, self._index.mixed(going)))
        self._index.detach(entries[is_pinned])

    def check_invariants(self) -> None:
        """Raises AssertionError if a link between a block and its sketch (compact summary
        of its attention keys) is not mutual or joins different keys. Takes time linear in the
        capacity."""
        live = np.flatnonzero(self._index.states()).astype(np.uint32)
        is_ready = self._index.states()[live] == table.STATE_READY
        links = self._records[live, table.W_SKETCH]
        assert np.all(links[~is_ready] == 0), "an entry that is not ready is linked"
        mine = self.among(live)
        assert np.all(links[mine & is_ready] != 0), "a sketch has no block"
        linked, other = live[links != 0], links[links != 0]
        assert np.array_equal(self._records[other, table.W_SKETCH], linked), (
            "a link does not hold both ways"
        )
        assert np.all(self.among(linked) != self.among(other)), "a link joins two of a kind"
        keys = [*range(8), table.W_KEY_SPACE]
        assert np.array_equal(self._records[linked][:, keys], self._records[other][:, keys]), (
            "a link joins two keys"
        )
