"""Finds the hit of a request in the server: the leading blocks of the request that the engine can
load. First a hint, from the block table, says which blocks are ready. Then the engine asks the
server for a lease, which pins these blocks. The server's grant says which blocks the lease has
pinned. Scheduler thread only; waits for answers no longer than `Patience` allows.

Phases of a request's hit (`request.Phase`):

    IDLE -> ASKED (lookup call, if no block table is mapped or a lower tier may have further blocks)
    -> LEASING -> GRANTED -> LOADING -> IDLE

Always true:
- A request has at most one lease. Every lease is released or expires.
- If the server does not answer a call for a request within `lookup_timeout_s`, the request misses
  and its lease is released. Until the late answer arrives, hotkv makes no calls for other requests:
  a request that has neither a lease nor a call in flight misses at once.
- A hit does not cover the request's last token, which the engine always computes.
- Blocks of a failed load are not offered again until they are stored again, or until the server has
  lost its cache (it then has a new *epoch*, a number). An engine that stores nothing offers them
  again after a minute.
- Sketches (compact forms of keys, for sparse attention) never change the length of a hit.

`HitFinder`, at the end of the file, is the entry point. It uses the other parts of the file:
`HiddenKeys` (blocks whose load failed), `TableProbe` (looks up in the block table), arithmetic over
the blocks of a hit, and `Patience` (short waits for the server's answers).
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from hotkv_client.session import Session
from hotkv_client.types import BoolMask, GroupHashes, Int32s, LeaseGrant, LoadRun
from hotkv_proto.groups import PREFIX_CLOSED, Int64s, longest_prefix, needed_blocks
from hotkv_proto.reports import Miss
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.costs.answer_time import AnswerTime
from hotkv_vllm.metadata import LoadJob
from hotkv_vllm.scheduler.groups import CachedGroups, SketchPlanner
from hotkv_vllm.scheduler.loads import FailedLoads
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

# --------------------------------------------------------------------------- keys whose load failed

MAX_HIDDEN_KEYS = 1 << 16
"""Most keys that `HiddenKeys` remembers. Beyond this number the oldest keys are forgotten."""
HIDDEN_FOR_S = 60.0
"""For engines that store nothing (kv_role `kv_consumer`): hidden keys (of blocks whose load failed)
are offered again after this time at the latest, seconds. Such an engine never learns that a block
was stored again."""


class HiddenKeys:
    """Remembers the keys of blocks whose load has failed. A key is (group, block hash).

    Such a *hidden* key counts as absent from the server: it is not offered as a hit, and its block
    is stored again. A key stays hidden until a store of its block has succeeded, or until the
    server has lost the contents of its cache (it then has a new epoch, a number). In an engine that
    stores nothing, a key stays hidden for at most HIDDEN_FOR_S.

    stores: False if the engine stores nothing.
    """

    def __init__(self, *, stores: bool = True) -> None:
        self._keys: dict[tuple[int, bytes], None] = {}
        self._stores = stores
        self._epoch = self._period = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"HiddenKeys({len(self._keys)})"

    def set_epoch(self, epoch: int, now_s: float) -> None:
        """Records the server's epoch, a number that changes when the server loses the cache's
        contents. If the epoch has changed, removes all hidden keys (keys of blocks whose load
        failed). In an engine that stores nothing, also removes all hidden keys every HIDDEN_FOR_S.
        """
        period = 0 if self._stores else int(now_s // HIDDEN_FOR_S)
        if (epoch, period) != (self._epoch, self._period):
            self._epoch, self._period = epoch, period
            self._keys.clear()

    def hide(self, group: int, hashes: Iterable[bytes]) -> None:
        """Adds the keys of blocks whose load failed, so that these blocks are not offered as
        hits."""
        self._keys.update(((group, h), None) for h in hashes)
        excess = len(self._keys) - MAX_HIDDEN_KEYS
        for key in list(itertools.islice(self._keys, max(0, excess))):
            del self._keys[key]

    def clear(self, group: int, block_hash: bytes) -> None:
        """Removes the key of a block, because the block was stored again and can be a hit."""
        self._keys.pop((group, block_hash), None)

    def clear_all(self) -> None:
        """Removes the keys of all blocks whose load failed."""
        self._keys.clear()

    def has(self, group: int, hashes: Sequence[bytes]) -> bool:
        """Returns True if one of these blocks of the group is hidden because its load failed."""
        return any((group, h) in self._keys for h in hashes)

    def mask(self, group: int, hashes: Sequence[bytes], ready: BoolMask) -> BoolMask:
        """Returns the mask `ready`, set to False for the blocks whose keys are hidden because their
        load failed. Does not change `ready` itself.

        hashes: hashes of blocks of the group.
        ready: for each of these blocks, True if the server has it ready.
        """
        if not self._keys:
            return ready
        return ready & np.fromiter(
            ((group, h) not in self._keys for h in hashes), np.bool_, len(hashes)
        )


# ---------------------------------------------------------------------------------- the block table


class TableProbe:
    """Looks up in the block table (in shared memory) which blocks of a request the server has
    ready. The result is a hint, because the server may evict a block at any time; only the grant of
    a lease is certain.

    Looks up group by group, beginning with the groups of full attention: every hit ends before
    their first missing block, so in the other groups fewer blocks need to be looked up.
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
        """Returns which blocks of the request are ready, per group; None if no table is mapped. The
        mask of a group may be shorter than the request: blocks that could not make the hit longer
        than `computed_tokens` are not looked up.

        computed_tokens: length of the request's hit in vLLM's own prefix cache.
        """
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
                # No hit reaches beyond the first missing block of this group, so in the other
                # groups no later block is looked up.
                limit = min(limit, spec.reach_tokens(masks[index]))
                if limit <= computed_tokens:
                    break
        return tuple(masks)

    def may_lie_below(self, request: Any, masks: Masks, computed_tokens: int) -> bool:
        """Returns True if the request may have a longer hit than the block table shows. The table
        lists only blocks in host memory, so the server may have further blocks in lower tiers.

        masks: the ready blocks according to the block table, as `ready` returns them.
        computed_tokens: length of the request's hit in vLLM's own prefix cache.
        """
        limit = request.num_tokens - 1
        return self._session.has_tiers and not self._groups.is_whole(masks, computed_tokens, limit)

    def _prefix(self, index: int, hashes: Sequence[bytes], first: int) -> BoolMask | None:
        """Returns a mask of the leading blocks of a full-attention group that are ready, up to the
        first missing block. Looks up only some of the blocks, because blocks after a missing block
        are rarely ready (`longest_prefix`). Returns None if no table is mapped.

        index: index of the group.
        hashes: the hashes of the request's blocks in the group.
        first: number of leading blocks that are in vLLM's own prefix cache. They are not looked up,
            and count as ready.
        """
        # Looks up the first block alone: for most requests that miss, already this block is
        # missing.
        head = self._session.probe(index, hashes[first : first + 1])
        if head is None:
            return None
        left = len(hashes) - first if head.all() else 0

        def ready_at(places: Int64s) -> BoolMask:
            ready = self._session.probe(index, [hashes[first + place] for place in places.tolist()])
            return np.zeros(len(places), np.bool_) if ready is None else ready

        return np.arange(len(hashes)) < first + longest_prefix(ready_at, max(0, left))


# ------------------------------------------------------------------------------ the blocks of a hit

# Arithmetic over the blocks of a hit: which blocks its lease has pinned, into which device blocks
# to load them, and which blocks need not be stored afterwards. Pure.
#
# Always true: only blocks that the lease pins are loaded.


def leased_positions(blocks: range, left_out: range) -> Int32s:
    """Returns which of a group's blocks a lease covers: the indices in `blocks` that are not in
    `left_out`, in ascending order, int32. Both ranges contain indices among the request's blocks.
    """
    found = np.arange(blocks.start, blocks.stop, dtype=np.int32)
    return found[(found < left_out.start) | (found >= left_out.stop)]


def stored_blocks(groups: CachedGroups, hit: HitState) -> tuple[int, ...]:
    """Returns, per group, how many leading blocks of the request need not be stored after the load
    of its hit, because the server has these blocks and their sketches (compact forms of
    keys)."""
    found = []
    for index, spec in enumerate(groups.specs):
        num_blocks = hit.hit_tokens // spec.block_tokens
        mask = hit.represented.get(index)
        if mask is not None and not mask.all():
            # A block that was leased without its sketch is considered for storing once
            # more, so that its sketch is stored.
            positions = leased_positions(hit.leased[index], hit.left_out)
            num_blocks = min(num_blocks, int(positions[np.argmin(mask)]))
        found.append(num_blocks)
    return tuple(found)


def pinned_masks(groups: CachedGroups, hit: HitState, pinned: Sequence[BoolMask]) -> Masks:
    """Returns, per group, a mask of the hit's blocks that are pinned, from the request's first
    block on.

    A hit consists of leased blocks and of other blocks. Blocks before the leased blocks count as
    not pinned. Blocks in `hit.left_out` count as pinned: they are not leased, but the request's
    residency (reserved memory in the server) pins them.

    pinned: per group, the server's answer: which of the leased blocks the lease has pinned.
    """
    masks = []
    for index, (blocks, is_pinned) in enumerate(zip(hit.leased, pinned, strict=True)):
        # In a drafter's group, the block after the hit must be ready, but it is not loaded. So it
        # is not leased, and counts as pinned.
        mask = np.ones(groups.num_blocks(index, hit.hit_tokens), np.bool_)
        mask[: blocks.stop] = False
        mask[leased_positions(blocks, hit.left_out)] = is_pinned
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
    """Returns the blocks to load for a hit, each with its device block, as a run per group. Returns
    an empty list if the lease does not cover the hit.

    block_ids: per group, the ids of the request's device blocks, in order.
    hit_tokens: length of the hit; may be shorter than the leased hit.
    null_block: id of vLLM's null block. In `block_ids` it marks a block that the request does not
        hold on the device (for example before a sliding window). Such a block is not loaded.
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
        leased = leased_positions(hit.leased[index], hit.left_out)
        at = np.searchsorted(leased, wanted).astype(np.int32)
        is_leased = at[-1] < len(leased) and np.array_equal(leased[at], wanted)
        if not is_leased or not hit.ready[index][wanted].all():
            return []
        runs.append(LoadRun(index, at, table))
    return runs


# ------------------------------------------------------------------------------ waiting for answers

ANSWER_PATIENCE_S = 0.002
"""Longest time that one step of the scheduler waits for the server's answers, seconds. With
asynchronous scheduling the workers compute meanwhile."""
MOST_PASSED_BY = 63
"""If answers did not come in time in earlier waits, `Patience` skips waits. It skips at most this
many in succession."""


def _is_there_in(answer: "Future[Any]", seconds: float) -> bool:
    return bool(wait((answer,), seconds).done)


class Patience:
    """Waits a moment for the server's answers. The server usually answers within a step, but vLLM
    asks the connector for an answer only once per step. Without the wait, each hit would delay its
    request by a step.

    Always true: all waits of one step together last at most ANSWER_PATIENCE_S.

    If an answer does not come during a wait, `Patience` skips the next wait. If no answer comes
    during the following wait either, `Patience` skips the next 3 waits, then the next 7, and so on,
    up to MOST_PASSED_BY waits. After a wait in which the answer comes, no wait is skipped. While
    the engine is idle, it may also sleep for a moment (`rest`). Scheduler thread only.

    is_used: True if this step has waited.
    clock: returns the time in seconds.
    wait_for: takes an answer and a number of seconds, waits for the answer at most so long, and
        returns True if the answer has come.
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
        """Allows waits of up to ANSWER_PATIENCE_S again. Called when the engine plans its next
        step."""
        self._left_s = ANSWER_PATIENCE_S
        self._has_rested = self.is_used = False

    def rest(self, seconds: float, answer: "Future[Any] | None") -> None:
        """Blocks for `seconds`, or until the answer comes. Returns at once if this method has
        already blocked in this step.

        Used while the engine is idle. Without the rest vLLM would ask the connector again at once,
        in a busy loop. That takes processor time from the threads that load the blocks.

        answer: the answer to wait for; None only sleeps.
        """
        if self._has_rested:
            return
        self._has_rested = self.is_used = True
        if answer is None:
            time.sleep(seconds)
        else:
            self._wait_for(answer, seconds)

    def awaits(self, answer: "Future[Any]") -> bool:
        """Waits for the answer, and returns True if it has come. Does not wait if the time for
        waits in this step is used up, or if this wait is skipped because answers did not come in
        earlier waits."""
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
"""After a miss, the request is not looked up again for this time, seconds."""
HINT_MEMORY_S = 0.02
"""When a request arrives, it is looked up in the block table or by a call to the server. The result
is used for at most this time after the arrival, seconds; later the request is looked up anew."""
LEASE_SHARE_BEFORE_LOAD = 0.5
"""A load must begin within this share of its lease's lifetime. A load that begins later might not
end before the lease expires."""
NEVER_AGAIN = 1 << 30
"""As a request's number of failed loads, this exceeds every limit: the request is never offered a
hit again."""


class HitFinder:
    """Finds the hits of requests, and acquires and releases the leases on them. Owns the `HitState`
    of each request (the state of its hit)."""

    def __init__(
        self,
        session: Session,
        groups: CachedGroups,
        config: ConnectorConfig,
        stats: HotKVStats,
        id_prefix: str,
        sketches: SketchPlanner | None = None,
        left_out: Callable[[int], range] = lambda hit_tokens: range(0),
        failed_loads: FailedLoads | None = None,
        *,
        stores: bool = True,
        connection: Callable[[], int] = lambda: 0,
    ) -> None:
        """Creates the finder for a session (a connection to the server for one key space, that is,
        for a model in a configuration).

        groups: computes the hashes of a request's blocks, and lengths of hits.
        id_prefix: beginning of the ids of all leases and loads.
        sketches: plans which sketches (compact forms of keys) are leased and loaded
            with blocks; None without sketches.
        left_out: takes the length of a hit in tokens, and returns the blocks of the first group
            that a load of this hit omits, as indices among the request's blocks. In an engine with
            residency (contexts beyond device memory) these blocks stay in the server only.
        failed_loads: the engine's record of requests whose load failed. The engine keeps it when
            the key space changes. None creates a new record.
        stores: False if the engine stores nothing.
        connection: returns the number of the session's present connection to the server.
        """
        self._left_out = left_out
        self._connection = connection
        self.groups = groups
        self.sketches = sketches or SketchPlanner(len(groups.specs))
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
        """Looks a new request up in the block table, and keeps the result as a hint for the later
        `match`. Also sends a lookup to the server if no table is mapped, or if a lower tier may
        have further blocks."""
        if not self._session.connected or not self.can_hit(state.request, 0):
            return
        self.hidden.set_epoch(self._session.epoch, now_s)
        hint = state.hit.hint = self.table.ready(state.request, 0)
        state.hit.hint_until_s = now_s + HINT_MEMORY_S
        if hint is None or self.table.may_lie_below(state.request, hint, 0):
            self._ask(state, now_s)

    def can_hit(self, request: Any, computed_tokens: int) -> bool:
        """Returns True if a server that had all blocks of the request could give it a hit longer
        than `computed_tokens`."""
        return self.groups.most_tokens(request.num_tokens - 1) > computed_tokens

    def match(self, state: RequestState, computed_tokens: int, now_s: float) -> Answer:
        """Returns the answer to vLLM's question how long the request's hit is. Waits a moment for
        the server's answer if `Patience` allows it.

        computed_tokens: length of the hit in vLLM's own prefix cache.
        """
        answer = self._match(state, computed_tokens, now_s)
        while answer == ASK_AGAIN and state.hit.answer and self.patience.awaits(state.hit.answer):
            answer = self._match(state, computed_tokens, now_s)
        return answer

    def _match(self, state: RequestState, computed_tokens: int, now_s: float) -> Answer:
        """Advances the request's hit by one phase (`Phase`), without waiting for the server, and
        returns the answer to vLLM's question for the hit."""
        hit = state.hit
        num_failed = hit.failed_loads + hit.unproved_loads
        if not self._session.connected or num_failed > self._config.max_load_retries:
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
            # The answer to the lookup may be outdated, because the request has waited in vLLM's
            # queue. The server may have further blocks by now, so the request is looked up again.
            self.give_back(state)
        if hit.lease_id and hit.connection != self._connection():
            # The server has ended the lease, because the connection on which it was acquired has
            # ended.
            self.give_back(state)
        if hit.phase in (Phase.ASKED, Phase.LEASING):
            return self._after_call(state, computed_tokens, now_s)
        if hit.phase is Phase.GRANTED:
            if self.failed_loads.outwait(hit.granted_s, now_s):
                hit.failed_loads = NEVER_AGAIN
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
        # The hint is used only if vLLM's own prefix cache has no hit, because it was computed as if
        # the device held no blocks of the request.
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
        """Sends a lookup to the server: asks which of the blocks that a hit of the request could
        use are ready. Does not lease the blocks."""
        return self._session.lookup(self._all_blocks(state.request))

    def begin_load(
        self,
        state: RequestState,
        block_ids: Sequence[Sequence[int]],
        num_external: int,
        null_block: int,
        now_s: float,
    ) -> LoadJob | None:
        """Begins the load of a granted hit and returns the order for the workers. Returns None if
        no lease covers the load, if the lease has ended (vLLM 0.33 may postpone a load), or if
        there is no block to load.

        block_ids: per group, the ids of the request's device blocks, in order.
        num_external: number of tokens to load; may be less than the connector has offered to vLLM.
        null_block: id of vLLM's null block. In `block_ids` it marks a block that the request does
            not hold on the device; such a block is not loaded.
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
        hit.unproved_loads += 1
        hit.hit_tokens = hit_tokens
        return LoadJob(
            state.request.request_id,
            f"{self._prefix}-l{next(self._counter)}",
            hit.lease_id,
            tuple(runs),
            self._config.load_timeout_s,
            self.sketches.loads(hit.represented, runs),
        )

    def load_failed(self, state: RequestState) -> None:
        """Counts a failed load of the request, and adds the request to `failed_loads`. The failure
        has been reported to vLLM, or will be."""
        state.hit.failed_loads += 1
        self.failed_loads.add(state.request.request_id)

    def end_load(
        self, state: RequestState, failed: bool, is_excused: bool = False
    ) -> tuple[int, ...]:
        """Handles the end of a load and releases its lease. Returns, per group, how many leading
        blocks of the request need not be stored because the server has them; empty for a failed
        load.

        failed: True if the load failed. The keys of its blocks are then hidden (`HiddenKeys`),
            unless the blocks are not the cause of the failure: this engine has cancelled the load,
            the connection was lost, or `is_excused` is True.
        is_excused: True if the load reached its time limit, or if a worker has lost its session.
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
                # From now on the blocks of the failed load count as absent from the server. The
                # blocks in `left_out` still count as present, because they were not loaded.
                for named in self.groups.named(state.request, hit.leased, hit.left_out):
                    self.hidden.hide(named.group_index, named.hashes)
        else:
            stored = stored_blocks(self.groups, hit)
            if not hit.counted_hit:
                hit.counted_hit = True
                self._stats.add("hit_requests")
                self._stats.add("hit_tokens", hit.hit_tokens - hit.computed_tokens)
        # Set at the end: if this method raises before, the load still counts as a load whose end
        # was not handled.
        hit.unproved_loads = 0
        self.give_back(state)
        return stored

    def give_up(self, state: RequestState) -> None:
        """Marks the request so that it is never offered a hit again, because it is not known how
        its load has ended."""
        self.load_failed(state)
        state.hit.failed_loads = NEVER_AGAIN
        self.give_back(state)

    def give_back(self, state: RequestState) -> None:
        """Releases the request's lease, and ignores the answer to its call in flight. The request
        has no hit afterwards."""
        hit = state.hit
        answer, lease_id = hit.answer, hit.lease_id
        if hit.miss is Miss.PARTIAL_BLOCK and hit.phase in (Phase.LEASING, Phase.GRANTED):
            # PARTIAL_BLOCK says that the hit was as long as possible. That is no longer true,
            # because the hit is given up.
            hit.miss = Miss.ABSENT
        hit.phase = Phase.IDLE
        hit.answer = None
        hit.lease_id = ""
        hit.ready = ()
        hit.represented = {}
        hit.asked = []
        hit.most_tokens = ANY_LENGTH
        if not lease_id:
            return
        self._session.release(lease_id)
        if answer is not None and not answer.done():
            # The call for the lease is unanswered. If the server grants the lease after this
            # release, the lease must be released again.
            answer.add_done_callback(lambda _: self._session.release(lease_id))

    def shorten(self, state: RequestState, most_tokens: int) -> None:
        """Releases the request's lease. The request's next hit has at most `most_tokens` tokens."""
        self.give_back(state)
        state.hit.most_tokens = most_tokens

    def forget(self, state: RequestState, failed_too: bool = False) -> None:
        """Discards everything that is known about a request's hit, so that the request is looked up
        anew. Releases its lease, unless a load under the lease is in progress.

        failed_too: True also resets the request's number of failed loads to 0.
        """
        state.hit.hint = None
        state.hit.miss_until_s = 0.0
        if failed_too:
            state.hit.failed_loads = 0
        if state.hit.phase is not Phase.LOADING:
            self.give_back(state)

    def _ask(self, state: RequestState, now_s: float) -> Answer:
        """Sends a lookup to the server, because there is no block table to probe, or because the
        table does not list the blocks of lower tiers."""
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
        """Continues a hit whose lookup or lease call is in flight. Returns ASK_AGAIN (vLLM asks
        again in its next step) while the server's answer has not come. Returns NO_HIT if the answer
        is late or an error."""
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
        asked, ttl_s = groups + self.sketches.asked(groups), self._config.lease_ttl_s
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
        ttl_s = grant.ttl_s or self._config.lease_ttl_s
        hit.lease_ends_s = hit.lease_asked_s + ttl_s
        if now_s >= hit.lease_ends_s:
            # The lease expired before vLLM asked for the answer, because a step has lasted longer
            # than the lease. One more lease is tried.
            if hit.has_expired:
                hit.miss = Miss.LATE
                return self._miss(state, now_s)
            hit.has_expired = True
            self.give_back(state)
            return self._match(state, computed_tokens, now_s)
        if computed_tokens != hit.computed_tokens:
            # vLLM's own hit has changed since the lease was asked for, for example because another
            # request has computed a common prefix. So the request is looked up anew.
            self.give_back(state)
            return self._match(state, computed_tokens, now_s)
        hit.ready = pinned_masks(self.groups, hit, grant.pinned[:num_groups])
        hit.represented = self.sketches.granted(grant.pinned[num_groups:])
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
        """Returns why the hit of a request ends at `hit_tokens`: FAILED_LOAD if the next block is
        hidden because its load has failed; otherwise ABSENT."""
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
