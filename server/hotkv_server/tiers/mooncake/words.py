"""Messages between a tier and its child: one JSON object per line, over a pair of sockets.

Always true: a request has one reply, and the next request follows it. Keys are quoted as in URLs,
because Mooncake wants text; printable keys stay readable.
"""

import json
import socket
import time
from typing import Any
from urllib.parse import quote_from_bytes

MAX_LINE_BYTES = 4 << 20
"""Longest line. The largest part takes some hundred KiB."""
RECEIVE_BYTES = 1 << 16


def quoted(key: bytes) -> str:
    """Returns a key in Mooncake's form."""
    return quote_from_bytes(key, safe="/~")


def epoch_key(fingerprint: str) -> str:
    """Returns the key of a key space's epoch."""
    return f"hotkv/1/{fingerprint}/epoch"


class Line:
    """One end of the socket pair. One thread at a time. Errors are OSError; TimeoutError at the
    time limit, EOFError if the other end is gone or sends other data."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = b""

    def send(self, message: dict[str, Any], until_s: float | None = None) -> None:
        """Sends a message. `until_s`: time limit, of time.monotonic; None: no limit."""
        self._limit(until_s)
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, until_s: float | None = None) -> dict[str, Any]:
        """Waits for a message."""
        while b"\n" not in self._received:
            self._limit(until_s)
            more = self._socket.recv(RECEIVE_BYTES)
            self._received += more
            if not more or len(self._received) > MAX_LINE_BYTES:
                raise EOFError
        line, _, self._received = self._received.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise EOFError
        return message

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def _limit(self, until_s: float | None) -> None:
        left_s = None if until_s is None else until_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)
