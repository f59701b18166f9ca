"""What the core tells about itself: frozen answers for operators and metrics.

Always true: a question changes nothing; an answer is a copy and stays as it is while the core goes
on. A question that looks at all entries is answered in parts. Outside the runtime, whoever wants to
know something of the core asks here rather than reach into its books.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import table
from hotkv_proto.keys import KeySpace, Representation
from hotkv_proto.table import Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.histogram import Histogram
from hotkv_server.cache.room.slabs import PoolFigures, SlabClassStats
from hotkv_server.cache.table.census import PART_ENTRIES, Census, take
from hotkv_server.cache.table.index import BlockIndex
from hotkv_server.cache.values import KEY_SPACE_ROWS, BoolMask, HashList

STATES = {
    table.STATE_RESERVED: "reserved",
    table.STATE_READY: "ready",
    table.STATE_DETACHED: "flushed",
}
"""Words for the states of an entry that is not free."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the core can take. `max_entries`: blocks and representations together."""

    max_entries: int
    max_blocks_per_call: int


@dataclass(frozen=True, slots=True)
class Counts:
    """What is live. `held_bytes`: slots that requests asked to keep, of `held_budget_bytes` at
    most."""

    num_sessions: int
    num_leases: int
    num_transfers: int
    held_bytes: int
    held_budget_bytes: int


@dataclass(frozen=True, slots=True)
class RoomFigures:
    """One tier, in bytes, blocks and slabs.

    `capacity_bytes`: as far as the arena has memory; `full_capacity_bytes`: once all of it has.
    `pinned_bytes`, `representation_bytes`, `num_blocks`, `num_unverified`: of a census.
    """

    capacity_bytes: int
    full_capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    representation_bytes: int
    num_blocks: int
    num_unverified: int
    num_free_slabs: int
    slab_bytes: int
    slab_classes: tuple[SlabClassStats, ...]
    pool: PoolFigures


@dataclass(frozen=True, slots=True)
class KeySpaceFigures:
    """A key space, the kinds of representations declared for it, and how many of both are ready."""

    number: int
    key_space: KeySpace
    representations: tuple[Representation, ...]
    num_blocks: int
    num_representations: int


@dataclass(frozen=True, slots=True)
class BlockFigures:
    """A block as it stands.

    `hash_words`: uint32 [8]. `state`: as in `hotkv_proto.table`. `last_used_s`: in seconds of the
    core's `now_s`, 0 if never. `representation_bytes`: slot of its representation, 0 for none.
    `parent_words`: the hash before it in its chain, None if that block is not there any more.
    """

    hash_words: Words
    key_space_id: int
    group_index: int
    state: int
    slot_bytes: int
    depth: int
    num_pins: int
    last_used_s: float
    representation_bytes: int
    parent_words: Words | None


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The blocks of a prompt in one group: hash words [n, 8], entry words [n] as in `BlockTable`,
    whether each is among the last removed [n], and whether it lies in a tier below [n]."""

    hashes: Words
    words: NDArray[np.uint32]
    evicted: BoolMask
    below: BoolMask


def limits(core: CacheCore) -> Limits:
    """What the core can take."""
    return Limits(core.config.capacity, core.config.max_blocks_per_call)


def counts(core: CacheCore) -> Counts:
    """What is live."""
    return Counts(
        len(core.sessions),
        len(core.leases),
        len(core.transfers),
        core.retention_pins.held_bytes,
        core.retention_pins.budget_bytes,
    )


def counters(core: CacheCore) -> dict[str, int]:
    """What has happened since the start, by the names of `Counters`."""
    return asdict(core.counters)


def policy_figures(core: CacheCore) -> dict[str, float]:
    """What the eviction policy has adapted itself to, by names for metrics."""
    return core.space.policy.figures()


def eviction_ages(core: CacheCore) -> Histogram:
    """Seconds between the last use of a block of the arena and its eviction."""
    return core.space.removal.ages_s


def census_parts(core: CacheCore) -> int:
    """How many parts a census has now."""
    return -(-core.space.index.num_numbers // PART_ENTRIES)


def census(core: CacheCore) -> Iterator[Census]:
    """Counts all entries: the census as far as it has come, after each part."""
    return take(core.space)


def tier(core: CacheCore, counted: Census) -> RoomFigures:
    """The host tier."""
    pool = core.space.pool
    return RoomFigures(
        pool.capacity_bytes,
        pool.num_slabs * pool.slab_bytes,
        core.space.used_bytes(),
        counted.pinned_bytes,
        counted.representation_bytes,
        counted.num_blocks,
        counted.num_unverified,
        pool.num_free_slabs,
        pool.slab_bytes,
        tuple(pool.stats()),
        pool.figures(),
    )


def lower_tier(core: CacheCore) -> RoomFigures | None:
    """The tier below, nothing of which is pinned or not verified; None without one."""
    space = next((one.space for one in core.below if one.space is not None), None)
    if space is None:
        return None
    pool, num_blocks = space.pool, space.index.num_entries
    return RoomFigures(
        pool.capacity_bytes,
        pool.capacity_bytes,
        space.used_bytes(),
        0,
        0,
        num_blocks,
        0,
        pool.num_free_slabs,
        pool.slab_bytes,
        tuple(pool.stats()),
        pool.figures(),
    )


def key_spaces(core: CacheCore, counted: Census, most: int = 0) -> list[KeySpaceFigures]:
    """The known key spaces, by number: those with most blocks, `most` of them at most, or all."""
    records = core.key_spaces
    numbers = np.fromiter(records, np.int64, len(records))
    if most:
        by_blocks = np.argsort(-counted.blocks[numbers % KEY_SPACE_ROWS], kind="stable")
        numbers = numbers[by_blocks[:most]]
    return [
        KeySpaceFigures(
            number,
            records[number].key_space,
            records[number].representations,
            int(counted.blocks[number % KEY_SPACE_ROWS]),
            int(counted.representations[number % KEY_SPACE_ROWS]),
        )
        for number in sorted(numbers.tolist())
    ]


def leases_of_engines(core: CacheCore) -> dict[str, int]:
    """How many leases each engine has; engines without one left out."""
    held: dict[str, int] = {}
    for lease in core.leases.all():
        held[lease.engine_id] = held.get(lease.engine_id, 0) + 1
    return held


def find_blocks(core: CacheCore, start: int, most: int, key_space_id: int) -> Iterator[list[int]]:
    """Entries of blocks in the order of their numbers, from `start` on: those found so far, after
    each part. The last answer has `most`, or all there are.

    `key_space_id`: 0 for all.
    """
    index, found = core.space.index, np.empty(0, np.uint32)
    while start < index.num_numbers and len(found) < most:
        states = index.states(start, start + PART_ENTRIES)
        wanted = states != 0
        if key_space_id:
            records = index.table.records[start : start + len(states)]
            wanted &= records[:, table.W_KEY_SPACE] == key_space_id
        entries = start + np.flatnonzero(wanted).astype(np.uint32)
        blocks = entries[~core.space.representations.among(entries)]
        found = np.concatenate((found, blocks))[:most]
        start += PART_ENTRIES
        yield found.tolist()


def blocks(core: CacheCore, entries: Sequence[int]) -> list[BlockFigures]:
    """Those of the blocks that are still there."""
    there = np.array(entries, np.uint32)
    there = there[core.space.index.table.records[there, table.W_GROUP_STATE] >> 16 != 0]
    used_s = core.space.policy.last_used_s(there)
    return [
        _block(core, int(entry), float(used)) for entry, used in zip(there, used_s, strict=True)
    ]


def _block(core: CacheCore, entry: int, last_used_s: float) -> BlockFigures:
    index = core.space.index
    record = index.table.records[entry].copy()
    number, group = int(record[table.W_KEY_SPACE]), int(record[table.W_GROUP_STATE] & 0xFFFF)
    parent = index.table.records[int(record[table.W_PARENT])].copy()
    # The parent's number may have another entry by now.
    follows = (
        record[table.W_PARENT]
        and parent[table.W_GROUP_STATE] >> 16
        and parent[table.W_DEPTH] + 1 == record[table.W_DEPTH]
    )
    linked = record[table.W_REPRESENTATION]
    return BlockFigures(
        record[:8],
        number,
        group,
        int(record[table.W_GROUP_STATE] >> 16),
        core.key_space(number).groups[group].slot_bytes,
        int(record[table.W_DEPTH]),
        int(index.pins[entry]),
        last_used_s,
        int(index.slot_bytes(linked)) if linked else 0,
        parent[:8] if follows else None,
    )


def prompt_blocks(
    core: CacheCore, key_space_id: int, group_index: int, hashes: Words
) -> PromptBlocks:
    """What the cache knows of the blocks of a prompt in one group."""
    below = np.zeros(len(hashes), np.bool_)
    for one in core.below:
        below |= one.find(key_space_id, HashList(group_index, hashes))
    return PromptBlocks(
        hashes,
        core.space.index.find(key_space_id, group_index, hashes),
        core.space.removal.was_evicted(key_space_id, group_index, hashes),
        below,
    )


def story(index: BlockIndex, entry: int) -> str:
    """One line about an entry of the index as it stands, also if it is free or none at all."""
    if not 0 < entry <= index.capacity:
        return f"entry={entry} is none of the {index.capacity}"
    record = index.table.records[entry]
    state = int(record[table.W_GROUP_STATE]) >> 16
    return (
        f"entry={entry} state={STATES.get(state, 'free')} key_space={record[table.W_KEY_SPACE]} "
        f"group={int(record[table.W_GROUP_STATE]) & 0xFFFF} "
        f"hash={record[:8].tobytes().hex()[:16]} depth={record[table.W_DEPTH]} "
        f"slot={record[table.W_OFFSET]} size={record[table.W_SIZE]} "
        f"generation={record[table.W_GENERATION]} pins={index.pins[entry]} "
        f"parent={record[table.W_PARENT]} representation={record[table.W_REPRESENTATION]} "
        f"unverified={bool(index.unverified[entry])}"
    )
