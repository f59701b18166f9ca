"""The server's log: lines of text or of JSON. A line that is logged while the server serves a call
has the call's request id."""

import contextvars
import json
import logging
import sys
import time

TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s%(call)s"
REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
"""The request id of the call that the current task serves; empty in tasks that serve no call."""


def set_up(level: str, form: str) -> None:
    """Starts logging to standard error. `level`: name of the lowest level that is logged, such as
    "info". `form`: "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_add_request_id)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def set_level(level: str) -> None:
    """Changes the lowest level that is logged. `level`: its name, such as "debug"."""
    logging.getLogger().setLevel(level.upper())


def _add_request_id(record: logging.LogRecord) -> bool:
    request_id = REQUEST_ID.get()
    record.request_id = request_id
    record.call = f" request_id={request_id}" if request_id else ""
    return True


class JsonLines(logging.Formatter):
    """Formats each record as a JSON object on one line: `time` (RFC 3339, UTC), `level`, `logger`,
    `message`, and `request_id` and `exception` if the record has them. The line is ASCII, so any
    locale can print it, and contains no further line breaks."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", ""):
            fields["request_id"] = request_id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def utc(unix_s: float) -> str:
    """Formats a time as 2026-11-22T04:05:06.789Z."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))
    return f"{whole}.{int(unix_s % 1 * 1000):03d}Z"
