"""Answers to sessions: messages in, typed values out; a refusal becomes a HotKVError."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from hotkv_client.command import unanswered
from hotkv_client.types import (
    BoolMask,
    Evicted,
    Flushed,
    GroupHashes,
    LeaseGrant,
    ResidencyOpened,
    ResidentBlocks,
    SequenceCreated,
    SequenceState,
    TransferResult,
    TransferStatus,
)
from hotkv_proto.errors import HotKVError, Reason, SessionLostError
from hotkv_proto.keys import unsigned_salt
from hotkv_proto.order import OrderKind
from hotkv_proto.v1 import cache_pb2, errors_pb2, session_pb2, sparse_pb2
from hotkv_proto.versions import Feature, agreed_features

STATUS_KEY = "grpc-status-details-bin"
"""Trailer of a failed call: a google.rpc.Status."""
ERROR_INFO_URL = "type.googleapis.com/google.rpc.ErrorInfo"

ANSWERED_AS = {"register_memory": "memory_registered", "ping": "pong", "flush": "flushed"}
"""The answer's name, for calls whose answer has another one."""

Response = session_pb2.ConnectResponse


def unpack(packed: bytes, hash_bytes: int) -> list[bytes]:
    """Joined hashes as a list."""
    return [packed[i : i + hash_bytes] for i in range(0, len(packed), hash_bytes)]


def _masks(groups: Iterable[cache_pb2.GroupFlags]) -> tuple[BoolMask, ...]:
    return tuple(np.frombuffer(group.flags, np.bool_) for group in groups)


def refusal(detail: errors_pb2.ErrorDetail) -> HotKVError:
    """The server's refusal as an exception."""
    known = int(detail.reason) in set(Reason)
    reason = Reason(int(detail.reason)) if known else None
    return _refusal(reason, detail.message, detail.retryable)


def _refusal(reason: Reason | None, message: str, retryable: bool) -> HotKVError:
    """A reason that only newer servers know becomes OVERLOADED if a retry helps, else INTERNAL."""
    return HotKVError(reason or (Reason.OVERLOADED if retryable else Reason.INTERNAL), message)


@dataclass(frozen=True, slots=True)
class Opened:
    """A session as the server opened it.

    `salts`: of the block table, by group index."""

    session_id: str
    protocol_version: int
    epoch: int
    has_descriptor_socket: bool
    wants_token_ids: bool
    salts: tuple[int, ...]
    has_residency: bool
    has_tiers: bool


NOT_OPENED = Opened("", 0, 0, False, False, (), False, False)


def opened(response: Response | None) -> Opened:
    """The first answer of a stream. Raises SessionLostError if it is not that of an open
    session."""
    if response is None or response.WhichOneof("body") != "session_opened":
        raise SessionLostError("the server did not open the session")
    message = response.session_opened
    features = agreed_features(message.features)
    return Opened(
        message.session_id,
        message.protocol_version,
        message.epoch,
        message.has_descriptor_socket,
        message.wants_token_ids,
        tuple(map(unsigned_salt, message.salts)),
        Feature.RESIDENCY in features,
        Feature.TIERS in features,
    )


def result(response: Response, call: str, lease_id: str = "") -> Any:
    """The typed value of the answer to a call, which is named as in `ConnectRequest.body`. Raises
    HotKVError for a refusal, and whatever reading a malformed answer raises."""
    body = response.WhichOneof("body")
    if body == "error":
        raise refusal(response.error)
    if body != ANSWERED_AS.get(call, call):
        raise HotKVError(Reason.INTERNAL, f"the server answered {call} by {body or 'nothing'}")
    match body:
        case "lookup":
            return _masks(response.lookup.groups)
        case "acquire_lease":
            granted = response.acquire_lease
            offsets = tuple(
                np.frombuffer(g.offsets, "<i8").astype(np.int64) for g in granted.offsets
            )
            return LeaseGrant(lease_id, _masks(granted.groups), granted.ttl_ms / 1000, offsets)
        case "reserve_blocks":
            return tuple(
                np.frombuffer(run.results, np.uint8) for run in response.reserve_blocks.runs
            )
        case "open_residency":
            room = response.open_residency
            return ResidencyOpened(
                room.residency_id, room.word_index, room.word_value, room.generation
            )
        case "extend_residency":
            extended = response.extend_residency
            found = np.frombuffer(extended.offsets, "<i8").astype(np.int64)
            rows = np.frombuffer(extended.representation_offsets, "<i8").astype(np.int64)
            # A server that doesn't say leaves them to be built anew.
            is_said = len(rows) == len(found)
            return ResidentBlocks(found, rows if is_said else np.full(len(found), -1, np.int64))
        case "flushed":
            return Flushed(response.flushed.block_count, response.flushed.pending_tiers)
        case "memory_registered":
            taken = response.memory_registered
            return OrderKind(taken.order or OrderKind.HOST), taken.message
        case "load":
            load_end = response.load
            return TransferResult(
                load_end.transfer_id,
                _status(load_end.status),
                load_end.byte_count,
                message=load_end.message,
            )
        case "store":
            store_end = response.store
            runs = tuple(np.frombuffer(run.results, np.uint8) for run in store_end.runs)
            return TransferResult(
                store_end.transfer_id,
                _status(store_end.status),
                store_end.byte_count,
                runs,
                store_end.message,
            )
        case "create_sequence":
            return _sequence_created(response.create_sequence)
        case "append_blocks":
            state = response.append_blocks
            return SequenceState(state.block_count, state.lease_id, state.covered_block_count)
        case "delete_sequence":
            return response.delete_sequence.deleted
        case _:
            return None


def _status(number: int) -> TransferStatus:
    """A status that only newer servers know becomes FAILED: the transfer has ended in any case."""
    return TransferStatus(number) if number in set(TransferStatus) else TransferStatus.FAILED


def _sequence_created(message: sparse_pb2.CreateSequenceResponse) -> SequenceCreated:
    return SequenceCreated(message.lease_id, message.covered_block_count)


def evicted(response: Response, hash_bytes: int) -> Evicted:
    """The eviction notice of a message that carries one."""
    groups = response.eviction_notice.groups
    return Evicted(tuple(GroupHashes(g.group_index, unpack(g.hashes, hash_bytes)) for g in groups))


def _link_response(packet: bytes) -> session_pb2.LinkResponse:
    response = session_pb2.LinkResponse.FromString(packet)
    if response.HasField("error"):
        raise refusal(response.error)
    return response


@dataclass(frozen=True, slots=True)
class LinkSizes:
    """What a link hands out, in bytes: 0 for what this session may not map. `num_words` begin at
    `words_offset_bytes` of the arena's file."""

    arena_bytes: int
    table_bytes: int
    words_offset_bytes: int
    num_words: int


def link_sizes(packet: bytes) -> LinkSizes:
    """The sizes of a link's answer. Raises HotKVError if it was refused."""
    response = _link_response(packet)
    return LinkSizes(
        response.arena_byte_count,
        response.table_byte_count,
        response.word_byte_offset,
        response.word_count,
    )


def ticket(packet: bytes) -> bytes:
    """The ticket. Raises HotKVError if it was refused."""
    return _link_response(packet).ticket


def as_error(error: grpc.RpcError) -> HotKVError:
    """A failed call as a refusal, with the server's reason if it sent one that can be read."""
    trailers = dict(getattr(error, "trailing_metadata", lambda: ())() or ())
    with contextlib.suppress(DecodeError):
        if (said := _said_in(trailers)) is not None:
            return said
    code = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
    details = getattr(error, "details", lambda: str(error))()
    reason = Reason.OVERLOADED if code == grpc.StatusCode.RESOURCE_EXHAUSTED else Reason.INTERNAL
    return HotKVError(reason, unanswered.sentence(code, str(details)))


def _said_in(trailers: Mapping[str, Any]) -> HotKVError | None:
    """The refusal that trailers carry. Raises DecodeError."""
    if STATUS_KEY in trailers:
        status = errors_pb2.Status.FromString(trailers[STATUS_KEY])
        for packed in status.details:
            if packed.type_url == ERROR_INFO_URL:
                info = errors_pb2.ErrorInfo.FromString(packed.value)
                if info.domain == "hotkv":
                    retryable = info.metadata.get("retryable") == "true"
                    return _refusal(Reason.__members__.get(info.reason), status.message, retryable)
    return None
