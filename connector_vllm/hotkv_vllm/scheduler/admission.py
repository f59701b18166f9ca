"""Follows each request from its arrival to its end.

- `Admission.states` has each unfinished request that hotkv follows: not those that arrived while
  hotkv was off. Those that came before the handshakes are followed after them.
- A request in `Admission.short` can use nothing of hotkv. It is only reported.
- However a request ends, its lease is released and its load cancelled.
- `Admission.written` records an allocated block before any worker gets the step that writes it.

A call may wait a few ms for the server (`hits.Patience`).
"""

import time
from typing import Any

from hotkv_proto.groups import PREFIX_CLOSED
from hotkv_proto.reports import Miss
from hotkv_vllm.callbacks import CallbackEdge, callback, nothing
from hotkv_vllm.compat import NULL_BLOCK, kv_groups, sparse_layers, steps
from hotkv_vllm.costs.load_choice import LoadChoice
from hotkv_vllm.hints.hint_reader import HintReader
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
    """short: requests that fill no block even with their longest answer: when they arrived; None
        once vLLM has admitted them.
    written: device blocks that the next step is about to write.
    others: other connectors' loads, whose blocks may not be stored.
    has_sequences: sparse decode or residency is on.
    rows: decides which requests of a step attend sparsely; None without sparse decode.
    lost_track: a callback has raised, so which blocks the next step reallocates is unknown; it
        revokes all stores.
    """

    def __init__(self, engine: Engine, sharing: Sharing, edge: CallbackEdge) -> None:
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
        # Others can use a loaded block only if it gets into vLLM's own prefix cache: not with
        # residency, nor if that cache is off. Then no request waits for another's load.
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
        """of_refused: only of requests whose LoRA adapter may no longer use the cache."""
        for request_id, state in self.states.items():
            if state.is_loading and (not of_refused or self._is_refused(state.request)):
                self.loads.cancel(request_id)
                state.hit.is_cancelled = True

    def _is_refused(self, request: Any) -> bool:
        is_adapted = request.lora_request is not None
        return is_adapted and self._adapters.standing(request, time.monotonic()) is Standing.NEVER

    def arrived(self, request: Any) -> None:
        """While the engine awaits handshakes, `Sharing.joining` remembers the request and calls
        again."""
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
        """True if a request can neither hit nor fill a block, and has no hint. Sparse decode,
        traces and other connectors follow every request."""
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

    @callback(nothing, is_part=True)
    def _begin_sequences(self, request: Any) -> None:
        if self.rows is not None:
            self.rows.arrived(request)
        memory = self._sharing.cache.memory if self._sharing.cache is not None else None
        is_known = request.request_id in self.states
        if memory is not None and is_known and request.lora_request is None:
            memory.arrived(request)

    def _refusal(self, request: Any) -> Miss | None:
        """Why the request may not load now; None if it may."""
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
        """Answers `get_num_new_matched_tokens`."""
        if request.request_id in self.short:
            return NO_HIT
        self.written.matched(request.request_id, num_computed_tokens)
        self._exactness.matched(request.request_id, num_computed_tokens, request.resumable)
        self.room.comes(request)
        now_s = time.monotonic()
        if self._sharing.joining is not None and self._sharing.joining.asks_again(now_s):
            return ASK_AGAIN
        # Also for requests that hotkv does not follow: without one 'ask again' after each failed
        # load, the request blocks vLLM's queue.
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
        """Whether another request is loading the blocks that this one would load
        (`CommonLoads`)."""
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
        # `FailedLoads.outwait` must not count this wait as one for admission.
        state.hit.granted_s = now_s
        return True

    @property
    def _is_idle(self) -> bool:
        """True if vLLM has admitted no request, so that its scheduler may pause. Never with
        data-parallel replicas, which take steps while another replica has work."""
        return not (
            self._has_replicas
            or None in self.short.values()
            or any(state.use.is_reported for state in self.states.values())
        )

    def _has_room(self, request: Any, now_s: float) -> bool:
        """With residency: whether the request may begin. If not all its blocks may fit on the
        device, the server must have reserved room. Makes vLLM fail a request that can never
        begin."""
        if request.resumable:
            # The server reserves room for the request's greatest length, which streamed input
            # would exceed.
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
        residencies = None if self._sharing.cache is None else self._sharing.cache.residencies
        return residencies is not None and residencies.is_resident(request_id)

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begins the load of a hit, or releases its lease if vLLM loads nothing.

        blocks: vLLM's `KVCacheBlocks`.
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
        # vLLM 0.33 may postpone a load, and the weights may have changed since the hit was
        # found.
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
        """Lets other requests with the same prefix wait for this load, until `until_s`.

        With sliding windows or recurrent states, vLLM's prefix cache keeps only the blocks that
        a hit at the end of a prompt needs: only loads of the longest possible hit are recorded.
        """
        groups, end_tokens = cache.finder.groups, state.hit.hit_tokens
        is_closed = all(spec.kind in PREFIX_CLOSED for spec in groups.specs)
        if not (is_closed or state.hit.miss is Miss.PARTIAL_BLOCK):
            return
        place = end_tokens // groups.specs[0].block_tokens - 1
        name = groups.hashes(state.request, 0)[place]
        self.common.begin(state.request.request_id, end_tokens, name, until_s)

    def load_was_late(self, request_id: str) -> None:
        """A load has reached its time limit, so the server is slow: requests that wait for it
        compute."""
        for state in self.states.values():
            if state.hit.waits_for == request_id and state.hit.phase is Phase.GRANTED:
                self.choice.leave(state)

    def _abandon(self, request_id: str) -> None:
        """The next step reports the load to vLLM, which awaits its end, as failed."""
        self.loads.abandon(request_id)
        state = self.states.get(request_id)
        if state is not None and self._sharing.cache is not None:
            self._sharing.cache.finder.load_failed(state)
            self.choice.drop(state, state.hit.server_s)
            self._sharing.cache.finder.give_back(state)

    def finished(self, request: Any, block_ids: Any) -> None:
        """Plans the store of the request's last blocks.

        block_ids: per vLLM group.
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
        # Removed only at the end: if this raises, the fallback releases the request's lease and
        # load.
        state, cache = self.states.get(request.request_id), self._sharing.cache
        if state is None or cache is None:
            self.states.pop(request.request_id, None)
            return
        if state.is_loading:
            self.loads.cancel(request.request_id)
        finder = cache.finder
        # vLLM counts a hit as computed while it is loaded (LOADING), and even before, if vLLM
        # 0.33 has postponed the load (GRANTED).
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
            # The last sampled token's place may hold another token's KV: no block that ends with
            # it is stored.
            known = max(request.num_prompt_tokens, request.num_tokens - 1)
            cache.planner.finish(state, block_ids, min(known, steps.written_tokens(request)))

    @callback(nothing, is_part=True)
    def _end_sequences(self, request_id: str) -> None:
        if self._sharing.cache is not None and self._sharing.cache.residencies is not None:
            self._sharing.cache.residencies.ended(request_id)
        if self.rows is not None:
            self.rows.ended(request_id)
        if self._sharing.cache is not None and self._sharing.cache.memory is not None:
            self._sharing.cache.memory.ended(request_id, time.monotonic())

    # ------------------------------------------------------------------ fallbacks of callbacks

    def request_broke(self, request_id: str) -> None:
        """Forgets a request for which a callback raised. With residency, makes vLLM fail it."""
        if self._sharing.joining is not None:
            self._sharing.joining.requests.pop(request_id, None)
        if self._pool.spec is not None:
            self._pool.fail(request_id, "a callback of hotkv's broke")
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
        """Also lets no other request wait because of this one."""
        self.request_broke(request_id)
        self.common.loads.pop(request_id, None)
        self.others.ended(request_id)
        self.room.ended(request_id)
        self.failed_loads.ended(request_id)

    def alloc_broke(self, request_id: str, num_external_tokens: int) -> None:
        """Which blocks vLLM has reallocated is unknown: the next step revokes all stores, and
        the load is reported as failed."""
        self.lost_track = True
        try:
            if num_external_tokens > 0:
                self._abandon(request_id)
        finally:
            self.others.admitted(request_id)
