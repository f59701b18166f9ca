"""`BlockIndex` finds, adds and removes entries in the shared block table, which only this module
writes. `Chains` links each block with its parent, `Sketches` with its sketch.

Always true: an entry number is free, reserved, ready or detached (flushed while pinned). A key
has at most one reserved or ready entry. Clients find only ready entries.
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
    """limit: entries whose records have memory.
    num_unpins: calls that released pins.
    unverified: from an old table, or the bytes did not match and a lease still pins the entry.
    _salts: by group, and key space modulo KEY_SPACE_ROWS.
    """

    def __init__(self, block_table: BlockTable) -> None:
        self.table = block_table
        self.capacity = block_table.geometry.capacity
        self.pins = np.zeros(self.capacity + 1, np.uint32)
        self.unverified = np.zeros(self.capacity + 1, np.bool_)
        self.num_entries = self.num_unpins = 0
        self.limit = self.capacity
        self._num_backed = 0
        # List of free numbers, linked by the records' offset fields; 0: empty. From
        # `_next_unused` on all are free.
        self._free_head = 0
        self._next_unused = 1
        # 64 KiB for each group index in use, however many key spaces come and go.
        self._salts = np.zeros((MAX_GROUPS + MAX_SKETCHES, KEY_SPACE_ROWS), np.uint64)
        self._kernels = native.require("hotkv_server.cache.table.table_kernels")

    def back(self, num_entries: int) -> None:
        """Sets `limit`. Until the first call, all records have memory."""
        assert num_entries >= self.num_entries, "entries in use have lost their memory"
        # Touches a few pages of `pins` at a time: the first large lease need not wait for the
        # kernel.
        self.pins[self._num_backed + 1 : num_entries + 1] += np.uint32(0)
        self.limit, self._num_backed = num_entries, max(num_entries, self._num_backed)

    def __repr__(self) -> str:
        return f"BlockIndex({self.num_entries}/{self.capacity} entries)"

    def add_key_space(self, key_space_id: int, salts: list[int], first_group: int = 0) -> None:
        """Salts of the groups from `first_group` on, by which equal hashes of two groups or key
        spaces have different keys."""
        self._salts[first_group : first_group + len(salts), key_space_id % KEY_SPACE_ROWS] = salts

    def _salt(self, key_space_id: int, group_index: int) -> int:
        return int(self._salts[group_index, key_space_id % KEY_SPACE_ROWS])

    def find(self, key_space_id: int, group_index: int, hashes: Words) -> Entries:
        """Entry numbers, with the high bit set while reserved; 0 without an entry."""
        salt = self._salt(key_space_id, group_index)
        return self.table.find(hashes, salt, key_space_id, group_index)

    def probe(self, key_space_id: int, group_index: int, hashes: Words) -> Entries:
        """As `find`, by only 32 bits of each key, as clients do: faster, and rarely another
        hash's entry."""
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
        """Adds reserved entries for keys that have none, until the index is full.
        `lease_number`: their owner, a write lease or a move.
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
        """Of reserved entries only."""
        owners: NDArray[np.uint32] = self.table.records[entries, table.W_CHECK]
        return owners

    def mark_written(self, entries: Entries, mark: int) -> NDArray[np.uint32]:
        """Sets the bit `mark` (0: none) in the entries' masks of written shards, and returns the
        masks, which reserved entries have in the upper half of the checksum."""
        masks = np.empty(len(entries), np.uint32)
        self._kernels.mark_written(self.table.records, entries, mark, masks)
        return masks

    def publish(self, entries: Entries, keys: Keys, checks: NDArray[np.uint64]) -> None:
        """Lookups find the entries from here on. `keys`: from `mixed`."""
        done = int(
            self._kernels.publish(self.table.buckets, self.table.records, keys, entries, checks)
        )
        assert done == len(entries), "published an entry that is not in the table"

    def remove(self, entries: Entries, keys: Keys) -> list[Words]:
        """Removes reserved or ready entries; returns their records as `parts`."""
        rows = self._unlink(entries, keys)
        self._release(entries)
        return self.parts(rows)

    def parts(self, rows: Words) -> list[Words]:
        """Splits records into arrays of one key space, group and slot size each."""
        if not len(rows) or self._kernels.is_uniform(rows):
            return [rows] if len(rows) else []
        owners = rows[:, [table.W_KEY_SPACE, table.W_GROUP_STATE, table.W_SIZE]] & np.array(
            [0xFFFF_FFFF, 0xFFFF, 0xFFFF_FFFF], np.uint32
        )
        _, part_of = np.unique(owners, axis=0, return_inverse=True)
        return [np.ascontiguousarray(rows[part_of == part]) for part in range(part_of.max() + 1)]

    def detach(self, entries: Entries) -> None:
        """Lookups miss the entries, which keep their numbers and slots until `remove_detached`."""
        self._unlink(entries, self.mixed(entries), table.STATE_DETACHED)
        self.table.records[entries, table.W_SKETCH] = 0

    def remove_detached(self, entries: Entries) -> None:
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
        """`change`: 1 or -1, twice for an entry listed twice."""
        if not len(entries):
            return
        self.num_unpins += change < 0
        good = self._kernels.add_pins(self.pins, entries, change)
        assert good, "pin given back twice"

    def choose(self, listed: Entries, positions: Int64s) -> tuple[Entries, Int64s, int]:
        """Entries at `positions` of `listed`, offsets of their slots in bytes, and 0 or why it
        stopped, as of the kernel. `unmark` must follow."""
        entries, offsets = np.zeros(len(positions), np.uint32), np.empty(len(positions), np.int64)
        why = self._kernels.choose(
            self.table.records, self.pins, listed, positions, entries, offsets
        )
        return entries, offsets, int(why)

    def unmark(self, entries: Entries) -> None:
        self._kernels.unmark(self.pins, entries)

    def evictable(self, entries: Entries, slot_bytes: int = 0) -> NDArray[np.bool_]:
        """Ready and unpinned, of this slot size if given."""
        out = np.empty(len(entries), np.bool_)
        self._kernels.evictable(
            self.table.records, self.pins, entries, slot_bytes // SLOT_ALIGN, out
        )
        return out

    def offsets(self, entries: Entries) -> Int64s:
        """In bytes."""
        offsets: Int64s = self.table.records[entries, table.W_OFFSET].astype(np.int64) * SLOT_ALIGN
        return offsets

    def relocate(self, entries: Entries, offsets: Int64s) -> None:
        """To other slots of the same size, which have the bytes already. Nobody may read them
        meanwhile, so none is pinned. A kill in between leaves each in one of both."""
        self.table.records[entries, table.W_OFFSET] = offsets // SLOT_ALIGN

    def slot_bytes(self, entries: Entries) -> Int64s:
        """Rounded up to SLOT_ALIGN."""
        sizes: Int64s = self.table.records[entries, table.W_SIZE].astype(np.int64) * SLOT_ALIGN
        return sizes

    def depths(self, entries: Entries) -> Int64s:
        depths: Int64s = self.table.records[entries, table.W_DEPTH].astype(np.int64)
        return depths

    def checks(self, entries: Entries) -> NDArray[np.uint64]:
        """Of ready entries; 0 if missing."""
        words = np.ascontiguousarray(self.table.records[entries, table.W_CHECK : table.W_CHECK + 2])
        return words.view(np.uint64)[:, 0]

    @property
    def num_numbers(self) -> int:
        """Above every entry number ever used."""
        return self._next_unused

    def states(self, first: int = 0, end: int | None = None) -> NDArray[np.uint32]:
        """Of numbers ever used, from `first` to `end` - 1: 0 (free) or a `STATE_`."""
        upto = self._next_unused if end is None else min(end, self._next_unused)
        return self.table.records[first:upto, table.W_GROUP_STATE] >> np.uint32(16)

    def is_ready(self, entries: Entries) -> NDArray[np.bool_]:
        ready: NDArray[np.bool_] = self._states_of(entries) == table.STATE_READY
        return ready

    def can_be_read(self, entries: Entries) -> NDArray[np.bool_]:
        """Ready or detached: whole blocks, unless detached by `Removal.forsake`."""
        states = self._states_of(entries)
        mask: BoolMask = (states == table.STATE_READY) | (states == table.STATE_DETACHED)
        return mask

    def _states_of(self, entries: Entries) -> NDArray[np.uint32]:
        states: NDArray[np.uint32] = self.table.records[entries, table.W_GROUP_STATE]
        return states >> np.uint32(16)

    def ready_blocks(
        self, key_space_id: int = 0, first: int = 0, end: int | None = None
    ) -> Entries:
        """From `first` to `end` - 1, without sketches. `key_space_id`: 0 for all."""
        upto = self._next_unused if end is None else min(end, self._next_unused)
        records = self.table.records[first:upto]
        states = records[:, table.W_GROUP_STATE]
        is_block = states & np.uint32(0xFFFF) < MAX_GROUPS
        mask = (states >> np.uint32(16) == table.STATE_READY) & is_block
        if key_space_id:
            mask &= records[:, table.W_KEY_SPACE] == key_space_id
        return (first + np.flatnonzero(mask)).astype(np.uint32)

    def keys(self, entries: Entries) -> tuple[NDArray[np.uint32], NDArray[np.uint32], Words]:
        """Key spaces, groups and hashes."""
        rows = self.table.records[entries]
        return (
            rows[:, table.W_KEY_SPACE],
            rows[:, table.W_GROUP_STATE] & np.uint32(0xFFFF),
            np.ascontiguousarray(rows[:, :8]),
        )

    def key_spaces(self, entries: Entries) -> NDArray[np.uint32]:
        key_spaces: NDArray[np.uint32] = self.table.records[entries, table.W_KEY_SPACE]
        return key_spaces

    def mixed(self, entries: Entries) -> Keys:
        """Keys by which the table finds the entries: hash and salt, mixed."""
        out = np.empty(len(entries), np.uint64)
        self._kernels.mixed_keys(self.table.records, self._salts, entries, out)
        return out

    def mixed_hashes(self, key_space_id: int, group_index: int, hashes: Words) -> Keys:
        """As `mixed`, also of hashes that the index lacks."""
        return table.mix(hashes, self._salt(key_space_id, group_index))

    def check_invariants(self) -> None:
        _check_buckets(self, self.states())
        _check_numbers(self, self.states())


def _check_numbers(index: BlockIndex, states: NDArray[np.uint32]) -> None:
    """Exactly the free entries are in the list, neither pinned nor unverified."""
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
    """Exactly the reserved and ready entries, each key once."""
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


# A chain is made of parents: entry numbers in the blocks' records, which only `Chains` sets.
#
# A number may have been reused. It counts only if that entry is ready, of the same key space and
# group, and one less deep.


class Chains:
    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._records = index.table.records
        self._kernels = native.require("hotkv_server.cache.table.table_kernels")

    def __repr__(self) -> str:
        return f"Chains({self._index!r})"

    def set_parents(self, entries: Entries, parents: Entries) -> None:
        """0 for no parent."""
        self._records[entries, table.W_PARENT] = parents

    def link(
        self, key_space_id: int, group_index: int, words: Entries, parent: Words | None
    ) -> None:
        """Links consecutive blocks of a prompt, old entries too: their parent may have been
        stored again. `words`: 0 without an entry; `parent`: of the first, None if it begins the
        prompt."""
        first = np.uint32(0)
        if parent is not None:
            found = self._index.find(key_space_id, group_index, parent.reshape(1, 8))
            first = found[0] & ~RESERVED_FLAG
        self._kernels.link(self._records, words, first)

    def ending_with(
        self, key_space_id: int, group_index: int, last: Words | None, most: int
    ) -> Entries:
        """`last` and up to `most` ready blocks before it, in prompt order. Empty if it is None
        or not ready."""
        if last is None:
            return np.empty(0, np.uint32)
        end = self._index.find(key_space_id, group_index, last.reshape(1, 8))
        if not table.is_ready(end)[0]:
            return np.empty(0, np.uint32)
        return np.append(self.ancestors(int(end[0]), most), end)

    def ancestors(self, entry: int, most: int) -> Entries:
        """Up to `most` ready blocks before this one, in prompt order, to the first invalid link."""
        nearest_first = np.empty(most, np.uint32)
        count = int(self._kernels.ancestors(self._records, entry, nearest_first))
        return nearest_first[:count][::-1].copy()


# Sketches are entries of their own, with slots of another size.
#
# Always true: a ready sketch and its ready block, of the same key space and hash, name each
# other; a block has at most one. Policies and notices know no sketches. A sketch goes with its
# block, for a new version, or if a block needs its room: its slab gets another slot size, or
# nothing else of its size may go. A pinned one keeps its slot until its last pin is released.


FreeSlots = Callable[[list[Words]], None]
"""Of removed records (`BlockIndex.parts`)."""


def blocks_first(groups: list[int]) -> list[int]:
    """Positions of a call's runs, those of blocks before those of sketches."""
    return sorted(range(len(groups)), key=lambda at: groups[at] >= MAX_GROUPS)


class Sketches:
    """`declared`: a session has declared a kind; until then, methods skip the work."""

    def __init__(self, index: BlockIndex, free_slots: FreeSlots) -> None:
        self.declared = False
        self._index = index
        self._records = index.table.records
        self._free_slots = free_slots

    def __repr__(self) -> str:
        return f"Sketches({len(self.ready())} ready)"

    def declare(self, key_space_id: int, group_index: int, salt: int) -> None:
        """`group_index`: MAX_GROUPS or higher; `salt`: differs from those of groups."""
        self._index.add_key_space(key_space_id, [salt], group_index)
        self.declared = True

    def among(self, entries: Entries) -> NDArray[np.bool_]:
        """Which entries are sketches."""
        if not self.declared:
            return np.zeros(len(entries), np.bool_)
        are: NDArray[np.bool_] = (
            self._records[entries, table.W_GROUP_STATE] & np.uint32(0xFFFF) >= MAX_GROUPS
        )
        return are

    def ready(self) -> Entries:
        """Linear in the capacity."""
        entries = np.flatnonzero(self._index.states() == table.STATE_READY).astype(np.uint32)
        return entries[self.among(entries)]

    def of(self, entries: Entries) -> Entries:
        """0 for a block without one."""
        linked: Entries = self._records[entries, table.W_SKETCH]
        return linked

    def bytes_with(self, entries: Entries) -> Int64s:
        """Bytes that each removal frees: a block's with its sketch's."""
        sizes = self._index.slot_bytes(entries)
        if self.declared:
            sizes += np.where(self.among(entries), 0, self._index.slot_bytes(self.of(entries)))
        return sizes

    def blocks_of(self, entries: Entries) -> Entries:
        """The entry whose heat decides: a ready sketch's block, else the entry itself."""
        if not self.declared:
            return entries
        blocks = self._records[entries, table.W_SKETCH]
        return np.where(self.among(entries) & (blocks != 0), blocks, entries)

    def linked(self, entries: Entries) -> NDArray[np.bool_]:
        """Sketches linked with a ready block."""
        are: NDArray[np.bool_] = self.among(entries) & (self._records[entries, table.W_SKETCH] != 0)
        return are

    def publish(self, entries: Entries, blocks: Entries, checks: Keys | None = None) -> None:
        """Each for a ready block, whose former sketch is removed. `checks`: all 0 if not given."""
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
        """Removes the sketches of removed blocks (`parts`)."""
        for rows in parts if self.declared else ():
            linked = rows[:, table.W_SKETCH]
            self._remove(linked[linked != 0])

    def drop(self, entries: Entries) -> None:
        """Ready sketches; their blocks stay."""
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
