"""Follows each request of the engine from its arrival to its end. Answers vLLM's question how much
of the request can be loaded (its hit), begins the load, and ends load and lease with the request.

Always true:
- `Admission.states` has one `RequestState` for each unfinished request that hotkv follows. hotkv
  does not follow a request that arrived while hotkv was off. A request that arrived before the
  ranks' handshakes is followed once the handshakes have arrived.
- A request in `Admission.short` can use nothing of hotkv. It is only reported to the server.
- When a request ends, for whatever reason, its lease is released and its load is cancelled.
- When vLLM allocates a block to a request, `Admission.written` records the block before any worker
  gets the step that writes it.

Scheduler thread only. A call may wait a few milliseconds for the server (`hits.Patience`).
"""

import time
from typing import Any

from hotkv_proto.groups import PREFIX_CLOSED
from hotkv_proto.reports import Miss
from hotkv_vllm.compat import NULL_BLOCK, kv_groups, sparse_layers, steps
from hotkv_vllm.costs.load_choice import LoadChoice
from hotkv_vllm.hints.requests import HintReader
from hotkv_vllm.hooks import HookEdge, hook, nothing
from hotkv_vllm.identity.adapters import Standing
from hotkv_vllm.scheduler.load_room import LoadRoom
from hotkv_vllm.scheduler.loads import REPORTED_S, CommonLoads, LoadOrders, OtherLoads
from hotkv_vllm.scheduler.prefill_wait import ASK_S, PrefillWait
from hotkv_vllm.scheduler.request import (
    ASK_AGAIN,
    NO_HIT,
    Answer,
    Phase,
    RequestState,
    is_fetched_elsewhere,
)
from hotkv_vllm.scheduler.sharing import Assembly, Engine, Sharing
from hotkv_vllm.scheduler.written_blocks import WrittenBlocks
from hotkv_vllm.sparse.rows import ResidentOnly, RowNames, announce


class Admission:
    """Follows the requests of the engine.

    edge: records the time and the exceptions of the hooks (methods that vLLM calls).
    states: the unfinished requests that hotkv follows, by request id.
    short: the unfinished requests that fill no block, even with their longest answer: by request
        id, the time of the arrival; None once vLLM has admitted the request.
    loads: the orders about loads that the next step carries to the workers.
    written: the device blocks that the next step is about to write.
    others: tracks loads of other connectors, whose blocks may have to be excluded from storing.
    room: limits how many requests hold device blocks for a load at once.
    common: the loads in progress, for which requests with the same prefix may wait.
    has_sequences: True with sparse decode or residency.
    rows: decides which rows (requests of a step's batch) attend sparsely; None without sparse
        decode.
    lost_track: True after a hook has raised: it is then not known which blocks the next step
        reallocates, so that step revokes all stores in flight.
    """

    def __init__(self, engine: Engine, sharing: Sharing, edge: HookEdge) -> None:
        vllm_config, kv_cache_config = engine.vllm_config, engine.kv_cache_config
        transfer = vllm_config.kv_transfer_config
        self.edge = edge
        self._sharing = sharing
        self._stats = engine.stats
        self._adapters = engine.adapters
        self._exactness = engine.exactness
        self._pool = engine.pool
        self._is_child = engine.is_child
        self._traces = engine.traces
        self._hints = HintReader(engine.stats)
        self._may_load = transfer.is_kv_consumer
        self._may_store = transfer.is_kv_producer
        self._has_replicas = vllm_config.parallel_config.data_parallel_size > 1
        self.states: dict[str, RequestState] = {}
        self.short: dict[str, float | None] = {}
        self.loads = LoadOrders(vllm_config.parallel_config.world_size)
        self.written = WrittenBlocks(kv_groups.hit_block_tokens(vllm_config, kv_cache_config))
        self.others = OtherLoads()
        self.lost_track = False
        self.room = LoadRoom(vllm_config)
        self.common = CommonLoads()
        # Only if a loaded block gets into vLLM's own prefix cache can other requests use it. This
        # is not so with residency, or if that cache is off; then no request waits for another's
        # load.
        caches = vllm_config.cache_config.enable_prefix_caching
        self._shares_loads = caches and engine.pool.spec is None
        self.failed_loads = engine.failed_loads
        self.choice = LoadChoice(engine.learnt_prefill, engine.stats)
        self._wait = PrefillWait(engine.prefill, engine.stats, decodes_only=not self._may_store)
        self.has_sequences = engine.config.sparse is not None or engine.pool.spec is not None
        self.rows: RowNames | None = None
        if engine.config.sparse is not None:
            groups = sparse_layers.sparse_groups(kv_cache_config)
            self.rows = RowNames(
                engine.config.sparse,
                groups,
                self._limits(vllm_config),
                lambda: sharing.lacks_sparse_layers,
            )
            announce(str(transfer.engine_id), self.rows)

    def __repr__(self) -> str:
        return f"Admission({len(self.states)} requests, {self.loads}, {self.written})"

    def cancel_loads(self, *, of_refused: bool = False) -> None:
        """Orders the workers, with the next step, to cancel the loads in progress.

        of_refused: True cancels only the loads of requests whose LoRA adapter may no longer use the
            cache, for example because the adapter's bytes have changed. False cancels all loads.
        """
        for request_id, state in self.states.items():
            if state.is_loading and (not of_refused or self._is_refused(state.request)):
                self.loads.cancel(request_id)
                state.hit.is_cancelled = True

    def _is_refused(self, request: Any) -> bool:
        is_adapted = request.lora_request is not None
        return is_adapted and self._adapters.standing(request, time.monotonic()) is Standing.NEVER

    def arrived(self, request: Any) -> None:
        """Registers a new request: creates its state, begins to look for its hit, and passes the
        request to the parts of hotkv that serve sparse decode. Creates no state for a short
        request, nor while the engine does not share KV. If the engine still awaits the ranks'
        handshakes, `Sharing.joining` remembers the request, and this method is called again
        later."""
        if self._sharing.joining is not None:
            self._sharing.joining.requests[request.request_id] = request
        cache, now_s = self._sharing.cache, time.monotonic()
        if cache is not None:
            if not (self._sharing.links.are_complete and cache.session.connected):
                self._stats.add("unserved_requests")
            if self._is_short(cache, request):
                self.short[request.request_id] = now_s
                return
            self._take_up(cache, request, now_s)
        elif self._sharing.joining is not None and request.lora_request is not None:
            # vLLM's own prefix cache mixes its blocks with those of later bytes of the adapter.
            self._adapters.arrived(request, now_s)
        if self.has_sequences:
            self._begin_sequences(request)

    def _is_short(self, cache: Assembly, request: Any) -> bool:
        """Returns True if a request can neither hit nor fill a block, and has no hint. Returns
        False with sparse decode, traces, or other connectors, which follow every request."""
        # The KV of an answer's last token is never computed.
        most_tokens = request.num_prompt_tokens + max(1, request.max_tokens) - 1
        return (
            most_tokens < cache.finder.groups.hash_block_tokens
            and not request.resumable
            and not request.kv_transfer_params
            and getattr(request, "kv_hints", None) is None
            and getattr(request, "session_id", None) is None
            and not self._is_child
            and not self.has_sequences
            and self._traces is None
        )

    def _take_up(self, cache: Assembly, request: Any, now_s: float) -> None:
        """Creates the request's `RequestState` and begins to look for its hit."""
        state = RequestState(request, cache.planner.new_state(), arrived_s=now_s)
        state.trace = self._traces and self._traces.begin(request)
        state.ask(self._hints.asked(request, now_s))
        self.states[request.request_id] = state
        if cache.residencies is not None:
            cache.residencies.arrived(state, now_s)
        if request.lora_request is not None:
            self._adapters.arrived(request, now_s)
        elif self._refusal(request) is None:
            cache.finder.arrive(state, now_s)

    @hook(nothing, is_part=True)
    def _begin_sequences(self, request: Any) -> None:
        if self.rows is not None:
            self.rows.arrived(request)
        memory = self._sharing.cache.memory if self._sharing.cache is not None else None
        is_known = request.request_id in self.states
        if memory is not None and is_known and request.lora_request is None:
            memory.arrived(request)

    def _refusal(self, request: Any) -> Miss | None:
        """Returns why the request may not load from hotkv now; None if it may."""
        sharing = self._sharing
        if (
            not self._may_load
            or request.skip_reading_prefix_cache
            or (self._is_child and is_fetched_elsewhere(request))
            or sharing.cache is None
            or not sharing.cache.finder.groups.may_share(request)
        ):
            return Miss.NOT_ASKED
        if not sharing.links.are_complete:
            return Miss.NO_SERVER
        return None if sharing.may_offer else Miss.NOT_ASKED

    def match(self, request: Any, num_computed_tokens: int) -> Answer:
        """Answers vLLM's hook `get_num_new_matched_tokens`: returns how many tokens of the request
        can be loaded from hotkv, or ASK_AGAIN if the request must wait (for example because the hit
        is not known yet).

        num_computed_tokens: length of the request's hit in vLLM's own prefix cache.
        """
        if request.request_id in self.short:
            return NO_HIT
        self.written.matched(request.request_id, num_computed_tokens)
        self._exactness.matched(request.request_id, num_computed_tokens, request.resumable)
        self.room.comes(request)
        now_s = time.monotonic()
        if self._sharing.joining is not None and self._sharing.joining.asks_again(now_s):
            return ASK_AGAIN
        # Called for every request, even if hotkv does not follow it: vLLM must be answered 'ask
        # again' once after each failed load, so that the request does not block vLLM's queue.
        if self.failed_loads.steps_aside(request.request_id):
            return ASK_AGAIN
        state, cache = self.states.get(request.request_id), self._sharing.cache
        if self._pool.spec is not None:
            has_room = self._has_room(request, now_s)
            self._pool.heed_wait(request, not has_room)
            if not has_room:
                return ASK_AGAIN
        if state is None or cache is None or self._sharing.joining is not None:
            return NO_HIT
        cache.planner.comes(state)
        cache.reports.matched(state, num_computed_tokens)
        waits = self._sharing.makes_wait(state.arrived_s, now_s)
        refusal = self._refusal(request)
        answer = ASK_AGAIN if waits else NO_HIT
        if not waits and refusal is None:
            answer = self._ask(cache, state, num_computed_tokens, now_s)
        cache.reports.answered(state, answer[0] is None, refusal)
        return answer

    def _ask(self, cache: Assembly, state: RequestState, computed: int, now_s: float) -> Answer:
        if state.request.lora_request is not None:
            standing = self._adapters.standing(state.request, now_s)
            if standing is not Standing.KNOWN:
                cache.finder.give_back(state)
                state.hit.miss = Miss.NOT_ASKED
                waits = standing is Standing.WAIT and cache.session.connected
                return ASK_AGAIN if waits else NO_HIT
            if cache.memory is not None:
                cache.memory.arrived(state.request)
        if not cache.finder.can_hit(state.request, computed):
            return cache.finder.match(state, computed, now_s)
        if self._wait.goes_on(cache.finder, state, computed, now_s):
            if self._is_idle and state.wait is not None:
                cache.finder.patience.rest(ASK_S, state.wait.answer)
            return ASK_AGAIN
        answer = self.choice.match(cache.finder, state, computed, now_s)
        if answer[0] and self._waits_for_load(cache, state, computed, computed + answer[0], now_s):
            return ASK_AGAIN
        if answer[0] and not self.room.has_room(state.request):
            return ASK_AGAIN
        if cache.residencies is None or not answer[0]:
            return answer
        usable = cache.residencies.usable_tokens(state.request, computed + answer[0])
        if usable is None:
            return ASK_AGAIN
        if usable >= computed + answer[0]:
            return answer
        state.hit.miss = Miss.NOT_ASKED
        cache.finder.shorten(state, usable)
        return ASK_AGAIN if usable > computed else NO_HIT

    def _waits_for_load(
        self, cache: Assembly, state: RequestState, computed: int, hit_tokens: int, now_s: float
    ) -> bool:
        """Returns True while the request should wait for another request's load, because that load
        copies the same blocks to the device that this request would load (`CommonLoads`)."""
        if not self._shares_loads:
            return False
        groups = cache.finder.groups
        size = groups.specs[0].block_tokens
        hashes = groups.hashes(state.request, 0)
        other = self.common.awaited(
            computed, hit_tokens, lambda tokens: hashes[tokens // size - 1], now_s
        )
        if not other or state.hit.waits_for not in ("", other):
            return False
        state.hit.waits_for = other
        # The time of this wait must not count as time in which a granted hit waits for admission
        # (`FailedLoads.outwait` drops hits that wait too long for admission).
        state.hit.granted_s = now_s
        return True

    @property
    def _is_idle(self) -> bool:
        """Returns True if vLLM has admitted none of the present requests. The engine then has
        nothing to compute, so its scheduler may pause for a moment. Always False with data-parallel
        replicas: a replica without work must still take steps while another replica has work."""
        return not (
            self._has_replicas
            or None in self.short.values()
            or any(state.use.is_reported for state in self.states.values())
        )

    def _has_room(self, request: Any, now_s: float) -> bool:
        """Returns True if the request may begin now. Called only with residency. A request that can
        become too long for all its blocks to stay on the device may begin once the server has
        reserved room for its blocks. Makes vLLM end the request with an error if it can never
        begin."""
        if request.resumable:
            # Streamed input is refused. The server reserves room for the greatest length of the
            # request, and input that arrives later would make the request longer.
            self._pool.fail(request.request_id, "residency does not work with streamed input")
            return False
        if self._pool.was_preempted(request.request_id):
            return False
        if self._pool.holds_whole(request):
            return True
        cache, state = self._sharing.cache, self.states.get(request.request_id)
        if cache is None or cache.residencies is None or state is None:
            fits = self._pool.could_be_whole(request)
            self._pool.begin_whole(request.request_id, fits)
            if self._pool.stays_whole(request):
                return True
            self._pool.fail(request.request_id, "it outgrows the device, and hotkv is off")
            return False
        return cache.residencies.is_admitted(state, now_s)

    def _limits(self, vllm_config: Any) -> ResidentOnly | None:
        if self._pool.spec is None or vllm_config.device_config.device_type != "cuda":
            return None
        replays = sparse_layers.replays_decode(vllm_config)
        return ResidentOnly(self._is_resident, self._pool.has_away, replays)

    def _is_resident(self, request_id: str) -> bool:
        """Returns True if the request is resident: its older blocks may be only in the server's
        memory, not on the device."""
        residencies = None if self._sharing.cache is None else self._sharing.cache.residencies
        return residencies is not None and residencies.is_resident(request_id)

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Handles vLLM's allocation of blocks to a request: begins the load of its hit, or releases
        its lease if vLLM loads nothing.

        blocks: vLLM's `KVCacheBlocks` of the request.
        num_external_tokens: number of tokens to load; 0: no load.
        """
        if request.request_id in self.short:
            arrived_s, self.short[request.request_id] = self.short[request.request_id], None
            if arrived_s is not None and self._sharing.cache is not None:
                self._sharing.cache.reports.admitted_short(request, arrived_s)
            return
        self.written.allocated(request, blocks)
        self.others.admitted(request.request_id)
        self._exactness.loads(request.request_id, num_external_tokens)
        self.room.admitted(request.request_id, blocks)
        state, cache = self.states.get(request.request_id), self._sharing.cache
        if state is not None and cache is not None:
            cache.reports.admitted(state, num_external_tokens)
        # Checks again whether the request may load. vLLM 0.33 may postpone a load, and the engine's
        # weights may have changed since the hit was found.
        if state is None or cache is None or (num_external_tokens and self._refusal(request)):
            if num_external_tokens > 0:
                self._abandon(request.request_id)
            return
        if num_external_tokens <= 0:
            if not state.is_loading:
                self.choice.drop(state, state.hit.server_s)
                cache.finder.give_back(state)
            return
        tables = blocks.get_block_ids()
        block_ids = [tables[group.vllm_group] for group in cache.cache_groups]
        now_s = time.monotonic()
        job = cache.finder.begin_load(state, block_ids, num_external_tokens, NULL_BLOCK, now_s)
        if job is None:
            self._abandon(request.request_id)
            return
        job.timeout_s = self.choice.time_for(state, job.timeout_s)
        job.traceparent = state.trace and state.trace.load(job, num_external_tokens)
        self.loads.begin(job, blocks)
        self._load_begins(cache, state, now_s + job.timeout_s + REPORTED_S)
        self._stats.add("loads")

    def _load_begins(self, cache: Assembly, state: RequestState, until_s: float) -> None:
        """Records a load, so that other requests with the same prefix wait for it instead of
        loading the same blocks (`CommonLoads`).

        In a model with sliding windows or recurrent states, vLLM's prefix cache keeps only the
        blocks that a hit at the end of a prompt needs. For such a model only loads of the longest
        possible hit, which ends with the prompt, are recorded.

        until_s: other requests wait no longer than until this time.
        """
        groups, end_tokens = cache.finder.groups, state.hit.hit_tokens
        is_closed = all(spec.kind in PREFIX_CLOSED for spec in groups.specs)
        if not (is_closed or state.hit.miss is Miss.PARTIAL_BLOCK):
            return
        place = end_tokens // groups.specs[0].block_tokens - 1
        name = groups.hashes(state.request, 0)[place]
        self.common.begin(state.request.request_id, end_tokens, name, until_s)

    def load_was_late(self, request_id: str) -> None:
        """Handles a load that has reached its time limit, so that the server is slow or hangs: the
        requests that wait for this load compute the tokens of their hits instead of loading them.
        """
        for state in self.states.values():
            if state.hit.waits_for == request_id and state.hit.phase is Phase.GRANTED:
                self.choice.leave(state)

    def _abandon(self, request_id: str) -> None:
        """Gives up a load that can't begin. vLLM awaits the load's end, so with the next step the
        workers report the load to vLLM as failed. The load counts as a failed load of the request.
        After more than `max_load_retries` failed loads the request is offered no further hits."""
        self.loads.abandon(request_id)
        state = self.states.get(request_id)
        if state is not None and self._sharing.cache is not None:
            self._sharing.cache.finder.load_failed(state)
            self.choice.drop(state, state.hit.server_s)
            self._sharing.cache.finder.give_back(state)

    def finished(self, request: Any, block_ids: Any) -> None:
        """Ends a request that has finished or was aborted: cancels its load, releases its lease,
        and plans the store of its last blocks.

        block_ids: the request's block ids, per vLLM group.
        """
        if request.request_id in self.short:
            del self.short[request.request_id]
            if self._exactness.is_watching:
                self._exactness.ended(request.request_id)
            return
        if self.has_sequences:
            self._end_sequences(request.request_id)
        self.written.ended(request.request_id)
        all_is_there = self.others.may_store(request.request_id)
        self.others.ended(request.request_id)
        self.room.ended(request.request_id)
        self.common.ended(request.request_id)
        if self._sharing.joining is not None:
            self._sharing.joining.requests.pop(request.request_id, None)
        try:
            self._finish(request, block_ids, all_is_there)
        finally:
            self.failed_loads.ended(request.request_id)
            self._exactness.ended(request.request_id)
            self._adapters.ended(request.request_id)

    def _finish(self, request: Any, block_ids: Any, all_is_there: bool) -> None:
        # Looks the state up, but removes it only at the end: if a hook (method that vLLM calls)
        # raises before, its fallback finds the state, and releases the request's lease and load.
        state, cache = self.states.get(request.request_id), self._sharing.cache
        if state is None or cache is None:
            self.states.pop(request.request_id, None)
            return
        if state.is_loading:
            self.loads.cancel(request.request_id)
        finder = cache.finder
        # vLLM counts the tokens of a hit as computed although their load has not ended (LOADING),
        # or has not even begun because vLLM 0.33 has postponed it (GRANTED). In both phases the
        # blocks must not be stored.
        is_computed = (
            state.hit.phase not in (Phase.LOADING, Phase.GRANTED)
            and request.request_id not in self.failed_loads
            and all_is_there
        )
        if not state.is_loading:
            self.choice.drop(state, state.hit.server_s)
        cache.reports.ended(state)
        finder.give_back(state)
        del self.states[request.request_id]
        if (
            self._may_store
            and state.store.may_store
            and is_computed
            and self._sharing.links.are_complete
            and self._pool.holds_whole(request)
        ):
            # Leaves out the last sampled token: its place in the block may hold the KV of another
            # token. So a block that ends with this token is not stored.
            known = max(request.num_prompt_tokens, request.num_tokens - 1)
            cache.planner.finish(state, block_ids, min(known, steps.written_tokens(request)))

    @hook(nothing, is_part=True)
    def _end_sequences(self, request_id: str) -> None:
        if self._sharing.cache is not None and self._sharing.cache.residencies is not None:
            self._sharing.cache.residencies.ended(request_id)
        if self.rows is not None:
            self.rows.ended(request_id)
        if self._sharing.cache is not None and self._sharing.cache.memory is not None:
            self._sharing.cache.memory.ended(request_id, time.monotonic())

    # -------------------------------------------------------------------- fallbacks of broken hooks

    def request_broke(self, request_id: str) -> None:
        """Forgets a request for which a hook has raised: releases its lease and cancels its load.
        In an engine with residency (contexts beyond device memory), also makes vLLM end the request
        with an error."""
        if self._sharing.joining is not None:
            self._sharing.joining.requests.pop(request_id, None)
        if self._pool.spec is not None:
            self._pool.fail(request_id, "a hook of hotkv's broke")
        self.short.pop(request_id, None)
        state, cache = self.states.pop(request_id, None), self._sharing.cache
        if state is not None:
            state.leave()
            if state.hit.phase is Phase.LOADING:
                self.loads.cancelled.append(request_id)
            if state.hit.lease_id and cache is not None:
                cache.session.release(state.hit.lease_id)
        self.written.ended(request_id)
        self._exactness.ended(request_id)
        self._adapters.ended(request_id)

    def end_broke(self, request_id: str) -> None:
        """Forgets an ended request for which `finished` raised, so that no other request waits
        because of this request."""
        self.request_broke(request_id)
        self.common.loads.pop(request_id, None)
        self.others.ended(request_id)
        self.room.ended(request_id)
        self.failed_loads.ended(request_id)

    def alloc_broke(self, request_id: str, num_external_tokens: int) -> None:
        """Handles an allocation for which `allocated` raised. It is not known which blocks vLLM has
        reallocated, so the next step revokes all stores. The request's load is reported as failed.

        num_external_tokens: number of tokens to load; 0: there is no load.
        """
        self.lost_track = True
        try:
            if num_external_tokens > 0:
                self._abandon(request_id)
        finally:
            self.others.admitted(request_id)
