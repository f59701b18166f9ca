"""Checks that no other user could have replaced the server's directories and files, and locks the
runtime directory.

Always true: a second server with the same runtime directory refuses to start.
"""

from pathlib import Path

from hotkv_server.memory.arena import FILES, LOCK_FILE, BusyError, lock_file
from hotkv_server.security.path_checks import (
    UnsafeError,
    check_arena_dir,
    check_files,
    check_private_key,
    check_runtime_dir,
    check_sockets,
)
from hotkv_server.settings import Settings
from hotkv_server.startup import StartError


def lock_runtime_dir(directory: Path) -> int:
    """Locks the directory and returns the descriptor of the lock file. Raises StartError if the
    directory can't be locked. If another server has locked it, the error names that server's
    process id."""
    try:
        check_runtime_dir(directory)
        check_files([directory / LOCK_FILE])
        return lock_file(directory / LOCK_FILE)
    except (UnsafeError, BusyError) as error:
        raise StartError(f"runtime_dir: {error}") from error
    except OSError as error:
        raise StartError(
            f"runtime_dir: {error}; choose a directory this user may write, with --runtime-dir"
        ) from error


def check_places(settings: Settings) -> None:
    """Raises StartError if another user could have replaced the arena, the sockets or the keys."""
    security = settings.security
    name = "runtime_dir" if security.admin_socket is None else "security.admin_socket"
    try:
        check_runtime_dir(settings.admin_socket.parent)
        check_sockets([settings.grpc_socket, settings.descriptor_socket, settings.admin_socket])
        name = "arena.dir"
        check_arena_dir(settings.arena_dir, is_private=bool(security.tenants))
        check_files(settings.arena_dir / name for name in (*FILES, LOCK_FILE))
        if security.tls.key is not None:
            name = "security.tls.key"
            check_private_key(security.tls.key)
    except (UnsafeError, OSError) as error:
        raise StartError(f"{name}: {error}") from error
