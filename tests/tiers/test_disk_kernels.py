"""Kernels of the disk tier move bytes as their reference does, and both as a plain file would."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from hotkv.table import SLOT_ALIGN
from hotkv_server.tiers.disk import reference
from hotkv_server.tiers.disk.block_io import FileIO
from hotkv_server.tiers.seals import seal
from tests.tiers.disks import memory, moves

BOTH = pytest.mark.parametrize("name", ["kernels", "reference"])
FILE_BYTES = 5 * SLOT_ALIGN + 123
ROOM_BYTES = 4 * SLOT_ALIGN
ROWS = st.lists(
    st.tuples(st.integers(-3, FILE_BYTES + 9000), st.integers(0, ROOM_BYTES)), max_size=6
)


def sparse_file(path: Path) -> bytes:
    """Makes a file with a hole in its middle and an odd end; returns its bytes."""
    rng = np.random.default_rng(7)
    head, tail = rng.bytes(SLOT_ALIGN + 77), rng.bytes(SLOT_ALIGN + 123)
    with open(path, "wb") as file:
        file.write(head)
        file.seek(FILE_BYTES - len(tail))
        file.write(tail)
    return head + bytes(FILE_BYTES - len(head) - len(tail)) + tail


def int64s(values: Any) -> Any:
    return np.array(list(values), np.int64)


def use(path: Path, flags: int, do: Callable[[int], Any]) -> Any:
    fd = os.open(path, flags)
    try:
        return do(fd)
    finally:
        os.close(fd)


@BOTH
@given(rows=ROWS)
def test_reads_give_what_the_file_has(
    tmp_path_factory: pytest.TempPathFactory, name: str, rows: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("read") / "file"
    content = sparse_file(path)
    room = memory((len(rows) + 1) * ROOM_BYTES)
    addresses = int64s(room.ctypes.data + i * ROOM_BYTES for i in range(len(rows)))
    offsets, sizes = int64s(offset for offset, _ in rows), int64s(size for _, size in rows)
    results = use(path, os.O_RDONLY, lambda fd: FileIO(fd, moves(name)).read_many(
        addresses, offsets, sizes))  # fmt: skip
    for i, (offset, size) in enumerate(rows):
        slot = room[i * ROOM_BYTES : (i + 1) * ROOM_BYTES].tobytes()
        found = content[offset : offset + size] if offset >= 0 else b""
        assert results[i] == (-errno.EINVAL if offset < 0 < size else len(found))
        assert slot == found + bytes(ROOM_BYTES - len(found))


@BOTH
@given(rows=ROWS)
def test_writes_put_what_memory_has(
    tmp_path_factory: pytest.TempPathFactory, name: str, rows: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("write") / "file"
    expected = bytearray(sparse_file(path))
    room = memory((len(rows) + 1) * ROOM_BYTES)
    room[:] = np.random.default_rng(3).integers(0, 256, len(room), np.uint8)
    addresses = int64s(room.ctypes.data + i * ROOM_BYTES for i in range(len(rows)))
    offsets, sizes = int64s(offset for offset, _ in rows), int64s(size for _, size in rows)
    results = use(path, os.O_RDWR, lambda fd: FileIO(fd, moves(name)).write_many(
        addresses, offsets, sizes))  # fmt: skip
    for i, (offset, size) in enumerate(rows):
        assert results[i] == (-errno.EINVAL if offset < 0 < size else size)
        if offset >= 0 and size:
            expected.extend(bytes(max(0, offset + size - len(expected))))
            expected[offset : offset + size] = room[i * ROOM_BYTES :][:size].tobytes()
    assert path.read_bytes() == expected


@BOTH
def test_each_block_has_its_own_errno(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    content = sparse_file(path)
    room = memory(3 * ROOM_BYTES)
    good = room.ctypes.data
    addresses, offsets = int64s([good, SLOT_ALIGN, good + ROOM_BYTES]), int64s([0, 0, 5])
    sizes = int64s([100, 100, 100])
    results = use(path, os.O_RDONLY, lambda fd: FileIO(fd, moves(name)).read_many(
        addresses, offsets, sizes))  # fmt: skip
    assert results.tolist() == [100, -errno.EFAULT, 100]
    assert room[:100].tobytes() == content[:100]
    assert room[ROOM_BYTES : ROOM_BYTES + 100].tobytes() == content[5:105]
    refused = use(path, os.O_RDONLY, lambda fd: FileIO(fd, moves(name)).write_many(
        addresses, offsets, sizes))  # fmt: skip
    assert refused.tolist() == [-errno.EBADF] * 3
    assert path.read_bytes() == content


@BOTH
def test_a_direct_read_ends_at_the_end_of_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    content = sparse_file(path)
    room = memory(ROOM_BYTES)
    last = 4 * SLOT_ALIGN
    rows = int64s([room.ctypes.data]), int64s([last]), int64s([ROOM_BYTES])
    (result,) = use(path, os.O_RDONLY | os.O_DIRECT, lambda fd: FileIO(fd, moves(name)).read_many(
        *rows))  # fmt: skip
    assert result == FILE_BYTES - last
    assert room[:result].tobytes() == content[last:]
    askew = int64s([room.ctypes.data]), int64s([1]), int64s([100])
    (result,) = use(path, os.O_RDONLY | os.O_DIRECT, lambda fd: FileIO(fd, moves(name)).read_many(
        *askew))  # fmt: skip
    assert result == -errno.EINVAL


@BOTH
def test_a_write_that_is_cut_short_goes_on_until_the_errno(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    path.touch()
    room = memory(ROOM_BYTES)
    room[:] = 7
    io = moves(name)
    results = np.zeros(2, np.int64)
    rows = int64s([room.ctypes.data] * 2), int64s([0, 0]), int64s([2 * SLOT_ALIGN, 100])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    fd = os.open(path, os.O_RDWR)
    try:
        # A real short write: the kernel writes up to the limit, and fails what follows.
        resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT_ALIGN + 50, before[1]))
        io.write_many(fd, *rows, results)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        os.close(fd)
    assert results.tolist() == [-errno.EFBIG, 100]
    assert path.read_bytes() == bytes([7]) * (SLOT_ALIGN + 50)


def test_the_reference_goes_on_after_a_short_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    content = sparse_file(path)
    room = memory(ROOM_BYTES)
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, at, where: read(fd, [at[0][:SLOT_ALIGN]], where))
    monkeypatch.setattr(os, "pwritev", lambda fd, at, where: write(fd, [at[0][:777]], where))
    rows = int64s([room.ctypes.data]), int64s([3]), int64s([3 * SLOT_ALIGN])
    results = np.zeros(1, np.int64)
    use(path, os.O_RDONLY, lambda fd: reference.read_many(fd, *rows, results))
    assert results[0] == 3 * SLOT_ALIGN
    assert room[: 3 * SLOT_ALIGN].tobytes() == content[3 : 3 + 3 * SLOT_ALIGN]
    other = tmp_path / "other"
    other.touch()
    rows = int64s([room.ctypes.data]), int64s([0]), int64s([3 * SLOT_ALIGN])
    use(other, os.O_RDWR, lambda fd: reference.write_many(fd, *rows, results))
    assert results[0] == 3 * SLOT_ALIGN
    assert other.read_bytes() == room[: 3 * SLOT_ALIGN].tobytes()


def test_the_reference_ends_a_read_between_two_sectors(monkeypatch: pytest.MonkeyPatch) -> None:
    def move(fd: int, buffers: Any, offset: int) -> int:
        if offset:
            raise OSError(errno.EINVAL, "no multiple of a sector")
        return 777

    monkeypatch.setattr(os, "preadv", move)
    monkeypatch.setattr(os, "pwritev", move)
    room = memory(ROOM_BYTES)
    rows = int64s([room.ctypes.data]), int64s([0]), int64s([SLOT_ALIGN])
    results = np.zeros(1, np.int64)
    reference.read_many(-1, *rows, results)
    assert results[0] == 777
    reference.write_many(-1, *rows, results)
    assert results[0] == -errno.EINVAL


INTERRUPTED = """
import ctypes, errno, sys
import llvmlite.binding as llvm
import numpy as np
from hotkv.table import SLOT_ALIGN

ODD = 100 * SLOT_ALIGN
# The C library's calls, as a process sees them whose signals arrive all the time.
calls = []
@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
                  use_errno=True)
def move(fd, address, num_bytes, offset):
    calls.append((address, num_bytes, offset))
    if len(calls) % 2:
        ctypes.set_errno(errno.EINTR)
        return -1
    if offset == ODD:
        return 777
    if offset == ODD + 777:
        ctypes.set_errno(errno.EINVAL)
        return -1
    if offset >= 8 * SLOT_ALIGN:
        return 0
    return min(num_bytes, SLOT_ALIGN)

for name in ("pread", "pwrite"):
    llvm.add_symbol(name, ctypes.cast(move, ctypes.c_void_p).value)
from hotkv_server.tiers.disk import kernels

for name in ("read_many", "write_many"):
    calls.clear()
    results = np.zeros(2, np.int64)
    getattr(kernels, name)(
        3, np.array([1 << 20, 2 << 20]), np.array([0, 7 * SLOT_ALIGN]),
        np.array([3 * SLOT_ALIGN, 2 * SLOT_ALIGN]), results,
    )
    assert results.tolist() == [3 * SLOT_ALIGN, SLOT_ALIGN], results
    steps = [((1 << 20, 3, 0), i) for i in range(3)] + [((2 << 20, 2, 7), i) for i in range(2)]
    assert calls == [
        (address + i * SLOT_ALIGN, (size - i) * SLOT_ALIGN, (place + i) * SLOT_ALIGN)
        for (address, size, place), i in steps
        for _ in range(2)
    ], calls

    # The odd end of a file, beyond which some file systems refuse direct I/O.
    odd = np.zeros(1, np.int64)
    getattr(kernels, name)(3, np.array([0]), np.array([ODD]), np.array([SLOT_ALIGN]), odd)
    assert odd.tolist() == [777 if name == "read_many" else -errno.EINVAL], odd
"""


def test_kernels_go_on_after_signals_and_short_moves() -> None:
    moves("kernels")
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert not done.returncode, done.stderr


@settings(max_examples=20)
@given(rows=ROWS)
def test_kernels_and_reference_agree_on_direct_files(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("direct") / "file"
    sparse_file(path)
    offsets = int64s(offset // SLOT_ALIGN * SLOT_ALIGN for offset, _ in rows)
    sizes = int64s(size // SLOT_ALIGN * SLOT_ALIGN for _, size in rows)

    def read(name: str) -> tuple[list[int], bytes]:
        room = memory((len(rows) + 1) * ROOM_BYTES)
        addresses = int64s(room.ctypes.data + i * ROOM_BYTES for i in range(len(rows)))
        results = use(path, os.O_RDONLY | os.O_DIRECT, lambda fd: FileIO(
            fd, moves(name)).read_many(addresses, offsets, sizes))  # fmt: skip
        return results.tolist(), room.tobytes()

    assert read("kernels") == read("reference")


@BOTH
@given(st.lists(st.integers(241, 3 * SLOT_ALIGN), max_size=5), st.integers(0, 63), st.data())
def test_seals_are_those_of_the_package(
    name: str, sizes: list[int], first: int, data: st.DataObject
) -> None:
    """At any address, of any length of which the kernel knows, with any key."""
    room = memory(sum(sizes) + 64)
    room[:] = np.frombuffer(np.random.default_rng(sum(sizes)).bytes(len(room)), np.uint8)
    begins = first + np.cumsum([0, *sizes])[:-1].astype(np.int64)
    keys = [data.draw(st.binary(max_size=40)) for _ in sizes]
    seals = np.zeros(len(sizes), np.uint64)
    moves(name).seal_many(room.ctypes.data + begins, int64s(sizes), reference.secrets(keys), seals)
    expected = [
        seal(key, room[begin : begin + size].data)
        for key, begin, size in zip(keys, begins.tolist(), sizes, strict=True)
    ]
    assert seals.tolist() == expected
