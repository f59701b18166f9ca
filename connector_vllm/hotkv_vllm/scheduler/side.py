"""The connector's scheduler side: answers vLLM's scheduler and plans each step's loads and stores.

Owns one state per request, the scheduler's session, the leases and the store plan. Runs in the
scheduler's thread and never blocks after the start; with no server every hook returns after one
test.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hotkv import native
from hotkv_client.fence import Revocations
from hotkv_vllm import link
from hotkv_vllm.adapters import AdapterReport, Adapters, Standing
from hotkv_vllm.compat import NULL_BLOCK, checks, kv_groups, steps
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.metadata import HotKVHandshake, HotKVMetadata, HotKVWorkerMetadata, LoadJob
from hotkv_vllm.rekeying import RECONNECT_S, Rekeying
from hotkv_vllm.scheduler.allocations import Allocations
from hotkv_vllm.scheduler.assembly import Agreement, Engine, open_parts
from hotkv_vllm.scheduler.exactness import Exactness
from hotkv_vllm.scheduler.hints import HintReader
from hotkv_vllm.scheduler.hits import NO_HIT, HitFinder, Phase, RequestState
from hotkv_vllm.scheduler.joining import Joining
from hotkv_vllm.scheduler.other_loads import OtherLoads
from hotkv_vllm.scheduler.quarantine import HeldBlocks
from hotkv_vllm.scheduler.reports import UseReports
from hotkv_vllm.scheduler.reset import CacheReset
from hotkv_vllm.scheduler.stores import StorePlanner
from hotkv_vllm.scheduler.worker_links import WorkerLinks
from hotkv_vllm.sparse.memory import SparseMemory
from hotkv_vllm.sparse.rows import SparseRows
from hotkv_vllm.stats import HotKVStats
from hotkv_vllm.worker.ranks import this_host

logger = link.logger

LINKS_PATIENCE_S = 0.25
"""How long a request may wait for the workers to say that they, too, have a session with a server
that has come back."""


class HotKVScheduler:
    """Scheduler side. Idle until `connect` was given the workers' key space."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._may_load = vllm_config.kv_transfer_config.is_kv_consumer
        self._may_store = vllm_config.kv_transfer_config.is_kv_producer
        self._requests: dict[str, RequestState] = {}
        self._loads: dict[str, LoadJob] = {}
        self._cancel: list[str] = []
        self._abandoned: list[str] = []
        self._counts_media = checks.counts_media(vllm_config)
        self._adapters = Adapters(
            vllm_config.parallel_config.world_size, lambda text: logger.warning("hotkv: %s", text)
        )
        self.stats = HotKVStats()
        self.totals = HotKVStats()
        self.session: link.CacheSession | None = None
        self._handshakes: list[HotKVHandshake] = []
        self.finder: HitFinder | None = None
        self.planner: StorePlanner | None = None
        self._hints = HintReader(self.stats)
        self._reports: UseReports | None = None
        self._reset: CacheReset | None = None
        self._agreement: Agreement | None = None
        self._weights = Rekeying(vllm_config.parallel_config.world_size, "")
        self._memory: SparseMemory | None = None
        self._groups: tuple[kv_groups.CacheGroup, ...] = ()
        self._block_tokens = kv_groups.group_block_tokens(vllm_config, kv_cache_config)
        self._allocations = Allocations(self._block_tokens)
        self._allocated: set[int] = set()
        self._exactness = Exactness(self._block_tokens, kv_cache_config.num_blocks)
        self._joining: Joining | None = None
        self._others = OtherLoads()
        self._to_end: set[str] = set()
        self._lost_track = False
        self._links = WorkerLinks()
        self.holds = HeldBlocks(vllm_config.parallel_config.world_size)

    def __repr__(self) -> str:
        return (
            f"HotKVScheduler(requests={len(self._requests)}, loads={len(self._loads)}, "
            f"planner={self.planner})"
        )

    # ---------------------------------------------------------------------------------------- start

    def connect(self, handshakes: list[HotKVHandshake]) -> None:
        """Opens the session for the key space that all ranks agree on; waits a moment for the
        server. May load numba's kernels.

        Without handshakes the workers are asked for theirs with the first steps (`joining`). vLLM
        0.33 calls it after each wake-up, too: a session whose ranks say the same as before goes on.
        """
        if not handshakes:
            if self.session is None:
                native.load("hotkv.kernels")
                self._joining = Joining(self._vllm_config.parallel_config.world_size)
            return
        self._joining = None
        self._links.told(
            {h.rank: h.absent for h in handshakes}, time.monotonic(), is_connected=False
        )
        settled = [replace(h, absent="") for h in handshakes]
        if self.session is not None:
            if settled == self._handshakes:
                return
            self._disconnect()
        self._handshakes = settled
        off = next((h.why_off for h in handshakes if h.key_space is None), "")
        spaces = [h.key_space for h in handshakes if h.key_space is not None]
        if not off and (
            not spaces or any(space.fingerprint != spaces[0].fingerprint for space in spaces)
        ):
            off = "the ranks do not agree on the key space"
        num_ranks = self._vllm_config.parallel_config.world_size
        if not off and len(handshakes) < num_ranks:
            # The others have no session, and no store would ever be whole.
            off = f"{len(handshakes)} of {num_ranks} ranks have said what they found"
        if not off and any(h.host not in ("", this_host()) for h in handshakes):
            off = (
                "the scheduler and the engine's ranks are on different machines; hotkv keeps "
                "KV of engines that are on one"
            )
        revocations = None
        # Where ranks have named fences their stores need words.
        in_advance = checks.writes_before_it_tells(self._vllm_config, self._kv_cache_config) or any(
            h.fence is not None for h in handshakes
        )
        if not off and in_advance:
            try:
                revocations = self._revocations(handshakes)
            except (OSError, ValueError) as error:
                off = (
                    "model runner V2 writes blocks of this model before it tells connectors' "
                    "workers that they change hands, and the "
                    f"scheduler can't reach the workers' fences ({error}); set "
                    "VLLM_USE_V2_MODEL_RUNNER=0"
                )
        if off:
            logger.warning("hotkv is off: %s; the engine runs without it", off)
            return
        kinds = handshakes[0].representations
        if any(h.representations != kinds for h in handshakes):
            logger.warning(
                "hotkv: the ranks do not agree on representations; each rank builds its own"
            )
            kinds = ()
        identity = spaces[0].weights_identity
        if self._weights.identity:
            self._weights.go_on(identity)
        else:
            self._weights = Rekeying(
                num_ranks, identity, any(h.weights_in_doubt for h in handshakes)
            )
        self._start(
            Agreement(spaces[0], kinds, handshakes[0].sparse_layers, revocations),
            self._config.startup_wait_s,
        )

    def _disconnect(self) -> None:
        """Ends the session of ranks that say something else now. Requests that are there already do
        without hotkv."""
        for request_id, state in self._requests.items():
            if state.phase is Phase.LOADING:
                self._cancel.append(request_id)
        self._requests.clear()
        self.shutdown()

    def _revocations(self, handshakes: list[HotKVHandshake]) -> Revocations:
        """The fences of all ranks. Raises OSError, ValueError."""
        places = [h.fence for h in handshakes if h.fence is not None]
        num_ranks = self._vllm_config.parallel_config.world_size
        if len(places) != num_ranks:
            raise ValueError(f"{len(places)} of {num_ranks} ranks have named one")
        return Revocations(places)

    def _start(self, agreement: Agreement, wait_s: float) -> None:
        """Makes what works over this key space, and waits a moment for the server."""
        # Before the first request: numba takes a second to load and some kernels to compile.
        native.load("hotkv.kernels")
        self._groups = kv_groups.cache_groups(self._vllm_config, self._kv_cache_config)
        engine = Engine(
            self._vllm_config,
            self._kv_cache_config,
            self._config,
            self._groups,
            self.stats,
            self._adapters,
            self._exactness,
        )
        parts = open_parts(engine, agreement)
        self._agreement, self.session, self.finder, self.planner = (
            agreement,
            parts.session,
            parts.finder,
            parts.planner,
        )
        self._reports, self._reset, self._memory = parts.reports, parts.reset, parts.memory
        if self._counts_media:
            logger.warning(
                "hotkv: requests with images or other media do not use the shared cache: vLLM "
                "names media by a counter where "
                "mm_processor_cache_gb is 0 and prefix caching is off; turn one of them on"
            )
        if parts.session.wait_connected(wait_s):
            # The workers have waited as long.
            self._links.check(True, time.monotonic(), 0.0)
            # Touches the mapped table once, so that no request pays for it.
            for index in range(len(agreement.space.groups)):
                parts.session.probe(index, [bytes(agreement.space.hash_bytes)])

    def _adopt(self, identity: str) -> None:
        """All ranks have said which weights they have. If these are others, all is made anew for
        their key space."""
        before, agreement = self._weights.identity, self._agreement
        self._weights.adopt(identity)
        if identity == before or agreement is None or self.finder is None or self.session is None:
            return
        logger.info(
            "hotkv: the engine's weights have changed; from now on it shares KV with engines "
            "that have the same (%s)",
            identity,
        )
        self._exactness.distrust_all()
        for state in self._requests.values():
            # Loads of the old weights' KV were made to fail.
            state.hint, state.miss_until_s, state.failed_loads = None, 0.0, 0
            if state.phase is not Phase.LOADING:
                self.finder.give_back(state)
        # Changed weights are worth a moment, so that the first request can hit; without a server
        # there is nothing to wait for.
        wait_s = min(self._config.startup_wait_s, RECONNECT_S) if self.is_connected else 0.0
        # Closing waits for the server.
        threading.Thread(target=self.session.close, name="hotkv-close", daemon=True).start()
        space = replace(agreement.space, weights_identity=identity)
        self._handshakes = [replace(h, key_space=space) for h in self._handshakes]
        self._start(replace(agreement, space=space), wait_s)

    def _weights_changed(self) -> None:
        """Weights may be others: loads of what was computed with the old ones come to nothing."""
        for request_id, state in self._requests.items():
            if state.phase is Phase.LOADING:
                self._cancel.append(request_id)

    # ------------------------------------------------------------------------------------- requests

    def on_new_request(self, request: Any) -> None:
        if self._joining is not None:
            self._joining.arrived(request)
        if self.finder is None or self.planner is None:
            return
        if self._counts_media and request.mm_features:
            return
        now_s = time.monotonic()
        retention = self._hints.read(request.kv_transfer_params, now_s)
        state = RequestState(
            request, [0] * len(self._groups), self.planner.first_check_tokens(), retention, now_s
        )
        self._requests[request.request_id] = state
        if not self._links.are_complete and self.is_connected:
            self.stats.add("unserved_requests")
        if request.lora_request is not None:
            self._adapters.arrived(request, now_s)
            return
        if self._may_read(request):
            self.finder.arrive(state, now_s)

    def sparse_arrived(self, request: Any) -> None:
        """A request arrived: its sequences begin, if hotkv knows it."""
        if (
            self._memory is not None
            and request.request_id in self._requests
            and request.lora_request is None
        ):
            self._memory.arrived(request)

    def _may_read(self, request: Any) -> bool:
        is_resetting = self._reset is not None and self._reset.under_way
        is_held = is_resetting or self._weights.under_way
        return (
            self._may_load
            and self._links.are_complete
            and not request.skip_reading_prefix_cache
            and not is_held
        )

    @property
    def is_connected(self) -> bool:
        return self.session is not None and self.session.connected

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._allocations.matched(request.request_id, num_computed_tokens)
        if self._joining is not None:
            return self._ask_again_while_joining()
        state = self._requests.get(request.request_id)
        if state is None or self.finder is None:
            return NO_HIT
        state.device_hit_tokens = num_computed_tokens
        now_s = time.monotonic()
        if (
            self._links.will_say
            and self.is_connected
            and now_s < state.arrived_s + LINKS_PATIENCE_S
        ):
            return None, False
        if self._weights.waits(now_s) and self.is_connected:
            return None, False
        if not self._may_read(request):
            return NO_HIT
        if request.request_id in self.finder.step_aside:
            self.finder.step_aside.discard(request.request_id)
            return None, False
        if request.lora_request is not None:
            standing = self._adapters.standing(request, now_s)
            if standing is not Standing.KNOWN:
                self.finder.give_back(state)
                return (None, False) if standing is Standing.WAIT and self.is_connected else NO_HIT
            if self._memory is not None:
                self._memory.arrived(request)
        return self.finder.match(state, num_computed_tokens, now_s)

    def _ask_again_while_joining(self) -> tuple[int | None, bool]:
        assert self._joining is not None
        said = self._joining.was_late
        if self._joining.must_wait(time.monotonic()):
            return None, False
        if not said:
            logger.warning(
                "hotkv is off until all ranks have told the scheduler what they store; the "
                "engine runs without it"
            )
        return NO_HIT

    def after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were allocated: begin the load, or give back what was taken for it."""
        self._allocations.allocated(request, blocks)
        self._others.admitted(request.request_id)
        state = self._requests.get(request.request_id)
        if state is not None and self._reports is not None:
            self._reports.admitted(state, num_external_tokens)
        if state is None or self.finder is None or self.planner is None:
            if num_external_tokens > 0:
                self.abandon(request.request_id)
            return
        if num_external_tokens <= 0:
            if state.phase is not Phase.LOADING:
                self.finder.give_back(state)
            return
        tables = blocks.get_block_ids()
        block_ids = [tables[group.vllm_group] for group in self._groups]
        job = self.finder.begin_load(state, block_ids, num_external_tokens, NULL_BLOCK)
        if job is None:
            self.abandon(request.request_id)
            return
        self.holds.begun(job, blocks)
        self._loads[request.request_id] = job
        self._to_end.add(request.request_id)
        self.stats.add("loads")

    def abandon(self, request_id: str) -> None:
        """A request waits for a load that will not be: the workers report it as failed, and it is
        offered no other."""
        self._loads.pop(request_id, None)
        self._abandoned.append(request_id)
        self.holds.loading.pop(request_id, None)
        self._to_end.add(request_id)
        state = self._requests.get(request_id)
        if state is not None and self.finder is not None:
            self.finder.load_failed(state)
            self.finder.give_back(state)

    def finished(self, request: Any, block_ids: Any) -> None:
        """A request ended, or was aborted wherever it stood."""
        self._allocations.ended(request.request_id)
        all_is_there = self._others.may_store(request.request_id)
        self._others.ended(request.request_id)
        if self._joining is not None:
            self._joining.ended(request.request_id)
        try:
            self._finish(request, block_ids, all_is_there)
        finally:
            self._exactness.ended(request.request_id)
            self._adapters.ended(request.request_id)

    def _finish(self, request: Any, block_ids: Any, all_is_there: bool) -> None:
        state = self._requests.pop(request.request_id, None)
        if state is None or self.finder is None or self.planner is None:
            return
        loading = state.phase is Phase.LOADING
        if loading:
            self._cancel.append(request.request_id)
        # vLLM 0.33 may have put its load off.
        loading |= (
            state.phase is Phase.GRANTED
            or request.request_id in self.finder.failed_waiting
            or not all_is_there
        )
        self.finder.give_back(state)
        self.finder.failed_waiting.discard(request.request_id)
        self.finder.step_aside.discard(request.request_id)
        # vLLM counts tokens as computed from the moment their load begins; until it has ended the
        # blocks hold nothing to store.
        if self._may_store and state.may_store and not loading and self._links.are_complete:
            # The last sampled token's slot may hold another token's KV, so a block that ends there
            # is not stored.
            known = max(request.num_prompt_tokens, request.num_tokens - 1)
            self.planner.finish(state, block_ids, min(known, request.num_computed_tokens))

    # ---------------------------------------------------------------------------------------- steps

    def build_meta(
        self, scheduler_output: Any, sparse_requests: Sequence[str] | None = None
    ) -> HotKVMetadata:
        """This step's work for the workers. `sparse_requests`: requests whose row decodes sparsely;
        None if the engine never does."""
        settles_step = self._others.step(
            scheduler_output.num_scheduled_tokens, scheduler_output.has_sync_kv_loads
        )
        self._allocated |= self._allocations.take()
        self._exactness.is_watching |= sparse_requests is not None
        if self._exactness.is_watching:
            self._allocated |= steps.fresh_block_ids(scheduler_output, self._block_tokens)
            self._exactness.step(scheduler_output, self._allocated, sparse_requests or ())
        if self._lost_track and self.planner is not None:
            self.planner.take_all_back()
        if (
            self.planner is None
            or self.finder is None
            or self._reports is None
            or self._reset is None
        ):
            meta = self.only_pending()
            meta.wants_handshake, meta.settles_step = self._joining is not None, settles_step
            return meta
        allocated = self._allocated
        now_s = time.monotonic()
        identity = self._weights.step(scheduler_output.total_num_scheduled_tokens > 0, now_s)
        if identity is not None and not self.planner.num_in_flight:
            self._adopt(identity)
        self.planner.is_rekeying = self._weights.under_way
        self._links.check(self.is_connected, now_s)
        self._reports.send(now_s)
        self._reset.step(now_s)
        if self.finder.failed_waiting:
            self.finder.failed_waiting.difference_update(scheduler_output.num_scheduled_tokens)
        block_state = scheduler_output.kv_connector_block_state
        handoffs = block_state.boundary_state_offloads if block_state is not None else {}
        scheduled: list[tuple[RequestState, int]] = []
        if self._may_store and block_state is not None and self._links.are_complete:
            requests = self._requests
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
                state = requests.get(request_id)
                if state is None or not state.may_store or request_id in self._others.held:
                    continue
                if (
                    state.request.num_computed_tokens + num_tokens >= state.next_store_tokens
                    or request_id in handoffs
                ):
                    scheduled.append((state, num_tokens))
        stores, flush = self.planner.plan(
            scheduled,
            block_state.get_block_ids if block_state is not None else lambda _: None,
            handoffs,
            lambda: steps.fresh_block_ids(scheduler_output, self._block_tokens) | allocated,
        )
        if flush:
            self.stats.add("flushes", len(flush))
        meta = self.only_pending()
        meta.stores, meta.flush_stores, meta.settles_step = stores, flush, settles_step
        return meta

    def only_pending(self) -> HotKVMetadata:
        """What must reach the workers in any case: loads, cancels, loads that are no more, and for
        sparse decode allocated blocks."""
        meta = HotKVMetadata(
            loads=tuple(self._loads.values()),
            cancel_loads=tuple(self._cancel),
            abandoned_loads=tuple(self._abandoned),
            held_loads=self.holds.held,
            asks_links=not self._links.are_complete and self.is_connected,
            lost_track=self._lost_track,
            weights=self._weights.order(),
            adapters=self._adapters.take_work(),
        )
        if self._config.sparse is not None:
            meta.allocated_blocks = tuple(self._allocated)
        self._loads, self._cancel, self._abandoned, self._allocated, self._lost_track = (
            {},
            [],
            [],
            set(),
            False,
        )
        return meta

    def update(self, output: Any) -> None:
        """Results of a step, joined over all ranks."""
        report = output.kv_connector_worker_meta
        report = report if isinstance(report, HotKVWorkerMetadata) else HotKVWorkerMetadata()
        for name, value in report.counters.items():
            self.stats.add(name, value)
        self._links.told(report.links, time.monotonic(), self.is_connected)
        if self._weights.reported(report.weights, time.monotonic()):
            self._weights_changed()
        # Before vLLM frees anything of the requests that this step reports.
        num_hung = self.holds.overdue(report.overdue_loads) if report.overdue_loads else 0
        if num_hung:
            self.stats.add("hung_loads", num_hung)
        self.holds.settled(report.settled_loads)
        if report.settled_step:
            self._others.settled(report.settled_step, not output.invalid_block_ids)
        if self._joining is not None:
            self._join(self._joining, report)
        if self.finder is None or self.planner is None:
            return
        failed = output.failed_recving or ()
        for request_id in output.finished_recving or ():
            if request_id not in self._to_end:
                # Another connector's load.
                continue
            self._to_end.discard(request_id)
            self.holds.loading.pop(request_id, None)
            state = self._requests.get(request_id)
            if request_id in failed:
                self.stats.add("failed_loads")
            if state is not None:
                self.finder.end_load(state, request_id in failed)
        self.planner.reported(report)
        if report.adapters is not None:
            self._named(report.adapters)
        if self._memory is not None and report.sparse is not None:
            self._memory.reported(report.sparse)

    def _join(self, joining: Joining, report: HotKVWorkerMetadata) -> None:
        """Connects once all ranks have reported their handshakes, and takes up the requests that
        came before."""
        handshakes = joining.handshakes(report)
        if not handshakes:
            return
        self.connect(handshakes)
        for request in joining.take_requests():
            self.on_new_request(request)

    def _named(self, report: AdapterReport) -> None:
        """What workers say of LoRA adapters. Where bytes have changed, nothing is stored or loaded
        that was planned on the old ones."""
        self._adapters.reported(report)
        if not report.changed:
            return
        if self.planner is not None:
            self.planner.forget()
        now_s = time.monotonic()
        for request_id, state in self._requests.items():
            has_adapter = state.request.lora_request is not None
            if (
                has_adapter
                and state.phase is Phase.LOADING
                and self._adapters.standing(state.request, now_s) is Standing.NEVER
            ):
                self._cancel.append(request_id)

    def plan_sparse(self, meta: HotKVMetadata, rows: SparseRows) -> None:
        """Adds to a step's work what the server remembers for its sparse rows, and what is asked
        about ended requests."""
        if self._memory is not None:
            meta.remembered, meta.hot_sets_of = self._memory.step(
                rows, self._requests, time.monotonic()
            )

    def sparse_ended(self, request_id: str) -> None:
        """A request ended: so do its sequences on the server."""
        if self._memory is not None:
            self._memory.ended(request_id, time.monotonic())

    def take_stats(self) -> HotKVStats | None:
        """Counters' growth since the last call; None for no growth."""
        if self.stats.is_empty():
            return None
        taken = HotKVStats(data=self.stats.data)
        self.stats.reset()
        self.totals.aggregate(taken)
        return taken

    def reset_cache(self) -> bool:
        """Empties the shared cache of this key space, for all engines, and forgets what this side
        knows of it.

        A pause or a sleep leaves the shared cache as it is. Nothing is stored of blocks that were
        computed before it and not yet being stored, because vLLM may discard the KV memory. False
        only if a server that is there did not flush. Blocks `hotkv.reset_timeout_s` at most.
        """
        if self.finder is None or self.planner is None or self._reset is None:
            return True
        self._weights.suspect()
        self.planner.forget()
        for request_id, state in self._requests.items():
            state.hint, state.miss_until_s = None, 0.0
            if state.phase is Phase.LOADING:
                self._cancel.append(request_id)
            else:
                self.finder.give_back(state)
            if state.request.num_computed_tokens:
                # It holds blocks from before and goes on from them.
                state.may_store = False
            else:
                state.stored_blocks, state.next_store_tokens = (
                    [0] * len(self._groups),
                    self.planner.first_check_tokens(),
                )
        if checks.is_pausing():
            return True
        self.stats.add("resets")
        self.finder.hidden.clear_all()
        return self._reset.begin(self._config.reset_timeout_s)

    # -------------------------------------------------------------------- fallbacks of broken hooks

    def request_broke(self, request_id: str) -> None:
        """The request's hook broke: it goes on as one that hotkv does not know, and what it held is
        given back."""
        state = self._requests.pop(request_id, None)
        if state is not None and state.phase is Phase.LOADING:
            self._cancel.append(request_id)
        if state is not None and state.lease_id and self.session is not None:
            self.session.release(state.lease_id)
        self._allocations.ended(request_id)
        self._exactness.ended(request_id)
        self._adapters.ended(request_id)

    def end_broke(self, request_id: str) -> None:
        """The same for the hook that says that a request is no more: nobody waits for it, or
        because of it."""
        self.request_broke(request_id)
        self._others.ended(request_id)
        if self.finder is not None:
            self.finder.failed_waiting.discard(request_id)
            self.finder.step_aside.discard(request_id)

    def alloc_broke(self, request_id: str, num_external_tokens: int) -> None:
        """It is not known which blocks have changed hands, nor whether a load was planned: there is
        none, and no store is safe."""
        self._lost_track = True
        try:
            if num_external_tokens > 0:
                self.abandon(request_id)
        finally:
            self._others.admitted(request_id)

    def plan_broke(self) -> HotKVMetadata:
        """The work of a step whose planning broke: which blocks it gives away is not known, so all
        stores are taken back, those too that no worker was told of. Loads that were to begin count
        as failed, and what the step computes is not stored.
        """
        self._exactness.step_was_lost()
        self._others.lost()
        abandoned = (*self._loads, *self._abandoned)
        cancelled = tuple(self._cancel)
        self._loads, self._abandoned, self._cancel, self._lost_track = {}, [], [], False
        try:
            self._exactness.step_was_lost()
            if self.planner is not None:
                self.planner.plan_broke()
        finally:
            meta = HotKVMetadata(
                cancel_loads=cancelled,
                abandoned_loads=abandoned,
                held_loads=self.holds.held,
                lost_track=True,
            )
            meta.weights = self._weights.order()
        return meta

    def update_broke(self, output: Any) -> None:
        """Whatever of a step's results was not taken: its loads count as failed, and its stores as
        ended. Shares nothing with `update`."""
        report = output.kv_connector_worker_meta
        if self.planner is not None and isinstance(report, HotKVWorkerMetadata):
            self.planner.account(report)
        for request_id in output.finished_recving or ():
            if request_id not in self._to_end:
                continue
            self._to_end.discard(request_id)
            self.holds.loading.pop(request_id, None)
            state = self._requests.get(request_id)
            if state is not None and self.finder is not None:
                self.finder.give_up(state)

    def reset_broke(self) -> bool:
        """Nothing is loaded or stored until a flush is accepted; requests that run store nothing of
        what they have."""
        if self._reset is not None:
            self._reset.hold()
        for state in self._requests.values():
            state.hint, state.may_store = None, False
        return False

    def turn_off(self) -> None:
        """The start broke: this engine runs without hotkv."""
        self.finder = self.planner = self._reports = self._reset = self._memory = (
            self._agreement
        ) = None
        session, self.session = self.session, None
        if session is not None:
            session.close()

    # ------------------------------------------------------------------------------------------ end

    def shutdown(self) -> None:
        self.turn_off()
