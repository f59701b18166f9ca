"""EventService: events for tools."""

from collections.abc import AsyncIterator
from typing import Any

from hotkv_proto.v1 import events_pb2, events_pb2_grpc
from hotkv_server.events import messages as event_convert
from hotkv_server.events.drive import EventHub, TimedEvent
from hotkv_server.node.node import Node
from hotkv_server.wire.errors import stream


class EventService(events_pb2_grpc.EventServiceServicer):
    """See events.proto."""

    def __init__(self, node: Node, hub: EventHub) -> None:
        self._node = node
        self._hub = hub

    async def Subscribe(
        self, request: events_pb2.SubscribeRequest, context: Any
    ) -> AsyncIterator[events_pb2.SubscribeResponse]:
        def message(item: TimedEvent) -> events_pb2.Event | None:
            if request.key_space_id not in (0, item.event.key_space_id):
                return None
            if not request.tiers and not event_convert.is_of_host(item):
                return None
            return event_convert.event(item)

        def response(events: list[events_pb2.Event], lost: int) -> events_pb2.SubscribeResponse:
            return events_pb2.SubscribeResponse(events=events, lost_event_count=lost)

        async for part in stream(
            context, self._node, request.key_space_id, self._hub.feeds, message, response
        ):
            yield part
