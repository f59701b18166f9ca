"""The audit log: which calls of operators were made, by whom, with what outcome.

No hash, no token and no other content of a prompt is written: bytes and lists only by their size. A
caller on the admin socket is known by the ticket that it sends, over TCP by token or certificate.
"""

import errno
import json
import logging
import logging.handlers
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from hotkv_server.logs import REQUEST_ID, utc
from hotkv_server.security.identity import Peer
from hotkv_server.wire.guard.limits import LineBound

log = logging.getLogger("hotkv_server.audit")
log.setLevel(logging.INFO)  # Whatever the server's level is.

CHANGING = frozenset(("Drain", "Evict", "FlushKeySpace", "PrefetchBlocks"))
"""Methods that change what the server holds, or whether it serves. All others read."""
MAX_TEXT = 64
FILE_MODE = 0o600
MAX_REFUSED_PER_S = 10
"""Calls that were not let in, written down a second: who is no admin fills no disk."""
Who = Callable[[Any], Peer]
"""The peer of a call, given its context."""


class AuditLog:
    """See the module. `covers`: off, changes (calls of CHANGING) or all. `path`: a file of JSON
    lines; None: the server's log. Raises OSError if the file can't be written."""

    def __init__(self, covers: str = "changes", path: Path | None = None) -> None:
        self.covers = covers
        self._file = None if path is None else _PrivateFile(path)
        self._is_broken = False
        self._refused = LineBound(MAX_REFUSED_PER_S)

    def __repr__(self) -> str:
        return f"AuditLog({self.covers!r}, {self._file!r}, {self._refused!r})"

    def close(self) -> None:
        """Writes how many lines were left out last."""
        self._tell_left_out()
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                # A disk that is full; what waited for it is in the log.
                log.error("the audit file was not closed: %s", error)

    def wants(self, method: str) -> bool:
        """Whether calls of this method, as `/package.Service/Method`, are written down."""
        return self.covers == "all" or (
            self.covers == "changes" and method.rpartition("/")[2] in CHANGING
        )

    def note(self, method: str, peer: Peer, request: Any, outcome: str) -> None:
        """Writes a call down; never raises, for what was asked has been done. `request`: None for a
        call that was not let in, of which MAX_REFUSED_PER_S are written. `outcome`: `ok`, or the
        status that it ended with."""
        if request is None and not self._refused.take(time.monotonic()):
            return
        self._tell_left_out()
        fields = {
            "method": method.lstrip("/"),
            "who": str(peer),
            "arguments": arguments(request),
            "outcome": outcome,
            "request_id": REQUEST_ID.get(),
        }
        if not self._write(fields):
            shown = " ".join(f"{name}={value!r}" for name, value in arguments(request).items())
            log.info("%s %s who=%r outcome=%s", fields["method"], shown, fields["who"], outcome)

    def _tell_left_out(self) -> None:
        if (count := self._refused.take_left_out()) and not self._write({"left_out": count}):
            log.warning("lines of %d refused calls were left out", count)

    def _write(self, fields: Mapping[str, object]) -> bool:
        """Writes a line to the file, with the time. False if there is none, or it can't be written;
        that is logged once."""
        if self._file is None:
            return False
        line = json.dumps({"time": utc(time.time()), **fields})
        try:
            self._file.handle(logging.makeLogRecord({"msg": line, "levelno": logging.INFO}))
        except (OSError, ValueError) as error:
            if not self._is_broken:
                log.error("the audit file can't be written, its lines come here: %s", error)
            self._is_broken = True
        else:
            self._is_broken = False
        return not self._is_broken


class _PrivateFile(logging.handlers.WatchedFileHandler):
    """A regular file of mode FILE_MODE, no link; one that was moved away is made anew. Raises
    OSError, also when a line is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.setFormatter(logging.Formatter("%(message)s"))

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=_open_private)

    def handleError(self, record: logging.LogRecord) -> None:
        raise sys.exc_info()[1] or OSError("a line was not written")


def _open_private(path: str, flags: int) -> int:
    # Nobody may read a FIFO, and opening it would wait for ever. A link could lead to a file that
    # is no log, whose mode would be changed.
    safe_flags = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | safe_flags, FILE_MODE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(f"{path} is a symbolic link, which is not followed") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is no regular file")
        os.fchmod(fd, FILE_MODE)
    except OSError:
        os.close(fd)
        raise
    return fd


def arguments(request: Any) -> dict[str, object]:
    """The fields of a message that are set: numbers, short texts, sizes of all else."""
    found: dict[str, object] = {}
    for field, value in request.ListFields() if hasattr(request, "ListFields") else ():
        if isinstance(value, bytes):
            found[field.name] = f"{len(value)} bytes"
        elif isinstance(value, str):
            found[field.name] = value[:MAX_TEXT]
        elif isinstance(value, float) and not math.isfinite(value):
            found[field.name] = str(value)
        elif isinstance(value, bool | int | float):
            found[field.name] = value
        else:
            found[field.name] = f"{len(value)} entries" if isinstance(value, Sequence) else "set"
    return found
