"""Follows each request from its arrival to its end.

- `Admission.states` has each unfinished request that hotkv follows: not those that arrived while
  hotkv was off. Those that came before the handshakes are followed after them.
- A request in `Admission.short` can use nothing of hotkv. It is only reported.
- However a request ends, its lease is released and its load cancelled.
- `Admission.written` records an allocated block before any worker gets the step that writes it.

A call may wait a few ms for the server (`find.hits.Patience`).
"""

import time
from typing import Any

from hotkv_proto.reports import Miss
from hotkv_vllm.compat import NULL_BLOCK, kv_groups, steps
from hotkv_vllm.hints.hint_reader import HintReader
from hotkv_vllm.identity.adapters import Standing
from hotkv_vllm.scheduler.find.answers import HitAnswers
from hotkv_vllm.scheduler.find.common_loads import REPORTED_S
from hotkv_vllm.scheduler.load.load_room import LoadRoom
from hotkv_vllm.scheduler.load.orders import LoadOrders
from hotkv_vllm.scheduler.request import (
    ASK_AGAIN,
    NO_HIT,
    Answer,
    Phase,
    RequestState,
    is_fetched_elsewhere,
)
from hotkv_vllm.scheduler.sharing import Assembly, Engine, Sharing
from hotkv_vllm.scheduler.store.other_loads import OtherLoads
from hotkv_vllm.scheduler.written_blocks import WrittenBlocks


class Admission:
    """short: requests that fill no block even with their longest answer: when they arrived; None
        once vLLM has admitted them.
    written: device blocks that the next step is about to write.
    others: other connectors' loads, whose blocks may not be stored.
    lost_track: a callback has raised, so which blocks the next step reallocates is unknown; it
        revokes all stores.
    """

    def __init__(self, engine: Engine, sharing: Sharing) -> None:
        vllm_config, kv_cache_config = engine.vllm_config, engine.kv_cache_config
        transfer = vllm_config.kv_transfer_config
        self._sharing = sharing
        self._stats = engine.stats
        self._adapters = engine.adapters
        self._exactness = engine.exactness
        self._companion = engine.companion
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
        self.failed_loads = engine.failed_loads
        # Others can use a loaded block only if it gets into vLLM's own prefix cache.
        shares_loads = engine.companion is None or engine.companion.shares_loads
        self.answers = HitAnswers(
            engine.prefill,
            engine.stats,
            engine.adapters,
            engine.companion,
            self.room.has_room,
            self._is_idle,
            weighs_loads=engine.weighs_loads,
            shares_loads=vllm_config.cache_config.enable_prefix_caching and shares_loads,
            decodes_only=not self._may_store,
        )

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
        if self._companion is not None:
            self._companion.arrived(request, self.states.get(request.request_id), now_s)

    def _is_short(self, cache: Assembly, request: Any) -> bool:
        """True if a request can neither hit nor fill a block, and has no hint. A companion,
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
            and self._companion is None
            and self._traces is None
        )

    def _take_up(self, cache: Assembly, request: Any, now_s: float) -> None:
        state = RequestState(request, cache.planner.new_state(), arrived_s=now_s)
        state.trace = self._traces and self._traces.begin(request)
        state.ask(self._hints.asked(request, now_s))
        self.states[request.request_id] = state
        if request.lora_request is not None:
            self._adapters.arrived(request, now_s)
        elif self._refusal(request) is None:
            cache.finder.arrive(state, now_s)

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
        companion = self._companion
        if companion is not None and not companion.may_begin(request, state, now_s):
            return ASK_AGAIN
        if state is None or cache is None or self._sharing.joining is not None:
            return NO_HIT
        cache.planner.comes(state)
        cache.reports.matched(state, num_computed_tokens)
        waits = self._sharing.makes_wait(state.arrived_s, now_s)
        refusal = self._refusal(request)
        answer = ASK_AGAIN if waits else NO_HIT
        if not waits and refusal is None:
            answer = self.answers.answer(cache.finder, state, num_computed_tokens, now_s)
        cache.reports.answered(state, answer[0] is None, refusal)
        return answer

    def _is_idle(self) -> bool:
        """True if vLLM has admitted no request, so that its scheduler may pause. Never with
        data-parallel replicas, which take steps while another replica has work."""
        return not (
            self._has_replicas
            or None in self.short.values()
            or any(state.use.is_reported for state in self.states.values())
        )

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
                self.answers.drop(state)
                cache.finder.give_back(state)
            return
        tables = blocks.get_block_ids()
        block_ids = [tables[group.vllm_group] for group in cache.cache_groups]
        now_s = time.monotonic()
        job = cache.finder.begin_load(state, block_ids, num_external_tokens, NULL_BLOCK, now_s)
        if job is None:
            self._abandon(request.request_id)
            return
        job.timeout_s = self.answers.choice.time_for(state, job.timeout_s)
        job.traceparent = state.trace and state.trace.load(job, num_external_tokens)
        self.loads.begin(job, blocks)
        self.answers.load_begins(cache.finder, state, now_s + job.timeout_s + REPORTED_S)
        self._stats.add("loads")

    def _abandon(self, request_id: str) -> None:
        """The next step reports the load to vLLM, which awaits its end, as failed."""
        self.loads.abandon(request_id)
        state = self.states.get(request_id)
        if state is not None and self._sharing.cache is not None:
            self._sharing.cache.finder.load_failed(state)
            self.answers.drop(state)
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
        companion = self._companion
        may_store = companion is None or companion.ended(request, time.monotonic())
        self.written.ended(request.request_id)
        may_store &= self.others.may_store(request.request_id)
        self.others.ended(request.request_id)
        self.room.ended(request.request_id)
        self.answers.common.ended(request.request_id)
        if self._sharing.joining is not None:
            self._sharing.joining.requests.pop(request.request_id, None)
        try:
            self._finish(request, block_ids, may_store)
        finally:
            self.failed_loads.ended(request.request_id)
            self._exactness.ended(request.request_id)
            self._adapters.ended(request.request_id)

    def _finish(self, request: Any, block_ids: Any, may_store: bool) -> None:
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
            and may_store
        )
        if not state.is_loading:
            self.answers.drop(state)
        cache.reports.ended(state)
        finder.give_back(state)
        del self.states[request.request_id]
        if (
            self._may_store
            and state.store.may_store
            and is_computed
            and self._sharing.links.are_complete
        ):
            # The last sampled token's place may hold another token's KV: no block that ends with
            # it is stored.
            known = max(request.num_prompt_tokens, request.num_tokens - 1)
            cache.planner.finish(state, block_ids, min(known, steps.written_tokens(request)))

    # ------------------------------------------------------------------ fallbacks of callbacks

    def request_broke(self, request_id: str) -> None:
        """Forgets a request for which a callback raised."""
        if self._sharing.joining is not None:
            self._sharing.joining.requests.pop(request_id, None)
        if self._companion is not None:
            self._companion.broke(request_id)
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
        self.answers.common.loads.pop(request_id, None)
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
