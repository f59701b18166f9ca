"""Replaying a trace: each request looks up its blocks, uses its hits and stores the rest, all
through the core.

A `SimulatedTier` is the core's space of slots, in which every block has the same size. Always true:
blocks that a request finds present stay until its missing blocks are stored. All time is the
trace's. A request ends before the next begins.
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
# Hints that a trace's sessions would have given: which turn was a session's last, and after which
# turn it pauses for long.
#
# A turn is a request. The session's next turn is the first later request that has all its blocks,
# except the last block, which may be partial. Only ends and pauses come from the future, as an
# agent knows its own plans. Which blocks a session shares comes from the past.

SHARED = -1
LONG_PAUSE_S = 30.0
"""Pauses of at least this length are reported; the session's blocks may be evicted in the pause."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplayHints:
    """Hints for each request.

    pauses_s: time until the session's next turn [R]; infinite after its last.
    own_from: place in the request of the first block that no other session has used so far [R].
    sessions: number of the request's session, which is that of its first request [R].
    """

    def cold_from(self, request: int) -> int | None:
        """Returns the place of the request's first block that is not expected to be used soon; None
        if all its blocks are expected to be used soon."""
        is_long = self.pauses_s[request] >= LONG_PAUSE_S
        return int(self.own_from[request]) if is_long else None

    pauses_s: NDArray[np.float64]
    own_from: Int64s
    sessions: Int64s


def derive_hints(trace: Trace) -> ReplayHints:
    """Finds the sessions of a trace. Linear in its accesses."""
    starts, blocks = trace.starts.tolist(), trace.blocks.tolist()
    num_requests = trace.num_requests
    pauses_s = np.full(num_requests, np.inf)
    own_from = np.zeros(num_requests, np.int64)
    # By block: the request that waits for a next turn with this block, and the only session that
    # has used it; SHARED if several have.
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
"""Makes a policy for entry numbers from 1 to the given capacity."""
Progress = Callable[[int], None]
"""Called with the number of requests done since the last call."""

KEY_SPACE, GROUP, LEASE = 1, 0, 1
WARM_UP_REQUESTS, WARM_UP_BLOCKS = 64, 16
STEP_REQUESTS = 500
"""Requests between two reports of progress."""
BLOCK_TOKENS = 512
"""Tokens of a block in Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay.

    prefix: lengths of the prefixes that hit, over all tiers [R].
    seconds: wall time of the replay.
    num_second_tier_hits: blocks of these prefixes that came from the second tier.
    num_second_tier_writes: blocks written to the second tier.
    """

    prefix: Int64s
    seconds: float
    num_second_tier_hits: int = 0
    num_second_tier_writes: int = 0


class SimulatedTier:
    """A space of the core for blocks of a single slot each, with a separate table and arena."""

    def __init__(self, capacity_blocks: int, make_policy: MakePolicy) -> None:
        arena_bytes = capacity_blocks * SLOT_ALIGN
        geometry = TableGeometry.for_capacity(capacity_blocks, 1, arena_bytes)
        block_table = BlockTable(np.zeros(geometry.file_bytes, np.uint8), geometry)
        self.space = Space(block_table, arena_bytes, arena_bytes, make_policy(capacity_blocks))
        self.space.index.add_key_space(KEY_SPACE, [0])

    def __repr__(self) -> str:
        return f"SimulatedTier({self.space!r})"

    def find(self, hashes: Words) -> Entries:
        """Returns the entries [n] of blocks, 0 for missing blocks. No entry is ever left
        reserved."""
        return self.space.index.find(KEY_SPACE, GROUP, hashes)

    def demote(self, hashes: Words, now_s: float) -> None:
        """Demotes blocks, given in chain order, that are not expected to be used soon."""
        entries = self.find(hashes)
        entries = entries[entries != 0]
        self.space.policy.demote(entries, self.space.index.mixed(entries), now_s)

    @contextlib.contextmanager
    def staying(self, entries: Entries) -> Iterator[None]:
        """Pins these entries while the context is open, so that making room does not evict them."""
        self.space.index.pin(entries, 1)
        yield
        self.space.index.pin(entries, -1)

    def make_room(self, count: int, keep_at_s: float | None = None) -> None:
        """Makes room for `count` blocks."""
        making = self.space.make_room(KEY_SPACE, GROUP, SLOT_ALIGN, count, keep_at_s=keep_at_s)
        finished(making)

    def store(self, hashes: Words, entries: Entries, num_held: int, now_s: float) -> int:
        """Uses the present blocks of a request and stores as many of its missing blocks as fit.
        Returns how many it stored. Blocks are in chain order.

        `entries`: result of `find`; the first `num_held` of them are present.
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
    """A cache with a single tier."""

    def __init__(self, tier: SimulatedTier) -> None:
        self.tier = tier

    def serve(self, hashes: Words, now_s: float) -> int:
        """Uses the blocks [n, 8] of a request that are present and stores the missing blocks.
        Returns the length of the prefix that hits."""
        entries = self.tier.find(hashes)
        prefix = prefix_of(entries)
        self.tier.store(hashes, entries, prefix, now_s)
        self.tier.space.removal.take_effects()
        return prefix


def prefix_of(entries: Entries) -> int:
    """Returns the number of entries before the first 0."""
    at = int(np.argmin(entries))
    return at if entries[at] == 0 else len(entries)


def replay(
    trace: Trace,
    capacity_blocks: int,
    make_policy: MakePolicy,
    progress: Progress | None = None,
    hints: ReplayHints | None = None,
) -> Replayed:
    """Replays a trace over a single tier. `hints`: of its sessions; each is applied when its
    request is done."""
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
    """Serves all requests of a trace. Returns prefix lengths [R] and the wall time in seconds.

    `tell`: called after each request.
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
    """Serves a few requests with a temporary cache, so that no timing includes compilation."""
    cache = OneTier(SimulatedTier(WARM_UP_BLOCKS, make_policy))
    starts = trace.starts[: WARM_UP_REQUESTS + 1].tolist()
    for start, end in pairwise(starts):
        cache.serve(trace.hashes[start:end], 0.0)


# ------------------------------------------------------------------- Bounds that no policy can beat
# Bounds: an unbounded cache, and a cache that knows the future.
#
# Both count as the policies do: blocks of the contiguous prefix. They need a trace whose ids stand
# for a block and all blocks before it. Then a block's next use is never before the next use of the
# block before it.


def unbounded(trace: Trace) -> Int64s:
    """Returns the prefix lengths [R] if no block is ever evicted."""
    first = np.zeros(len(trace.blocks), np.bool_)
    first[np.unique(trace.blocks, return_index=True)[1]] = True
    return trace.prefix_lengths(~first)


def next_uses(blocks: Int64s) -> Int64s:
    """Returns for each access [B] the next access to the same block; B if there is no later
    access."""
    order = np.argsort(blocks, kind="stable")
    following = np.full(len(blocks), len(blocks), np.int64)
    same = blocks[order[1:]] == blocks[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following


def clairvoyant(trace: Trace, capacity_blocks: int, following: Int64s | None = None) -> Int64s:
    """Returns the prefix lengths [R] of the best cache with that many blocks: Belady's rule with
    bypass, a request at a time.

    After each request it has the blocks held so far and the request's blocks. It retains those that
    are used again soonest, and may retain none. This choice serves the most blocks (greedy
    colouring of interval graphs, Carlisle and Lloyd 1995). Among blocks that the same request uses
    again, it drops the deepest first, so the blocks it holds are closed under prefixes.

    following: result of `next_uses`, if the caller has it.
    """
    kept = bytearray(len(trace.blocks))
    uses = (next_uses(trace.blocks) if following is None else following).tolist()
    # Next uses of held blocks, the farthest first. Past uses are at the end and don't count as
    # held.
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
