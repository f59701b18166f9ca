"""The server's certificates for TCP: read at the start, and again when their files change.

If new files can't be used, for example because their disk hangs, the problem is logged once, and
the previous certificates stay. At each handshake, threads of gRPC ask for changes; they wait at
most LOOK_S for another thread that reads the files. The event loop never waits for the files.
"""

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from hotkv_server.memory.clerk import PatientReader
from hotkv_server.security.path_checks import UnsafeError, check_public, check_secret

log = logging.getLogger(__name__)

LOOK_S = 1.0
Stamp = tuple[tuple[int, int, int], ...]
Found = tuple[Stamp, grpc.ServerCertificateConfiguration | None]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files.

    client_ca: signs client certificates, which every client must then have. None: clients need
        none.
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
        """Raises OSError (as ssl.SSLError is), ValueError or UnsafeError."""
        check_secret(self.key)
        for path in (self.certificate, *(() if self.client_ca is None else (self.client_ca,))):
            check_public(path)
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
        """Inodes, times of modification and sizes. Raises OSError."""
        stats = [path.stat() for path in self.paths]
        return tuple((status.st_ino, status.st_mtime_ns, status.st_size) for status in stats)


class _Followed:
    """The files that are watched for changes.

    stamp: in use; empty if no file was read.
    reader: gives the present stamp, and the content, or None if the stamp is in use. Raises the
        errors of `TlsFiles.read`.
    """

    def __init__(self, files: TlsFiles, stamp: Stamp = ()) -> None:
        self.files = files
        self.stamp = stamp
        self.reader = PatientReader("certificates", self._look, LOOK_S)

    def _look(self) -> Found:
        stamp = self.files.stamp()
        return stamp, None if stamp == self.stamp else self.files.read()


class Certificates:
    """The TLS credentials of a port, renewed when the files change. The constructor raises
    OSError, ssl.SSLError or UnsafeError."""

    def __init__(self, files: TlsFiles) -> None:
        self._followed = _Followed(files, files.stamp())
        self._lock = threading.Lock()
        self._complaint = ""
        self.credentials = grpc.dynamic_ssl_server_credentials(
            files.read(),
            self._changed,  # type: ignore[arg-type]
            files.client_ca is not None,
        )

    def fits(self, files: TlsFiles) -> bool:
        """False if `files` would change whether clients must have a certificate."""
        return (files.client_ca is None) == (self._followed.files.client_ca is None)

    def follow(self, files: TlsFiles) -> None:
        """Uses `files` from the next handshake on; they were read before, and `fits`. Does not
        block."""
        # With a thread of its own: the old one may hang with the disk of the old files.
        self._followed = _Followed(files)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """None if the files have not changed, or can't be used."""
        with self._lock:
            followed = self._followed
            try:
                stamp, config = followed.reader.read()
            except (OSError, ValueError, UnsafeError) as error:
                why = f"{type(error).__name__}: {error}"
                if why != self._complaint:
                    self._complaint = why
                    log.warning("new certificates can't be used, the old ones stay: %s", why)
                return None
            if config is None:
                return None
            followed.stamp, self._complaint = stamp, ""
            log.info("certificates reloaded certificate=%s", followed.files.certificate)
            return config
