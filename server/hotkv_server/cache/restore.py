"""A new core imports the entries of an old block table, after a stop or a kill.

Ready entries come back, and flushed ones that clients may still read in the arena. A record that
contradicts the key spaces, the arena or another entry is dropped, never repaired. Slots are not
read, so every restored entry is unverified. The new table is another file, so a killed restore has
changed nothing.

A server marks a record ready last, and clears the mark before it reuses the slot. So after a kill,
every ready entry is whole.

old: the old records, rows of 18 uint32 words.
rows: positions in `old`.
new_of: new entry numbers by position in `old`, 0 if not restored.
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
from hotkv_server.cache.room.space import Space, keep_bounds
from hotkv_server.cache.sessions import Catalog
from hotkv_server.cache.values import BoolMask, Entries, Int64s

ADMIT_PARTS, ADMIT_BLOCKS = 64, 1 << 12
"""Restored blocks become ready in parts, those used longest ago first, so that the policy learns
their order; at least ADMIT_PARTS if the times are known.

A part is bounded because the policy takes it for one prompt, each block a little hotter than the
next: in a part of millions, the first would outlive all new ones for hours.
"""


# Entries of readers: all of them are pinned until the grace ends, or the readers' words are
# revoked before any slot is reused. Flushed blocks return as detached entries.


def kept_rows(core: CacheCore, states: Words, marks: NDArray[np.uint8] | None) -> Int64s:
    """What clients may still read. `marks`: as `ReaderMemory.marks`, by old entry number."""
    if marks is None or not core.words.has_earlier_readers:
        return np.empty(0, np.int64)
    return np.flatnonzero(
        (marks[: len(states)] != 0)
        & ((states == table.STATE_READY) | (states == table.STATE_DETACHED))
    )


def link_detached(
    core: CacheCore, old: Words, rows: Int64s, numbers: Entries, new_of: Entries
) -> None:
    """Adds detached entries. `numbers`: the key space of each row in this core."""
    index = core.space.index
    groups = old[rows, table.W_GROUP_STATE] & np.uint32(0xFFFF)
    for number, group in np.unique(np.stack((numbers, groups), axis=1), axis=0).tolist():
        here = rows[(numbers == number) & (groups == group)]
        # Records may have the same key, which `insert` does not expect: `detach` removes them at
        # once.
        hashes = np.ascontiguousarray(old[here, :8])
        offsets = old[here, table.W_OFFSET].astype(np.int64) * SLOT_ALIGN
        depths = old[here, table.W_DEPTH].astype(np.int64)
        size = core.catalog.record(number).slot_bytes(group)
        entries = index.insert(number, group, hashes, offsets, size, depths, 0)
        here = here[: len(entries)]
        index.publish(entries, index.mixed(entries), np.zeros(len(entries), np.uint64))
        index.detach(entries)
        core.space.tenants.count(number, len(entries) * size)
        new_of[here] = entries


def keep_for_readers(core: CacheCore, entries: Entries) -> tuple[int, bool]:
    """Pins `entries` (0 for a dropped record). If one was dropped, or a tenant is above its
    burst bound, pins none and revokes the words. Returns the number pinned, and whether readers
    have lost theirs."""
    grace, index = core.grace, core.space.index
    is_whole = bool(np.all(entries != 0)) and bool(index.can_be_read(entries).all())
    # Above the bound, blocks must go at once; pins would prevent that.
    if len(entries) and is_whole and not core.space.tenants.over_bound():
        grace.begin(entries)
        return len(entries), False
    grace.revoke()
    there = entries[entries != 0]
    core.space.removal.reap(there)
    return 0, bool(len(entries))


class Restorable(Protocol):
    """What blocks are restored into: the core, or a tier below it (`BelowSpace`)."""

    @property
    def space(self) -> Space: ...

    @property
    def catalog(self) -> Catalog: ...


@dataclass(frozen=True, slots=True)
class BelowSpace:
    """encoded_bytes: place of a compressed block by slot size (`tiers.book.place_sizes`); None
    if the earlier server compressed none."""

    space: Space
    catalog: Catalog
    encoded_bytes: Callable[[int], int] | None = None


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes and offsets of slots are in bytes."""

    groups: Entries
    sizes: Int64s
    offsets: Int64s

    @staticmethod
    def of(old: Words, rows: Int64s) -> "Shapes":
        return Shapes(
            _groups(old, rows),
            old[rows, table.W_SIZE].astype(np.int64) * SLOT_ALIGN,
            old[rows, table.W_OFFSET].astype(np.int64) * SLOT_ALIGN,
        )

    def __len__(self) -> int:
        return len(self.groups)


@dataclass(slots=True)
class Restored:
    """kept: entries pinned again for readers.
    lost_readers: one could not be retained, so none is pinned.
    encoded: compressed blocks, in places smaller than their slots.
    dropped: records by reason.
    """

    kept: int = 0
    lost_readers: bool = False
    blocks: int = 0
    encoded: int = 0
    sketches: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str, count: int) -> None:
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
    """Fills an empty core.

    key_spaces: number in this core by old number; the catalog has them, kinds of sketches in the
        old order.
    last_used_s: by old entry number, on the clock of `now_s`; nan for one not saved, None for
        none.
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
        # 0 is no checksum. A detached block needs none: no call can load it.
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
    """Fills an empty tier, whose blocks each later read verifies. `key_spaces`: as in `restore`."""
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
    """0 for a key space that the core lacks."""
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
    """Yields (key space, group, rising positions). One sort, however many pairs."""
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
    """Records that fit this server: a known group or kind, and a slot of its size (or of
    `encoded_bytes` of it) at a valid offset. `numbers`: 0 for an unknown key space."""
    good, pool = np.zeros(len(shapes), np.bool_), core.space.pool
    for number, group, here in _by_kind(numbers, shapes.groups):
        if not number or not core.catalog.record(number).has(group):
            continue
        slot_bytes = core.catalog.record(number).slot_bytes(group)
        encoded = slot_bytes if encoded_bytes is None else encoded_bytes(slot_bytes)
        for size in {slot_bytes, min(encoded, slot_bytes)}:
            of_size = here[shapes.sizes[here] == size]
            good[of_size] = pool.heads_of(size, shapes.offsets[of_size]) >= 0
    return good


def _apart(core: Restorable, shapes: Shapes) -> BoolMask:
    """Records without conflict. Overlapping slots are both refused, because either may be wrong;
    so are slots in one slab that belong to different runs of slabs."""
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
    # A run of slabs: its first slab and slot size.
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
    """Adds reserved entries and fills `new_of`; a duplicate key or a full index leaves 0.
    Returns how many are compressed blocks."""
    index, groups, num_smaller = core.space.index, _groups(old, rows), 0
    for number, group, places in _by_kind(numbers, groups):
        here = rows[places]
        hashes = np.ascontiguousarray(old[here, :8])
        mixed = index.mixed_hashes(number, group, hashes)
        if len(distinct(mixed)) != len(mixed):
            _, unique = np.unique(mixed, return_index=True)
            here, hashes = here[unique], np.ascontiguousarray(hashes[unique])
        slot_bytes = core.catalog.record(number).slot_bytes(group)
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
    """Parts of `blocks` (sorted by depth), deepest first, each with a time of use: `now_s` for
    the last, a second less for each before. So the first blocks of prompts go last."""
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
    """Blocks first, then the sketches whose block was restored; other sketches are dropped."""
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
    """Sketches whose block was restored, has the same key space and hash, and names them.
    `kinds`: their rows; `links`: their blocks'.
    """
    numbers, groups, hashes = core.space.index.keys(new_of[kinds])
    expected = [
        core.catalog.record(number).block_group(group)
        for number, group in zip(numbers.tolist(), groups.tolist(), strict=True)
    ]
    # Entry 0, of a block not restored, has no key space.
    block_numbers, block_groups, block_hashes = core.space.index.keys(new_of[links])
    good: BoolMask = (
        (old[links, table.W_SKETCH] == kinds)
        & (numbers == block_numbers)
        & (block_groups == np.array(expected, np.uint32))
        & (hashes == block_hashes).all(axis=1)
    )
    return good
