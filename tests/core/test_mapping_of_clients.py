"""Tests how clients map files, and find which parts of the arena have memory."""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hotkv_client.arena import HUGE_PAGE_BYTES, Arena, map_file


@contextmanager
def file_of(content: bytes) -> Iterator[int]:
    fd = os.memfd_create("mapped")
    os.write(fd, content)
    yield fd
    os.close(fd)


def mapped_bytes() -> int:
    """Bytes of files of `file_of` that this process has mapped."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    ranges = [line.split()[0].split("-") for line in lines if "memfd:mapped" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


@given(st.binary(max_size=9000), st.integers(0, 9000))
def test_the_first_bytes_of_a_file(content: bytes, less: int) -> None:
    num_bytes = max(0, len(content) - less)
    with file_of(content) as fd:
        found = map_file(fd, num_bytes)
        assert found.tobytes() == content[:num_bytes] and not found.flags.writeable
        assert not num_bytes or found.ctypes.data % HUGE_PAGE_BYTES == 0


def test_who_holds_a_view_holds_the_mapping() -> None:
    with file_of(bytes(range(256)) * 64) as fd:
        view = map_file(fd, 256 * 64)[100:200]
        os.pwrite(fd, b"\xff", 150)
    assert view[50] == 255 and np.array_equal(view[:50], np.arange(100, 150))
    assert mapped_bytes() == 256 * 64
    del view
    assert not mapped_bytes()


def test_what_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    with file_of(b"short") as fd, pytest.raises(OSError, match="5 bytes, not 6"):
        map_file(fd, 6)
    assert not mapped_bytes()
    fd = os.open(tmp_path / "write-only", os.O_WRONLY | os.O_CREAT)
    os.truncate(fd, 4096)
    with pytest.raises(PermissionError):
        map_file(fd, 4096)
    os.close(fd)


def test_arena_says_which_bytes_have_memory() -> None:
    """A client must not touch bytes without memory. To look must allocate none."""
    page = mmap.PAGESIZE
    with file_of(b"") as fd:
        os.truncate(fd, 4 * page)
        arena = Arena(fd, 4 * page)
        ends = [arena.memory_end(0)]
        for number in (0, 1, 3):
            os.pwrite(fd, b"x", number * page)
            ends.append(arena.memory_end(0))
        assert ends == [0, page, 2 * page, 2 * page] and arena.memory_end(3 * page) == 4 * page
        assert os.fstat(fd).st_blocks * 512 == 3 * page, "a look allocates nothing"
    assert arena.memory_end(0) == 2 * page, "its descriptor is its own"
