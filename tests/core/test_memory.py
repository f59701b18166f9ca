"""Tests the files of arena, block table and state: killed starts leave usable ones, and each has
one writer at a time."""

import errno
import json
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.policies import POLICIES
from hotkv_proto import table
from hotkv_proto.keys import KeySpace
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import CoreConfig, Run
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.memory import arena as arena_module
from hotkv_server.memory import mapping as mapping_module
from hotkv_server.memory.arena import USE_FILE, USE_HEADER, USE_MAGIC, NodeMemory, _read_use
from hotkv_server.memory.left_behind import find, remove
from hotkv_server.memory.mapping import HUGE_PAGE_BYTES, FileMapping
from hotkv_server.memory.state import (
    KnownKeySpace,
    ServerState,
)
from hotkv_server.node.persistence import take_over
from tests.core.support import begin_store, make_key_space, words_of

SLAB, ARENA, CAPACITY = 1 << 16, 1 << 20, 64
KEY_SPACES = [make_key_space(name, SLOT_ALIGN, SLOT_ALIGN) for name in ("one", "two")]
TOO_MANY_SHARDS = make_key_space("of another version", SLOT_ALIGN, SLOT_ALIGN, 40)


class KilledError(BaseException):
    """Stands for a kill: `except Exception` does not catch it."""


class Start:
    """Memory and core as a server's start makes them. `take_over` restores the earlier server's
    blocks."""

    def __init__(self, folder: Path, *, prefault: bool = False) -> None:
        self.memory = NodeMemory.open(folder, ARENA, SLAB, CAPACITY, 7, prefault=prefault)
        config = CoreConfig(ARENA, SLAB, CAPACITY)
        self.core = CacheCore(config, self.memory.table, POLICIES["lru"](CAPACITY))
        self.verifier = Verifier(self.core, Region(self.memory.arena.address, ARENA, "the arena"))

    def take_over(self) -> "Start":
        take_over(self.core, self.memory, self.verifier, None)
        return self

    def store(self, key_space: KeySpace, numbers: range) -> None:
        session = self.core.open_session("e", "rank", key_space, 0.0).number
        begin_store(self.core, session, "t", "l", [Run(0, words_of(numbers))], 0, 0.0, 1.0)
        self.core.end_store(session, "t", True, 1.0)

    def found(self, key_space: KeySpace, numbers: range) -> list[bool]:
        number = self.core.catalog.register(key_space, (), 0.0)[0]
        words = self.core.space.index.find(number, 0, words_of(numbers))
        found: list[bool] = table.is_ready(words).tolist()
        return found

    def end(self) -> None:
        """Leaves the files as a kill would."""
        self.memory.release()


def leave(folder: Path, *, unfit: bool) -> None:
    """Leaves files with two key spaces. `unfit`: and an earlier one that this version refuses."""
    start = Start(folder).take_over()
    if unfit:
        start.core.catalog._check = lambda key_space, kinds: None  # type: ignore[method-assign]
        start.core.catalog.register(TOO_MANY_SHARDS, (), 0.0)
    for at, key_space in enumerate(KEY_SPACES):
        start.store(key_space, range(10 * at, 10 * at + 5))
    known = tuple(KnownKeySpace(at, one.key_space) for at, one in start.core.key_spaces.items())
    start.memory.save_state(ServerState(SLAB, known))
    start.memory.save_use(np.zeros(CAPACITY + 1))
    start.end()


OWNERS = {"write_state": arena_module, "adopt": NodeMemory, "replace": Path, "unlink": Path}


@pytest.mark.parametrize("unfit", [False, True])
@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_starts_never_mistake_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, when: str, *, unfit: bool
) -> None:
    """Two starts die before or after a call of `name`; the third finds each block in its own key
    space only. `unfit`: numbers of the others do not start at 1."""
    leave(tmp_path, unfit=unfit)
    whole: Callable[..., object] = getattr(OWNERS[name], name)

    def killed(*args: object, **options: object) -> None:
        if when == "after":
            whole(*args, **options)
        raise KilledError

    for _ in range(2):
        with monkeypatch.context() as patch:
            start = Start(tmp_path)
            patch.setattr(OWNERS[name], name, killed)
            with pytest.raises(KilledError):
                start.take_over()
            start.end()
    start = Start(tmp_path).take_over()
    for at, key_space in enumerate(KEY_SPACES):
        found = start.found(key_space, range(20))
        right = [number // 10 == at and number % 10 < 5 for number in range(20)]
        assert found == right, (
            "a block of one key space is found in another, or a whole cache was lost"
        )
    start.core.check_invariants()
    start.memory.remove()


def test_spoiled_use_times_are_silently_unknown(tmp_path: Path) -> None:
    """There must be no numpy warning, even for a signalling NaN."""
    memory = Start(tmp_path).memory
    geometry = memory.table.geometry
    bits = np.zeros(geometry.capacity + 1, "<u4")
    bits[1:5] = 0x7F80_0001, 0x7FC0_0000, 0xFF80_0000, np.float32(-2.0).view("<u4")
    header = USE_HEADER.pack(USE_MAGIC, geometry.epoch, 10.0, len(bits))
    (tmp_path / USE_FILE).write_bytes(header + bits.tobytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        used_s = _read_use(tmp_path / USE_FILE, geometry)
    assert used_s is not None
    assert np.array_equal(used_s[:5], [10.0, np.nan, np.nan, np.nan, 8.0], equal_nan=True)
    for spoiled in (
        header[:-1],
        header + bits.tobytes()[:-1],
        USE_HEADER.pack(b"HOTKVUS0", geometry.epoch, 10.0, 0),
        USE_HEADER.pack(USE_MAGIC, geometry.epoch + 1, 10.0, 0),
        USE_HEADER.pack(USE_MAGIC, geometry.epoch, 1e12, 0),
    ):
        (tmp_path / USE_FILE).write_bytes(spoiled)
        assert _read_use(tmp_path / USE_FILE, geometry) is None
    pipe(tmp_path / USE_FILE)
    assert _read_use(tmp_path / USE_FILE, geometry) is None
    memory.remove()


def edit(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**content, **changes}))


def spaces(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "state.json").read_text())["key_spaces"])


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def link(file: Path) -> None:
    file.symlink_to(file.rename(file.with_name("elsewhere")))


UNFIT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no state": (lambda f: (f / "state.json").unlink(), "No such file"),
    "cut off": (lambda f: os.truncate(f / "state.json", 99), "state.json: "),
    "format": (lambda f: edit(f, format=99), "has format 99; this version reads 1"),
    "a list": (lambda f: (f / "state.json").write_text("[]"), "has format None"),
    "lists in lists": (lambda f: (f / "state.json").write_text("[" * 100_000), "recursion"),
    "pipe": (lambda f: pipe(f / "state.json"), "state.json: it is no regular file"),
    "long": (lambda f: os.truncate(f / "state.json", 1 << 40), "more than 1073741824 bytes"),
    "no size": (lambda f: edit(f, slab_bytes=None), "is damaged: TypeError"),
    "order": (lambda f: edit(f, key_spaces=spaces(f)[::-1]), "numbered out of order"),
    "row": (lambda f: edit(f, key_spaces=[spaces(f)[0] | {"number": 1 << 13}]), "impossible"),
    "number": (lambda f: edit(f, key_spaces=[spaces(f)[0] | {"number": -1}]), "impossible"),
    "twice": (lambda f: edit(f, key_spaces=[spaces(f)[0], spaces(f)[0] | {"number": 2}]), "twice"),
    "other": (lambda f: edit(f, key_spaces=[spaces(f)[0] | {"fingerprint": ""}]), "fingerprint"),
    "slab": (lambda f: edit(f, slab_bytes=SLAB + 1), f"slabs had {SLAB + 1} bytes"),
    "arena": (lambda f: os.truncate(f / "arena", ARENA - 1), f"file has {ARENA - 1} bytes, not"),
    "table": (lambda f: (f / "table").write_bytes(b"HOTKVTB9" + bytes(99)), "HOTKVTB9"),
    "empty": (lambda f: os.truncate(f / "table", 0), "table has 0 bytes"),
    "link": (lambda f: link(f / "table"), "symbolic links"),
    "linked state": (lambda f: link(f / "state.json"), "symbolic links"),
    "owner": (lambda f: None, "belongs to uid"),
}  # fmt: skip
"""Changes to the files, and why the next server can't use them."""


@pytest.mark.parametrize("name", UNFIT)
def test_files_that_do_not_fit_are_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    leave(tmp_path, unfit=False)
    change, reason = UNFIT[name]
    change(tmp_path)
    if name == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: -7)
    start = Start(tmp_path)
    assert start.memory.leftover is None and reason in start.memory.why_empty
    assert not any(start.take_over().found(KEY_SPACES[0], range(5)))
    start.end()
    again = Start(tmp_path)
    assert again.memory.leftover is not None or name == "owner"
    again.memory.remove()


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EMFILE, errno.ENOSPC])
def test_start_short_of_something_keeps_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    leave(tmp_path, unfit=False)
    monkeypatch.setattr(arena_module, "FIRST_ENTRIES", 2)

    def refuse(*args: object) -> int:
        raise OSError(code, "short")

    calls: tuple[tuple[Any, str], ...] = (
        *((mapping_module, "_map"), (arena_module, "_open_own"), (os, "posix_fallocate")),
        (arena_module.RecordsMemory, "back"),
    )
    for owner, name in calls:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuse)
            with pytest.raises(OSError, match="short"):
                Start(tmp_path, prefault=True)
            if name != "_open_own":
                with pytest.raises(OSError, match="short"):
                    Start(tmp_path / "large", prefault=True)
        assert not (tmp_path / "table.new").exists()
        assert {path.name for path in tmp_path.glob("large/*")} <= {"lock"}
    with pytest.raises(OSError, match=r"lower arena.bytes"):
        NodeMemory.open(tmp_path / "large", 1 << 50, SLAB, CAPACITY, 7)
    assert [path.name for path in (tmp_path / "large").iterdir()] == ["lock"]
    start = Start(tmp_path, prefault=True).take_over()
    assert not (tmp_path / USE_FILE).exists(), "its times are of entries of the old table"
    assert not (tmp_path / "large").stat().st_mode & 0o027
    assert not any((tmp_path / name).stat().st_mode & 0o177 for name in ("state.json", "lock"))
    assert start.memory.records.num_entries == start.core.space.index.limit >= 5
    assert start.found(KEY_SPACES[0], range(5)) == [True] * 5
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        for write in (lambda: start.memory.save_use(np.zeros(9)), start.take_over):
            with pytest.raises(OSError, match="short"):
                write()
    assert not list(tmp_path.glob("*.new")), "what could not be written takes no room"
    (tmp_path / "table").unlink()
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        start.memory.open_for_engine()
    assert len(os.listdir("/proc/self/fd")) == num_open
    start.memory.remove()


def test_bringing_memory_in_writes_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On old kernels each page is touched. A write could undo a concurrent copy, so the array is
    read-only."""

    def regions() -> list[str]:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        return [line for line in lines if "---p" in line or str(tmp_path) in line]

    before = regions()
    mapping = FileMapping.create(tmp_path / "arena", 2 * HUGE_PAGE_BYTES + 4096, 0o600)
    view = mapping.array()
    assert len(regions()) == len(before) + 1 and mapping.address % HUGE_PAGE_BYTES == 0
    view[:] = np.arange(len(view), dtype=np.uint64).astype(np.uint8)
    view.flags.writeable = False
    monkeypatch.setattr(mapping, "array", lambda: view)

    def too_old(advice: int, start: int, num_bytes: int) -> None:
        raise OSError(errno.EINVAL, "an old kernel")

    mapping.make_huge(0, 10.0)
    monkeypatch.setattr(mapping, "_advise", too_old)
    mapping.populate()
    mapping.close()
    assert regions() == before


def test_large_memory_is_populated_and_unmapped_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that map memory, such as the event loop, must wait for each call."""
    piece_bytes, calls = mapping_module.PIECE_BYTES, dict[str, list[tuple[int, int]]]()
    mapping = FileMapping.create(tmp_path / "arena", 2 * piece_bytes + 4096, 0o600)
    libc, address = mapping_module._libc, mapping.address
    real = {"madvise": libc.madvise, "munmap": libc.munmap}

    def noted(name: str, at: int, num_bytes: int, *rest: int) -> int:
        calls.setdefault(name, []).append((at - address, num_bytes))
        return int(real[name](at, num_bytes, *rest))

    for name in real:
        monkeypatch.setattr(libc, name, partial(noted, name))
    mapping.populate()
    mapping.close()
    pieces = [(0, piece_bytes), (piece_bytes, piece_bytes), (2 * piece_bytes, 4096)]
    assert calls == {"madvise": pieces, "munmap": pieces}
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    assert not any(str(tmp_path) in line for line in lines)


@settings(max_examples=100)
@given(
    refused=st.sets(st.integers(0, 9)),
    start=st.integers(0, 4),
    end=st.integers(3, 10),
    piece=st.integers(1, 4),
    exclusive=st.booleans(),
)
def test_huge_pages_end_where_the_kernel_refuses(
    refused: set[int], start: int, end: int, piece: int, *, exclusive: bool
) -> None:
    """If a piece is refused, its pages are requested one by one. After a piece without any, no more
    is requested.

    refused: pages that the kernel refuses; also those without memory.
    start, end, piece: in huge pages.
    exclusive: nobody else uses the file. Its pages have no memory, so some of each page's is
        allocated before the request.
    """
    size = HUGE_PAGE_BYTES
    fd = os.memfd_create("huge")
    os.truncate(fd, 10 * size)
    mapping = FileMapping(fd, 10 * size, "huge", exclusive=exclusive)
    backed, made = set[int]() if exclusive else set(range(10)), set[int]()

    def advise(advice: int, at: int, num_bytes: int) -> None:
        pages = set(range(at // size, (at + num_bytes - 1) // size + 1))
        if num_bytes < size:
            assert exclusive, "a client's file"
            backed.update(pages)
        elif pages & refused or not pages <= backed - made:
            raise OSError(errno.EINVAL, "refused")
        else:
            made.update(pages)

    mapping._advise = advise  # type: ignore[method-assign]
    assert mapping.make_huge(start * size, 0.0) == start * size
    at, num_huge = start, 0
    while at < end and (good := set(range(at, min(at + piece, end))) - refused):
        at, num_huge = min(at + piece, end), num_huge + len(good)
    assert mapping.make_huge(start * size, 60.0, piece * size, end * size + 5) == at * size
    assert mapping.huge_bytes == num_huge * size == len(made) * size
    mapping.close()


def test_table_has_huge_pages_as_the_arena(tmp_path: Path) -> None:
    """With small pages, lookups in a large table took a third longer."""
    memory = NodeMemory.open(tmp_path, ARENA, SLAB, 1 << 16, 7)
    probe = FileMapping.create(tmp_path / "probe", memory.table_file.num_bytes, 0o600)
    probe.make_huge(0, 10.0)
    assert memory.table_file.num_bytes > HUGE_PAGE_BYTES
    assert bool(memory.table_file.huge_bytes) == bool(probe.huge_bytes)
    probe.close()
    memory.remove()


def test_file_without_write_access_is_refused_unmapped(tmp_path: Path) -> None:
    (tmp_path / "kv").write_bytes(bytes(8192))
    fd = os.open(tmp_path / "kv", os.O_RDONLY)
    mapped = Path("/proc/self/statm").read_text().split()[0]
    with pytest.raises(PermissionError):
        FileMapping(fd, 8192, "kv")
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    assert Path("/proc/self/statm").read_text().split()[0] == mapped
    FileMapping(os.open(tmp_path / "kv", os.O_RDWR), 8191, "kv").close()
    assert Path("/proc/self/statm").read_text().split()[0] == mapped


def test_a_mapping_is_unmapped_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may have mapped memory there since."""
    mapping = FileMapping.create(tmp_path / "arena", 8192, 0o600)
    mapping.close()
    monkeypatch.setattr("hotkv_server.memory.mapping._libc", None)
    mapping.close()


@pytest.mark.parametrize("name", ["use.new", "state.json.new", "server.json.new"])
def test_files_of_an_interrupted_write_are_removed(tmp_path: Path, name: str) -> None:
    """No other code would delete them."""
    directory = tmp_path / "arena"
    memory = NodeMemory.open(directory, ARENA, SLAB, 100, 7, prefault=False)
    (directory / name).write_bytes(bytes(1 << 20))
    memory.release()
    (found,) = find(tmp_path)
    assert found.num_bytes >= 1 << 20
    remove(found)
    assert not directory.exists()
