"""The audit log: method, caller, arguments and outcome of each operator's call.

It has no hash, token or other content of a prompt: of bytes and lists, only the size. The caller
is known by a ticket on the admin socket, by token or certificate over TCP. The event loop never
waits for the file: a `Clerk` thread writes it. Waiting lines are bounded; further lines go to
the server's log.
"""

import contextvars
import errno
import json
import logging
import math
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

from hotkv_server.logs import REQUEST_ID, LineBound, Pairs, utc
from hotkv_server.memory.clerk import Clerk
from hotkv_server.security.identity import Peer

log = logging.getLogger("hotkv_server.audit")
log.setLevel(logging.INFO)  # Audit lines appear even if `log_level` hides other lines.

CHANGING = frozenset(("Drain", "Evict", "FlushKeySpace", "PrefetchBlocks", "Resize"))
"""Methods that change the cache, or whether the server serves. All others only read."""
MAX_TEXT = 64
FILE_MODE = 0o600
MAX_REFUSED_PER_S = 10
"""Bounds the recorded refusals, so that a caller without admin rights can't fill the disk."""
MAX_WAITING = 1024
"""Lines."""
CLOSE_S = 2.0
Who = Callable[[Any], Peer]
"""The peer of a call's context."""


class AuditLog:
    """covers: `off`, `changes` (CHANGING) or `all`.
    path: file for the lines, each a JSON object; None: the server's log.

    The constructor raises OSError if the file can't be written.
    """

    def __init__(self, covers: str = "changes", path: Path | None = None) -> None:
        self.covers = covers
        self._file = None if path is None else _PrivateFile(path)
        self._clerk = None if path is None else Clerk("audit")
        # Functions that write the waiting lines to the server's log. The event loop appends, the
        # clerk's thread removes.
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_broken = False
        self._refused = LineBound(MAX_REFUSED_PER_S)

    def __repr__(self) -> str:
        return (
            f"AuditLog({self.covers!r}, {self._file!r}, {self._refused!r}, "
            f"{len(self._waiting)} lines wait)"
        )

    def close(self) -> None:
        """Writes how many lines of refused calls were left out. Lines that can't be written
        within CLOSE_S go to the server's log. Blocks."""
        self._tell_left_out()
        if self._file is None or self._clerk is None:
            return
        try:
            self._clerk.do(self._file.close).result(CLOSE_S)
        except futures.TimeoutError:
            log.error("the audit file's disk hangs, the last lines come here")
            for tell in list(self._waiting):
                tell()
        except OSError as error:
            # The disk may be full. The lost lines are in the server's log.
            log.error("the audit file was not closed: %s", error)

    def wants(self, method: str) -> bool:
        """`method`: as `/package.Service/Method`."""
        return self.covers == "all" or (
            self.covers == "changes" and method.rpartition("/")[2] in CHANGING
        )

    def note(self, method: str, peer: Peer, request: Any, outcome: str) -> None:
        """Records a call that has ended, without waiting for the file. Never raises, as the call
        has been executed.

        method: as `/package.Service/Method`.
        request: None for a refused call (MAX_REFUSED_PER_S).
        outcome: `ok`, or the status that ended the call.
        """
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
        shown = Pairs(arguments(request), is_quoted=True)

        def tell() -> None:
            log.info("%s %s who=%r outcome=%s", fields["method"], shown, fields["who"], outcome)

        self._put(fields, tell)

    def _tell_left_out(self) -> None:
        if count := self._refused.take_left_out():
            self._put(
                {"left_out": count},
                lambda: log.warning("lines of %d refused calls were left out", count),
            )

    def _put(self, fields: Mapping[str, object], tell: Callable[[], None]) -> None:
        """tell: writes the line to the server's log, if there is no file, if too many lines
        wait, or if the write fails."""
        if self._file is None or self._clerk is None or len(self._waiting) >= MAX_WAITING:
            tell()
            return
        line = json.dumps({"time": utc(time.time()), **fields})
        # In this call's context, so that the log shows its request id.
        self._waiting.append(partial(contextvars.copy_context().run, tell))
        self._clerk.do(partial(self._write, self._file, line))

    def _write(self, file: "_PrivateFile", line: str) -> None:
        """Only the first failure in a row is logged. On the clerk's thread."""
        try:
            file.write(line)
            self._is_broken = False
        except OSError as error:
            if not self._is_broken:
                log.error("the audit file can't be written, its lines come here: %s", error)
            self._is_broken = True
            self._waiting[0]()
        self._waiting.popleft()


class _PrivateFile:
    """Appends lines to a regular file of mode FILE_MODE; no symbolic link. Makes a new one if it
    was moved away, for example by log rotation. Constructor and `write` raise OSError.

    Not a handler of `logging`: an ending process waits for the locks of all handlers, and so for
    a disk that hangs.
    """

    def __init__(self, path: Path) -> None:
        self._path = os.path.abspath(path)
        self._fd = _open_private(self._path)

    def __repr__(self) -> str:
        return f"_PrivateFile({self._path!r})"

    def write(self, line: str) -> None:
        if self._fd == -1 or not self._is_in_place():
            self.close()
            self._fd = _open_private(self._path)
        left = f"{line}\n".encode()
        while left:
            left = left[os.write(self._fd, left) :]

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """The next `write` opens it again."""
        fd, self._fd = self._fd, -1
        if fd != -1:
            os.close(fd)


def _open_private(path: str) -> int:
    # O_NONBLOCK: opening a FIFO without a reader would wait for ever. O_NOFOLLOW: a link could
    # lead to another file, whose mode would be changed.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    flags |= os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, FILE_MODE)
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
    """Fields that are set: numbers as they are, the beginning of texts, the size of all else."""
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
