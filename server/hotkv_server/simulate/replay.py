"""Replaying a trace: each request looks its blocks up, uses those it hits, and stores the rest, all
through the core.

A `SimulatedTier` is the core's own space of slots, with every block of one size. Always true:
blocks that a request finds present stay until its own are stored; all clocks are the trace's; a
request is done before the next one begins.
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
# What a trace's sessions would have told: which turn was a session's last, and after which
# it pauses for long.
#
# A turn is a request; the session's next one is the first later request that has all its blocks,
# but for the last, which may not be full. Only ends and pauses look into the future, as an agent
# knows its own; which blocks a session shares is taken from the past.

SHARED = -1
LONG_PAUSE_S = 30.0
"""Pauses from here on are told: the session's blocks may go meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplayHints:
    """Of each request. `pauses_s` [R]: time until the session's next turn; infinite after its last.
    `own_from` [R]: place in the request of the first block that no other session has used so
    far."""

    def cold_from(self, request: int) -> int | None:
        """Place of the first block of a request that nobody is expected to use soon; None if all
        are."""
        is_long = self.pauses_s[request] >= LONG_PAUSE_S
        return int(self.own_from[request]) if is_long else None

    pauses_s: NDArray[np.float64]
    own_from: Int64s


def derive_hints(trace: Trace) -> ReplayHints:
    """Finds the sessions of a trace. Linear in its accesses."""
    starts, blocks = trace.starts.tolist(), trace.blocks.tolist()
    num_requests = trace.num_requests
    pauses_s = np.full(num_requests, np.inf)
    own_from = np.zeros(num_requests, np.int64)
    # Per block, the request that waits for a next turn with this block, and the only session that
    # has used it; SHARED if there are several.
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
    return ReplayHints(pauses_s, own_from)


# ------------------------------------------------------------------------------------------ Replays

MakePolicy = Callable[[int], Policy]
"""Makes a policy for entry numbers 1 to the given capacity."""
Progress = Callable[[int], None]
"""Is told how many more requests are done."""

KEY_SPACE, GROUP, LEASE = 1, 0, 1
WARM_UP_REQUESTS, WARM_UP_BLOCKS = 64, 16
STEP_REQUESTS = 500
"""Between two reports of progress."""
BLOCK_TOKENS = 512
"""Of a block in Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Prefix lengths [R] over all tiers; how many blocks of the prefixes came from the second one,
    and were written to it."""

    prefix: Int64s
    seconds: float
    num_second_tier_hits: int = 0
    num_second_tier_writes: int = 0


class SimulatedTier:
    """A space of the core for blocks of one slot each, over a table and an arena of its own."""

    def __init__(self, capacity_blocks: int, make_policy: MakePolicy) -> None:
        arena_bytes = capacity_blocks * SLOT_ALIGN
        geometry = TableGeometry.for_capacity(capacity_blocks, 1, arena_bytes)
        block_table = BlockTable(np.zeros(geometry.file_bytes, np.uint8), geometry)
        self.space = Space(block_table, arena_bytes, arena_bytes, make_policy(capacity_blocks))
        self.space.index.add_key_space(KEY_SPACE, [0])

    def __repr__(self) -> str:
        return f"SimulatedTier({self.space!r})"

    def find(self, hashes: Words) -> Entries:
        """Entries [n] of blocks, 0 for those that are not here. No entry is ever left reserved."""
        return self.space.index.find(KEY_SPACE, GROUP, hashes)

    def demote(self, hashes: Words, now_s: float) -> None:
        """Nobody is expected to use these blocks, in chain order, soon."""
        entries = self.find(hashes)
        entries = entries[entries != 0]
        self.space.policy.demote(entries, self.space.index.mixed(entries), now_s)

    @contextlib.contextmanager
    def staying(self, entries: Entries) -> Iterator[None]:
        """Evicts none of these while room is made."""
        self.space.index.pin(entries, 1)
        yield
        self.space.index.pin(entries, -1)

    def make_room(self, count: int, keep_at_s: float | None = None) -> None:
        """Makes room for so many blocks."""
        making = self.space.make_room(KEY_SPACE, GROUP, SLOT_ALIGN, count, keep_at_s=keep_at_s)
        finished(making)

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
        with self.staying(present):
            self.make_room(len(absent), now_s)
        fresh = space.insert(KEY_SPACE, GROUP, fresh_hashes, SLOT_ALIGN, absent, LEASE)
        space.publish(fresh, now_s)
        space.decline(
            KEY_SPACE, GROUP, fresh_hashes[len(fresh) :], len(present) + len(fresh), now_s
        )
        return len(fresh)


class OneTier:
    """A cache of one tier."""

    def __init__(self, tier: SimulatedTier) -> None:
        self.tier = tier

    def serve(self, hashes: Words, now_s: float) -> int:
        """Length of the prefix that a request hits; its blocks [n, 8] are used or stored."""
        entries = self.tier.find(hashes)
        prefix = prefix_of(entries)
        self.tier.store(hashes, entries, prefix, now_s)
        self.tier.space.removal.take_effects()
        return prefix


def prefix_of(entries: Entries) -> int:
    """Entries before the first 0."""
    at = int(np.argmin(entries))
    return at if entries[at] == 0 else len(entries)


def replay(
    trace: Trace,
    capacity_blocks: int,
    make_policy: MakePolicy,
    progress: Progress | None = None,
    hints: ReplayHints | None = None,
) -> Replayed:
    """Replays a trace over one tier. `hints`: of its sessions, told when each request is done."""
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
    """Prefix lengths [R] and the seconds it took. `tell`: is called after each request."""
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
    """Serves a few requests with a cache that is thrown away, so that no timing includes
    compilation."""
    cache = OneTier(SimulatedTier(WARM_UP_BLOCKS, make_policy))
    starts = trace.starts[: WARM_UP_REQUESTS + 1].tolist()
    for start, end in pairwise(starts):
        cache.serve(trace.hashes[start:end], 0.0)


# ------------------------------------------------------------------- Bounds that no policy can beat
# A cache without end, and one that knows the future.
#
# Both count as the policies are judged: blocks of the contiguous prefix. They need a trace whose
# ids stand for a block and all before it; then a block's next use is never before that of the
# block that it follows.


def unbounded(trace: Trace) -> Int64s:
    """Prefix lengths [R] if nothing is ever evicted."""
    first = np.zeros(len(trace.blocks), np.bool_)
    first[np.unique(trace.blocks, return_index=True)[1]] = True
    return trace.prefix_lengths(~first)


def next_uses(blocks: Int64s) -> Int64s:
    """For each access [B] the next one to the same block; B if there is none."""
    order = np.argsort(blocks, kind="stable")
    following = np.full(len(blocks), len(blocks), np.int64)
    same = blocks[order[1:]] == blocks[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following


def clairvoyant(trace: Trace, capacity_blocks: int, following: Int64s | None = None) -> Int64s:
    """Prefix lengths [R] of the best cache of that many blocks: Belady's rule with bypass, a
    request at a time.

    Of the blocks it holds and those of the request just served it keeps the ones that are used
    again soonest, and need not keep any. Choosing so which stretches between two uses to bridge
    serves the most blocks (greedy colouring of interval graphs, Carlisle and Lloyd 1995). Of blocks
    that the same request uses again the deepest is dropped first, so the blocks held are closed
    under prefixes.
    """
    kept = bytearray(len(trace.blocks))
    uses = (next_uses(trace.blocks) if following is None else following).tolist()
    # Next uses of held blocks, the farthest first; those in the past are at the end and don't
    # count as held.
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
