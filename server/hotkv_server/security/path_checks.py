"""Checks paths before a server starts, and descriptors that engines send. Messages say what to
do."""

import ctypes
import enum
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from hotkv_proto.errors import HotKVError, Reason

# -------------------------------------------------------------------------------------------- Paths
#
# The server believes what it reads from a path: blocks, records of flushes, keys. So other users
# must not be able to replace it. A failed check has changed nothing. A missing directory is
# made. `startup.places` lists which setting needs which check.

OTHERS_WRITE = stat.S_IWOTH | stat.S_IWGRP


class UnsafeError(Exception):
    """The server must not use a path."""


class PathKind(enum.Enum):
    SHARED_DIR = enum.auto()
    OWN_DIR = enum.auto()
    PRIVATE_DIR = enum.auto()
    SOCKET = enum.auto()
    FILE = enum.auto()
    SECRET = enum.auto()
    PUBLIC = enum.auto()


def check_path(path: Path, kind: PathKind) -> None:
    """Raises UnsafeError, and OSError if a directory can't be made, or a secret or public file
    is missing."""
    match kind:
        case PathKind.SHARED_DIR:
            check_shared_dir(path)
        case PathKind.OWN_DIR | PathKind.PRIVATE_DIR:
            check_own_dir(path, is_private=kind is PathKind.PRIVATE_DIR)
        case PathKind.SOCKET:
            check_sockets([path])
        case PathKind.FILE:
            check_files([path])
        case PathKind.SECRET:
            check_secret(path)
        case PathKind.PUBLIC:
            check_public(path)


def check_shared_dir(path: Path) -> None:
    """A directory that others may read must be this user's or root's, and not writable for
    others."""
    _make(path, 0o755)
    status = _directory(path)
    if status.st_uid not in (os.geteuid(), 0):
        raise UnsafeError(
            f"{path} belongs to user id {status.st_uid}, not {os.geteuid()}: chown "
            f"{os.geteuid()} {path}, or choose another"
        )
    if status.st_mode & OTHERS_WRITE:
        raise UnsafeError(
            f"{path} can be written by others (mode {_mode(status)}): chmod go-w {path}"
        )


def check_own_dir(path: Path, *, is_private: bool) -> None:
    """A directory with cached bytes or their records must be this user's, closed to others, not
    writable for its group, with files that pass `check_files`. Makes a missing one: not for a
    directory that another program mounts.

    is_private: the group must not read it either, as tenants in it could read each other's
        blocks.
    """
    _make(path, 0o700)
    status = _directory(path)
    if status.st_uid != os.geteuid():
        raise UnsafeError(
            f"{path} belongs to user id {status.st_uid}, not {os.geteuid()}: chown -R "
            f"{os.geteuid()} {path} if you trust what it has, or choose a directory below it, "
            "which the server makes"
        )
    forbidden = 0o077 if is_private else stat.S_IRWXO | stat.S_IWGRP
    if status.st_mode & forbidden:
        who = "its group or others" if is_private else "others"
        raise UnsafeError(
            f"{path} is open to {who} (mode {_mode(status)}), and all cached bytes with it: "
            f"chmod 700 {path}"
        )
    with os.scandir(path) as found:
        check_files(
            Path(one.path)
            for one in found
            if one.is_symlink() or one.is_file(follow_symlinks=False)
        )


def check_sockets(paths: Iterable[Path]) -> None:
    """Accepts only a socket of this user or root, which an earlier server has left."""
    for path in paths:
        _check_place(path, stat.S_ISSOCK, "socket")


def check_files(paths: Iterable[Path]) -> None:
    """Accepts a missing file, or a regular one of this user or root that no other user can
    write."""
    for path in paths:
        status = _check_place(path, stat.S_ISREG, "regular file")
        if status is not None and status.st_mode & OTHERS_WRITE:
            raise UnsafeError(
                f"{path} can be written by others (mode {_mode(status)}): chmod go-w {path} if you "
                "trust what it has, else remove it"
            )


def check_secret(path: Path) -> None:
    """Must be closed to users outside the file's group, and pass `check_public`."""
    status = path.stat()
    if status.st_mode & stat.S_IRWXO:
        raise UnsafeError(
            f"{path} can be read by every user of this machine (mode {_mode(status)}): chmod "
            f"o-rwx {path}"
        )
    check_public(path)


def check_public(path: Path) -> None:
    """A file of operators, such as a certificate, or a link to it, must be this user's or
    root's, and pass `check_writers`."""
    link, status = path.lstat(), path.stat()
    if owners := {link.st_uid, status.st_uid} - {os.geteuid(), 0}:
        what = "is a symbolic link of" if stat.S_ISLNK(link.st_mode) else "belongs to"
        raise UnsafeError(
            f"{path} {what} user id {min(owners)}, not {os.geteuid()}: look who made it, then "
            f"chown -h {os.geteuid()} {path}"
        )
    check_writers(path)


def check_writers(path: Path) -> None:
    """Raises UnsafeError if every user can write a file, or replace it in its directory."""
    folder = path.resolve().parent
    for one, may_be_sticky in ((path, False), (folder, True)):
        status = one.stat()
        is_sticky = may_be_sticky and status.st_mode & stat.S_ISVTX
        if status.st_mode & stat.S_IWOTH and not is_sticky:
            raise UnsafeError(
                f"{one} can be written by every user of this machine (mode {_mode(status)}): chmod "
                f"o-w {one}"
            )


def _make(path: Path, mode: int) -> None:
    if not path.exists():
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        path.chmod(mode)


def _directory(path: Path) -> os.stat_result:
    link = path.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), 0):
        raise UnsafeError(
            f"{path} is a symbolic link of user id {link.st_uid}: remove it, or name the "
            "directory itself"
        )
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeError(f"{path} is no directory: remove it, or choose another")
    return status


def _check_place(path: Path, is_kind: Callable[[int], bool], kind: str) -> os.stat_result | None:
    """None if there is no file. Raises UnsafeError for another kind or user."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if not is_kind(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
        what = (
            "a symbolic link"
            if stat.S_ISLNK(status.st_mode)
            else f"of mode {stat.filemode(status.st_mode)}"
        )
        raise UnsafeError(
            f"{path} is {what} of user id {status.st_uid}, not a {kind} of this server: look who "
            f"made it, then rm {path}"
        )
    return status


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"


# ---------------------------------------------------------------------- Descriptors that peers send
#
# A descriptor must be memory whose pages are always available. A file on disk, on the network or
# in user space (FUSE) could hang a copy thread.

MEMORY_FILE_SYSTEMS: Final = {0x01021994: "tmpfs", 0x958458F6: "hugetlbfs"}
"""By their magic numbers in statfs(2)."""
STATFS_BYTES = 256
"""More than struct statfs has on any architecture. Its first member is the magic number."""

_libc = ctypes.CDLL(None, use_errno=True)


def check_memory(fd: int, name: str) -> None:
    """A memfd, or a file in /dev/shm or hugetlbfs; else raises INVALID_LAYOUT."""
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        raise HotKVError(
            Reason.INVALID_LAYOUT,
            f"handle {name!r} is of kind {stat.filemode(mode)[0]!r}, no file; send a memfd",
        )
    buffer = ctypes.create_string_buffer(STATFS_BYTES)
    if _libc.fstatfs(fd, buffer):
        raise OSError(ctypes.get_errno(), f"handle {name!r}: {os.strerror(ctypes.get_errno())}")
    if ctypes.c_long.from_buffer(buffer).value & 0xFFFF_FFFF not in MEMORY_FILE_SYSTEMS:
        raise HotKVError(
            Reason.INVALID_LAYOUT,
            f"handle {name!r} is a file on a disk or network; send a memfd or a file of /dev/shm",
        )
