"""Messages between the two sides of this door. vLLM carries them beside its own offloading's.

Scheduler to worker: `DoorMetadata`. Worker to scheduler: `DoorReport`, joined over all ranks, and
at the start `PageFormat`. In a MultiConnector vLLM forwards no handshake, so the scheduler asks for
it and a report carries it.
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
    """A rank's findings when vLLM registered its KV caches.

    text: how the rank packs K and V inside a page; empty if hotkv has to be off.
    factors: the settings of vLLM that decide KV (`key_space.rank_factors`).
    why_off: why hotkv has to be off; empty if it may be on.
    weights_in_doubt: True if the rank's weights may differ from those that the files name.
    """

    rank: int
    text: str = ""
    why_off: str = ""
    weights_in_doubt: bool = False
    factors: tuple[str, ...] = ()


@dataclass
class DoorMetadata(OffloadingConnectorMetadata):
    """The orders of a step to the workers: those of vLLM's own offloading, and those of hotkv.

    weights: the order to check weights that may have changed.
    wants_formats: True while the scheduler does not know the ranks' page formats.
    timed_step: number that the ranks report with this step's output, by which the scheduler times
        the step; 0 if the step is not timed.
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
        """Returns vLLM's orders with hotkv's orders added."""
        hotkv = {"weights": weights, "wants_formats": wants_formats, "timed_step": timed_step}
        return DoorMetadata(**_values(theirs) | hotkv)


@dataclass
class DoorReport(OffloadingWorkerMetadata):
    """The ranks' report about a step: vLLM's own report, and hotkv's.

    weights, formats: by rank, the report about its weights and its page format.
    timed_step: the number in the step's orders; 0 if the step is not timed.
    """

    weights: dict[int, WeightsReport] = field(default_factory=dict)
    formats: dict[int, PageFormat] = field(default_factory=dict)
    timed_step: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "DoorReport":
        """Returns the joined report of two ranks. Changes neither report."""
        theirs = super().aggregate(other)
        joined = DoorReport(
            weights=dict(self.weights), formats=dict(self.formats), timed_step=self.timed_step
        )
        if isinstance(other, DoorReport):
            joined.weights |= other.weights
            joined.formats |= other.formats
            joined.timed_step = max(joined.timed_step, other.timed_step)
        return joined.beside(theirs)

    def beside(self, theirs: KVConnectorWorkerMetadata | None) -> "DoorReport":
        """Returns this report with the values of vLLM's own report added."""
        ours = {"weights": self.weights, "formats": self.formats, "timed_step": self.timed_step}
        return DoorReport(**({} if theirs is None else _values(theirs)) | ours)

    @property
    def says_something(self) -> bool:
        """Returns True if hotkv has something to report."""
        return bool(self.weights or self.formats or self.timed_step)


def _values(message: Any) -> dict[str, Any]:
    return {one.name: getattr(message, one.name) for one in fields(message)}
