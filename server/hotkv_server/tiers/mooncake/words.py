"""Messages between the server and a child process with Mooncake's client. Each message is a JSON
object on one line, sent over a pair of sockets.

Always true: each request has one reply, and the server sends the next request only after the reply.
Keys of blocks are bytes, but Mooncake's keys are text. So keys are quoted as in URLs, which leaves
printable characters readable.
"""

import json
import socket
import time
from typing import Any
from urllib.parse import quote_from_bytes

MAX_LINE_BYTES = 4 << 20
"""Longest accepted line, in bytes. The longest message that the server or a child process sends has
a few hundred KiB."""
RECEIVE_BYTES = 1 << 16


def quoted(key: bytes) -> str:
    """Returns the text for a key in Mooncake: the key's bytes, quoted as in URLs."""
    return quote_from_bytes(key, safe="/~")


def generation_key(fingerprint: str) -> str:
    """Returns the key under which a key space's generation (a number that each flush raises) is
    stored."""
    return f"hotkv/1/{fingerprint}/generation"


class Line:
    """One end of the socket pair between the server and a child process. Sends and receives
    messages. Not thread-safe.

    Methods raise TimeoutError at their time limit. They raise EOFError or OSError if the process at
    the other end of the socket pair is gone, and EOFError or ValueError if that process sends
    anything but a message.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = b""

    def send(self, message: dict[str, Any], until_s: float | None = None) -> None:
        """Sends a message. Blocks at most until `until_s`, a time of time.monotonic; None: no
        limit."""
        self._limit(until_s)
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, until_s: float | None = None) -> dict[str, Any]:
        """Waits for a message and returns it. Blocks at most until `until_s`, a time of
        time.monotonic; None: no limit."""
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
