"""Connects sparse decode to the node."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial

from hotkv_proto.v1 import sparse_pb2, sparse_pb2_grpc
from hotkv_server.node.capability import Capability, Figures, Samples, Service, SessionCall, Topic
from hotkv_server.node.event_loop import begun
from hotkv_server.node.health import Health
from hotkv_server.node.node import STALLED_WORK_S, Node
from hotkv_server.settings import Settings
from hotkv_server.sparse import calls, figures
from hotkv_server.sparse.drive import SparseDecode
from hotkv_server.sparse.service import SparseService
from hotkv_server.wire.edge import Edge, full_name


def attach(settings: Settings, node: Node) -> "SparseCapability":
    return SparseCapability(node)


class SparseCapability(Capability):
    def __init__(self, node: Node) -> None:
        self._node = node
        arena = node.memory.arena.array()
        self.sparse = SparseDecode(node.core, arena, node.verifier, node.tiers)
        node.events.session_closed.add(self.sparse.close_session)

    def __repr__(self) -> str:
        return f"SparseCapability({self.sparse!r})"

    def start(self, health: Health) -> None:
        stalled_s = self.sparse.selections.stalled_s
        health.watch("selection threads", lambda: True, stalled_s, STALLED_WORK_S)

    async def close(self) -> None:
        self.sparse.close()

    def topics(self) -> Mapping[str, Topic]:
        return {
            "sparse_layers": Topic(
                lambda filters: figures.engines(self.sparse.figures, self._node.names)
            )
        }

    def status(self, *, has_names: bool) -> Figures:
        return {"sparse_layers": figures.layers(self.sparse.figures)}

    def counters(self) -> Mapping[str, float]:
        counted = asdict(self.sparse.counters).items()
        return {
            **{f"sparse_{name}_total": float(value) for name, value in counted},
            "sparse_served_selects_total": float(self.sparse.selections.num_served),
        }

    def gauges(self) -> Mapping[str, float]:
        return {
            "sparse_sequences": float(len(self.sparse.sequences)),
            "sparse_sequence_blocks": float(self.sparse.sequences.num_blocks),
            "sparse_selects_in_flight": float(len(self.sparse.selections)),
        }

    def samples(self) -> Iterable[Samples]:
        latency = self.sparse.selections.latency
        timed = Samples("sparse_select_seconds", "histogram", [((), latency)])
        return [*figures.samples(self.sparse.figures), timed]

    def services(self, edge: Edge) -> Iterable[Service]:
        return [
            Service(
                full_name(sparse_pb2, "SparseService"),
                sparse_pb2_grpc.add_SparseServiceServicer_to_server,
                SparseService(self._node, self.sparse, edge.pace, edge.guests),
            )
        ]

    def session_calls(self) -> Mapping[str, SessionCall]:
        return {
            "create_sequence": partial(begun, calls.create_sequence, self.sparse),
            "append_blocks": partial(begun, calls.append_blocks, self.sparse),
            "delete_sequence": partial(begun, calls.delete_sequence, self.sparse),
            "report_sparse": partial(calls.report_sparse, self.sparse),
        }
