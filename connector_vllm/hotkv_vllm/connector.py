"""`HotKVConnector`: vLLM's view of hotkv. Fails open: no exception of hotkv's reaches vLLM from any
hook.

Thin: scheduler hooks go to `HotKVScheduler`, worker hooks to `HotKVWorker`. A hook that breaks is
logged once, counted, and answers by its fallback, each of which says what makes it safe (`hooks`).
Only a wrong configuration raises, when the connector is constructed. Nothing happens per layer.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hotkv_vllm import link, versions
from hotkv_vllm.config import ConnectorConfig

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from hotkv_vllm.compat import Unsupported, checks, multi, places, sparse_layers
except ImportError as error:
    raise ImportError(versions.why_not_imported(error)) from error

from hotkv_vllm.hooks import class_hook, hook, nothing
from hotkv_vllm.metadata import HotKVHandshake, HotKVMetadata, HotKVWorkerMetadata
from hotkv_vllm.scheduler.side import HotKVScheduler
from hotkv_vllm.sparse.reporter import SparseReporter
from hotkv_vllm.sparse.rows import RowNames, SparseRows, announce, sparse_requests
from hotkv_vllm.sparse.setup import install
from hotkv_vllm.sparse.worker import SparseWorker
from hotkv_vllm.stats import HookClock, HotKVPromMetrics, HotKVStats, SilentPromMetrics
from hotkv_vllm.worker.side import HotKVWorker

logger = link.logger


class HotKVConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. Constructor as vLLM calls it; raises ConfigError."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = ConnectorConfig.from_extra_config(transfer.kv_connector_extra_config)
        self.config = config
        self._engine_id = str(transfer.engine_id)
        self._broken: set[str] = set()
        self._scheduler: HotKVScheduler | None = None
        self._worker: HotKVWorker | None = None
        self._rows: RowNames | None = None
        self._sparse: SparseWorker | None = None
        self._reporter: SparseReporter | None = None
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._is_unregistered = False
        self._is_child = False
        self._centres = None
        rank = vllm_config.parallel_config.rank
        self.clock = HookClock(
            "scheduler" if role is KVConnectorRole.SCHEDULER else f"worker-{rank}",
            str(transfer.engine_id),
        )
        why_off = versions.why_off(config.allow_untested_vllm)
        if why_off:
            logger.warning("hotkv is off: %s; the engine runs without it", why_off)
            return
        if config.sparse is not None:
            sparse_layers.check_sparse(vllm_config, kv_cache_config, config.sparse)
        self._centres = config.read_centres()
        outer = multi.outer_configs()
        self._is_child = bool(outer)
        if role is KVConnectorRole.SCHEDULER:
            self._use_recompute_policy(outer or (vllm_config,))
            self._scheduler = HotKVScheduler(vllm_config, kv_cache_config, config)
            if config.sparse is not None:
                self._rows = RowNames(config.sparse, sparse_layers.sparse_groups(kv_cache_config))
                announce(self._engine_id, self._rows)
        else:
            if self._centres is not None:
                sparse_layers.check_centres(vllm_config, kv_cache_config, self._centres)
            self._worker = HotKVWorker(vllm_config, kv_cache_config, config)

    def __repr__(self) -> str:
        return f"HotKVConnector({self._scheduler or self._worker})"

    def _use_recompute_policy(self, configs: tuple[Any, ...]) -> None:
        """`configs`: those that vLLM's scheduler may read; see `multi.outer_configs`."""
        if None in configs:
            logger.warning(
                "hotkv can't set kv_load_failure_policy in this MultiConnector; set it to "
                "'recompute' beside kv_connector MultiConnector, "
                "or a failed load ends its request as an error"
            )
        changed = [checks.use_recompute_policy(config) for config in configs if config is not None]
        if any(changed):
            also = ", for all connectors of this engine" if self._is_child else ""
            logger.info(
                "hotkv: kv_load_failure_policy is set to 'recompute'%s, so that a failed load "
                "costs time, not the request",
                also,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost store is a later miss, so a preempted request need not recompute what it
        produced."""
        return False

    def hook_broke(self, name: str) -> None:
        """Logs a hook's first fault with its traceback, and counts all."""
        if self._scheduler is not None:
            self._scheduler.stats.add("hook_errors")
        if self._worker is not None:
            self._worker.count("hook_errors")
        if name not in self._broken:
            self._broken.add(name)
            logger.exception("hotkv: hook %s broke; the engine goes on without its result", name)

    # --------------------------------------------------------------------------------- worker hooks

    def _memory_broke(self, *_: Any) -> None:
        if self._worker is not None:
            self._worker.turn_off(
                "its memory could not be shown to the server; see the engine's log"
            )

    @hook(
        _memory_broke,
        why=(
            "The rank says that it is off, and has no session; the scheduler then leaves the "
            "engine without hotkv."
        ),
    )
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._kv_caches = kv_caches
            # First the memory moves, then others look at it; the session tells the server of all of
            # it at once.
            self._worker.export(kv_caches)
            self._install_sparse(kv_caches)
            self._worker.open(self._sparse, self._centres)

    @hook(nothing, why="Layers without a worker attend to everything.", is_part=True)
    def _install_sparse(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self.config.sparse is None:
            return
        try:
            self._sparse = install(
                self.config.sparse,
                self.config.sparse_recall_steps,
                self._vllm_config,
                self._kv_cache_config,
                kv_caches,
                self._centres,
            )
        except Unsupported as error:
            logger.warning("hotkv: sparse decode is off in this worker: %s", error)
            return
        place = places.rank_place(self._vllm_config, self._kv_cache_config)
        self._reporter = SparseReporter(self._sparse, place.shard_index, place.is_writer)

    def _unregister_broke(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()

    @hook(
        _unregister_broke,
        why=(
            "The session is closed with all its transfers, so nothing reaches memory that is "
            "given up."
        ),
    )
    def unregister_kv_caches(self) -> None:
        """vLLM is about to discard the KV memory (from 0.33 on; 0.32 sleeps only with memory that
        hotkv can't share)."""
        if self._worker is None or self._worker.session is None:
            return
        self._is_unregistered = True
        self._worker.let_go()
        if self._sparse is not None:
            self._sparse.will_write(np.arange(self._kv_cache_config.num_blocks, dtype=np.int32))

    def _restore_broke(self) -> None:
        if self._worker is not None:
            self._worker.turn_off("its memory could not be shared again after a sleep")

    @hook(
        _restore_broke,
        why=(
            "The rank says that it is off, and has no session; the scheduler then leaves the "
            "engine without hotkv."
        ),
    )
    def restore_kv_caches(self) -> None:
        """The KV memory is mapped again at its old addresses, with other contents."""
        if self._worker is not None and self._is_unregistered:
            self._is_unregistered = False
            self._worker.export(self._kv_caches)
            self._worker.open(self._sparse, self._centres)

    @hook(
        lambda *_: HotKVHandshake(None, "a worker's handshake broke; see the engine's log"),
        why="The scheduler leaves an engine without hotkv if one of its ranks is off.",
    )
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """None in a MultiConnector, which would give it to other connectors too; the scheduler side
        asks for it in the first step."""
        return None if self._is_child else self._handshake()

    def _handshake(self) -> HotKVHandshake | None:
        if self._worker is None:
            return None
        layers = self._sparse.layers.values() if self._sparse is not None else ()
        return replace(
            self._worker.handshake,
            sparse_layers=tuple((layer.index, layer.group) for layer in layers),
        )

    def _distrust(self, *_: Any) -> None:
        """It is not known which blocks the step overwrites: nothing of what was known of any block
        holds."""
        try:
            if self._worker is not None:
                self._worker.take_everything_back()
        finally:
            self._distrust_sparse()

    def _distrust_sparse(self) -> None:
        if self._sparse is None:
            return
        try:
            self._sparse.start_over()
        except Exception:  # noqa: BLE001 - hook edge: attention may use nothing that is stale
            self._sparse.is_off = True
            self.hook_broke("start_over (sparse decode is off from now on)")
            if self._worker is not None:
                self._worker.without_representations()

    @hook(
        _distrust,
        why=(
            "All stores are revoked, or their session is closed, and the step attends to "
            "everything."
        ),
    )
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.clock.begin_step()
        if self._worker is not None and isinstance(kv_connector_metadata, HotKVMetadata):
            if kv_connector_metadata.lost_track:
                self._distrust()
            self._worker.before_step(kv_connector_metadata)
            if self._sparse is not None:
                self._sparse.will_write(np.array(kv_connector_metadata.allocated_blocks, np.int32))
                self._tell_reporter(kv_connector_metadata)
                self._sparse.begin_step(kv_connector_metadata.sparse_rows or SparseRows())

    @hook(
        nothing,
        why="Hot sets that are not remembered, or not reported, cost time later and nothing else.",
        is_part=True,
    )
    def _tell_reporter(self, meta: HotKVMetadata) -> None:
        if self._reporter is not None:
            self._reporter.before_step(meta.remembered, meta.hot_sets_of)

    @hook(
        nothing, why="What was selected and counted is reported later, or not at all.", is_part=True
    )
    def _sparse_report(self) -> None:
        if self._worker is not None and self._sparse is not None:
            self._worker.note_sparse(self._sparse.take_counters(), None)
        if self._worker is not None and self._reporter is not None:
            self._worker.note_sparse({}, self._reporter.after_step(time.monotonic()))

    def _loads_broke(self, *_: Any, **__: Any) -> None:
        meta = self._connector_metadata
        if self._worker is not None and isinstance(meta, HotKVMetadata):
            self._worker.fail_loads(meta)

    @hook(
        _loads_broke,
        why=(
            "Loads of this step that were not begun are reported as failed; those that were "
            "begun go on."
        ),
    )
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The V1 runner passes no keywords, V2 several; none are needed."""
        meta = self._connector_metadata
        if self._worker is not None and isinstance(meta, HotKVMetadata):
            if self._sparse is not None:
                for run in (run for job in meta.loads for run in job.runs):
                    self._sparse.will_write(run.block_ids)
            self._worker.start_loads(meta)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before a request is scheduled; there is nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are stored whole, after the step."""

    def _stores_broke(self) -> None:
        meta = self._connector_metadata
        if self._worker is not None and isinstance(meta, HotKVMetadata):
            self._worker.fail_stores(meta)

    @hook(
        _stores_broke,
        why="Stores of this step that were not sent are reported as failed, and never sent.",
    )
    def wait_for_save(self) -> None:
        meta = self._connector_metadata
        if self._worker is not None and isinstance(meta, HotKVMetadata):
            self._worker.save(meta)

    def _results_broke(self, *_: Any) -> KVConnectorTransferResults:
        failed = self._worker.take_failed_results() if self._worker is not None else set()
        return KVConnectorTransferResults(finished_recving=failed, failed_recving=failed)

    @hook(
        _results_broke,
        last=KVConnectorTransferResults(),
        why=(
            "Loads that are over, which nobody writes any more, are reported as failed: their "
            "requests compute."
        ),
    )
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        finished, failed = self._worker.take_results()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    @hook(
        nothing,
        why=(
            "States are said again by each step: a hung load's request waits, or its blocks stay "
            "out of use."
        ),
        is_part=True,
    )
    def _state_report(self) -> None:
        if self._worker is not None:
            self._worker.note_state()

    @hook(
        nothing,
        why=(
            "What is not taken is reported by a later step; the scheduler forgets stores that "
            "are never reported."
        ),
    )
    def build_connector_worker_meta(self) -> HotKVWorkerMetadata | None:
        self.clock.end_step()
        self._sparse_report()
        self._state_report()
        self._step_report()
        return self._worker.take_report() if self._worker is not None else None

    @hook(
        nothing,
        why=(
            "The scheduler asks again for a handshake, and trusts no step whose end it has not "
            "heard of."
        ),
        is_part=True,
    )
    def _step_report(self) -> None:
        meta = self._connector_metadata
        if (
            self._worker is not None
            and isinstance(meta, HotKVMetadata)
            and (meta.wants_handshake or meta.settles_step)
        ):
            self._worker.note_step(
                self._handshake() if meta.wants_handshake else None, meta.settles_step
            )

    # ------------------------------------------------------------------------------ scheduler hooks

    def _connect_broke(self, *_: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.turn_off()

    @hook(_connect_broke, why="The scheduler offers nothing and plans nothing.")
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._connect(list(metadata.values()))

    @hook(_connect_broke, why="The scheduler offers nothing and plans nothing.")
    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self._connect(list(metadata.values()))

    def _connect(self, handshakes: list[KVConnectorHandshakeMetadata]) -> None:
        if self._scheduler is not None:
            self._scheduler.connect([h for h in handshakes if isinstance(h, HotKVHandshake)])

    @hook(
        nothing,
        why=(
            "Without the pool no block is held back: a request whose load hangs waits for the "
            "server."
        ),
    )
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.holds.pool = gpu_block_pool

    def _request_broke(self, request: Any, *_: Any) -> tuple[bool, None]:
        if self._scheduler is not None:
            self._scheduler.request_broke(request.request_id)
        return False, None

    @hook(
        _request_broke,
        why="The request is unknown to hotkv: nothing is loaded for it, nothing of it stored.",
    )
    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)
        self._begin_sequences(request)

    @hook(nothing, why="Rows that have no name attend to everything.", is_part=True)
    def _begin_sequences(self, request: Any) -> None:
        if self._rows is not None:
            self._rows.arrived(request)
        if self._scheduler is not None:
            self._scheduler.sparse_arrived(request)

    def _match_broke(self, request: Any, *_: Any) -> tuple[int, bool]:
        self._request_broke(request)
        return 0, False

    @hook(
        _match_broke,
        last=(0, False),
        why="A miss; from now on the request is unknown to hotkv, and its lease is given back.",
    )
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return (
            self._scheduler.match(request, num_computed_tokens)
            if self._scheduler is not None
            else (0, False)
        )

    def _alloc_broke(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.alloc_broke(request.request_id, num_external_tokens)

    @hook(
        _alloc_broke,
        why="The request's load is reported as failed, and the next step takes all stores back.",
    )
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.after_alloc(request, blocks, num_external_tokens)

    def _plan_broke(self, scheduler_output: Any) -> HotKVMetadata:
        return self._scheduler.plan_broke() if self._scheduler is not None else HotKVMetadata()

    @hook(
        _plan_broke,
        last=HotKVMetadata(lost_track=True),
        why=(
            "The step takes all stores back and attends to everything; loads that were to begin "
            "are reported as failed."
        ),
    )
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self.clock.end_step()
        rows = self._rows.of_step(scheduler_output) if self._rows is not None else None
        sparse = sparse_requests(self._engine_id, scheduler_output)
        meta = (
            self._scheduler.build_meta(scheduler_output, sparse)
            if self._scheduler is not None
            else HotKVMetadata()
        )
        if rows is not None:
            meta.sparse_rows = rows
            self._plan_sparse(meta, rows)
        return meta

    @hook(nothing, why="The step begins with no hot sets of other requests.", is_part=True)
    def _plan_sparse(self, meta: HotKVMetadata, rows: SparseRows) -> None:
        if self._scheduler is not None:
            self._scheduler.plan_sparse(meta, rows)

    def _update_broke(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.update_broke(connector_output)

    @hook(
        _update_broke,
        why="Loads that the step reports count as failed for hotkv, its stores as ended.",
    )
    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.update(connector_output)

    def _end_broke(self, request: Any, *_: Any) -> tuple[bool, None]:
        if self._scheduler is not None:
            self._scheduler.end_broke(request.request_id)
        return False, None

    @hook(
        _end_broke,
        last=(False, None),
        why=(
            "The lease is given back and the request forgotten. Its blocks may go: steps that "
            "reuse them wait for stores that read them."
        ),
    )
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once: steps that reuse them wait for stores that still read
        them."""
        self._end_sequences(request.request_id)
        if self._scheduler is not None:
            self._scheduler.finished(request, block_ids)
        return False, None

    @hook(
        nothing,
        why=(
            "Names of requests that are no more match no row; the server ends sequences with "
            "their session."
        ),
        is_part=True,
    )
    def _end_sequences(self, request_id: str) -> None:
        if self._rows is not None:
            self._rows.ended(request_id)
        if self._scheduler is not None:
            self._scheduler.sparse_ended(request_id)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def _reset_broke(self) -> bool:
        # A pause would fail with it, and asks nothing of the server.
        return (
            self._scheduler.reset_broke() or checks.is_pausing()
            if self._scheduler is not None
            else False
        )

    @hook(
        _reset_broke,
        last=False,
        why=(
            "The caller hears that it failed; nothing is loaded or stored until a later flush "
            "has succeeded."
        ),
    )
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset_cache() if self._scheduler is not None else None

    @hook(nothing, why="Counters go out with a later step.")
    def get_kv_connector_stats(self) -> HotKVStats | None:
        return self._scheduler.take_stats() if self._scheduler is not None else None

    # ----------------------------------------------------------------------------------------- both

    @hook(nothing, why="What is left ends with the process, and the server notices.")
    def shutdown(self) -> None:
        side = self._scheduler or self._worker
        self._kv_caches = {}
        if side is not None:
            side.shutdown()
        logger.info(
            "hotkv %s: %.3f s in hooks over %d steps, longest %.1f ms",
            self.clock.who,
            self.clock.hook_s,
            self.clock.steps,
            self.clock.longest_s * 1e3,
        )
        if self.config.hook_timing_file:
            self.clock.write(self.config.hook_timing_file)

    @classmethod
    @class_hook(
        lambda *_: True, why="vLLM starts, and hotkv is off where the memory can't be shared."
    )
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True: where the memory of sleep mode can't be shared (CUDA's cumem allocator) hotkv is
        off and says so; the engine starts."""
        return True

    @classmethod
    @class_hook(lambda *_: None, why="vLLM takes its own layout.")
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """On CUDA one contiguous run per block over all layers; a preference that vLLM drops where
        it can't. CPU has one layout.

        In a MultiConnector another connector's wish goes first, as vLLM refuses two.
        """
        layout, outer = checks.preferred_layout(), multi.outer_configs()
        return (
            None
            if layout is not None and outer and multi.others_state_a_layout(cls, outer)
            else layout
        )

    @classmethod
    @class_hook(lambda *_, **__: HotKVStats(), why="Nothing is counted.")
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HotKVStats:
        return HotKVStats(data=dict(data or {}))

    @classmethod
    @class_hook(
        lambda cls, *arguments: SilentPromMetrics(*arguments), why="vLLM has no metrics of hotkv's."
    )
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return HotKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


# MultiConnector looks up by name whose statistics it is given, in the frontend's process too.
checks.name_connector(HotKVConnector.__name__, __name__)
