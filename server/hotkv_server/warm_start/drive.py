"""One node lists the hashes of its hottest blocks; another promotes them from its tiers, usually
from a shared store. On the event loop only."""

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
"""Of the answer of `export`."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The outcome of a `prefetch`, in blocks.

    num_present: already in host memory.
    num_fetched: promoted.
    num_lower: still only in a tier.
    """

    num_present: int
    num_fetched: int
    num_lower: int
    num_absent: int


class WarmStart:
    """`below`: None without tiers."""

    def __init__(self, core: CacheCore, below: BlocksBelow | None) -> None:
        self._core = core
        self._below = below

    def __repr__(self) -> str:
        return f"WarmStart({self._core!r})"

    async def export(self, key_space_id: int, byte_count: int) -> AsyncIterator[list[HashList]]:
        """Hashes of the hottest blocks, in parts, of at most `byte_count` bytes together; 0:
        all. Raises UNKNOWN_KEY_SPACE."""
        self._core.key_space(key_space_id)
        parts: list[hottest.Warmth] = []
        async for some, _ in slices(hottest.warmth(self._core, key_space_id)):
            parts += some
        chosen = await asyncio.to_thread(lambda: hottest.joined(parts).hottest(byte_count))
        for start in range(0, len(chosen.entries), PART_BLOCKS):
            yield hottest.names(self._core, chosen.at(slice(start, start + PART_BLOCKS)))

    async def prefetch(self, key_space_id: int, groups: list[HashList], wait_s: float) -> Fetched:
        """Promotes blocks, each counted once, as far as there is room, for at most `wait_s`.
        Raises DRAINING and UNKNOWN_KEY_SPACE."""
        self._core.sessions.check_takes_new("fetches nothing")
        groups = _joined(groups)
        num_blocks = sum(len(one.hashes) for one in groups)
        num_present = _count(self._core.lookup(key_space_id, groups))
        if self._below is None or num_present == num_blocks:
            return Fetched(num_present, 0, 0, num_blocks - num_present)
        await self._below.prefetch(key_space_id, groups, time.monotonic() + wait_s)
        self._core.key_space(key_space_id)
        if _count(self._core.lookup(key_space_id, groups)) < num_blocks:
            # Ask again: the prefetch may have had no time to ask for all blocks.
            await self._below.lookups.find(key_space_id, groups)
            self._core.key_space(key_space_id)
        masks = self._core.lookup(key_space_id, groups)
        num_ready = _count(masks)
        lower = self._below.lookups.in_lower_tiers(key_space_id, groups, masks)
        num_lower = _count([lies & ~mask for lies, mask in zip(lower, masks, strict=True)])
        return Fetched(
            min(num_present, num_ready),
            max(0, num_ready - num_present),
            num_lower,
            num_blocks - num_ready - num_lower,
        )


def unrelated(group_index: int, hashes: Words) -> HashList:
    """Blocks of perhaps different prompts, in the order in which they are wanted. Their depths
    rise by 2, so that none counts as another's parent."""
    return HashList(group_index, hashes, 2 * np.arange(len(hashes)))


def _joined(lists: list[HashList]) -> list[HashList]:
    """One list per group, with the first occurrence of each hash. A hash without depth has its
    position."""
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
