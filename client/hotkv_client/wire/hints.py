"""HintService: envelopes of routers, and their outcomes; plain values in and out."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from hotkv_client.channels import Metadata
from hotkv_client.wire.admin import plain
from hotkv_client.wire.answers import as_error
from hotkv_proto.v1 import hints_pb2, hints_pb2_grpc

Stub = hints_pb2_grpc.HintServiceStub
"""Of a channel that is open."""


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
