"""The capability (optional part of the server) that reports figures of the tiers to the node:
counts, bytes and times, for metrics and the status page.

It does nothing else. The tiers are opened before the node is made; the node gets them in its
constructor (`Node.tiers`), and calls them through the protocols in `node.capability`.
"""

from collections.abc import Iterable, Mapping

from hotkv_server.node.capability import Capability, Figures, Samples
from hotkv_server.node.node import Node
from hotkv_server.settings import Settings
from hotkv_server.tiers import figures
from hotkv_server.tiers.drive.tiers import Tiers
from hotkv_server.tiers.start import check_tiers as check
from hotkv_server.tiers.start import open_tiers as open_below

__all__ = ["TiersCapability", "attach", "check", "open_below"]


def attach(settings: Settings, node: Node) -> "TiersCapability":
    """Returns the capability (optional part of the server) that reports the figures of this node's
    tiers."""
    assert node.tiers is None or isinstance(node.tiers, Tiers), "tiers of another kind"
    return TiersCapability(node.tiers)


class TiersCapability(Capability):
    """Reports the states, counters, gauges and read times of the tiers to the node.

    `tiers`: None for a node without tiers. The capability then reports no tier, and all figures
        are 0.
    """

    def __init__(self, tiers: Tiers | None) -> None:
        self._tiers = tiers

    def __repr__(self) -> str:
        return f"TiersCapability({self._tiers!r})"

    def tiers(self) -> Iterable[Figures]:
        return [
            {
                "name": state.name,
                "capacity_byte_count": state.capacity_bytes,
                "activity": figures.activity(state),
            }
            for state in figures.states(self._tiers)
        ]

    def counters(self) -> Mapping[str, float]:
        return figures.counters(self._tiers)

    def gauges(self) -> Mapping[str, float]:
        return figures.gauges(self._tiers)

    def samples(self) -> Iterable[Samples]:
        times = [((state.name,), state.reads.times_s) for state in figures.states(self._tiers)]
        return [Samples("tier_read_seconds", "histogram", times)]
