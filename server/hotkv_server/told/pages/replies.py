"""Requests and answers of HTTP, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""As Prometheus has it for metrics; the other texts get it, too."""
JSON_TYPE = "application/json"
PRIVATE: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of whatever is not for everybody."""


@dataclass(frozen=True, slots=True)
class Request:
    """A GET request. `host`, `authorization`, `accept`: headers, empty if they are not there."""

    path: str
    query: str = ""
    host: str = ""
    authorization: str = field(default="", repr=False)
    accept: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer."""

    status: int
    body: bytes
    content_type: str = TEXT_TYPE
    headers: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def text(status: int, line: str, headers: Mapping[str, str] = PRIVATE) -> "Reply":
        """One line for people."""
        return Reply(status, f"{line}\n".encode(), headers=headers)

    @staticmethod
    def json(value: Any) -> "Reply":
        """Figures, for who may see them."""
        body = orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
        return Reply(200, body, JSON_TYPE, PRIVATE)
