"""Serves events over gRPC: to tools (`EventService`) and to engines (`EngineReader`)."""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

from hotkv_proto.messages.cache import extra_keys_message, packed_words
from hotkv_proto.v1 import events_pb2, events_pb2_grpc, session_pb2
from hotkv_proto.versions import MAX_MESSAGE_BYTES
from hotkv_server.cache.values import Medium
from hotkv_server.events.drive import (
    EventHub,
    KeySpaceCleared,
    RemovedEvent,
    StoredEvent,
    TimedEvent,
)
from hotkv_server.node import event_loop
from hotkv_server.node.node import Node
from hotkv_server.wire.errors import stream

MEDIA = {
    Medium.CPU: events_pb2.MEDIUM_CPU,
    Medium.DISK: events_pb2.MEDIUM_DISK,
    Medium.REMOTE: events_pb2.MEDIUM_REMOTE,
}


MOST_EVENTS = 256
"""In an answer to an engine."""
ANSWER_BYTES = MAX_MESSAGE_BYTES // 2
"""In an answer to an engine, unless one event is larger."""
STATE_EVENTS = 32
"""Events for cached blocks in an answer to an engine."""

State = Callable[[bytes | None], Iterator[StoredEvent | None]]
"""Yields events for the cached blocks of the key space with this fingerprint (None: of all), and
None for a step without event."""


class EventService(events_pb2_grpc.EventServiceServicer):
    """`state` is sent to subscribers that ask for it, before the first event."""

    def __init__(self, node: Node, hub: EventHub, state: State) -> None:
        self._node = node
        self._hub = hub
        self._state = state

    async def Subscribe(
        self, request: events_pb2.SubscribeRequest, context: Any
    ) -> AsyncIterator[events_pb2.SubscribeResponse]:
        def message(item: TimedEvent) -> events_pb2.Event | None:
            if request.key_space_id not in (0, item.event.key_space_id):
                return None
            if not request.tiers and not _is_of_host(item):
                return None
            message = events_pb2.Event()
            _fill(message, item)
            return message

        def response(events: list[events_pb2.Event], lost: int) -> events_pb2.SubscribeResponse:
            return events_pb2.SubscribeResponse(events=events, lost_event_count=lost)

        async def first() -> AsyncIterator[TimedEvent]:
            fingerprint = (
                self._node.core.key_space(request.key_space_id).fingerprint
                if request.key_space_id
                else None
            )
            async for events, _ in event_loop.slices(self._state(fingerprint)):
                for event in events:
                    if event is not None and (item := self._hub.timed(event)) is not None:
                        yield item

        async for part in stream(
            context,
            self._node,
            request.key_space_id,
            self._hub.feeds,
            message,
            response,
            first if request.state else None,
        ):
            yield part


class EngineReader:
    """Reads a key space's events for an engine: first for the cached blocks, then as they happen.

    Always true: of two events about a block, the later one is newer. After a loss the cached
    blocks are sent again.
    """

    def __init__(
        self, hub: EventHub, key_space_id: int, state: Callable[[], Iterator[StoredEvent | None]]
    ) -> None:
        self._hub = hub
        self._key_space_id = key_space_id
        self._state = state
        self._stack = ExitStack()
        self._begin()

    def _begin(self) -> None:
        self._stack.close()
        self._feed = self._stack.enter_context(self._hub.feeds.reader())
        self._present: Iterator[StoredEvent | None] | None = self._state()
        self._next: StoredEvent | None = None
        self._begins = True

    def close(self) -> None:
        self._stack.close()

    def read(self, most: int, *, begins_state: bool = False) -> session_pb2.ConnectResponse:
        """At most `most` events (0: MOST_EVENTS). `begins_state` begins again with the cached
        blocks.

        A whole message of the stream: protobuf copies a field that is put into a message, which
        takes long for long prompts.
        """
        most = min(most if most > 0 else MOST_EVENTS, MOST_EVENTS)
        if begins_state and not self._begins:
            self._begin()
        items, lost = self._feed.take(most, ANSWER_BYTES) if self._present is None else ([], 0)
        if lost:
            self._begin()
            items = []
        if self._present is not None:
            items = list(self._of_state(self._present, min(most, STATE_EVENTS)))
        begins, self._begins = self._begins, False
        whole = session_pb2.ConnectResponse()
        answer = whole.read_events
        answer.begins_state, answer.has_more_state = begins, self._present is not None
        answer.SetInParent()
        for item in items:
            if item.event.key_space_id == self._key_space_id:
                _fill(answer.events.add(), item)
        return whole

    def _of_state(self, present: Iterator[StoredEvent | None], most: int) -> Iterator[TimedEvent]:
        """Stops after SLICE_S even without an event. At the end, `_present` becomes None."""
        left_bytes, count, ends_s = ANSWER_BYTES, 0, time.perf_counter() + event_loop.SLICE_S
        while count < most:
            try:
                event, self._next = self._next or next(present), None
            except StopIteration:
                self._present = None
                return
            if event is not None:
                left_bytes -= event.num_bytes
                if count and left_bytes < 0:
                    self._next = event
                    return
                count += 1
                if (item := self._hub.timed(event)) is not None:
                    yield item
            if time.perf_counter() >= ends_s:
                return


# ----------------------------------------------------------------------------------------- messages


def _fill(message: events_pb2.Event, item: TimedEvent) -> None:
    value, key_space = item.event, item.key_space
    message.key_space_id = value.key_space_id
    message.unix_time_ms = int(item.unix_time_s * 1000)
    match value:
        case StoredEvent(hashes=words, content=content):
            stored = message.stored
            stored.group_index, stored.depth = value.group_index, value.depth
            stored.lora_name = content.lora_name
            stored.hashes = packed_words(words, key_space.hash_bytes)
            stored.token_ids = content.token_ids.tobytes()
            if value.parent is not None:
                stored.parent_hash = packed_words(value.parent.reshape(1, 8), key_space.hash_bytes)
            stored.block_count = len(words)
            stored.block_token_count = key_space.groups[value.group_index].block_tokens
            stored.medium, stored.tier = MEDIA[value.medium], value.tier
            stored.extra_keys.extend(extra_keys_message(keys) for keys in content.extra_keys)
        case RemovedEvent(hashes=words):
            message.removed.group_index, message.removed.block_count = value.group_index, len(words)
            message.removed.hashes = packed_words(words, key_space.hash_bytes)
            message.removed.medium, message.removed.tier = MEDIA[value.medium], value.tier
        case KeySpaceCleared():
            message.cleared.SetInParent()


def _is_of_host(item: TimedEvent) -> bool:
    """Whether subscribers that did not ask for tiers receive the event."""
    return isinstance(item.event, KeySpaceCleared) or item.event.medium is Medium.CPU
