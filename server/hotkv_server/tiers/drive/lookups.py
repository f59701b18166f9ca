"""Finds out which blocks are in tiers below host memory, for lookups of engines and for operators.
A lookup does not count the blocks of a tier as hits if loading these blocks takes longer than
computing them. The waits for answers of shared tiers are bounded. Runs on the event loop."""

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
"""Most calls (leases and lookups) of a session that wait for tiers at a time. Further calls don't
wait, and get only blocks in host memory."""
EXPLAIN_WAIT_S = 2.0
"""Default of `TierLookups.find` for the longest wait for shared tiers."""


TierSource: TypeAlias = TierBelow | TierShared
"""A tier from which blocks can be read: the disk or a shared tier."""


# ------------------------------------------------------------------------------------------ Lookups


class WaitingCalls:
    """Counts, for each session, the leases and lookups that wait for tiers."""

    def __init__(self) -> None:
        self._waiting: Counter[int] = Counter()

    def __repr__(self) -> str:
        return f"WaitingCalls({len(self)})"

    def __len__(self) -> int:
        return self._waiting.total()

    def has_many(self, session: LiveSession) -> bool:
        """Returns True if MAX_WAITING calls of the session are waiting. Further calls of the
        session must then not wait."""
        return self._waiting[session.record.number] >= MAX_WAITING

    @contextlib.contextmanager
    def counted(self, session: LiveSession) -> Iterator[None]:
        """Context manager that counts a call of the session as waiting while the context is
        open."""
        number = session.record.number
        self._waiting[number] += 1
        try:
            yield
        finally:
            self._waiting[number] -= 1
            if not self._waiting[number]:
                del self._waiting[number]


class TierLookups:
    """Finds out which blocks are in tiers; see the module. In its methods, `groups` has a list of
    block hashes for each KV cache group.

    `sources`: all tiers. If several tiers have a block, the first of them is preferred.
    `shared`: the shared tiers among the sources. This node has no record of their blocks, so it
        must ask these tiers which blocks they have.
    `generations`: knows which generations (numbers that flushes raise) the stores of shared tiers
        have confirmed.
    `waiting`: counts the calls that wait for tiers.
    `tasks`: knows whether the node is closing; then no lookup waits for tiers any more.
    `lookup_wait_s`: longest time that `ask` waits for shared tiers.
    `are_moves_well`: returns False if a move up to host memory is under way from a tier that
        lookups now skip.
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

    def lies_elsewhere(
        self,
        key_space_id: int,
        groups: list[HashList],
        ready: Sequence[BoolMask],
        tokens_per_s: float = 0.0,
    ) -> list[BoolMask]:
        """Returns, for each list of block hashes in `groups`, a mask of the blocks that are not in
        host memory but count as hits for a lookup. These are blocks that a tier is known to have,
        and blocks that are being moved up to host memory. Three kinds of blocks are left out:

        - the blocks of a tier that lookups now skip;
        - the blocks of a tier if loading them takes longer than computing them;
        - all blocks that are being moved up, if one of the moves is from a tier that lookups now
          skip.

        `ready`: for each list in `groups`, a mask of the blocks in host memory.
        `tokens_per_s`: speed at which the engine computes prompts. 0: unknown; loading then counts
            as faster than computing.
        """
        if all(mask.all() for mask in ready):
            return [np.zeros(len(mask), np.bool_) for mask in ready]
        # Count blocks that are being moved up only if no move is from a tier that lookups skip: its
        # moves may never end, so leases don't wait for it.
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
        """Returns, for each tier in `sources`, True if loading its blocks is faster than computing
        them.

        `at_hand`: for each list in `groups`, a mask of the blocks in host memory or being moved
            there.
        `found`: for each tier, and each list in `groups`, a mask of the blocks to load from the
            tier.
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
        """Returns True if a lookup must call `ask` before it is answered. There are two reasons: a
        shared tier may have a block that host memory lacks; or the stores must first confirm the
        key space's generation (a number that each flush raises), so that blocks may be loaded from
        the disk or a shared tier.

        Returns False without a session, if the session's client does not support tiers
        (`Feature.TIERS`), if MAX_WAITING calls of the session are waiting, and while the tiers
        close.
        """
        if self._tasks.is_closing or session is None or not session.knows_tiers:
            return False
        if self._waiting.has_many(session):
            return False
        key_space_id = session.record.key_space_id
        if self._generations.must_ask(key_space_id):
            return any(
                one.breaker.lets_pass and one.has_some(key_space_id, groups)
                for one in self._sources
            )
        return any(
            one.breaker.lets_pass and one.has_some(key_space_id, groups) for one in self._shared
        )

    async def ask(self, session: LiveSession, key_space_id: int, groups: list[HashList]) -> None:
        """Asks the shared tiers which of these blocks they have, so that `lies_elsewhere` can
        include these blocks. Waits for the answers, at most for `lookup_wait_s`."""
        until_s = time.monotonic() + self._lookup_wait_s
        with self._waiting.counted(session):
            await self.look(key_space_id, groups, until_s)

    async def look(self, key_space_id: int, groups: list[HashList], until_s: float) -> None:
        """Calls `look` of all tiers at the same time: asks the shared tiers which of these blocks
        they have, and asks the stores to confirm the key space's generations (numbers that each
        flush raises). Waits for the answers at most until `until_s`, a time of time.monotonic."""
        await asyncio.gather(*(one.look(key_space_id, groups, until_s) for one in self._sources))

    async def find(
        self, key_space_id: int, groups: list[HashList], wait_s: float = EXPLAIN_WAIT_S
    ) -> list[TierHolding]:
        """Returns, for each tier, which of these blocks the tier has, for operators and routers.
        Asks the shared tiers, and waits for their answers at most for `wait_s` seconds."""
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
        """Returns the blocks that must be loaded from tiers for the longest possible hit of a
        lookup: a list for each list in `groups`, without lists of sketches (compact forms of
        keys).

        If host memory has the block before a block to load, the result names that block too,
        because a move links a loaded block to the block before it.

        `ready`: for each list in `groups`, a mask of the blocks in host memory.
        `elsewhere`: for each list in `groups`, a mask of the blocks in tiers.
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
