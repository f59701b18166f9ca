"""Digests of whole files, kept on disk so that a file is read once.

Two files with equal digests are equal. A digest is the SHA-256 of the SHA-256 of each CHUNK_BYTES,
so several threads compute it. `file_digest` believes a kept digest only if all of this holds:
- path, device, inode, size, modification and change time (`ctime`, which no program can set) are
  those of the file that was read;
- the last change was RACY_S or more before the reading: the kernel notes a write through a mapping
  only once in some 30 s;
- a kernel sets the file system's change times (TIMED), not an image or a gateway to an object
  store. On others, only a digest kept after this process began is believed: the engine's own ranks
  computed it;
- nobody but this process's user could have written it.

Processes that need the same digest wait for the first. A folder that can't be used costs only
time.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

CHUNK_BYTES = 64 << 20
READ_BYTES = 4 << 20
MAX_THREADS = 8
RACY_S = 60.0
PATIENCE_S = 600.0
"""How long a process waits for another that reads the same file."""
POLL_S = 0.05
TIMED = frozenset(
    (
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs"),
        *("nfs", "nfs4", "lustre", "ceph", "gpfs"),
    )
)
MOUNTS = Path("/proc/self/mountinfo")

Stamp = tuple[str, int, int, int, int, int]
"""Path, device, inode, size in bytes, modification and change time in ns."""

_known: dict[Stamp, str] = {}
_reading = threading.Lock()


def file_digest(path: Path, folder: Path | None, began_s: float) -> str:
    """64 hexadecimal digits. Blocks while the file is read. Raises OSError, also if the file
    changes meanwhile.

    folder: keeps digests; None: only this process keeps them.
    began_s: when this process began, seconds since the epoch.
    """
    path = path.resolve(strict=True)
    with _reading:
        stamp = _stamp(path)
        if stamp not in _known:
            place = None if folder is None else _place(folder, path)
            _known[stamp] = _read(path, stamp) if place is None else _kept(place, stamp, began_s)
        return _known[stamp]


def _stamp(path: Path) -> Stamp:
    # Network file systems ask their server for a file's times when the file is opened.
    with path.open("rb") as file:
        one = os.fstat(file.fileno())
    return str(path), one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns


# ----------------------------------------------------------------------------------------- reading


def _read(path: Path, stamp: Stamp) -> str:
    size = stamp[3]
    begins = range(0, size, CHUNK_BYTES)
    with path.open("rb") as file:
        chunks = _on_threads(
            [(file.fileno(), begin, min(begin + CHUNK_BYTES, size)) for begin in begins]
        )
    if _stamp(path) != stamp:
        raise OSError(f"{path} changed while it was read")
    return hashlib.sha256(b"hotkv-file-1\0%d\0" % size + b"".join(chunks)).hexdigest()


def _on_threads(pieces: list[tuple[int, int, int]]) -> list[bytes]:
    """Digests of (descriptor, begin, end). A process that ends need not wait for daemon threads,
    as it must for `ThreadPoolExecutor`'s."""
    answers: list[Future[bytes]] = [Future() for _ in pieces]
    work = iter(list(zip(pieces, answers, strict=True)))
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                piece, answer = next(work, (None, None))
            if piece is None or answer is None:
                return
            try:
                answer.set_result(_piece_digest(*piece))
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                answer.set_exception(error)

    cores = len(os.sched_getaffinity(0))
    for _ in range(min(len(pieces), MAX_THREADS, max(1, cores // 2)) - 1):
        # Without a further thread, the others take its pieces.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=run, name="hotkv-digest", daemon=True).start()
    run()
    return [answer.result() for answer in answers]


def _piece_digest(descriptor: int, begin: int, end: int) -> bytes:
    found, buffer = hashlib.sha256(), memoryview(bytearray(min(READ_BYTES, end - begin)))
    while begin < end:
        num_bytes = os.preadv(descriptor, [buffer[: end - begin]], begin)
        if not num_bytes:
            raise OSError("a file became shorter while it was read")
        found.update(buffer[:num_bytes])
        begin += num_bytes
    return found.digest()


# ------------------------------------------------------------------------------------ kept digests


def _place(folder: Path, path: Path) -> Path | None:
    """None if the folder can't be used, or somebody else owns it or can write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        one = folder.stat(follow_symlinks=False)
    except OSError:
        return None
    if one.st_uid != os.geteuid() or one.st_mode & 0o022:
        return None
    return folder / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"


def _kept(place: Path, stamp: Stamp, began_s: float) -> str:
    is_timed = _file_system(stamp[0]) in TIMED
    with _turn(place.with_suffix(".lock")):
        found = _believed(place, stamp, began_s, is_timed)
        if found is None:
            read_s = time.time()
            found = _read(Path(stamp[0]), stamp)
            if read_s > max(stamp[4], stamp[5]) / 1e9 + RACY_S:
                _keep(place, stamp, found)
    return found


def _believed(place: Path, stamp: Stamp, began_s: float, is_timed: bool) -> str | None:
    try:
        with os.fdopen(os.open(place, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            one = os.fstat(file.fileno())
            kept = json.loads(file.read())
        if one.st_uid != os.geteuid() or one.st_mode & 0o022 or tuple(kept["stamp"]) != stamp:
            return None
        is_recent = began_s <= kept["kept_s"] <= time.time()
        return str(kept["digest"]) if is_timed or is_recent else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(place: Path, stamp: Stamp, digest: str) -> None:
    new = place.with_suffix(f".{os.getpid()}")
    text = json.dumps({"stamp": stamp, "digest": digest, "kept_s": time.time()})
    with contextlib.suppress(OSError):
        new.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(new, flags, 0o600), "w") as file:
            file.write(text)
        new.replace(place)


@contextlib.contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """One process at a time; after PATIENCE_S, or if files can't be locked, several."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield
        return
    try:
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(POLL_S)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def _file_system(path: str) -> str:
    """Type of the file system of an absolute path; empty if unknown."""
    kind, longest, sought = "", -1, os.fsencode(path)
    try:
        lines = MOUNTS.read_bytes().splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, rest = line.partition(b" - ")
        # The kernel writes a space and some other characters as octal numbers.
        point = re.sub(rb"\\([0-7]{3})", lambda found: bytes((int(found[1], 8),)), mount.split()[4])
        is_above = point == b"/" or sought == point or sought.startswith(point + b"/")
        if is_above and len(point) >= longest:
            kind, longest = rest.split()[0].decode(), len(point)
    return kind
