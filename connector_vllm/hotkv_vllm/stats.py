"""Counters for vLLM's metrics, of which vLLM collects the growth after each step, and the time
spent in callbacks.

Only one thread may write a `CallbackClock`.
"""

from collections import defaultdict
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from hotkv_vllm.counter_help import every_counter, exported
from hotkv_vllm.link import logger

OUTSIDE_STEPS = frozenset(
    {
        "register_kv_caches",
        "get_handshake_metadata",
        "set_xfer_handshake_metadata_pp_aware",
        "shutdown",
    }
)
"""Callbacks of the engine's start and shutdown, when no request waits."""


class HotKVStats(KVConnectorStats):
    """Growth of the counters in `every_counter`, usually since vLLM last collected it."""

    data: dict[str, Any]

    def add(self, name: str, value: float = 1) -> None:
        self.data[name] = self.data.get(name, 0) + value

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "HotKVStats":
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 6) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class HotKVPromMetrics(KVConnectorPromMetrics):
    """Each counter, per engine, as `vllm:hotkv_<exported(name)>`; all start at 0."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in every_counter().items():
            counter = self._counter_cls(
                name=f"vllm:hotkv_{exported(name)}", documentation=text, labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        try:
            for name, value in transfer_stats_data.items():
                if name in self._counters:
                    self._counters[name][engine_idx].inc(value)
        except Exception:  # noqa: BLE001 - callback edge: a fault here would end vLLM's output loop
            logger.exception("hotkv: counters could not be observed")


class SilentPromMetrics(KVConnectorPromMetrics):
    """In place of `HotKVPromMetrics` if its constructor raises."""

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None: ...


class CallbackClock:
    """who: the side in the log, such as `worker-0`.
    by_callback: seconds so far.
    longest_s: longest single call within `callback_s`.
    step_s: wall time of the steps, callbacks included; worker side only.
    began_s: when the present step began; 0 between steps.
    """

    def __init__(self, who: str) -> None:
        self.who = who
        self.by_callback: defaultdict[str, float] = defaultdict(float)
        self.longest_s = 0.0
        self.steps = 0
        self.step_s = 0.0
        self.began_s = 0.0

    @property
    def callback_s(self) -> float:
        """Without `startup_s`."""
        return sum(self.by_callback.values()) - self.startup_s

    @property
    def startup_s(self) -> float:
        """In the callbacks of start and shutdown."""
        return sum(self.by_callback.get(name, 0.0) for name in OUTSIDE_STEPS)

    def log(self) -> None:
        logger.info(
            "hotkv %s: %.3f s in callbacks over %d steps%s, longest %.1f ms",
            self.who,
            self.callback_s,
            self.steps,
            f" of {self.step_s:.3f} s" if self.step_s else "",
            self.longest_s * 1e3,
        )
