"""The server's certificates for TCP: read at the start, and again when their files change.

If new files can't be used, the problem is logged once, and the previous certificates stay in use.
Examples are a key that does not match, an incomplete file, a key that every user may read, and a
disk that hangs. At each handshake, gRPC asks on its own threads whether the files have changed.
These threads wait at most LOOK_S for the files, which another thread reads. The event loop never
waits for the files.
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
"""Longest time, in seconds, that a handshake waits until the files have been read."""
Stamp = tuple[tuple[int, int, int], ...]
Found = tuple[Stamp, grpc.ServerCertificateConfiguration | None]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the PEM files for TLS.

    client_ca: certificate of the authority that signs client certificates. If given, every client
        must have a certificate. None: clients need no certificate.
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
        """Reads the files with the key and the certificates. Raises OSError (of which ssl.SSLError
        is a subclass), ValueError or UnsafeError if the files can't be used."""
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
        """Returns a value by which a change of the files is noticed: their inodes, times of
        modification and sizes. Raises OSError."""
        stats = [path.stat() for path in self.paths]
        return tuple((status.st_ino, status.st_mtime_ns, status.st_size) for status in stats)


class _Followed:
    """The TLS files that `Certificates` watches for changes.

    stamp: the state of the files (`TlsFiles.stamp`) that is in use; empty if none of them was read.
    reader: reads the files; returns their present stamp, and their content if the stamp has
        changed, otherwise None. Raises the errors of `TlsFiles.read`.
    """

    def __init__(self, files: TlsFiles, stamp: Stamp = ()) -> None:
        self.files = files
        self.stamp = stamp
        self.reader = PatientReader("certificates", self._look, LOOK_S)

    def _look(self) -> Found:
        stamp = self.files.stamp()
        return stamp, None if stamp == self.stamp else self.files.read()


class Certificates:
    """The TLS credentials of a server port, which are renewed when the files change. The
    constructor raises OSError, ssl.SSLError or UnsafeError if the files can't be used."""

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
        """Returns True if `files` can replace the current files while the server runs. This is so
        unless `files` would change whether clients must have a certificate."""
        return (files.client_ca is None) == (self._followed.files.client_ca is None)

    def follow(self, files: TlsFiles) -> None:
        """Uses `files` in place of the current files from the next handshake on. The caller has
        checked that the new files are readable and can replace the current files (`fits`). Does not
        block."""
        # The new object has a thread of its own, which reads the new files. The old object's thread
        # may hang, together with the disk of the old files.
        self._followed = _Followed(files)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns new credentials if the files have changed since the last handshake; None if the
        files have not changed, or can't be used."""
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
