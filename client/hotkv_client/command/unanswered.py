"""What it means for an operator that a call was not answered: gRPC's codes and details as
sentences."""

import grpc

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
        "nobody listens there: the server has ended, or is not yet so far",
    ),
    (
        ("Domain name not found", "DNS resolution failed", "Name or service not known"),
        "no host of that name is known; --target is unix:/PATH or HOST:PORT",
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
"""Words in the details of UNAVAILABLE, and the sentence for them; the first that fits counts."""
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


def sentence(code: grpc.StatusCode, details: str) -> str:
    """One sentence with the code in brackets; with gRPC's own words where none fits."""
    found = SENTENCES.get(code)
    if code is grpc.StatusCode.UNAVAILABLE:
        known = (text for words, text in UNREACHED if any(word in details for word in words))
        found = next(known, f"the server can't be reached: {details}")
    return f"{code.name}: {details}" if found is None else f"{found} ({code.name})"
