"""Capability that reports the tiers' figures. The tiers themselves are opened before the node,
which calls them as `Node.tiers`."""

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
    assert node.tiers is None or isinstance(node.tiers, Tiers), "tiers of another kind"
    return TiersCapability(node, node.tiers)


class TiersCapability(Capability):
    """`tiers`: None: no tier is reported, and all figures are 0."""

    def __init__(self, node: Node, tiers: Tiers | None) -> None:
        self._tiers = tiers
        node.offers.tier_rows = self.rows

    def __repr__(self) -> str:
        return f"TiersCapability({self._tiers!r})"

    def rows(self) -> Iterable[Figures]:
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
