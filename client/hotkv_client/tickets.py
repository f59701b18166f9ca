"""Tickets of the descriptor socket, by which a process proves its user to the server."""

import socket
import time
from pathlib import Path

from hotkv_client.wire import link_messages as _wire

MAX_PACKET_BYTES = 65536
CONNECT_POLL_S = 0.005


def connect(connection: socket.socket, path: Path, timeout_s: float) -> None:
    """Connects within about `timeout_s`, also while the socket's queue is full. Sets the socket's
    timeout. Raises OSError."""
    connection.settimeout(timeout_s)
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            return connection.connect(str(path))
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise
            time.sleep(CONNECT_POLL_S)


def fetch_ticket(path: Path, timeout_s: float) -> bytes:
    """Proves to the server, once, which user this process runs as. Raises OSError if the socket
    does not answer, HotKVError if the server refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connect(connection, path, timeout_s)
        connection.send(_wire.ticket_request())
        return _wire.ticket(connection.recv(MAX_PACKET_BYTES))
