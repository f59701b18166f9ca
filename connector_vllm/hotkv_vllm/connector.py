"""`HotKVConnector`: the class that vLLM loads as its KV connector.

It fails open: if a callback raises, the exception is logged once and counted, and vLLM gets the
fallback's result (`callbacks`). Only a wrong configuration raises, when vLLM constructs the
connector. It only forwards calls to a scheduler side and a worker side; a `NoSide` stands for a
side that the process lacks. No callback does work per layer.
"""

import time
from collections.abc import Callable, Iterable
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

    from hotkv_vllm.compat import checks
    from hotkv_vllm.scheduler.side import HotKVScheduler
    from hotkv_vllm.worker.side import HotKVWorker
except ImportError as error:
    raise ImportError(versions.why_not_imported(error)) from error

from hotkv_vllm.callbacks import CallbackEdge, callback, class_callback, nothing
from hotkv_vllm.metadata import HotKVHandshake, HotKVMetadata, HotKVWorkerMetadata
from hotkv_vllm.stats import CallbackClock, HotKVPromMetrics, HotKVStats, SilentPromMetrics

PARTS = frozenset({"requests", "sharing", "steps"})
"""Attributes through which the connector reaches parts of its sides. `NoSide` has them too."""
ANSWERS: dict[str, Callable[..., Any]] = {
    "is_freeing": lambda *_: False,
    "match": lambda *_: (0, False),
    "plan": lambda *_: HotKVMetadata(),
    "plan_broke": lambda *_: HotKVMetadata(),
    "reset_broke": lambda *_: False,
    "rests": lambda *_: True,
    "take_events": lambda *_: [],
    "take_stats": lambda *_: HotKVStats(),
    "take_results": lambda *_: (set(), set()),
    "take_failed_results": lambda *_: set(),
    "take_lost": lambda *_: set(),
    "lost_broke": lambda *_: set(),
    "wants_steps": lambda *_: False,
}
"""Results of a `NoSide`'s methods; all others return None."""


class NoSide:
    """Stands for a side that this process lacks, or for both if hotkv is off: accepts every
    call, and its results (`ANSWERS`) make vLLM run as without hotkv."""

    def __init__(self) -> None:
        vars(self).update(ANSWERS | dict.fromkeys(PARTS, self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: None


class HotKVConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM constructs one in the scheduler's process and one in each worker. Raises ConfigError."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        checks.check_pooling(vllm_config)
        transfer = vllm_config.kv_transfer_config
        config = ConnectorConfig.from_extra_config(transfer.kv_connector_extra_config)
        is_scheduler = role is KVConnectorRole.SCHEDULER
        who = "scheduler" if is_scheduler else f"worker-{vllm_config.parallel_config.rank}"
        self.config = config
        self._publishes_events = checks.publishes_events(vllm_config)
        self.clock = CallbackClock(who)
        # True if the present step has nothing for this worker (`HotKVWorker.rests`).
        self._rests = False
        self.edge = CallbackEdge(self.clock, self._count)
        self._scheduler = cast(HotKVScheduler, NoSide())
        self._worker = cast(HotKVWorker, NoSide())
        self._is_child = False
        self._stats = HotKVStats()
        why_off = versions.why_off(versions.OWN, config.allow_untested_vllm)
        if why_off:
            logger.warning("hotkv is off: %s; the engine runs without it", why_off)
            return
        outer = checks.outer_configs()
        self._is_child = bool(outer)
        if is_scheduler:
            checks.use_recompute_policy(outer or (vllm_config,), self._is_child)
            self._scheduler = HotKVScheduler(
                vllm_config, kv_cache_config, config, self.edge, is_child=self._is_child
            )
            self._stats = self._scheduler.stats
        else:
            self._worker = HotKVWorker(vllm_config, kv_cache_config, config, self.edge)

    def __repr__(self) -> str:
        return f"HotKVConnector({self._scheduler}, {self._worker})"

    def _count(self, name: str) -> None:
        self._scheduler.count(name)
        self._worker.count(name)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost store only causes a miss; a companion may need more."""
        companion = self.config.companion
        return companion is not None and companion.needs_delivery

    # ------------------------------------------------------------------------ worker callbacks

    @callback(lambda self, *_: self._worker.memory_broke("shown to the server"))
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    @callback(lambda self: self._worker.unregister_broke())
    def unregister_kv_caches(self) -> None:
        """Closes the session, because vLLM is about to discard the KV memory.

        vLLM 0.33 and later. On a device hotkv is off in an engine of 0.32 that may sleep.
        """
        self._worker.unregister()

    @callback(lambda self: self._worker.memory_broke("shared again after a sleep"))
    def restore_kv_caches(self) -> None:
        """Registers the memory again after a sleep: at its old addresses, without its contents."""
        self._worker.restore()

    @callback(lambda *_: HotKVHandshake(None, "a worker's handshake broke; see the engine's log"))
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """None in a MultiConnector, which would pass the handshake to other connectors. The
        scheduler side then asks for it in a step's message."""
        return None if self._is_child else self._worker.handshake()

    def _step_broke(self, *_: Any) -> None:
        # Else the other callbacks might skip this step as they skipped the last one.
        self._rests = False
        self._worker.distrust()

    @callback(_step_broke)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begins a step, before its other callbacks."""
        self._rests = False
        self.clock.began_s = time.perf_counter()
        if isinstance(kv_connector_metadata, HotKVMetadata):
            self._rests = self._worker.rests(kv_connector_metadata)
            if not self._rests:
                self._worker.before_step(kv_connector_metadata)

    # vLLM calls this for each layer, and makes two more calls if the result is True. `bool()` is
    # False.
    has_connector_metadata = staticmethod(bool)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Both of vLLM's runners call this between the zeroing of blocks and the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, HotKVMetadata) and connector_metadata.loads:
            self._before_forward(connector_metadata)

    def _loads_broke(self, *_: Any, **__: Any) -> None:
        if isinstance(meta := self._connector_metadata, HotKVMetadata):
            self._worker.loads_broke(meta)

    @callback(_loads_broke)
    def _before_forward(self, meta: HotKVMetadata) -> None:
        self._worker.before_forward(meta)

    @callback(_loads_broke, unless="_rests")
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts the loads that the forward pass need not wait for. Model runner V2 passes
        keywords."""
        if isinstance(meta := self._connector_metadata, HotKVMetadata):
            self._worker.start_loads(meta)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: vLLM runs a request only after its load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: stores begin after the step (`wait_for_save`)."""

    def _stores_broke(self) -> None:
        if isinstance(meta := self._connector_metadata, HotKVMetadata):
            self._worker.stores_broke(meta)

    @callback(_stores_broke, unless="_rests")
    def wait_for_save(self) -> None:
        if isinstance(meta := self._connector_metadata, HotKVMetadata):
            self._worker.save(meta)

    def _results_broke(self, *_: Any) -> KVConnectorTransferResults:
        failed = self._worker.take_failed_results()
        return KVConnectorTransferResults(finished_recving=failed, failed_recving=failed)

    @callback(_results_broke, last=KVConnectorTransferResults(), unless="_rests")
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished, failed = self._worker.take_results()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    @callback(lambda self: self._worker.lost_broke(), last=frozenset(), unless="_rests")
    def get_block_ids_with_load_errors(self) -> set[int]:
        """First block of each request that the companion has lost: vLLM computes it anew.
        `get_transfer_results` reports failed loads."""
        return self._worker.take_lost()

    @callback(nothing)
    def build_connector_worker_meta(self) -> HotKVWorkerMetadata | None:
        clock, meta = self.clock, self._connector_metadata
        clock.steps += 1
        if clock.began_s:
            clock.step_s += time.perf_counter() - clock.began_s
            clock.began_s = 0.0
        if self._rests:
            return None
        return self._worker.take_report(meta if isinstance(meta, HotKVMetadata) else None)

    # --------------------------------------------------------------------- scheduler callbacks

    @callback(lambda self, *_: self._scheduler.turn_off())
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.connect(metadata.values())

    @callback(nothing)
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._scheduler.bind_manager(kv_cache_manager)

    @callback(lambda _: False)
    def has_pending_block_frees(self) -> bool:
        return bool(self._scheduler.is_freeing())

    @callback(lambda self, request: self._scheduler.requests.request_broke(request.request_id))
    def on_new_request(self, request: Any) -> None:
        self._scheduler.requests.arrived(request)

    def _match_broke(self, request: Any, *_: Any) -> tuple[int, bool]:
        self._scheduler.requests.request_broke(request.request_id)
        return 0, False

    @callback(_match_broke, last=(0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.requests.match(request, num_computed_tokens)

    @callback(
        lambda self, request, blocks, num_external_tokens: self._scheduler.requests.alloc_broke(
            request.request_id, num_external_tokens
        )
    )
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.requests.allocated(request, blocks, num_external_tokens)

    @callback(
        lambda self, _: self._scheduler.steps.plan_broke(), last=HotKVMetadata(lost_track=True)
    )
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self.clock.steps += 1
        return self._scheduler.steps.plan(scheduler_output)

    @callback(lambda self, connector_output: self._scheduler.update_broke(connector_output))
    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.update(connector_output)

    def _end_broke(self, request: Any, *_: Any) -> tuple[bool, None]:
        self._scheduler.requests.end_broke(request.request_id)
        return False, None

    @callback(_end_broke, last=(False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Lets vLLM free the blocks at once: before a step overwrites them, the stores that read
        them end or are revoked."""
        self._scheduler.requests.finished(request, block_ids)
        return False, None

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @callback(lambda self: self._scheduler.reset_broke(), last=False)
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset_cache()

    @callback(lambda _: False)
    def has_pending_push_work(self) -> bool:
        """True while a reset of the shared cache needs steps of an idle engine. (Other
        connectors return True for pending transfers.)"""
        return bool(self._scheduler.sharing.wants_steps())

    def take_events(self) -> Iterable[Any]:
        """Events of the server's blocks, published as this engine's; only with `events.identity`
        = `engine`."""
        return self._take_events() if self._publishes_events else ()

    @callback(lambda _: [], last=())
    def _take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events()

    def get_kv_connector_stats(self) -> HotKVStats | None:
        """Growth since the last call; None if no counter has grown."""
        return self._take_stats() if self._stats.data else None

    @callback(nothing)
    def _take_stats(self) -> HotKVStats:
        return self._scheduler.take_stats()

    # ----------------------------------------------------------------------------------------- both

    @callback(nothing)
    def shutdown(self) -> None:
        self._scheduler.turn_off()
        self._worker.shutdown()
        self.clock.log()

    @classmethod
    @class_callback(lambda *_: True, last=True)
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True, so that vLLM starts; hotkv is off, and logs why, if the memory can't be shared."""
        return True

    @classmethod
    @class_callback(lambda *_: None)
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """A preference, which vLLM ignores if it can't use the layout; None on a CPU, which has
        one layout, and if another child of a MultiConnector asks for one: vLLM refuses two that
        differ."""
        layout, outer = checks.preferred_layout(vllm_config), checks.outer_configs()
        is_second = layout is not None and outer and checks.others_state_a_layout(cls, outer)
        return None if is_second else layout

    @classmethod
    @class_callback(lambda *_, **__: HotKVStats())
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HotKVStats:
        return HotKVStats(data=dict(data or {}))

    @classmethod
    @class_callback(lambda cls, *arguments, **named: SilentPromMetrics(*arguments, **named))
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return HotKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


# MultiConnector looks up the class of each connector by name, to read its statistics, even in
# the frontend's process.
checks.name_connector(HotKVConnector.__name__, __name__)
