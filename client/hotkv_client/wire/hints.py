"""Hints of routers and their outcomes: typed values and messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from hotkv_client.channels import Metadata
from hotkv_client.wire.admin import plain
from hotkv_client.wire.answers import as_error
from hotkv_client.wire.requests import whole_ms
from hotkv_proto.hints import ActionType, Hints
from hotkv_proto.v1 import hints_pb2, hints_pb2_grpc

Stub = hints_pb2_grpc.HintServiceStub
"""Of a channel that is open."""
KINDS = {
    ActionType.RETAIN: hints_pb2.HINT_ACTION_TYPE_RETAIN,
    ActionType.PIN: hints_pb2.HINT_ACTION_TYPE_PIN,
    ActionType.DEMOTE: hints_pb2.HINT_ACTION_TYPE_DEMOTE,
    ActionType.PREFETCH: hints_pb2.HINT_ACTION_TYPE_PREFETCH,
    ActionType.RELEASE: hints_pb2.HINT_ACTION_TYPE_RELEASE,
}


def request_hints(hints: Hints) -> hints_pb2.RequestHints | None:
    """Hints of a request; None for none."""
    if not hints:
        return None
    return hints_pb2.RequestHints(
        message_id=hints.message_id,
        actions=[
            hints_pb2.HintAction(
                action_id=one.action_id,
                action_type=KINDS[one.kind],
                session_id=one.target.session_id,
                start_token=one.target.start_tokens,
                end_token=one.target.end_tokens or 0,
                priority=one.priority,
                ttl_ms=whole_ms(one.ttl_s),
                deadline_ms=whole_ms(one.deadline_s),
                clipped=one.clipped,
            )
            for one in hints.actions
        ],
        rejections=[
            hints_pb2.HintRejection(
                action_id=one.action_id, action_type=one.kind, reason=one.reason
            )
            for one in hints.rejected
        ],
    )


def send(
    stub: Stub,
    tenant: str,
    envelope: Mapping[str, Any],
    key_space_id: int,
    hashes: Sequence[bytes],
    timeout_s: float,
    metadata: Metadata,
    ticket: bytes,
) -> list[dict[str, Any]]:
    """Sends an envelope without a request; returns the outcomes so far. Raises HotKVError."""
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


def poll(
    stub: Stub,
    tenant: str,
    message_id: str,
    cursor: int,
    page_size: int,
    timeout_s: float,
    metadata: Metadata,
    ticket: bytes,
) -> tuple[list[dict[str, Any]], int]:
    """Outcomes that have changed, and the next cursor. Raises HotKVError."""
    request = hints_pb2.GetHintOutcomesRequest(
        tenant=tenant, ticket=ticket, message_id=message_id, cursor=cursor, page_size=page_size
    )
    try:
        answer = stub.GetHintOutcomes(request, timeout=timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        raise as_error(error) from error
    return plain(answer)["outcomes"], int(answer.next_cursor)
