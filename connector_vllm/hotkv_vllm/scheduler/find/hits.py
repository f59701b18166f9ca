"""Finds the hit of a request: the leading blocks in the server that the engine can load.

The block table hints which blocks are ready; a lease pins them; the grant says which it has pinned.
Scheduler thread only; waits only as long as `Patience` allows.

    IDLE -> ASKED (lookup call, if no block table is mapped or a lower tier may have further blocks)
    -> LEASING -> GRANTED -> LOADING -> IDLE

- A request has at most one lease, which is released or expires.
- A call unanswered for `lookup_timeout_s` is a miss. Until its answer comes, a request with neither
  a lease nor a call in flight misses at once.
- A hit never covers the last token, which the engine always computes.
- Blocks of a failed load are not offered until they are stored again or the server has lost its
  cache (a new *epoch*).
- Attachments never change the length of a hit.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from hotkv_client.session import Session
from hotkv_client.types import BoolMask, GroupHashes, Int32s, LeaseGrant, LoadRun
from hotkv_proto.groups import PREFIX_CLOSED, Int64s, longest_prefix, needed_blocks
from hotkv_proto.reports import Miss
from hotkv_vllm.config import LEASE_TTL_S, ConnectorConfig
from hotkv_vllm.costs.answer_time import AnswerTime
from hotkv_vllm.metadata import LoadJob
from hotkv_vllm.scheduler.failed_loads import FailedLoads
from hotkv_vllm.scheduler.groups import Attachments, CachedGroups
from hotkv_vllm.scheduler.hidden_keys import HiddenKeys
from hotkv_vllm.scheduler.request import (
    ANY_LENGTH,
    ASK_AGAIN,
    NO_HIT,
    Answer,
    HitState,
    Masks,
    Phase,
    RequestState,
)
from hotkv_vllm.stats import HotKVStats

# ---------------------------------------------------------------------------------- the block table


class TableProbe:
    """Looks up in the block table which blocks are ready: a hint, since the server may evict them.

    Full attention comes first: every hit ends before its first missing block.
    """

    def __init__(self, session: Session, groups: CachedGroups, hidden: HiddenKeys) -> None:
        self._session = session
        self._groups = groups
        self._hidden = hidden
        specs = groups.specs
        self._order = sorted(
            range(len(specs)), key=lambda index: specs[index].kind not in PREFIX_CLOSED
        )

    def __repr__(self) -> str:
        return f"TableProbe({len(self._order)} groups)"

    def ready(self, request: Any, computed_tokens: int) -> Masks | None:
        """Mask per group, without blocks that can't make the hit longer than `computed_tokens`,
        vLLM's own hit. None if no table is mapped."""
        limit = request.num_tokens - 1
        specs = self._groups.specs
        masks: list[BoolMask] = [np.zeros(0, np.bool_)] * len(specs)
        for index in self._order:
            spec = specs[index]
            hashes = self._groups.hashes(request, index)[: self._groups.num_blocks(index, limit)]
            if spec.kind in PREFIX_CLOSED:
                ready = self._prefix(index, hashes, computed_tokens // spec.block_tokens)
            else:
                ready = self._session.probe(index, hashes)
            if ready is None:
                return None
            masks[index] = self._hidden.mask(index, hashes, ready)
            if spec.kind in PREFIX_CLOSED:
                # No hit reaches beyond this group's first missing block.
                limit = min(limit, spec.reach_tokens(masks[index]))
                if limit <= computed_tokens:
                    break
        return tuple(masks)

    def may_lie_below(self, request: Any, masks: Masks, computed_tokens: int) -> bool:
        """The table lists only host memory."""
        limit = request.num_tokens - 1
        return self._session.has_tiers and not self._groups.is_whole(masks, computed_tokens, limit)

    def _prefix(self, index: int, hashes: Sequence[bytes], first: int) -> BoolMask | None:
        """Mask of a full-attention group up to its first missing block; None without a table.
        Probes few, because blocks after a missing one are rarely ready (`longest_prefix`).

        first: leading blocks in vLLM's own prefix cache, which count as ready.
        """
        # For most requests that miss, the first block is already missing.
        head = self._session.probe(index, hashes[first : first + 1])
        if head is None:
            return None
        left = len(hashes) - first if head.all() else 0

        def ready_at(places: Int64s) -> BoolMask:
            ready = self._session.probe(index, [hashes[first + place] for place in places.tolist()])
            return np.zeros(len(places), np.bool_) if ready is None else ready

        return np.arange(len(hashes)) < first + longest_prefix(ready_at, max(0, left))


# ------------------------------------------------------------------------------ the blocks of a hit

# Pure arithmetic. Only blocks that the lease pins are loaded.


def leased_positions(groups: CachedGroups, hit: HitState, index: int) -> Int32s:
    """A group's leased blocks but those left out, as ascending indices."""
    blocks, left_out = hit.leased[index], hit.left_out
    found = np.arange(blocks.start, blocks.stop, dtype=np.int32)
    if index != groups.kept:
        return found
    return found[(found < left_out.start) | (found >= left_out.stop)]


def stored_blocks(groups: CachedGroups, hit: HitState) -> tuple[int, ...]:
    """Per group, the leading blocks that need no store after the load: the server has them and
    their attachments."""
    found = []
    for index, spec in enumerate(groups.specs):
        num_blocks = hit.hit_tokens // spec.block_tokens
        mask = hit.attached.get(index)
        if mask is not None and not mask.all():
            # Leased without its attachment: considered once more, so that this is stored.
            positions = leased_positions(groups, hit, index)
            num_blocks = min(num_blocks, int(positions[np.argmin(mask)]))
        found.append(num_blocks)
    return tuple(found)


def pinned_masks(groups: CachedGroups, hit: HitState, pinned: Sequence[BoolMask]) -> Masks:
    """Per group, which of the hit's blocks are pinned. Blocks before the leased ones count as not
    pinned; those in `hit.left_out` as pinned.

    pinned: per group, which leased blocks the lease has pinned.
    """
    masks = []
    for index, (blocks, is_pinned) in enumerate(zip(hit.leased, pinned, strict=True)):
        # In a drafter's group the block after the hit must be ready, but is neither loaded nor
        # leased: it counts as pinned.
        mask = np.ones(groups.num_blocks(index, hit.hit_tokens), np.bool_)
        mask[: blocks.stop] = False
        mask[leased_positions(groups, hit, index)] = is_pinned
        if index == groups.kept:
            mask[hit.left_out.start : hit.left_out.stop] = True
        masks.append(mask)
    return tuple(masks)


def load_runs(
    groups: CachedGroups,
    hit: HitState,
    block_ids: Sequence[Sequence[int]],
    hit_tokens: int,
    null_block: int,
) -> list[LoadRun]:
    """A run per group to load; empty if the lease does not cover the hit.

    hit_tokens: may be shorter than the leased hit.
    null_block: marks blocks that are not on the device, as before a sliding window; not loaded.
    """
    runs = []
    for index, (spec, blocks) in enumerate(
        zip(groups.specs, needed_blocks(groups.specs, hit_tokens), strict=True)
    ):
        first = max(blocks.start, hit.computed_tokens // spec.block_tokens)
        table = np.asarray(block_ids[index][first : blocks.stop], np.int32)
        if first + len(table) < blocks.stop:
            return []
        wanted = np.arange(first, first + len(table), dtype=np.int32)[table != null_block]
        table = table[table != null_block]
        if not len(table):
            continue
        leased = leased_positions(groups, hit, index)
        at = np.searchsorted(leased, wanted).astype(np.int32)
        is_leased = at[-1] < len(leased) and np.array_equal(leased[at], wanted)
        if not is_leased or not hit.ready[index][wanted].all():
            return []
        runs.append(LoadRun(index, at, table))
    return runs


# ------------------------------------------------------------------------------ waiting for answers

ANSWER_PATIENCE_S = 0.002
"""With asynchronous scheduling the workers compute meanwhile."""
MOST_PASSED_BY = 63


def _is_there_in(answer: "Future[Any]", seconds: float) -> bool:
    return bool(wait((answer,), seconds).done)


class Patience:
    """Waits a moment for the server, which usually answers within a step: vLLM asks once per step,
    so each hit would cost one.

    All waits of a step together last at most ANSWER_PATIENCE_S. After each wait in vain the next 1,
    3, 7, ... MOST_PASSED_BY waits are skipped; an answer in time resets this.

    is_used: this step has waited.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wait_for: "Callable[[Future[Any], float], bool]" = _is_there_in,
    ) -> None:
        self._clock = clock
        self._wait_for = wait_for
        self._left_s = ANSWER_PATIENCE_S
        self._has_rested = self.is_used = False
        self._pause = self._passes_by = 0

    def __repr__(self) -> str:
        return f"Patience({self._left_s:.4f} s left, {self._passes_by} to pass by)"

    def begin_step(self) -> None:
        self._left_s = ANSWER_PATIENCE_S
        self._has_rested = self.is_used = False

    def rest(self, seconds: float, answer: "Future[Any] | None") -> None:
        """Blocks once per step, for `seconds` or until the answer comes. An idle vLLM would
        otherwise ask in a busy loop, and take processor time from the threads that load."""
        if self._has_rested:
            return
        self._has_rested = self.is_used = True
        if answer is None:
            time.sleep(seconds)
        else:
            self._wait_for(answer, seconds)

    def awaits(self, answer: "Future[Any]") -> bool:
        if answer.done():
            return True
        if self._left_s <= 0:
            return False
        if self._passes_by:
            self._passes_by -= 1
            return False
        self.is_used = True
        began_s = self._clock()
        is_there = self._wait_for(answer, self._left_s)
        self._left_s -= self._clock() - began_s
        self._pause = 0 if is_there else min(2 * self._pause + 1, MOST_PASSED_BY)
        self._passes_by = self._pause
        return is_there


# ------------------------------------------------------------------------ from a request to its hit

MISS_MEMORY_S = 0.05
"""How long a miss is believed."""
HINT_MEMORY_S = 0.02
"""How long after the arrival the first lookup's result is used."""
LEASE_SHARE_BEFORE_LOAD = 0.5
"""A load begins within this share of its lease's lifetime, so that it ends before the lease."""


class HitFinder:
    """Finds, leases and begins to load hits."""

    def __init__(
        self,
        session: Session,
        groups: CachedGroups,
        config: ConnectorConfig,
        stats: HotKVStats,
        id_prefix: str,
        attachments: Attachments | None = None,
        left_out: Callable[[int], range] = lambda hit_tokens: range(0),
        failed_loads: FailedLoads | None = None,
        *,
        stores: bool = True,
        connection: Callable[[], int] = lambda: 0,
    ) -> None:
        """left_out: by the length of a hit, the blocks that its load omits, because they stay in
            the server (`CachedGroups.kept`).
        failed_loads: the engine's, kept when the key space changes.
        connection: number of the present connection.
        """
        self._left_out = left_out
        self._connection = connection
        self.groups = groups
        self.attachments = attachments or Attachments(len(groups.specs))
        self.hidden = HiddenKeys(stores=stores)
        self.patience = Patience()
        self.failed_loads = FailedLoads() if failed_loads is None else failed_loads
        self._session = session
        self.table = TableProbe(session, groups, self.hidden)
        self._config = config
        self._stats = stats
        self._prefix = id_prefix
        self._counter = itertools.count(1)
        self._overdue: Future[Any] | None = None

    def __repr__(self) -> str:
        return f"HitFinder({self.groups}, {self.hidden}, {self.failed_loads})"

    def arrive(self, state: RequestState, now_s: float) -> None:
        """As a hint for `match`. Asks the server only without a table, or if a lower tier may
        have more."""
        if not self._session.connected or not self.can_hit(state.request, 0):
            return
        self.hidden.set_epoch(self._session.epoch, now_s)
        hint = state.hit.hint = self.table.ready(state.request, 0)
        state.hit.hint_until_s = now_s + HINT_MEMORY_S
        if hint is None or self.table.may_lie_below(state.request, hint, 0):
            self._ask(state, now_s)

    def can_hit(self, request: Any, computed_tokens: int) -> bool:
        """Whether a server with all blocks could give a hit longer than `computed_tokens`."""
        return self.groups.most_tokens(request.num_tokens - 1) > computed_tokens

    def match(self, state: RequestState, computed_tokens: int, now_s: float) -> Answer:
        """Answers vLLM's question for the hit, after a wait if `Patience` allows it."""
        answer = self._match(state, computed_tokens, now_s)
        while answer == ASK_AGAIN and state.hit.answer and self.patience.awaits(state.hit.answer):
            answer = self._match(state, computed_tokens, now_s)
        return answer

    def _match(self, state: RequestState, computed_tokens: int, now_s: float) -> Answer:
        """Advances the hit without waiting."""
        hit = state.hit
        if not self._session.connected or hit.has_failed or hit.unhandled_loads:
            self.give_back(state)
            return NO_HIT
        if not self.can_hit(state.request, computed_tokens):
            self.give_back(state)
            hit.miss = Miss.PARTIAL_BLOCK
            return NO_HIT
        self.hidden.set_epoch(self._session.epoch, now_s)
        if self._overdue is not None and self._overdue.done():
            self._overdue = None
        until_s, hit.hint_until_s = hit.hint_until_s, 0.0
        is_old = until_s and now_s >= until_s
        if is_old and hit.answer is not None and hit.answer.done():
            # The request has waited in vLLM's queue; the server may have further blocks by now.
            self.give_back(state)
        if hit.lease_id and hit.connection != self._connection():
            # The server has ended the lease together with its connection.
            self.give_back(state)
        if hit.phase in (Phase.ASKED, Phase.LEASING):
            return self._after_call(state, computed_tokens, now_s)
        if hit.phase is Phase.GRANTED:
            if self.failed_loads.outwait(hit.granted_s, now_s):
                hit.has_failed = True
                hit.miss = Miss.FAILED_LOAD
                return self._miss(state, now_s)
            if computed_tokens == hit.computed_tokens and now_s < hit.offer_until_s:
                return hit.hit_tokens - computed_tokens, True
            self.give_back(state)
        if self._overdue is not None:
            hit.miss = Miss.LATE
            return NO_HIT
        if now_s < hit.miss_until_s:
            return NO_HIT
        # The hint was computed as if the device held no blocks of the request.
        is_good = now_s < until_s and not computed_tokens
        masks = hit.hint if is_good else self.table.ready(state.request, computed_tokens)
        hit.hint = None
        if masks is None or self.table.may_lie_below(state.request, masks, computed_tokens):
            return self._ask(state, now_s)
        return self._take_lease(state, masks, computed_tokens, now_s)

    @property
    def is_connected(self) -> bool:
        return self._session.connected

    def lookup(self, state: RequestState) -> "Future[Masks]":
        """Asks the server which of the blocks that a hit could use are ready; leases none."""
        return self._session.lookup(self._all_blocks(state.request))

    def begin_load(
        self,
        state: RequestState,
        block_ids: Sequence[Sequence[int]],
        num_external: int,
        null_block: int,
        now_s: float,
    ) -> LoadJob | None:
        """None if no lease covers the load, the lease has ended (vLLM 0.33 may postpone a load), or
        there is nothing to load.

        block_ids, null_block: as for `load_runs`.
        num_external: tokens to load; may be fewer than offered.
        """
        hit = state.hit
        hit_tokens = hit.computed_tokens + num_external
        if hit.phase is not Phase.GRANTED or not 0 < hit_tokens <= hit.hit_tokens:
            return None
        if now_s >= hit.lease_ends_s or hit.connection != self._connection():
            return None
        runs = load_runs(self.groups, hit, block_ids, hit_tokens, null_block)
        if not runs:
            return None
        hit.phase = Phase.LOADING
        hit.is_cancelled = False
        hit.unhandled_loads += 1
        hit.hit_tokens = hit_tokens
        return LoadJob(
            state.request.request_id,
            f"{self._prefix}-l{next(self._counter)}",
            hit.lease_id,
            tuple(runs),
            self._config.load_timeout_s,
            self.attachments.loads(hit.attached, runs),
        )

    def load_failed(self, state: RequestState) -> None:
        state.hit.has_failed = True
        self.failed_loads.add(state.request.request_id)

    def end_load(
        self, state: RequestState, failed: bool, is_excused: bool = False
    ) -> tuple[int, ...]:
        """Releases the lease. Per group, the leading blocks that need no store; empty for a failed
        load.

        failed: hides the blocks' keys, unless this engine cancelled the load, the connection was
            lost, or `is_excused`.
        is_excused: the load reached its time limit, or a worker lost its session.
        """
        hit = state.hit
        if hit.phase is not Phase.LOADING:
            return ()
        stored: tuple[int, ...] = ()
        if failed:
            self.load_failed(state)
            has_server = self._session.connected and hit.connection == self._connection()
            is_fault = has_server and not is_excused and not hit.is_cancelled
            if is_fault:
                # `left_out` was not loaded, so it still counts as present.
                for named in self.groups.named(state.request, hit.leased, hit.left_out):
                    self.hidden.hide(named.group_index, named.hashes)
        else:
            stored = stored_blocks(self.groups, hit)
            if not hit.counted_hit:
                hit.counted_hit = True
                self._stats.add("hit_requests")
                self._stats.add("hit_tokens", hit.hit_tokens - hit.computed_tokens)
        # Last: if this method raises before, the load's end counts as not handled.
        hit.unhandled_loads = 0
        self.give_back(state)
        return stored

    def give_up(self, state: RequestState) -> None:
        """Never offers the request a hit again: how its load has ended is unknown."""
        self.load_failed(state)
        self.give_back(state)

    def give_back(self, state: RequestState) -> None:
        """Releases the lease and ignores the answer in flight. The request then has no hit."""
        hit = state.hit
        answer, lease_id = hit.answer, hit.lease_id
        if hit.miss is Miss.PARTIAL_BLOCK and hit.phase in (Phase.LEASING, Phase.GRANTED):
            # PARTIAL_BLOCK said that the hit was as long as possible.
            hit.miss = Miss.ABSENT
        hit.phase = Phase.IDLE
        hit.answer = None
        hit.lease_id = ""
        hit.ready = ()
        hit.attached = {}
        hit.asked = []
        hit.most_tokens = ANY_LENGTH
        if not lease_id:
            return
        self._session.release(lease_id)
        if answer is not None and not answer.done():
            # The server may grant the lease after this release: it is then released again.
            answer.add_done_callback(lambda _: self._session.release(lease_id))

    def shorten(self, state: RequestState, most_tokens: int) -> None:
        """Releases the lease; the next hit has at most `most_tokens`."""
        self.give_back(state)
        state.hit.most_tokens = most_tokens

    def forget(self, state: RequestState, failed_too: bool = False) -> None:
        """Has the request looked up anew. Releases its lease unless it is loading.

        failed_too: also forgets that a load of it has failed.
        """
        state.hit.hint = None
        state.hit.miss_until_s = 0.0
        if failed_too:
            state.hit.has_failed = False
        if state.hit.phase is not Phase.LOADING:
            self.give_back(state)

    def _ask(self, state: RequestState, now_s: float) -> Answer:
        groups = self._all_blocks(state.request)
        if not any(len(group.hashes) for group in groups):
            return NO_HIT
        span = state.trace and state.trace.lookup(groups)
        state.hit.answer = self._session.lookup(groups, span and span.traceparent)
        state.hit.asked.append(AnswerTime(state.hit.answer, span))
        deadline_s = now_s + self._config.lookup_timeout_s
        state.hit.phase = Phase.ASKED
        state.hit.deadline_s = deadline_s
        return ASK_AGAIN

    def _all_blocks(self, request: Any) -> list[GroupHashes]:
        limit = request.num_tokens - 1
        return self.groups.named(
            request,
            [range(self.groups.num_blocks(i, limit)) for i in range(len(self.groups.specs))],
        )

    def _after_call(self, state: RequestState, computed_tokens: int, now_s: float) -> Answer:
        """NO_HIT if the answer is late or an error."""
        hit, answer = state.hit, state.hit.answer
        assert answer is not None, "a phase with a call in flight"
        if not answer.done():
            if now_s < hit.deadline_s:
                return ASK_AGAIN
            self._stats.add("lookup_timeouts")
            self._overdue = answer
            hit.miss = Miss.LATE
            return self._miss(state, now_s)
        if answer.exception() is not None:
            hit.miss = Miss.REFUSED
            return self._miss(state, now_s)
        hit.answer = None
        if hit.phase is Phase.LEASING:
            return self._granted(state, answer.result(), computed_tokens, now_s)
        masks = tuple(
            self.hidden.mask(index, self.groups.hashes(state.request, index)[: len(mask)], mask)
            for index, mask in enumerate(answer.result())
        )
        return self._take_lease(state, masks, computed_tokens, now_s)

    def _take_lease(
        self, state: RequestState, masks: Masks, computed_tokens: int, now_s: float
    ) -> Answer:
        hit = state.hit
        limit = state.request.num_tokens - 1
        most_tokens = min(limit, hit.most_tokens)
        hit_tokens = self.groups.longest_hit(masks, computed_tokens, most_tokens)
        is_whole = self.groups.is_whole(masks, computed_tokens, limit)
        if hit.most_tokens < limit:
            hit.miss = Miss.NOT_ASKED
        else:
            hit.miss = Miss.PARTIAL_BLOCK if is_whole else self._why(state.request, hit_tokens)
        if hit_tokens <= computed_tokens:
            return self._miss(state, now_s)
        specs = self.groups.specs
        hit.leased = [
            range(max(blocks.start, computed_tokens // spec.block_tokens), blocks.stop)
            for spec, blocks in zip(specs, needed_blocks(specs, hit_tokens), strict=True)
        ]
        hit.left_out = self._left_out(hit_tokens)
        groups = self.groups.named(state.request, hit.leased, hit.left_out)
        asked, ttl_s = groups + self.attachments.asked(groups), LEASE_TTL_S
        span = state.trace and state.trace.lease(asked)
        hit.lease_id = f"{self._prefix}-r{next(self._counter)}"
        hit.answer = self._session.acquire(hit.lease_id, asked, ttl_s, span and span.traceparent)
        hit.asked.append(AnswerTime(hit.answer, span))
        hit.phase = Phase.LEASING
        hit.lease_asked_s = now_s
        hit.connection = self._connection()
        hit.computed_tokens = computed_tokens
        hit.hit_tokens = hit_tokens
        hit.deadline_s = now_s + self._config.lookup_timeout_s
        return ASK_AGAIN

    def _granted(
        self, state: RequestState, grant: LeaseGrant, computed_tokens: int, now_s: float
    ) -> Answer:
        hit, num_groups = state.hit, len(state.hit.leased)
        ttl_s = grant.ttl_s or LEASE_TTL_S
        hit.lease_ends_s = hit.lease_asked_s + ttl_s
        if now_s >= hit.lease_ends_s:
            # A step has outlasted the lease. One more lease is tried.
            if hit.has_expired:
                hit.miss = Miss.LATE
                return self._miss(state, now_s)
            hit.has_expired = True
            self.give_back(state)
            return self._match(state, computed_tokens, now_s)
        if computed_tokens != hit.computed_tokens:
            # vLLM's own hit has changed meanwhile, as when another request has computed a common
            # prefix.
            self.give_back(state)
            return self._match(state, computed_tokens, now_s)
        hit.ready = pinned_masks(self.groups, hit, grant.pinned[:num_groups])
        hit.attached = self.attachments.granted(grant.pinned[num_groups:])
        hit_tokens = self.groups.longest_hit(hit.ready, hit.computed_tokens, hit.hit_tokens)
        if hit_tokens < hit.hit_tokens:
            self._stats.add("short_grants")
            hit.miss = Miss.REFUSED
        if hit_tokens <= computed_tokens:
            return self._miss(state, now_s)
        hit.hit_tokens = hit_tokens
        hit.phase = Phase.GRANTED
        hit.granted_s = now_s
        hit.offer_until_s = now_s + (hit.lease_ends_s - now_s) * LEASE_SHARE_BEFORE_LOAD
        if not hit.counted:
            hit.counted = True
            self._stats.add("offered_requests")
            self._stats.add("offered_tokens", hit_tokens - computed_tokens)
        return hit_tokens - computed_tokens, True

    def _why(self, request: Any, hit_tokens: int) -> Miss:
        for index, spec in enumerate(self.groups.specs if self.hidden else ()):
            at = hit_tokens // spec.block_tokens
            if self.hidden.has(index, self.groups.hashes(request, index)[at : at + 1]):
                return Miss.FAILED_LOAD
        return Miss.ABSENT

    def _miss(self, state: RequestState, now_s: float) -> Answer:
        self.give_back(state)
        state.hit.miss_until_s = now_s + MISS_MEMORY_S
        if not state.hit.counted:
            state.hit.counted = True
            self._stats.add("miss_requests")
        return NO_HIT
