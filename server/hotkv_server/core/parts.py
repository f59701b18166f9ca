"""Long work of the core in parts: each generator does one part a step, and between two steps anything else may be called.

Only work whose pieces are decisions of their own is here. What a piece finds changed since the first step, it leaves alone.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from hotkv import table
from hotkv.keys import MAX_GROUPS
from hotkv_server.core.cache import CacheCore
from hotkv_server.core.leases import Lease
from hotkv_server.core.values import Entries

LEASES = 64
"""A part; a lease may list 2^17 blocks."""
BLOCKS = 1 << 13


def expire(core: CacheCore, now_s: float) -> Iterator[None]:
    """Ends leases and holds whose time is up; leases with copies in flight end with the copies."""
    core.holds.expire(now_s)
    late = core.late(now_s)
    for start in range(0, len(late), LEASES):
        core.counters.expired_leases += _end(core, late[start : start + LEASES])
        yield


def end_leases(core: CacheCore, session_number: int) -> Iterator[None]:
    """Ends the leases of a session that is about to be closed and takes no new ones."""
    leases = core.leases.of_session(session_number)
    for start in range(0, len(leases), LEASES):
        _end(core, leases[start : start + LEASES])
        yield


def evict_all(core: CacheCore, key_space_id: int) -> Iterator[tuple[int, int]]:
    """Drops all blocks of a key space (0: of all) that are there at the first step, but for pinned ones; (dropped, kept) of each part."""
    if key_space_id:
        core.key_space(key_space_id)
    everything = core.space.index.ready_blocks(key_space_id)
    for start in range(0, len(everything), BLOCKS):
        entries = _still_ready(core, everything[start : start + BLOCKS], key_space_id)
        dropped = core.space.evict(entries)
        yield dropped, len(entries) - dropped


def _still_ready(core: CacheCore, entries: Entries, key_space_id: int) -> Entries:
    records = core.space.index.table.records
    states, groups = records[entries, table.W_GROUP_STATE] >> np.uint32(16), records[entries, table.W_GROUP_STATE] & np.uint32(0xFFFF)
    mask = (states == table.STATE_READY) & (groups < MAX_GROUPS)
    if key_space_id:
        mask &= records[entries, table.W_KEY_SPACE] == key_space_id
    ready: Entries = entries[mask]
    return ready


def _end(core: CacheCore, leases: Sequence[Lease]) -> int:
    """Ends those leases that have not ended yet; returns how many."""
    live = [lease for lease in leases if not lease.released and core.leases.get(lease.engine_id, lease.lease_id) is lease]
    for lease in live:
        core.end_lease(lease)
    return len(live)
