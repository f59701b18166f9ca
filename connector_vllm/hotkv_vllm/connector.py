"""`HotKVConnector`: vLLM's view of hotkv. Fails open: no exception of hotkv's reaches vLLM from any
hook.

Thin: it holds one object for each side, of which one is real (`NoSide`), and each hook calls one of
them. A hook that breaks is logged once, counted, and answered by its fallback, each of which says
what makes it safe (`hooks`). Only a wrong configuration raises, when the connector is constructed.
Nothing happens per layer.
"""

from collections.abc import Callable
from typing import Any, cast

import torch

from hotkv_vllm import versions
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.link import logger

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

    from hotkv_vllm.compat import checks, sparse_layers
    from hotkv_vllm.scheduler.side import HotKVScheduler
    from hotkv_vllm.worker.side import HotKVWorker
except ImportError as error:
    raise ImportError(versions.why_not_imported(error)) from error

from hotkv_vllm.hooks import HookEdge, class_hook, hook, nothing
from hotkv_vllm.metadata import HotKVHandshake, HotKVMetadata, HotKVWorkerMetadata
from hotkv_vllm.stats import HookClock, HotKVPromMetrics, HotKVStats, SilentPromMetrics

PARTS = frozenset({"requests", "residents", "sparse", "steps"})
"""Parts of a side that the connector calls."""
ANSWERS: dict[str, Callable[..., Any]] = {
    "is_freeing": lambda *_: False,
    "match": lambda *_: (0, False),
    "plan": lambda *_: HotKVMetadata(),
    "plan_broke": lambda *_: HotKVMetadata(),
    "reset_broke": lambda *_: False,
    "take_results": lambda *_: (set(), set()),
    "take_stats": lambda *_: None,
    "take_failed_results": lambda *_: set(),
    "take_lost": lambda *_: set(),
    "lost_broke": lambda *_: set(),
}
"""By method of `scheduler.side.HotKVScheduler`, of its parts or of `worker.side.HotKVWorker`. All
others answer None."""


class NoSide:
    """Stands in for a side that is not there: that of the other role, or both with hotkv off.

    So no hook asks whether there is a side. It takes every call and does nothing; its answers leave
    vLLM as it would be without hotkv.
    """

    def __init__(self) -> None:
        vars(self).update(ANSWERS | dict.fromkeys(PARTS, self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: None


class HotKVConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's connector. Constructor as vLLM calls it; raises ConfigError."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = ConnectorConfig.from_extra_config(transfer.kv_connector_extra_config)
        is_scheduler = role is KVConnectorRole.SCHEDULER
        who = "scheduler" if is_scheduler else f"worker-{vllm_config.parallel_config.rank}"
        self.config = config
        self._is_resident = config.is_resident
        self.clock = HookClock(who, str(transfer.engine_id))
        self.edge = HookEdge(self.clock, self._count)
        self._scheduler = cast(HotKVScheduler, NoSide())
        self._worker = cast(HotKVWorker, NoSide())
        self._is_child = False
        why_off = versions.why_off(config.allow_untested_vllm)
        if why_off:
            logger.warning("hotkv is off: %s; the engine runs without it", why_off)
            return
        if config.sparse is not None:
            sparse_layers.check_sparse(vllm_config, kv_cache_config, config.sparse)
        centres = config.read_centres()
        outer = checks.outer_configs()
        self._is_child = bool(outer)
        if is_scheduler:
            checks.use_recompute_policy(outer or (vllm_config,), self._is_child)
            self._scheduler = HotKVScheduler(vllm_config, kv_cache_config, config, self.edge)
        else:
            if centres is not None:
                sparse_layers.check_centres(vllm_config, kv_cache_config, centres)
            self._worker = HotKVWorker(vllm_config, kv_cache_config, config, centres, self.edge)

    def __repr__(self) -> str:
        return f"HotKVConnector({self._scheduler}, {self._worker})"

    def _count(self, name: str) -> None:
        self._scheduler.count(name)
        self._worker.count(name)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether vLLM drops what steps in flight answer for requests that it preempts: if they may
        have read bytes that the server no longer had. A lost store is a later miss."""
        return self._is_resident

    # --------------------------------------------------------------------------------- worker hooks

    @hook(lambda self, *_: self._worker.memory_broke("shown to the server"))
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    @hook(lambda self: self._worker.unregister_broke())
    def unregister_kv_caches(self) -> None:
        """vLLM is about to discard the KV memory (from 0.33 on; 0.32 sleeps only with memory that
        hotkv can't share)."""
        self._worker.unregister()

    @hook(lambda self: self._worker.memory_broke("shared again after a sleep"))
    def restore_kv_caches(self) -> None:
        """The KV memory is mapped again at its old addresses, with other contents."""
        self._worker.restore()

    @hook(lambda *_: HotKVHandshake(None, "a worker's handshake broke; see the engine's log"))
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """None in a MultiConnector, which would give it to others; the scheduler asks for it."""
        return None if self._is_child else self._worker.handshake()

    @hook(lambda self, *_: self._worker.distrust())
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self.clock.begin_step()
        if isinstance(kv_connector_metadata, HotKVMetadata):
            self._worker.before_step(kv_connector_metadata)

    def _loads_broke(self, *_: Any, **__: Any) -> None:
        if isinstance(meta := self._connector_metadata, HotKVMetadata):
            self._worker.loads_broke(meta)

    @hook(_loads_broke)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The V1 runner passes no keywords, V2 several; none are needed."""
        if isinstance(meta := self._connector_metadata, HotKVMetadata):
            self._worker.start_loads(meta)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before a request is scheduled; there is nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are stored whole, after the step."""

    def _stores_broke(self) -> None:
        if isinstance(meta := self._connector_metadata, HotKVMetadata):
            self._worker.stores_broke(meta)

    @hook(_stores_broke)
    def wait_for_save(self) -> None:
        if isinstance(meta := self._connector_metadata, HotKVMetadata):
            self._worker.save(meta)

    def _results_broke(self, *_: Any) -> KVConnectorTransferResults:
        failed = self._worker.take_failed_results()
        return KVConnectorTransferResults(finished_recving=failed, failed_recving=failed)

    @hook(_results_broke, last=KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished, failed = self._worker.take_results()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    @hook(lambda self: self._worker.sparse.lost_broke(), last=frozenset())
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Of requests whose bytes in host memory are gone, not of loads that failed."""
        return self._worker.sparse.take_lost()

    @hook(nothing)
    def build_connector_worker_meta(self) -> HotKVWorkerMetadata | None:
        self.clock.end_step()
        meta = self._connector_metadata
        return self._worker.take_report(meta if isinstance(meta, HotKVMetadata) else None)

    # ------------------------------------------------------------------------------ scheduler hooks

    @hook(lambda self, *_: self._scheduler.turn_off())
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.connect(metadata.values())

    @hook(lambda self, *_: self._scheduler.turn_off())
    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.connect(metadata.values())

    @hook(nothing)
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._scheduler.bind_manager(kv_cache_manager)

    @hook(lambda _: False)
    def has_pending_block_frees(self) -> bool:
        return bool(self._scheduler.residents.is_freeing())

    @hook(lambda self, request: self._scheduler.requests.request_broke(request.request_id))
    def on_new_request(self, request: Any) -> None:
        self._scheduler.requests.arrived(request)

    def _match_broke(self, request: Any, *_: Any) -> tuple[int, bool]:
        self._scheduler.requests.request_broke(request.request_id)
        return 0, False

    @hook(_match_broke, last=(0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.requests.match(request, num_computed_tokens)

    @hook(
        lambda self, request, blocks, num_external_tokens: self._scheduler.requests.alloc_broke(
            request.request_id, num_external_tokens
        )
    )
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.requests.allocated(request, blocks, num_external_tokens)

    @hook(lambda self, _: self._scheduler.steps.plan_broke(), last=HotKVMetadata(lost_track=True))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self.clock.end_step()
        return self._scheduler.steps.plan(scheduler_output)

    @hook(lambda self, connector_output: self._scheduler.update_broke(connector_output))
    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.update(connector_output)

    def _end_broke(self, request: Any, *_: Any) -> tuple[bool, None]:
        self._scheduler.requests.end_broke(request.request_id)
        return False, None

    @hook(_end_broke, last=(False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once: steps that reuse them wait for stores that still read
        them."""
        self._scheduler.requests.finished(request, block_ids)
        return False, None

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @hook(lambda self: self._scheduler.reset_broke(), last=False)
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset_cache()

    @hook(nothing)
    def get_kv_connector_stats(self) -> HotKVStats | None:
        return self._scheduler.take_stats()

    # ----------------------------------------------------------------------------------------- both

    @hook(nothing)
    def shutdown(self) -> None:
        self._scheduler.turn_off()
        self._worker.shutdown()
        self.clock.log()
        self.clock.write(self.config.hook_timing_file)

    @classmethod
    @class_hook(lambda *_: True, last=True)
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True: where the memory of sleep mode can't be shared (CUDA's cumem allocator) hotkv is
        off and says so; the engine starts."""
        return True

    @classmethod
    @class_hook(lambda *_: None)
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """On CUDA one contiguous run per block over all layers; a preference that vLLM drops where
        it can't. CPU has one layout.

        In a MultiConnector another connector's wish goes first, as vLLM refuses two.
        """
        layout, outer = checks.preferred_layout(), checks.outer_configs()
        is_second = layout is not None and outer and checks.others_state_a_layout(cls, outer)
        return None if is_second else layout

    @classmethod
    @class_hook(lambda *_, **__: HotKVStats())
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HotKVStats:
        return HotKVStats(data=dict(data or {}))

    @classmethod
    @class_hook(lambda cls, *arguments, **named: SilentPromMetrics(*arguments, **named))
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
