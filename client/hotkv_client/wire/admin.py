"""Calls of AdminService, EventService, HintService and WarmStartService, in plain Python values.
The methods of `AdminClient` and `HintClient` explain the arguments. All raise HotKVError if the
server refuses, does not answer, or a stream fails."""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message

from hotkv_client.channels import HEALTH_CHECK, Metadata
from hotkv_client.wire.call_errors import as_error
from hotkv_proto.messages.fields import enum_word, whole_ms
from hotkv_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    events_pb2,
    events_pb2_grpc,
    hints_pb2,
    hints_pb2_grpc,
    layout_pb2,
    warm_pb2,
    warm_pb2_grpc,
)

CALLS: dict[str, tuple[str, Callable[..., Message]]] = {
    "evict": ("Evict", admin_pb2.EvictRequest),
    "resize": ("Resize", admin_pb2.ResizeRequest),
    "preview_evict": ("PreviewEvict", admin_pb2.PreviewEvictRequest),
    "flush": ("FlushKeySpace", admin_pb2.FlushKeySpaceRequest),
    "drain": ("Drain", admin_pb2.DrainRequest),
    "explain": ("Explain", admin_pb2.ExplainRequest),
}


SERVING = b"\x08\x01"


@dataclass(frozen=True, slots=True)
class WatchedRequest:
    """A request that an engine has reported.

    key_space_id: the server's number.
    hashes: packed, of the prompt's full hash blocks.
    hit_tokens: in the device cache or in hotkv.
    unix_time_s: when the request reached its engine.
    """

    key_space_id: int
    hashes: bytes
    prompt_tokens: int
    device_hit_tokens: int
    hit_tokens: int
    unix_time_s: float


class Stubs:
    """Must be made while the channel is open: with a closed one gRPC crashes the process."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        self.events: Any = events_pb2_grpc.EventServiceStub(channel)


def call(
    stubs: Stubs, name: str, timeout_s: float, metadata: Metadata, **fields: Any
) -> dict[str, Any]:
    """The answer as plain values, bytes as hexadecimal.

    name: a key of CALLS.
    fields: of the request's message.
    """
    method, request = CALLS[name]
    try:
        return plain(
            getattr(stubs.admin, method)(request(**fields), timeout=timeout_s, metadata=metadata)
        )
    except grpc.RpcError as error:
        raise as_error(error) from error


def tell(
    stubs: Stubs, topic: str, timeout_s: float, metadata: Metadata, filters: Mapping[str, str]
) -> dict[str, Any]:
    request = admin_pb2.TellRequest(topic=topic, filters=filters)
    try:
        answer = stubs.admin.Tell(request, timeout=timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        raise as_error(error) from error
    told: dict[str, Any] = json.loads(answer.json)
    return told


def is_serving(channel: grpc.Channel, service: str, timeout_s: float, metadata: Metadata) -> bool:
    """The health service's two messages have one field each. They are encoded here, so that the
    client does not depend on the package `grpcio-health-checking`."""
    name = service.encode()
    check: Any = channel.unary_unary(HEALTH_CHECK)
    try:
        return bool(
            check(b"\x0a" + bytes([len(name)]) + name, timeout=timeout_s, metadata=metadata)
            == SERVING
        )
    except grpc.RpcError as error:
        raise as_error(error) from error


def _read_stream(call: Any, seconds: float) -> Iterator[Any]:
    """Yields answers until the deadline. A deadline without any answer raises: a working server
    sends the first at once.

    seconds: the call's deadline; 0: none.
    """
    has_answered = False
    try:
        for answer in call:
            has_answered = True
            yield answer
    except grpc.RpcError as error:
        is_end = has_answered and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        if not seconds or not is_end:
            raise as_error(error) from error
    finally:
        call.cancel()


def watch_requests(
    stubs: Stubs, key_space_id: int, seconds: float, metadata: Metadata
) -> Iterator[tuple[list[WatchedRequest], int]]:
    request = admin_pb2.WatchRequestsRequest(key_space_id=key_space_id)
    stream = stubs.admin.WatchRequests(request, timeout=seconds or None, metadata=metadata)
    for response in _read_stream(stream, seconds):
        requests = [
            WatchedRequest(
                item.key_space_id,
                item.hashes,
                item.prompt_token_count,
                item.device_hit_token_count,
                item.hit_token_count,
                item.unix_time_ms / 1000,
            )
            for item in response.requests
        ]
        yield requests, response.lost_request_count


def subscribe(
    stubs: Stubs, key_space_id: int, seconds: float, tiers: bool, state: bool, metadata: Metadata
) -> Iterator[tuple[list[dict[str, Any]], int]]:
    request = events_pb2.SubscribeRequest(key_space_id=key_space_id, tiers=tiers, state=state)
    stream = stubs.events.Subscribe(request, timeout=seconds or None, metadata=metadata)
    for response in _read_stream(stream, seconds):
        yield [_plain_event(event) for event in response.events], response.lost_event_count


def _plain_event(event: events_pb2.Event) -> dict[str, Any]:
    kind = str(event.WhichOneof("body"))
    fields = plain(getattr(event, kind))
    if "medium" in fields:
        fields["medium"] = str(fields["medium"]).upper()
    if kind == "stored":
        fields["token_ids"] = _int32s(event.stored.token_ids)
        fields["extra_keys"] = [
            [_plain_key(key) for key in block.keys] for block in event.stored.extra_keys
        ]
    return {
        "event": kind,
        "key_space_id": event.key_space_id,
        "unix_time_ms": event.unix_time_ms,
        **fields,
    }


def _int32s(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}i", packed))


def _plain_key(key: cache_pb2.ExtraKey) -> str | list[str | int]:
    if key.WhichOneof("key") == "multi_modal":
        return [key.multi_modal.identifier, key.multi_modal.offset]
    return key.digest.hex() if key.WhichOneof("key") == "digest" else key.text


def plain(message: Message) -> dict[str, Any]:
    """Nested dicts and lists, with defaults for unset fields, bytes as hexadecimal, and a word
    for an enum value unless this client does not know it."""

    def value(field: Any, item: Any) -> Any:
        if field.message_type is not None:
            return plain(item)
        if field.enum_type is not None:
            kind = field.enum_type
            return enum_word(kind, item) if item in kind.values_by_number else item
        return item.hex() if isinstance(item, bytes) else item

    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        item = getattr(message, field.name)
        many = isinstance(item, Sequence) and not isinstance(item, str | bytes)
        result[field.name] = (
            [value(field, element) for element in item] if many else value(field, item)
        )
    return result


# -------------------------------------------------------------------------------------- HintService


HintStub = hints_pb2_grpc.HintServiceStub


def send_hints(
    stub: HintStub,
    tenant: str,
    envelope: Mapping[str, Any],
    key_space_id: int,
    hashes: Sequence[bytes],
    timeout_s: float,
    metadata: Metadata,
    ticket: bytes,
) -> list[dict[str, Any]]:
    request = hints_pb2.SendHintsRequest(
        tenant=tenant,
        ticket=ticket,
        kv_hints=json.dumps(envelope),
        key_space_id=key_space_id,
        hashes=b"".join(hashes),
    )
    try:
        answer = stub.SendHints(request, timeout=timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        raise as_error(error) from error
    outcomes: list[dict[str, Any]] = plain(answer)["outcomes"]
    return outcomes


def poll_hints(
    stub: HintStub,
    tenant: str,
    message_id: str,
    cursor: int,
    page_size: int,
    timeout_s: float,
    metadata: Metadata,
    ticket: bytes,
) -> tuple[list[dict[str, Any]], int]:
    request = hints_pb2.GetHintOutcomesRequest(
        tenant=tenant, ticket=ticket, message_id=message_id, cursor=cursor, page_size=page_size
    )
    try:
        answer = stub.GetHintOutcomes(request, timeout=timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        raise as_error(error) from error
    return plain(answer)["outcomes"], int(answer.next_cursor)


# --------------------------------------------------------------------------------- WarmStartService


WarmStartStub = warm_pb2_grpc.WarmStartServiceStub
DEFAULT_WAIT_S = 10.0
"""How long a server waits for promotions if the call does not say."""
NamedGroups = Sequence[tuple[int, bytes]]
"""Pairs of group index and packed hashes."""


def export(
    stub: WarmStartStub, key_space_id: int, byte_count: int, timeout_s: float, metadata: Metadata
) -> Iterator[dict[str, Any] | list[tuple[int, bytes]]]:
    request = warm_pb2.ExportBlocksRequest(key_space_id=key_space_id, byte_count=byte_count)
    try:
        for part in stub.ExportBlocks(request, timeout=timeout_s, metadata=metadata):
            if part.HasField("key_space"):
                yield json_format.MessageToDict(part.key_space, preserving_proto_field_name=True)
            else:
                yield [(group.group_index, group.hashes) for group in part.groups]
    except grpc.RpcError as error:
        raise as_error(error) from error


def prefetch(
    stub: WarmStartStub,
    key_space: dict[str, Any] | int,
    groups: NamedGroups,
    prompts: Sequence[tuple[bytes, bytes]],
    wait_s: float,
    timeout_s: float,
    metadata: Metadata,
) -> dict[str, Any]:
    """Raises ValueError if `key_space` does not describe one.

    key_space: of `export`, an entry of the admin call `key_spaces`, or an id.
    wait_s: 0: DEFAULT_WAIT_S.
    """
    request = warm_pb2.PrefetchBlocksRequest(
        groups=[cache_pb2.GroupHashes(group_index=at, hashes=hashes) for at, hashes in groups],
        prompts=[warm_pb2.NamedPrompt(hashes=hashes, token_ids=ids) for hashes, ids in prompts],
        timeout_ms=whole_ms(wait_s),
    )
    if isinstance(key_space, int):
        request.key_space_id = key_space
    else:
        try:
            named = json_format.ParseDict(_with_numbers(key_space), layout_pb2.KeySpace())
            request.key_space.CopyFrom(named)
        except (json_format.ParseError, TypeError) as error:
            raise ValueError(f"key_space: {error}") from error
    try:
        timeout_s += wait_s or DEFAULT_WAIT_S
        answer = stub.PrefetchBlocks(request, timeout=timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        raise as_error(error) from error
    return plain(answer)


def _with_numbers(key_space: dict[str, Any]) -> dict[str, Any]:
    """Replaces the words of `plain` for groups' kinds by enum numbers, which `json_format` can
    read."""
    kinds = layout_pb2.KvGroupKind.DESCRIPTOR
    numbers = {enum_word(kinds, number): number for number in kinds.values_by_number}
    groups = [
        {**group, "kind": numbers.get(group.get("kind"), group.get("kind"))}
        for group in key_space.get("groups", ())
    ]
    return {**key_space, "groups": groups}
