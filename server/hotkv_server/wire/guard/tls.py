"""The server's certificates for TCP: read at start, read again when their files change.

New files that can't be used (a key that does not match, half a file, a key that everybody may
read) are logged once, and the old ones stay in use. gRPC asks at each handshake, in a thread of its
own.
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
    """PEM files. `client_ca`: authority of client certificates; if given, every client must have
    one."""

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
        UnsafeError if they can't be used."""
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
        """A value that changes whenever a file does. Raises OSError."""
        stats = [path.stat() for path in self.paths]
        return tuple((status.st_ino, status.st_mtime_ns, status.st_size) for status in stats)


class Certificates:
    """Credentials of a server port, which follow the files. Raises as `TlsFiles.read`."""

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
        """Whether these files can be followed: as the earlier ones, they ask clients for
        certificates or do not."""
        return (files.client_ca is None) == (self._files.client_ca is None)

    def follow(self, files: TlsFiles) -> None:
        """Serves these files, which fit and can be read, from the next handshake on."""
        with self._lock:
            self._files, self._stamp = files, ()

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """New credentials since the handshake before; None if there are none that can be used."""
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
