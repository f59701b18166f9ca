"""Says which bytes to compare with which checksums, and condemns blocks. While a lease pins a
condemned block, its slot stays in use and unverified, so that loads fail."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import Cause, Entries
from hotkv_server.integrity.checksums import Int64s, Sums


@dataclass(frozen=True, slots=True)
class Evidence:
    """n blocks of the same shard sizes.

    `offsets` [n]: in the arena, in bytes.
    `keys` [n]: from `BlockIndex.mixed`.
    `checks` [n]: from the records.
    """

    entries: NDArray[np.uint32]
    offsets: Int64s
    shard_bytes: Sequence[int]
    keys: Sums
    checks: Sums


def evidence(core: CacheCore, entries: Entries) -> list[Evidence]:
    """One for each shape. `entries`: ready or detached."""
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
    """Drops ready entries whose bytes do not match. Pinned ones keep their slots."""
    core.space.index.unverified[entries] = True
    alone = core.space.sketches.among(entries)
    core.space.sketches.drop(entries[alone])
    core.condemned(entries[~alone])
    core.retention_pins.unpin(entries[~alone])
    core.space.removal.flush(entries[~alone], Cause.DAMAGE)
    core.counters.condemned_blocks += int((~alone).sum())
