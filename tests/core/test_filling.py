"""Tests `Filling`, `RecordsMemory` and `ArenaPinner`: arena and block table get memory piece by
piece. If it runs short, no page without memory is touched or pinned."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.policies import POLICIES
from demo.processes import runtime_folder
from hotkv_proto import limits
from hotkv_proto.table import RECORD_WORDS, SLOT_ALIGN, TableGeometry
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import CoreConfig
from hotkv_server.device.runtime import DeviceError
from hotkv_server.memory import arena as arena_module
from hotkv_server.memory.arena import NodeMemory, RecordsMemory
from hotkv_server.memory.filling import NOTE, NOTE_MAGIC, RESERVE_BYTES, Filling, read_note
from hotkv_server.memory.mapping import COLLAPSE_BYTES, FileMapping
from hotkv_server.memory.pinning import ArenaPinner, refusal
from hotkv_server.node.persistence import _prefault_claimed
from tests.core.support import make_table
from tests.doubles.device import FakeRuntime
from tests.support.waiting import wait_for

ARENA = 3 * COLLAPSE_BYTES + 12345
PIECES = [COLLAPSE_BYTES, 2 * COLLAPSE_BYTES, 3 * COLLAPSE_BYTES, ARENA]
DEADLINE_S = 20.0
CAPACITY = 5000


@pytest.fixture
def place() -> Iterator[Path]:
    """Only on tmpfs do files without memory behave as the arena does."""
    with runtime_folder(2 * ARENA) as folder:
        yield folder


@pytest.fixture
def arena(place: Path) -> Iterator[FileMapping]:
    made = FileMapping.create(place / "arena", ARENA, 0o600)
    yield made
    made.close()


@pytest.fixture
def filling(arena: FileMapping, place: Path) -> Iterator[Filling]:
    made = Filling(arena, place / "filled", 0)
    yield made
    made.close()


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    made = FakeRuntime(threaded=False)
    yield made
    made.close()


def allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def pinner_of(filling: Filling, arena: FileMapping, runtime: FakeRuntime) -> ArenaPinner:
    return ArenaPinner(runtime, arena.address, ARENA, COLLAPSE_BYTES, filling.settle)


def nothing(filled_bytes: int, coming_bytes: int) -> None: ...


def test_pieces_come_in_order_and_are_filled(
    filling: Filling, arena: FileMapping, place: Path
) -> None:
    told: list[tuple[int, int]] = []

    def on_filled(filled_bytes: int, coming_bytes: int) -> None:
        told.append((filled_bytes, coming_bytes))
        assert filled_bytes == filling.filled_bytes == read_note(place / "filled", arena)
        assert allocated_bytes(arena.fd) >= filled_bytes
        assert coming_bytes <= ARENA - filled_bytes

    assert filling.progress() == "bringing the arena in: 0 of 96 MiB (0%)"
    filling.fill_for(0)
    assert filling.filled_bytes == COLLAPSE_BYTES and filling.coming_bytes > 0, "one piece at least"
    filling.fill_for(0, COLLAPSE_BYTES + 1)
    assert filling.filled_bytes == 2 * COLLAPSE_BYTES, "so much at least"
    filling.start(on_filled, settles=True)
    filling.wait(ARENA)
    filling.close()
    assert [filled for filled, _ in told] == PIECES[2:] and told[-1][1] == 0
    assert filling.is_done and filling.is_alive() and filling.progress() == ""
    assert not arena.look()[1]


def test_piece_filled_before_start_sets_nothing_back(
    filling: Filling, arena: FileMapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that waits for the arena helps to fill it, and has begun first."""
    begun, go, populate = threading.Event(), threading.Event(), arena.populate
    populated: list[int] = []

    def slow(start: int, length: int) -> None:
        populated.append(start)
        if not begun.is_set():
            begun.set()
            go.wait(0.2)
        populate(start, length)

    monkeypatch.setattr(arena, "populate", slow)
    waiting = threading.Thread(target=filling.wait, args=(ARENA,))
    waiting.start()
    assert begun.wait(DEADLINE_S)
    filling.start(nothing, settles=True)
    assert filling._thread is not None
    filling._thread.join(0.2)
    go.set()
    waiting.join(DEADLINE_S)
    filling._thread.join(DEADLINE_S)
    assert not waiting.is_alive() and filling.is_done and filling.is_alive()
    assert populated[len(PIECES) :] == [0, *PIECES[:-1]]


def test_the_note_is_of_one_file(filling: Filling, arena: FileMapping, place: Path) -> None:
    note, inode = place / "filled", os.fstat(arena.fd).st_ino
    filling.fill_for(0)
    filling.close()
    assert read_note(note, arena) == COLLAPSE_BYTES
    other = FileMapping.create(place / "other", ARENA, 0o600)
    assert read_note(note, other) == 0
    other.close()
    for content, noted_bytes in (
        (b"", 0),
        (b"x", 0),
        (NOTE.pack(b"HOTKVUS1", inode, 1), 0),
        (NOTE.pack(NOTE_MAGIC, inode + 1, 1), 0),
        (NOTE.pack(NOTE_MAGIC, inode, 1 << 60), ARENA),
        (NOTE.pack(NOTE_MAGIC, inode, -1), 0),
    ):
        note.write_bytes(content)
        assert read_note(note, arena) == noted_bytes
    note.unlink()
    assert read_note(note, arena) == 0
    os.mkfifo(note)
    assert read_note(note, arena) == 0


def before_each_piece(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    bring_in_next = Filling._bring_in_next

    def acting(filling: Filling, start: int, length: int) -> None:
        act()
        bring_in_next(filling, start, length)

    monkeypatch.setattr(Filling, "_bring_in_next", acting)


def refuse_after(monkeypatch: pytest.MonkeyPatch, num_pieces: int) -> None:
    calls = iter(range(num_pieces))

    def act() -> None:
        if next(calls, None) is None:
            raise OSError(errno.EFAULT, "told to")

    before_each_piece(monkeypatch, act)


@pytest.mark.parametrize("end", PIECES[:2])
def test_short_memory_ends_filling_where_it_is(
    filling: Filling, monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    """What was filled stays, and waiting threads learn why."""

    def records() -> Iterator[int]:
        yield 1
        if end == PIECES[0]:
            raise OSError(errno.ENOSPC, "told to")

    refuse_after(monkeypatch, 2)
    told: list[tuple[int, int]] = []
    filling.fill_for(0)
    filling.start(lambda *news: told.append(news), settles=False, first=records())
    with pytest.raises(OSError, match=rf"up to {end >> 20} of 96 MiB.*told to"):
        filling.wait(ARENA)
    filling.wait(end)
    filling.close()
    assert filling.filled_bytes == end and told[-1] == (end, 0) and filling.is_alive()
    assert filling.progress() == filling.problem != ""


def test_a_start_without_memory_for_anything_fails(
    filling: Filling, arena: FileMapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    def available(num_bytes: int) -> None:
        monkeypatch.setattr(limits, "available_bytes", lambda: num_bytes)

    available(RESERVE_BYTES + COLLAPSE_BYTES - 1)
    with pytest.raises(OSError, match="95 MiB of memory are free"):
        filling.fill_for(0)
    assert allocated_bytes(arena.fd) == 0, "nothing is begun that would not fit"
    available(RESERVE_BYTES + COLLAPSE_BYTES)
    filling.fill_for(0)
    available(0)
    filling.fill_for(0)
    assert filling.filled_bytes == COLLAPSE_BYTES
    assert "only 0 MiB of memory are free" in filling.problem


FULL = """
import sys
from pathlib import Path
from hotkv_server.memory.filling import Filling
from hotkv_server.memory.mapping import FileMapping
arena = FileMapping.create(Path(sys.argv[1], "arena"), 256 << 20, 0o600)
if sys.argv[2] == "old kernel":
    def advise(advice, start, num_bytes):
        raise OSError(22, "an old kernel")
    arena._advise = advise
filling = Filling(arena, Path(sys.argv[1], "filled"), 0)
filling.fill_for(30)
print(filling.filled_bytes >> 20, filling.problem)
"""


@pytest.mark.parametrize("kernel", ["this kernel", "old kernel"])
def test_a_file_system_that_is_full_kills_nobody(tmp_path: Path, kernel: str) -> None:
    # Room for 64 MiB, and a page for the server's state.
    script = f'mount -t tmpfs -o size=65540k none {tmp_path} && exec "$0" -c "$1" {tmp_path} "$2"'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, FULL, kernel]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip("this user may mount nothing")
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.startswith("64 the arena has memory up to 64 of 256 MiB"), done.stdout


def test_only_what_has_memory_is_pinned(
    filling: Filling, arena: FileMapping, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = threading.Semaphore(0)
    before_each_piece(monkeypatch, passed.acquire)
    pinner = pinner_of(filling, arena, runtime)
    filling.start(nothing, settles=False)
    pinner.start()
    for end in PIECES:
        assert pinner.pinned_bytes <= filling.filled_bytes < end
        passed.release()
        wait_for(lambda end=end: pinner.pinned_bytes == end)  # type: ignore[misc]
    assert pinner.is_done and not pinner.error
    filling.close()
    pinner.close()


def test_pinning_ends_with_memory_and_server(
    filling: Filling,
    arena: FileMapping,
    place: Path,
    runtime: FakeRuntime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_after(monkeypatch, 1)
    pinner = pinner_of(filling, arena, runtime)
    pinner.pin_next()
    assert pinner.pinned_bytes == filling.filled_bytes == COLLAPSE_BYTES, "who waits fills"
    filling.start(nothing, settles=False)
    pinner.start()
    wait_for(lambda: "up to 32 of 96 MiB" in pinner.error)
    filling.close()
    pinner.close()
    monkeypatch.undo()
    passed = threading.Semaphore(0)
    before_each_piece(monkeypatch, passed.acquire)
    again = Filling(arena, place / "filled", COLLAPSE_BYTES)
    pinner = pinner_of(again, arena, runtime)
    again.start(nothing, settles=False)
    pinner.start()
    wait_for(lambda: pinner.pinned_bytes == COLLAPSE_BYTES)
    threading.Timer(0.1, passed.release, [len(PIECES)]).start()
    again.close()
    pinner.close()
    assert pinner.pinned_bytes == 0 and not runtime.held().get("registered", 0)


def test_waiters_for_memory_learn_of_a_stop(filling: Filling) -> None:
    go_on = threading.Event()

    def first() -> Iterator[None]:
        go_on.wait(60)
        yield

    def stop() -> None:
        wait_for(filling._stop.is_set, "it is not closed")
        go_on.set()

    filling.start(nothing, settles=False, first=first())
    threads = threading.Timer(0.1, filling.close), threading.Thread(target=stop)
    for thread in threads:
        thread.start()
    with pytest.raises(OSError, match="the server stops"):
        filling.wait(COLLAPSE_BYTES)
    for thread in threads:
        thread.join(60)
    assert not filling.filled_bytes and filling.is_alive()


def test_slabs_of_restored_blocks_are_filled_first(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie beyond the memory allocated so far, but stores may use their slabs at once."""
    slab, num_slabs = COLLAPSE_BYTES // 8, 24
    monkeypatch.setattr(arena_module, "FIRST_FILL_S", 0.0)
    monkeypatch.setattr(arena_module, "FIRST_FILL_BYTES", 0)
    memory = NodeMemory.open(place / "here", num_slabs * slab, slab, 100, 7)
    config = CoreConfig(num_slabs * slab, slab, 100, is_backed=False)
    core = CacheCore(config, make_table(100), POLICIES["lru"](100))
    core.space.grow(memory.filling.filled_bytes, 0)
    core.space.pool.claim(SLOT_ALIGN, np.array([11 * slab + SLOT_ALIGN]))
    core.space.pool.claim(2 * slab, np.array([20 * slab]))
    before_bytes = limits.allocated_bytes(place / "here" / "arena")
    _prefault_claimed(core.space.pool, memory)
    assert limits.allocated_bytes(place / "here" / "arena") == before_bytes + 3 * slab
    memory.remove()


def test_memory_that_may_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of the machine's memory and all limits of control groups."""
    own = tmp_path / "own"
    for name, path in (("CGROUPS", tmp_path), ("OWN_CGROUP", own), ("MEMINFO", tmp_path / "info")):
        monkeypatch.setattr(limits, name, path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    own.write_text("1:memory:/old\n0::/a/b\n")
    for file, content, available_bytes, machine_bytes in (
        ("a/b/memory.max", "max\n", limits.NO_LIMIT, limits.NO_LIMIT),
        ("info", "MemTotal: 100 kB\nMemAvailable:      90 kB\n", 90 << 10, 100 << 10),
        ("a/b/memory.current", "50000\n", 90 << 10, 100 << 10),
        ("a/b/memory.max", "60000\n", 10_000, 60_000),
        ("a/b/memory.stat", "anon 1\ninactive_file 3000\nactive_file 400\n", 13_400, 60_000),
        ("a/memory.max", "1000\n", 13_400, 1000),
        ("a/memory.current", "2000\n", 0, 1000),
    ):
        (tmp_path / file).write_text(content)
        assert limits.available_bytes() == available_bytes, file
        assert limits.machine_bytes() == machine_bytes, file
    own.unlink()
    assert (limits.available_bytes(), limits.machine_bytes()) == (90 << 10, 100 << 10)
    monkeypatch.setattr(limits, "SHMEM_HUGE", own)
    assert "this kernel has no" in limits.why_no_huge_pages()
    for modes, reason in (("always [deny]", "says deny"), ("[never] deny", "Linux 6.1")):
        own.write_text(modes)
        assert reason in limits.why_no_huge_pages()


# Records of the table


def test_records_come_in_pieces_buckets_at_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "FIRST_ENTRIES", 1000)
    monkeypatch.setattr(arena_module, "PIECE_ENTRIES", 2000)
    memory = NodeMemory.open(place / "eager", 1 << 20, 1 << 16, CAPACITY, 7)
    records, fd = memory.records, memory.table_file.fd
    begin = memory.table.geometry.records_offset_bytes
    for expected in (1000, 3000, CAPACITY):
        assert records.num_entries == expected
        needed = begin + expected * RECORD_WORDS * 4
        assert needed <= allocated_bytes(fd) <= needed + 4 * 4096
        assert records.is_done == (expected == CAPACITY) != memory.table_file.look()[1]
        assert next(iter(records.back_rest()), None) == (
            records.num_entries if expected < CAPACITY else None
        )
    memory.remove()
    lazy = NodeMemory.open(place / "lazy", 1 << 20, 1 << 16, CAPACITY, 7, prefault=False)
    assert lazy.records.is_done, "nothing is brought in, and nothing is held back"
    lazy.remove()


def test_memory_that_runs_short_for_records_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*args: object) -> None:
        raise OSError("short")

    with (tmp_path / "table").open("w+b") as file:
        geometry = TableGeometry.for_capacity(CAPACITY, 1, 1 << 20)
        records = RecordsMemory(file.fileno(), geometry, 0)
        records.back(10)
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(OSError, match="short"):
            next(records.back_rest())
        assert records.num_entries == 10
        records.back(5)
        assert records.num_entries == 10


# Pinning, over a device runtime without a device


PAGE, ADDRESS = 4096, 1 << 40


@given(
    num_bytes=st.integers(1, 40 * PAGE),
    piece_pages=st.integers(1, 50),
    stops_after=st.integers(0, 60),
)
@settings(max_examples=40, deadline=None)
def test_pieces_cover_the_arena_in_order(
    num_bytes: int, piece_pages: int, stops_after: int
) -> None:
    runtime, piece_bytes = FakeRuntime(threaded=False), piece_pages * PAGE
    seen: list[tuple[int, int]] = []
    pinner = ArenaPinner(runtime, ADDRESS, num_bytes, piece_bytes, lambda *one: seen.append(one))
    while not pinner.is_done and len(seen) < stops_after:
        pinner.pin_next()
        assert pinner.pinned_bytes in (len(seen) * piece_bytes, num_bytes)
    assert runtime.held().get("registered", 0) == len(seen)
    assert [start for start, _ in seen] == [i * piece_bytes for i in range(len(seen))]
    assert sum(count for _, count in seen) == pinner.pinned_bytes
    pinner.close()
    assert pinner.pinned_bytes == 0 and not runtime.held().get("registered", 0)
    assert pinner.unpinned_bytes == len(seen) * piece_bytes
    runtime.close()


def test_what_was_pinned_before_a_refusal_stays_pinned(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` unpins the others although CUDA fails to unpin one."""
    monkeypatch.setattr(limits, "memlock_bytes", lambda: 64 << 10)
    runtime.fail_call("register", 4)
    pinner = ArenaPinner(runtime, ADDRESS, 100 * PAGE, PAGE)
    pinner.start()
    wait_for(lambda: bool(pinner.error))
    assert pinner.pinned_bytes == 3 * PAGE and not pinner.is_done
    assert "told to fail" in pinner.error and "65536" in pinner.error
    runtime.fail_call("unregister", 1)
    pinner.close()
    assert pinner.pinned_bytes == 0 and runtime.held() == {"registered": 1}


@pytest.mark.parametrize(
    ("memlock_bytes", "cause", "other"),
    [((1 << 30) - 1, "memlock", "/dev/nvidia"), (1 << 30, "/dev/nvidia", "memlock")],
)
def test_a_refusal_names_its_cause(
    monkeypatch: pytest.MonkeyPatch, memlock_bytes: int, cause: str, other: str
) -> None:
    monkeypatch.setattr(limits, "memlock_bytes", lambda: memlock_bytes)
    said = refusal(DeviceError("no"), 1 << 30)
    assert cause in said and other not in said


@pytest.mark.parametrize(("address", "piece_bytes"), [(1, PAGE), (0, 0), (0, -PAGE), (0, PAGE + 1)])
def test_pieces_are_whole_pages(runtime: FakeRuntime, address: int, piece_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of"):
        ArenaPinner(runtime, address, 10 * PAGE, piece_bytes)
