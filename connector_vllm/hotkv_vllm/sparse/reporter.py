"""The worker's side of sharing sparse decode between engines: hot sets arrive before a step,
reports leave after it.

What is always true: nothing that was selected or counted is left out of the reports of a worker
that goes on stepping; a report leaves once in `REPORT_INTERVAL_S`, and with every step that names
ended requests, whose last selections and hot sets it then holds. So most steps only read the clock.
The server counts a block as used once a second at most, so more reports would add nothing.

A request's hot sets leave once, after it has ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotkv_client.types import LayerHotSet
from hotkv_vllm.sparse.worker import SparseWorker

I32 = npt.NDArray[np.int32]
REPORT_INTERVAL_S = 1.0
MAX_HOT_SET_BLOCKS = 8192
"""Most blocks of a layer's hot set that are handed on, most recently used first: 32 KiB."""

Positions = dict[str, I32]
"""By request: positions of blocks in its context, ascending."""
HotSets = dict[str, tuple[LayerHotSet, ...]]
"""By request."""


@dataclass(slots=True)
class SparseReport:
    """The activity of sparse decode since the last report.

    `positions`: what any layer has selected. `layers`: growth of counters by layer index and the
    names of `SPARSE_COUNTERS`. `ended`: what the requests ended with that the scheduler has asked
    for, also where that is nothing.
    """

    positions: Positions = field(default_factory=dict)
    layers: dict[int, dict[str, float]] = field(default_factory=dict)
    ended: HotSets = field(default_factory=dict)

    def is_empty(self) -> bool:
        return not (self.positions or self.layers or self.ended)

    def join(self, other: "SparseReport") -> "SparseReport":
        """Joins the reports of two ranks, or two of one: all positions, sums of counters, hot sets
        of both; of two that are of one layer and shard, the longer."""
        positions = dict(self.positions)
        for request_id, more in other.positions.items():
            known = positions.get(request_id)
            positions[request_id] = more if known is None else np.union1d(known, more)
        layers = {index: dict(counters) for index, counters in self.layers.items()}
        for index, growth in other.layers.items():
            counters = layers.setdefault(index, {})
            for name, value in growth.items():
                counters[name] = counters.get(name, 0.0) + value
        ended = dict(self.ended)
        for request_id, hot_sets in other.ended.items():
            ended[request_id] = _longest((*ended.get(request_id, ()), *hot_sets))
        return SparseReport(positions, layers, ended)


def _longest(hot_sets: Sequence[LayerHotSet]) -> tuple[LayerHotSet, ...]:
    """One hot set for each layer and shard, in that order."""
    ordered = sorted(hot_sets, key=lambda one: (len(one.positions), one.positions.tobytes()))
    found = {(one.layer_index, one.shard_index): one for one in ordered}
    return tuple(found[place] for place in sorted(found))


class SparseReporter:
    """Between a rank's sparse worker and the metadata of its steps. `is_writer`: of ranks with the
    same shard, one gives its hot sets."""

    def __init__(self, worker: SparseWorker, shard_index: int = 0, is_writer: bool = True) -> None:
        self._worker = worker
        self._shard_index = shard_index
        self._is_writer = is_writer
        self._report = SparseReport()
        self._due_s = 0.0

    def __repr__(self) -> str:
        return f"SparseReporter(shard {self._shard_index}, {len(self._report.ended)} ended)"

    def before_step(
        self, remembered: Mapping[str, Sequence[LayerHotSet]], hot_sets_of: Sequence[str]
    ) -> None:
        """Takes in what the scheduler says with a step.

        Call it before the worker's own `begin_step`, which drops ended requests."""
        for request_id, hot_sets in remembered.items():
            mine = {
                one.layer_index: one.positions
                for one in hot_sets
                if one.shard_index == self._shard_index
            }
            self._worker.seed(request_id, mine)
        if not hot_sets_of:
            return
        ended = {request_id: self._hot_sets(request_id) for request_id in hot_sets_of}
        self._report = self._report.join(SparseReport(self._worker.take_steps(), {}, ended))

    def after_step(self, now_s: float) -> SparseReport | None:
        """Returns the report that is due; None if none is."""
        if now_s < self._due_s and not self._report.ended:
            return None
        self._due_s = now_s + REPORT_INTERVAL_S
        report = self._report.join(
            SparseReport(self._worker.take_steps(), self._worker.take_layer_counters())
        )
        self._report = SparseReport()
        return None if report.is_empty() else report

    def _hot_sets(self, request_id: str) -> tuple[LayerHotSet, ...]:
        if not self._is_writer:
            return ()
        found = self._worker.hot_sets(request_id)
        return tuple(
            LayerHotSet(layer, self._shard_index, positions[:MAX_HOT_SET_BLOCKS])
            for layer, positions in found.items()
        )
