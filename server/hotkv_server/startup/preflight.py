"""Finds what would keep a server from starting, before it has made any files.

Always true: the checks leave no files behind and don't disturb a running server. A start makes
the same checks first. Its later steps may still fail if the machine has changed since.
"""

import contextlib
import errno
import os
import pwd
import re
import socket
import ssl
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from hotkv_proto import limits
from hotkv_proto.table import TableGeometry
from hotkv_server.device import start as device_start
from hotkv_server.memory.arena import (
    ARENA_FILE,
    LOCK_FILE,
    TABLE_FILE,
    forecast,
    has_arena,
    table_memory_bytes,
)
from hotkv_server.security.path_checks import UnsafeError
from hotkv_server.settings import Settings
from hotkv_server.settings.storage import entries_for
from hotkv_server.startup import StartError
from hotkv_server.startup.access import make_access_control, make_endpoints, make_page_access
from hotkv_server.startup.arena import placer
from hotkv_server.startup.capabilities import checks_of_capabilities
from hotkv_server.startup.places import check_places, lock_runtime_dir
from hotkv_server.startup.process import check_limits
from hotkv_server.wire.server import MAX_SOCKET_PATH_BYTES

OWN_BYTES = 128 << 20
"""Besides arena and block table: 110 MiB were measured."""


class Footprint:
    """What a start makes in the file system, so that a failed one leaves nothing. To be made
    before its first step."""

    def __init__(self, settings: Settings) -> None:
        self._made = _missing(settings.runtime_dir, *_folders(settings))
        self._lock = settings.runtime_dir / LOCK_FILE
        self._had_lock = os.path.exists(self._lock)

    def __repr__(self) -> str:
        return f"Footprint({len(self._made)} new folders)"

    def remove(self, lock_fd: int | None) -> None:
        """Folders that others use meanwhile stay.

        lock_fd: of the runtime directory, closed here; None if this process does not hold it.
        """
        if lock_fd is not None:
            if not self._had_lock:
                self._lock.unlink(missing_ok=True)
            os.close(lock_fd)
        _remove_empty(self._made)


def check_start(settings: Settings, *, is_running: bool = False) -> list[str]:
    """A sentence for each problem. Takes seconds if `copy.cuda` is on.

    is_running: a server with this runtime directory runs, and uses its addresses.
    """
    binding = (check_admin_socket, check_http, check_tcp)
    checks: list[Callable[[Settings], None]] = [
        check_limits,
        check_sockets,
        check_places,
        check_arena_room,
        check_nodes,
        check_access,
        check_pages,
        check_audit,
        check_devices,
        *checks_of_capabilities(),
        *(() if is_running else (*binding, *checks_of_capabilities("check_addresses"))),
    ]
    return _problems(checks, settings)


def check_settings(settings: Settings) -> list[str]:
    """The quick checks of `check_start`, in milliseconds. They also pass while a server with the
    same settings runs."""
    return _problems((check_sockets, check_access, check_audit), settings)


def _problems(checks: Iterable[Callable[[Settings], None]], settings: Settings) -> list[str]:
    problems = []
    for check in checks:
        try:
            check(settings)
        except StartError as error:
            problems.append(str(error))
    # Two checks may find the same file unsafe.
    return list(dict.fromkeys(problems))


def check_and_clean(settings: Settings) -> tuple[list[str], list[str]]:
    """As `check_start`, without a start. Returns problems, and notes: the server that runs in the
    runtime directory, and what a start would do to the cache."""
    footprint, running, lock_fd = Footprint(settings), "", None
    try:
        lock_fd = lock_runtime_dir(settings.runtime_dir)
    except StartError as error:
        if "in use by" not in str(error):
            footprint.remove(None)
            return [str(error)], []
        running = str(error)
    problems = check_start(settings, is_running=bool(running))
    becomes = ""
    with contextlib.suppress(OSError):
        becomes = forecast(settings.arena_dir, settings.arena.bytes)
    footprint.remove(lock_fd)
    return problems, [note for note in (running, becomes) if note]


def become_owner(settings: Settings) -> None:
    """Makes a process of root run as the server's user, for checks with the server's rights: the
    owner of the arena's directory, or else of the sockets'. Only in a process that does nothing
    but checks."""
    for directory in (settings.arena_dir, settings.runtime_dir):
        if os.geteuid() == 0 and os.path.isdir(directory) and (owner := directory.stat().st_uid):
            with contextlib.suppress(KeyError):
                user = pwd.getpwuid(owner)
                os.initgroups(user.pw_name, user.pw_gid)
                os.setegid(user.pw_gid)
            os.seteuid(owner)


def _folders(settings: Settings) -> list[Path]:
    disk = settings.tiers.disk.path
    return [settings.admin_socket.parent, settings.arena_dir, *([] if disk is None else [disk])]


def _missing(*directories: Path) -> set[Path]:
    """With their missing parents."""
    return {
        folder
        for path in directories
        for folder in (path.absolute(), *path.absolute().parents)
        if not os.path.exists(folder)
    }


def _remove_empty(directories: Iterable[Path]) -> None:
    for folder in sorted(directories, key=lambda one: len(one.parts), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()


def check_sockets(settings: Settings) -> None:
    if settings.admin_socket in settings.engine_sockets:
        raise StartError(
            f"security.admin_socket: engines use {settings.admin_socket}; choose another"
        )
    for path in (*settings.engine_sockets, settings.admin_socket):
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            is_named = path == settings.security.admin_socket
            raise StartError(
                f"{'security.admin_socket' if is_named else 'runtime_dir'}: can't listen on "
                f"{path}: it is longer than {MAX_SOCKET_PATH_BYTES} bytes; choose another"
            )


def check_arena_room(settings: Settings) -> None:
    arena, directory = settings.arena, settings.arena_dir
    geometry = TableGeometry.for_capacity(arena.capacity, 1, arena.most_bytes)
    table_bytes = table_memory_bytes(geometry, entries_for(arena.bytes))
    if arena.prefault and has_arena(directory):
        # The earlier server's arena is reused: its pages are allocated, or will be only while
        # memory is free (`memory.filling`). Only a new block table needs room.
        missing_bytes = table_bytes
    else:
        # `NodeMemory.open` needs room for two block tables: a restart briefly has an old and a
        # new one.
        held = sum(limits.allocated_bytes(directory / name) for name in (ARENA_FILE, TABLE_FILE))
        missing_bytes = arena.bytes + 2 * table_bytes - held
    folder = next(filter(os.path.exists, (directory, *directory.absolute().parents)))
    try:
        space = os.statvfs(folder)
    except OSError as error:
        raise StartError(f"arena.dir: {error}") from error
    free_bytes = space.f_bavail * space.f_frsize
    if missing_bytes > free_bytes:
        raise StartError(
            f"arena: {folder} has {free_bytes >> 20} MiB free, arena and table need "
            f"{missing_bytes >> 20} MiB more: lower arena.bytes ({arena.bytes >> 20} MiB), or "
            "enlarge the file system (Docker, Kubernetes: mount a directory of the node's /dev/shm)"
        )
    granted = limits.machine_bytes()
    own_bytes = OWN_BYTES + 2 * table_bytes
    if arena.bytes + own_bytes > granted:
        raise StartError(
            f"arena.bytes ({arena.bytes >> 20} MiB) and the server's own {own_bytes >> 20} MiB are "
            f"more than the memory of this machine, service or container ({granted >> 20} MiB): "
            "lower arena.bytes, or raise the limit"
        )


def check_nodes(settings: Settings) -> None:
    placer(settings.arena.numa, settings.arena.bytes, settings.arena.slab_size)


def check_access(settings: Settings) -> None:
    try:
        make_access_control(settings.security)
        endpoints = make_endpoints(settings)
    except ValueError as error:
        raise StartError(f"security: {error}") from error
    if endpoints.tls is not None:
        try:
            endpoints.tls.read()
        except (OSError, ssl.SSLError, ValueError, UnsafeError) as error:
            raise StartError(f"security.tls: {error}") from error


def check_pages(settings: Settings) -> None:
    if settings.http.port >= 0:
        make_page_access(settings, make_access_control(settings.security))


def check_audit(settings: Settings) -> None:
    path = settings.security.audit_file
    if path is None:
        return
    try:
        if path.is_symlink():
            raise StartError(
                f"security.audit_file: {path} is a symbolic link, which is not followed; name the "
                "file itself"
            )
        status = path.stat()
    except FileNotFoundError:
        can_be = os.access(path.parent, os.W_OK | os.X_OK)
    except OSError:
        can_be = False
    else:
        # A start sets the mode to 0600, so the file must be this user's, unless that is root.
        is_own = os.geteuid() in (0, status.st_uid)
        can_be = stat.S_ISREG(status.st_mode) and is_own and os.access(path, os.W_OK)
    if not can_be:
        raise StartError(
            f"security.audit_file: {path} can't be written by this user; name a file in a "
            "directory of its own, or leave it out for the server's log"
        )


def check_devices(settings: Settings) -> None:
    if settings.copy_.cuda == "on":
        found = device_start.look(settings.copy_)
        if found.runtime is None:
            raise StartError(f"copy.cuda is on: {found.why_none}")


def check_admin_socket(settings: Settings) -> None:
    """Unlike `runtime_dir`, the directory of this socket has no lock that keeps a second server
    out."""
    path = settings.admin_socket
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as one:
        try:
            one.connect(os.fspath(path))
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return
    raise StartError(f"security.admin_socket: another server uses {path}; choose another")


def check_http(settings: Settings) -> None:
    if settings.http.port >= 0:
        _bind("http.port", settings.http.host, settings.http.port)


def check_tcp(settings: Settings) -> None:
    host, _, port = settings.tcp_address.rpartition(":")
    if not settings.tcp_address:
        return
    is_host = bool(re.fullmatch(r"[^:\[\]]+|\[[^\[\]]+\]", host))
    if not is_host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise StartError(
            f"tcp_address is {settings.tcp_address!r}; write host:port, such as 0.0.0.0:50051 or "
            "[::]:50051, with a port up to 65535"
        )
    _bind("tcp_address", host.strip("[]"), int(port))


def _bind(setting: str, host: str, port: int) -> None:
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, number) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
            one.listen(1)
    except (OSError, UnicodeError) as error:
        # UnicodeError: the text is no valid host name, for example because a label is too long.
        why = getattr(error, "strerror", None) or error
        raise StartError(
            f"{setting}: can't listen on {host}:{port} ({why}); choose another with "
            f"--{setting.replace('_', '-')}, and an address of this machine"
        ) from error
