"""Opens gRPC channels, with the credentials of both sides.

On a Unix socket the server identifies the client by SO_PEERCRED, so no credentials are sent.
Over TCP a channel uses TLS if any TLS setting is given. A token is sent in the metadata of
calls; without TLS only to a loopback address. `why_unanswered` explains to an operator why a
call got no answer.
"""

import contextlib
import ipaddress
import ssl
from pathlib import Path
from typing import Any

import grpc

from hotkv_client.targets import Credentials, is_unix
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.versions import MAX_MESSAGE_BYTES

MAX_ANSWER_BYTES = 64 << 20
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
HEALTH_CHECK = "/grpc.health.v1.Health/Check"

Metadata = tuple[tuple[str, str | bytes], ...]


def _is_loopback(target: str) -> bool:
    """`localhost` or a loopback address, with or without a port. Other names, such as
    `localhost.example.com`, are not resolved."""
    for host in (target, target.rpartition(":")[0]):
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(host.strip("[]")).is_loopback
    return target.partition(":")[0] == "localhost"


def open_channel(target: str, credentials: Credentials) -> grpc.Channel:
    """Connects in the background. Raises HotKVError for credentials that can't be used."""
    wants_tls = (
        credentials.tls_ca
        or credentials.tls_certificate
        or credentials.tls_key
        or credentials.tls_server_name
    )
    if is_unix(target) or not wants_tls:
        return grpc.insecure_channel(target, OPTIONS)
    if bool(credentials.tls_certificate) != bool(credentials.tls_key):
        raise HotKVError(Reason.INVALID_FIELD, "tls_certificate and tls_key: set both or neither")
    if credentials.tls_ca:
        _check_authorities(credentials.tls_ca)
    secrets = grpc.ssl_channel_credentials(
        _read("tls_ca", credentials.tls_ca),
        _read("tls_key", credentials.tls_key),
        _read("tls_certificate", credentials.tls_certificate),
    )
    name = (
        (("grpc.ssl_target_name_override", credentials.tls_server_name),)
        if credentials.tls_server_name
        else ()
    ) + OPTIONS
    return grpc.secure_channel(target, secrets, name)


def _check_authorities(path: str) -> None:
    """Raises HotKVError if a file has no certificate. gRPC would print its own errors, and not
    connect."""
    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:
        why = "has no PEM certificate" if isinstance(error, ssl.SSLError) else error.strerror
        raise HotKVError(Reason.INVALID_FIELD, f"tls_ca {path!r}: {why}") from error


def metadata(target: str, credentials: Credentials) -> Metadata:
    """The bearer token for calls that open a session or use an admin service; empty without one or
    for a Unix socket.

    Raises HotKVError if the token can't be read, or would be sent over a network without TLS.
    """
    if not credentials.token_file or is_unix(target):
        return ()
    if not (
        credentials.tls_ca or credentials.tls_server_name or credentials.tls_certificate
    ) and not _is_loopback(target):
        raise HotKVError(
            Reason.INVALID_FIELD,
            (
                "token_file without tls_ca would send the token in the clear; set tls_ca or "
                "tls_server_name"
            ),
        )
    token = (_read("token_file", credentials.token_file) or b"").decode(errors="replace").strip()
    if not token.isascii() or not token.isprintable() or not token:
        raise HotKVError(
            Reason.INVALID_FIELD,
            (
                f"token_file {credentials.token_file!r} holds no token; write one line of ASCII "
                "into it"
            ),
        )
    return (("authorization", f"Bearer {token}"),)


def ask(channel: grpc.Channel, timeout_s: float) -> Any:
    """gRPC's future of a call that finds out whether a server answers. It is sent once the channel
    is connected; its code is DEADLINE_EXCEEDED if no server answers within `timeout_s`.

    Not `grpc.channel_ready_future`, whose thread raises if the channel is closed too soon.
    """
    check: Any = channel.unary_unary(HEALTH_CHECK)
    return check.future(b"", timeout=timeout_s, wait_for_ready=True)


def _read(field: str, path: str) -> bytes | None:
    """None if no path is set."""
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise HotKVError(
            Reason.INVALID_FIELD, f"{field} {path!r}: {error.strerror or error}"
        ) from error


# --------------------------------------------------------------------- calls that were not answered

UNREACHED: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("No such file or directory",),
        "there is no such socket: no server runs there; start it, or name another place with "
        "--target or HOTKV_TARGET",
    ),
    (
        ("Permission denied",),
        "this user may not open the socket; run as the server's user or as root, or change "
        "security.socket_mode or security.admin_socket_mode",
    ),
    (
        ("Connection refused",),
        "nobody listens there: the server has ended, or is still starting",
    ),
    (
        (
            *("Domain name not found", "DNS resolution failed", "Name or service not known"),
            *("Misformatted domain name", "Unparsable name", "Failed to parse port"),
            "empty address list",
        ),
        "no host of that name is known; --target is unix:/PATH or HOST:PORT",
    ),
    (
        ("before receiving SETTINGS",),
        "the server accepts connections and does not answer: it is busy or hangs",
    ),
    (
        ("Handshake", "handshake", "SSL", "CERTIFICATE", "TLS"),
        "no TLS connection: the server speaks none there, or --tls-ca, --tls-certificate or "
        "--tls-server-name do not fit it",
    ),
    (
        ("Socket closed", "Connection reset", "Broken pipe", "GOAWAY", "Stream removed"),
        "the server closed the connection before it answered: it has ended or restarts, and its "
        "log says why; over TCP it may also want TLS",
    ),
)
"""For the gRPC code UNAVAILABLE: texts in gRPC's details, and what they mean. The first match
counts."""
SENTENCES: dict[grpc.StatusCode, str] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: (
        "no answer in time: the server is busy or hangs; --timeout-s waits longer"
    ),
    grpc.StatusCode.UNIMPLEMENTED: (
        "the server has no such call there: it is older than this client, or serves its admin API "
        "elsewhere (security.admin_on_tcp)"
    ),
    grpc.StatusCode.CANCELLED: "the call was cancelled before the server answered",
}


def why_unanswered(code: grpc.StatusCode, details: str) -> str:
    """A sentence with the gRPC code; gRPC's own `details` if there is no explanation."""
    found = SENTENCES.get(code)
    if code is grpc.StatusCode.UNAVAILABLE:
        known = (text for words, text in UNREACHED if any(word in details for word in words))
        found = next(known, f"the server can't be reached: {details}")
    return f"{code.name}: {details}" if found is None else f"{found} ({code.name})"
