"""Finds out which blocks are in tiers, for engines' lookups and for operators. A lookup does not
count a tier's blocks as hits if loading takes longer than computing. Waits for shared tiers are
bounded."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from hotkv_server.cache.arrays import rows
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import BoolMask, HashList
from hotkv_server.node.capability import TierHolding
from hotkv_server.node.live_session import LiveSession
from hotkv_server.tiers.book.books import books_of
from hotkv_server.tiers.drive.below import TierBelow
from hotkv_server.tiers.drive.flushes import FlushDriver
from hotkv_server.tiers.drive.reads import Listed, both, count, either, needed, worth
from hotkv_server.tiers.drive.shared import TierShared
from hotkv_server.tiers.drive.tasks import TierTasks

MAX_WAITING = 256
"""Most calls of a session that wait for tiers. Further calls get only blocks in host memory."""
EXPLAIN_WAIT_S = 2.0


TierSource: TypeAlias = TierBelow | TierShared


# ------------------------------------------------------------------------------------------ Lookups


class WaitingCalls:
    def __init__(self) -> None:
        self._waiting: Counter[int] = Counter()

    def __repr__(self) -> str:
        return f"WaitingCalls({len(self)})"

    def __len__(self) -> int:
        return self._waiting.total()

    def has_many(self, session: LiveSession) -> bool:
        """Further calls of the session must not wait."""
        return self._waiting[session.record.number] >= MAX_WAITING

    @contextlib.contextmanager
    def counted(self, session: LiveSession) -> Iterator[None]:
        number = session.record.number
        self._waiting[number] += 1
        try:
            yield
        finally:
            self._waiting[number] -= 1
            if not self._waiting[number]:
                del self._waiting[number]


class TierLookups:
    """See the module.

    `sources`: all tiers; the first that has a block is preferred.
    `shared`: those among them that must be asked.
    `are_moves_well`: no move up is from a tier that lookups skip.
    """

    def __init__(
        self,
        core: CacheCore,
        sources: Sequence[TierSource],
        shared: Sequence[TierShared],
        generations: FlushDriver,
        waiting: WaitingCalls,
        tasks: TierTasks,
        lookup_wait_s: float,
        are_moves_well: Callable[[], bool],
    ) -> None:
        self._core = core
        self._books = books_of(core)
        self._sources = sources
        self._shared = shared
        self._generations = generations
        self._waiting = waiting
        self._tasks = tasks
        self._lookup_wait_s = lookup_wait_s
        self._are_moves_well = are_moves_well

    def __repr__(self) -> str:
        return f"TierLookups({self._sources!r})"

    def in_lower_tiers(
        self,
        key_space_id: int,
        groups: list[HashList],
        ready: Sequence[BoolMask],
        tokens_per_s: float = 0.0,
    ) -> list[BoolMask]:
        """For each list, the blocks that count as hits though not in host memory: in a tier, or
        moving up. Left out: blocks of a skipped tier or one slower than computing, and all that
        move up if a move is from a skipped tier.

        `ready`: for each list, the blocks in host memory.
        `tokens_per_s`: speed of the engine's prompt processing; 0: unknown, so loading counts as
            faster.
        """
        if all(mask.all() for mask in ready):
            return [np.zeros(len(mask), np.bool_) for mask in ready]
        # A skipped tier's moves may never end, so leases don't wait for it.
        is_well = any(move.is_up for move in self._books.moves) and self._are_moves_well()
        masks = [
            self._books.arrivals.is_coming(key_space_id, one.group_index, one.hashes)
            if is_well
            else np.zeros(len(one.hashes), np.bool_)
            for one in groups
        ]
        absent = self._books.arrivals.absent(key_space_id, groups)
        lacking = [np.zeros(len(one.hashes), np.bool_) for one in groups]
        for lack, positions in zip(lacking, absent, strict=True):
            lack[positions] = True
        sources = [one for one in self._sources if one.breaker.lets_pass]
        found = []
        for source in sources:
            here = both(source.lies_here(key_space_id, groups), lacking)
            source.reads.add_lookup(count(lacking), count(here))
            lacking = [lack & ~lies for lack, lies in zip(lacking, here, strict=True)]
            found.append(here)
        at_hand = either(ready, masks)
        taken = self._worth(key_space_id, groups, at_hand, sources, found, tokens_per_s)
        for source, here, is_taken in zip(sources, found, taken, strict=True):
            if is_taken:
                masks = either(masks, here)
            else:
                source.reads.left_blocks += count(here)
        return masks

    def _worth(
        self,
        key_space_id: int,
        groups: list[HashList],
        at_hand: list[BoolMask],
        sources: list[TierSource],
        found: list[list[BoolMask]],
        tokens_per_s: float,
    ) -> list[bool]:
        """For each tier, whether loading its blocks is faster than computing.

        `at_hand`: for each list, the blocks in host memory or moving there.
        `found`: for each tier and list, the blocks to load.
        """
        if not tokens_per_s or not any(map(count, found)):
            return [True] * len(sources)
        specs = self._core.key_space(key_space_id).groups
        meant = [at for at, one in enumerate(groups) if one.group_index < len(specs)]
        lists = [Listed(specs[groups[at].group_index], at_hand[at]) for at in meant]
        now_s = time.monotonic()
        offers = [
            one.reads.offer([here[at] for at in meant], now_s)
            for one, here in zip(sources, found, strict=True)
        ]
        return worth(lists, offers, tokens_per_s)

    def must_ask(self, session: LiveSession | None, groups: list[HashList]) -> bool:
        """Whether a lookup must `ask` before it is answered: a shared tier may have a block, or
        stores must first confirm. False for a client without support of tiers, or with
        MAX_WAITING calls."""
        if self._tasks.is_closing or session is None or not session.knows_tiers:
            return False
        if self._waiting.has_many(session):
            return False
        key_space_id = session.record.key_space_id
        if self._generations.must_ask(key_space_id):
            return any(
                one.breaker.lets_pass and one.must_promote(key_space_id, groups)
                for one in self._sources
            )
        return any(
            one.breaker.lets_pass and one.must_promote(key_space_id, groups) for one in self._shared
        )

    async def ask(self, session: LiveSession, key_space_id: int, groups: list[HashList]) -> None:
        """Asks the shared tiers, for at most `lookup_wait_s`, so that `in_lower_tiers` knows
        their blocks."""
        until_s = time.monotonic() + self._lookup_wait_s
        with self._waiting.counted(session):
            await self.look(key_space_id, groups, until_s)

    async def look(self, key_space_id: int, groups: list[HashList], until_s: float) -> None:
        """Calls `look` of all tiers at once."""
        await asyncio.gather(*(one.look(key_space_id, groups, until_s) for one in self._sources))

    async def find(
        self, key_space_id: int, groups: list[HashList], wait_s: float = EXPLAIN_WAIT_S
    ) -> list[TierHolding]:
        """Which blocks each tier has, for operators and routers."""
        until_s = time.monotonic() + wait_s
        await self.look(key_space_id, groups, until_s)
        return [
            TierHolding(
                one.name,
                one.lies_here(key_space_id, groups),
                one.breaker.lets_pass,
                one.reads.bytes_per_s(),
            )
            for one in self._sources
        ]

    def hit(
        self,
        key_space_id: int,
        groups: list[HashList],
        ready: Sequence[BoolMask],
        elsewhere: Sequence[BoolMask],
    ) -> list[HashList]:
        """The blocks to load for the longest possible hit: one list per group, without sketches. A
        parent in host memory is listed too, as a move links a block to it.

        `ready`, `elsewhere`: for each list, the blocks in host memory and in tiers.
        """
        specs = self._core.key_space(key_space_id).groups
        meant = [at for at, one in enumerate(groups) if one.group_index < len(specs)]
        lists = [Listed(specs[groups[at].group_index], ready[at]) for at in meant]
        wanted = needed(lists, [ready[at] | elsewhere[at] for at in meant])
        hit = []
        for at, mask in zip(meant, wanted, strict=True):
            loaded = mask & elsewhere[at]
            loaded[:-1] |= ready[at][:-1] & loaded[1:]
            positions, one = np.flatnonzero(loaded), groups[at]
            hit.append(HashList(one.group_index, rows(one.hashes, positions), positions))
        return hit
