"""Bytes to and from a server, over a Unix socket, TCP or TLS. Each operation has a time limit,
`until_s`.

Always true: `send` and `receive` copy nothing, end at their limit, don't touch a buffer
afterwards, and raise LostError or LateError. Only a host name's lookup may take longer.
"""

import os
import select
import socket
import ssl
import time
from collections.abc import Sequence

from hotkv_server.security.path_checks import UnsafeError, check_public, check_secret
from hotkv_server.settings.tiers import ValkeySettings
from hotkv_server.tiers.remote.client import LateError, LostError, UnusableError

MAX_PIECES = 1024
"""Most buffers of a sendmsg: Linux's IOV_MAX."""
TLS_BYTES = 64 << 10
"""Most bytes of a call over TLS, which returns only when all are sent; `moved_s` changes only
then."""


class ValkeyStream:
    """See the module. Not thread-safe. `moved_s`: when bytes last moved; readable from any
    thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.moved_s = time.monotonic()
        self._socket = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)

    def __repr__(self) -> str:
        return f"ValkeyStream(fd={self._socket.fileno()}{', tls' if self._is_tls else ''})"

    def send(self, pieces: Sequence[bytes | memoryview], until_s: float) -> None:
        """Memoryviews must have items of one byte."""
        left = [memoryview(piece) for piece in pieces if len(piece)]
        at = 0
        while at < len(left):
            self._limit(until_s)
            try:
                if self._is_tls:
                    sent = self._socket.send(left[at][:TLS_BYTES])
                else:
                    sent = self._socket.sendmsg(left[at : at + MAX_PIECES])
            except OSError as error:
                raise _words(error) from error
            self.moved_s = time.monotonic()
            while at < len(left) and sent >= len(left[at]):
                sent -= len(left[at])
                at += 1
            if sent:
                left[at] = left[at][sent:]

    def receive(self, buffers: Sequence[memoryview], until_s: float) -> int:
        """See `ReplySource.receive`."""
        self._limit(until_s)
        try:
            if self._is_tls:
                count = self._socket.recv_into(buffers[0])
            else:
                count = self._socket.recvmsg_into(buffers)[0]
        except OSError as error:
            raise _words(error) from error
        if not count:
            raise LostError("closed the connection")
        self.moved_s = time.monotonic()
        return count

    def is_quiet(self) -> bool:
        """False if there are bytes, or the server has closed: an error if no reply is expected."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLRDHUP)
        return not poll.poll(0)

    def close(self) -> None:
        self._socket.close()

    def _limit(self, until_s: float) -> None:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise LateError("has not answered in time")
        self._socket.settimeout(left_s)


def connect(
    settings: ValkeySettings, address: tuple[str, int] | None, until_s: float
) -> ValkeyStream:
    """Raises LostError, LateError, or UnusableError for a bad TLS file. `address`: None for the
    Unix socket."""
    left_s = max(until_s - time.monotonic(), 1e-3)
    # First, so that a local file's error does not look like the server's.
    context = _tls_context(settings) if settings.tls else None
    try:
        if address is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            sock = socket.create_connection(address, left_s)
    except OSError as error:
        raise _words(error) from error
    try:
        if address is None:
            sock.settimeout(left_s)
            sock.connect(settings.unix_path)
            return ValkeyStream(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is None:
            return ValkeyStream(sock)
        sock.settimeout(max(until_s - time.monotonic(), 1e-3))
        name = settings.server_name or address[0]
        return ValkeyStream(context.wrap_socket(sock, server_hostname=name))
    except OSError as error:
        sock.close()
        raise _words(error) from error


def _tls_context(settings: ValkeySettings) -> ssl.SSLContext:
    named = ""
    try:
        named = f"ca_file {settings.ca_file}"
        if settings.ca_file is not None:
            check_public(settings.ca_file)
        context = ssl.create_default_context(cafile=settings.ca_file)
        if settings.cert_file is not None:
            assert settings.key_file is not None, "the settings have both or none"
            named = f"cert_file {settings.cert_file} and key_file {settings.key_file}"
            check_secret(settings.key_file)
            check_public(settings.cert_file)
            # OpenSSL would else ask for an encrypted key's password on the terminal.
            context.load_cert_chain(settings.cert_file, settings.key_file, password=lambda: "")
    except (OSError, UnsafeError) as error:
        reason = str(error) if isinstance(error, UnsafeError) else _reason(error)
        raise UnusableError(f"can't be asked, because of {named}: {reason}") from error
    return context


def _words(error: OSError) -> LostError | LateError:
    if isinstance(error, TimeoutError):
        return LateError("has not answered in time")
    if isinstance(error, ssl.SSLCertVerificationError):
        return LostError(f"has a certificate that does not pass: {error.verify_message}")
    if isinstance(error, ConnectionRefusedError):
        return LostError(f"refuses connections: {_reason(error)}")
    return LostError(f"can't be reached: {_reason(error)}")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "TLS error"
    # Resolver errors have no errno.
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or type(error).__name__
    return os.strerror(error.errno)
