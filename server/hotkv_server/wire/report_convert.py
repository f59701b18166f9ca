"""Reports of engines on the wire: requests scheduled, requests ended, loads ended."""

from collections.abc import Iterable

from hotkv_proto.misses import SAID_BY_ENGINES, Miss
from hotkv_proto.v1 import hints_pb2, session_pb2
from hotkv_server.hints import messages as hint_convert
from hotkv_server.node.reports import Ended, LoadEnd, Report
from hotkv_server.wire import convert

MAX_REPORTED_S = 86_400.0
"""Longer times that a client reports count as a day."""


def reports(messages: Iterable[session_pb2.RequestReport], hash_bytes: int) -> list[Report]:
    """Requests that an engine has scheduled."""
    return [
        Report(
            convert.hashes("requests.hashes", m.hashes, hash_bytes),
            m.prompt_token_count,
            m.device_hit_token_count,
            m.hit_token_count,
            convert.seconds("requests.age_ms", m.age_ms),
            convert.retention("requests.retention", m.retention),
            hint_convert.identifier("requests.session_id", m.session_id),
            hint_convert.request_hints("requests.hints", m.hints),
            _said(m.miss_reason),
            min(convert.rate("requests.saved_s", m.saved_s), MAX_REPORTED_S),
            min(convert.rate("requests.wait_s", m.wait_s), MAX_REPORTED_S),
            m.report_id,
        )
        for m in messages
    ]


def ended(messages: Iterable[hints_pb2.EndedRequest], hash_bytes: int) -> list[Ended]:
    """Requests that have ended."""
    return [
        Ended(
            convert.hashes("ended.hashes", m.hashes, hash_bytes),
            hint_convert.identifier("ended.session_id", m.session_id),
            hint_convert.request_hints("ended.hints", m.hints),
        )
        for m in messages
    ]


def load_ends(messages: Iterable[session_pb2.LoadEnd]) -> list[LoadEnd]:
    """Loads that have ended."""
    return [
        LoadEnd(m.report_id, min(convert.rate("loads.wait_s", m.wait_s), MAX_REPORTED_S), m.failed)
        for m in messages
    ]


def _said(reason: int) -> Miss:
    """A reason that an engine gives; UNKNOWN for one that it can't know, or of a newer protocol."""
    return Miss(reason) if reason in SAID_BY_ENGINES else Miss.UNKNOWN
