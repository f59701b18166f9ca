"""Identifies the ranks' reports to the scheduler, so that each counts once.

vLLM may join a report with reports of other ranks, with earlier or later reports of the same rank,
and with itself. With `enable_fault_tolerance` vLLM 0.33 joins the outputs of a failed step with
those of the next one (`KVOutputAggregator.ft_defer_kv_connector_outputs`).
"""

import itertools
import time
from collections.abc import Iterable, Iterator

ReportId = tuple[int, int]
"""(rank, number). The numbers of a rank ascend, also if its process is replaced."""
MOST_HEARD = 4096
"""Number of ids that `SeenReports` remembers."""


def report_ids(rank: int) -> Iterator[ReportId]:
    """Generates the ids of the reports that this process sends for `rank`."""
    return ((rank, number) for number in itertools.count(time.time_ns()))


class SeenReports:
    """Remembers which reports were handled. Scheduler thread only."""

    def __init__(self) -> None:
        self._ids: dict[ReportId, None] = {}

    def __repr__(self) -> str:
        return f"SeenReports({len(self._ids)})"

    def fresh(self, ids: Iterable[ReportId]) -> list[ReportId]:
        """Returns, in ascending order, the ids that no earlier call has got."""
        found = sorted(set(ids) - self._ids.keys())
        self._ids.update(dict.fromkeys(found))
        for old in list(itertools.islice(self._ids, max(0, len(self._ids) - MOST_HEARD))):
            del self._ids[old]
        return found
