"""`hotkv top` against a real server: its figures, its lines, its screen and keys."""

import dataclasses
import functools
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest
from rich.console import Console

from demo.processes import Server, runtime_folder
from hotkv_client import BlockRun, LoadEnd, RequestReport
from hotkv_client.admin import AdminClient
from hotkv_client.command import cli
from hotkv_client.command.top import live, screen
from hotkv_client.command.top.figures import Figures, Reading, figures_of, read
from tests.server.support import FULL, GroupsEngine, block_ids, hashes
from tests.support.waiting import wait_for

BLOCKS = 4
TOKENS = 16 * BLOCKS
WIDTH, HEIGHT = 140, 40


@pytest.fixture(scope="module")
def engines(server: Server) -> Iterator[list[GroupsEngine]]:
    """Two engines of two models: the second never hits."""
    made = [GroupsEngine(server.target, (FULL,), name) for name in ("alpha", "beta")]
    yield made
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with (
        runtime_folder(64 << 20) as folder,
        Server(folder, "16MiB", "--arena.slab-bytes", "64KiB") as running,
    ):
        running.wait_ready()
        yield running


def work(one: GroupsEngine, hit_tokens: int) -> None:
    """Stores a prompt's blocks, and reports a prompt that has hit so many tokens of them."""
    names = hashes(BLOCKS)
    one.store(BlockRun(0, names, block_ids(BLOCKS)))
    report = RequestReport(names, TOKENS, 0, hit_tokens, 0.0, report_id=1)
    loads = (LoadEnd(1, 0.01),) if hit_tokens else ()
    one.session.report_requests([report], 0.0, loads=loads)
    one.session.ping(10)


def readings(server: Server, engines: list[GroupsEngine]) -> tuple[Reading, Reading]:
    """Before and after a prompt on each engine."""
    with AdminClient(server.target) as admin:
        before = read(admin)
        work(engines[0], 3 * 16)
        work(engines[1], 0)
        return before, read(admin)


def test_rates_are_the_growth_between_two_readings(
    server: Server, engines: list[GroupsEngine]
) -> None:
    before, after = readings(server, engines)
    figures = figures_of(before, after)
    seconds = after.at_s - before.at_s
    assert figures.has_rates
    assert figures.hit_ratio == 3 / 8
    assert figures.prompt_tokens_per_s == pytest.approx(2 * TOKENS / seconds)
    stored = 2 * BLOCKS * FULL.slot_bytes
    assert figures.stored_bytes_per_s == pytest.approx(stored / seconds)
    by_model = {engine.model: engine for engine in figures.engines}
    assert by_model["alpha"].hit_ratio == 3 / 4 and by_model["beta"].hit_ratio == 0
    assert by_model["beta"].stored_bytes_per_s == pytest.approx(stored / 2 / seconds)
    assert sum(by_model["beta"].misses.values()) >= TOKENS
    (host,) = figures.tiers
    assert host.used_bytes == after.tiers[0]["used_byte_count"] > 0 and host.hit_ratio == 3 / 8
    json.dumps(figures.as_json())


def test_a_first_reading_and_one_of_another_process_have_no_rates(
    server: Server, engines: list[GroupsEngine]
) -> None:
    before, after = readings(server, engines)
    other = dataclasses.replace(before, info={**before.info, "pid": -1})
    # In a container the next process has the same number.
    older = dataclasses.replace(before, info={**before.info, "uptime_s": 1e6})
    for earlier in (None, other, older):
        figures = figures_of(earlier, after)
        assert not figures.has_rates and figures.hit_ratio is None
        assert figures.stored_bytes_per_s == figures.prompt_tokens_per_s == 0
        assert figures.recent_hit_ratio is not None


class Late:
    """A server that takes so long to answer, by a clock of its own."""

    def __init__(self, client: AdminClient, late_s: float) -> None:
        self.client, self.late_s, self.now_s = client, late_s, 100.0

    def info(self) -> dict[str, Any]:
        self.now_s += self.late_s
        return {**self.client.info(), "uptime_s": self.now_s}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


def test_a_late_answer_is_no_restart(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with AdminClient(server.target) as admin:
        late: Any = Late(admin, 5.0)
        clock = types.SimpleNamespace(monotonic=lambda: late.now_s)
        monkeypatch.setattr("hotkv_client.command.top.figures.time", clock)
        before = read(late)
        late.late_s = 0.0
        late.now_s += 2.0
        figures = figures_of(before, read(late))
    assert figures.has_rates


def test_what_is_wrong_is_said(server: Server, engines: list[GroupsEngine]) -> None:
    before, after = readings(server, engines)
    counters = {
        **after.info["counters"],
        "loop_lag_p99_seconds": 0.2,
        "refused_total": after.info["counters"]["refused_total"] + 3,
    }
    tier = {**after.tiers[0], "name": "disk", "activity": DOWN}
    wrong = dataclasses.replace(
        after,
        info={**after.info, "counters": counters, "state": "the disk hangs"},
        tiers=[*after.tiers, tier],
    )
    said = "\n".join(figures_of(before, wrong).warnings)
    for part in ("not serving: the disk hangs", "200 ms late", "disk: no space", "3 requests were"):
        assert part in said


DOWN: dict[str, Any] = {
    "is_up": False,
    "problem": "no space",
    "read_byte_count": 0,
    "written_byte_count": 0,
}


def top(server: Server, *flags: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "hotkv_client.command.cli",
        "--target",
        server.target,
        "top",
        *flags,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **settings)


def test_into_a_pipe_come_lines_and_json(server: Server, engines: list[GroupsEngine]) -> None:

    work(engines[1], 0)

    def work_on() -> None:
        for _ in range(20):
            work(engines[0], 16)

    working = threading.Thread(target=work_on)
    working.start()
    shown = top(server, "--interval", "0.1", "--count", "2")
    working.join()
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("hotkv-server") == 2 and "\x1b" not in shown.stdout
    assert "alpha" in shown.stdout and "host" in shown.stdout
    answer = json.loads(top(server, "--interval", "0.1", "--count", "1", "--json").stdout)
    assert [one["model"] for one in answer["engines"]] == ["alpha", "beta"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [(("--interval", "0"), "--interval 0: give 0.1"), (("--count", "-1"), "--count -1")],
)
def test_odd_flags_are_named(
    server: Server, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    assert cli.main(["--target", server.target, "top", *flags]) == 2
    assert said in capsys.readouterr().err


def test_without_a_server_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--target", "unix:/nowhere/grpc.sock", "top", "--count", "1"]) == 1
    assert "/nowhere" in capsys.readouterr().err


class Terminal:
    """`hotkv top` on a terminal of its own."""

    def __init__(self, server: Server, *flags: str) -> None:
        self.screen = pyte.Screen(WIDTH, HEIGHT)
        self._stream = pyte.ByteStream(self.screen)
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.environ.update(TERM="xterm-256color", COLUMNS=str(WIDTH), LINES=str(HEIGHT))
            arguments = ["--target", server.target, "top", "--interval", "0.2", *flags]
            os.execv(sys.executable, [sys.executable, "-m", "hotkv_client.command.cli", *arguments])

    def press(self, sent: str) -> None:
        os.write(self._fd, sent.encode())

    def shows(self, text: str) -> bool:
        """Returns whether the text is on the screen, after what has come."""
        while select.select([self._fd], [], [], 0.05)[0]:
            try:
                self._stream.feed(os.read(self._fd, 1 << 16))
            except OSError:
                break
        return text in "\n".join(self.screen.display)

    def said_nothing_wrong(self) -> bool:
        return "Traceback" not in "\n".join(self.screen.display)

    def takes_keys(self) -> bool:
        """Returns whether it has the keys as they come: nothing is echoed any more."""
        return not termios.tcgetattr(self._fd)[3] & termios.ECHO

    def end(self) -> int:
        """Its exit status."""
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            self.shows("")
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self._fd)
                return os.waitstatus_to_exitcode(status)
        raise AssertionError("it did not end")


def test_the_screen_and_its_keys(server: Server, engines: list[GroupsEngine]) -> None:
    work(engines[0], 16)
    terminal = Terminal(server)
    wait_for(lambda: terminal.shows("beta"))
    assert terminal.shows("alpha") and terminal.shows("tokens/s") and terminal.shows("by loaded")
    terminal.press("s")
    wait_for(lambda: terminal.shows("by stored"))
    # Down to the second engine, and into it: the first is no longer there.
    terminal.press("\x1b[B\r")
    wait_for(lambda: terminal.shows("missed, 10 min"))
    assert terminal.shows("engine ") and not (terminal.shows("alpha") and terminal.shows("beta"))
    terminal.press("\x1b")
    wait_for(lambda: terminal.shows("alpha") and terminal.shows("beta"))
    terminal.press("p")
    wait_for(lambda: terminal.shows("PAUSED"))
    terminal.press("p+")
    wait_for(lambda: terminal.shows("every 0.4 s") or terminal.shows("every 0.5 s"))
    terminal.press("q")
    assert terminal.end() == 0


def test_the_screen_goes_on_when_the_server_is_gone_and_comes_back(tmp_path: Any) -> None:
    flags = ("--arena.slab-bytes", "64KiB")
    with runtime_folder(64 << 20) as folder:
        with Server(folder, "16MiB", *flags) as first:
            first.wait_ready()
            terminal = Terminal(first)
            wait_for(lambda: terminal.shows("no engine is connected"))
            os.kill(first.pid, signal.SIGKILL)
            wait_for(lambda: terminal.shows("! "))
        with Server(folder, "16MiB", *flags) as second:
            second.wait_ready()
            wait_for(lambda: terminal.shows("ready") and not terminal.shows("! "))
            terminal.press("q")
            assert terminal.end() == 0


def test_keys_work_while_the_server_hangs(tmp_path: Path) -> None:
    """Whatever it waits for: its time-out is longer than the test waits."""
    hanging = ("--timeout-s", "300")
    with (
        runtime_folder(64 << 20) as folder,
        Server(folder, "16MiB", "--arena.slab-bytes", "64KiB") as own,
    ):
        own.wait_ready()
        terminal = Terminal(own, *hanging)
        wait_for(lambda: terminal.shows("by loaded"))
        os.kill(own.pid, signal.SIGSTOP)
        try:
            for word in ("by stored", "by hits"):
                terminal.press("s")
                wait_for(functools.partial(terminal.shows, word))
            terminal.press("q")
            assert terminal.end() == 0 and terminal.said_nothing_wrong()
            for key in ("q", "\x03"):
                late = Terminal(own, *hanging)
                wait_for(late.takes_keys)
                late.press(key)
                assert late.end() == 0 and late.said_nothing_wrong()
        finally:
            os.kill(own.pid, signal.SIGCONT)


def screen_of(figures: Figures, view: screen.View, height: int) -> list[str]:
    drawn = io.StringIO()
    console = Console(file=drawn, width=WIDTH, height=height)
    console.print(screen.draw(figures, view, console))
    return drawn.getvalue().splitlines()


@pytest.mark.parametrize(
    ("selects_per_s", "height"),
    [(5.0, 24), pytest.param(0.0, 8, marks=pytest.mark.long)],
)
def test_every_engine_can_be_scrolled_to(
    server: Server, engines: list[GroupsEngine], height: int, selects_per_s: float
) -> None:
    figures = figures_of(None, readings(server, engines)[1])
    one = dataclasses.replace(figures.engines[0], selects_per_s=selects_per_s)
    many = [dataclasses.replace(one, name=f"engine-{i:02d}") for i in range(60)]
    # What a busy machine is warned of takes lines, too.
    figures = dataclasses.replace(figures, engines=many, warnings=[])
    view = screen.View(2.0, sort="name")
    for _ in range(2):
        for at in range(60):
            lines = screen_of(figures, view, height)
            assert len([line for line in lines if f"engine-{at:02d} " in line]) == 1 + (
                selects_per_s > 0
            )
            assert "q quit" in lines[-1] and " of 60" in lines[-1]
            assert len(lines) <= max(height, 11 + 3 * (selects_per_s > 0))
            view.press("down", many)
        view.press("enter", many)
        assert len(screen_of(figures, view, 24)) <= 24
        view.chosen, view.inside = "", False


def test_names_of_engines_are_no_markup(server: Server, engines: list[GroupsEngine]) -> None:
    figures = figures_of(None, readings(server, engines)[1])
    odd = dataclasses.replace(figures.engines[0], name="pod[/gpu]", model="[red]")
    view = screen.View(2.0, chosen=odd.name, inside=True, hit_ratios=[-2.0, None, 0.5, 7.0])
    shown = "\n".join(screen_of(dataclasses.replace(figures, engines=[odd]), view, HEIGHT))
    assert "pod[/gpu]" in shown and "[red]" in shown
    for key in "+-" * 20:
        view.press(key, figures.engines)
    assert 0.1 <= view.interval_s <= 3600


def test_keys_are_named_and_odd_sequences_passed_over() -> None:
    assert live.named_keys("s\x1b[A\x1b[Bq") == ["s", "up", "down", "q"]
    assert live.named_keys("\x1b") == ["escape"] and live.named_keys("\r\n") == ["enter", "enter"]
    assert live.named_keys("\x1b[Zq") == ["q"] and live.named_keys("") == []


def test_a_terminal_that_is_gone_ends_it() -> None:
    reads, writes = os.pipe()
    os.write(writes, b"s")
    assert live.pressed_keys(reads, 1) == ["s"] and live.pressed_keys(reads, 0) == []
    os.close(writes)
    assert live.pressed_keys(reads, 1) == ["q"]
    os.close(reads)
