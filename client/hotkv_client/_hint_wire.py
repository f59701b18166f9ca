"""Reports of requests, hints of routers and their outcomes: typed values and messages."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grpc

from hotkv.hints import ActionType, Hints
from hotkv.v1 import hints_pb2, hints_pb2_grpc, session_pb2
from hotkv_client._admin_wire import hint_outcomes, plain
from hotkv_client._answers import as_error
from hotkv_client._wire import Request, pack, retention_message, whole_ms
from hotkv_client.channels import Metadata
from hotkv_client.types import EndedRequest, RequestReport

KINDS = {
    ActionType.RETAIN: hints_pb2.HINT_ACTION_TYPE_RETAIN,
    ActionType.PIN: hints_pb2.HINT_ACTION_TYPE_PIN,
    ActionType.DEMOTE: hints_pb2.HINT_ACTION_TYPE_DEMOTE,
    ActionType.PREFETCH: hints_pb2.HINT_ACTION_TYPE_PREFETCH,
    ActionType.RELEASE: hints_pb2.HINT_ACTION_TYPE_RELEASE,
}


def report_requests(
    reports: Iterable[RequestReport],
    hash_bytes: int,
    prefill_tokens_per_s: float = 0.0,
    ended: Iterable[EndedRequest] = (),
) -> Request:
    """Reports scheduled and ended requests."""
    return Request(
        report_use=session_pb2.ReportUse(
            requests=[
                session_pb2.RequestReport(
                    hashes=pack(report.hashes, hash_bytes),
                    prompt_token_count=report.prompt_tokens,
                    device_hit_token_count=report.device_hit_tokens,
                    hit_token_count=report.hit_tokens,
                    age_ms=int(report.age_s * 1000),
                    retention=retention_message(report.retention),
                    session_id=report.session_id,
                    hints=_hints(report.hints),
                )
                for report in reports
            ],
            prefill_tokens_per_s=prefill_tokens_per_s,
            ended=[
                hints_pb2.EndedRequest(
                    hashes=pack(one.hashes, hash_bytes),
                    session_id=one.session_id,
                    hints=_hints(one.hints),
                )
                for one in ended
            ],
        )
    )


def _hints(hints: Hints) -> hints_pb2.RequestHints | None:
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
    channel: grpc.Channel,
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
        answer = hints_pb2_grpc.HintServiceStub(channel).SendHints(
            request, timeout=timeout_s, metadata=metadata
        )
    except grpc.RpcError as error:
        raise as_error(error) from error
    return hint_outcomes(plain(answer)["outcomes"])


def poll(
    channel: grpc.Channel,
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
        answer = hints_pb2_grpc.HintServiceStub(channel).GetHintOutcomes(
            request, timeout=timeout_s, metadata=metadata
        )
    except grpc.RpcError as error:
        raise as_error(error) from error
    return hint_outcomes(plain(answer)["outcomes"]), int(answer.next_cursor)
