"""Collects a rank's report to the scheduler for each step (`StepReport`).

Always true:
- Growth of counters and ends of transfers are reported once.
- States (overdue loads, the link, weights) are reported as they are when `RankReporter.take` is
  called.
- A part whose collection raises is left out; the rest of the report is sent.
"""

import time
from collections.abc import Callable, Mapping

from hotkv_vllm.callbacks import CallbackEdge, callback, nothing
from hotkv_vllm.companion import RankCompanion
from hotkv_vllm.metadata import HotKVHandshake, HotKVMetadata, HotKVWorkerMetadata, StepReport
from hotkv_vllm.report_ids import report_ids
from hotkv_vllm.worker.rank_loads import ActiveLoad, RankLoads
from hotkv_vllm.worker.rank_session import RankSession
from hotkv_vllm.worker.rank_stores import RankStores


class RankReporter:
    """Collects the rank's next report.

    rank_number: vLLM's number of the rank.
    asked: the last message from the scheduler whose loads were begun; the report answers its
        `held_loads` and `asks_links`.
    over: ended loads, whose marks the next `take` frees.
    """

    def __init__(
        self,
        rank: RankSession,
        rank_number: int,
        companion: RankCompanion | None,
        edge: CallbackEdge,
    ) -> None:
        self.edge = edge
        self._rank = rank
        self._rank_number = rank_number
        self._companion = companion
        self.asked = HotKVMetadata()
        self.over: list[ActiveLoad] = []
        self._next = StepReport()
        self._ids = report_ids(rank_number)

    def __repr__(self) -> str:
        return f"RankReporter({'empty' if self._next.is_empty() else 'to send'})"

    @property
    def is_quiet(self) -> bool:
        return not self.over and self._next.is_empty()

    def count(self, name: str, value: float = 1) -> None:
        """Adds to a counter of `counter_help.COUNTERS`."""
        self._next.count(name, value)

    def timed(self, load_seconds: Mapping[str, float]) -> None:
        """load_seconds: by request id; negative if cancelled at the time limit; 0 if unknown."""
        self._next.load_seconds.update(
            (name, load_s) for name, load_s in load_seconds.items() if load_s
        )

    def take(
        self,
        meta: HotKVMetadata | None,
        loads: RankLoads,
        stores: RankStores,
        handshake: Callable[[], HotKVHandshake | None],
    ) -> HotKVWorkerMetadata | None:
        """Completes the report and returns it; None if it is empty.

        meta: the step's message; None if the step has none.
        handshake: called if the scheduler has asked for it.
        """
        if self._companion is not None:
            self._companion.add_report(self._next)
        self._state_report(loads)
        self._step_report(meta, handshake)
        over, self.over = self.over, []
        for load in over:
            self._rank.marks.done(load.after)
        for store_id, result in stores.take_reports().items():
            self._next.stores[store_id] = {self._rank_number: result}
        self._next.adapters = self._rank.adapters.take_report()
        if self._next.is_empty():
            return None
        report, self._next = self._next, StepReport()
        return HotKVWorkerMetadata({next(self._ids): report})

    @callback(nothing, is_part=True)
    def _state_report(self, loads: RankLoads) -> None:
        report = self._next
        report.overdue_loads = ()
        report.settled_loads = {}
        report.links = {}
        report.overdue_loads = loads.overdue(time.monotonic())
        if loads.given_up:
            self.timed(loads.given_up)
            loads.given_up = {}
        report.links = self._rank.link_report(self.asked.asks_links)
        weights = self._rank.weights.take_report() if self._rank.weights is not None else None
        if weights is not None:
            report.weights = {self._rank_number: weights}
        if self.asked.held_loads:
            settled, over = loads.settled(self.asked.held_loads)
            report.settled_loads = dict.fromkeys(settled, frozenset({self._rank_number}))
            self.over += over

    @callback(nothing, is_part=True)
    def _step_report(
        self, meta: HotKVMetadata | None, handshake: Callable[[], HotKVHandshake | None]
    ) -> None:
        if meta is None:
            return
        self._next.timed_step = meta.timed_step
        if meta.wants_handshake or meta.settles_step:
            found = handshake() if meta.wants_handshake else None
            self._next.handshakes = {} if found is None else {self._rank_number: found}
            self._next.settled_step = meta.settles_step
