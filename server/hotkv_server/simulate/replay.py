"""Replaying a trace: each request looks its blocks up, uses those it hits, and stores the rest, all
through the core.

A `Tier` is the core's own space of slots, with every block of one size. Always true: blocks that a
request finds present stay until its own are stored; all clocks are the trace's; a request is done
before the next one begins.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hotkv.table import SLOT_ALIGN, BlockTable, TableGeometry, Words
from hotkv_server.core.policies import Policy
from hotkv_server.core.space import Space
from hotkv_server.core.values import Entries
from hotkv_server.simulate.trace import W_ID, Int64s, Trace

MakePolicy = Callable[[int], Policy]
"""Makes a policy for entry numbers 1 to the given capacity."""
Progress = Callable[[int], None]
"""Is told how many more requests are done."""

KEY_SPACE, GROUP, LEASE = 1, 0, 1
WARM_UP_REQUESTS, WARM_UP_BLOCKS = 64, 16
STEP_REQUESTS = 500
"""Between two reports of progress."""
SECOND_TOUCH = 2


@dataclass(frozen=True, slots=True)
class Replayed:
    """Prefix lengths [R] over all tiers; how many blocks of the prefixes came from the second one,
    and were written to it."""

    prefix: Int64s
    seconds: float
    num_second_tier_hits: int = 0
    num_second_tier_writes: int = 0


class Tier:
    """A space of the core for blocks of one slot each, over a table and an arena of its own."""

    def __init__(self, capacity_blocks: int, make_policy: MakePolicy) -> None:
        arena_bytes = capacity_blocks * SLOT_ALIGN
        geometry = TableGeometry.for_capacity(capacity_blocks, 1, arena_bytes)
        block_table = BlockTable(np.zeros(geometry.file_bytes, np.uint8), geometry)
        self.space = Space(block_table, arena_bytes, arena_bytes, make_policy(capacity_blocks))
        self.space.index.add_key_space(KEY_SPACE, [0])

    def __repr__(self) -> str:
        return f"Tier({self.space!r})"

    def find(self, hashes: Words) -> Entries:
        """Entries [n] of blocks, 0 for those that are not here. No entry is ever left reserved."""
        return self.space.index.find(KEY_SPACE, GROUP, hashes)

    def touch(self, entries: Entries, now_s: float) -> None:
        """Notes a use of entries, in chain order."""
        self.space.touch(entries, now_s)

    def store(self, hashes: Words, entries: Entries, num_held: int, now_s: float) -> int:
        """Uses those of a request's blocks, in chain order, that are present, and stores as many of
        the others as fit; returns how many.

        `entries`: as `find` said; the first `num_held` of them are present.
        """
        space = self.space
        if entries[num_held:].any():
            absent, present = np.flatnonzero(entries == 0), entries[entries != 0]
            fresh_hashes = hashes[absent]
        else:
            absent, present = np.arange(num_held, len(entries)), entries[:num_held]
            fresh_hashes = hashes[num_held:]
        if len(present):
            space.touch(present, now_s)
        if not len(absent):
            return 0
        space.index.pin(present, 1)
        fresh = space.insert(KEY_SPACE, GROUP, fresh_hashes, SLOT_ALIGN, absent, LEASE)
        space.index.pin(present, -1)
        space.publish(fresh, now_s)
        return len(fresh)

    def take_evicted(self) -> Words:
        """Hash words [n, 8] of the blocks that were evicted since the last call, coldest first."""
        notices = self.space.removal.take_effects()
        return (
            np.concatenate([notice.hashes for notice in notices])
            if notices
            else np.empty((0, 8), np.uint32)
        )


class OneTier:
    """A cache of one tier."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    def serve(self, hashes: Words, now_s: float) -> int:
        """Length of the prefix that a request hits; its blocks [n, 8] are used or stored."""
        entries = self.tier.find(hashes)
        prefix = _prefix(entries)
        self.tier.store(hashes, entries, prefix, now_s)
        self.tier.space.removal.take_effects()
        return prefix


class TwoTiers:
    """A second tier below the first: it takes the blocks that the first evicts, and a prefix goes
    on over both.

    `gated`: it takes only blocks that were in at least two requests. A block that is loaded from it
    comes back into the first tier and stays in the second, so that it need not be written again.
    """

    def __init__(self, first: Tier, second: Tier, num_unique_blocks: int, *, gated: bool) -> None:
        self.first = first
        self.second = second
        self.num_hits = 0
        self.num_writes = 0
        self._min_uses = SECOND_TOUCH if gated else 1
        self._uses = np.zeros(num_unique_blocks, np.int64)

    def serve(self, hashes: Words, now_s: float) -> int:
        """Length of the prefix that a request hits in either tier; its blocks [n, 8] are used or
        stored in the first."""
        entries, lower = self.first.find(hashes), self.second.find(hashes)
        prefix = _prefix(np.where(entries == 0, lower, entries))
        loaded = lower[:prefix][entries[:prefix] == 0]
        self.num_hits += len(loaded)
        self.second.touch(loaded, now_s)
        self._uses[hashes[:, W_ID]] += 1
        self.first.store(hashes, entries, _prefix(entries), now_s)
        self._demote(self.first.take_evicted(), now_s)
        return prefix

    def _demote(self, evicted: Words, now_s: float) -> None:
        """Writes evicted blocks to the second tier that it shall take and has not; the hottest,
        evicted last, comes first, as heads of chains do."""
        wanted = evicted[self._uses[evicted[:, W_ID]] >= self._min_uses][::-1]
        absent = np.ascontiguousarray(wanted[self.second.find(np.ascontiguousarray(wanted)) == 0])
        self.num_writes += self.second.store(absent, np.zeros(len(absent), np.uint32), 0, now_s)
        self.second.take_evicted()


def _prefix(entries: Entries) -> int:
    """Entries before the first 0."""
    at = int(np.argmin(entries))
    return at if entries[at] == 0 else len(entries)


def replay(
    trace: Trace, capacity_blocks: int, make_policy: MakePolicy, progress: Progress | None = None
) -> Replayed:
    """Replays a trace over one tier."""
    _warm_up(trace, make_policy)
    prefix, seconds = _timed(trace, OneTier(Tier(capacity_blocks, make_policy)).serve, progress)
    return Replayed(prefix, seconds)


def replay_two_tiers(
    trace: Trace,
    capacity_blocks: int,
    second_blocks: int,
    make_policy: MakePolicy,
    *,
    gated: bool,
    progress: Progress | None = None,
) -> Replayed:
    """Replays a trace over two tiers, each with a policy of its own."""
    _warm_up(trace, make_policy)
    tiers = TwoTiers(
        Tier(capacity_blocks, make_policy),
        Tier(second_blocks, make_policy),
        trace.num_unique_blocks,
        gated=gated,
    )
    prefix, seconds = _timed(trace, tiers.serve, progress)
    return Replayed(prefix, seconds, tiers.num_hits, tiers.num_writes)


def _timed(
    trace: Trace, serve: Callable[[Words, float], int], progress: Progress | None
) -> tuple[Int64s, float]:
    """Prefix lengths [R] and the seconds it took."""
    prefix = np.zeros(trace.num_requests, np.int64)
    starts, times_s = trace.starts.tolist(), trace.times_s.tolist()
    started_s = time.perf_counter()
    for request, now_s in enumerate(times_s):
        prefix[request] = serve(trace.hashes[starts[request] : starts[request + 1]], now_s)
        if progress is not None and request % STEP_REQUESTS == STEP_REQUESTS - 1:
            progress(STEP_REQUESTS)
    seconds = time.perf_counter() - started_s
    if progress is not None:
        progress(trace.num_requests % STEP_REQUESTS)
    return prefix, seconds


def _warm_up(trace: Trace, make_policy: MakePolicy) -> None:
    """Serves a few requests with a cache that is thrown away, so that no timing includes
    compilation."""
    cache = OneTier(Tier(WARM_UP_BLOCKS, make_policy))
    starts = trace.starts[: WARM_UP_REQUESTS + 1].tolist()
    for start, end in pairwise(starts):
        cache.serve(trace.hashes[start:end], 0.0)
