"""Connects hints to the node."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from hotkv_proto.reports import LoadEnd
from hotkv_proto.table import Words
from hotkv_proto.v1 import hints_pb2, hints_pb2_grpc
from hotkv_server.hints import figures
from hotkv_server.hints.book.sessions import SessionReceipt
from hotkv_server.hints.drive import HintDesk
from hotkv_server.hints.service import HintService
from hotkv_server.hints.work import Origin
from hotkv_server.node.capability import Capability, Ended, Report, Service, Topic
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from hotkv_server.settings import Settings
from hotkv_server.wire.edge import Edge, full_name

MAX_OPEN_LOADS = 4096
"""Requests remembered until their engine reports the end of the load, over all engines."""


def attach(settings: Settings, node: Node) -> "HintsCapability":
    return HintsCapability(node)


class HintsCapability(Capability):
    def __init__(self, node: Node) -> None:
        self._node = node
        self.desk = HintDesk(node.core, node.tiers, node.effects)
        # For each open load: the receipt that counted its hit, and what to add to it if the load
        # fails.
        self._loads = OrderedDict[tuple[str, int], tuple[SessionReceipt, SessionReceipt]]()
        node.events.request_noted.append(self.request_noted)
        node.events.request_ended.add(self.request_ended)
        node.events.load_ended.add(self.load_ended)
        node.events.session_closed.add(self.session_closed)
        node.offers.session_prompts = self.session_prompts

    def __repr__(self) -> str:
        return f"HintsCapability({self.desk!r})"

    async def close(self) -> None:
        await self.desk.close()

    async def request_noted(self, session: LiveSession, report: Report) -> None:
        origin = Origin(
            session.key_space.tenant,
            session.record.key_space_id,
            report.hashes,
            report.session_id,
            report.retention,
            is_running=True,
        )
        speed, here = session.prefill_tokens_per_s, report.hit_tokens - report.device_hit_tokens
        receipt = SessionReceipt(
            1,
            report.prompt_tokens,
            report.device_hit_tokens,
            report.hit_tokens,
            report.saved_s or (here / speed if speed else 0.0),
        )
        self.desk.scheduled(origin, receipt, speed, report.hints)
        known = here and report.report_id and self.desk.book.known(origin.tenant)
        if known and (of_router := known.sessions.get(report.session_id)):
            back = SessionReceipt(hit_tokens=-here, saved_s=-receipt.saved_s)
            self._loads[session.secret_id, report.report_id] = of_router.receipt, back
            if len(self._loads) > MAX_OPEN_LOADS:
                self._loads.popitem(last=False)
        await self.desk.act(origin, report.hints)

    def load_ended(self, session: LiveSession, end: LoadEnd) -> None:
        load = self._loads.pop((session.secret_id, end.report_id), None)
        if load is not None and end.failed:
            load[0].add(load[1])

    def session_closed(self, session: LiveSession, is_last: bool) -> None:
        for key in [key for key in self._loads if key[0] == session.secret_id]:
            self.load_ended(session, LoadEnd(key[1], 0.0, failed=True))

    def request_ended(self, session: LiveSession, ended: Ended) -> None:
        origin = Origin(
            session.key_space.tenant,
            session.record.key_space_id,
            ended.hashes,
            ended.session_id,
            ended.hints.retention(),
        )
        self.desk.ended(origin, ended.hints)

    def topics(self) -> Mapping[str, Topic]:
        filters = ("message_id", "session_id", "tenant", "page_size")
        return {"hints": Topic(partial(figures.hints, self.desk.book), filters)}

    def counters(self) -> Mapping[str, float]:
        actions = self.desk.num_actions
        return {f"hints_{status.value}_total": float(count) for status, count in actions.items()}

    def gauges(self) -> Mapping[str, float]:
        return {"hint_sessions": float(sum(len(one.sessions) for _, one in self.desk.book.all()))}

    def services(self, edge: Edge) -> Iterable[Service]:
        return [
            Service(
                full_name(hints_pb2, "HintService"),
                hints_pb2_grpc.add_HintServiceServicer_to_server,
                HintService(self._node, self.desk, edge.access, edge.identify),
            )
        ]

    def session_prompts(self, session_id: str, tenant: str) -> Sequence[tuple[str, int, Words]]:
        prompts = []
        for name, one in self.desk.book.all():
            session = one.sessions.get(session_id) if tenant in ("", name) else None
            if session is not None:
                prompts += [(name, number, hashes) for number, hashes in session.chains.items()]
        return prompts
