"""Messages between the scheduler side and the worker sides of `HotKVOffloadingConnector`. They
extend the messages of vLLM's own offloading.

In each step vLLM carries one `DoorMetadata` from the scheduler to the workers, and one `DoorReport`
(joined over all ranks) from the workers to the scheduler. At the start each rank sends a
`PageFormat` (how it packs KV inside pages), as its handshake. In a MultiConnector vLLM forwards no
handshake, so the scheduler side asks for the page formats, and the next report contains them.
("Door" is the code's word for a connector.)
"""

from dataclasses import dataclass, field, fields
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


@dataclass
class DoorReport(OffloadingWorkerMetadata):
    """The ranks' report to the scheduler about a step: the report of vLLM's own offloading, and
    hotkv's report.

    weights: by rank, the report about its weights; only for ranks that have one.
    formats: by rank, its page format (how it packs K and V inside pages), if the scheduler has
        asked for it.
    timed_step: `DoorMetadata.timed_step` of the step; 0 if its time is not measured.
    hook_errors: number of exceptions in hotkv's hooks (methods that vLLM calls) since the last
        report.
    """

    weights: dict[int, WeightsReport] = field(default_factory=dict)
    formats: dict[int, PageFormat] = field(default_factory=dict)
    timed_step: int = 0
    hook_errors: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "DoorReport":
        """Returns the report that joins this report and another rank's. Changes neither report."""
        theirs = super().aggregate(other)
        joined = DoorReport(
            weights=dict(self.weights),
            formats=dict(self.formats),
            timed_step=self.timed_step,
            hook_errors=self.hook_errors,
        )
        if isinstance(other, DoorReport):
            joined.weights |= other.weights
            joined.formats |= other.formats
            joined.timed_step = max(joined.timed_step, other.timed_step)
            joined.hook_errors += other.hook_errors
        return joined.beside(theirs)

    def beside(self, theirs: KVConnectorWorkerMetadata | None) -> "DoorReport":
        """Returns a copy of this report that has hotkv's values from this report, and the values of
        vLLM's own offloading from `theirs`."""
        names = ("weights", "formats", "timed_step", "hook_errors")
        ours = {name: getattr(self, name) for name in names}
        return DoorReport(**({} if theirs is None else _values(theirs)) | ours)

    @property
    def says_something(self) -> bool:
        """Returns True if hotkv's part of the report is not empty."""
        return bool(self.weights or self.formats or self.timed_step or self.hook_errors)


def _values(message: Any) -> dict[str, Any]:
    return {one.name: getattr(message, one.name) for one in fields(message)}
