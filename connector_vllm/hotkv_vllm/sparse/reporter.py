"""Makes a worker's reports about sparse decode: selections (which blocks its layers have chosen to
attend to), and counters. A report goes to the scheduler side, which sends it to the server, so that
the server knows which blocks are in use.

A report is made after a step, at most once in `REPORT_INTERVAL_S`, because the server counts a use
of a block at most once a second. So in most steps this module only reads the clock. A report is
also made after each step in whose message the scheduler asks for the last selections of ended
requests.

Always true: the reports together include every selection and all growth of counters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotkv_vllm.sparse.worker import SparseWorker

I32 = npt.NDArray[np.int32]
REPORT_INTERVAL_S = 1.0

Positions = dict[str, I32]
"""By request id: positions of blocks in the request's context, ascending."""


@dataclass(slots=True)
class SparseReport:
    """A worker's report about sparse decode since the last report.

    positions: by request id, the positions of the blocks that any layer has selected (chosen to
        attend to).
    layers: growth of counters, by layer index and by names of `SPARSE_COUNTERS`.
    ended: ids of ended requests whose selections are all reported now, as the scheduler has asked.
        The server's record of these requests can then be deleted.
    """

    positions: Positions = field(default_factory=dict)
    layers: dict[int, dict[str, float]] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()

    def is_empty(self) -> bool:
        return not (self.positions or self.layers or self.ended)

    def join(self, other: "SparseReport") -> "SparseReport":
        """Returns the report that joins two reports, of different ranks or of the same rank. It has
        the positions and ended requests of both, and the sums of their counters."""
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
    """Collects the selections (chosen blocks) and counters of a rank's sparse worker, and makes its
    reports."""

    def __init__(self, worker: SparseWorker) -> None:
        self._worker = worker
        self._report = SparseReport()
        self._due_s = 0.0

    def __repr__(self) -> str:
        return f"SparseReporter({len(self._report.ended)} ended)"

    def before_step(self, last_reports_of: Sequence[str]) -> None:
        """Prepares a report if the scheduler asks for the last selections (chosen blocks) of ended
        requests: takes all selections from the worker, and lists these requests in
        `SparseReport.ended`. Must be called before the worker's `begin_step`, which forgets ended
        requests.

        last_reports_of: ids of the ended requests.
        """
        if last_reports_of:
            last = SparseReport(self._worker.take_steps(), {}, frozenset(last_reports_of))
            self._report = self._report.join(last)

    def after_step(self, now_s: float) -> SparseReport | None:
        """Returns a report if one is due after this step; None otherwise."""
        if now_s < self._due_s and not self._report.ended:
            return None
        self._due_s = now_s + REPORT_INTERVAL_S
        report = self._report.join(
            SparseReport(self._worker.take_steps(), self._worker.take_layer_counters())
        )
        self._report = SparseReport()
        return None if report.is_empty() else report
