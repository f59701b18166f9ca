"""Messages between the server and a child process with Mooncake's client: JSON lines over a
socket pair. Always true: a request has one reply, and the next follows it. Mooncake's keys are
text, so a block's key is quoted as in URLs."""

import json
import socket
import time
from typing import Any
from urllib.parse import quote_from_bytes

MAX_LINE_BYTES = 4 << 20
"""The longest sent line has a few hundred KiB."""
RECEIVE_BYTES = 1 << 16


def quoted(key: bytes) -> str:
    return quote_from_bytes(key, safe="/~")


def generation_key(fingerprint: str) -> str:
    return f"hotkv/1/{fingerprint}/generation"


class Line:
    """One end of the socket pair. Not thread-safe. Raises TimeoutError at `until_s` (None: no
    limit), EOFError or OSError if the other process is gone, EOFError or ValueError for anything
    but a message."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = b""

    def send(self, message: dict[str, Any], until_s: float | None = None) -> None:
        self._limit(until_s)
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, until_s: float | None = None) -> dict[str, Any]:
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
        self._socket.close()

    def _limit(self, until_s: float | None) -> None:
        left_s = None if until_s is None else until_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)
