"""Tests how commands lay out what they print."""

import contextlib
import io

import pytest

from demo.processes import Server
from hotkv_client.command import cli
from hotkv_client.command.draining import Left
from hotkv_proto import command_line
from hotkv_proto.command_line import bar, columns, counted, digits
from tests.server.commands import Run, runner

ROWS = [
    ("node", "state", "blocks"),
    ("10.0.0.1:50051", "ready", "7"),
    ("unix:/run/hotkv/of_a_long_name/grpc.sock", "nobody listens there: it has ended", "12"),
]


@pytest.mark.parametrize("width", [200, 84, 60, 50, 36, 24])
def test_no_line_is_wider_than_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "terminal_width", lambda: width)
    shown = columns(ROWS, left=(0, 1))
    assert max(map(len, shown.splitlines())) <= width
    assert "10.0" in shown and "12" in shown


def test_a_narrow_terminal_gets_a_line_for_each_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "terminal_width", lambda: 24)
    first = columns(ROWS, left=(0, 1)).split("\n\n")[0]
    assert first == "node:   10.0.0.1:50051\nstate:  ready\nblocks: 7"


def test_long_text_loses_its_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "terminal_width", lambda: 50)
    last = columns(ROWS, left=(0, 1)).splitlines()[2]
    assert last.startswith("unix:/run…") and "grpc.sock  nobody" in last


def test_prose_in_the_last_column_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "terminal_width", lambda: 30)
    rows = [("check", "what"), ("NUMA", "two nodes, between which the kernel moves pages")]
    assert columns(rows, left=(0, 1)).splitlines() == [
        "check  what",
        "NUMA   two nodes, between",
        "       which the kernel moves",
        "       pages",
    ]


def test_a_pipe_gets_whole_lines() -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert all(cell in columns(ROWS) for row in ROWS for cell in row)


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 blocks"), (1, "1 block"), (2, "2 blocks"), (1e4, "10,000 blocks")]
)
def test_a_count_has_its_plural(count: float, shown: str) -> None:
    assert counted(count, "block") == shown
    assert counted(2, "residency", "residencies") == "2 residencies"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(12345.6, "12,346"), (123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.0123, "0.0123"),
     (0.0, "0"), (1e-9, "0")],
)  # fmt: skip
def test_figures_have_no_exponent(value: float, shown: str) -> None:
    assert digits(value) == shown


@pytest.mark.parametrize(
    ("share", "shown"), [(0, "[    ]   0 %"), (0.5, "[##  ]  50 %"), (2, "[####] 100 %")]
)
def test_a_bar_has_its_percent(share: float, shown: str) -> None:
    assert bar(share, 4) == shown


def test_progress_is_shown_in_place_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (True, False):
        shown = io.StringIO()
        monkeypatch.setattr(shown, "isatty", lambda is_one=is_terminal: is_one, raising=False)
        with contextlib.redirect_stderr(shown):
            command_line.show_progress(0.5, "kernel 7")
            command_line.show_progress()
        expected = "\r\x1b[K[##########          ]  50 %  kernel 7\r\x1b[K"
        assert shown.getvalue() == (expected if is_terminal else "")


def test_a_drain_tells_the_share_of_work_that_ended(
    own_server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Run = runner(capsys, own_server.target)
    left = [Left("3 leases held", 3), Left("1 lease held", 1), None]
    told = iter(left)
    monkeypatch.setattr("hotkv_client.command.draining._live", lambda *_: next(told))
    monkeypatch.setattr("hotkv_client.command.draining.TOLD_S", 0.0)
    status, _, said = run("drain", "--wait")
    assert status == 0 and "1 lease held" in said and "%" in said


def test_watch_shows_a_command_again(
    own_server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = iter((None, None))

    def sleep(seconds: float) -> None:
        assert seconds == 7
        if next(waits, "over") == "over":
            raise KeyboardInterrupt

    monkeypatch.setattr(cli.time, "sleep", sleep)
    status, shown, _ = runner(capsys, own_server.target)("sessions", "--watch", "7")
    assert status == 0
    assert shown.count(f"every 7 s, {own_server.target}") == shown.count("session  engine") == 3
    waits = iter((None,))
    status, _, said = runner(capsys, "unix:/nowhere/grpc.sock")("status", "--watch", "7")
    assert status == 1 and said.count("there is no such socket") == 2
