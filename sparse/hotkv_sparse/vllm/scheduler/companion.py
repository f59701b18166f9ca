"""`SparseScheduler`: what the connector's scheduler side asks about sparse decode and residency.

Owns the requests' rows, the pool's residents, and the sequences that the server knows. The last two
live as long as a session; without residency there are no residents. vLLM's block manager asks too
(`block_manager.ResidentManager`): how many tokens are pinned, who may begin, who is left out of a
step, who moves off the device.
"""

import time
import uuid
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

from hotkv_client.session import Session
from hotkv_sparse.vllm import attention_layers
from hotkv_sparse.vllm.device_pool import DevicePool
from hotkv_sparse.vllm.scheduler.calls import ResidencyCalls
from hotkv_sparse.vllm.scheduler.resident_requests import ResidentRequests
from hotkv_sparse.vllm.scheduler.rows import ResidentOnly, RowNames, SparseRows
from hotkv_sparse.vllm.scheduler.sequences import SparseGroup, SparseSequences
from hotkv_sparse.vllm.settings import SparseSettings
from hotkv_sparse.vllm.step import SparseStep
from hotkv_sparse.vllm.worker.reporter import SparseReport
from hotkv_vllm.callbacks import CallbackEdge, callback, nothing
from hotkv_vllm.compat.kv_groups import CacheGroup
from hotkv_vllm.identity.exactness import Exactness, announce
from hotkv_vllm.link import StreamCount, logger
from hotkv_vllm.scheduler.groups import CachedGroups
from hotkv_vllm.scheduler.request import RequestState
from hotkv_vllm.stats import HotKVStats


class SparseScheduler:
    """rows: decides which requests of a step attend sparsely.
    residents, sequences: of the present session; None without.
    """

    def __init__(
        self,
        settings: SparseSettings,
        vllm_config: Any,
        kv_cache_config: Any,
        stats: HotKVStats,
        exactness: Exactness,
        edge: CallbackEdge,
    ) -> None:
        self.edge = edge
        self._settings = settings
        self._stats = stats
        self._exactness = exactness
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self.pool = DevicePool(vllm_config, kv_cache_config)
        self.frees_blocks = self.pool.spec is not None
        self.shares_loads = self.pool.spec is None or self.pool.spec.begins_whole
        self.left_out = self.pool.left_out
        exactness.distrusted = self.pool.distrust
        self.residents: ResidentRequests | None = None
        self.sequences: SparseSequences | None = None
        self._lacks_layers = False
        limits = None
        if self.frees_blocks and vllm_config.device_config.device_type == "cuda":
            replays = attention_layers.replays_decode(vllm_config)
            limits = ResidentOnly(self._is_moved, replays)
        self._limits = limits
        self.rows = RowNames(
            settings.sparse,
            attention_layers.sparse_groups(kv_cache_config),
            self.pool.has_away,
            limits,
            lambda: self._lacks_layers,
            int(vllm_config.num_speculative_tokens),
        )
        announce(self._engine_id, self.rows)

    def __repr__(self) -> str:
        return f"SparseScheduler({self.pool}, {self.rows}, {self.residents}, {self.sequences})"

    def _is_moved(self, request_id: str) -> bool:
        is_resident = self.residents is not None and self.residents.keeps(request_id)
        return is_resident and self.pool.is_moved(request_id)

    # ------------------------------------------------------------------------------------- session

    def join(
        self,
        session: Session,
        streams: StreamCount,
        groups: CachedGroups,
        cache_groups: Sequence[CacheGroup],
        notes: Sequence[Any],
    ) -> ResidentRequests | None:
        """notes: (layer number, vLLM group) of the layers that may attend sparsely."""
        self.leave()
        self._lacks_layers = not any(notes)
        sparse = {number for _, number in notes[0] or ()}
        sparse_groups = [
            SparseGroup(index, group.block_tokens)
            for index, group in enumerate(cache_groups)
            if group.vllm_group in sparse
        ]
        if sparse_groups:
            prefix = f"{self._engine_id[:8]}-{uuid.uuid4().hex[:8]}"
            least = self._settings.sparse.min_context_tokens
            self.sequences = SparseSequences(
                session, streams, sparse_groups, groups.hashes, least, prefix
            )
        if self.frees_blocks:
            numbers = [group.vllm_group for group in cache_groups]
            group = numbers.index(self.pool.group)
            self.residents = ResidentRequests(
                ResidencyCalls(session, streams, self._stats, group),
                groups,
                self._exactness,
                self.pool,
                self._stats,
                self._settings.residency_timeout_s,
                group,
                tells_whole=self._limits is None,
            )
        return self.residents

    def leave(self) -> None:
        self.residents = self.sequences = None

    # ------------------------------------------------------------------------------------ requests

    def arrived(self, request: Any, state: RequestState | None, now_s: float) -> None:
        if self.residents is not None and state is not None:
            self.residents.arrived(state, now_s)
        self._begin_sequences(request, state)

    @callback(nothing, is_part=True, safe="Rows without a name attend to all tokens.")
    def _begin_sequences(self, request: Any, state: RequestState | None) -> None:
        self.rows.arrived(request)
        # Of an adapter's request the hashes are not known yet: it is followed from its first step.
        if self.sequences is not None and state is not None and request.lora_request is None:
            self.sequences.arrived(request)

    def may_begin(self, request: Any, state: RequestState | None, now_s: float) -> bool:
        if not self.frees_blocks:
            return True
        return not self.pool.heed_wait(request, not self._is_admitted(request, state, now_s))

    def _is_admitted(self, request: Any, state: RequestState | None, now_s: float) -> bool:
        """If not all its blocks may fit on the device, the server must have reserved room. Makes
        vLLM fail a request that can never begin."""
        if request.resumable:
            # The server reserves room for the request's greatest length, which streamed input
            # would exceed.
            self.pool.fail(request.request_id, "residency does not work with streamed input")
            return False
        if self.pool.was_preempted(request.request_id):
            return False
        if self.pool.holds_whole(request):
            return True
        if self.residents is not None and state is not None:
            return self.residents.is_admitted(state, now_s)
        self.pool.begin_whole(request.request_id, self.pool.could_be_whole(request))
        if self.pool.stays_whole(request):
            return True
        self.pool.fail(request.request_id, "it outgrows the device, and hotkv is off")
        return False

    def usable_tokens(self, request: Any, device_tokens: int, hit_tokens: int) -> int | None:
        return (
            hit_tokens
            if self.residents is None
            else self.residents.usable_tokens(request, device_tokens, hit_tokens)
        )

    def ended(self, request: Any, now_s: float) -> bool:
        self._end_sequences(request.request_id, now_s)
        return self.pool.holds_whole(request)

    @callback(
        nothing,
        is_part=True,
        safe=(
            "Names of requests that have ended match no row; the server ends sequences with their "
            "session."
        ),
    )
    def _end_sequences(self, request_id: str, now_s: float) -> None:
        if self.residents is not None:
            self.residents.ended(request_id)
        self.rows.ended(request_id)
        if self.sequences is not None:
            self.sequences.ended(request_id, now_s)

    def broke(self, request_id: str) -> None:
        if self.frees_blocks:
            self.pool.fail(request_id, "a callback of hotkv's broke")

    # --------------------------------------------------------------------------------------- steps

    def begin_step(self, scheduler_output: Any) -> Collection[int]:
        """The hot slots that workers do not know yet."""
        self.rows.of_step(scheduler_output)
        if self.residents is None:
            return ()
        return self.residents.rows.fresh_hot_blocks(scheduler_output.num_scheduled_tokens)

    def step(
        self, scheduler_output: Any, states: Mapping[str, RequestState], now_s: float
    ) -> SparseStep:
        rows = self.rows.of_step(scheduler_output)
        last = self._plan_sparse(rows, states, now_s)
        if self.residents is None:
            return SparseStep(rows, last)
        return SparseStep(rows, last, self.residents.step(scheduler_output, self.rows, now_s))

    @callback(
        lambda *_: (),
        last=(),
        is_part=True,
        safe="A later step reports the step's sequences to the server.",
    )
    def _plan_sparse(
        self, rows: SparseRows, states: Mapping[str, RequestState], now_s: float
    ) -> tuple[str, ...]:
        return () if self.sequences is None else self.sequences.step(rows, states, now_s)

    def reported(self, report: SparseReport | None) -> None:
        if self.residents is not None:
            self.residents.step_ended()
        if self.sequences is not None and report is not None:
            self.sequences.reported(report)

    def distrust(self) -> None:
        if self.residents is not None:
            self.residents.distrust()

    # ------------------------------------------------------------------------------ block manager

    def bind(self, kv_cache_manager: Any) -> None:
        self.pool.bind(
            kv_cache_manager,
            self._kept_tokens,
            self._exact_tokens,
            self._has_room,
            self._step_starts,
        )
        if self.frees_blocks:
            logger.info("hotkv: %s", self.pool.describe())

    @callback(lambda *_: 0, last=0, is_part=True, safe="No block is freed early in this step.")
    def _kept_tokens(self, request_id: str) -> int:
        return 0 if self.residents is None else self.residents.kept_tokens(request_id)

    @callback(lambda *_: 0, last=0, is_part=True, safe="Nobody hits the request's new blocks.")
    def _exact_tokens(self, request: Any) -> int:
        return self._exactness.shareable_tokens(request)

    @callback(lambda *_: False, last=False, is_part=True, safe="The request waits.")
    def _has_room(self, request_id: str) -> bool:
        return self.residents is not None and self.residents.has_room(request_id)

    @callback(
        nothing,
        is_part=True,
        safe=(
            "No request is left out of the step: blocks without room stay on the device, and vLLM "
            "may preempt another request in place of one that has lost bytes."
        ),
    )
    def _step_starts(self) -> None:
        """Runs before vLLM plans a step."""
        residents = self.residents
        self.pool.leave_out(() if residents is None else residents.held(time.monotonic()))
        if residents is not None:
            residents.make_room()

    def is_freeing(self) -> bool:
        return self.residents is not None and self.residents.is_freeing(time.monotonic())

    def lost(self, first_blocks: Set[int]) -> None:
        """Limitation of vLLM 0.32: lost in the step that ends its prompt, a request gets no prompt
        logprobs. vLLM drops the step's output, and does not compute them again
        (`GPUModelRunner._get_prompt_logprobs_dict`)."""
        if not self.frees_blocks:
            return
        request_ids = self.pool.requests_of(first_blocks)
        for request_id in request_ids:
            self.pool.lose(request_id)
        if self.residents is not None:
            self.residents.lost(request_ids)

    def lost_broke(self, first_blocks: Set[int]) -> None:
        self.pool.lose_blocks(first_blocks)
