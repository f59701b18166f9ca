"""Read-only views of the core (`CacheCore`, the state of the cache): frozen answers for operators
and metrics.

Always true: a query changes nothing. An answer is a copy that later changes do not affect. A query
over all entries runs in parts; an entry that is added, removed or used between two parts may count
or not. Code outside the node reads the core's state through this module.

Entries are blocks or sketches (compact summaries of a block's attention keys, for sparse
attention).
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

# The census counts all entries (records of blocks), in parts: each part examines a range of entry
# numbers.


PART_ENTRIES = 1 << 17
"""Number of entry numbers that each part of a census (count of all entries) examines. A part takes
a millisecond or two."""


@dataclass(slots=True)
class Census:
    """Counts of all entries (records in the block table), which `census` makes in parts. An entry
    that is inserted or removed between two parts may count or not.

    num_blocks: ready blocks.
    pinned_bytes: bytes of the slots (places in the arena) of pinned entries.
    sketch_bytes: bytes of the slots of sketches (compact summaries of blocks'
        attention keys, for sparse attention) in any state.
    num_unverified: entries whose bytes must be compared with the checksum before a
        load.
    blocks, sketches: number of ready blocks and of ready sketches of each key space,
        int64. The index is the key space's number modulo KEY_SPACE_ROWS.
    """

    num_blocks: int
    pinned_bytes: int
    sketch_bytes: int
    num_unverified: int
    blocks: NDArray[np.int64]
    sketches: NDArray[np.int64]


def census(core: CacheCore) -> Iterator[Census]:
    """Counts all entries (records in the block table) in parts. Yields the same `Census` after each
    part; its counts are complete after the last part."""
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
"""Names of the states of an entry that is not free."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of live leases and transfers, and bytes that are pinned because requests asked to
    retain their blocks.

    held_bytes: bytes of the slots (places in the arena) that are pinned for this reason.
    held_budget_bytes: most bytes that `held_bytes` may reach.
    """

    num_leases: int
    num_transfers: int
    held_bytes: int
    held_budget_bytes: int


@dataclass(frozen=True, slots=True)
class RoomFigures:
    """The use of a tier's storage, in bytes, blocks and slabs (pieces of the arena).

    capacity_bytes: bytes that the tier can use now. For the arena, which is prefaulted after the
        start: the bytes that have memory now.
    full_capacity_bytes: bytes that the tier can use once the whole arena has memory.
    used_bytes: bytes of slots that are reserved, ready or detached (flushed while pinned).
    pinned_bytes: bytes of the slots of pinned entries (records in the block table).
    sketch_bytes: bytes of the slots of sketches (compact summaries of blocks'
        attention keys, for sparse attention).
    num_blocks: number of ready blocks.
    num_unverified: number of entries whose bytes must be compared with the checksum
        before a load.
    """

    capacity_bytes: int
    full_capacity_bytes: int
    used_bytes: int
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
    """A key space (a model in a configuration) with its numbers of ready blocks and of ready
    sketches (compact summaries of blocks' attention keys, for sparse attention). Also has
    the kinds of these sketches."""

    number: int
    key_space: KeySpace
    sketches: tuple[Sketch, ...]
    num_blocks: int
    num_sketches: int


@dataclass(frozen=True, slots=True)
class BlockFigures:
    """The current state of a block.

    hash_words: hash of the block, eight uint32 words.
    state: reserved, ready or detached (flushed while pinned), as a `STATE_` number of
        `hotkv_proto.table`.
    depth: number of blocks before this block in its prompt.
    last_used_s: time of the last use, in seconds of the core's `now_s`; 0 if the block is not
        ready.
    sketch_bytes: slot size of the block's sketch (compact summary of its attention
        keys); 0 without a sketch.
    parent_words: hash of the block before this block in its prompt. None if this block is the
        first, or if the block before it is not ready.
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
    """The blocks of a prompt in one group, and the state of each block in the cache.

    hashes: each a row of eight uint32 words.
    words: an entry word for each hash: the entry number, with the high bit set while the entry is
        reserved; 0 if the hash has no entry.
    causes: `Cause` of each block's last removal; NONE if no removal is remembered.
    below: True for each block that is ready on the disk. Tiers that are shared with other nodes are
        not asked.
    """

    hashes: Words
    words: NDArray[np.uint32]
    causes: NDArray[np.uint8]
    below: BoolMask


def counts(core: CacheCore) -> Counts:
    """Returns the numbers of live leases and transfers, and the bytes that are pinned because
    requests asked to retain their blocks."""
    return Counts(
        len(core.leases),
        len(core.transfers),
        core.retention_pins.held_bytes,
        core.retention_pins.budget_bytes,
    )


def counters(core: CacheCore) -> dict[str, int]:
    """Returns the counts of events since the server's start, by the names of `Counters`."""
    return asdict(core.counters)


def policy_figures(core: CacheCore) -> dict[str, float]:
    """Returns the figures of the eviction policy by metric name, for example the parameters that it
    has chosen for the present traffic."""
    return core.space.policy.figures()


def eviction_ages(core: CacheCore) -> Histogram:
    """Returns a histogram of the time between a block's last use and its eviction to make room in
    the arena, in seconds."""
    return core.space.removal.ages_s


def census_parts(core: CacheCore) -> int:
    """Returns the number of parts in which `census` would count the present entries (records in the
    block table)."""
    return -(-core.space.index.num_numbers // PART_ENTRIES)


def tier(core: CacheCore, counted: Census) -> RoomFigures:
    """Returns the figures of the tier in host memory. `counted`: a complete census (count of all
    entries)."""
    pool = core.space.pool
    return RoomFigures(
        pool.capacity_bytes,
        pool.num_slabs * pool.slab_bytes,
        core.space.used_bytes(),
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
    """Returns the figures of the disk tier; None if there is no disk. The figures of pinned and
    unverified blocks are 0, because the disk has no such blocks."""
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
        num_blocks,
        0,
        pool.num_free_slabs,
        pool.slab_bytes,
        tuple(pool.stats()),
        pool.figures(),
    )


def key_spaces(core: CacheCore, counted: Census, most: int = 0) -> list[KeySpaceFigures]:
    """Returns the known key spaces (each is a model in a configuration) in order of their
    numbers.

    counted: a complete census (count of all entries).
    most: returns only this many key spaces, those with the most blocks; 0 returns all.
    """
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
    """Returns the number of leases of each engine, by engine id. Leaves out engines without a
    lease."""
    held: dict[str, int] = {}
    for lease in core.leases.all():
        held[lease.engine_id] = held.get(lease.engine_id, 0) + 1
    return held


@dataclass(frozen=True, slots=True)
class HashPrefix:
    """The first hexadecimal digits of a block hash, by which operators search for blocks. Raises
    ValueError if `digits` is empty, longer than a hash, or not hexadecimal.

    digits: lower or upper case; their number may be odd.
    """

    digits: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.digits) <= 2 * MAX_HASH_BYTES:
            raise ValueError(f"it has {len(self.digits)} digits; give 1 to {2 * MAX_HASH_BYTES}")
        if not set(self.digits) <= set(string.hexdigits):
            raise ValueError("it has other characters than hexadecimal digits")

    def among(self, words: table.Words) -> BoolMask:
        """Returns a mask of the hashes that begin with the digits of this prefix. `words`: eight
        uint32 words for each hash."""
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
    """Finds the entries (records in the block table) of blocks in order of their entry numbers,
    from the number `start` on. Yields after each part the list of all entries found so far. The
    last list has `most` entries; fewer only if fewer entries match.

    key_space_id: 0 for all key spaces.
    prefix: finds only blocks whose hash begins with `prefix`.
    """
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
    """Finds the entries (records in the block table) of the hottest blocks: the ready blocks that
    the eviction policy would evict last. Yields after each part the hottest of all blocks that were
    examined so far, at most `most`, the hottest first.

    key_space_id: 0 for all key spaces.
    """
    index, found = core.space.index, np.empty(0, np.uint32)
    for start in range(0, max(1, index.num_numbers), PART_ENTRIES):
        part = index.ready_blocks(key_space_id, start, start + PART_ENTRIES)
        # Drop blocks that were found in an earlier part and have been removed since.
        found = np.concatenate((found[index.is_ready(found)], part))
        heat = core.space.policy.heat(found)
        if len(found) > most:
            chosen = np.argpartition(-heat, most)[:most]
            found, heat = found[chosen], heat[chosen]
        found = found[np.argsort(-heat, kind="stable")]
        yield found.tolist()


def blocks(core: CacheCore, entries: Sequence[int]) -> list[BlockFigures]:
    """Returns the state of the given blocks; leaves out blocks that are no longer in the index."""
    there = np.array(entries, np.uint32)
    there = there[core.space.index.table.records[there, table.W_GROUP_STATE] >> 16 != 0]
    # If a block was removed, its entry number may have been reused for a sketch (compact
    # summary of keys). Leave out such entries.
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
    """Returns the state of a prompt's blocks in a group: whether each block is in host memory or on
    the disk, and why it was removed if it is in neither.

    hashes: the blocks' hashes, each a row of eight uint32 words.
    """
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
    """Returns one line of text with the current state of an entry (record in the block table), for
    logs. Accepts any entry number, even of a free entry or out of range."""
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


# The map of the arena cuts the arena into cells. For each cell it shows the size of the slots
# there, how full the cell is, and when its blocks were last used.
#
# Always true: a map has at most MAX_CELLS cells, however large the arena. A slab is a piece of the
# arena; it is *lent* to a slot size while it is divided into slots of that size. A cell is a range
# of adjacent slabs; all cells but the last have the same length. The scan over all entries runs in
# parts; an entry that is added, removed or used between two parts may count or not.


MAX_CELLS = 2048
MAP_PART_ENTRIES = 1 << 16
"""Number of entry numbers that each part of the scan for the arena's map examines. A part takes
about a millisecond."""
F64s = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ArenaMap:
    """A map of the arena, which is cut into cells of equal size. A cell consists of adjacent slabs
    (pieces of the arena). A slab is free, is divided into slots of one size, or has no memory yet
    (`SlabPool`). Arrays have a value for each cell, in order from the arena's start.

    slabs_per_cell: slabs in each cell; the last cell may have fewer.
    slot_bytes: the slot size of the first slab in the cell that has slots. FREE if no slab of the
        cell has slots, ABSENT if no slab of the cell has memory.
    used_ratios: share of the cell's bytes that lie in slots in use, 0 to 1.
    idle_s: seconds since the last use of the cell's ready blocks, averaged on a logarithmic scale:
        expm1 of the mean of log1p(seconds), weighted by bytes. NaN if the cell has no ready block.
    """

    slab_bytes: int
    num_slabs: int
    slabs_per_cell: int
    slot_bytes: Int64s
    used_ratios: F64s
    idle_s: F64s


def arena_map(core: CacheCore, now_s: float) -> Iterator[ArenaMap | None]:
    """Builds the map of the arena in parts. Yields None after each part, and at the end the map.

    now_s: the current time, on the same clock as `now_s` in calls of the core.
    """
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
    """Examines MAP_PART_ENTRIES entry numbers, from `start` on. Returns the entries that have a
    slot (place in the arena), and for each of them whether it is a ready block."""
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
    """Cuts the slot of each entry (record in the block table) into pieces, one for each slab (piece
    of the arena) in which a part of the slot lies. Returns three values for each piece: the
    position of its entry in `entries`, its slab, and its size in bytes."""
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
    """Returns a slot size for each cell of the arena map (a cell is some adjacent slabs): the size
    of the slots in the cell's first slab that is divided into slots. Returns FREE for a cell
    without such a slab, and ABSENT for a cell without memory.

    owner: for each slab, the size of its slots, FREE or ABSENT, as `SlabPool.slab_owner` returns
        it.
    slabs_per_cell: number of adjacent slabs that form a cell.
    """
    num_cells = -(-len(owner) // slabs_per_cell)
    padded = np.full(num_cells * slabs_per_cell, ABSENT)
    padded[: len(owner)] = owner
    grid = padded.reshape(num_cells, slabs_per_cell)
    # Choose the first slab of each cell that is divided into slots. If there is none, choose the
    # first free slab. If no slab is free either, no slab has memory, and any slab gives ABSENT.
    chosen = np.where(
        (grid >= 0).any(axis=1), (grid >= 0).argmax(axis=1), (grid == FREE).argmax(axis=1)
    )
    owners: Int64s = grid[np.arange(num_cells), chosen]
    return owners
