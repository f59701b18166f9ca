"""Compares the disk tier's compiled reads, writes and seals with Python's."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.tiers.disk import disk_kernels
from hotkv_server.tiers.disk.slab_file import FileIO
from hotkv_server.tiers.seals import seal, secrets
from tests.tiers.disks import memory

FILE_BYTES = 5 * SLOT_ALIGN + 123
ROOM_BYTES = 4 * SLOT_ALIGN
ROWS = st.lists(
    st.tuples(st.integers(-3, FILE_BYTES + 9000), st.integers(0, ROOM_BYTES)), max_size=6
)


def sparse_file(path: Path) -> bytes:
    """With a hole, and a size that is no multiple of SLOT_ALIGN."""
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


@pytest.mark.parametrize("is_direct", [False, True])
@given(rows=ROWS)
def test_reads_give_what_the_file_has(
    tmp_path_factory: pytest.TempPathFactory, is_direct: bool, rows: list[tuple[int, int]]
) -> None:
    if is_direct:
        rows = [tuple(part // SLOT_ALIGN * SLOT_ALIGN for part in row) for row in rows]
    flags = os.O_RDONLY | (os.O_DIRECT if is_direct else 0)
    path = tmp_path_factory.mktemp("read") / "file"
    content = sparse_file(path)
    room = memory((len(rows) + 1) * ROOM_BYTES)
    addresses = int64s(room.ctypes.data + i * ROOM_BYTES for i in range(len(rows)))
    offsets, sizes = int64s(offset for offset, _ in rows), int64s(size for _, size in rows)
    results = use(path, flags, lambda fd: FileIO(fd).read_many(addresses, offsets, sizes))
    for i, (offset, size) in enumerate(rows):
        slot = room[i * ROOM_BYTES : (i + 1) * ROOM_BYTES].tobytes()
        found = content[offset : offset + size] if offset >= 0 else b""
        assert results[i] == (-errno.EINVAL if offset < 0 < size else len(found))
        assert slot == found + bytes(ROOM_BYTES - len(found))


@given(rows=ROWS)
def test_writes_put_what_memory_has(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("write") / "file"
    expected = bytearray(sparse_file(path))
    room = memory((len(rows) + 1) * ROOM_BYTES)
    room[:] = np.random.default_rng(3).integers(0, 256, len(room), np.uint8)
    addresses = int64s(room.ctypes.data + i * ROOM_BYTES for i in range(len(rows)))
    offsets, sizes = int64s(offset for offset, _ in rows), int64s(size for _, size in rows)
    results = use(path, os.O_RDWR, lambda fd: FileIO(fd).write_many(
        addresses, offsets, sizes))  # fmt: skip
    for i, (offset, size) in enumerate(rows):
        assert results[i] == (-errno.EINVAL if offset < 0 < size else size)
        if offset >= 0 and size:
            expected.extend(bytes(max(0, offset + size - len(expected))))
            expected[offset : offset + size] = room[i * ROOM_BYTES :][:size].tobytes()
    assert path.read_bytes() == expected


def test_each_block_has_its_own_errno(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = sparse_file(path)
    room = memory(3 * ROOM_BYTES)
    good = room.ctypes.data
    addresses, offsets = int64s([good, SLOT_ALIGN, good + ROOM_BYTES]), int64s([0, 0, 5])
    sizes = int64s([100, 100, 100])
    results = use(path, os.O_RDONLY, lambda fd: FileIO(fd).read_many(
        addresses, offsets, sizes))  # fmt: skip
    assert results.tolist() == [100, -errno.EFAULT, 100]
    assert room[:100].tobytes() == content[:100]
    assert room[ROOM_BYTES : ROOM_BYTES + 100].tobytes() == content[5:105]
    refused = use(path, os.O_RDONLY, lambda fd: FileIO(fd).write_many(
        addresses, offsets, sizes))  # fmt: skip
    assert refused.tolist() == [-errno.EBADF] * 3
    assert path.read_bytes() == content


INTERRUPTED = """
import ctypes, errno, sys
import llvmlite.binding as llvm
import numpy as np
from hotkv_proto.table import SLOT_ALIGN

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
from hotkv_server.tiers.disk import disk_kernels

for name in ("read_many", "write_many"):
    calls.clear()
    results = np.zeros(2, np.int64)
    getattr(disk_kernels, name)(
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
    getattr(disk_kernels, name)(3, np.array([0]), np.array([ODD]), np.array([SLOT_ALIGN]), odd)
    assert odd.tolist() == [777 if name == "read_many" else -errno.EINVAL], odd
"""


def test_kernels_go_on_after_signals_and_short_moves() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert not done.returncode, done.stderr


@given(st.lists(st.integers(241, 3 * SLOT_ALIGN), max_size=5), st.integers(0, 63), st.data())
def test_seals_are_those_of_the_package(sizes: list[int], first: int, data: st.DataObject) -> None:
    room = memory(sum(sizes) + 64)
    room[:] = np.frombuffer(np.random.default_rng(sum(sizes)).bytes(len(room)), np.uint8)
    begins = first + np.cumsum([0, *sizes])[:-1].astype(np.int64)
    keys = [data.draw(st.binary(max_size=40)) for _ in sizes]
    seals = np.zeros(len(sizes), np.uint64)
    disk_kernels.seal_many(room.ctypes.data + begins, int64s(sizes), secrets(keys), seals)
    expected = [
        seal(key, room[begin : begin + size].data)
        for key, begin, size in zip(keys, begins.tolist(), sizes, strict=True)
    ]
    assert seals.tolist() == expected
