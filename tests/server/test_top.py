"""Tests `hotkv top` against a real server."""

import contextlib
import dataclasses
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator

import pyte
import pytest
from rich.console import Console

from demo.processes import Server, runtime_folder
from hotkv_client.admin import AdminClient
from hotkv_client.command.top import live, screen
from hotkv_client.command.top.figures import (
    Figures,
    Reading,
    Weights,
    figures_of,
    read,
)
from tests.server.commands import HOTKV
from tests.server.page_support import BLOCK_TOKENS, Traffic
from tests.support.waiting import stop, wait_for

BLOCKS, BLOCK_BYTES, SWAPPED_BYTES = 4, 8192, 4096
TOKENS = BLOCK_TOKENS * BLOCKS + 3
WIDTH, HEIGHT = 140, 40


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with runtime_folder(64 << 20) as folder, Server(folder, "16MiB") as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def readings(server: Server) -> Iterator[tuple[Reading, Reading]]:
    """Readings before and after two prompts, of which one hits."""
    with contextlib.ExitStack() as stack:
        engines = [Traffic(server.target, name, f"{name}-engine") for name in ("alpha", "beta")]
        layer = {"selects": 4, "swap_bytes": SWAPPED_BYTES}
        for one in engines:
            stack.callback(one.close)
            one.engine.session.report_sparse({}, {3: layer})
            one.prompt(BLOCKS, loads=0, device=0)
        admin = stack.enter_context(AdminClient(server.target))
        before = read(admin)
        engines[0].engine.session.report_sparse({}, {3: layer})
        engines[0].prompt(BLOCKS, loads=3, device=0)
        engines[1].prompt(BLOCKS, loads=0, device=0)
        yield before, read(admin)


def test_rates_are_the_growth_between_two_readings(readings: tuple[Reading, Reading]) -> None:
    before, after = readings
    figures = figures_of(before, after)
    seconds, stored, hits = after.at_s - before.at_s, 2 * BLOCKS * BLOCK_BYTES, 3 * BLOCK_TOKENS
    assert figures.has_rates
    assert figures.hit_ratio == hits / (2 * TOKENS)
    assert figures.prompt_tokens_per_s == pytest.approx(2 * TOKENS / seconds)
    assert figures.stored_bytes_per_s == pytest.approx(stored / seconds)
    by_model = {engine.model: engine for engine in figures.engines}
    assert by_model["alpha"].hit_ratio == hits / TOKENS and by_model["beta"].hit_ratio == 0
    assert by_model["beta"].stored_bytes_per_s == pytest.approx(stored / 2 / seconds)
    assert by_model["alpha"].loaded_bytes_per_s == pytest.approx(3 * BLOCK_BYTES / seconds)
    missed = list(by_model["beta"].misses.values())
    assert sum(missed) >= TOKENS and missed == sorted(missed, reverse=True) != missed[::-1]
    swapped = [by_model[name].swap_bytes_per_s for name in ("alpha", "beta")]
    assert swapped == pytest.approx([SWAPPED_BYTES / seconds, 0])
    (host,) = figures.tiers
    assert host.used_bytes == after.tiers[0]["used_byte_count"] > 0
    assert host.hit_ratio == figures.hit_ratio
    rows = [{**row, "hits": {"host": TOKENS}} for row in before.ledger["rows"]]
    failed = dataclasses.replace(before, ledger={**before.ledger, "rows": rows})
    figures = figures_of(failed, after)
    assert figures.hit_ratio == figures.tiers[0].hit_ratio == 0, "a load failed, its hit is undone"


def test_first_reading_has_no_rates(
    readings: tuple[Reading, Reading],
) -> None:
    before, after = readings
    other = dataclasses.replace(before, info={**before.info, "pid": -1})
    # In a container, a restarted server may have the same pid.
    older = dataclasses.replace(before, info={**before.info, "uptime_s": 1e6})
    for earlier in (None, other, older):
        figures = figures_of(earlier, after)
        assert not figures.has_rates and figures.hit_ratio is None
        assert figures.stored_bytes_per_s == figures.prompt_tokens_per_s == 0
        assert figures.recent_hit_ratio is not None


def test_what_is_wrong_is_said(readings: tuple[Reading, Reading]) -> None:
    before, after = readings
    counters = {**after.info["counters"], "loop_lag_p99_seconds": 0.3}
    counters["refused_total"] += 3
    info = {**after.info, "counters": counters, "state": "the disk hangs"}
    activity = {"is_up": False, "problem": "full", "read_byte_count": 0, "written_byte_count": 0}
    tiers = [*after.tiers, {**after.tiers[0], "name": "disk", "activity": activity}]
    wrong = figures_of(before, dataclasses.replace(after, info=info, tiers=tiers))
    said = "\n".join(wrong.warnings)
    assert wrong.tiers[1].hit_ratio == 0 and "loads failed" not in said
    for part in ("not serving: the disk hangs", "300 ms late", "disk: full", "3 requests were"):
        assert part in said


@pytest.mark.usefixtures("readings")
def test_into_a_pipe_come_lines_and_json(server: Server) -> None:
    def top(*flags: str) -> str:
        command = [*HOTKV, "--target", server.target]
        command += ["top", "--interval", "0.1", *flags]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    shown = top("--count", "2")
    assert shown.count("hotkv-server") == 2 and "\x1b" not in shown
    assert "alpha" in shown and "host" in shown and "16.0 MiB" in shown
    answer = json.loads(top("--count", "1", "--json"))
    assert [one["model"] for one in answer["engines"]] == ["alpha", "beta"]


class Terminal:
    """`hotkv top` on a pseudo-terminal, and its screen."""

    def __init__(
        self,
        server: Server,
        *flags: str,
        width: int = WIDTH,
        height: int = HEIGHT,
        term: str = "xterm-256color",
    ) -> None:
        self.screen = pyte.Screen(width, height)
        self.printed = b""
        self._stream = pyte.ByteStream(self.screen)
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.environ.update(TERM=term, COLUMNS=str(width), LINES=str(height))
            arguments = ["--target", server.target, "top", "--interval", "0.2", *flags]
            os.execv(sys.executable, [*HOTKV, *arguments])

    def press(self, sent: str) -> None:
        os.write(self._fd, sent.encode())

    def shows(self, text: str) -> bool:
        """Reads a few frames at most: on a busy machine there may always be a next one."""
        for _ in range(10):
            if not select.select([self._fd], [], [], 0.05)[0]:
                break
            try:
                part = os.read(self._fd, 1 << 16)
            except OSError:
                break
            self.printed += part
            self._stream.feed(part)
        return text in "\n".join(self.screen.display)

    def wait(self, *texts: str) -> None:
        wait_for(lambda: all(map(self.shows, texts)), str(texts))

    def takes_keys(self) -> bool:
        """Without echo, the process reads each key at once."""
        return not termios.tcgetattr(self._fd)[3] & termios.ECHO

    def ended(self) -> bool:
        self.shows("")
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            assert os.waitstatus_to_exitcode(status) == 0 and not self.shows("Traceback")
            os.close(self._fd)
        return bool(pid)

    def end(self, key: str = "q") -> None:
        self.press(key)
        wait_for(self.ended)


@pytest.mark.usefixtures("readings")
def test_the_screen_and_its_keys(server: Server) -> None:
    terminal = Terminal(server)
    terminal.wait("alpha", "beta", "tokens/s", "by loaded", "model  ")
    terminal.press("s")
    terminal.wait("by stored")
    # Arrow down and Enter show only the second model's engine.
    terminal.press("\x1b[B\r")
    terminal.wait("missed, 10 min", "engine ")
    assert not (terminal.shows("alpha") and terminal.shows("beta"))
    terminal.press("\x1b")
    terminal.wait("alpha", "beta")
    terminal.press("p")
    terminal.wait("PAUSED")
    terminal.press("p+")
    terminal.wait("every 0.4 s")
    terminal.press("?")
    terminal.wait("choose a row", "in reach")
    terminal.end()


@pytest.mark.usefixtures("readings")
def test_a_terminal_without_a_cursor_shows_lines(server: Server) -> None:
    """Editors' shells and build logs are such terminals."""
    terminal = Terminal(server, "--count", "0", term="dumb")
    terminal.wait("hotkv-server", "alpha")
    terminal.end("\x03")
    assert b"\x1b" not in terminal.printed


def test_screen_survives_its_servers_hang_and_death() -> None:
    """Even if answers may take 300 s, keys work."""
    with runtime_folder(64 << 20) as folder:
        with Server(folder, "16MiB") as first:
            first.wait_ready()
            terminal, hanging = Terminal(first), Terminal(first, "--timeout-s", "300")
            terminal.wait("no engine is connected")
            hanging.wait("by loaded")
            stop(first.pid)
            for word in ("by stored", "by hits"):
                hanging.press("s")
                hanging.wait(word)
            hanging.end()
            for key in ("q", "\x03"):
                late = Terminal(first, "--timeout-s", "300")
                wait_for(late.takes_keys)
                late.end(key)
            os.kill(first.pid, signal.SIGKILL)
            terminal.wait("! ")
        with Server(folder, "16MiB") as second:
            second.wait_ready()
            wait_for(lambda: terminal.shows("ready") and not terminal.shows("! "))
            terminal.end()


def screen_of(figures: Figures, view: screen.View, height: int, width: int = WIDTH) -> list[str]:
    drawn = io.StringIO()
    console = Console(file=drawn, width=width, height=height)
    console.print(screen.draw(figures, view, console))
    return drawn.getvalue().splitlines()


@pytest.mark.parametrize(
    ("selects_per_s", "height"),
    [(5.0, 24), pytest.param(0.0, 8, marks=pytest.mark.long)],
)
def test_every_engine_can_be_scrolled_to(
    readings: tuple[Reading, Reading], height: int, selects_per_s: float
) -> None:
    figures = figures_of(None, readings[1])
    one = dataclasses.replace(figures.engines[0], selects_per_s=selects_per_s)
    # Square brackets must not be markup.
    one = dataclasses.replace(one, model="[red]")
    many = [
        dataclasses.replace(one, engine_id=f"id-{i}", name=f"pod[/gpu]-{i:02d}") for i in range(60)
    ]
    # Warnings of a busy machine would take lines.
    figures = dataclasses.replace(figures, engines=many, warnings=[])
    view = screen.View(2.0, sort="name", rows="engine", hit_ratios=[-2.0, None, 0.5, 7.0])
    decides = selects_per_s > 0
    for _ in range(2):
        for at in range(60):
            lines = screen_of(figures, view, height)
            named = [line for line in lines if f"pod[/gpu]-{at:02d} " in line]
            assert len(named) == 1 + decides and "[red]" in named[0]
            for heading in (line for line in lines if "selections/s" in line):
                assert named[1][heading.index("/s") + 1] != " ", "figures end below each other"
            assert "q quit" in lines[-1] and " of 60" in lines[-1]
            assert len(lines) <= max(height, 12 + 3 * decides)
            view.press("down", many)
        view.press("enter", many)
        assert len(screen_of(figures, view, 24)) <= 24
        view.chosen, view.inside = "", False
    for key, bound_s in (("-", 0.1), ("+", 3600)):
        for _ in range(20):
            view.press(key, many)
        assert view.interval_s == bound_s


def busy(readings: tuple[Reading, Reading]) -> Figures:
    """Three engines of two models, with the widest numbers."""
    figures = figures_of(None, readings[1])
    most = {
        "prompt_tokens_per_s": 9_999_999.0, "hit_ratio": 1.0, "recent_hit_ratio": 1.0,
        "loaded_bytes_per_s": 1023.9 * (1 << 30), "stored_bytes_per_s": 1023.9 * (1 << 30),
    }  # fmt: skip
    weights = Weights(1.0, 1.0, 0.0)
    names = [("one", "deepseek-v3-7d9f5c-x2x4b", "deepseek-ai/DeepSeek-V3-0324-and-a-long-tail")]
    names += [(f"two-{n}", f"llama-{n}", "meta-llama/Llama-3.1-8B-Instruct") for n in range(2)]
    engines = [
        dataclasses.replace(
            figures.engines[0], engine_id=key, name=name, model=model, weights=weights, **most
        )
        for key, name, model in names
    ]
    tier = dataclasses.replace(
        figures.tiers[0], used_bytes=1023 << 30, capacity_bytes=1023 << 30, hit_ratio=1.0,
        read_bytes_per_s=1023.9 * (1 << 30), written_bytes_per_s=1023.9 * (1 << 30),
    )  # fmt: skip
    tiers = [dataclasses.replace(tier, name=name) for name in ("host", "disk", "mooncake-store")]
    return dataclasses.replace(
        figures, engines=engines, tiers=tiers, warnings=["a disk is full"], state="ready",
        uptime_s=999 * 3600.0, lag_p99_s=0.0125, ceiling_ratio=1.0, saved_s=599.0, waited_s=59.0,
        **most,
    )  # fmt: skip


@pytest.mark.parametrize("rows", ["model", "engine"])
@pytest.mark.parametrize("width", [80, 110, 140])
def test_the_widest_figures_fit_80_columns_and_more(
    readings: tuple[Reading, Reading], rows: str, width: int
) -> None:
    view = screen.View(2.0, rows=rows, hit_ratios=[0.5] * screen.MAX_HISTORY)
    lines = screen_of(busy(readings), view, 24, width)
    assert len(lines) <= 24 and max(map(len, lines)) <= width
    # Bars, figures and the ends of names must be complete.
    rates = {"9,999,999": "1023.9 GiB", "19,999,998": "2.0 TiB"}
    many = [line for line in lines if line.count("100%") == 2]
    assert len(many) == (2 if rows == "model" else 3)
    for line in many:
        (tokens,) = (word for word in line.split() if word in rates)
        assert screen.FULL * 10 in line and line.count(rates[tokens]) == 2
    assert any("x2x4b" in line or "and-a-long-tail" in line for line in many)
    assert sum("1023.0 GiB of 1023.0 GiB" in line for line in lines) == 3
    for problem, colour in (("", "32"), ("no answer", "31")):
        view.problem, drawn = problem, io.StringIO()
        console = Console(file=drawn, width=width, force_terminal=True, color_system="standard")
        console.print(screen.draw(busy(readings), view, console))
        assert f"\x1b[1;{colour}mready" in drawn.getvalue()


def test_rows_are_models_then_their_engines_then_one(readings: tuple[Reading, Reading]) -> None:
    figures = busy(readings)
    engines, view = figures.engines, screen.View(2.0, sort="name")
    assert [one.name[-5:] for one in view.listed(engines)] == ["-tail", "truct"]
    view.press("down", engines)
    view.press("enter", engines)
    assert [one.key for one in view.listed(engines)] == ["two-0", "two-1"] and not view.inside
    view.press("down", engines)
    view.press("enter", engines)
    assert view.inside and view.chosen == "two-1"
    view.press("escape", engines)
    assert not view.inside and view.chosen == "two-1" and len(view.listed(engines)) == 2
    view.press("escape", engines)
    assert view.chosen.startswith("meta-llama") and len(view.listed(engines)) == 2
    view.press("up", engines)
    view.press("enter", engines)
    assert view.inside and view.chosen == "one"
    view.press("escape", engines)
    assert not view.inside and not view.model
    view.press("m", engines)
    assert [one.key for one in view.listed(engines)] == ["one", "two-0", "two-1"]
    view.press("enter", engines)
    view.press("escape", engines)
    assert not view.inside and len(view.listed(engines)) == 3
    shown = "".join(screen_of(figures, dataclasses.replace(view, model="left"), HEIGHT))
    assert "no engine of left is connected" in shown
    for key in ("?", "x"):
        view.press(key, engines)
    assert not view.helps and not view.press("q", engines)


def test_the_filter_keeps_rows_with_the_typed_text(readings: tuple[Reading, Reading]) -> None:
    figures = busy(readings)
    view = screen.View(2.0, rows="engine")
    for key in ("/", "L", "k", "backspace", "L", "a", "up", "q"):
        assert view.press(key, figures.engines), "q is typed"
    assert view.filter == "LLaq" and screen_of(figures, view, 24)[-1].startswith("/LLaq")
    assert any("no engine fits /LLaq" in line for line in screen_of(figures, view, 24))
    view.press("backspace", figures.engines)
    view.press("enter", figures.engines)
    assert [one.name for one in view.listed(figures.engines)] == ["llama-0", "llama-1"]
    view.press("m", figures.engines)
    (model,) = view.listed(figures.engines)
    assert model.name.endswith("Llama-3.1-8B-Instruct"), "the engine's or the model's name"
    assert "/LLa" in screen_of(figures, view, 24)[-1]
    view.press("escape", figures.engines)
    assert len(view.listed(figures.engines)) == 2 and not view.filter
    view.press("/", figures.engines)
    view.press("x", figures.engines)
    view.press("escape", figures.engines)
    assert not view.typing and not view.filter
    view.press("/", figures.engines)
    assert not view.press("ctrl-c", figures.engines)


def test_bars_and_names() -> None:
    assert screen.bar(0.5, 4) == "██░░" and screen.bar(None, 2) == "░░"
    assert screen.bar(1.5, 2) == "██" and screen.bar(9 / 16, 2) == "█▏"
    assert screen.shortened("abcdef", 4) == "…def" and screen.shortened("abc", 3) == "abc"


def test_keys_are_named_lost_terminal_ends() -> None:
    assert live.named_keys("s\x1b[A\x1b[Bq") == ["s", "up", "down", "q"]
    assert live.named_keys("\x1b") == ["escape"] and live.named_keys("\r\n") == ["enter", "enter"]
    assert live.named_keys("\x1b[Zq") == ["q"] and live.named_keys("") == []
    reads, writes = os.pipe()
    os.write(writes, b"s")
    assert live.pressed_keys(reads, 1) == ["s"] and live.pressed_keys(reads, 0) == []
    os.close(writes)
    assert live.pressed_keys(reads, 1) == ["q"]
    os.close(reads)
