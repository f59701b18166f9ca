"""Restoring what readers of the arena may still read: residencies of the old server pinned it.

Always true: either all of it is kept, for the time of the grace (`grace`), or the words have told
its readers before any slot is used. Blocks that were flushed while they were pinned are made anew
as what they were, detached: nobody finds them, and their slots stay theirs.
"""

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.table import SLOT_ALIGN, Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.slabs import aligned
from hotkv_server.cache.values import Entries, Int64s


def kept_rows(core: CacheCore, states: Words, marks: NDArray[np.uint8] | None) -> Int64s:
    """Records that an old server's readers may read: none if it had no readers any more."""
    if marks is None or not core.words.has_earlier_readers:
        return np.empty(0, np.int64)
    return np.flatnonzero(
        (marks[: len(states)] != 0)
        & ((states == table.STATE_READY) | (states == table.STATE_DETACHED))
    )


def link_detached(
    core: CacheCore, old: Words, rows: Int64s, numbers: Entries, new_of: Entries
) -> None:
    """Makes detached entries for records. One that finds no place stays 0 in `new_of`."""
    index = core.space.index
    groups = old[rows, table.W_GROUP_STATE] & np.uint32(0xFFFF)
    for number, group in np.unique(np.stack((numbers, groups), axis=1), axis=0).tolist():
        here = rows[(numbers == number) & (groups == group)]
        # A key may be there several times; in the table only for a moment.
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
    """Keeps what came back of the kept records, 0 for a record that did not: all, or nothing, and
    then readers are told. Returns how many are kept, and whether readers were told."""
    grace, index = core.grace, core.space.index
    is_whole = bool(np.all(entries != 0)) and bool(index.can_be_read(entries).all())
    # A tenant that has more than it may must give blocks up at once.
    if len(entries) and is_whole and not core.space.tenants.over_bound():
        grace.begin(entries)
        return len(entries), False
    grace.revoke()
    there = entries[entries != 0]
    core.space.removal.reap(there)
    return 0, bool(len(entries))
