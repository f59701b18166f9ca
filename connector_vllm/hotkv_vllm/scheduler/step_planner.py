"""Plans the workers' part of a step, `HotKVMetadata`.

- An order about a load is sent in one step only.
- Each message lists the stores whose blocks the step is about to write. If these are unknown, all
  stores are revoked.
- A quiet step (`HotKVMetadata.is_quiet`) costs one check.

Never blocks, except for a moment after the weights have changed.
"""

import time
from collections import deque
from collections.abc import Collection
from typing import Any

from hotkv_vllm.compat import steps
from hotkv_vllm.costs.prefill_speed import LEAST_STEP_TOKENS
from hotkv_vllm.identity.exactness import inexact_requests
from hotkv_vllm.metadata import QUIET, HotKVMetadata, StoreJob
from hotkv_vllm.scheduler.admission import Admission
from hotkv_vllm.scheduler.sharing import Assembly, Engine, Sharing


class StepPlanner:
    def __init__(self, engine: Engine, sharing: Sharing, requests: Admission) -> None:
        transfer = engine.vllm_config.kv_transfer_config
        companion = self._companion = engine.companion
        self._engine_id = str(transfer.engine_id)
        self._may_store = transfer.is_kv_producer
        self._stats = engine.stats
        self._adapters = engine.adapters
        self._exactness = engine.exactness
        self.prefill = engine.prefill
        self._sharing = sharing
        self._requests = requests
        self.manager: Any = None
        groups = engine.kv_cache_config.kv_cache_groups
        self._block_sizes = [group.kv_cache_spec.block_size for group in groups]
        self._num_drafts = int(engine.vllm_config.num_speculative_tokens)
        # Loads of other connectors end with a step.
        self._always_plans = engine.is_child or companion is not None
        # By the steps that may be in flight.
        self._touched = deque[set[int]](maxlen=engine.vllm_config.max_concurrent_batches)
        # A companion makes attachments of blocks behind the step, which vLLM does not wait for.
        self._frees_after_steps = companion is None and steps.frees_after_steps()

    def __repr__(self) -> str:
        return f"StepPlanner({self._engine_id})"

    def plan(self, scheduler_output: Any) -> HotKVMetadata:
        """scheduler_output: vLLM's `SchedulerOutput`."""
        cache = self._sharing.cache
        if cache is not None and cache.reports.is_waiting:
            cache.reports.send(time.monotonic())
        if self._is_quiet(scheduler_output):
            if scheduler_output.total_num_scheduled_tokens:
                self._sharing.weights.is_fresh = False
            order = self._sharing.weights.order() if self._sharing.weights.question else None
            return QUIET if order is None else HotKVMetadata(weights=order, is_quiet=True)
        self._requests.room.has_refused = False
        scheduler_output = steps.read_in_place(scheduler_output, self.manager)
        companion = self._companion
        more = () if companion is None else companion.begin_step(scheduler_output)
        meta = self._plan(scheduler_output, more)
        if companion is not None:
            states = self._requests.states
            meta.companion = companion.step(scheduler_output, states, time.monotonic())
        # Last: if the code above raises, `plan_broke` still finds these orders.
        requests = self._requests
        meta.adapters = self._adapters.take_work(time.monotonic())
        meta.loads, meta.cancel_loads, meta.abandoned_loads = requests.loads.take()
        self._touched.append(steps.blocks_touched_early(scheduler_output))
        if meta.loads and self._frees_after_steps:
            touched = set().union(*self._touched)
            for job in meta.loads:
                job.at_once = all(touched.isdisjoint(run.block_ids.tolist()) for run in job.runs)
        requests.lost_track = False
        return meta

    def _is_quiet(self, scheduler_output: Any) -> bool:
        """Whether planning would change nothing. Reads attributes, because calls would cost more
        than all else in such a step."""
        requests, sharing, cache = self._requests, self._sharing, self._sharing.cache
        loads, scheduled = requests.loads, scheduler_output.num_scheduled_tokens
        if (
            self._always_plans
            or scheduler_output.total_num_scheduled_tokens >= LEAST_STEP_TOKENS
            or sharing.joining is not None
            or sharing.weights.is_due
            or sharing.weights.is_asking
            or self._exactness.is_watching
            or requests.lost_track
            or requests.written.collected
            or requests.failed_loads.waiting
            or requests.room.holders
            or requests.room.has_refused
            or loads.jobs
            or loads.cancelled
            or loads.abandoned
            or loads.quarantine.kept
            or (self._adapters.is_used and self._adapters.has_work)
        ):
            return False
        if cache is None:
            return True
        return not (
            (not sharing.links.are_complete and sharing.is_connected)
            or sharing.seen_changes != cache.streams.num_changes
            or cache.reset.under_way
            or cache.planner.in_flight.stores
            or cache.planner.tails.waiting
            or cache.finder.patience.is_used
            or scheduler_output.kv_connector_block_state.boundary_state_offloads
            or (
                cache.state_block_tokens
                and (
                    scheduler_output.scheduled_new_reqs
                    or scheduler_output.scheduled_cached_reqs.resumed_req_ids
                )
            )
            or (
                self._may_store
                and requests.states
                and cache.planner.due(requests.states, scheduled, requests.others.held, {})
            )
        )

    def _plan(self, scheduler_output: Any, more_written: Collection[int]) -> HotKVMetadata:
        written = self._requests.written
        self._requests.failed_loads.scheduled(scheduler_output.num_scheduled_tokens)
        if self._requests.room.holders:
            self._requests.room.ran(scheduler_output.num_scheduled_tokens)
        settles_step = self._requests.others.step(
            scheduler_output.num_scheduled_tokens, scheduler_output.has_sync_kv_loads
        )
        written.step(scheduler_output)
        if more_written:
            written.add(more_written)
        inexact = inexact_requests(self._engine_id, scheduler_output)
        self._exactness.is_watching |= inexact is not None
        if self._exactness.is_watching:
            self._exactness.step(scheduler_output, written.of_step(), inexact or ())
        stores: tuple[StoreJob, ...] = ()
        flush: tuple[int, ...] = ()
        joining = self._sharing.joining if self._sharing.cache is None else None
        wants_handshake = joining is not None and joining.asks_workers
        if self._sharing.cache is not None:
            if self._requests.lost_track:
                self._sharing.cache.planner.take_all_back()
            self._before_stores(self._sharing.cache, scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            self._sharing.weights.is_fresh = False
        if self._sharing.cache is not None:
            stores, flush = self._plan_stores(self._sharing.cache, scheduler_output)
        meta = self._state()
        meta.stores = stores
        meta.flush_stores = flush
        meta.settles_step = settles_step
        meta.wants_handshake = wants_handshake
        # Smaller steps are not timed.
        if scheduler_output.total_num_scheduled_tokens >= LEAST_STEP_TOKENS:
            rows = steps.scheduled_rows(scheduler_output)
            meta.timed_step = self.prefill.begin_step(rows, time.monotonic())
        return meta

    def _before_stores(self, cache: Assembly, scheduler_output: Any) -> None:
        """Before the step's stores are planned."""
        sharing, now_s = self._sharing, time.monotonic()
        identity = sharing.weights.step(scheduler_output.total_num_scheduled_tokens > 0, now_s)
        # A reset first flushes the old key space.
        is_owed = cache.reset.under_way and identity is not None and sharing.is_other(identity)
        if identity is not None and not cache.planner.in_flight and not is_owed:
            self._adopt(cache, identity)
        cache = sharing.cache or cache
        cache.planner.is_rekeying = sharing.weights.under_way
        sharing.say_on()
        cache.reset.step(now_s)
        cache.finder.patience.begin_step()

    def _adopt(self, cache: Assembly, identity: str) -> None:
        """Changes to the key space of the reported weights. If they are others, or were written
        to, all KV on the device counts as inexact, and all requests are looked up anew."""
        is_other = self._sharing.is_other(identity)
        if is_other or self._sharing.weights.were_written:
            self._exactness.distrust_all()
            if self._companion is not None and not is_other:
                self._companion.distrust()
            for state in self._requests.states.values():
                # Loads were made to fail because the weights had changed.
                cache.finder.forget(state, failed_too=True)
        self._sharing.adopt(identity)

    def _plan_stores(
        self, cache: Assembly, scheduler_output: Any
    ) -> tuple[tuple[StoreJob, ...], tuple[int, ...]]:
        """The stores of the blocks that this step fills, and the ids of stores that must end
        first."""
        block_state = scheduler_output.kv_connector_block_state
        handoffs = block_state.boundary_state_offloads
        if handoffs:
            written = self._requests.written.of_step()
            steps.withdraw_states(block_state, written, self._block_sizes, self._num_drafts)
        if cache.state_block_tokens:
            # A state that the server lacks is stored if a request hits it on the device.
            hits = steps.hit_states(scheduler_output, cache.state_block_tokens)
            handoffs = {
                request_id: [*handoffs.get(request_id, ()), *hits.get(request_id, ())]
                for request_id in handoffs.keys() | hits.keys()
            }
        scheduled = []
        if self._may_store and self._sharing.links.are_complete:
            scheduled = cache.planner.due(
                self._requests.states,
                scheduler_output.num_scheduled_tokens,
                self._requests.others.held,
                handoffs,
            )
        stores, flush = cache.planner.plan(
            scheduled,
            block_state.get_block_ids,
            handoffs,
            self._requests.written.of_step,
        )
        if flush:
            self._stats.add("flushes", len(flush))
        return stores, flush

    def _state(self) -> HotKVMetadata:
        """What every step's message repeats."""
        requests = self._requests
        written = requests.written.take()
        meta = HotKVMetadata(
            held_loads=requests.loads.quarantine.held,
            asks_links=not self._sharing.links.are_complete and self._sharing.is_connected,
            lost_track=requests.lost_track,
            weights=self._sharing.weights.order(),
        )
        if self._companion is not None:
            meta.allocated_blocks = tuple(written)
        return meta

    def plan_broke(self) -> HotKVMetadata:
        """Which blocks the step reallocates is unknown: all stores are revoked, loads to begin
        are reported as failed, and what the step computes is not stored."""
        if self._exactness.is_watching:
            self._exactness.distrust_all()
        self._sharing.weights.is_fresh = False
        self._requests.others.lost()
        self._adapters.give_back()
        self._requests.lost_track = False
        if self._sharing.cache is not None:
            self._sharing.cache.planner.plan_broke()
        loads = self._requests.loads
        meta = HotKVMetadata(
            cancel_loads=tuple(loads.cancelled),
            abandoned_loads=(*loads.jobs, *loads.abandoned),
            held_loads=loads.quarantine.held,
            lost_track=True,
            weights=self._sharing.weights.order(),
        )
        # Last, so that the orders are not lost if this raises too.
        loads.jobs = {}
        loads.abandoned = []
        loads.cancelled = []
        return meta
