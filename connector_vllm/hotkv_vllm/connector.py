"""`HotKVConnector`: vLLM's view of hotkv. Fails open: no exception of hotkv's reaches vLLM from any hook.

Thin: scheduler hooks go to `HotKVScheduler`, worker hooks to `HotKVWorker`. A hook that breaks is logged once, counted, and answers as
if there were no hotkv; where vLLM waits for a load, the load is reported as failed. Only a wrong configuration raises, when the
connector is constructed. Nothing happens per layer.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from hotkv_vllm import compat, link
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.metadata import HotKVHandshake, HotKVMetadata, HotKVWorkerMetadata
from hotkv_vllm.scheduler import HotKVScheduler
from hotkv_vllm.sparse.reporter import SparseReport, SparseReporter
from hotkv_vllm.sparse.rows import RowNames, SparseRows
from hotkv_vllm.sparse.setup import install
from hotkv_vllm.sparse.worker import SparseWorker
from hotkv_vllm.stats import HookClock, HotKVPromMetrics, HotKVStats
from hotkv_vllm.worker import HotKVWorker

logger = link.logger
T = TypeVar("T")


def hook(otherwise: Callable[..., Any], *, is_part: bool = False) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Times a hook and keeps its exceptions from vLLM; a broken hook answers `otherwise(self, *its arguments)`.

    `is_part`: of a hook that goes on when this breaks, and is timed itself.
    """

    def wrap(method: Callable[..., T]) -> Callable[..., T]:
        name = method.__name__

        @functools.wraps(method)
        def guarded(self: "HotKVConnector", *args: Any, **kwargs: Any) -> T:
            began_s = time.perf_counter()
            try:
                return method(self, *args, **kwargs)
            except Exception:  # noqa: BLE001 - hook edge: a fault of ours must not become the engine's
                self.hook_broke(name)
                answer: T = otherwise(self, *args, **kwargs)
                return answer
            finally:
                if not is_part:
                    self.clock.add(name, time.perf_counter() - began_s)

        return guarded

    return wrap


def _nothing(*_: Any, **__: Any) -> None:
    return None


class HotKVConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. Constructor as vLLM calls it; raises ConfigError."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = ConnectorConfig.from_extra_config(transfer.kv_connector_extra_config)
        self.config = config
        self._broken: set[str] = set()
        self._scheduler: HotKVScheduler | None = None
        self._worker: HotKVWorker | None = None
        self._rows: RowNames | None = None
        self._sparse: SparseWorker | None = None
        self._reporter: SparseReporter | None = None
        if config.sparse is not None:
            compat.check_sparse(vllm_config, kv_cache_config, config.sparse)
        self._centres = config.read_centres()
        if role is KVConnectorRole.SCHEDULER:
            if compat.use_recompute_policy(vllm_config):
                logger.info("hotkv: kv_load_failure_policy is set to 'recompute', so that a failed load costs time, not the request")
            self._scheduler = HotKVScheduler(vllm_config, kv_cache_config, config)
            if config.sparse is not None:
                self._rows = RowNames(config.sparse, compat.sparse_groups(kv_cache_config))
        else:
            if self._centres is not None:
                compat.check_centres(vllm_config, kv_cache_config, self._centres)
            self._worker = HotKVWorker(vllm_config, kv_cache_config, config)
        rank = vllm_config.parallel_config.rank
        self.clock = HookClock("scheduler" if self._scheduler else f"worker-{rank}", str(transfer.engine_id))

    def __repr__(self) -> str:
        return f"HotKVConnector({self._scheduler or self._worker})"

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost store is a later miss, so a preempted request need not recompute what it produced."""
        return False

    def hook_broke(self, name: str) -> None:
        """Logs a hook's first fault with its traceback, and counts all."""
        if self._scheduler is not None:
            self._scheduler.stats.add("hook_errors")
        if name not in self._broken:
            self._broken.add(name)
            logger.exception("hotkv: hook %s broke; the engine goes on without its result", name)

    # ----------------------------------------------------------------------------------------------------- worker hooks

    @hook(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            # First the memory moves, then others look at it; the session tells the server of all of it at once.
            self._worker.export(kv_caches)
            try:
                self._install_sparse(kv_caches)
            finally:
                self._worker.open(self._sparse, self._centres)

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
        except compat.Unsupported as error:
            logger.warning("hotkv: sparse decode is off in this worker: %s", error)
            return
        place = compat.rank_place(self._vllm_config, self._kv_cache_config)
        self._reporter = SparseReporter(self._sparse, place.shard_index, place.is_writer)

    @hook(_nothing)
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self._worker is None:
            return None
        layers = self._sparse.layers.values() if self._sparse is not None else ()
        return replace(self._worker.handshake, sparse_layers=tuple((layer.index, layer.group) for layer in layers))

    @hook(_nothing)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.clock.begin_step()
        if self._worker is not None and isinstance(kv_connector_metadata, HotKVMetadata):
            self._worker.before_step(kv_connector_metadata)
            if self._sparse is not None:
                self._sparse.will_write(np.array(kv_connector_metadata.allocated_blocks, np.int32))
                self._tell_reporter(kv_connector_metadata)
                self._sparse.begin_step(kv_connector_metadata.sparse_rows or SparseRows())

    @hook(_nothing, is_part=True)
    def _tell_reporter(self, meta: HotKVMetadata) -> None:
        if self._reporter is not None:
            self._reporter.before_step(meta.remembered, meta.hot_sets_of)

    @hook(_nothing, is_part=True)
    def _sparse_report(self) -> SparseReport | None:
        return self._reporter.after_step(time.monotonic()) if self._reporter is not None else None

    def _loads_broke(self, *_: Any, **__: Any) -> None:
        meta = self._connector_metadata
        if self._worker is not None and isinstance(meta, HotKVMetadata):
            self._worker.fail_all(meta)

    @hook(_loads_broke)
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

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are stored whole, after the step."""

    @hook(_loads_broke)
    def wait_for_save(self) -> None:
        meta = self._connector_metadata
        if self._worker is not None and isinstance(meta, HotKVMetadata):
            self._worker.save(meta)

    @hook(lambda *_: KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        finished, failed = self._worker.take_results()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    @hook(_nothing)
    def build_connector_worker_meta(self) -> HotKVWorkerMetadata | None:
        report = self._worker.take_report() if self._worker is not None else None
        counters = self._sparse.take_counters() if self._sparse is not None else {}
        sparse = self._sparse_report()
        if counters or sparse is not None:
            report = report or HotKVWorkerMetadata()
            report.sparse = sparse
            for name, value in counters.items():
                report.counters[name] = report.counters.get(name, 0) + value
        self.clock.end_step()
        return report

    # -------------------------------------------------------------------------------------------------- scheduler hooks

    @hook(_nothing)
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        self._connect(list(metadata.values()))

    @hook(_nothing)
    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self._connect(list(metadata.values()))

    def _connect(self, handshakes: list[KVConnectorHandshakeMetadata]) -> None:
        if self._scheduler is not None:
            self._scheduler.connect([h for h in handshakes if isinstance(h, HotKVHandshake)])

    @hook(_nothing)
    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)
        if self._rows is not None:
            self._rows.arrived(request)

    @hook(lambda *_: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens) if self._scheduler is not None else (0, False)

    def _load_broke(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None and num_external_tokens > 0:
            self._scheduler.abandon(request.request_id)

    @hook(_load_broke)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.after_alloc(request, blocks, num_external_tokens)

    def _plan_broke(self, scheduler_output: Any) -> HotKVMetadata:
        return self._scheduler.plan_broke() if self._scheduler is not None else HotKVMetadata()

    @hook(_plan_broke)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self.clock.end_step()
        rows = self._rows.of_step(scheduler_output) if self._rows is not None else None
        meta = self._scheduler.build_meta(scheduler_output) if self._scheduler is not None else HotKVMetadata()
        if rows is not None:
            meta.sparse_rows = rows
            self._plan_sparse(meta, rows)
        return meta

    @hook(_nothing, is_part=True)
    def _plan_sparse(self, meta: HotKVMetadata, rows: SparseRows) -> None:
        if self._scheduler is not None:
            self._scheduler.plan_sparse(meta, rows)

    @hook(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.update(connector_output)

    @hook(lambda *_: (False, None))
    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once: steps that reuse them wait for stores that still read them."""
        if self._rows is not None:
            self._rows.ended(request.request_id)
        if self._scheduler is not None:
            self._scheduler.finished(request, block_ids)
            self._scheduler.sparse_ended(request.request_id)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @hook(lambda *_: False)
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset_cache() if self._scheduler is not None else None

    @hook(_nothing)
    def get_kv_connector_stats(self) -> HotKVStats | None:
        return self._scheduler.take_stats() if self._scheduler is not None else None

    # ------------------------------------------------------------------------------------------------------------- both

    @hook(_nothing)
    def shutdown(self) -> None:
        side = self._scheduler or self._worker
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
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """On CUDA one contiguous run per block over all layers; a preference that vLLM drops where it can't. CPU has one layout."""
        return compat.preferred_layout()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HotKVStats:
        return HotKVStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> HotKVPromMetrics:
        return HotKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
