"""Reads the server's messages to a session. A refusal becomes a HotKVError."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from hotkv_client.types import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EventsRead,
    Evicted,
    Flushed,
    GroupHashes,
    ResidencyOpened,
    ResidentBlocks,
    SequenceCreated,
    SequenceState,
)
from hotkv_proto.errors import HotKVError, Reason, SessionLostError
from hotkv_proto.keys import unsigned_salt
from hotkv_proto.messages import arrays, cache
from hotkv_proto.messages.errors import read_error_detail
from hotkv_proto.messages.fields import enum_word
from hotkv_proto.messages.report_messages import read_memory_registered
from hotkv_proto.v1 import events_pb2, session_pb2
from hotkv_proto.versions import Feature, agreed_features

ANSWERED_AS = {"register_memory": "memory_registered", "ping": "pong", "flush": "flushed"}
"""Answers that have another name than their call."""

Response = session_pb2.ConnectResponse


@dataclass(frozen=True, slots=True)
class Opened:
    """The server's answer to the opening of a session.

    epoch: changes when the server loses the cache's contents.
    has_descriptor_socket: the session can open a link.
    wants_token_ids: stores should carry token ids, for events.
    salts: of the block table, by group index.
    stored_bytes: of the key space in host memory.
    """

    session_id: str
    epoch: int
    has_descriptor_socket: bool
    wants_token_ids: bool
    salts: tuple[int, ...]
    has_residency: bool
    has_tiers: bool
    has_events: bool
    has_ranges: bool
    stored_bytes: int
    has_end_words: bool = False


NOT_OPENED = Opened("", 0, False, False, (), False, False, False, False, 0)


def opened(response: Response | None) -> Opened:
    """Raises SessionLostError if the server did not open the session."""
    if response is None or response.WhichOneof("body") != "session_opened":
        raise SessionLostError("the server did not open the session")
    message = response.session_opened
    features = agreed_features(message.features)
    return Opened(
        message.session_id,
        message.epoch,
        message.has_descriptor_socket,
        message.wants_token_ids,
        tuple(map(unsigned_salt, message.salts)),
        Feature.RESIDENCY in features,
        Feature.TIERS in features,
        Feature.EVENTS in features,
        Feature.CUDA_RANGES in features,
        message.stored_byte_count,
        Feature.END_WORDS in features,
    )


def parsed(data: bytes) -> Response:
    return Response.FromString(data)


def end(response: Response) -> HotKVError | None:
    """Why the server ended a lane, if this is its last message."""
    if response.request_id or response.WhichOneof("body") != "error":
        return None
    return read_error_detail(response.error)


def result(response: Response, call: str, hash_bytes: int, lease_id: str = "") -> Any:
    """The answer's value. Raises HotKVError if the server refused; a malformed answer may raise
    anything.

    call: as in `ConnectRequest.body`.
    lease_id: of an `acquire_lease` call.
    """
    body = response.WhichOneof("body")
    if body == "error":
        raise read_error_detail(response.error)
    if body != ANSWERED_AS.get(call, call):
        raise HotKVError(Reason.INTERNAL, f"the server answered {call} by {body or 'nothing'}")
    match body:
        case "lookup":
            return cache.read_masks(response.lookup.groups)
        case "acquire_lease":
            return cache.read_lease_grant(lease_id, response.acquire_lease)
        case "reserve_blocks":
            return cache.read_results(response.reserve_blocks.runs)
        case "open_residency":
            room = response.open_residency
            return ResidencyOpened(
                room.residency_id, room.word_index, room.word_value, room.start_number
            )
        case "extend_residency":
            extended = response.extend_residency
            found = arrays.int64s(extended.offsets)
            rows = arrays.int64s(extended.sketch_offsets)
            # Without offsets all count as not pinned, and the engine builds the sketches itself.
            is_said = len(rows) == len(found)
            return ResidentBlocks(found, rows if is_said else np.full(len(found), -1, np.int64))
        case "flushed":
            return Flushed(response.flushed.block_count, response.flushed.pending_tiers)
        case "memory_registered":
            return read_memory_registered(response.memory_registered)
        case "read_events":
            return _events(response.read_events, hash_bytes)
        case "load":
            return cache.read_transfer_result(response.load)
        case "store":
            return cache.read_transfer_result(response.store)
        case "create_sequence":
            created = response.create_sequence
            return SequenceCreated(created.lease_id, created.covered_block_count)
        case "append_blocks":
            state = response.append_blocks
            return SequenceState(state.block_count, state.lease_id, state.covered_block_count)
        case "delete_sequence":
            return response.delete_sequence.deleted
        case _:
            return None


def _events(message: events_pb2.ReadEventsResponse, hash_bytes: int) -> EventsRead:
    events = tuple(_event(one, hash_bytes) for one in message.events)
    return EventsRead(events, message.begins_state, message.has_more_state)


def _event(
    message: events_pb2.Event, hash_bytes: int
) -> BlocksStored | BlocksRemoved | BlocksCleared:
    match message.WhichOneof("body"):
        case "stored":
            stored = message.stored
            return BlocksStored(
                stored.group_index,
                tuple(cache.unpack(stored.hashes, hash_bytes)),
                stored.parent_hash,
                np.frombuffer(stored.token_ids, "<i4").astype(np.int32),
                stored.lora_name,
                tuple(map(cache.read_extra_keys, stored.extra_keys)),
                enum_word(events_pb2.Medium.DESCRIPTOR, stored.medium).upper(),
                stored.tier,
            )
        case "removed":
            removed = message.removed
            return BlocksRemoved(
                removed.group_index,
                tuple(cache.unpack(removed.hashes, hash_bytes)),
                enum_word(events_pb2.Medium.DESCRIPTOR, removed.medium).upper(),
                removed.tier,
            )
        case _:
            return BlocksCleared()


def evicted(response: Response, hash_bytes: int) -> Evicted:
    groups = response.eviction_notice.groups
    return Evicted(
        tuple(GroupHashes(g.group_index, cache.unpack(g.hashes, hash_bytes)) for g in groups)
    )
