"""Identifies peers: on a Unix socket by SO_PEERCRED, over TCP by token or client certificate."""

import socket
import struct
from typing import Any

from hotkv_server.security.identity import Peer, digest_of

AUTHORIZATION = "authorization"
BEARER = "bearer "
CERTIFICATE_NAMES = ("x509_common_name", "x509_subject_alternative_name")
SO_PEERGROUPS = 59
GROUPS_BYTES = 1024
"""Buffer for 256 group ids."""
MAX_TOKEN = 4096
_CREDENTIALS = struct.Struct("iII")


def process_of(connection: socket.socket) -> tuple[int, int, int]:
    """Process id, user id and group id of the other end of a Unix socket. Raises OSError."""
    pid, uid, gid = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, uid, gid


def of_socket(connection: socket.socket) -> Peer:
    """With the user and all groups that the process had when it connected. Raises OSError."""
    pid, uid, gid = process_of(connection)
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, GROUPS_BYTES)
    except OSError:
        # The kernel is older than 4.13, or the groups don't fit: use only the primary group.
        packed = b""
    gids = frozenset({gid, *struct.unpack(f"{len(packed) // 4}I", packed[: len(packed) // 4 * 4])})
    return Peer(f"pid={pid} uid={uid}", uid, gids)


def of_call(context: Any) -> Peer:
    """Over TCP. The peer has certificate names only if the TLS handshake has verified its
    certificate."""
    names = {
        name.decode(errors="replace")
        for key, values in context.auth_context().items()
        if key in CERTIFICATE_NAMES
        for name in values
    }
    token = ""
    for key, value in context.invocation_metadata() or ():
        if (
            key == AUTHORIZATION
            and isinstance(value, str)
            and value[: len(BEARER)].lower() == BEARER
        ):
            token = value[len(BEARER) :].strip()[:MAX_TOKEN]
    return Peer(
        f"peer={context.peer()}",
        token_digest=digest_of(token),
        certificate_names=frozenset(names),
    )
