"""What is to be compared with check values, and what becomes of blocks that do not agree.

Always true: this module decides and reads no bytes; from the call of `condemn` on nobody finds a
condemned block, and as long as a lease keeps its slot, it stays marked as not verified.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import Entries
from hotkv_server.integrity.check_values import Int64s, Sums


@dataclass(frozen=True, slots=True)
class Evidence:
    """Blocks of one shape whose bytes are to be compared with their check values.

    `entries` [n] of the index, slot `offsets` [n] in the arena, mixed `keys` [n], check values [n];
    `shard_bytes`: the shape.
    """

    entries: NDArray[np.uint32]
    offsets: Int64s
    shard_bytes: Sequence[int]
    keys: Sums
    checks: Sums


def evidence(core: CacheCore, entries: Entries) -> list[Evidence]:
    """Slots, shapes and check values of entries that are ready or detached, in parts of one
    shape."""
    index, parts = core.space.index, []
    key_spaces, groups, _ = index.keys(entries)
    for number, group in np.unique(np.stack((key_spaces, groups), axis=1), axis=0).tolist():
        part = entries[(key_spaces == number) & (groups == group)]
        shape = core.catalog.record(number).shape(group)
        parts.append(
            Evidence(
                part, index.offsets(part), shape.shard_bytes, index.mixed(part), index.checks(part)
            )
        )
    return parts


def condemn(core: CacheCore, entries: Entries) -> None:
    """Drops ready entries whose bytes are not those that were stored, blocks with a notice. A
    pinned entry keeps its slot until its pins end."""
    core.space.index.unverified[entries] = True
    alone = core.space.representations.among(entries)
    core.space.representations.drop(entries[alone])
    core.condemned(entries[~alone])
    core.retention_pins.let_go(entries[~alone])
    core.space.removal.flush(entries[~alone])
    core.counters.condemned_blocks += int((~alone).sum())
