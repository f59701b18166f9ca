"""The worker side of `HotKVOffloadingConnector`: reports how the rank packs K and V inside
pages, and whether its weights have changed. vLLM's own worker copies blocks; this side never
touches KV."""

from typing import Any

from hotkv_vllm.callbacks import CallbackEdge, callback, nothing
from hotkv_vllm.compat import Unsupported, model_weights
from hotkv_vllm.compat.key_space import packing
from hotkv_vllm.compat.kv_groups import cache_groups
from hotkv_vllm.compat.reuse import check_reuse
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.identity.rekeying import RankWeights
from hotkv_vllm.identity.weights_watch import watch_callers
from hotkv_vllm.offloading.key_space import rank_factors
from hotkv_vllm.offloading.messages import DoorMetadata, DoorRankReport, PageFormat
from hotkv_vllm.report_ids import report_ids
from hotkv_vllm.stats import HotKVStats


class DoorWorker:
    """offloading_config: vLLM's `OffloadingConfig`.
    edge: also counts exceptions in `stats`.
    is_child: in a MultiConnector.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        offloading_config: Any,
        config: ConnectorConfig,
        edge: CallbackEdge,
        stats: HotKVStats,
        is_child: bool,
    ) -> None:
        self.edge = edge
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._offloading_config = offloading_config
        self._config = config
        self._stats = stats
        self._is_child = is_child
        self._rank = int(vllm_config.parallel_config.rank)
        self.report_ids = report_ids(self._rank)
        self._weights: RankWeights | None = None
        self._format = PageFormat(self._rank, why_off="the worker registered no KV cache")

    def __repr__(self) -> str:
        return f"DoorWorker({self._format}, {self._weights})"

    def _register_broke(self, *_: Any) -> None:
        self._format = PageFormat(
            self._rank, why_off="its KV caches could not be described; see the engine's log"
        )

    @callback(_register_broke, of="door")
    def register(self, kv_caches: dict[str, Any]) -> None:
        """Also begins to watch the weights. Call while vLLM's worker registers its KV caches:
        the models are found on the call stack."""
        device_type = next(iter(kv_caches.values())).device.type
        try:
            check_reuse(self._vllm_config, self._kv_cache_config)
            groups = cache_groups(self._vllm_config, self._kv_cache_config)
            packed = packing(self._vllm_config, self._kv_cache_config, groups, device_type)
            factors = rank_factors(
                self._vllm_config, self._kv_cache_config, self._offloading_config
            )
        except Unsupported as why:
            self._format = PageFormat(self._rank, why_off=str(why))
            return
        is_named = bool(self._config.weights_identity)
        in_doubt = not is_named and model_weights.weights_may_be_older(self._vllm_config)
        if self._weights is None:
            self._weights = RankWeights(watch_callers())
            self._weights.begin("", in_doubt)
        self._format = PageFormat(
            self._rank,
            f"{device_type}/{packed}",
            weights_in_doubt=self._weights.held,
            factors=factors,
        )

    def handshake(self) -> PageFormat | None:
        """None in a MultiConnector: the scheduler side asks (`DoorMetadata`)."""
        return None if self._is_child else self._format

    @callback(nothing, of="door")
    def before_step(self, meta: DoorMetadata) -> None:
        """Checks the weights, if ordered, before the step computes anything."""
        if self._weights is not None:
            self._weights.obey(meta.weights)

    @callback(lambda *_: DoorRankReport(), of="door")
    def report(self, meta: DoorMetadata | None) -> DoorRankReport:
        """Without the report of vLLM's own offloading."""
        said = None if self._weights is None else self._weights.take_report()
        report = DoorRankReport(weights=said)
        if meta is not None:
            report.timed_step = meta.timed_step
            if meta.wants_formats:
                report.format = self._format
        report.callback_errors = self._stats.data.pop("callback_errors", 0)
        return report
