"""The server's certificates for TCP: read at start, and read again when their files change.

Unusable files (a key that does not match, half a file, a key that everybody may read) are logged
once, and the previous certificates stay in use. gRPC asks at each handshake, on its own thread.
"""

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from hotkv_server.security.path_checks import UnsafeError, check_private_key

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files.

    client_ca: authority of client certificates. If given, every client must have a certificate.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return (
            (self.certificate, self.key)
            if self.client_ca is None
            else (self.certificate, self.key, self.client_ca)
        )

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Reads the files. Raises OSError, ssl.SSLError (a child of OSError and ValueError) or
        UnsafeError if the files can't be used."""
        check_private_key(self.key)
        judge = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        judge.load_cert_chain(self.certificate, self.key)
        root = None
        if self.client_ca is not None:
            judge.load_verify_locations(self.client_ca)
            root = self.client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration(
            [(self.key.read_bytes(), self.certificate.read_bytes())], root
        )

    def stamp(self) -> Stamp:
        """Returns a value that changes whenever a file changes. Raises OSError."""
        stats = [path.stat() for path in self.paths]
        return tuple((status.st_ino, status.st_mtime_ns, status.st_size) for status in stats)


class Certificates:
    """Credentials of a server port that follow the files. Raises OSError, ssl.SSLError or
    UnsafeError if the files can't be used."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._stamp: Stamp = files.stamp()
        self._complaint = ""
        self.credentials = grpc.dynamic_ssl_server_credentials(
            files.read(),
            self._changed,  # type: ignore[arg-type]
            files.client_ca is not None,
        )

    def fits(self, files: TlsFiles) -> bool:
        """Returns whether these files can replace the current files: both sets, or neither, require
        client certificates."""
        return (files.client_ca is None) == (self._files.client_ca is None)

    def follow(self, files: TlsFiles) -> None:
        """Serves these files, which must fit and be readable, from the next handshake on."""
        with self._lock:
            self._files, self._stamp = files, ()

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns new credentials if the files have changed since the last handshake; None if the
        files have not changed, or can't be used."""
        with self._lock:
            try:
                stamp = self._files.stamp()
                if stamp == self._stamp:
                    return None
                config = self._files.read()
            except (OSError, ValueError, UnsafeError) as error:
                self._complain(f"{type(error).__name__}: {error}")
                return None
            self._stamp, self._complaint = stamp, ""
            log.info("certificates reloaded certificate=%s", self._files.certificate)
            return config

    def _complain(self, why: str) -> None:
        if why != self._complaint:
            self._complaint = why
            log.warning("new certificates can't be used, the old ones stay: %s", why)
