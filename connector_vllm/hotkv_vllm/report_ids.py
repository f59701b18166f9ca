"""Ids of the ranks' reports, so that each counts once.

vLLM may join a report with others of any rank, and with itself. With `enable_fault_tolerance`
vLLM 0.33 joins the outputs of a failed step with the next one's
(`KVOutputAggregator.ft_defer_kv_connector_outputs`).
"""

import itertools
import time
from collections.abc import Iterable, Iterator

ReportId = tuple[int, int]
"""(rank, number). A rank's numbers ascend, also if its process is replaced."""
MAX_SEEN_IDS = 4096


def report_ids(rank: int) -> Iterator[ReportId]:
    return ((rank, number) for number in itertools.count(time.time_ns()))


class SeenReports:
    """Scheduler thread only."""

    def __init__(self) -> None:
        self._ids: dict[ReportId, None] = {}

    def __repr__(self) -> str:
        return f"SeenReports({len(self._ids)})"

    def fresh(self, ids: Iterable[ReportId]) -> list[ReportId]:
        """The ids that no earlier call has got, ascending."""
        found = sorted(set(ids) - self._ids.keys())
        self._ids.update(dict.fromkeys(found))
        for old in list(itertools.islice(self._ids, max(0, len(self._ids) - MAX_SEEN_IDS))):
            del self._ids[old]
        return found
