"""Checks paths before a server starts, and file descriptors that engines send.

A failed check raises an error whose message says what to do.
"""

import ctypes
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from hotkv_proto.errors import HotKVError, Reason

# -------------------------------------------------------------------------------------------- Paths
# Other users must not be able to replace the server's directories and files. If one of them belongs
# to another user, the check fails and changes nothing. A missing directory is made.

OTHERS_WRITE = stat.S_IWOTH | stat.S_IWGRP


class UnsafeError(Exception):
    """A path is not safe, so the server must not start. The message says what to do."""


def check_runtime_dir(path: Path) -> None:
    """Checks the directory of the sockets; makes it if it is missing. Raises UnsafeError unless
    this user or root owns the directory, and other users can't write to it."""
    _make(path, 0o755)
    status = _directory(path)
    if status.st_uid not in (os.geteuid(), 0):
        raise UnsafeError(
            f"{path} belongs to user id {status.st_uid}, not {os.geteuid()}: chown it, or choose "
            "another with --runtime-dir"
        )
    if status.st_mode & OTHERS_WRITE:
        raise UnsafeError(
            f"{path} can be written by others (mode {_mode(status)}): chmod go-w {path}"
        )


def check_arena_dir(path: Path, *, is_private: bool) -> None:
    """Checks the directory of the arena; makes it if it is missing. Raises UnsafeError unless this
    user owns the directory, other users have no access to it, and its group can't write to it.

    `is_private`: True if the group must not be able to read the directory either. This is needed
        with tenants, because tenants in the group could read each other's blocks.
    """
    _make(path, 0o700)
    status = _directory(path)
    if status.st_uid != os.geteuid():
        raise UnsafeError(
            f"{path} belongs to user id {status.st_uid}, not {os.geteuid()}: choose a directory "
            "below it, which the server makes"
        )
    forbidden = 0o077 if is_private else stat.S_IRWXO | stat.S_IWGRP
    if status.st_mode & forbidden:
        who = "its group or others" if is_private else "others"
        raise UnsafeError(
            f"{path} is open to {who} (mode {_mode(status)}), and all cached bytes with it: "
            f"chmod 700 {path}"
        )


def check_sockets(paths: Iterable[Path]) -> None:
    """Checks the paths at which the server will make its sockets. Raises UnsafeError if one of them
    has a file of another kind, or a socket of another user. Accepts missing files, and sockets of
    this user or root, which an earlier server has left."""
    for path in paths:
        _check_place(path, stat.S_ISSOCK, "socket")


def check_files(paths: Iterable[Path]) -> None:
    """Checks the paths of files that the server will read and write. Raises UnsafeError unless each
    of them is missing, or a regular file of this user or root."""
    for path in paths:
        _check_place(path, stat.S_ISREG, "regular file")


def check_private_key(path: Path) -> None:
    """Checks a file with a private key or another secret. Raises UnsafeError if users outside the
    file's group have any access to it, and OSError if the file is missing."""
    status = path.stat()
    if status.st_mode & stat.S_IRWXO:
        raise UnsafeError(
            f"{path} can be read by every user of this machine (mode {_mode(status)}): chmod "
            f"o-rwx {path}"
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


def _check_place(path: Path, is_kind: Callable[[int], bool], kind: str) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not is_kind(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
        what = (
            "a symbolic link"
            if stat.S_ISLNK(status.st_mode)
            else f"of mode {stat.filemode(status.st_mode)}"
        )
        raise UnsafeError(
            f"{path} is {what} of user id {status.st_uid}, not a {kind} of this server: look who "
            "made it, then remove it"
        )


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"


# ---------------------------------------------------------------------- Descriptors that peers send
# A descriptor that a peer sends is checked before it is mapped: it must be memory whose pages are
# always available. A file on disk, on the network or in user space (FUSE) could hang a copy thread;
# a pipe, a socket or a device is no memory at all.

MEMORY_FILE_SYSTEMS: Final = {0x01021994: "tmpfs", 0x958458F6: "hugetlbfs"}
"""File systems in memory, by their magic numbers in statfs(2)."""
STATFS_BYTES = 256
"""Size of the buffer for struct statfs, which is smaller on all architectures. The first member of
the struct is the magic number."""

_libc = ctypes.CDLL(None, use_errno=True)


def check_memory(fd: int, name: str) -> None:
    """Checks that a file descriptor is a regular file in memory: a memfd, or a file in /dev/shm or
    hugetlbfs. Otherwise raises HotKVError with the reason INVALID_LAYOUT.

    `fd`: the descriptor, which a vLLM engine has sent so that the server maps its memory.
    `name`: how the error message names the engine's memory.
    """
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
