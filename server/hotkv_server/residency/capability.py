"""Connects residencies to the node."""

from collections.abc import Mapping
from functools import partial

from hotkv_server.node.capability import Capability, SessionCall, Topic
from hotkv_server.node.event_loop import begun
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from hotkv_server.residency import calls, figures
from hotkv_server.residency.drive import ResidencyDesk
from hotkv_server.settings import Settings


def attach(settings: Settings, node: Node) -> "ResidencyCapability":
    return ResidencyCapability(node)


class ResidencyCapability(Capability):
    def __init__(self, node: Node) -> None:
        self._node = node
        self.desk = ResidencyDesk(node.core, node.verifier, node.effects.run)
        node.events.session_closed.add(self.session_closed)
        node.offers.session_figures = self.session_figures

    def __repr__(self) -> str:
        return f"ResidencyCapability({self.desk!r})"

    def session_closed(self, session: LiveSession, is_last: bool) -> None:
        if is_last:
            self.desk.residencies.book.forget_engine(session.record.engine_id)

    def topics(self) -> Mapping[str, Topic]:
        told_of = partial(figures.residencies, self._node, self.desk.residencies)
        return {"residencies": Topic(told_of, ("page_size",))}

    def session_figures(self) -> Mapping[str, Mapping[int, int]]:
        counts: dict[int, int] = {}
        for one in self.desk.residencies.book.all():
            counts[one.session_number] = counts.get(one.session_number, 0) + 1
        return {"residency_count": counts}

    def counters(self) -> Mapping[str, float]:
        book = self.desk.residencies.book
        return {
            "residencies_opened_total": float(book.num_opened),
            "residencies_refused_total": float(book.num_refused),
        }

    def gauges(self) -> Mapping[str, float]:
        book, bound = self.desk.residencies.book, self.desk.residencies.bound
        return {
            "residencies": float(len(book)),
            "residency_pinned_bytes": float(bound.pinned_bytes),
            "residency_promised_bytes": float(bound.promised_bytes),
            "residency_bound_bytes": float(bound.bound_bytes),
            "residency_grace_bytes": float(self._node.core.grace.num_bytes),
            "residencies_waiting": float(len(book.refusals())),
        }

    def session_calls(self) -> Mapping[str, SessionCall]:
        return {
            "open_residency": partial(calls.open_residency, self.desk),
            "extend_residency": partial(begun, calls.extend_residency, self._node, self.desk),
            "close_residency": partial(calls.close_residency, self.desk),
        }
