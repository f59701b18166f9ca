"""Replays a trace of requests through the cache core: each request looks up its blocks, records a
use of the blocks that hit, and stores its missing blocks.

A `SimulatedTier` is a space of slots of the core (`cache.room.space`) in which every block has the
same size. Always true: blocks that a request finds are not evicted before its missing blocks are
stored. The clock shows the trace's times. A request ends before the next request begins.
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
from hotkv_server.cache.room.policies import Policy
from hotkv_server.cache.room.removal import finished
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import Entries
from hotkv_server.simulate.trace import Int64s, Trace

# --------------------------------------------------------------------------------- Hints of a trace
# Hints that the sessions of a trace could have given: which request was the last of a session, and
# after which request the session paused for long.
#
# The next request of a session is the first later request that has all blocks of the request before
# it, except its last block, which may be partial. The ends and pauses of sessions are taken from
# later requests, because an agent knows its plans. But whether sessions share a block is taken only
# from earlier requests.

SHARED = -1
LONG_PAUSE_S = 30.0
"""If the time until a session's next request is at least this long, in seconds, a simulated hint
demotes the session's blocks (marks them to be evicted first)."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplayHints:
    """Hints for each of R requests.

    pauses_s: seconds until the session's next request [R]; infinite for its last request.
    own_from: index in the request of the first block after the last shared block [R]. So far, only
        the request's session has used the blocks from this index on.
    sessions: id of the request's session [R]: the index in the trace of the session's first
        request.
    """

    def cold_from(self, request: int) -> int | None:
        """Returns the index in the request of the first block to demote (mark to be evicted first).
        If the session ends or pauses for long after the request, this is the first block that only
        the session uses. Otherwise returns None."""
        is_long = self.pauses_s[request] >= LONG_PAUSE_S
        return int(self.own_from[request]) if is_long else None

    pauses_s: NDArray[np.float64]
    own_from: Int64s
    sessions: Int64s


def derive_hints(trace: Trace) -> ReplayHints:
    """Finds the sessions of a trace, and returns the hints that a router could have given: when a
    session ends, and when a session pauses for long. Takes time linear in the number of block
    accesses."""
    starts, blocks = trace.starts.tolist(), trace.blocks.tolist()
    num_requests = trace.num_requests
    pauses_s = np.full(num_requests, np.inf)
    own_from = np.zeros(num_requests, np.int64)
    # `waiting`: by block, the latest request whose last block but one (or only block) is this
    # block. The next request that has this block continues the request's session. `owner`: by
    # block, the only session that has used the block; SHARED if several have used it.
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
"""A function that makes an eviction policy for a cache. The argument is the cache's capacity in
blocks; the policy knows the blocks by entry numbers from 1 to the capacity."""
Progress = Callable[[int], None]
"""A function that is called with the number of requests that were replayed since its last call."""

KEY_SPACE, GROUP, LEASE = 1, 0, 1
WARM_UP_REQUESTS, WARM_UP_BLOCKS = 64, 16
STEP_REQUESTS = 500
"""Number of requests between two reports of progress."""
BLOCK_TOKENS = 512
"""Tokens of a block in Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay.

    prefix: for each request [R], the number of its leading blocks that hit, over all tiers.
    seconds: wall time of the replay.
    num_second_tier_hits: number of hit blocks that came from the second tier.
    num_second_tier_writes: number of blocks written to the second tier.
    """

    prefix: Int64s
    seconds: float
    num_second_tier_hits: int = 0
    num_second_tier_writes: int = 0


class SimulatedTier:
    """A tier of the simulation: a space of the core with its own block table, in which each block
    takes one slot. There is no memory for the blocks' bytes."""

    def __init__(self, capacity_blocks: int, make_policy: MakePolicy) -> None:
        arena_bytes = capacity_blocks * SLOT_ALIGN
        geometry = TableGeometry.for_capacity(capacity_blocks, 1, arena_bytes)
        block_table = BlockTable(np.zeros(geometry.file_bytes, np.uint8), geometry)
        self.space = Space(block_table, arena_bytes, arena_bytes, make_policy(capacity_blocks))
        self.space.index.add_key_space(KEY_SPACE, [0])

    def __repr__(self) -> str:
        return f"SimulatedTier({self.space!r})"

    def find(self, hashes: Words) -> Entries:
        """Returns the entry of each block [n]; 0 if the block is missing."""
        return self.space.index.find(KEY_SPACE, GROUP, hashes)

    def demote(self, hashes: Words, now_s: float) -> None:
        """Demotes the blocks that the tier has: marks them to be evicted before other blocks.

        hashes: the blocks in the order of the request.
        """
        entries = self.find(hashes)
        entries = entries[entries != 0]
        self.space.policy.demote(entries, self.space.index.mixed(entries), now_s)

    @contextlib.contextmanager
    def staying(self, entries: Entries) -> Iterator[None]:
        """Pins these entries during the `with` block, so that making room does not evict them."""
        self.space.index.pin(entries, 1)
        yield
        self.space.index.pin(entries, -1)

    def make_room(self, count: int, keep_at_s: float | None = None) -> None:
        """Evicts blocks until `count` blocks fit, or no more blocks can be evicted.

        keep_at_s: the current time, if the policy may hold back entries that it expects to be used
            soon; None if the policy must not hold entries back.
        """
        making = self.space.make_room(KEY_SPACE, GROUP, SLOT_ALIGN, count, keep_at_s=keep_at_s)
        finished(making)

    def store(self, hashes: Words, entries: Entries, num_held: int, now_s: float) -> int:
        """Records a use of the blocks of a request that the tier has, and stores as many of its
        missing blocks as fit. Returns the number of stored blocks.

        hashes: the request's blocks in order, uint32 words [n, 8].
        entries: the result of `find` for the hashes; the first `num_held` blocks are present.
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
    """A cache with a single tier."""

    def __init__(self, tier: SimulatedTier) -> None:
        self.tier = tier

    def serve(self, hashes: Words, now_s: float) -> int:
        """Serves a request: records a use of its blocks that the tier has, and stores its missing
        blocks. Returns the number of leading blocks that hit.

        hashes: the request's blocks in order, uint32 words [n, 8].
        """
        entries = self.tier.find(hashes)
        prefix = prefix_of(entries)
        self.tier.store(hashes, entries, prefix, now_s)
        self.tier.space.removal.take_effects()
        return prefix


def prefix_of(entries: Entries) -> int:
    """Returns the number of leading entries that are not 0."""
    at = int(np.argmin(entries))
    return at if entries[at] == 0 else len(entries)


def replay(
    trace: Trace,
    capacity_blocks: int,
    make_policy: MakePolicy,
    progress: Progress | None = None,
    hints: ReplayHints | None = None,
) -> Replayed:
    """Replays a trace over a single tier.

    make_policy: makes the tier's eviction policy for entry numbers from 1 to the given capacity.
    progress: called from time to time with the number of requests replayed since its last call.
    hints: hints of the trace's sessions. The hint of a request is applied after the request. None:
        no hints.
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
    """Serves all requests of a trace in order. Returns the number of leading blocks of each request
    that hit [R], and the wall time in seconds.

    serve: serves a request, given its hashes and time, and returns the number of leading blocks
        that hit.
    progress: called from time to time with the number of requests served since its last call.
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
    """Serves a few requests of the trace with a temporary cache, so that the measured times do not
    include compilation of kernels.

    make_policy: makes the cache's eviction policy.
    """
    cache = OneTier(SimulatedTier(WARM_UP_BLOCKS, make_policy))
    starts = trace.starts[: WARM_UP_REQUESTS + 1].tolist()
    for start, end in pairwise(starts):
        cache.serve(trace.hashes[start:end], 0.0)


# ------------------------------------------------------------------- Bounds that no policy can beat
# The hits of two ideal caches: an unbounded cache, and a cache that knows the future.
#
# As for real caches, only the blocks before a request's first miss count as hits. The functions
# require that an id of the trace stands for a block and all blocks before it. Then a request that
# uses a block also uses the block before it. So the next use of a block is never earlier than the
# next use of the block before it.


def unbounded(trace: Trace) -> Int64s:
    """Returns the number of leading blocks of each request that hit [R] if no block is ever
    evicted."""
    first = np.zeros(len(trace.blocks), np.bool_)
    first[np.unique(trace.blocks, return_index=True)[1]] = True
    return trace.prefix_lengths(~first)


def next_uses(blocks: Int64s) -> Int64s:
    """Returns for each block access of a trace [B] the index of the next access to the same block;
    B if there is no later access."""
    order = np.argsort(blocks, kind="stable")
    following = np.full(len(blocks), len(blocks), np.int64)
    same = blocks[order[1:]] == blocks[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following


def clairvoyant(trace: Trace, capacity_blocks: int, following: Int64s | None = None) -> Int64s:
    """Simulates the best possible cache with `capacity_blocks` blocks, which knows all later
    requests (Belady's rule with bypass). Returns the number of leading blocks of each request that
    hit [R].

    After each request, the cache chooses among the blocks that it held and the request's blocks. It
    keeps the blocks that are used again soonest. This choice serves the most blocks (greedy
    colouring of interval graphs, Carlisle and Lloyd 1995). Of blocks that the same later request
    uses again, the cache drops the last blocks first. So if the cache holds a block, it holds all
    blocks before this block in the prompt.

    following: the result of `next_uses`, if the caller has already computed it.
    """
    kept = bytearray(len(trace.blocks))
    uses = (next_uses(trace.blocks) if following is None else following).tolist()
    # A heap of the next uses of held blocks, the farthest use first. Uses that have passed stay in
    # the heap: they come last, and `num_held` does not count them.
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
