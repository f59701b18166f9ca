"""Long work of the core in parts: each generator does one part a step, and between two steps
anything else may be called.

Always true: a part takes milliseconds, however large the cache is. Entries and leases that have
changed since the first step are left alone, unless the generator says otherwise.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from hotkv_proto import table
from hotkv_proto.blocks import Retention
from hotkv_proto.keys import MAX_GROUPS
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.leases.leases import Lease, WriteLease, num_listed
from hotkv_server.cache.sessions import check_named
from hotkv_server.cache.values import Entries, HashList

LEASED_BLOCKS = 1 << 16
"""Blocks that the leases of one part list, unless a single one lists more."""
LEASE_BLOCKS = 1 << 10
"""Blocks that a lease counts as, besides those that it lists."""
BLOCKS = 1 << 12
SCANNED_ENTRIES = 1 << 17


def expire(core: CacheCore, now_s: float) -> Iterator[None]:
    """Ends leases and holds whose time is up, and the grace of an earlier server's readers; leases
    with copies in flight end with the copies."""
    core.space.removal.now_s = now_s
    yield from core.retention_pins.expire(now_s)
    yield from core.grace.expire(now_s, core.is_read)
    for part in _portions([lease for lease in core.leases.expired(now_s) if not lease.released]):
        core.counters.expired_leases += _end(core, part)
        yield


def end_leases(core: CacheCore, session_number: int) -> Iterator[None]:
    """Ends the leases of a session that is about to be closed and takes no new ones."""
    for part in _portions(core.leases.of_session(session_number)):
        _end(core, part)
        yield


def end_pins(core: CacheCore, session_number: int) -> Iterator[None]:
    """Ends what is pinned for a session that is about to be closed and begins nothing any more."""
    for pinner in core.pinners:
        yield from pinner.end(core.sessions.record(session_number))


def evict(
    core: CacheCore, key_space_id: int, group_index: int, hashes: table.Words
) -> Iterator[tuple[int, int]]:
    """Evicts those of the named blocks that are not pinned; yields (dropped, kept) of each part."""
    index = core.space.index
    named = _named(core, key_space_id, group_index, hashes)
    generations = index.table.records[named, table.W_GENERATION]
    for start in range(0, len(named), BLOCKS):
        entries = named[start : start + BLOCKS]
        same = (
            index.table.records[entries, table.W_GENERATION] == generations[start : start + BLOCKS]
        )
        entries = entries[
            same & (index.table.records[entries, table.W_GROUP_STATE] >> np.uint32(16) != 0)
        ]
        dropped = core.space.removal.evict(entries)
        yield dropped, len(entries) - dropped


def evict_all(core: CacheCore, key_space_id: int) -> Iterator[tuple[int, int]]:
    """Evicts all blocks of a key space (0: of all) that are there at the first step and not pinned;
    yields (dropped, kept) of each part.

    A block that is stored meanwhile may be evicted too.
    """
    if key_space_id:
        core.key_space(key_space_id)
    for entries in _ready_blocks(core, key_space_id):
        dropped = core.space.removal.evict(entries)
        yield dropped, len(entries) - dropped


def flush(core: CacheCore, key_space_id: int) -> Iterator[int]:
    """Forgets all blocks of a key space that are there at the first step; yields how many of them
    were ready, part by part.

    After the last step none of them is found again. A block that is reserved at the first step
    never becomes ready, unless it does so before its lease is aborted: then it is forgotten with
    the others. A block that is stored meanwhile may be forgotten too.
    """
    core.key_space(key_space_id)
    writing = [
        lease
        for lease in core.leases.all()
        if isinstance(lease, WriteLease) and lease.key_space_id == key_space_id
    ]
    # All leases before the first block: a block that becomes ready before its lease is aborted is
    # found below.
    for part in _portions(writing):
        for lease in part:
            if (
                isinstance(lease, WriteLease)
                and core.leases.get(lease.engine_id, lease.lease_id) is lease
            ):
                core.abort(lease)
        yield 0
    with ExitStack() as while_flushed:
        for one in core.below:
            while_flushed.enter_context(one.stopped(key_space_id))
            for _ in one.flush(key_space_id, SCANNED_ENTRIES):
                yield 0
        for entries in _ready_blocks(core, key_space_id):
            core.flush(entries)
            yield len(entries)


def use(
    core: CacheCore, session_number: int, hash_list: HashList, now_s: float, retention: Retention
) -> Iterator[None]:
    """As `CacheCore.touch` of one list, with the blocks to keep pinned in parts of their own."""
    core.touch(session_number, [hash_list], now_s, replace(retention, pin=False))
    for start in range(0, len(hash_list.hashes) if retention.pin else 0, BLOCKS):
        yield
        part = HashList(hash_list.group_index, hash_list.hashes[start : start + BLOCKS])
        if session_number in core.sessions:
            core.hold(session_number, part, now_s + retention.ttl_s)


def _named(core: CacheCore, key_space_id: int, group_index: int, hashes: table.Words) -> Entries:
    """Entries of blocks by their hashes, ready or reserved, each once."""
    record, most = core.catalog.record(key_space_id), core.config.max_blocks_per_call
    check_named(record, [group_index], len(hashes), most, only_blocks=True)
    words = core.space.index.find(key_space_id, group_index, hashes)
    return np.unique(words[words != 0] & ~table.RESERVED_FLAG)


def _ready_blocks(core: CacheCore, key_space_id: int) -> Iterator[Entries]:
    """Blocks of a key space (0: of all) that are ready when they are yielded: all that are there at
    the first step, and some that are stored later."""
    for start in range(0, core.space.index.num_numbers, SCANNED_ENTRIES):
        found = core.space.index.ready_blocks(key_space_id, start, start + SCANNED_ENTRIES)
        for at in range(0, max(1, len(found)), BLOCKS):
            yield (
                _still_ready(core, found[at : at + BLOCKS], key_space_id) if at else found[:BLOCKS]
            )


def _still_ready(core: CacheCore, entries: Entries, key_space_id: int) -> Entries:
    records = core.space.index.table.records
    states, groups = (
        records[entries, table.W_GROUP_STATE] >> np.uint32(16),
        records[entries, table.W_GROUP_STATE] & np.uint32(0xFFFF),
    )
    mask = (states == table.STATE_READY) & (groups < MAX_GROUPS)
    if key_space_id:
        mask &= records[entries, table.W_KEY_SPACE] == key_space_id
    ready: Entries = entries[mask]
    return ready


def _portions(leases: Sequence[Lease]) -> Iterator[Sequence[Lease]]:
    """Splits leases into parts of about the same work."""
    first, weight = 0, 0
    for at, lease in enumerate(leases):
        weight += LEASE_BLOCKS + num_listed(lease)
        if weight >= LEASED_BLOCKS or at == len(leases) - 1:
            yield leases[first : at + 1]
            first, weight = at + 1, 0


def _end(core: CacheCore, leases: Sequence[Lease]) -> int:
    """Ends those leases that have not ended yet; returns how many."""
    live = [
        lease
        for lease in leases
        if not lease.released and core.leases.get(lease.engine_id, lease.lease_id) is lease
    ]
    for lease in live:
        core.end_lease(lease)
    return len(live)
