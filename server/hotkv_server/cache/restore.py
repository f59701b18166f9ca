"""Restoring: a new core imports the entries of an old block table, whether the old server stopped
or was killed. An entry is the table's record of a block, or of a sketch (compact summary of
a block's attention keys, for sparse attention).

A restore imports the ready entries, and those detached entries (flushed while pinned) that clients
may still read in the arena. A record that contradicts the key spaces (each is a model in a
configuration), the arena or another entry is dropped.

Always true: a restored entry has the key and the slot of its record. A record is never repaired. A
restore reads the records of the old table and ignores its buckets. The new table is another file,
so a killed restore has changed nothing. A restore does not read the slots: every restored entry
counts as unverified, and is compared with its checksum later.

The state in a record says whether the record can be trusted. A server marks a record ready after it
has written the rest of the record and the block's bytes, and clears the mark before it reuses the
slot. So after a kill every ready entry is whole.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.table import SLOT_ALIGN, Words
from hotkv_server.cache.arrays import distinct
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.slabs import aligned
from hotkv_server.cache.room.space import Space, keep_bounds
from hotkv_server.cache.sessions import Catalog
from hotkv_server.cache.values import BoolMask, Entries, Int64s

ADMIT_PARTS, ADMIT_BLOCKS = 64, 1 << 12
"""Restored blocks become ready in parts, so that the eviction policy learns the order of their last
uses; the blocks used longest ago come first. If the times of use are known, there are at least
ADMIT_PARTS parts.

A part has at most ADMIT_BLOCKS blocks, because the policy treats a part like the blocks of one
prompt: it gives each block a little more heat than the next, so that the last blocks are evicted
first. In a part of millions of blocks, the first would get so much heat that they outlive all new
blocks for hours."""


# This section handles the entries that residencies of the old server pinned (requests whose KV
# stays in host memory): clients may still read them in the arena. Either all of these entries are
# pinned until the grace (`Grace`) ends, or the clients' validity words are revoked before any slot
# is used for another block; clients then discard what they read. Blocks that were flushed while
# pinned return as detached entries: lookups can't find them, and they keep their slots.


def kept_rows(core: CacheCore, states: Words, marks: NDArray[np.uint8] | None) -> Int64s:
    """Finds the records of blocks that clients of the old server may still read in the arena.
    Returns the positions of these records in the old table; empty if there are no such clients.

    states: state of each record of the old table.
    marks: array that the old server has left: by old entry number, 1 for entries that clients may
        read. None if there is no such array.
    """
    if marks is None or not core.words.has_earlier_readers:
        return np.empty(0, np.int64)
    return np.flatnonzero(
        (marks[: len(states)] != 0)
        & ((states == table.STATE_READY) | (states == table.STATE_DETACHED))
    )


def link_detached(
    core: CacheCore, old: Words, rows: Int64s, numbers: Entries, new_of: Entries
) -> None:
    """Adds detached entries (flushed while pinned) for records of the old table.

    old: all records of the old table, each a row of 18 uint32 words.
    rows: positions of the records in `old`.
    numbers: the number of each record's key space in this core.
    new_of: receives the new entry number of each record, by its position in `old`; stays 0 for a
        record that does not fit into the index.
    """
    index = core.space.index
    groups = old[rows, table.W_GROUP_STATE] & np.uint32(0xFFFF)
    for number, group in np.unique(np.stack((numbers, groups), axis=1), axis=0).tolist():
        here = rows[(numbers == number) & (groups == group)]
        # `insert` expects keys that are not in the table, but several of these records may have the
        # same key. This does no harm, because `detach` removes the new entries from the table at
        # once.
        hashes = np.ascontiguousarray(old[here, :8])
        offsets = old[here, table.W_OFFSET].astype(np.int64) * SLOT_ALIGN
        depths = old[here, table.W_DEPTH].astype(np.int64)
        size = aligned(core.catalog.record(number).shape(group).slot_bytes)
        entries = index.insert(number, group, hashes, offsets, size, depths, 0)
        here = here[: len(entries)]
        index.publish(entries, index.mixed(entries), np.zeros(len(entries), np.uint64))
        index.detach(entries)
        core.space.tenants.count(number, len(entries) * size)
        new_of[here] = entries


def keep_for_readers(core: CacheCore, entries: Entries) -> tuple[int, bool]:
    """Pins the entries that clients of the old server may still read in the arena, until the grace
    (`Grace`, some seconds) ends.

    In two cases this is not possible: one of the entries was dropped, or a tenant uses more than
    its burst bound (the most bytes that it may use), so that some of its blocks must be evicted.
    Then pins no entry, and revokes the validity words of those clients, by which they notice that
    they must discard what they read.

    Returns the number of pinned entries, and True if the clients have lost their entries.

    entries: new entry number of each record that `kept_rows` has found; 0 for a record that was
        dropped.
    """
    grace, index = core.grace, core.space.index
    is_whole = bool(np.all(entries != 0)) and bool(index.can_be_read(entries).all())
    # If a tenant uses more than its burst bound, some of its blocks must be evicted at once. Pins
    # would prevent that.
    if len(entries) and is_whole and not core.space.tenants.over_bound():
        grace.begin(entries)
        return len(entries), False
    grace.revoke()
    there = entries[entries != 0]
    core.space.removal.reap(there)
    return 0, bool(len(entries))


class Restorable(Protocol):
    """A target into which blocks of an earlier server are restored: the cache core (host memory),
    or a tier below it (`BelowSpace`)."""

    @property
    def space(self) -> Space:
        """The space (index and slots) that receives the restored entries."""

    @property
    def catalog(self) -> Catalog:
        """The key spaces (each is a model in a configuration), with their kinds of
        sketches (compact summaries of blocks' attention keys)."""


@dataclass(frozen=True, slots=True)
class BelowSpace:
    """The target of `restore_below`: the space of a tier below host memory, and the core's catalog.

    encoded_bytes: function that returns the size of the place of an encoded (compressed) block,
        given its slot size. The earlier server stored encoded blocks in such places, which are
        smaller than slots (see `tiers.book.place_sizes`). None if that server encoded no blocks.
    """

    space: Space
    catalog: Catalog
    encoded_bytes: Callable[[int], int] | None = None


@dataclass(frozen=True, slots=True)
class Shapes:
    """The group (uint32) and, in bytes (int64), the slot size and slot offset of some records of
    the old table."""

    groups: Entries
    sizes: Int64s
    offsets: Int64s

    @staticmethod
    def of(old: Words, rows: Int64s) -> "Shapes":
        """Returns the groups, sizes and offsets of the records at the positions `rows` of the old
        table."""
        return Shapes(
            _groups(old, rows),
            old[rows, table.W_SIZE].astype(np.int64) * SLOT_ALIGN,
            old[rows, table.W_OFFSET].astype(np.int64) * SLOT_ALIGN,
        )

    def __len__(self) -> int:
        return len(self.groups)


@dataclass(slots=True)
class Restored:
    """The result of a restore.

    kept: number of entries that are pinned again, because the old server had pinned them for
        residencies (requests whose KV stays in host memory).
    lost_readers: True if an entry that was pinned for such a residency could not be retained. Then
        no entry is pinned, and the validity words of the old server's clients were revoked.
    blocks, sketches: numbers of restored blocks and of restored sketches (compact
        summaries of blocks' attention keys).
    encoded: number of blocks that lie in encoded (compressed) form in places smaller than their
        slot size.
    dropped: number of records that were not restored, by reason.
    """

    kept: int = 0
    lost_readers: bool = False
    blocks: int = 0
    encoded: int = 0
    sketches: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str, count: int) -> None:
        """Adds `count` to the number of records that were dropped for this reason."""
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count


def restore(
    core: CacheCore,
    old: Words,
    key_spaces: Mapping[int, int],
    last_used_s: NDArray[np.float64] | None,
    now_s: float,
    marks: NDArray[np.uint8] | None = None,
) -> Restored:
    """Fills an empty core from the records (each a row of 18 uint32 words) of an old table. Returns
    the numbers of restored and of dropped records.

    key_spaces: number of each key space in this core, by its number in the old table. The core's
        catalog has these key spaces, with their kinds of sketches (compact summaries of
        blocks' attention keys) in the old order.
    last_used_s: time of last use of each entry (record in the block table), float64 by old entry
        number, in seconds of `now_s`; nan for an entry without a saved time, for example because
        the entry was made after the last save. None if no times were saved.
    marks: by old entry number, 1 for entries that the old server had pinned for residencies
        (requests whose KV stays in host memory). None if the old table has no marks.
    """
    assert not core.space.index.num_entries, "restored into a core that is in use"
    report = Restored()
    states = old[:, table.W_GROUP_STATE] >> np.uint32(16)
    pinned = kept_rows(core, states, marks)
    stays = states == table.STATE_READY
    stays[pinned] = True
    report.drop("unfinished", int(((states != 0) & ~stays).sum()))
    rows = np.flatnonzero(stays)
    numbers = _new_numbers(old[rows, table.W_KEY_SPACE], key_spaces)
    good = _well_shaped(core, Shapes.of(old, rows), numbers)
    rows, numbers = _kept(report, "misshapen", rows, numbers, good)
    rows, numbers = _kept(report, "overlapping", rows, numbers, _apart(core, Shapes.of(old, rows)))
    if core.config.check_stride:
        # A checksum is never 0, so 0 means that the record has no checksum. A detached block
        # (one that was flushed while pinned) needs no checksum, because no call can load it.
        good = old[rows, table.W_CHECK] != 0
        good |= states[rows] == table.STATE_DETACHED
        rows, numbers = _kept(report, "without checksum", rows, numbers, good)
    new_of = np.zeros(len(old), np.uint32)
    is_ready = states[rows] == table.STATE_READY
    link_detached(core, old, rows[~is_ready], numbers[~is_ready], new_of)
    _link_entries(core, old, rows[is_ready], numbers[is_ready], new_of)
    came = rows[new_of[rows] != 0]
    report.drop("duplicate or beyond capacity", len(rows) - len(came))
    for size in distinct(old[came, table.W_SIZE]).tolist():
        here = came[old[came, table.W_SIZE] == size]
        core.space.pool.claim(
            size * SLOT_ALIGN, old[here, table.W_OFFSET].astype(np.int64) * SLOT_ALIGN
        )
    ready = came[states[came] == table.STATE_READY]
    _publish(core, old, ready, new_of, last_used_s, now_s, report)
    report.kept, report.lost_readers = keep_for_readers(core, new_of[pinned])
    deque(keep_bounds(core.space.books, core.space.removal), 0)
    return report


def restore_below(
    below: BelowSpace, old: Words, key_spaces: Mapping[int, int], now_s: float
) -> Restored:
    """Fills the empty space of a tier below host memory from the records (each a row of 18 uint32
    words) of the tier's old table. Does not compare blocks with their checksums;
    each later read of a block does.

    key_spaces: number of each key space in the core, by its number in the old table.
    """
    assert not below.space.index.num_entries, "restored into a tier that is in use"
    report = Restored()
    states = old[:, table.W_GROUP_STATE] >> np.uint32(16)
    report.drop("unfinished", int(((states != 0) & (states != table.STATE_READY)).sum()))
    rows = np.flatnonzero(states == table.STATE_READY)
    rows = rows[_groups(old, rows) < MAX_GROUPS]
    numbers = _new_numbers(old[rows, table.W_KEY_SPACE], key_spaces)
    good = _well_shaped(below, Shapes.of(old, rows), numbers, below.encoded_bytes)
    rows, numbers = _kept(report, "misshapen", rows, numbers, good)
    rows, numbers = _kept(report, "overlapping", rows, numbers, _apart(below, Shapes.of(old, rows)))
    new_of = np.zeros(len(old), np.uint32)
    report.encoded = _link_entries(below, old, rows, numbers, new_of)
    came = rows[new_of[rows] != 0]
    report.drop("duplicate or beyond capacity", len(rows) - len(came))
    for size in distinct(old[came, table.W_SIZE]).tolist():
        here = came[old[came, table.W_SIZE] == size]
        offsets = old[here, table.W_OFFSET].astype(np.int64) * SLOT_ALIGN
        below.space.pool.claim(size * SLOT_ALIGN, offsets)
    came = came[np.argsort(old[came, table.W_DEPTH], kind="stable")]
    for part, at_s in _heads_last(came, now_s):
        words = np.ascontiguousarray(old[part, table.W_CHECK : table.W_CHECK + 2])
        below.space.publish(new_of[part], at_s, checks=words.view(np.uint64)[:, 0])
    parents = old[came, table.W_PARENT]
    known = np.where(parents < len(old), new_of[np.minimum(parents, len(old) - 1)], 0)
    below.space.chains.set_parents(new_of[came], known)
    report.blocks = len(came)
    return report


def _kept(
    report: Restored, reason: str, rows: Int64s, numbers: Entries, good: BoolMask
) -> tuple[Int64s, Entries]:
    report.drop(reason, int((~good).sum()))
    return rows[good], numbers[good]


def _new_numbers(old_numbers: Entries, key_spaces: Mapping[int, int]) -> Entries:
    """Translates key space numbers of the old table (`old_numbers`) into the numbers that the same
    key spaces (each is a model in a configuration) have in the new core; 0 for a key space that
    the core does not have. `key_spaces`: new number by old number."""
    known = np.array(sorted(key_spaces.items()), np.int64).reshape(-1, 2)
    if not len(known):
        return np.zeros(len(old_numbers), np.uint32)
    places = np.minimum(known[:, 0].searchsorted(old_numbers), len(known) - 1)
    found = np.where(known[places, 0] == old_numbers, known[places, 1], 0)
    return found.astype(np.uint32)


def _groups(old: Words, rows: Int64s) -> Entries:
    groups: Entries = old[rows, table.W_GROUP_STATE] & np.uint32(0xFFFF)
    return groups


def _by_kind(numbers: Entries, groups: Entries) -> Iterator[tuple[int, int, Int64s]]:
    """Splits entries (records in the block table) by key space and group. Yields each pair (key
    space, group) that occurs, with the positions of its entries in rising order. Sorts only once,
    however many pairs there are.

    numbers, groups: key space number and group index of each entry.
    """
    if not len(numbers):
        return
    pairs = numbers.astype(np.uint64) << np.uint64(16) | groups
    order = np.argsort(pairs, kind="stable")
    begins = np.flatnonzero(np.diff(pairs[order], prepend=pairs[order[0]] ^ np.uint64(1)))
    for here in np.split(order, begins[1:]):
        pair = int(pairs[here[0]])
        yield pair >> 16, pair & 0xFFFF, here


def _well_shaped(
    core: Restorable,
    shapes: Shapes,
    numbers: Entries,
    encoded_bytes: Callable[[int], int] | None = None,
) -> BoolMask:
    """Returns a mask of the records that fit this server's key spaces. Such a record names a known
    group of blocks, or a known kind of sketch (compact summary of a block's attention
    keys). Its slot has the size of the group's slots, or the smaller size that `encoded_bytes`
    returns for it, and lies inside the arena, at a valid offset for this size.

    numbers: number in this core of each record's key space; 0 if the core does not have it.
    encoded_bytes: function that returns, for a slot size, the size of the smaller place of an
        encoded (compressed) block. None: no block is encoded.
    """
    good, pool = np.zeros(len(shapes), np.bool_), core.space.pool
    for number, group, here in _by_kind(numbers, shapes.groups):
        if not number or not core.catalog.record(number).has(group):
            continue
        slot_bytes = aligned(core.catalog.record(number).shape(group).slot_bytes)
        encoded = slot_bytes if encoded_bytes is None else encoded_bytes(slot_bytes)
        for size in {slot_bytes, min(encoded, slot_bytes)}:
            of_size = here[shapes.sizes[here] == size]
            good[of_size] = pool.heads_of(size, shapes.offsets[of_size]) >= 0
    return good


def _apart(core: Restorable, shapes: Shapes) -> BoolMask:
    """Returns a mask of the records whose slots (places for blocks) do not conflict with the slot
    of another record. There are two kinds of conflicts:

    - the slots overlap. Then both records are refused, because either may be wrong;
    - the slots lie in the same slab (piece of the arena), but do not belong to the same run. A run
      is a range of adjacent slabs with slots of one size; a slab belongs to one run only.
    """
    offsets, sizes = shapes.offsets, shapes.sizes
    order = np.argsort(offsets)
    ends = np.maximum.accumulate((offsets + sizes)[order])
    good = np.ones(len(shapes), np.bool_)
    touching = np.flatnonzero(offsets[order][1:] < ends[:-1])
    good[order[touching]] = good[order[touching + 1]] = False
    pool = core.space.pool
    first, last = np.empty(len(shapes), np.int64), pool.slab_of(offsets + sizes - 1)
    for size in distinct(sizes).tolist():
        of_size = sizes == size
        first[of_size] = pool.heads_of(size, offsets[of_size])
    # Identify a run by its first slab and its slot size.
    runs = np.unique(np.stack((first, sizes), axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    smallest, largest = np.full(pool.num_slabs, len(runs)), np.full(pool.num_slabs, -1)
    for step in range(int((last - first).max(initial=0)) + 1):
        spans = first + step <= last
        np.minimum.at(smallest, first[spans] + step, runs[spans])
        np.maximum.at(largest, first[spans] + step, runs[spans])
    mixed = np.concatenate(([0], np.cumsum((largest >= 0) & (smallest != largest))))
    good &= mixed[last + 1] == mixed[first]
    return good


def _link_entries(
    core: Restorable, old: Words, rows: Int64s, numbers: Entries, new_of: Entries
) -> int:
    """Adds reserved entries to the index for the records at the positions `rows` of the old table.
    Returns how many of the entries lie in places that are smaller than their group's slot size:
    encoded (compressed) blocks on a disk.

    numbers: the number of each record's key space in the core.
    new_of: receives the new entry number of each record, by its position in `old`; stays 0 for a
        record that does not fit into the index, or whose key is in the index already.
    """
    index, groups, num_smaller = core.space.index, _groups(old, rows), 0
    for number, group, places in _by_kind(numbers, groups):
        here = rows[places]
        hashes = np.ascontiguousarray(old[here, :8])
        mixed = index.mixed_hashes(number, group, hashes)
        if len(distinct(mixed)) != len(mixed):
            _, unique = np.unique(mixed, return_index=True)
            here, hashes = here[unique], np.ascontiguousarray(hashes[unique])
        slot_bytes = aligned(core.catalog.record(number).shape(group).slot_bytes)
        sizes = old[here, table.W_SIZE].astype(np.int64) * SLOT_ALIGN
        for size in distinct(sizes).tolist():
            rows_of, of_size = here[sizes == size], np.ascontiguousarray(hashes[sizes == size])
            offsets = old[rows_of, table.W_OFFSET].astype(np.int64) * SLOT_ALIGN
            depths = old[rows_of, table.W_DEPTH].astype(np.int64)
            entries = index.insert(number, group, of_size, offsets, size, depths, 0)
            core.space.tenants.count(number, len(entries) * size)
            new_of[rows_of[: len(entries)]] = entries
            num_smaller += len(entries) if size < slot_bytes else 0
    return num_smaller


def _heads_last(blocks: Int64s, now_s: float) -> list[tuple[Int64s, float]]:
    """Splits blocks into parts of at most ADMIT_BLOCKS, and returns the parts with the deepest
    blocks first. Returns with each part a time at which its blocks count as last used: `now_s` for
    the last part, and a second earlier for each part before it. So the first blocks of prompts
    count as used most recently, and are evicted last.

    blocks: sorted by depth (number of blocks before the block in its prompt), in rising order.
    """
    num_parts = -(-len(blocks) // ADMIT_BLOCKS)
    parts = np.array_split(blocks, num_parts)[::-1] if num_parts else []
    return [(part, now_s - left) for left, part in zip(range(num_parts)[::-1], parts, strict=True)]


def _publish(
    core: CacheCore,
    old: Words,
    came: Int64s,
    new_of: Entries,
    last_used_s: NDArray[np.float64] | None,
    now_s: float,
    report: Restored,
) -> None:
    """Makes restored blocks ready, then the sketches (compact summaries of attention keys)
    whose block was restored. Drops all other sketches.

    old: all records of the old table, each a row of 18 uint32 words.
    came: positions in `old` of the records that have a new entry.
    new_of: new entry number by position in `old`.
    last_used_s: time of last use by old entry number, in seconds of `now_s`; nan if unknown. None
        if no times were saved.
    report: receives the numbers of restored and of dropped entries.
    """
    space, index = core.space, core.space.index
    checks = np.ascontiguousarray(old[came, table.W_CHECK : table.W_CHECK + 2]).view(np.uint64)[
        :, 0
    ]
    is_block = _groups(old, came) < MAX_GROUPS
    used_s = np.full(len(came), now_s) if last_used_s is None else np.fmin(last_used_s[came], now_s)
    order = np.lexsort((old[came, table.W_DEPTH], used_s))
    order = order[is_block[order]]
    if last_used_s is None:
        parts = _heads_last(order, now_s)
    else:
        num_parts = max(ADMIT_PARTS, -(-len(order) // ADMIT_BLOCKS))
        split = np.array_split(order, num_parts)
        parts = [(part, float(used_s[part].max())) for part in split if len(part)]
    for part, at_s in parts:
        part = part[np.argsort(old[came[part], table.W_DEPTH], kind="stable")]
        space.publish(new_of[came[part]], at_s, checks=checks[part])
    blocks = came[is_block]
    parents = old[blocks, table.W_PARENT]
    space.chains.set_parents(
        new_of[blocks], np.where(parents < len(old), new_of[np.minimum(parents, len(old) - 1)], 0)
    )
    kinds, kind_checks = came[~is_block], checks[~is_block]
    links = np.minimum(old[kinds, table.W_SKETCH], len(old) - 1)
    good = (links == old[kinds, table.W_SKETCH]) & _linked(core, old, kinds, links, new_of)
    space.sketches.publish(new_of[kinds[good]], new_of[links[good]], kind_checks[good])
    space.removal.drop(new_of[kinds[~good]])
    index.unverified[new_of[came]] = True
    index.unverified[new_of[kinds[~good]]] = False
    report.blocks, report.sketches = len(blocks), int(good.sum())
    core.counters.restored_blocks += len(blocks)
    report.drop("sketch without its block", int((~good).sum()))


def _linked(
    core: CacheCore, old: Words, kinds: Int64s, links: Entries, new_of: Entries
) -> BoolMask:
    """Returns a mask of the sketches (compact summaries of attention keys) that may be made
    ready. A sketch may be made ready if its block was restored, has the same key space and
    hash, and has a record that names this sketch.

    kinds: positions in `old` of the sketches.
    links: for each sketch, the position in `old` of its block.
    new_of: new entry number by position in `old`; 0 if the record was not restored.
    """
    numbers, groups, hashes = core.space.index.keys(new_of[kinds])
    expected = [
        core.catalog.record(number).block_group(group)
        for number, group in zip(numbers.tolist(), groups.tolist(), strict=True)
    ]
    # A block that was not restored has the entry number 0. Entry 0 has no key space, so the
    # comparison of key spaces below is False.
    block_numbers, block_groups, block_hashes = core.space.index.keys(new_of[links])
    good: BoolMask = (
        (old[links, table.W_SKETCH] == kinds)
        & (numbers == block_numbers)
        & (block_groups == np.array(expected, np.uint32))
        & (hashes == block_hashes).all(axis=1)
    )
    return good
