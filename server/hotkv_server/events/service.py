"""EventService: events for tools, and events as messages."""

from collections.abc import AsyncIterator
from typing import Any

from hotkv_proto.messages.cache import extra_keys_message, packed_words
from hotkv_proto.v1 import events_pb2, events_pb2_grpc
from hotkv_server.cache.values import Medium
from hotkv_server.events.drive import (
    BlocksRemoved,
    BlocksStored,
    EventHub,
    KeySpaceCleared,
    TimedEvent,
)
from hotkv_server.node.node import Node
from hotkv_server.wire.errors import stream

MEDIA = {
    Medium.CPU: events_pb2.MEDIUM_CPU,
    Medium.DISK: events_pb2.MEDIUM_DISK,
    Medium.REMOTE: events_pb2.MEDIUM_REMOTE,
}


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
            if not request.tiers and not _is_of_host(item):
                return None
            return _message(item)

        def response(events: list[events_pb2.Event], lost: int) -> events_pb2.SubscribeResponse:
            return events_pb2.SubscribeResponse(events=events, lost_event_count=lost)

        async for part in stream(
            context, self._node, request.key_space_id, self._hub.feeds, message, response
        ):
            yield part


# ----------------------------------------------------------------------------------------- messages


def _message(item: TimedEvent) -> events_pb2.Event:
    """Converts an event to its message."""
    value, key_space = item.event, item.key_space
    message = events_pb2.Event(
        key_space_id=value.key_space_id, unix_time_ms=int(item.unix_time_s * 1000)
    )
    match value:
        case BlocksStored(hashes=words, content=content):
            stored = message.stored
            stored.group_index, stored.depth, stored.lora_name = (
                value.group_index,
                value.depth,
                content.lora_name,
            )
            stored.hashes, stored.token_ids = (
                packed_words(words, key_space.hash_bytes),
                content.token_ids.tobytes(),
            )
            stored.parent_hash = (
                b""
                if value.parent is None
                else packed_words(value.parent.reshape(1, 8), key_space.hash_bytes)
            )
            stored.block_count = len(words)
            stored.block_token_count = key_space.groups[value.group_index].block_tokens
            stored.medium, stored.tier = MEDIA[value.medium], value.tier
            stored.extra_keys.extend(extra_keys_message(keys) for keys in content.extra_keys)
        case BlocksRemoved(hashes=words):
            message.removed.group_index, message.removed.block_count = value.group_index, len(words)
            message.removed.hashes = packed_words(words, key_space.hash_bytes)
            message.removed.medium, message.removed.tier = MEDIA[value.medium], value.tier
        case KeySpaceCleared():
            message.cleared.SetInParent()
    return message


def _is_of_host(item: TimedEvent) -> bool:
    """Returns whether the event is about blocks in host memory, and so also for subscribers that
    don't know tiers."""
    return isinstance(item.event, KeySpaceCleared) or item.event.medium is Medium.CPU
