"""Describes the blocks to compare with their checksums, and condemns (drops) blocks
that do not match.

Always true: this module reads no bytes of blocks. Lookups no longer find a condemned block. As long
as a lease pins a condemned block, its slot (place for a block) stays in use, and stays marked as
unverified, so that loads of the block fail.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import Cause, Entries
from hotkv_server.integrity.checksums import Int64s, Sums


@dataclass(frozen=True, slots=True)
class Evidence:
    """The description of n blocks of the same shape, for a comparison of their bytes with their
    checksums. The shape is the number and sizes of a block's shards (the parts from
    the ranks).

    `entries` [n]: entry numbers of the blocks in the index.
    `offsets` [n]: offsets of the blocks' slots in the arena, in bytes.
    `shard_bytes`: size of each shard of a block.
    `keys` [n]: the blocks' keys: numbers that `BlockIndex.mixed` computes from each block's hash,
        key space and group.
    `checks` [n]: checksums in the blocks' records.
    """

    entries: NDArray[np.uint32]
    offsets: Int64s
    shard_bytes: Sequence[int]
    keys: Sums
    checks: Sums


def evidence(core: CacheCore, entries: Entries) -> list[Evidence]:
    """Describes blocks whose bytes are to be compared with their checksums. Returns
    a description for each group of blocks of the same shape: number and sizes of shards (the ranks'
    parts of a block). `entries`: ready entries (records in the block table), or detached entries
    (removed, but still pinned)."""
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
    """Drops `entries`: ready entries (records in the block table) whose bytes do not match their
    checksums. Adds eviction notices for blocks, but not for sketches (compact
    summaries of blocks' attention keys). A pinned entry keeps its slot (place for a block) until it
    is unpinned."""
    core.space.index.unverified[entries] = True
    alone = core.space.sketches.among(entries)
    core.space.sketches.drop(entries[alone])
    core.condemned(entries[~alone])
    core.retention_pins.unpin(entries[~alone])
    core.space.removal.flush(entries[~alone], Cause.DAMAGE)
    core.counters.condemned_blocks += int((~alone).sum())
