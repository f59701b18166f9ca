"""The connector's scheduler side: answers vLLM's scheduler and plans each step's loads and stores.

Owns one state per request, the scheduler's session, the leases and the store plan. Runs in the scheduler's thread and never blocks
after the start; with no server every hook returns after one test.
"""

import logging
import time
import uuid
from typing import Any

from hotkv import native
from hotkv.keys import KeySpace, Representation
from hotkv_client.fence import Revocations
from hotkv_client.types import Role, SessionConfig
from hotkv_vllm import compat, link
from hotkv_vllm.allocations import Allocations
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.hints import HintReader
from hotkv_vllm.lookup import NO_HIT, HitFinder, Phase, RequestState
from hotkv_vllm.metadata import HotKVHandshake, HotKVMetadata, HotKVWorkerMetadata, LoadJob
from hotkv_vllm.reports import UseReports
from hotkv_vllm.represented import Represented
from hotkv_vllm.reset import CacheReset
from hotkv_vllm.sparse.memory import SparseGroup, SparseMemory, Streams
from hotkv_vllm.sparse.rows import SparseRows
from hotkv_vllm.stats import HotKVStats
from hotkv_vllm.stores import StorePlanner

logger = link.logger


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
        self._said_lora = False
        self.stats = HotKVStats()
        self.totals = HotKVStats()
        self.session: link.CacheSession | None = None
        self.finder: HitFinder | None = None
        self.planner: StorePlanner | None = None
        self._hints = HintReader(self.stats)
        self._reports: UseReports | None = None
        self._reset: CacheReset | None = None
        self._memory: SparseMemory | None = None
        self._groups: tuple[compat.CacheGroup, ...] = ()
        self._block_tokens = compat.group_block_tokens(vllm_config, kv_cache_config)
        self._allocations = Allocations(self._block_tokens)
        self._allocated: set[int] = set()

    def __repr__(self) -> str:
        return f"HotKVScheduler(requests={len(self._requests)}, loads={len(self._loads)}, planner={self.planner})"

    # ------------------------------------------------------------------------------------------------------------ start

    def connect(self, handshakes: list[HotKVHandshake]) -> None:
        """Opens the session for the key space that all ranks agree on; waits a moment for the server. May load numba's kernels."""
        off = next((h.why_off for h in handshakes if h.key_space is None), "")
        spaces = [h.key_space for h in handshakes if h.key_space is not None]
        if not off and (not spaces or any(space.fingerprint != spaces[0].fingerprint for space in spaces)):
            off = "the ranks do not agree on the key space"
        revocations = None
        # Where ranks have named fences their stores need words.
        in_advance = compat.writes_before_it_tells(self._vllm_config, self._kv_cache_config) or any(h.fence is not None for h in handshakes)
        if not off and in_advance:
            try:
                revocations = self._revocations(handshakes)
            except (OSError, ValueError) as error:
                off = (
                    "model runner V2 writes blocks of this model before it tells connectors' workers that they change hands, and the "
                    f"scheduler can't reach the workers' fences ({error}); set VLLM_USE_V2_MODEL_RUNNER=0"
                )
        if off:
            logger.warning("hotkv is off: %s; the engine runs without it", off)
            return
        kinds = handshakes[0].representations
        if any(h.representations != kinds for h in handshakes):
            logger.warning("hotkv: the ranks do not agree on representations; each rank builds its own")
            kinds = ()
        self._start(spaces[0], kinds, handshakes[0].sparse_layers, revocations)

    def _revocations(self, handshakes: list[HotKVHandshake]) -> Revocations:
        """The fences of all ranks. Raises OSError, ValueError."""
        places = [h.fence for h in handshakes if h.fence is not None]
        num_ranks = self._vllm_config.parallel_config.world_size
        if len(places) != num_ranks:
            raise ValueError(f"{len(places)} of {num_ranks} ranks have named one")
        return Revocations(places)

    def _start(
        self,
        space: KeySpace,
        kinds: tuple[Representation, ...],
        sparse_layers: tuple[tuple[int, int], ...],
        revocations: Revocations | None,
    ) -> None:
        # Before the first request: numba takes a second to load and some kernels to compile.
        native.load("hotkv.kernels")
        self._groups = compat.cache_groups(self._vllm_config, self._kv_cache_config)
        streams = Streams(link.log_state("scheduler", logging.INFO))
        session = link.open_session(
            SessionConfig(
                target=self._config.target,
                engine_id=self._engine_id,
                role=Role.SCHEDULER,
                key_space=space,
                representations=kinds,
                client_name="hotkv-vllm scheduler",
                use_table=self._config.use_table,
                credentials=self._config.credentials,
                on_state=streams,
            )
        )
        prefix = f"{self._engine_id[:8]}-{uuid.uuid4().hex[:8]}"
        alignment = compat.hit_alignment_tokens(self._kv_cache_config, self._groups)
        self.finder = HitFinder(
            session,
            space.groups,
            space.hash_block_tokens,
            alignment,
            self._config,
            self.stats,
            prefix,
            compat.draft_groups(self._vllm_config, self._groups),
            Represented(len(space.groups), kinds),
        )
        self.planner = StorePlanner(
            session,
            self.finder,
            self._groups,
            self._vllm_config.parallel_config.world_size,
            self._config,
            self.stats,
            prefix,
            revocations,
        )
        self._reports = UseReports(session, space.hash_block_tokens, self.stats)
        self._reset = CacheReset(session, self.planner)
        sparse_groups = [
            SparseGroup(index, group.block_tokens, layers)
            for index, group in enumerate(self._groups)
            if (layers := frozenset(layer for layer, vllm_group in sparse_layers if vllm_group == group.vllm_group))
        ]
        if self._config.sparse is not None and sparse_groups:
            self._memory = SparseMemory(session, streams, sparse_groups, self.finder.hashes, self._config.sparse.min_context_tokens, prefix)
        self.session = session
        if session.wait_connected(self._config.startup_wait_s):
            # Touches the mapped table once, so that no request pays for it.
            for index in range(len(space.groups)):
                session.probe(index, [bytes(space.hash_bytes)])

    # --------------------------------------------------------------------------------------------------------- requests

    def on_new_request(self, request: Any) -> None:
        if self.finder is None or self.planner is None:
            return
        if request.lora_request is not None:
            # vLLM's hashes name the adapter, not its contents, so its KV is not shared.
            if not self._said_lora:
                self._said_lora = True
                logger.info("hotkv: requests with LoRA adapters do not use the shared cache")
            return
        now_s = time.monotonic()
        retention = self._hints.read(request.kv_transfer_params, now_s)
        state = RequestState(request, [0] * len(self._groups), self.planner.first_check_tokens(), retention, now_s)
        self._requests[request.request_id] = state
        if self._may_read(request):
            self.finder.arrive(state, now_s)
        if self._memory is not None:
            self._memory.arrived(request)

    def _may_read(self, request: Any) -> bool:
        is_resetting = self._reset is not None and self._reset.under_way
        return self._may_load and not request.skip_reading_prefix_cache and not is_resetting

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._allocations.matched(request.request_id, num_computed_tokens)
        state = self._requests.get(request.request_id)
        if state is None or self.finder is None:
            return NO_HIT
        state.device_hit_tokens = num_computed_tokens
        if not self._may_read(request):
            return NO_HIT
        if request.request_id in self.finder.step_aside:
            self.finder.step_aside.discard(request.request_id)
            return None, False
        return self.finder.match(state, num_computed_tokens, time.monotonic())

    def after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were allocated: begin the load, or give back what was taken for it."""
        self._allocations.allocated(request, blocks)
        state = self._requests.get(request.request_id)
        if state is not None and self._reports is not None:
            self._reports.admitted(state, num_external_tokens)
        if state is None or self.finder is None or self.planner is None:
            if num_external_tokens > 0:
                self._abandoned.append(request.request_id)
            return
        if num_external_tokens <= 0:
            if state.phase is not Phase.LOADING:
                self.finder.give_back(state)
            return
        tables = blocks.get_block_ids()
        block_ids = [tables[group.vllm_group] for group in self._groups]
        job = self.finder.begin_load(state, block_ids, num_external_tokens, compat.NULL_BLOCK)
        if job is None:
            self.abandon(request.request_id)
            return
        self._loads[request.request_id] = job
        self.stats.add("loads")

    def abandon(self, request_id: str) -> None:
        """A request waits for a load that will not be: the workers report it as failed, and it is offered no other."""
        self._loads.pop(request_id, None)
        self._abandoned.append(request_id)
        state = self._requests.get(request_id)
        if state is not None and self.finder is not None:
            self.finder.load_failed(state)
            self.finder.give_back(state)

    def finished(self, request: Any, block_ids: Any) -> None:
        """A request ended, or was aborted wherever it stood."""
        self._allocations.ended(request.request_id)
        state = self._requests.pop(request.request_id, None)
        if state is None or self.finder is None or self.planner is None:
            return
        loading = state.phase is Phase.LOADING
        if loading:
            self._cancel.append(request.request_id)
        loading |= request.request_id in self.finder.failed_waiting
        self.finder.give_back(state)
        self.finder.failed_waiting.discard(request.request_id)
        self.finder.step_aside.discard(request.request_id)
        # vLLM counts tokens as computed from the moment their load begins; until it has ended the blocks hold nothing to store.
        if self._may_store and state.may_store and not loading:
            # The last sampled token's slot may hold another token's KV, so a block that ends there is not stored.
            known = max(request.num_prompt_tokens, request.num_tokens - 1)
            self.planner.finish(state, block_ids, min(known, request.num_computed_tokens))

    # ------------------------------------------------------------------------------------------------------------ steps

    def build_meta(self, scheduler_output: Any) -> HotKVMetadata:
        """This step's work for the workers."""
        self._allocated |= self._allocations.take()
        if self._config.sparse is not None:
            self._allocated |= compat.fresh_block_ids(scheduler_output, self._block_tokens)
        if self.planner is None or self.finder is None or self._reports is None or self._reset is None:
            return self.only_pending()
        allocated = self._allocated
        now_s = time.monotonic()
        self._reports.send(now_s)
        self._reset.step(now_s)
        if self.finder.failed_waiting:
            self.finder.failed_waiting.difference_update(scheduler_output.num_scheduled_tokens)
        block_state = scheduler_output.kv_connector_block_state
        handoffs = block_state.boundary_state_offloads if block_state is not None else {}
        scheduled: list[tuple[RequestState, int]] = []
        if self._may_store and block_state is not None:
            requests = self._requests
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
                state = requests.get(request_id)
                if state is None or not state.may_store:
                    continue
                if state.request.num_computed_tokens + num_tokens >= state.next_store_tokens or request_id in handoffs:
                    scheduled.append((state, num_tokens))
        stores, flush = self.planner.plan(
            scheduled,
            block_state.get_block_ids if block_state is not None else lambda _: None,
            handoffs,
            lambda: compat.fresh_block_ids(scheduler_output, self._block_tokens) | allocated,
        )
        if flush:
            self.stats.add("flushes", len(flush))
        meta = self.only_pending()
        meta.stores, meta.flush_stores = stores, flush
        return meta

    def only_pending(self) -> HotKVMetadata:
        """What must reach the workers in any case: loads, cancels, loads that are no more, and for sparse decode allocated blocks."""
        meta = HotKVMetadata(loads=tuple(self._loads.values()), cancel_loads=tuple(self._cancel), abandoned_loads=tuple(self._abandoned))
        if self._config.sparse is not None:
            meta.allocated_blocks = tuple(self._allocated)
        self._loads, self._cancel, self._abandoned, self._allocated = {}, [], [], set()
        return meta

    def plan_broke(self) -> HotKVMetadata:
        """The work of a step whose planning broke: which blocks it gives away is not known, so that it waits for all stores."""
        meta = self.only_pending()
        meta.flush_stores = self.planner.take_all_back() if self.planner is not None else ()
        return meta

    def update(self, output: Any) -> None:
        """Results of a step, joined over all ranks."""
        report = output.kv_connector_worker_meta
        if isinstance(report, HotKVWorkerMetadata):
            for name, value in report.counters.items():
                self.stats.add(name, value)
        if self.finder is None or self.planner is None:
            return
        failed = output.failed_recving or ()
        for request_id in output.finished_recving or ():
            state = self._requests.get(request_id)
            if request_id in failed:
                self.stats.add("failed_loads")
            if state is not None:
                self.finder.end_load(state, request_id in failed)
        if isinstance(report, HotKVWorkerMetadata):
            self.planner.reported(report)
            if self._memory is not None and report.sparse is not None:
                self._memory.reported(report.sparse)

    def plan_sparse(self, meta: HotKVMetadata, rows: SparseRows) -> None:
        """Adds to a step's work what the server remembers for its sparse rows, and what is asked about ended requests."""
        if self._memory is not None:
            meta.remembered, meta.hot_sets_of = self._memory.step(rows, self._requests, time.monotonic())

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
        """Empties the shared cache of this key space, for all engines, and forgets what this side knows of it.

        True where the server has done so, or hotkv is off. Blocks `hotkv.reset_timeout_s` at most.
        """
        if self.finder is None or self.planner is None or self._reset is None:
            return True
        self.stats.add("resets")
        self.finder.hidden.clear_all()
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
                state.stored_blocks, state.next_store_tokens = [0] * len(self._groups), self.planner.first_check_tokens()
        return self._reset.begin(self._config.reset_timeout_s)

    def shutdown(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None
            self.finder = self.planner = self._reports = self._reset = self._memory = None
