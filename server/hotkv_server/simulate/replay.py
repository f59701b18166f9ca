"""Replays a trace: each request looks up its blocks, uses those that hit, and stores the others.

Always true: blocks that a request finds are not evicted before its missing ones are stored. The
clock shows the trace's times. A request ends before the next begins. All blocks have one size.
"""

import contextlib
import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.table import SLOT_ALIGN, BlockTable, TableGeometry, Words
from hotkv_server.cache.room.policies.protocol import Policy
from hotkv_server.cache.room.removal import finished
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import Entries
from hotkv_server.simulate.trace import Int64s, Trace

# --------------------------------------------------------------------------------- Hints of a trace
# Hints that the trace's sessions could have given: which request was a session's last, and after
# which it paused for long. A session goes on with the first later request that has all of its
# blocks but perhaps the last, which may be partial. Ends and pauses are taken from later
# requests, as an agent knows its plans; whether blocks are shared, only from earlier ones.

SHARED = -1
LONG_PAUSE_S = 30.0
"""From this pause on, a hint demotes the session's blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplayHints:
    """For each of R requests.

    pauses_s: until the session's next request [R]; infinite for its last.
    own_from: in the request, first block behind the last shared one so far [R].
    sessions: index of the session's first request [R].
    """

    def cold_from(self, request: int) -> int | None:
        """First block to demote: the first that only the session uses, if it ends or pauses for
        long."""
        is_long = self.pauses_s[request] >= LONG_PAUSE_S
        return int(self.own_from[request]) if is_long else None

    pauses_s: NDArray[np.float64]
    own_from: Int64s
    sessions: Int64s


def derive_hints(trace: Trace) -> ReplayHints:
    """Takes time linear in the number of accesses."""
    starts, blocks = trace.starts.tolist(), trace.blocks.tolist()
    num_requests = trace.num_requests
    pauses_s = np.full(num_requests, np.inf)
    own_from = np.zeros(num_requests, np.int64)
    # `waiting`: by block, the latest request whose last block but one (or only block) it is; the
    # next request with this block continues its session. `owner`: by block, its only
    # session, or SHARED.
    waiting: dict[int, int] = {}
    owner: dict[int, int] = {}
    session_of = list(range(num_requests))
    for request in range(num_requests):
        chain = blocks[starts[request] : starts[request + 1]]
        before = [waiting.pop(block) for block in chain if block in waiting]
        for earlier in before:
            pauses_s[earlier] = trace.times_s[request] - trace.times_s[earlier]
        if before:
            session_of[request] = session_of[before[-1]]
        session = session_of[request]
        num_shared = 0
        for place, block in enumerate(chain):
            if owner.setdefault(block, session) != session:
                owner[block] = SHARED
                num_shared = place + 1
        own_from[request] = num_shared
        waiting[chain[max(0, len(chain) - 2)]] = request
    return ReplayHints(pauses_s, own_from, np.array(session_of, np.int64))


# ------------------------------------------------------------------------------------------ Replays

MakePolicy = Callable[[int], Policy]
"""Takes the capacity in blocks; the policy knows them by entry numbers from 1."""
Progress = Callable[[int], None]
"""Called with the number of requests replayed since its last call."""

KEY_SPACE, GROUP, LEASE = 1, 0, 1
WARM_UP_REQUESTS, WARM_UP_BLOCKS = 64, 16
STEP_REQUESTS = 500
"""Between two reports of progress."""
BLOCK_TOKENS = 512
"""Of Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay.

    prefix: leading blocks that hit, over all tiers [R].
    seconds: wall time.
    """

    prefix: Int64s
    seconds: float
    num_second_tier_hits: int = 0
    num_second_tier_writes: int = 0


class SimulatedTier:
    """A space of the core in which each block takes one slot, without memory for bytes."""

    def __init__(self, capacity_blocks: int, make_policy: MakePolicy) -> None:
        arena_bytes = capacity_blocks * SLOT_ALIGN
        geometry = TableGeometry.for_capacity(capacity_blocks, 1, arena_bytes)
        block_table = BlockTable(np.zeros(geometry.file_bytes, np.uint8), geometry)
        self.space = Space(block_table, arena_bytes, arena_bytes, make_policy(capacity_blocks))
        self.space.index.add_key_space(KEY_SPACE, [0])

    def __repr__(self) -> str:
        return f"SimulatedTier({self.space!r})"

    def find(self, hashes: Words) -> Entries:
        """Entries [n]; 0 if missing."""
        return self.space.index.find(KEY_SPACE, GROUP, hashes)

    def demote(self, hashes: Words, now_s: float) -> None:
        """`hashes`: in the order of the request."""
        entries = self.find(hashes)
        entries = entries[entries != 0]
        self.space.policy.demote(entries, self.space.index.mixed(entries), now_s)

    @contextlib.contextmanager
    def staying(self, entries: Entries) -> Iterator[None]:
        """Keeps `entries` from eviction."""
        self.space.index.pin(entries, 1)
        yield
        self.space.index.pin(entries, -1)

    def make_room(self, count: int, refusable_at_s: float | None = None) -> None:
        """Evicts until `count` blocks fit, or nothing can be evicted.

        refusable_at_s: now, if the policy may hold back entries that it expects to be used soon;
            else None.
        """
        making = self.space.make_room(
            KEY_SPACE, GROUP, SLOT_ALIGN, count, refusable_at_s=refusable_at_s
        )
        finished(making)

    def store(self, hashes: Words, entries: Entries, num_held: int, now_s: float) -> int:
        """Uses a request's present blocks and stores as many of the others as fit. Returns how
        many.

        hashes: in order, words [n, 8].
        entries: `find` of them; the first `num_held` are present.
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
        with self.staying(present):
            self.make_room(len(absent), now_s)
        fresh = space.insert(KEY_SPACE, GROUP, fresh_hashes, SLOT_ALIGN, absent, LEASE)
        space.reserve.count(0, SLOT_ALIGN, len(fresh))
        chain = entries.copy()
        chain[absent[: len(fresh)]] = fresh
        space.chains.link(KEY_SPACE, GROUP, chain, None)
        space.publish(fresh, now_s)
        if len(fresh):
            space.refresh_ancestors(int(fresh[0]), now_s)
        space.decline(
            KEY_SPACE, GROUP, fresh_hashes[len(fresh) :], len(present) + len(fresh), now_s
        )
        return len(fresh)


class OneTier:
    def __init__(self, tier: SimulatedTier) -> None:
        self.tier = tier

    def serve(self, hashes: Words, now_s: float) -> int:
        """Leading blocks that hit. `hashes`: in order, words [n, 8]."""
        finished(self.tier.space.make_room_ahead(now_s))
        entries = self.tier.find(hashes)
        prefix = prefix_of(entries)
        self.tier.store(hashes, entries, prefix, now_s)
        self.tier.space.removal.take_effects()
        return prefix


def prefix_of(entries: Entries) -> int:
    """Leading entries that are not 0."""
    at = int(np.argmin(entries))
    return at if entries[at] == 0 else len(entries)


def replay(
    trace: Trace,
    capacity_blocks: int,
    make_policy: MakePolicy,
    progress: Progress | None = None,
    hints: ReplayHints | None = None,
) -> Replayed:
    """Replays over one tier.

    hints: applied after each request; None: none.
    """
    warm_up(trace, make_policy)
    tier = SimulatedTier(capacity_blocks, make_policy)

    def tell(request: int, hashes: Words, now_s: float) -> None:
        assert hints is not None
        cold_from = hints.cold_from(request)
        if cold_from is not None:
            tier.demote(hashes[cold_from:], now_s)

    prefix, seconds = timed(trace, OneTier(tier).serve, progress, tell if hints else None)
    return Replayed(prefix, seconds)


def timed(
    trace: Trace,
    serve: Callable[[Words, float], int],
    progress: Progress | None,
    tell: Callable[[int, Words, float], None] | None = None,
) -> tuple[Int64s, float]:
    """Leading blocks that hit [R], and wall time in seconds.

    serve: (hashes, time) → leading blocks that hit.
    tell: called after each request with its number, hashes and time.
    """
    prefix = np.zeros(trace.num_requests, np.int64)
    starts, times_s = trace.starts.tolist(), trace.times_s.tolist()
    started_s = time.perf_counter()
    for request, now_s in enumerate(times_s):
        hashes = trace.hashes[starts[request] : starts[request + 1]]
        prefix[request] = serve(hashes, now_s)
        if tell is not None:
            tell(request, hashes, now_s)
        if progress is not None and request % STEP_REQUESTS == STEP_REQUESTS - 1:
            progress(STEP_REQUESTS)
    seconds = time.perf_counter() - started_s
    if progress is not None:
        progress(trace.num_requests % STEP_REQUESTS)
    return prefix, seconds


def warm_up(trace: Trace, make_policy: MakePolicy) -> None:
    """Serves a few requests with a temporary cache, so that measured times include no
    compilation."""
    cache = OneTier(SimulatedTier(WARM_UP_BLOCKS, make_policy))
    starts = trace.starts[: WARM_UP_REQUESTS + 1].tolist()
    for start, end in pairwise(starts):
        cache.serve(trace.hashes[start:end], 0.0)


# ------------------------------------------------------------------- Bounds that no policy can beat
# As for real caches, only blocks before a request's first miss hit. An id must stand for a block
# with all before it: then a block is never used again earlier than the block before it.


def unbounded(trace: Trace) -> Int64s:
    """Leading blocks that hit [R] if nothing is evicted."""
    first = np.zeros(len(trace.blocks), np.bool_)
    first[np.unique(trace.blocks, return_index=True)[1]] = True
    return trace.prefix_lengths(~first)


def next_uses(blocks: Int64s) -> Int64s:
    """For each access [B], the index of the next to the same block; B if there is none."""
    order = np.argsort(blocks, kind="stable")
    following = np.full(len(blocks), len(blocks), np.int64)
    same = blocks[order[1:]] == blocks[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following


def clairvoyant(trace: Trace, capacity_blocks: int, following: Int64s | None = None) -> Int64s:
    """Leading blocks that hit [R] in the best possible cache, which knows the future (Belady's rule
    with bypass).

    After each request it keeps the blocks that are used again soonest, which serves the most
    (greedy colouring of interval graphs, Carlisle and Lloyd 1995). Of blocks with the same next use
    it drops the last first, so with a block it holds all before it.

    following: `next_uses`, if known.
    """
    kept = bytearray(len(trace.blocks))
    uses = (next_uses(trace.blocks) if following is None else following).tolist()
    # Next uses of held blocks, farthest first. Passed uses stay: they come last, and `num_held`
    # does not count them.
    farthest: list[int] = []
    num_held = 0
    starts = trace.starts.tolist()
    for start, end in pairwise(starts):
        num_held -= kept.count(1, start, end)
        for use in uses[start:end]:
            if use == len(uses):
                continue
            kept[use] = 1
            if num_held < capacity_blocks:
                heapq.heappush(farthest, -use)
                num_held += 1
            else:
                kept[-heapq.heappushpop(farthest, -use)] = 0
    return trace.prefix_lengths(np.frombuffer(kept, np.bool_))
