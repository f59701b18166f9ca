"""Reports of sessions: typed values in, messages out."""

from collections.abc import Iterable, Iterator, Sequence

from hotkv_client.parts import PART_BYTES, split_messages
from hotkv_client.types import EndedRequest, GroupHashes, LoadEnd, RequestReport
from hotkv_client.wire.hints import request_hints
from hotkv_client.wire.requests import Request, pack, packed_groups, retention_message
from hotkv_proto.v1 import hints_pb2, session_pb2


def report_use(groups: Sequence[GroupHashes], hash_bytes: int) -> Request:
    """Reports device cache hits."""
    return Request(report_use=session_pb2.ReportUse(groups=packed_groups(groups, hash_bytes)))


def report_requests(
    reports: Iterable[RequestReport],
    hash_bytes: int,
    prefill_tokens_per_s: float = 0.0,
    ended: Iterable[EndedRequest] = (),
    loads: Iterable[LoadEnd] = (),
) -> Iterator[Request]:
    """Reports scheduled requests, those that have ended, and loads that have ended: a message, or
    several if it would be too large."""
    messages = [
        session_pb2.RequestReport(
            hashes=pack(report.hashes, hash_bytes),
            prompt_token_count=report.prompt_tokens,
            device_hit_token_count=report.device_hit_tokens,
            hit_token_count=report.hit_tokens,
            age_ms=int(report.age_s * 1000),
            retention=retention_message(report.retention),
            session_id=report.session_id,
            hints=request_hints(report.hints),
            miss_reason=session_pb2.MissReason.ValueType(report.miss),
            saved_s=report.saved_s,
            wait_s=report.wait_s,
            report_id=report.report_id,
        )
        for report in reports
    ]
    over = [
        hints_pb2.EndedRequest(
            hashes=pack(one.hashes, hash_bytes),
            session_id=one.session_id,
            hints=request_hints(one.hints),
        )
        for one in ended
    ]
    ends = [
        session_pb2.LoadEnd(report_id=end.report_id, wait_s=end.wait_s, failed=end.failed)
        for end in loads
    ]
    whole = session_pb2.ReportUse(
        requests=messages, prefill_tokens_per_s=prefill_tokens_per_s, ended=over, loads=ends
    )
    if whole.ByteSize() <= PART_BYTES:
        yield Request(report_use=whole)
        return
    first = session_pb2.ReportUse(prefill_tokens_per_s=prefill_tokens_per_s, loads=ends)
    yield Request(report_use=first)
    for part in split_messages(messages, session_pb2.RequestReport.ByteSize):
        yield Request(report_use=session_pb2.ReportUse(requests=part))
    for ended_part in split_messages(over, hints_pb2.EndedRequest.ByteSize):
        yield Request(report_use=session_pb2.ReportUse(ended=ended_part))
