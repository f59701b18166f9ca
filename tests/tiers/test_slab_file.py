"""Tests the slab file: private, opened once, allocated in advance; unsuitable files are refused."""

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotkv_server.tiers.disk import slab_file
from hotkv_server.tiers.disk.slab_file import SlabFile, SlabFileError
from tests.tiers.disks import small_ext4, small_tmpfs

MIB = 1 << 20


def test_new_file_is_private_and_whole(tmp_path: Path) -> None:
    file = SlabFile.open(tmp_path / "new" / "folder", 2 * MIB)
    found = os.stat(tmp_path / "new" / "folder" / "slabs")
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new" / "folder").stat().st_mode) == 0o700
    assert found.st_size == 2 * MIB and found.st_blocks * 512 >= 2 * MIB
    assert file.is_direct and fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT
    assert not os.get_inheritable(file.fd)
    file.close()
    file.close()


def test_size_thats_no_multiple_is_an_error(tmp_path: Path) -> None:
    for num_bytes in (0, -4096, 4097):
        with pytest.raises(ValueError, match="no multiple"):
            SlabFile.open(tmp_path, num_bytes)


def test_a_second_daemon_is_told_so(tmp_path: Path) -> None:
    first = SlabFile.open(tmp_path, MIB)
    with pytest.raises(SlabFileError, match=r"in use by another hotkv-server.*tiers\.disk\.path"):
        SlabFile.open(tmp_path, 2 * MIB)
    assert (tmp_path / "slabs").stat().st_size == MIB
    first.close()
    SlabFile.open(tmp_path, MIB).close()


def of_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    path.touch(0o600)
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.symlink_to(path.with_name("elsewhere")), "can't open"),
        (lambda path: os.mkfifo(path, 0o600), "no regular file"),
        (lambda path: path.touch(0o640), "mode 0640"),
        (of_another_user, "uid 12345"),
    ],
)
def test_file_of_another_kind_is_refused_untouched(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    path = tmp_path / "slabs"
    make(path)
    before, num_fds = path.lstat(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(SlabFileError, match=reason):
        SlabFile.open(tmp_path, MIB)
    assert [*tmp_path.iterdir()] == [path] and len(os.listdir("/proc/self/fd")) == num_fds
    assert (path.lstat().st_mode, path.lstat().st_size) == (before.st_mode, before.st_size)


def test_file_system_too_small_is_not_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_tmpfs(tmp_path, 4 * MIB) as folder:
        # The second and third need no more room.
        for num_bytes in (3 * MIB, 3 * MIB, MIB):
            SlabFile.open(folder, num_bytes).close()
        monkeypatch.setattr(os, "posix_fallocate", None)
        with pytest.raises(
            SlabFileError, match=r"7 MiB more and .* 3 MiB free: lower tiers\.disk\.bytes"
        ):
            SlabFile.open(folder, 8 * MIB)
        assert (folder / "slabs").stat().st_size == MIB


def test_failed_allocation_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_ext4(tmp_path, 16 * MIB) as folder:
        SlabFile.open(folder, MIB).close()
        (folder / "slabs").write_bytes(b"k" * MIB)
        os.sync()
        before = os.statvfs(folder).f_bavail
        # As if another process took the room after the check.
        monkeypatch.setattr(slab_file, "_free_bytes", lambda fd: 1 << 40)
        with pytest.raises(SlabFileError, match=r"can't allocate 64 MiB .*tiers\.disk\.bytes"):
            SlabFile.open(folder, 64 * MIB)
        assert (folder / "slabs").read_bytes() == b"k" * MIB
        # A few blocks for the file system itself.
        assert before - os.statvfs(folder).f_bavail < 16
        SlabFile.open(folder, 2 * MIB).close()


@pytest.mark.parametrize("at_first_read", [False, True])
def test_missing_direct_io_is_used_around_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    at_first_read: bool,
) -> None:  # fmt: skip
    real = fcntl.fcntl

    def refuse(*arguments: Any) -> Any:
        if at_first_read or (len(arguments) == 3 and arguments[2] & os.O_DIRECT):
            raise OSError(errno.EINVAL, "refused")
        return real(*arguments)

    module, name = (os, "preadv") if at_first_read else (fcntl, "fcntl")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(module, name, refuse)
        file = SlabFile.open(tmp_path, MIB)
    assert not file.is_direct and not fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT
    assert "no direct I/O" in caplog.text
    file.close()


def test_unreadable_disk_is_an_unlocked_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(SlabFileError, match=r"can't read .*broken"):
            SlabFile.open(tmp_path, MIB)
    SlabFile.open(tmp_path, MIB).close()


def test_shortened_file_is_made_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "no room")

    file = SlabFile.open(tmp_path, 2 * MIB)
    assert not file.mend()
    os.truncate(tmp_path / "slabs", MIB)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        assert file.mend() and (tmp_path / "slabs").stat().st_size == MIB
    assert "no room" in caplog.text
    assert file.mend()
    assert f"was cut to {MIB} bytes" in caplog.text
    found = (tmp_path / "slabs").stat()
    assert found.st_size == 2 * MIB and found.st_blocks * 512 >= 2 * MIB
    assert not file.mend()
    file.close()
    os.truncate(tmp_path / "slabs", MIB)
    assert not file.mend()
