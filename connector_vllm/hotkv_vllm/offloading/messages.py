"""Messages between the sides of `HotKVOffloadingConnector`, which extend those of vLLM's
offloading.

In each step vLLM carries a `DoorMetadata` to the workers, and a `DoorReport` of all ranks back.
A `PageFormat` is each rank's handshake; in a MultiConnector, which forwards none, the next
report has it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)

from hotkv_vllm.identity.rekeying import WeightsOrder, WeightsReport
from hotkv_vllm.report_ids import ReportId, SeenReports


@dataclass(slots=True)
class PageFormat(KVConnectorHandshakeMetadata):
    """What the key space needs and only a rank knows, after vLLM has registered its KV caches.

    text: how it packs K and V inside pages; empty if hotkv must be off.
    why_off: empty if hotkv may be on.
    weights_in_doubt: its weights may differ from the model's files.
    factors: of `key_space.rank_factors`.
    """

    rank: int
    text: str = ""
    why_off: str = ""
    weights_in_doubt: bool = False
    factors: tuple[str, ...] = ()


@dataclass
class DoorMetadata(OffloadingConnectorMetadata):
    """vLLM's orders for one step, and hotkv's.

    timed_step: id that ranks send back, to measure the step; 0: not measured.
    """

    weights: WeightsOrder | None = None
    wants_formats: bool = False
    timed_step: int = 0

    @staticmethod
    def beside(
        theirs: OffloadingConnectorMetadata,
        weights: WeightsOrder | None,
        wants_formats: bool,
        timed_step: int,
    ) -> "DoorMetadata":
        hotkv = {"weights": weights, "wants_formats": wants_formats, "timed_step": timed_step}
        return DoorMetadata(**_values(theirs) | hotkv)


@dataclass(slots=True)
class DoorRankReport:
    """theirs: of vLLM's own offloading.
    format: if the scheduler has asked for it.
    timed_step: of `DoorMetadata`.
    callback_errors: since the last report.
    """

    theirs: OffloadingWorkerMetadata | None = None
    weights: WeightsReport | None = None
    format: PageFormat | None = None
    timed_step: int = 0
    callback_errors: int = 0

    @property
    def is_empty(self) -> bool:
        return self == DoorRankReport()


@dataclass
class DoorReport(OffloadingWorkerMetadata):
    """All ranks' reports about a step. vLLM joins them in any order, possibly several times;
    vLLM's own fields are the join of `theirs` of all `ranks`, each counted once."""

    ranks: dict[ReportId, DoorRankReport] = field(default_factory=dict)

    @staticmethod
    def of(ranks: dict[ReportId, DoorRankReport]) -> "DoorReport":
        theirs = [one.theirs for _, one in sorted(ranks.items()) if one.theirs is not None]
        joined = reduce(OffloadingWorkerMetadata.aggregate, theirs, OffloadingWorkerMetadata())
        return DoorReport(**_values(joined), ranks=ranks)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "DoorReport":
        """Changes neither message."""
        assert isinstance(other, DoorReport)
        return DoorReport.of(self.ranks | other.ranks)

    def fresh(self, seen: SeenReports) -> "DoorReport":
        """Without the reports that were handled before; records the rest as handled."""
        return DoorReport.of({one: self.ranks[one] for one in seen.fresh(self.ranks)})

    @property
    def parts(self) -> Iterable[tuple[int, DoorRankReport]]:
        """(rank, report), in the order of the steps."""
        return [(rank, one) for (rank, _), one in sorted(self.ranks.items())]


def _values(message: Any) -> dict[str, Any]:
    return {one.name: getattr(message, one.name) for one in fields(message)}
