"""The paths that the server believes: checks that no other user could have replaced what lies
there, and locks the runtime directory.

Always true: a second server with the same runtime directory refuses to start. Every setting that
names a path has a row in `TRUSTED_PATHS`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from hotkv_server.memory.arena import FILES, LOCK_FILE, BusyError, lock_file
from hotkv_server.security.path_checks import (
    PathKind,
    UnsafeError,
    check_files,
    check_path,
    check_shared_dir,
)
from hotkv_server.settings import Settings
from hotkv_server.startup import StartError

TRUSTED_PATHS: Mapping[str, PathKind | None] = MappingProxyType(
    {
        "runtime_dir": PathKind.SHARED_DIR,
        "arena.dir": PathKind.OWN_DIR,
        "tiers.disk.path": PathKind.OWN_DIR,
        "security.admin_socket": PathKind.SOCKET,
        "security.audit_file": None,
        "security.tls.certificate": PathKind.PUBLIC,
        "security.tls.key": PathKind.SECRET,
        "security.tls.client_ca": PathKind.PUBLIC,
        "http.token_file": PathKind.SECRET,
        "tracing.headers_file": PathKind.SECRET,
        "tracing.certificate": PathKind.PUBLIC,
        "tiers.valkey.password_file": PathKind.SECRET,
        "tiers.valkey.ca_file": PathKind.PUBLIC,
        "tiers.valkey.cert_file": PathKind.PUBLIC,
        "tiers.valkey.key_file": PathKind.SECRET,
        "tiers.s3.credentials_file": PathKind.SECRET,
        "tiers.s3.ca_file": PathKind.PUBLIC,
    }
)
"""What each path of the settings must be. None: only written, as `preflight` checks."""
READ = (PathKind.SECRET, PathKind.PUBLIC)
OF_TIERS = "tiers."
"""The tiers check their own paths: the disk's may hang, and stores' files are checked whenever
they are read, because a server also starts while a store can't be asked."""


def lock_runtime_dir(directory: Path) -> int:
    """Returns the descriptor of the lock file. Raises StartError, which names the process that
    has the lock."""
    try:
        check_shared_dir(directory)
        check_files([directory / LOCK_FILE])
        return lock_file(directory / LOCK_FILE)
    except (UnsafeError, BusyError) as error:
        raise StartError(f"runtime_dir: {error}") from error
    except OSError as error:
        raise StartError(
            f"runtime_dir: {error}; choose a directory this user may write, with --runtime-dir"
        ) from error


def check_places(settings: Settings) -> None:
    """Raises StartError."""
    for name, path, kind in _places(settings):
        try:
            check_path(path, kind)
        except UnsafeError as error:
            raise StartError(f"{name}: {error}") from error
        except OSError as error:
            # Whoever reads the file says that it is missing.
            if kind not in READ:
                raise StartError(f"{name}: {error}") from error


def _places(settings: Settings) -> Iterator[tuple[str, Path, PathKind]]:
    """With the names of their settings; without paths of tiers."""
    of_admin = "runtime_dir" if settings.security.admin_socket is None else "security.admin_socket"
    yield of_admin, settings.admin_socket.parent, PathKind.SHARED_DIR
    for socket in settings.engine_sockets:
        yield "runtime_dir", socket, PathKind.SOCKET
    yield of_admin, settings.admin_socket, PathKind.SOCKET
    own = PathKind.PRIVATE_DIR if settings.security.tenants else PathKind.OWN_DIR
    yield "arena.dir", settings.arena_dir, own
    for file in (*FILES, LOCK_FILE):
        yield "arena.dir", settings.arena_dir / file, PathKind.FILE
    for name, kind in TRUSTED_PATHS.items():
        path = None if name.startswith(OF_TIERS) else value_of(settings, name)
        if isinstance(path, Path) and kind in READ:
            assert kind is not None, "see READ"
            yield name, path, kind


def value_of(settings: Settings, name: str) -> object:
    """By dotted name; None if its section is missing."""
    found: object = settings
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
