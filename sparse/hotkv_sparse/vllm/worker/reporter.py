"""Makes a worker's reports of selections and counters, by which the server knows which blocks are
in use.

At most one in `REPORT_INTERVAL_S`, because the server counts a use of a block at most once a
second, and one after each step whose message asks for the last selections of ended requests.

Always true: the reports together include every selection and all growth of counters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotkv_sparse.vllm.cpu.worker import SparseWorker

I32 = npt.NDArray[np.int32]
REPORT_INTERVAL_S = 1.0

Positions = dict[str, I32]
"""Ascending, by request id."""


@dataclass(slots=True)
class SparseReport:
    """A worker's report.

    positions: that any layer has selected since the last report.
    layers: growth of counters, by layer index and names of `SPARSE_COUNTERS`.
    ended: all their selections are reported now; the server may forget them.
    """

    positions: Positions = field(default_factory=dict)
    layers: dict[int, dict[str, float]] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()

    def is_empty(self) -> bool:
        return not (self.positions or self.layers or self.ended)

    def join(self, other: "SparseReport") -> "SparseReport":
        """Sums counters, unites the rest."""
        positions = dict(self.positions)
        for request_id, more in other.positions.items():
            known = positions.get(request_id)
            positions[request_id] = more if known is None else np.union1d(known, more)
        layers = {index: dict(counters) for index, counters in self.layers.items()}
        for index, growth in other.layers.items():
            counters = layers.setdefault(index, {})
            for name, value in growth.items():
                counters[name] = counters.get(name, 0.0) + value
        return SparseReport(positions, layers, self.ended | other.ended)


class SparseReporter:
    def __init__(self, worker: SparseWorker) -> None:
        self._worker = worker
        self._report = SparseReport()
        self._due_s = 0.0

    def __repr__(self) -> str:
        return f"SparseReporter({len(self._report.ended)} ended)"

    def before_step(self, last_reports_of: Sequence[str]) -> None:
        """Must be called before the worker's `begin_step`, which forgets ended requests."""
        if last_reports_of:
            last = SparseReport(self._worker.take_steps(), {}, frozenset(last_reports_of))
            self._report = self._report.join(last)

    def after_step(self, now_s: float) -> SparseReport | None:
        """None if no report is due."""
        if now_s < self._due_s and not self._report.ended:
            return None
        self._due_s = now_s + REPORT_INTERVAL_S
        report = self._report.join(
            SparseReport(self._worker.take_steps(), self._worker.take_layer_counters())
        )
        self._report = SparseReport()
        return None if report.is_empty() else report
