"""Where a server listens, and what clients show to it. Imports neither gRPC nor numpy, so that a
command that asks no server starts at once."""

import socket
from dataclasses import dataclass
from pathlib import Path

DEFAULT_TARGET = "unix:/run/hotkv/grpc.sock"
USER_SOCKET, ADMIN_SOCKET, DESCRIPTOR_SOCKET = "grpc.sock", "admin.sock", "fd.sock"


def is_unix(target: str) -> bool:
    return target.startswith("unix:")


def admin_target(target: str) -> str:
    """The admin socket beside a Unix target; other targets unchanged."""
    if is_unix(target) and Path(target.removeprefix("unix:")).name == USER_SOCKET:
        return target.removesuffix(USER_SOCKET) + ADMIN_SOCKET
    return target


def why_closed(target: str) -> str:
    """Why this process can't connect to a Unix target; empty if it can, and for other targets.
    Does not wait for the server."""
    if not is_unix(target):
        return ""
    path = target.removeprefix("unix:").removeprefix("//")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except BlockingIOError:
            # Earlier connections are not accepted yet.
            return ""
        except FileNotFoundError:
            return f"there is no {path}"
        except PermissionError:
            return f"this user may not open {path}, whose mode is security.socket_mode"
        except OSError as error:
            return f"{path}: {error.strerror or error}"
    return ""


def descriptor_socket(target: str) -> Path | None:
    """Beside a `unix:` target; None for others."""
    if not target.startswith("unix:"):
        return None
    return Path(target.removeprefix("unix:").removeprefix("//")).parent / DESCRIPTOR_SOCKET


@dataclass(frozen=True, slots=True)
class Credentials:
    """TLS files and token over TCP; ignored on a Unix socket.

    All but `tls_server_name` are paths, read again for each new connection; empty: not used.

    tls_ca: certificate of the authority of the server's certificate, PEM.
    tls_certificate, tls_key: the client's own, PEM.
    tls_server_name: expected in the server's certificate, if it is not the target's host.
    token_file: with a bearer token.
    """

    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_server_name: str = ""
    token_file: str = ""


NO_CREDENTIALS = Credentials()
