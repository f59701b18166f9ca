"""The server's log: lines of text or JSON, with the request id of the call that is served.

Always true: a logger whose lines clients cause has a `Throttle`, so that they can't fill the
disk.
"""

import contextlib
import contextvars
import itertools
import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s%(call)s"
REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
"""Of the call that the current task serves; empty without one."""


JSON = "json"
MAX_CONFIG_CHARS = 1 << 20
_IN_FILE = re.compile(r"""^\s*log_format\s*=\s*["'](\w+)""", re.MULTILINE)
FATAL = "hotkv_server"
"""Logger of the lines with which a start or the process ends."""


def set_up(level: str, form: str) -> None:
    """`form`: "text" or JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_add_context)
    handler.setFormatter(JsonLines() if form == JSON else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    if form == JSON:
        sys.excepthook = _log_uncaught


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    logging.getLogger(FATAL).critical("ends by a defect", exc_info=(kind, error, traceback))


def asked_format(flags: Sequence[str], config: Path | None) -> str:
    """The format that flags, environment or file ask for, also if the settings can't be read."""
    given = [flag.partition("=")[2] for flag in flags if flag.startswith("--log-format=")]
    given += [value for flag, value in itertools.pairwise(flags) if flag == "--log-format"]
    variables = {name.upper(): value for name, value in os.environ.items()}
    in_file = ""
    if config is not None:
        with contextlib.suppress(OSError), config.open(errors="replace") as file:
            found = _IN_FILE.search(file.read(MAX_CONFIG_CHARS))
            in_file = found[1] if found else ""
    asked = next(filter(None, (*given, variables.get("HOTKV_LOG_FORMAT", ""), in_file)), "")
    return JSON if asked == JSON else "text"


def print_fatal(message: str, form: str = "text") -> None:
    """Why the server does not start, a line each, also before `set_up`."""
    for line in message.splitlines():
        record = logging.LogRecord(FATAL, logging.CRITICAL, "", 0, line, None, None)
        print(
            JsonLines().format(record) if form == JSON else f"hotkv-server: {line}", file=sys.stderr
        )


def set_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())


def _add_context(record: logging.LogRecord) -> bool:
    request_id, left_out = REQUEST_ID.get(), getattr(record, "left_out", 0)
    record.request_id = request_id
    before = f" (left_out={left_out} before it)" if left_out else ""
    record.call = before + (f" request_id={request_id}" if request_id else "")
    return True


class Pairs(str):
    """`name=value name=value`, as an argument of a log line; in JSON each is a field."""

    __slots__ = ("fields",)
    fields: Mapping[str, object]

    def __new__(cls, fields: Mapping[str, object], *, is_quoted: bool = False) -> "Pairs":
        """`is_quoted`: with values as Python writes them, for values that clients choose."""
        shown = (repr(one) if is_quoted else str(one) for one in fields.values())
        made = super().__new__(cls, " ".join(map("=".join, zip(fields, shown, strict=True))))
        made.fields = fields
        return made


class JsonLines(logging.Formatter):
    """A JSON object on one line: `time` (RFC 3339, UTC), `level`, `logger`, `message`, a field for
    each `name=value` of the line, and `request_id`, `left_out` and `exception` if there are any.
    ASCII, so that any locale can print it."""

    def format(self, record: logging.LogRecord) -> str:
        message, found = fields_of(record)
        fields: dict[str, object] = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        fields |= {f"{name}_" if name in fields else name: value for name, value in found.items()}
        for name in ("request_id", "left_out"):
            if value := getattr(record, name, ""):
                fields[name] = value
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


_DIRECTIVE = re.compile(r"(?:(\w+)=)?%([-#0 +]*\d*(?:\.\d+)?[a-zA-Z%])")
_KEPT = "\0"
"""Marks the name of a field in a message."""
_ENDS = re.compile(rf"(?: \w+{_KEPT})+(?=[:;,]|$)")
_NAMES = re.compile(rf"(\w+){_KEPT}")


def fields_of(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    """The message without values that are fields, and these. Names stay where a sentence needs
    them: `tier=%s lost blocks=%d` becomes `tier lost`."""
    text, given = str(record.msg), record.args or ()
    if isinstance(given, Mapping):
        return record.getMessage(), {}
    if not given:
        return text, {}
    rest, fields = list(given), dict[str, object]()

    def put(match: re.Match[str]) -> str:
        name, how = match.groups()
        if how == "%":
            return match[0].replace("%%", "%")
        one = rest.pop(0)
        if isinstance(one, Pairs):
            fields.update({each: _plain(value) for each, value in one.fields.items()})
            return " ".join(f"{each}{_KEPT}" for each in one.fields)
        if name is None:
            return f"%{how}" % (one,)
        fields[name] = _plain(one, how)
        return f"{name}{_KEPT}"

    try:
        shown = _DIRECTIVE.sub(put, text)
    except (IndexError, TypeError, ValueError):
        # The line is wrong, and its values should be read all the same.
        return f"{text} {given!r}", {}
    return _NAMES.sub(r"\1", _ENDS.sub("", shown)), fields


def _plain(value: Any, how: str = "s") -> object:
    """As JSON has it, rounded as in the line."""
    if how[-1] in "di":
        return int(value)
    if how[-1] in "feg":
        return float(f"%{how}" % value)
    return value if isinstance(value, bool | int | float | None) else str(value)


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
            record.left_out = count
        return True
