"""Registers hints as a capability of the node."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from hotkv_proto.table import Words
from hotkv_proto.v1 import hints_pb2, hints_pb2_grpc
from hotkv_server.hints import told
from hotkv_server.hints.book.sessions import SessionReceipt
from hotkv_server.hints.drive import HintDesk
from hotkv_server.hints.service import HintService
from hotkv_server.hints.work import Origin
from hotkv_server.node.capability import Capability, Ended, Report, Service, Topic
from hotkv_server.node.node import Node
from hotkv_server.node.session import LiveSession
from hotkv_server.settings import Settings
from hotkv_server.wire.edge import Edge, full_name


def attach(settings: Settings, node: Node) -> "HintsCapability":
    """Returns the hints capability of this node."""
    return HintsCapability(node)


class HintsCapability(Capability):
    """Connects hints to the node: forwards scheduled and ended requests, and returns figures."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.desk = HintDesk(node.core, node.tiers, node.effects)

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
        await self.desk.act(origin, report.hints)

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
        return {"hints": Topic(partial(told.hints, self.desk.book), filters)}

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
