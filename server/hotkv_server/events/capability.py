"""Events, as a capability of the node. ZMQ is imported only if the settings ask for it."""

import importlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import RunContent
from hotkv_proto.keys import KeySpace
from hotkv_proto.v1 import events_pb2, events_pb2_grpc
from hotkv_server.cache.values import Entries, EvictionNotice, Medium, Run
from hotkv_server.events.contents import KnownContents
from hotkv_server.events.drive import EventHub, moved_events, removed_events, stored_events
from hotkv_server.events.service import EventService
from hotkv_server.node.capability import Capability, Service
from hotkv_server.node.health import Health
from hotkv_server.node.node import STALLED_WORK_S, Node
from hotkv_server.node.session import LiveSession
from hotkv_server.settings import Settings
from hotkv_server.settings.outlets import EventSettings
from hotkv_server.startup import StartError
from hotkv_server.wire.edge import Edge, full_name

if TYPE_CHECKING:
    from hotkv_server.events.publisher import ZmqPublisher


def check(settings: Settings) -> None:
    """Raises StartError if events are wanted and can't be published."""
    if settings.events.endpoint:
        _zmq()


def attach(settings: Settings, node: Node) -> "EventsCapability":
    """Returns the events of this node. Raises StartError."""
    return EventsCapability(
        node, EventHub(_publisher(settings.events)), settings.events.buffer_bytes
    )


def _zmq() -> ModuleType:
    try:
        import hotkv_server.events.publisher  # noqa: F401 - needs more than zmq

        return importlib.import_module("zmq")
    except ImportError as missing:
        raise StartError(
            f"events.endpoint is set, but {missing.name} is not installed: pip install "
            "'hotkv[events]'"
        ) from missing


def _publisher(settings: EventSettings) -> "ZmqPublisher | None":
    """Returns the publisher of events; None if the settings name no endpoint. Raises StartError."""
    if not settings.endpoint:
        return None
    zmq = _zmq()
    from hotkv_server.events.publisher import ZmqPublisher

    host = socket.gethostname()

    def topic_of(number: int, key_space: KeySpace) -> str:
        return settings.topic.format(
            host=host, model=key_space.model, tenant=key_space.tenant, key_space=number
        )

    try:
        return ZmqPublisher(
            settings.endpoint,
            settings.replay_endpoint,
            topic_of,
            buffer_steps=settings.buffer_steps,
            buffer_bytes=settings.buffer_bytes,
            int_hashes=settings.int_hashes,
            per_endpoint=settings.numbering == "endpoint",
        )
    except zmq.ZMQError as error:
        raise StartError(
            f"events: {error}; is {settings.endpoint} or "
            f"{settings.replay_endpoint or '(no replay_endpoint)'} in use?"
        ) from error


class EventsCapability(Capability):
    """See the folder's README. `content_bytes`: most bytes of contents that wait for a tier."""

    def __init__(self, node: Node, hub: EventHub, content_bytes: int) -> None:
        self._node = node
        self.hub = hub
        self._contents = KnownContents(content_bytes)

    def __repr__(self) -> str:
        return f"EventsCapability({self.hub!r})"

    def start(self, health: Health) -> None:
        if (publisher := self.hub.publisher) is not None:
            health.watch(
                "the event publisher", publisher.is_alive, publisher.stalled_s, STALLED_WORK_S
            )

    async def tick(self, now_s: float) -> None:
        if self.hub.publisher is not None:
            self.hub.publisher.settle()

    def release(self) -> None:
        if self.hub.publisher is not None:
            self.hub.publisher.close()

    def key_space_added(self, number: int, key_space: KeySpace) -> None:
        self.hub.add_key_space(number, key_space)

    def key_space_forgotten(self, number: int) -> None:
        self.hub.forget_key_space(number)

    def blocks_stored(
        self,
        session: LiveSession,
        runs: Sequence[Run],
        contents: Sequence[RunContent],
        results: Sequence[NDArray[np.uint8]],
    ) -> None:
        if self.hub.is_heard and contents:
            number, key_space = session.record.key_space_id, session.key_space
            events = stored_events(number, key_space, runs, contents, results)
            self.hub.publish(events)
            if self._node.core.below:
                for event in events:
                    self._contents.keep(event)

    def blocks_moved(self, entries: Entries, medium: Medium, tier: str) -> None:
        if not self.hub.is_heard:
            return
        core = self._node.core
        places = [one.space for one in core.below if one.space is not None]
        space = places[0] if medium is Medium.DISK else core.space
        self.hub.publish(
            list(moved_events(space.index, entries, medium, tier, self._contents.find))
        )

    def blocks_removed(
        self,
        notices: Sequence[EvictionNotice],
        below: Sequence[EvictionNotice],
        flushed_key_space_id: int,
    ) -> None:
        if self.hub.is_heard:
            self.hub.publish(removed_events(notices, flushed_key_space_id, below))

    def counters(self) -> Mapping[str, float]:
        publisher = self.hub.publisher
        return {
            "events_lost_by_readers_total": float(self.hub.feeds.lost_items),
            "events_published_total": float(publisher.published_events if publisher else 0),
            "events_lost_total": float(publisher.lost_events if publisher else 0),
            "events_without_tokens_total": float(self._contents.unknown_blocks),
        }

    def gauges(self) -> Mapping[str, float]:
        publisher = self.hub.publisher
        return {
            "events_queued_bytes": float(publisher.queued_bytes if publisher else 0),
            "event_readers": float(len(self.hub.feeds)),
        }

    def services(self, edge: Edge) -> Iterable[Service]:
        return [
            Service(
                full_name(events_pb2, "EventService"),
                events_pb2_grpc.add_EventServiceServicer_to_server,
                EventService(self._node, self.hub),
                is_admin=True,
            )
        ]

    @property
    def wants_token_ids(self) -> bool:
        return self.hub.publisher is not None
