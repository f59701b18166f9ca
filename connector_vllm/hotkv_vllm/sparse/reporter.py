"""The worker's reports to the server about sparse decode. A report is sent after a step.

Always true: the reports of a worker that goes on stepping include every selection and count. A
report is sent once in `REPORT_INTERVAL_S`, and with every step that names ended requests, whose
last selections it then holds. So most steps only read the clock. The server counts a use of a block
at most once a second, so more reports would add no information.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotkv_vllm.sparse.worker import SparseWorker

I32 = npt.NDArray[np.int32]
REPORT_INTERVAL_S = 1.0

Positions = dict[str, I32]
"""By request: positions of blocks in its context, ascending."""


@dataclass(slots=True)
class SparseReport:
    """The activity of sparse decode since the last report.

    positions: by request, the positions of the blocks that any layer has selected.
    layers: growth of counters by layer index and the names of `SPARSE_COUNTERS`.
    ended: requests that have ended and for which the scheduler has asked; their last selections
        (blocks attended to) are in this report or an earlier one.
    """

    positions: Positions = field(default_factory=dict)
    layers: dict[int, dict[str, float]] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()

    def is_empty(self) -> bool:
        return not (self.positions or self.layers or self.ended)

    def join(self, other: "SparseReport") -> "SparseReport":
        """Joins two reports, of different ranks or of the same rank: all positions and ended
        requests, sums of counters."""
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
    """Collects a rank's selections and counters of sparse decode, and makes the reports that go
    with its steps."""

    def __init__(self, worker: SparseWorker) -> None:
        self._worker = worker
        self._report = SparseReport()
        self._due_s = 0.0

    def __repr__(self) -> str:
        return f"SparseReporter({len(self._report.ended)} ended)"

    def before_step(self, last_reports_of: Sequence[str]) -> None:
        """Moves the selections that the worker has not reported yet into the next report, if the
        scheduler waits for the last selections of ended requests (`last_reports_of`). That report
        then names these requests.

        Call this method before the worker's own `begin_step`, which drops ended requests. A
        selection: the blocks to which a step attended."""
        if last_reports_of:
            last = SparseReport(self._worker.take_steps(), {}, frozenset(last_reports_of))
            self._report = self._report.join(last)

    def after_step(self, now_s: float) -> SparseReport | None:
        """Returns the report about sparse decode if it is due; None otherwise."""
        if now_s < self._due_s and not self._report.ended:
            return None
        self._due_s = now_s + REPORT_INTERVAL_S
        report = self._report.join(
            SparseReport(self._worker.take_steps(), self._worker.take_layer_counters())
        )
        self._report = SparseReport()
        return None if report.is_empty() else report
