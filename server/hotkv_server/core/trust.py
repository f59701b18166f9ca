"""Which blocks can be trusted: what is to be compared with check values, and what becomes of blocks
that do not agree.

Decides and does nothing: bytes are read elsewhere. A condemned block can't be found from that call
on, by anybody; where a lease keeps its slot, it stays marked as not verified.
"""

import numpy as np

from hotkv_server.core.cache import CacheCore
from hotkv_server.core.checks import Evidence
from hotkv_server.core.values import Entries


def evidence(core: CacheCore, entries: Entries) -> list[Evidence]:
    """What says whether entries, ready or detached, hold what was stored: slots, shapes and check
    values, in parts of one shape."""
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
    """Ready entries whose bytes can't be trusted go, blocks with a notice. Pinned ones keep their
    slot until they are let go."""
    core.space.index.unverified[entries] = True
    alone = core.space.representations.among(entries)
    core.space.representations.drop(entries[alone])
    core.retention_pins.let_go(entries[~alone])
    core.space.removal.flush(entries[~alone])
    core.counters.condemned_blocks += int((~alone).sum())
