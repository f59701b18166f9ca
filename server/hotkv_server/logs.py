"""The server's log: lines of text or JSON, with the request id of the call that is served.

Always true: a logger whose lines clients cause has a `Throttle`, so that they can't fill the
disk.
"""

import contextvars
import json
import logging
import sys
import time

TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s%(call)s"
REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
"""Of the call that the current task serves; empty without one."""


def set_up(level: str, form: str) -> None:
    """`form`: "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_add_request_id)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def set_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())


def _add_request_id(record: logging.LogRecord) -> bool:
    request_id = REQUEST_ID.get()
    record.request_id = request_id
    record.call = f" request_id={request_id}" if request_id else ""
    return True


class JsonLines(logging.Formatter):
    """A JSON object on one line: `time` (RFC 3339, UTC), `level`, `logger`, `message`, and
    `request_id` and `exception` if there are any. ASCII, so that any locale can print it."""

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
    """As 2026-11-22T04:05:06.789Z."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))
    return f"{whole}.{int(unix_s % 1 * 1000):03d}Z"


# A bound on lines

MAX_LINES_PER_S = 50


class LineBound:
    """Allows lines up to a rate, and counts the refused ones."""

    def __init__(self, lines_per_s: int) -> None:
        self._lines_per_s = lines_per_s
        self._second = self._lines = self._left_out = 0

    def __repr__(self) -> str:
        return f"LineBound({self._lines_per_s} a second, {self._left_out} left out)"

    def take(self, now_s: float) -> bool:
        """False if the line must be left out."""
        if int(now_s) != self._second:
            self._second, self._lines = int(now_s), 0
        self._lines += 1
        may_go = self._lines <= self._lines_per_s
        self._left_out += not may_go
        return may_go

    def take_left_out(self) -> int:
        """Since the last call."""
        left_out, self._left_out = self._left_out, 0
        return left_out


class Throttle(logging.Filter):
    """Drops lines beyond `lines_per_s`. The next line that passes says how many."""

    def __init__(self, lines_per_s: int = MAX_LINES_PER_S) -> None:
        super().__init__()
        self._bound = LineBound(lines_per_s)

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._bound.take(time.monotonic()):
            return False
        if count := self._bound.take_left_out():
            record.msg, record.args = f"{record.getMessage()} (left_out={count} before it)", ()
        return True
