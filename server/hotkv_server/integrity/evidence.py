"""Describes the blocks to compare with check values, and condemns blocks that disagree.

Always true: this module decides and reads no bytes. After `condemn`, a block is no longer found. As
long as a lease keeps its slot, the slot stays marked as unverified.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import Cause, Entries
from hotkv_server.integrity.check_values import Int64s, Sums


@dataclass(frozen=True, slots=True)
class Evidence:
    """Blocks of the same shape whose bytes are to be compared with their check values.

    `entries` [n]: entry numbers in the index. `offsets` [n]: offsets of the entries' slots in the
    arena, in bytes.
    `shard_bytes`: bytes of each shard of a block.
    `keys` [n]: mixed keys, as `BlockIndex.mixed` returns them.
    `checks` [n]: check values in the blocks' records.
    """

    entries: NDArray[np.uint32]
    offsets: Int64s
    shard_bytes: Sequence[int]
    keys: Sums
    checks: Sums


def evidence(core: CacheCore, entries: Entries) -> list[Evidence]:
    """Returns slots, shapes and check values of entries that are ready or detached, in parts of the
    same shape."""
    index, parts = core.space.index, []
    key_spaces, groups, _ = index.keys(entries)
    kinds = key_spaces.astype(np.uint64) << np.uint64(16) | groups
    for kind in np.unique(kinds).tolist():
        part, (number, group) = entries[kinds == kind], divmod(kind, 1 << 16)
        shape = core.catalog.record(number).shape(group)
        parts.append(
            Evidence(
                part, index.offsets(part), shape.shard_bytes, index.mixed(part), index.checks(part)
            )
        )
    return parts


def condemn(core: CacheCore, entries: Entries) -> None:
    """Drops ready entries whose bytes have changed. Announces the removal of blocks. A pinned entry
    keeps its slot until it is unpinned."""
    core.space.index.unverified[entries] = True
    alone = core.space.representations.among(entries)
    core.space.representations.drop(entries[alone])
    core.condemned(entries[~alone])
    core.retention_pins.let_go(entries[~alone])
    core.space.removal.flush(entries[~alone], Cause.DAMAGE)
    core.counters.condemned_blocks += int((~alone).sum())
