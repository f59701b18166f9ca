"""How one request comes to its hit: hint, lease, grant. Scheduler thread only; never blocks.

    IDLE -> ASKED (lookup call, only if no block table is mapped) -> LEASING -> GRANTED -> LOADING
    -> IDLE

What is always true: at most one lease per request; every lease taken is given back or runs out by
itself; an answer that comes after its deadline is a miss and its lease is given back, and while one
is overdue nobody else waits; a hit leaves at least one token to compute; keys of a failed load are
not offered again until the server answers for them or has a new epoch; representations never make a
hit longer or shorter.
"""

import enum
import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotkv.groups import (
    PREFIX_CLOSED,
    GroupSpec,
    Int64s,
    longest_hit,
    longest_prefix,
    needed_blocks,
)
from hotkv.keys import group_hashes
from hotkv.retention import NO_RETENTION, Retention
from hotkv_client.types import GroupHashes, LeaseGrant, LoadRun
from hotkv_vllm.adapters import Adapters
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.link import BoolMask, CacheSession
from hotkv_vllm.metadata import LoadJob
from hotkv_vllm.scheduler.representation_planner import RepresentationPlanner
from hotkv_vllm.stats import HotKVStats

MISS_MEMORY_S = 0.05
"""A request that missed is not looked up again for this long."""
HINT_MEMORY_S = 0.02
"""A hint found when the request arrived is used for this long."""
LEASE_SHARE_BEFORE_LOAD = 0.5
"""A grant older than this share of its lifetime is not begun any more."""
MAX_HIDDEN_KEYS = 1 << 16
FAILED_PATIENCE_S = 0.25
"""How long a hit may wait for admission while requests whose load failed wait too; see
`HitFinder.failed_waiting`."""

NO_HIT: tuple[int, bool] = (0, False)
Masks = tuple[BoolMask, ...]


class Phase(enum.Enum):
    """Where a request stands with its hit."""

    IDLE = "idle"
    ASKED = "asked"
    LEASING = "leasing"
    GRANTED = "granted"
    LOADING = "loading"


@dataclass(slots=True)
class RequestState:
    """What the connector knows of one request of the scheduler.

    `computed_tokens`: local hit for which the lease was taken. `leased`: leased blocks per group;
    `represented`: by group, of which of them the representation is leased too. `stored_blocks`: per
    group the first block not yet considered for storing; `next_store_tokens`: computed tokens at
    which another block is full. `may_store`: False where its blocks build on what a reset of the
    cache has made void. `device_hit_tokens`: hit in the engine's own cache, as last asked.
    `unproved_loads`: begun, and not known to have ended well.
    """

    request: Any
    stored_blocks: list[int]
    next_store_tokens: int
    retention: Retention = NO_RETENTION
    arrived_s: float = 0.0
    device_hit_tokens: int = 0
    reported: bool = False
    may_store: bool = True
    phase: Phase = Phase.IDLE
    answer: "Future[Any] | None" = None
    deadline_s: float = 0.0
    lease_id: str = ""
    computed_tokens: int = 0
    hit_tokens: int = 0
    leased: list[range] = field(default_factory=list)
    ready: Masks = ()
    represented: dict[int, BoolMask] = field(default_factory=dict)
    granted_s: float = 0.0
    lease_ends_s: float = 0.0
    hint: Masks | None = None
    hint_until_s: float = 0.0
    miss_until_s: float = 0.0
    failed_loads: int = 0
    unproved_loads: int = 0
    counted: bool = False
    counted_hit: bool = False


class HiddenKeys:
    """Keys whose load failed; not offered, and stored again, until the server has answered for
    them."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, bytes], None] = {}
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._keys)

    def set_epoch(self, epoch: int) -> None:
        """A new epoch clears everything."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._keys.clear()

    def hide(self, group: int, hashes: Iterable[bytes]) -> None:
        self._keys.update(((group, h), None) for h in hashes)
        excess = len(self._keys) - MAX_HIDDEN_KEYS
        for key in list(itertools.islice(self._keys, max(0, excess))):
            del self._keys[key]

    def clear(self, group: int, block_hash: bytes) -> None:
        self._keys.pop((group, block_hash), None)

    def clear_all(self) -> None:
        self._keys.clear()

    def mask(self, group: int, hashes: Sequence[bytes], ready: BoolMask) -> BoolMask:
        """`ready` without the hidden keys."""
        if not self._keys:
            return ready
        return ready & np.fromiter(
            ((group, h) not in self._keys for h in hashes), np.bool_, len(hashes)
        )


class HitFinder:
    """Finds hits and holds leases for requests."""

    def __init__(
        self,
        session: CacheSession,
        specs: Sequence[GroupSpec],
        hash_block_tokens: int,
        alignment_tokens: int,
        config: ConnectorConfig,
        stats: HotKVStats,
        id_prefix: str,
        draft_groups: frozenset[int] = frozenset(),
        represented: RepresentationPlanner | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self.represented = represented or RepresentationPlanner(len(self.specs))
        self._adapters = adapters
        self.alignment_tokens = alignment_tokens
        self.draft_groups = draft_groups
        self._probe_order = sorted(
            range(len(self.specs)), key=lambda index: self.specs[index].kind not in PREFIX_CLOSED
        )
        self.hidden = HiddenKeys()
        self._session = session
        self._hash_block_tokens = hash_block_tokens
        self._config = config
        self._stats = stats
        self._prefix = id_prefix
        self._counter = itertools.count(1)
        self._overdue: Future[Any] | None = None
        # vLLM 0.32 goes on reserving blocks for a request whose load failed until it is scheduled,
        # and admits async loads (not plain prefills) only beside all such reservations. If nothing
        # else fits, a hit would wait for ever, so it is given up instead.
        self.failed_waiting: set[str] = set()
        # It also leaves such a request at the head of its queue of requests that hold blocks,
        # although it holds none any more: if it does not fit, those behind it never give theirs
        # back. Answered 'ask again' once, it steps aside into the ordinary queue.
        self.step_aside: set[str] = set()

    def hashes(self, request: Any, group: int) -> Sequence[bytes]:
        """Hashes that name one group's blocks, as far as the request's tokens are known; none while
        its adapter is not known."""
        hashes: Sequence[bytes] = group_hashes(
            self.keys(request), self._hash_block_tokens, self.specs[group].block_tokens
        )
        return hashes

    def keys(self, request: Any) -> Sequence[bytes]:
        """As `hashes`, one for each of vLLM's hash blocks."""
        plain: Sequence[bytes] = request.block_hashes
        return (
            plain
            if self._adapters is None or request.lora_request is None
            else self._adapters.keys(request)
        )

    def arrive(self, state: RequestState, now_s: float) -> None:
        """A new request: look at the table, or ask the server where there is none."""
        if not self._session.connected:
            return
        self.hidden.set_epoch(self._session.epoch)
        state.hint = self._probe(state, 0)
        if state.hint is not None:
            state.hint_until_s = now_s + HINT_MEMORY_S
        elif self._session.connected:
            self._ask(state, now_s)

    def match(
        self, state: RequestState, computed_tokens: int, now_s: float
    ) -> tuple[int | None, bool]:
        """vLLM's question: how many tokens beyond `computed_tokens`; None for 'ask again'."""
        if (
            not self._session.connected
            or max(state.failed_loads, state.unproved_loads) > self._config.max_load_retries
        ):
            self.give_back(state)
            return NO_HIT
        self.hidden.set_epoch(self._session.epoch)
        if self._overdue is not None and self._overdue.done():
            self._overdue = None
        if state.phase is Phase.ASKED:
            return self._after_lookup(state, computed_tokens, now_s)
        if state.phase is Phase.LEASING:
            return self._after_lease(state, computed_tokens, now_s)
        if state.phase is Phase.GRANTED:
            if self.failed_waiting and now_s > state.granted_s + FAILED_PATIENCE_S:
                state.failed_loads = self._config.max_load_retries + 1
                return self._miss(state, now_s)
            if computed_tokens == state.computed_tokens and now_s < state.lease_ends_s:
                return state.hit_tokens - computed_tokens, True
            self.give_back(state)
        if now_s < state.miss_until_s or self._overdue is not None:
            return NO_HIT
        # The hint was taken as if the engine held nothing itself.
        is_good = now_s < state.hint_until_s and not computed_tokens
        masks = state.hint if is_good else self._probe(state, computed_tokens)
        state.hint = None
        if masks is None:
            return self._ask(state, now_s)
        return self._take_lease(state, masks, computed_tokens, now_s)

    def begin_load(
        self,
        state: RequestState,
        block_ids: Sequence[Sequence[int]],
        num_external: int,
        null_block: int,
    ) -> LoadJob | None:
        """The load of a granted hit into allocated blocks; None where the lease does not cover it.

        `block_ids`: the request's block table per group. Blocks that vLLM left out (null) are not
        loaded.
        """
        hit = state.computed_tokens + num_external
        if state.phase is not Phase.GRANTED or not 0 < hit <= state.hit_tokens:
            return None
        runs = []
        for index, (spec, blocks) in enumerate(
            zip(self.specs, needed_blocks(self.specs, hit), strict=True)
        ):
            first = max(blocks.start, state.computed_tokens // spec.block_tokens)
            table = np.asarray(block_ids[index][first : blocks.stop], np.int32)
            wanted = np.arange(first, first + len(table), dtype=np.int32)[table != null_block]
            table = table[table != null_block]
            if len(table) and (
                wanted[0] < state.leased[index].start or not state.ready[index][wanted].all()
            ):
                return None
            if first + len(block_ids[index][first : blocks.stop]) < blocks.stop:
                return None
            if len(table):
                runs.append(LoadRun(index, wanted - np.int32(state.leased[index].start), table))
        if not runs:
            return None
        state.phase = Phase.LOADING
        state.unproved_loads += 1
        state.hit_tokens = hit
        if not state.counted_hit:
            state.counted_hit = True
            self._stats.add("hit_requests")
            self._stats.add("hit_tokens", num_external)
        transfer_id = f"{self._prefix}-l{next(self._counter)}"
        along = self.represented.loads(state.represented, runs)
        return LoadJob(
            state.request.request_id,
            transfer_id,
            state.lease_id,
            tuple(runs),
            self._config.load_timeout_s,
            along,
        )

    def load_failed(self, state: RequestState) -> None:
        """vLLM was told, or will be, that the request's load failed."""
        state.failed_loads += 1
        self.failed_waiting.add(state.request.request_id)
        self.step_aside.add(state.request.request_id)

    def end_load(self, state: RequestState, failed: bool) -> None:
        """The load has ended; its lease is given back. Keys of a failed load are hidden."""
        if state.phase is not Phase.LOADING:
            return
        if failed:
            self.load_failed(state)
            for index, blocks in enumerate(state.leased):
                self.hidden.hide(
                    index, self.hashes(state.request, index)[blocks.start : blocks.stop]
                )
        else:
            state.unproved_loads = 0
            for index, spec in enumerate(self.specs):
                stored = state.hit_tokens // spec.block_tokens
                if index in state.represented and not state.represented[index].all():
                    # Blocks that came without a representation are looked at once more, so that
                    # they get one.
                    stored = min(
                        stored, state.leased[index].start + int(np.argmin(state.represented[index]))
                    )
                state.stored_blocks[index] = max(state.stored_blocks[index], stored)
        self.give_back(state)

    def give_up(self, state: RequestState) -> None:
        """How the request's load ended is not known: it is offered nothing more."""
        state.failed_loads = 1 << 30
        self.failed_waiting.add(state.request.request_id)
        self.step_aside.add(state.request.request_id)
        self.give_back(state)

    def give_back(self, state: RequestState) -> None:
        """Ends whatever the request holds; nothing where it holds nothing."""
        answer, lease_id = state.answer, state.lease_id
        state.phase, state.answer, state.lease_id, state.ready, state.represented = (
            Phase.IDLE,
            None,
            "",
            (),
            {},
        )
        if not lease_id:
            return
        self._session.release(lease_id)
        if answer is not None and not answer.done():
            # Granted after all, behind the release: let go again.
            answer.add_done_callback(lambda _: self._session.release(lease_id))

    def _probe(self, state: RequestState, computed_tokens: int) -> Masks | None:
        """Which blocks the table says are ready, per group; None where no table is mapped. A hint:
        a lease settles it."""
        limit = state.request.num_tokens - 1
        masks: list[BoolMask] = [np.zeros(0, np.bool_)] * len(self.specs)
        for index in self._probe_order:
            spec = self.specs[index]
            hashes = self.hashes(state.request, index)[: self._looked_at(index, limit)]
            if spec.kind in PREFIX_CLOSED:
                ready = self._probe_prefix(index, hashes, computed_tokens // spec.block_tokens)
            else:
                ready = self._session.probe(index, hashes)
            if ready is None:
                return None
            masks[index] = self.hidden.mask(index, hashes, ready)
            if spec.kind in PREFIX_CLOSED:
                # No hit is longer, so the other groups need not be looked at beyond.
                limit = min(limit, spec.reach_tokens(masks[index]))
                if limit <= computed_tokens:
                    break
        return tuple(masks)

    def _probe_prefix(self, index: int, hashes: Sequence[bytes], first: int) -> BoolMask | None:
        """Leading blocks that are ready, by a few probes; those before `first` are the engine's
        own."""
        # Most requests that miss do so at their first block.
        head = self._session.probe(index, hashes[first : first + 1])
        if head is None:
            return None
        left = len(hashes) - first if head.all() else 0

        def ready_at(places: Int64s) -> BoolMask:
            ready = self._session.probe(index, [hashes[first + place] for place in places.tolist()])
            return np.zeros(len(places), np.bool_) if ready is None else ready

        return np.arange(len(hashes)) < first + longest_prefix(ready_at, max(0, left))

    def _ask(self, state: RequestState, now_s: float) -> tuple[int | None, bool]:
        limit = state.request.num_tokens - 1
        groups = [
            GroupHashes(index, self.hashes(state.request, index)[: self._looked_at(index, limit)])
            for index in range(len(self.specs))
        ]
        if not any(len(group.hashes) for group in groups):
            return NO_HIT
        state.answer = self._session.lookup(groups)
        state.phase = Phase.ASKED
        state.deadline_s = now_s + self._config.lookup_timeout_s
        return None, False

    def _after_lookup(
        self, state: RequestState, computed_tokens: int, now_s: float
    ) -> tuple[int | None, bool]:
        answer = state.answer
        if answer is not None and not answer.done():
            return (None, False) if now_s < state.deadline_s else self._late(state, now_s)
        state.phase, state.answer = Phase.IDLE, None
        if answer is None or answer.cancelled() or answer.exception() is not None:
            return self._miss(state, now_s)
        masks = tuple(
            self.hidden.mask(index, self.hashes(state.request, index)[: len(mask)], mask)
            for index, mask in enumerate(answer.result())
        )
        return self._take_lease(state, masks, computed_tokens, now_s)

    def _looked_at(self, index: int, limit_tokens: int) -> int:
        """Blocks of a group that matter to hits up to `limit_tokens`."""
        return limit_tokens // self.specs[index].block_tokens + (index in self.draft_groups)

    def _hit(self, masks: Masks, computed_tokens: int, limit_tokens: int) -> int:
        """Longest hit over the masks, where what the engine holds itself counts as ready."""
        known = []
        for spec, mask in zip(self.specs, masks, strict=True):
            mask = mask.copy()
            mask[: computed_tokens // spec.block_tokens] = True
            known.append(mask)
        return longest_hit(
            self.specs, known, limit_tokens, self.alignment_tokens, self.draft_groups
        )

    def _take_lease(
        self, state: RequestState, masks: Masks, computed_tokens: int, now_s: float
    ) -> tuple[int | None, bool]:
        hit = self._hit(masks, computed_tokens, state.request.num_tokens - 1)
        if hit <= computed_tokens:
            return self._miss(state, now_s)
        state.leased = [
            range(max(blocks.start, computed_tokens // spec.block_tokens), blocks.stop)
            for spec, blocks in zip(self.specs, needed_blocks(self.specs, hit), strict=True)
        ]
        groups = [
            GroupHashes(index, self.hashes(state.request, index)[blocks.start : blocks.stop])
            for index, blocks in enumerate(state.leased)
        ]
        state.lease_id = f"{self._prefix}-r{next(self._counter)}"
        state.answer = self._session.acquire(
            state.lease_id, groups + self.represented.asked(groups), self._config.lease_ttl_s
        )
        state.phase = Phase.LEASING
        state.computed_tokens, state.hit_tokens = computed_tokens, hit
        state.deadline_s = now_s + self._config.lookup_timeout_s
        return None, False

    def _after_lease(
        self, state: RequestState, computed_tokens: int, now_s: float
    ) -> tuple[int | None, bool]:
        answer = state.answer
        if answer is not None and not answer.done():
            return (None, False) if now_s < state.deadline_s else self._late(state, now_s)
        if answer is None or answer.cancelled() or answer.exception() is not None:
            return self._miss(state, now_s)
        grant: LeaseGrant = answer.result()
        state.answer = None
        state.ready = self._granted(state, grant)
        hit = self._hit(state.ready, state.computed_tokens, state.hit_tokens)
        if hit < state.hit_tokens:
            self._stats.add("short_grants")
        if computed_tokens != state.computed_tokens or hit <= computed_tokens:
            return self._miss(state, now_s)
        state.hit_tokens = hit
        state.phase = Phase.GRANTED
        state.granted_s = now_s
        state.lease_ends_s = (
            now_s + (grant.ttl_s or self._config.lease_ttl_s) * LEASE_SHARE_BEFORE_LOAD
        )
        if not state.counted:
            state.counted = True
            self._stats.add("offered_requests")
            self._stats.add("offered_tokens", hit - computed_tokens)
        return hit - computed_tokens, True

    def _granted(self, state: RequestState, grant: LeaseGrant) -> Masks:
        masks = []
        state.represented = self.represented.granted(grant.pinned[len(state.leased) :])
        for index, (blocks, pinned) in enumerate(
            zip(state.leased, grant.pinned[: len(state.leased)], strict=True)
        ):
            # Of the block behind a drafter's hit only the hash matters, so it is not leased.
            mask = np.ones(self._looked_at(index, state.hit_tokens), np.bool_)
            mask[: blocks.stop] = False
            mask[blocks.start : blocks.stop] = pinned
            masks.append(mask)
        return tuple(masks)

    def _late(self, state: RequestState, now_s: float) -> tuple[int, bool]:
        self._stats.add("lookup_timeouts")
        self._overdue = state.answer
        return self._miss(state, now_s)

    def _miss(self, state: RequestState, now_s: float) -> tuple[int, bool]:
        self.give_back(state)
        state.miss_until_s = now_s + MISS_MEMORY_S
        if not state.counted:
            state.counted = True
            self._stats.add("miss_requests")
        return NO_HIT
