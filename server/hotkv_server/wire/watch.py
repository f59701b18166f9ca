"""WatchRequests: the requests that engines report, as they come."""

from collections.abc import AsyncIterator
from typing import Any

from hotkv_proto.messages.cache import packed_words
from hotkv_proto.v1 import admin_pb2
from hotkv_server.node.node import Node
from hotkv_server.node.reports import WatchedReport
from hotkv_server.wire.streams import stream


def watch_requests(
    node: Node, request: admin_pb2.WatchRequestsRequest, context: Any
) -> AsyncIterator[admin_pb2.WatchRequestsResponse]:
    """Streams reports of one key space, or of all if the request names none."""

    def message(value: WatchedReport) -> admin_pb2.WatchedRequest | None:
        if request.key_space_id not in (0, value.key_space_id):
            return None
        return _watched_request(value)

    def response(
        requests: list[admin_pb2.WatchedRequest], lost: int
    ) -> admin_pb2.WatchRequestsResponse:
        return admin_pb2.WatchRequestsResponse(requests=requests, lost_request_count=lost)

    return stream(context, node, request.key_space_id, node.reports.watched, message, response)


def _watched_request(value: WatchedReport) -> admin_pb2.WatchedRequest:
    """One reported request on the wire."""
    return admin_pb2.WatchedRequest(
        key_space_id=value.key_space_id,
        hashes=packed_words(value.report.hashes, value.hash_bytes),
        prompt_token_count=value.report.prompt_tokens,
        device_hit_token_count=value.report.device_hit_tokens,
        hit_token_count=value.report.hit_tokens,
        unix_time_ms=int(value.unix_time_s * 1000),
    )
