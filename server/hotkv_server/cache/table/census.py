"""Counts all entries, a part at a time, so that nobody waits for the count of millions."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.keys import MAX_GROUPS
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import KEY_SPACE_ROWS

PART_ENTRIES = 1 << 17
"""Entries that one part counts: a millisecond or two."""


@dataclass(slots=True)
class Census:
    """What is there. An entry that is inserted or removed meanwhile may be counted or not.

    num_blocks: ready ones. representation_bytes: slots of representations, in whatever state.
    blocks, representations: ready ones, int64 by row of the key space, see KEY_SPACE_ROWS.
    """

    num_blocks: int
    pinned_bytes: int
    representation_bytes: int
    num_unverified: int
    blocks: NDArray[np.int64]
    representations: NDArray[np.int64]


def take(space: Space) -> Iterator[Census]:
    """Counts the entries of a space: the census so far, after each part; the last one is whole."""
    index = space.index
    census = Census(
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
        census.num_blocks += int(np.count_nonzero(is_ready & is_block))
        census.pinned_bytes += int(sizes[pins > 0].sum())
        census.representation_bytes += int(sizes[(states != 0) & ~is_block].sum())
        census.num_unverified += int(np.count_nonzero(unverified))
        census.blocks += np.bincount(owners[is_ready & is_block], minlength=KEY_SPACE_ROWS)
        census.representations += np.bincount(
            owners[is_ready & ~is_block], minlength=KEY_SPACE_ROWS
        )
        yield census
