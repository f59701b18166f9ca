"""Finds arenas that servers left in shared memory, and removes them.

Always true: while an arena's lock is held, no file in its directory is removed; else only files
of servers. Any user may be able to write to the searched folder, so links in it are not
followed.
"""

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotkv_proto.words import WORD_BYTES
from hotkv_server.memory.arena import (
    ARENA_FILE,
    FILES,
    LOCK_FILE,
    OWNER_FILE,
    STATE_FILE,
    TABLE_FILE,
    BusyError,
    remove_by_descriptor,
)

SHARED_MEMORY = Path("/dev/shm")
DEPTH = 2
"""Levels below the folder that are searched: /dev/shm/hotkv-1234, /dev/shm/mine/arena."""
MAX_OWNER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ArenaLeft:
    """name: path relative to the searched folder.
    uid: of the directory's owner.
    num_bytes: memory that the files use; arena_bytes: the arena's alone.
    is_running: None if this user may not check.
    pid, runtime_dir, version: of the last server; 0 or empty if unknown.
    idle_s: since a file last changed.
    """

    name: str
    path: Path
    uid: int
    num_bytes: int
    arena_bytes: int
    is_running: bool | None
    pid: int
    runtime_dir: str
    version: str
    idle_s: float

    @property
    def is_stale(self) -> bool:
        """True if it is certain that no server uses the arena."""
        return self.is_running is False


def write_owner(directory: Path, runtime_dir: Path, version: str) -> None:
    """Names the server that uses the arena, for people and `find`. Raises OSError."""
    scratch = directory / f"{OWNER_FILE}.new"
    scratch.write_text(
        json.dumps({"runtime_dir": str(runtime_dir), "version": version, "pid": os.getpid()})
    )
    scratch.replace(directory / OWNER_FILE)


def find(folder: Path = SHARED_MEMORY) -> list[ArenaLeft]:
    """By name, at most DEPTH levels below, without what this user can't read."""
    return sorted(_below(folder, "", DEPTH), key=lambda found: found.name)


def remove(found: ArenaLeft) -> int:
    """Bytes that are freed once no engine maps the files. Raises BusyError if a server uses the
    arena, or OSError."""
    fd = os.open(found.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        num_bytes = _allocated_bytes(fd)
        try:
            remove_by_descriptor(fd)
        except BusyError as error:
            raise BusyError(
                f"{found.path} is in use by a running server, pid {_pid(fd) or 'unknown'}: stop "
                "it first"
            ) from error
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):
        # The directory may have other files, or may have been replaced.
        found.path.rmdir()
    return num_bytes


def _below(folder: Path, prefix: str, depth: int) -> Iterator[ArenaLeft]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            name = f"{prefix}{entry.name}"
            found = _look(Path(entry.path), name)
            if found is not None:
                yield found
            elif depth > 1:
                yield from _below(Path(entry.path), f"{name}/", depth - 1)


def _look(path: Path, name: str) -> ArenaLeft | None:
    """None without an arena."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        times = [_stat(fd, file) for file in (*FILES, LOCK_FILE)]
        files = [status for status in times if status is not None]
        if _stat(fd, LOCK_FILE) is None or not any(
            _stat(fd, file) for file in (ARENA_FILE, TABLE_FILE, STATE_FILE)
        ):
            return None
        arena, owner = _stat(fd, ARENA_FILE), _owner(fd)
        return ArenaLeft(
            name,
            path,
            os.fstat(fd).st_uid,
            _allocated_bytes(fd),
            max(0, arena.st_blocks * 512 - WORD_BYTES) if arena is not None else 0,
            _is_locked(fd),
            _pid(fd),
            str(owner.get("runtime_dir", ""))[:200],
            str(owner.get("version", ""))[:40],
            max(0.0, time.time() - max(status.st_mtime for status in files)),
        )
    finally:
        os.close(fd)


def _stat(directory_fd: int, name: str) -> os.stat_result | None:
    """None if this is no regular file."""
    try:
        status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _allocated_bytes(directory_fd: int) -> int:
    found = (_stat(directory_fd, name) for name in FILES)
    return sum(status.st_blocks * 512 for status in found if status is not None)


def _read(directory_fd: int, name: str) -> bytes:
    """First MAX_OWNER_BYTES of a file; empty if it can't be read."""
    try:
        fd = os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory_fd
        )
    except OSError:
        return b""
    try:
        return os.read(fd, MAX_OWNER_BYTES)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _owner(directory_fd: int) -> dict[str, Any]:
    try:
        content = json.loads(_read(directory_fd, OWNER_FILE))
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _pid(directory_fd: int) -> int:
    text = _read(directory_fd, LOCK_FILE).strip()
    return int(text) if text.isdigit() and len(text) < 10 else 0


def _is_locked(directory_fd: int) -> bool | None:
    """None if this user may not check. Takes a shared lock for a moment; `arena.lock_file` waits
    for that."""
    try:
        fd = os.open(
            LOCK_FILE,
            os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            dir_fd=directory_fd,
        )
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(fd)
    return False
