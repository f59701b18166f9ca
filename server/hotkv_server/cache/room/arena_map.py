"""The arena as a map: which slot size each part of it is lent to, how full it is, how lately it was
used.

Always true: a map has at most MAX_CELLS cells, however large the arena; a cell is a run of slabs of
one length, but for the last. The walk over all entries is done in parts; an entry that comes, goes
or is used meanwhile may count or not.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.keys import MAX_GROUPS
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.slabs import ABSENT, FREE
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import Entries, Int64s

MAX_CELLS = 2048
PART_ENTRIES = 1 << 16
"""Entries that one part looks at: about a millisecond."""
F64s = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ArenaMap:
    """Cells [n] from the arena's start. `slabs_per_cell`: as far as there are so many.

    `slot_bytes`: what the first slab that is lent to some size is lent to; FREE if none is, ABSENT
    if no slab has memory. `used_ratios`: of the cell's bytes, those in slots that are in use.
    `idle_s`: how long ago its ready blocks were last used, as the mean of log(1 + seconds) by
    bytes; NaN if it has none.
    """

    slab_bytes: int
    num_slabs: int
    slabs_per_cell: int
    slot_bytes: Int64s
    used_ratios: F64s
    idle_s: F64s


def draw(core: CacheCore, now_s: float) -> Iterator[ArenaMap | None]:
    """Draws the map of host memory: None after each part, the map after the last one.

    `now_s`: in seconds of the core.
    """
    space, pool = core.space, core.space.pool
    slabs_per_cell = -(-pool.num_slabs // MAX_CELLS)
    num_cells = -(-pool.num_slabs // slabs_per_cell)
    used, ready, idle = np.zeros(num_cells), np.zeros(num_cells), np.zeros(num_cells)
    capacity = np.full(num_cells, slabs_per_cell * pool.slab_bytes)
    capacity[-1] = (pool.num_slabs - (num_cells - 1) * slabs_per_cell) * pool.slab_bytes
    for start in range(0, max(1, space.index.num_numbers), PART_ENTRIES):
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
    """The entries [n] of a part that have slots, and which of them are ready blocks."""
    words = space.index.table.records[
        start : min(start + PART_ENTRIES, space.index.num_numbers), table.W_GROUP_STATE
    ]
    places = np.flatnonzero(words >> np.uint32(16))
    words = words[places]
    is_block = words & np.uint32(0xFFFF) < MAX_GROUPS
    return (start + places).astype(np.uint32), is_block & (
        words >> np.uint32(16) == table.STATE_READY
    )


def _spread(space: Space, entries: Entries) -> tuple[Int64s, Int64s, F64s]:
    """The slots of entries, slab by slab: which of the entries [m], the slab [m], and the bytes of
    the slot that lie in it [m]. m is len(entries) unless slots span slabs."""
    slab_bytes = space.pool.slab_bytes
    slabs = space.pool.slab_of(space.index.offsets(entries))
    num_bytes = space.index.slot_bytes(entries)
    rows = np.arange(len(entries))
    if len(entries) and int(num_bytes.max()) > slab_bytes:
        spans = -(-num_bytes // slab_bytes)
        rows = np.repeat(rows, spans)
        nth = np.arange(len(rows)) - np.repeat(np.cumsum(spans) - spans, spans)
        slabs = slabs[rows] + nth
        num_bytes = np.minimum(num_bytes[rows] - nth * slab_bytes, slab_bytes)
    return rows, slabs, num_bytes.astype(np.float64)


def _owners(owner: Int64s, slabs_per_cell: int) -> Int64s:
    """The slot size of each cell's first slab that is lent; FREE, or ABSENT, if none is."""
    num_cells = -(-len(owner) // slabs_per_cell)
    padded = np.full(num_cells * slabs_per_cell, ABSENT)
    padded[: len(owner)] = owner
    grid = padded.reshape(num_cells, slabs_per_cell)
    # A lent slab before a free one, and that before one without memory.
    chosen = np.where(
        (grid >= 0).any(axis=1), (grid >= 0).argmax(axis=1), (grid == FREE).argmax(axis=1)
    )
    owners: Int64s = grid[np.arange(num_cells), chosen]
    return owners
