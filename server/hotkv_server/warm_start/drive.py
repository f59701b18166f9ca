"""Copies the most useful blocks of a node to another node. One node lists the hashes of its hottest
blocks; the other node promotes these blocks from its tiers, usually from a tier that both nodes
share. On the event loop only."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np

from hotkv_proto.table import Words
from hotkv_server.cache.arrays import first_occurrences
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import BoolMask, HashList
from hotkv_server.node.capability import BlocksBelow
from hotkv_server.node.event_loop import slices
from hotkv_server.warm_start import book as hottest

PART_BLOCKS = 2_000
"""Most blocks in a part of the answer of `export`."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The outcome of a `prefetch`: how many of the named blocks had each result.

    num_present: blocks that were already in host memory.
    num_fetched: blocks that were promoted to host memory.
    num_lower: blocks that are still only in a tier.
    num_absent: blocks that were not found.
    """

    num_present: int
    num_fetched: int
    num_lower: int
    num_absent: int


class WarmStart:
    """Lists the most useful blocks of this node for another node, and fetches blocks that another
    node has listed.

    below: the tiers below host memory; None without tiers.
    """

    def __init__(self, core: CacheCore, below: BlocksBelow | None) -> None:
        self._core = core
        self._below = below

    def __repr__(self) -> str:
        return f"WarmStart({self._core!r})"

    async def export(self, key_space_id: int, byte_count: int) -> AsyncIterator[list[HashList]]:
        """Yields the hashes of the hottest blocks (the blocks that would be evicted last) in parts.
        The blocks of all parts together take at most `byte_count` bytes; 0: all blocks. Raises
        UNKNOWN_KEY_SPACE."""
        self._core.key_space(key_space_id)
        parts: list[hottest.Warmth] = []
        async for some, _ in slices(hottest.warmth(self._core, key_space_id)):
            parts += some
        chosen = await asyncio.to_thread(lambda: hottest.joined(parts).hottest(byte_count))
        for start in range(0, len(chosen.entries), PART_BLOCKS):
            yield hottest.names(self._core, chosen.at(slice(start, start + PART_BLOCKS)))

    async def prefetch(self, key_space_id: int, groups: list[HashList], wait_s: float) -> Fetched:
        """Promotes the named blocks from tiers to host memory, as far as there is room and time. A
        block that is named twice counts once. Returns the number of blocks by outcome. Raises
        HotKVError if the server drains (takes no new work), or if the key space (a model in a
        configuration) is unknown.

        groups: the blocks, by group.
        wait_s: longest time to wait for the promotions.
        """
        self._core.sessions.check_takes_new("fetches nothing")
        groups = _joined(groups)
        num_blocks = sum(len(one.hashes) for one in groups)
        num_present = _count(self._core.lookup(key_space_id, groups))
        if self._below is None or num_present == num_blocks:
            return Fetched(num_present, 0, 0, num_blocks - num_present)
        await self._below.prefetch(key_space_id, groups, time.monotonic() + wait_s)
        self._core.key_space(key_space_id)
        if _count(self._core.lookup(key_space_id, groups)) < num_blocks:
            # Ask the shared tiers again, because the prefetch may have had no time to ask for all
            # blocks.
            await self._below.lookups.find(key_space_id, groups)
            self._core.key_space(key_space_id)
        masks = self._core.lookup(key_space_id, groups)
        num_ready = _count(masks)
        lower = self._below.lookups.lies_elsewhere(key_space_id, groups, masks)
        num_lower = _count([lies & ~mask for lies, mask in zip(lower, masks, strict=True)])
        return Fetched(
            min(num_present, num_ready),
            max(0, num_ready - num_present),
            num_lower,
            num_blocks - num_ready - num_lower,
        )


def unrelated(group_index: int, hashes: Words) -> HashList:
    """Returns a `HashList` of blocks that may belong to different prompts, in the order in which
    they are wanted. Their depths (numbers of blocks before each block in its prompt) rise by 2, so
    that no block counts as the predecessor of another block."""
    return HashList(group_index, hashes, 2 * np.arange(len(hashes)))


def _joined(lists: list[HashList]) -> list[HashList]:
    """Joins lists of blocks to one list per group. If a hash occurs several times, only its first
    occurrence is kept. In a list without depths (numbers of blocks before each block in its
    prompt), the depth of a hash is its position."""
    of_group: dict[int, list[HashList]] = {}
    for one in lists:
        of_group.setdefault(one.group_index, []).append(one)
    joined = []
    for group_index, parts in of_group.items():
        hashes = np.concatenate([part.hashes for part in parts])
        depths = np.concatenate(
            [np.arange(len(p.hashes)) if p.depths is None else p.depths for p in parts]
        )
        first = first_occurrences(hashes)
        joined.append(HashList(group_index, hashes[first], depths[first]))
    return joined


def _count(masks: list[BoolMask]) -> int:
    return sum(int(np.count_nonzero(mask)) for mask in masks)
