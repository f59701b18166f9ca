"""The link: a connection to the server's descriptor socket, beside a session's gRPC stream.

The client sends the descriptors of the engine's memory, the server those of arena and block
table. The server closes the link only after its last access to the engine's memory, and the
kernel does if the server dies; only copies of a dead server on a device may still run
(`connection.DEVICE_GRACE_S`).
"""

import contextlib
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

from hotkv_client.arena import Arena, map_file
from hotkv_client.tickets import MAX_PACKET_BYTES, connect
from hotkv_client.wire import link_messages as _wire
from hotkv_proto.table import BlockTable

MAX_DESCRIPTORS = 64
"""In a packet, as the server accepts."""


def pass_backings(path: Path, session_id: str, fds: Mapping[str, int], timeout_s: float) -> None:
    """Sends descriptors of device memory ahead of the link. Raises OSError if the socket does not
    answer, HotKVError if the server refuses.

    fds: by the backing's id.
    timeout_s: for each packet.
    """
    named = list(fds.items())
    for at in range(0, len(named), MAX_DESCRIPTORS):
        part = dict(named[at : at + MAX_DESCRIPTORS])
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connect(connection, path, timeout_s)
            packet = _wire.backings_request(session_id, list(part))
            socket.send_fds(connection, [packet], list(part.values()))
            _wire.check_link(connection.recv(MAX_PACKET_BYTES))


class Link:
    """table: mapped read-only; None if the server does not let this session map it."""

    def __init__(
        self, path: Path, session_id: str, fds: Mapping[str, int], timeout_s: float
    ) -> None:
        """Exchanges the descriptors.

        Raises OSError if the socket does not answer, HotKVError if the server refuses, ValueError
        if the block table has another format.

        fds: by handle id.
        """
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._arena_fd: int | None = None
        self._sizes = _wire.LinkSizes(0, 0, 0, 0)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connect(self._socket, path, timeout_s)
            packet = _wire.link_request(session_id, list(fds))
            if fds:
                socket.send_fds(self._socket, [packet], list(fds.values()))
            else:
                self._socket.send(packet)
            answer, received, _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, 2)
            try:
                if not answer:
                    raise ConnectionError(
                        "the server closed the descriptor socket without an answer"
                    )
                sizes = _wire.link_sizes(answer)
                if len(received) != bool(sizes.arena_bytes) + bool(sizes.table_bytes):
                    raise ConnectionError(
                        f"the server sent {len(received)} descriptors, not one for each size"
                    )
                self.table = (
                    BlockTable.open(map_file(received[-1], sizes.table_bytes))
                    if sizes.table_bytes
                    else None
                )
                if sizes.arena_bytes:
                    self._arena_fd = os.dup(received[0])
                    self._sizes = sizes
            finally:
                for fd in received:
                    os.close(fd)
            self._socket.settimeout(None)
        except BaseException:
            self._socket.close()
            raise

    def arena(self) -> Arena | None:
        """Mapped by the first call. None if the server does not let this session map it, or if
        the link is closed. Raises OSError if it can't be mapped."""
        with self._lock:
            if self._arena is None and self._arena_fd is not None:
                sizes = self._sizes
                self._arena = Arena(
                    self._arena_fd, sizes.arena_bytes, sizes.words_offset_bytes, sizes.num_words
                )
            return self._arena

    def _drop_arena(self) -> None:
        """The arena stays mapped while a caller references its `Arena`."""
        with self._lock:
            if self._arena_fd is not None:
                os.close(self._arena_fd)
            self._arena = self._arena_fd = None

    def wait_closed(self) -> None:
        """Blocks until the server has closed the link or has died."""
        self._drop_arena()
        with contextlib.suppress(OSError):
            while self._socket.recv(1):
                pass
        self._socket.close()

    def close(self) -> None:
        self._drop_arena()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
