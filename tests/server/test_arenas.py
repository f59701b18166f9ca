"""Tests `hotkv-server arenas`, which lists and removes what ended servers left."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import BlockResult
from hotkv_client.paged_engine import PagedEngine
from hotkv_server import cli
from hotkv_server.memory.arena import LOCK_FILE, BusyError, NodeMemory, lock_file
from hotkv_server.memory.left_behind import find, remove
from tests.server.places import LAYERS, PAGE_BYTES, store
from tests.server.support import hashes

MIB = 1 << 20


class Folder:
    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self._capsys = capsys
        self.said = ""

    def start(self, name: str) -> Server:
        (self.path / name).mkdir()
        server = Server(self.path / name, "16MiB")
        server.wait_ready()
        return server

    def leave(self, name: str) -> Path:
        NodeMemory.open(self.path / name, MIB, 1 << 16, 64, 7).release()
        return self.path / name

    def command(self, *flags: str) -> int:
        self._capsys.readouterr()
        status = cli.main(["arenas", "--folder", str(self.path), *flags])
        answer = self._capsys.readouterr()
        self.said = answer.out + answer.err
        return status

    def listed(self) -> dict[str, Any]:
        assert self.command("--json") == 0
        return {arena["name"]: arena for arena in json.loads(self.said)["arenas"]}


@pytest.fixture
def folder(capsys: pytest.CaptureFixture[str]) -> Iterator[Folder]:
    with runtime_folder(128 << 20) as path:
        yield Folder(path, capsys)


@pytest.mark.long
def test_running_arenas_stay_and_dead_ones_go(
    folder: Folder, engine: Callable[..., PagedEngine]
) -> None:
    with folder.start("one") as one, folder.start("two") as two:
        found = folder.listed()["one/arena"]
        assert found["is_running"] and not found["is_stale"] and found["pid"] == one.pid
        assert found["runtime_dir"] == str(one.runtime_folder) and found["version"]
        assert found["arena_bytes"] == 16 * MIB <= found["num_bytes"] < 32 * MIB
        assert folder.command("--remove", "one/arena") == 1
        assert f"in use by a running server, pid {one.pid}: stop it first" in folder.said
        os.kill(two.pid, signal.SIGKILL)
        two._child.process.wait(60)
        gone = folder.listed()["two/arena"]
        assert gone["is_stale"] and gone["pid"] == two.pid and gone["idle_s"] < 600
        assert folder.command() == 0
        rows = {line.split()[0]: line for line in folder.said.splitlines()}
        assert f"running, pid {one.pid}" in rows["one/arena"]
        assert "gone for 0h 0m" in rows["two/arena"] and "16 MiB" in rows["two/arena"]
        assert folder.command("--remove-stale") == 0 and "removed two/arena: " in folder.said
        assert [*folder.listed()] == ["one/arena"] and not (folder.path / "two" / "arena").exists()
        there = engine(one.target, layers=LAYERS, page_bytes=PAGE_BYTES)
        assert store(there, hashes(5)) == {BlockResult.STORED}
        assert folder.command("--remove-stale") == 0 and folder.said == "nothing to remove\n"
    assert folder.listed()["one/arena"]["is_stale"]
    assert folder.command("--remove", "one/arena", "--json") == 0
    assert json.loads(folder.said)["removed"][0]["num_bytes"] >= 16 * MIB
    assert folder.command() == 0 and folder.said == "no arenas\n"
    with Server(folder.path / "one", "16MiB") as again:
        again.wait_ready()
        assert again.counter("restored_blocks_total") == 0


def test_a_folder_that_is_not_there_is_named(folder: Folder) -> None:
    absent = Folder(folder.path / "absent", folder._capsys)
    for flags in ((), ("--json",), ("--remove-stale",)):
        assert absent.command(*flags) == 2
        assert absent.said == f"hotkv-server: --folder: there is no folder {absent.path}\n"


def test_arenas_of_older_servers_are_found(folder: Folder) -> None:
    """Older servers wrote fewer files. A wrong name removes nothing."""
    old, half = folder.leave("hotkv-0badc0de"), folder.leave("hotkv-half")
    (half / "arena").unlink()
    (half / LOCK_FILE).write_text("no pid")
    assert not (old / "server.json").exists()
    found = folder.listed()
    said = found["hotkv-0badc0de"]
    assert said["pid"] == os.getpid() and said["runtime_dir"] == ""
    assert found["hotkv-half"]["pid"] == 0 and found["hotkv-half"]["arena_bytes"] == 0
    assert folder.command("--remove", "hotkv-0badc0de", "--remove", "hotkv-hald") == 2
    assert "hotkv-hald" in folder.said and len(folder.listed()) == 2, "a mistake removes nothing"
    assert folder.command("--remove", "hotkv-0badc0de", "--remove", "hotkv-half") == 0
    assert list(folder.path.iterdir()) == []


def open_below(folder: Path) -> Counter[str]:
    """How often this process has each file in `folder` open."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
            found[name] += name.startswith(f"{folder}/")
    return found


def test_only_files_of_a_server_go(folder: Folder) -> None:
    arena, elsewhere = folder.leave("mine"), folder.leave("elsewhere")
    outside = folder.path / "deep" / "deeper"
    outside.mkdir(parents=True)
    shutil.move(elsewhere, outside / "arena")
    (folder.path / "link").symlink_to(outside / "arena")
    (folder.path / "links").mkdir()
    for name in ("arena", LOCK_FILE):
        (folder.path / "links" / name).symlink_to(outside / "arena" / name)
    had_open = open_below(folder.path)
    for name in ("mine/notes", "mine/calibration-00.json", f"only-a-lock/{LOCK_FILE}"):
        (folder.path / name).parent.mkdir(exist_ok=True)
        (folder.path / name).touch()
    for name in ("pipe", "odd"):
        (folder.path / name).mkdir()
        (folder.path / name / "arena").touch()
    os.mkfifo(folder.path / "pipe" / LOCK_FILE)
    (folder.path / "odd" / LOCK_FILE).touch()
    (folder.path / "odd" / "server.json").write_text('["x"]')
    # Links are not followed.
    assert [*folder.listed()] == ["mine", "odd"]
    # A link replaces the arena after `find` has found it.
    odd = next(one for one in find(folder.path) if one.name == "odd")
    odd.path.rename(folder.path / "away")
    odd.path.symlink_to(outside / "arena")
    with pytest.raises(NotADirectoryError):
        remove(odd)
    odd.path.unlink()
    (folder.path / "away").rename(odd.path)
    assert folder.command("--remove-stale") == 0
    assert [path.name for path in arena.iterdir()] == ["notes"]
    assert not (folder.path / "odd").exists()
    assert not open_below(folder.path) - had_open, "every file that was looked into is closed"
    assert (outside / "arena" / "arena").exists()
    assert (folder.path / "only-a-lock" / LOCK_FILE).exists()


def test_other_users_arenas_stay_unless_asked_for(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = folder.leave("theirs")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert folder.command("--remove-stale") == 0 and theirs.exists()
    assert f"not removed: arenas of user ids {os.getuid()}; --all-users" in folder.said
    assert folder.command("--remove-stale", "--all-users") == 0 and not theirs.exists()


def test_what_others_wrote_is_printed_harmlessly(folder: Folder) -> None:
    arena, odd = folder.leave("mine"), folder.leave(os.fsdecode(b"odd\x1b[31m\xff"))
    told = {"runtime_dir": "/run/\x1b[31m" + "x" * 300, "version": 7}
    (arena / "server.json").write_text(json.dumps(told))
    (odd / "server.json").write_text("[" * 4096)
    assert folder.command() == 0
    assert "\x1b" not in folder.said and "/run/?[31m" in folder.said
    assert "x" * 200 not in folder.said
    fd = lock_file(odd / LOCK_FILE)
    assert folder.command("--remove", odd.name) == 1 and "/odd?[31m? is in use" in folder.said
    os.close(fd)
    assert folder.command("--remove-stale") == 0 and "removed odd?[31m?: " in folder.said


def test_looking_keeps_no_server_from_starting(folder: Folder) -> None:
    directory, over = folder.leave("mine"), threading.Event()

    def look() -> None:
        while not over.is_set():
            find(folder.path)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(300):
            os.close(lock_file(directory / LOCK_FILE))
        glance = os.open(directory / LOCK_FILE, os.O_RDONLY)
        fcntl.flock(glance, fcntl.LOCK_SH)
        threading.Timer(0.3, os.close, (glance,)).start()
        fd = lock_file(directory / LOCK_FILE)
        with pytest.raises(BusyError, match=str(os.getpid())):
            lock_file(directory / LOCK_FILE)
        os.close(fd)
    finally:
        over.set()
        looking.join()
