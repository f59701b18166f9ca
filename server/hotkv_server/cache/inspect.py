"""Read-only views of the core for operators and metrics: code outside the node reads its state
here.

A query changes nothing, and an answer is a copy. A query over all entries runs in parts; entries
that change meanwhile may count or not.
"""

import string
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.keys import MAX_GROUPS, MAX_HASH_BYTES, KeySpace, Sketch
from hotkv_proto.table import Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.histogram import Histogram
from hotkv_server.cache.room.slabs import ABSENT, FREE, PoolFigures, SlabClassStats, spread
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.table.index import BlockIndex
from hotkv_server.cache.values import KEY_SPACE_ROWS, BoolMask, Entries, HashList, Int64s

# Census.


PART_ENTRIES = 1 << 17
"""Entry numbers that a part of a query examines, in a millisecond or two."""


@dataclass(slots=True)
class Census:
    """Counts of all entries.

    num_blocks: ready blocks.
    pinned_bytes: of the slots of pinned entries.
    sketch_bytes: of the slots of sketches, in any state.
    num_unverified: entries to be verified before a load.
    blocks, sketches: ready ones of each key space, by its number modulo KEY_SPACE_ROWS; int64.
    """

    num_blocks: int
    pinned_bytes: int
    sketch_bytes: int
    num_unverified: int
    blocks: NDArray[np.int64]
    sketches: NDArray[np.int64]


def census(core: CacheCore) -> Iterator[Census]:
    """Yields the same `Census` after each part; complete after the last."""
    index = core.space.index
    counted = Census(
        0, 0, 0, 0, np.zeros(KEY_SPACE_ROWS, np.int64), np.zeros(KEY_SPACE_ROWS, np.int64)
    )
    for start in range(0, max(1, index.num_numbers), PART_ENTRIES):
        records = index.table.records[start : min(start + PART_ENTRIES, index.num_numbers)]
        pins, unverified = (
            index.pins[start : start + len(records)],
            index.unverified[start : start + len(records)],
        )
        states, groups = (
            records[:, table.W_GROUP_STATE] >> np.uint32(16),
            records[:, table.W_GROUP_STATE] & np.uint32(0xFFFF),
        )
        is_ready, is_block = states == table.STATE_READY, groups < MAX_GROUPS
        sizes = records[:, table.W_SIZE].astype(np.int64) * table.SLOT_ALIGN
        owners = records[:, table.W_KEY_SPACE] % KEY_SPACE_ROWS
        counted.num_blocks += int(np.count_nonzero(is_ready & is_block))
        counted.pinned_bytes += int(sizes[pins > 0].sum())
        counted.sketch_bytes += int(sizes[(states != 0) & ~is_block].sum())
        counted.num_unverified += int(np.count_nonzero(unverified))
        counted.blocks += np.bincount(owners[is_ready & is_block], minlength=KEY_SPACE_ROWS)
        counted.sketches += np.bincount(owners[is_ready & ~is_block], minlength=KEY_SPACE_ROWS)
        yield counted


# Figures, counts and blocks.


STATES = {
    table.STATE_RESERVED: "reserved",
    table.STATE_READY: "ready",
    table.STATE_DETACHED: "flushed",
}


@dataclass(frozen=True, slots=True)
class Counts:
    """held_bytes: of the slots that retentions pin.
    held_budget_bytes: most that `held_bytes` may reach.
    """

    num_leases: int
    num_transfers: int
    held_bytes: int
    held_budget_bytes: int


@dataclass(frozen=True, slots=True)
class RoomFigures:
    """The use of a tier's storage.

    capacity_bytes: what the tier can use now; of the arena, what is prefaulted so far.
    full_capacity_bytes: what it can use once the whole arena has memory.
    used_bytes: of slots that are reserved, ready or flushed.
    reserve_bytes: of free slots that are kept for the next stores.
    pinned_bytes, sketch_bytes, num_blocks, num_unverified: as in `Census`.
    """

    capacity_bytes: int
    full_capacity_bytes: int
    used_bytes: int
    reserve_bytes: int
    pinned_bytes: int
    sketch_bytes: int
    num_blocks: int
    num_unverified: int
    num_free_slabs: int
    slab_bytes: int
    slab_classes: tuple[SlabClassStats, ...]
    pool: PoolFigures


@dataclass(frozen=True, slots=True)
class KeySpaceFigures:
    """A key space with its kinds of sketches; `num_blocks` and `num_sketches` count the ready
    ones."""

    number: int
    key_space: KeySpace
    sketches: tuple[Sketch, ...]
    num_blocks: int
    num_sketches: int


@dataclass(frozen=True, slots=True)
class BlockFigures:
    """state: a `STATE_` number of `hotkv_proto.table`.
    last_used_s: on the clock of the core's `now_s`; 0 unless ready.
    sketch_bytes: slot size; 0 without a sketch.
    parent_words: None if there is no parent or it is not ready.
    """

    hash_words: Words
    key_space_id: int
    group_index: int
    state: int
    slot_bytes: int
    depth: int
    num_pins: int
    last_used_s: float
    sketch_bytes: int
    parent_words: Words | None


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """In one group.

    words: entry numbers, with the high bit set while reserved; 0 without an entry.
    causes: `Cause` of each last removal; NONE if none is remembered.
    below: ready on the disk. Shared stores are not asked.
    """

    hashes: Words
    words: NDArray[np.uint32]
    causes: NDArray[np.uint8]
    below: BoolMask


def counts(core: CacheCore) -> Counts:
    return Counts(
        len(core.leases),
        len(core.transfers),
        core.retention_pins.held_bytes,
        core.retention_pins.budget_bytes,
    )


def counters(core: CacheCore) -> dict[str, int]:
    """By the names of `Counters`, since the server's start."""
    return asdict(core.counters)


def policy_figures(core: CacheCore) -> dict[str, float]:
    return core.space.policy.figures()


def eviction_ages(core: CacheCore) -> Histogram:
    """Seconds between a block's last use and its eviction for room."""
    return core.space.removal.ages_s


def census_parts(core: CacheCore) -> int:
    return -(-core.space.index.num_numbers // PART_ENTRIES)


def tier(core: CacheCore, counted: Census) -> RoomFigures:
    """Host memory. `counted`: a complete census."""
    pool = core.space.pool
    return RoomFigures(
        pool.capacity_bytes,
        pool.num_slabs * pool.slab_bytes,
        core.space.used_bytes(),
        core.space.reserve.free_bytes(),
        counted.pinned_bytes,
        counted.sketch_bytes,
        counted.num_blocks,
        counted.num_unverified,
        pool.num_free_slabs,
        pool.slab_bytes,
        tuple(pool.stats()),
        pool.figures(),
    )


def lower_tier(core: CacheCore) -> RoomFigures | None:
    """The disk; None without one. It has no reserve, no pinned and no unverified blocks."""
    space = next((one.space for one in core.below if one.space is not None), None)
    if space is None:
        return None
    pool, num_blocks = space.pool, space.index.num_entries
    return RoomFigures(
        pool.capacity_bytes,
        pool.capacity_bytes,
        space.used_bytes(),
        0,
        0,
        0,
        num_blocks,
        0,
        pool.num_free_slabs,
        pool.slab_bytes,
        tuple(pool.stats()),
        pool.figures(),
    )


def key_spaces(core: CacheCore, counted: Census, most: int = 0) -> list[KeySpaceFigures]:
    """By number. `counted`: a complete census. `most`: only those with the most blocks; 0 for
    all."""
    records = core.key_spaces
    numbers = np.fromiter(records, np.int64, len(records))
    if most:
        by_blocks = np.argsort(-counted.blocks[numbers % KEY_SPACE_ROWS], kind="stable")
        numbers = numbers[by_blocks[:most]]
    return [
        KeySpaceFigures(
            number,
            records[number].key_space,
            records[number].sketches,
            int(counted.blocks[number % KEY_SPACE_ROWS]),
            int(counted.sketches[number % KEY_SPACE_ROWS]),
        )
        for number in sorted(numbers.tolist())
    ]


def leases_of_engines(core: CacheCore) -> dict[str, int]:
    """Without engines that have none."""
    held: dict[str, int] = {}
    for lease in core.leases.all():
        held[lease.engine_id] = held.get(lease.engine_id, 0) + 1
    return held


@dataclass(frozen=True, slots=True)
class HashPrefix:
    """First hexadecimal digits of a block hash, in lower or upper case; their number may be odd.
    Raises ValueError if `digits` is empty, longer than a hash, or not hexadecimal."""

    digits: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.digits) <= 2 * MAX_HASH_BYTES:
            raise ValueError(f"it has {len(self.digits)} digits; give 1 to {2 * MAX_HASH_BYTES}")
        if not set(self.digits) <= set(string.hexdigits):
            raise ValueError("it has other characters than hexadecimal digits")

    def among(self, words: table.Words) -> BoolMask:
        """Mask of the hashes (`words`: eight uint32 words each) with this prefix."""
        digits = self.digits + "0" * (len(self.digits) % 2)
        wanted = np.frombuffer(bytes.fromhex(digits), np.uint8)
        mask = np.full(len(wanted), 0xFF, np.uint8)
        if len(self.digits) % 2:
            mask[-1] = 0xF0
        found = np.ascontiguousarray(words).view(np.uint8)[:, : len(wanted)]
        equal: BoolMask = ((found & mask) == wanted).all(axis=1)
        return equal


def find_blocks(
    core: CacheCore, start: int, most: int, key_space_id: int, prefix: HashPrefix | None = None
) -> Iterator[list[int]]:
    """Blocks by entry number, from `start` on. Yields after each part all found so far; the last
    list has `most` if so many match. `key_space_id`: 0 for all."""
    index, found = core.space.index, np.empty(0, np.uint32)
    while start < index.num_numbers and len(found) < most:
        states = index.states(start, start + PART_ENTRIES)
        wanted = states != 0
        if key_space_id:
            records = index.table.records[start : start + len(states)]
            wanted &= records[:, table.W_KEY_SPACE] == key_space_id
        if prefix is not None:
            wanted &= prefix.among(index.table.records[start : start + len(states), :8])
        entries = start + np.flatnonzero(wanted).astype(np.uint32)
        blocks = entries[~core.space.sketches.among(entries)]
        found = np.concatenate((found, blocks))[:most]
        start += PART_ENTRIES
        yield found.tolist()


def hottest_blocks(core: CacheCore, most: int, key_space_id: int) -> Iterator[list[int]]:
    """The ready blocks that would go last, hottest first. Yields after each part the `most` hottest
    so far.

    `key_space_id`: 0 for all.
    """
    index, found = core.space.index, np.empty(0, np.uint32)
    for start in range(0, max(1, index.num_numbers), PART_ENTRIES):
        part = index.ready_blocks(key_space_id, start, start + PART_ENTRIES)
        # Drop what was removed since an earlier part found it.
        found = np.concatenate((found[index.is_ready(found)], part))
        heat = core.space.policy.heat(found)
        if len(found) > most:
            chosen = np.argpartition(-heat, most)[:most]
            found, heat = found[chosen], heat[chosen]
        found = found[np.argsort(-heat, kind="stable")]
        yield found.tolist()


def blocks(core: CacheCore, entries: Sequence[int]) -> list[BlockFigures]:
    """Leaves out blocks that are no longer in the index."""
    there = np.array(entries, np.uint32)
    there = there[core.space.index.table.records[there, table.W_GROUP_STATE] >> 16 != 0]
    # A removed block's entry number may be a sketch's now.
    there = there[~core.space.sketches.among(there)]
    is_known = core.space.index.is_ready(there)
    used_s = np.where(is_known, core.space.policy.last_used_s(there), 0.0)
    return [
        _block(core, int(entry), float(used)) for entry, used in zip(there, used_s, strict=True)
    ]


def _block(core: CacheCore, entry: int, last_used_s: float) -> BlockFigures:
    index = core.space.index
    record = index.table.records[entry].copy()
    number, group = int(record[table.W_KEY_SPACE]), int(record[table.W_GROUP_STATE] & 0xFFFF)
    parents = index.keys(core.space.chains.ancestors(entry, 1))[2]
    linked = record[table.W_SKETCH]
    return BlockFigures(
        record[:8],
        number,
        group,
        int(record[table.W_GROUP_STATE] >> 16),
        core.key_space(number).groups[group].slot_bytes,
        int(record[table.W_DEPTH]),
        int(index.pins[entry]),
        last_used_s,
        int(index.slot_bytes(linked)) if linked else 0,
        parents[0] if len(parents) else None,
    )


def prompt_blocks(
    core: CacheCore, key_space_id: int, group_index: int, hashes: Words
) -> PromptBlocks:
    below = np.zeros(len(hashes), np.bool_)
    for one in core.below:
        below |= one.find(key_space_id, HashList(group_index, hashes))
    return PromptBlocks(
        hashes,
        core.space.index.find(key_space_id, group_index, hashes),
        core.space.removal.causes(key_space_id, group_index, hashes),
        below,
    )


def story(index: BlockIndex, entry: int) -> str:
    """An entry's state in one line, for logs; accepts any number, even out of range."""
    if not 0 < entry <= index.capacity:
        return f"entry={entry} is none of the {index.capacity}"
    record = index.table.records[entry]
    state = int(record[table.W_GROUP_STATE]) >> 16
    return (
        f"entry={entry} state={STATES.get(state, 'free')} key_space={record[table.W_KEY_SPACE]} "
        f"group={int(record[table.W_GROUP_STATE]) & 0xFFFF} "
        f"hash={record[:8].tobytes().hex()[:16]} depth={record[table.W_DEPTH]} "
        f"slot={record[table.W_OFFSET]} size={record[table.W_SIZE]} "
        f"reuses={record[table.W_REUSES]} pins={index.pins[entry]} "
        f"parent={record[table.W_PARENT]} sketch={record[table.W_SKETCH]} "
        f"unverified={bool(index.unverified[entry])}"
    )


# The map of the arena: at most MAX_CELLS cells of adjacent slabs, all but the last of the same
# length.


MAX_CELLS = 2048
MAP_PART_ENTRIES = 1 << 16
"""Entry numbers that a part of the map's scan examines, in about a millisecond."""
F64s = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ArenaMap:
    """Arrays have a value for each cell, from the arena's start.

    slabs_per_cell: the last cell may have fewer.
    slot_bytes: of the cell's first slab that has slots; FREE if none has, ABSENT if none has
        memory.
    used_ratios: share of the cell's bytes that lie in slots in use, 0 to 1.
    idle_s: time since the last use of the cell's ready blocks: expm1 of the mean of
        log1p(seconds), weighted by bytes. NaN without a ready block.
    """

    slab_bytes: int
    num_slabs: int
    slabs_per_cell: int
    slot_bytes: Int64s
    used_ratios: F64s
    idle_s: F64s


def arena_map(core: CacheCore, now_s: float) -> Iterator[ArenaMap | None]:
    """Yields None after each part, and at the end the map."""
    space, pool = core.space, core.space.pool
    slabs_per_cell = -(-pool.num_slabs // MAX_CELLS)
    num_cells = -(-pool.num_slabs // slabs_per_cell)
    used, ready, idle = np.zeros(num_cells), np.zeros(num_cells), np.zeros(num_cells)
    capacity = np.full(num_cells, slabs_per_cell * pool.slab_bytes)
    capacity[-1] = (pool.num_slabs - (num_cells - 1) * slabs_per_cell) * pool.slab_bytes
    for start in range(0, max(1, space.index.num_numbers), MAP_PART_ENTRIES):
        entries, is_ready = _part(space, start)
        rows, slabs, num_bytes = _spread(space, entries)
        cells, is_ready = slabs // slabs_per_cell, is_ready[rows]
        used += np.bincount(cells, num_bytes, num_cells)
        cells, num_bytes = cells[is_ready], num_bytes[is_ready]
        ages_s = np.maximum(0.0, now_s - space.policy.last_used_s(entries[rows[is_ready]]))
        ready += np.bincount(cells, num_bytes, num_cells)
        idle += np.bincount(cells, num_bytes * np.log1p(ages_s), num_cells)
        yield None
    with np.errstate(invalid="ignore"):
        mean_s = np.expm1(idle / ready)
    yield ArenaMap(
        pool.slab_bytes,
        pool.num_slabs,
        slabs_per_cell,
        _owners(pool.slab_owner(), slabs_per_cell),
        np.minimum(used / capacity, 1.0),
        mean_s,
    )


def _part(space: Space, start: int) -> tuple[Entries, NDArray[np.bool_]]:
    """Entries from `start` on that have a slot, and which of them are ready blocks."""
    words = space.index.table.records[
        start : min(start + MAP_PART_ENTRIES, space.index.num_numbers), table.W_GROUP_STATE
    ]
    places = np.flatnonzero(words >> np.uint32(16))
    words = words[places]
    is_block = words & np.uint32(0xFFFF) < MAX_GROUPS
    return (start + places).astype(np.uint32), is_block & (
        words >> np.uint32(16) == table.STATE_READY
    )


def _spread(space: Space, entries: Entries) -> tuple[Int64s, Int64s, F64s]:
    """Cuts the entries' slots at the borders of slabs. For each piece: position of its entry in
    `entries`, slab, and bytes."""
    slab_bytes = space.pool.slab_bytes
    starts = space.index.offsets(entries)
    ends = starts + space.index.slot_bytes(entries)
    first, last = space.pool.slab_of(starts), space.pool.slab_of(ends - 1)
    rows, nth = spread(last - first + 1)
    slabs = first[rows] + nth
    within = np.minimum(ends[rows], (slabs + 1) * slab_bytes) - np.maximum(
        starts[rows], slabs * slab_bytes
    )
    return rows, slabs, within.astype(np.float64)


def _owners(owner: Int64s, slabs_per_cell: int) -> Int64s:
    """`ArenaMap.slot_bytes`. `owner`: as `SlabPool.slab_owner` returns it."""
    num_cells = -(-len(owner) // slabs_per_cell)
    padded = np.full(num_cells * slabs_per_cell, ABSENT)
    padded[: len(owner)] = owner
    grid = padded.reshape(num_cells, slabs_per_cell)
    # A cell without slots gives its first free slab; if none is free, any slab gives ABSENT.
    chosen = np.where(
        (grid >= 0).any(axis=1), (grid >= 0).argmax(axis=1), (grid == FREE).argmax(axis=1)
    )
    owners: Int64s = grid[np.arange(num_cells), chosen]
    return owners
