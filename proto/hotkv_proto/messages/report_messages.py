"""Converts the reports of engines (`hotkv_proto.reports`) to messages and back; also the answer
to the registration of memory (session.proto)."""

from collections.abc import Iterable, Sequence, Set

from hotkv_proto.messages import fields
from hotkv_proto.messages.cache import pack, read_hashes, read_retention, retention_message
from hotkv_proto.messages.hints import hint_identifier, read_request_hints, request_hints_message
from hotkv_proto.messages.layout import order_kind
from hotkv_proto.order import OrderKind
from hotkv_proto.reports import (
    CANCELS,
    SAID_BY_ENGINES,
    EndedRequest,
    LoadEnd,
    Miss,
    RequestReport,
)
from hotkv_proto.table import Words
from hotkv_proto.v1 import hints_pb2, session_pb2

MAX_REPORTS = 1024
"""Scheduled requests, ended requests and ended loads of a message, each."""
MAX_REPORTED_S = 86_400.0
"""A longer time is reduced to this."""


def report_message(
    value: RequestReport[Sequence[bytes]], hash_bytes: int
) -> session_pb2.RequestReport:
    """Raises INVALID_HASH if a hash has another length."""
    return session_pb2.RequestReport(
        hashes=pack(value.hashes, hash_bytes),
        prompt_token_count=value.prompt_tokens,
        device_hit_token_count=value.device_hit_tokens,
        hit_token_count=value.hit_tokens,
        age_ms=int(value.age_s * 1000),
        retention=retention_message(value.retention),
        session_id=value.session_id,
        hints=request_hints_message(value.hints),
        miss_reason=session_pb2.MissReason.ValueType(value.miss),
        saved_s=value.saved_s,
        wait_s=value.wait_s,
        report_id=value.report_id,
        request_id=value.request_id,
    )


def read_reports(
    messages: Iterable[session_pb2.RequestReport], hash_bytes: int
) -> list[RequestReport[Words]]:
    """Raises INVALID_HASH, INVALID_FIELD or TOO_LARGE for an invalid field."""
    return [
        RequestReport(
            read_hashes("requests.hashes", m.hashes, hash_bytes),
            m.prompt_token_count,
            m.device_hit_token_count,
            m.hit_token_count,
            fields.seconds("requests.age_ms", m.age_ms),
            read_retention("requests.retention", m.retention),
            hint_identifier("requests.session_id", m.session_id),
            read_request_hints("requests.hints", m.hints),
            _said(m.miss_reason, SAID_BY_ENGINES, Miss.UNKNOWN),
            min(fields.rate("requests.saved_s", m.saved_s), MAX_REPORTED_S),
            min(fields.rate("requests.wait_s", m.wait_s), MAX_REPORTED_S),
            m.report_id,
            fields.name("requests.request_id", m.request_id),
        )
        for m in messages
    ]


def _said(reason: int, known: Set[Miss], otherwise: Miss) -> Miss:
    """known: reasons that engines may state in this field; others become `otherwise`."""
    return Miss(reason) if reason in known else otherwise


def ended_message(value: EndedRequest[Sequence[bytes]], hash_bytes: int) -> hints_pb2.EndedRequest:
    """Raises INVALID_HASH if a hash has another length."""
    return hints_pb2.EndedRequest(
        hashes=pack(value.hashes, hash_bytes),
        session_id=value.session_id,
        hints=request_hints_message(value.hints),
    )


def read_ended(
    messages: Iterable[hints_pb2.EndedRequest], hash_bytes: int
) -> list[EndedRequest[Words]]:
    """Raises INVALID_HASH, INVALID_FIELD or TOO_LARGE for an invalid field."""
    return [
        EndedRequest(
            read_hashes("ended.hashes", m.hashes, hash_bytes),
            hint_identifier("ended.session_id", m.session_id),
            read_request_hints("ended.hints", m.hints),
        )
        for m in messages
    ]


def load_end_message(value: LoadEnd) -> session_pb2.LoadEnd:
    return session_pb2.LoadEnd(
        report_id=value.report_id,
        wait_s=value.wait_s,
        failed=value.failed,
        miss_reason=session_pb2.MissReason.ValueType(value.miss),
    )


def read_load_ends(messages: Iterable[session_pb2.LoadEnd]) -> list[LoadEnd]:
    """Raises INVALID_FIELD if a waiting time is negative or not finite."""
    return [
        LoadEnd(
            m.report_id,
            min(fields.rate("loads.wait_s", m.wait_s), MAX_REPORTED_S),
            m.failed,
            _said(m.miss_reason, CANCELS, Miss.FAILED_LOAD),
        )
        for m in messages
    ]


def memory_registered_message(kind: OrderKind, message: str) -> session_pb2.MemoryRegistered:
    """message: why the server has chosen no better kind, or empty."""
    return session_pb2.MemoryRegistered(order=order_kind(kind), message=message)


def read_memory_registered(message: session_pb2.MemoryRegistered) -> tuple[OrderKind, str]:
    """The server's choice, and why it chose no better kind. Raises ValueError for a kind of a
    newer protocol."""
    return OrderKind(message.order or OrderKind.HOST), message.message
