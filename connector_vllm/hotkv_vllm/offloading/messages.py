"""Messages between the scheduler side and the worker sides of `HotKVOffloadingConnector`. They
extend the messages of vLLM's own offloading.

In each step vLLM carries one `DoorMetadata` from the scheduler to the workers, and one `DoorReport`
with the reports of all ranks from the workers to the scheduler. At the start each rank sends a
`PageFormat` (how it packs KV inside pages), as its handshake. In a MultiConnector vLLM forwards no
handshake, so the scheduler side asks for the page formats, and the next report contains them.
("Door" is the code's word for a connector.)
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
    """A rank's message to the scheduler after vLLM has registered the rank's KV caches. It contains
    the parts of the key space that only the rank knows.

    rank: vLLM's number of the rank.
    text: identifies how the rank packs K and V inside a page (KV of a block in one layer); empty if
        hotkv must be off.
    why_off: why hotkv must be off; empty if it may be on.
    weights_in_doubt: True if the rank's weights may differ from the contents of the model's files.
    factors: the settings of vLLM that decide KV bytes (`key_space.rank_factors`).
    """

    rank: int
    text: str = ""
    why_off: str = ""
    weights_in_doubt: bool = False
    factors: tuple[str, ...] = ()


@dataclass
class DoorMetadata(OffloadingConnectorMetadata):
    """The scheduler's message to the workers for one step: the orders of vLLM's own offloading, and
    hotkv's orders.

    weights: the order to check weights that may have changed; None without such an order.
    wants_formats: True if each rank must report its page format (how it packs K and V inside
        pages).
    timed_step: id of a step whose time the scheduler measures. The ranks send it back with the
        step's output. 0 if the step is not measured.
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
        """Returns the message for a step: the orders of vLLM's own offloading (`theirs`) and
        hotkv's orders (the other arguments)."""
        hotkv = {"weights": weights, "wants_formats": wants_formats, "timed_step": timed_step}
        return DoorMetadata(**_values(theirs) | hotkv)


@dataclass(slots=True)
class DoorRankReport:
    """A rank's report about a step.

    theirs: the report of vLLM's own offloading; None without one.
    weights: the report about its weights; None without one.
    format: its page format, if the scheduler has asked for it.
    timed_step: `DoorMetadata.timed_step` of the step; 0 if its time is not measured.
    callback_errors: number of exceptions in hotkv's callbacks since the last report.
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
    """The ranks' message to the scheduler about a step. vLLM joins the messages of all ranks with
    `aggregate`, in any order, and possibly several times.

    Always true: the fields of vLLM's own message are the join of `theirs` of all `ranks`, each
    counted once.

    ranks: the reports of ranks, by id.
    """

    ranks: dict[ReportId, DoorRankReport] = field(default_factory=dict)

    @staticmethod
    def of(ranks: dict[ReportId, DoorRankReport]) -> "DoorReport":
        """Returns the message with these reports."""
        theirs = [one.theirs for _, one in sorted(ranks.items()) if one.theirs is not None]
        joined = reduce(OffloadingWorkerMetadata.aggregate, theirs, OffloadingWorkerMetadata())
        return DoorReport(**_values(joined), ranks=ranks)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "DoorReport":
        """Returns a message with the reports of both messages. Changes neither message."""
        assert isinstance(other, DoorReport)
        return DoorReport.of(self.ranks | other.ranks)

    def fresh(self, seen: SeenReports) -> "DoorReport":
        """Returns the message without the reports that were handled before, and records the others
        as handled."""
        return DoorReport.of({one: self.ranks[one] for one in seen.fresh(self.ranks)})

    @property
    def parts(self) -> Iterable[tuple[int, DoorRankReport]]:
        """Returns the number of each report's rank, and the report, in the order of the steps."""
        return [(rank, one) for (rank, _), one in sorted(self.ranks.items())]


def _values(message: Any) -> dict[str, Any]:
    return {one.name: getattr(message, one.name) for one in fields(message)}
