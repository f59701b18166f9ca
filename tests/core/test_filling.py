"""Memory for the arena comes piece by piece: never more is reported than there is, and nothing
beyond is touched when memory runs short.
"""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from demo.processes import runtime_folder
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import POLICIES
from hotkv_server.cache.values import CoreConfig
from hotkv_server.memory import arena as arena_module
from hotkv_server.memory import limits
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.memory.filling import NOTE, NOTE_MAGIC, RESERVE_BYTES, Filling, read_note
from hotkv_server.memory.mapping import COLLAPSE_BYTES, FileMapping
from hotkv_server.memory.pinning import ArenaPinner
from hotkv_server.node.persistence import _prefault_claimed
from hotkv_server.testing.device import FakeRuntime
from tests.core.support import make_table
from tests.support.waiting import wait_for

REST = 12345
ARENA = 3 * COLLAPSE_BYTES + REST
PIECES = [COLLAPSE_BYTES, 2 * COLLAPSE_BYTES, 3 * COLLAPSE_BYTES, ARENA]
DEADLINE_S = 20.0


@pytest.fixture
def place() -> Iterator[Path]:
    """On tmpfs, where holes are what they are in service."""
    with runtime_folder(2 * ARENA) as folder:
        yield folder


@pytest.fixture
def arena(place: Path) -> Iterator[FileMapping]:
    made = FileMapping.create(place / "arena", ARENA, 0o600)
    yield made
    made.close()


def allocated_bytes(arena: FileMapping) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_pieces_come_from_the_start_and_are_there_when_they_are_told_of(
    arena: FileMapping, place: Path
) -> None:
    filling = Filling(arena, place / "filled", 0)
    told: list[tuple[int, int]] = []
    seen: list[tuple[int, int, int]] = []

    def on_filled(filled_bytes: int, coming_bytes: int) -> None:
        told.append((filled_bytes, coming_bytes))
        seen.append(
            (allocated_bytes(arena), filling.filled_bytes, read_note(place / "filled", arena))
        )

    assert filling.progress() == "bringing the arena in: 0 of 96 MiB"
    filling.fill_for(0)
    assert filling.filled_bytes == COLLAPSE_BYTES and filling.coming_bytes > 0, "one piece at least"
    filling.start(on_filled, settles=True)
    filling.wait(ARENA)
    filling.close()
    assert [filled for filled, _ in told] == PIECES[1:] and told[-1][1] == 0
    for (filled_bytes, coming_bytes), (num_allocated_bytes, known_bytes, noted_bytes) in zip(
        told, seen, strict=True
    ):
        assert (
            num_allocated_bytes >= filled_bytes == known_bytes == noted_bytes
            and coming_bytes <= ARENA - filled_bytes
        )
    assert (
        filling.is_done
        and filling.is_alive()
        and filling.progress() == ""
        and not arena.has_holes()
    )


def test_the_start_fills_so_much_at_least(arena: FileMapping, place: Path) -> None:
    filling = Filling(arena, place / "filled", 0)
    filling.fill_for(0, COLLAPSE_BYTES + 1)
    assert filling.filled_bytes == 2 * COLLAPSE_BYTES
    filling.close()


def test_a_piece_that_somebody_fills_before_the_start_sets_nothing_back(
    arena: FileMapping, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pinner waits for memory before the thread starts, and is slow with its piece."""
    filling = Filling(arena, place / "filled", 0)
    begun, go, populate = threading.Event(), threading.Event(), arena.populate

    def slow(start: int, length: int) -> None:
        if not begun.is_set():
            begun.set()
            go.wait(1.0)
        populate(start, length)

    monkeypatch.setattr(arena, "populate", slow)
    waiting = threading.Thread(target=filling.wait, args=(ARENA,))
    waiting.start()
    assert begun.wait(DEADLINE_S)
    filling.start(lambda *_: None, settles=False)
    assert filling._thread is not None
    filling._thread.join(1.0)
    go.set()
    waiting.join(DEADLINE_S)
    filling._thread.join(DEADLINE_S)
    assert not waiting.is_alive() and filling.is_done and filling.is_alive()
    filling.close()


def test_the_note_is_of_one_file(arena: FileMapping, place: Path) -> None:
    filling, note = Filling(arena, place / "filled", 0), place / "filled"
    filling.fill_for(0)
    filling.close()
    assert read_note(note, arena) == COLLAPSE_BYTES
    other = FileMapping.create(place / "other", ARENA, 0o600)
    assert read_note(note, other) == 0
    other.close()
    inode = os.fstat(arena.fd).st_ino
    for content in (
        b"",
        b"x",
        NOTE.pack(b"HOTKVUS1", inode, 1),
        NOTE.pack(NOTE_MAGIC, inode + 1, 1),
    ):
        note.write_bytes(content)
        assert read_note(note, arena) == 0
    note.write_bytes(NOTE.pack(NOTE_MAGIC, inode, 1 << 60))
    assert read_note(note, arena) == ARENA
    note.unlink()
    assert read_note(note, arena) == 0


def refuse_after(monkeypatch: pytest.MonkeyPatch, num_pieces: int) -> None:
    """Memory for so many pieces."""
    bring_in_next, calls = Filling._bring_in_next, iter(range(num_pieces))

    def short(filling: Filling, start: int, length: int) -> None:
        if next(calls, None) is None:
            raise OSError(errno.EFAULT, "told to")
        bring_in_next(filling, start, length)

    monkeypatch.setattr(Filling, "_bring_in_next", short)


def test_memory_that_runs_short_ends_it_where_it_is(
    arena: FileMapping, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_after(monkeypatch, 2)
    filling = Filling(arena, place / "filled", 0)
    told: list[tuple[int, int]] = []
    filling.fill_for(0)
    filling.start(lambda *news: told.append(news), settles=False)
    with pytest.raises(OSError, match=r"up to 64 of 96 MiB.*told to.*hotkv-server arenas"):
        filling.wait(ARENA)
    filling.wait(PIECES[1])
    filling.close()
    assert filling.filled_bytes == PIECES[1] and told[-1] == (PIECES[1], 0) and filling.is_alive()
    assert (
        filling.progress() == filling.problem
        and "lower arena.bytes, then restart" in filling.problem
    )


def test_a_start_without_memory_for_anything_fails(
    arena: FileMapping, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "available_bytes", lambda: RESERVE_BYTES + COLLAPSE_BYTES - 1)
    filling = Filling(arena, place / "filled", 0)
    with pytest.raises(OSError, match="95 MiB of memory are free"):
        filling.fill_for(0)
    assert allocated_bytes(arena) == 0, "nothing is begun that would not fit"
    monkeypatch.setattr(limits, "available_bytes", lambda: RESERVE_BYTES + COLLAPSE_BYTES)
    filling.fill_for(0)
    monkeypatch.setattr(limits, "available_bytes", lambda: 0)
    filling.fill_for(0)
    assert (
        filling.filled_bytes == COLLAPSE_BYTES
        and "only 0 MiB of memory are free" in filling.problem
    )
    filling.close()


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
    # 64 MiB, and a page for the note.
    script = f'mount -t tmpfs -o size=65540k none {tmp_path} && exec "$0" -c "$1" {tmp_path} "$2"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, sys.executable, FULL, kernel],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip("this user may mount nothing")
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.startswith("64 the arena has memory up to 64 of 256 MiB"), done.stdout


class Gate:
    """Lets pieces pass one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed = threading.Semaphore(0)
        bring_in_next = Filling._bring_in_next

        def gated(filling: Filling, start: int, length: int) -> None:
            self.passed.acquire()
            bring_in_next(filling, start, length)

        monkeypatch.setattr(Filling, "_bring_in_next", gated)


def test_only_what_has_memory_is_pinned(
    arena: FileMapping, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, runtime = Gate(monkeypatch), FakeRuntime(threaded=False)
    filling = Filling(arena, place / "filled", 0)
    pinner = ArenaPinner(runtime, arena.address, ARENA, COLLAPSE_BYTES, filling.settle)
    filling.start(lambda filled, coming: None, settles=False)
    pinner.start()
    for end in PIECES:
        assert pinner.pinned_bytes <= filling.filled_bytes < end
        gate.passed.release()
        wait_for(lambda end=end: pinner.pinned_bytes == end)  # type: ignore[misc]
    assert pinner.is_done and not pinner.error
    filling.close()
    pinner.close()
    runtime.close()


def test_pinning_ends_with_the_memory_and_with_the_server(
    arena: FileMapping, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = FakeRuntime(threaded=False)
    refuse_after(monkeypatch, 1)
    filling = Filling(arena, place / "filled", 0)
    pinner = ArenaPinner(runtime, arena.address, ARENA, COLLAPSE_BYTES, filling.settle)
    pinner.pin_next()
    assert pinner.pinned_bytes == filling.filled_bytes == COLLAPSE_BYTES, (
        "before the thread there is, who waits fills"
    )
    filling.start(lambda filled, coming: None, settles=False)
    pinner.start()
    wait_for(lambda: "up to 32 of 96 MiB" in pinner.error)
    filling.close()
    pinner.close()
    monkeypatch.undo()
    gate = Gate(monkeypatch)
    filling = Filling(arena, place / "filled", COLLAPSE_BYTES)
    pinner = ArenaPinner(runtime, arena.address, ARENA, COLLAPSE_BYTES, filling.settle)
    filling.start(lambda filled, coming: None, settles=False)
    pinner.start()
    wait_for(lambda: pinner.pinned_bytes == COLLAPSE_BYTES)
    threading.Timer(0.1, lambda: [gate.passed.release() for _ in PIECES]).start()
    filling.close()
    pinner.close()
    assert pinner.pinned_bytes == 0 and not runtime.held().get("registered", 0)
    runtime.close()


def test_slabs_in_which_blocks_came_back_are_brought_in(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie beyond what is filled if the old server brought in nothing by itself: stores may go
    on in them at once."""
    slab, num_slabs = COLLAPSE_BYTES // 8, 24
    monkeypatch.setattr(arena_module, "FIRST_FILL_S", 0.0)
    monkeypatch.setattr(arena_module, "FIRST_FILL_BYTES", 0)
    memory = NodeMemory.open(place / "here", num_slabs * slab, slab, 100, 7)
    config = CoreConfig(num_slabs * slab, slab, 100, is_backed=False)
    core = CacheCore(config, make_table(100), POLICIES["lru"](100))
    core.space.grow(memory.filling.filled_bytes, 0)
    core.space.pool.claim(SLOT_ALIGN, np.array([11 * slab + SLOT_ALIGN]))
    core.space.pool.claim(2 * slab, np.array([20 * slab]))
    before_bytes = allocated_bytes(memory.arena)
    _prefault_claimed(core.space.pool, memory)
    assert allocated_bytes(memory.arena) == before_bytes + 3 * slab
    memory.remove()


def test_memory_that_may_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, path in (
        ("CGROUPS", tmp_path),
        ("OWN_CGROUP", tmp_path / "own"),
        ("MEMINFO", tmp_path / "meminfo"),
    ):
        monkeypatch.setattr(limits, name, path)
    assert limits.available_bytes() == limits.NO_LIMIT
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:      90 kB\n")
    assert limits.available_bytes() == 90 << 10
    (tmp_path / "own").write_text("1:memory:/old\n0::/a/b\n")
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("50000\n")
    assert limits.available_bytes() == 90 << 10
    (group / "memory.max").write_text("60000\n")
    assert limits.available_bytes() == 10_000
    (group / "memory.stat").write_text("anon 1\ninactive_file 3000\nactive_file 400\n")
    assert limits.available_bytes() == 13_400
    (tmp_path / "a" / "memory.max").write_text("1000\n")
    (tmp_path / "a" / "memory.current").write_text("2000\n")
    assert limits.available_bytes() == 0
