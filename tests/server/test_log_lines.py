"""Tests the server's log in JSON: each line is an object, and values are fields."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from demo.processes import runtime_folder
from hotkv_server.logs import JsonLines, Pairs, asked_format, fields_of
from hotkv_vllm.link import logger

SESSION = Pairs({"session": 3, "engine": "pod 0"})


def record(text: str, *values: object) -> logging.LogRecord:
    return logging.LogRecord("hotkv_server.node", logging.INFO, "", 0, text, values, None)


@pytest.mark.parametrize(
    ("text", "values", "message", "fields"),
    [
        (
            "session opened number=%d engine=%s role=%s",
            (7, "pod 0", "rank"),
            "session opened",
            {"number": 7, "engine": "pod 0", "role": "rank"},
        ),
        ("arena filled took_s=%.1f", (0.25,), "arena filled", {"took_s": 0.2}),
        ("ready http_port=%s of=%r", ("none", None), "ready", {"http_port": "none", "of": None}),
        ("tier=%s lost blocks=%d", ("disk", 2), "tier lost", {"tier": "disk", "blocks": 2}),
        ("tier=%s answers again", ("disk",), "tier answers again", {"tier": "disk"}),
        (
            "condemned blocks=%d first=%s: bytes differ",
            (2, "ab"),
            "condemned: bytes differ",
            {"blocks": 2, "first": "ab"},
        ),
        ("starting: %s, %.0f s so far", ("the disk", 2.4), "starting: the disk, 2 s so far", {}),
        (
            "refused %s: %s",
            (SESSION, "not yours"),
            "refused: not yours",
            {"session": 3, "engine": "pod 0"},
        ),
        ("%d %% full", (3,), "3 % full", {}),
        ("no values: 5 %d", (), "no values: 5 %d", {}),
        ("one is missing %s %s", ("a",), "one is missing %s %s ('a',)", {}),
    ],
)
def test_values_of_a_line_are_fields(
    text: str, values: tuple[object, ...], message: str, fields: dict[str, Any]
) -> None:
    assert fields_of(record(text, *values)) == (message, fields)
    told = json.loads(JsonLines().format(record(text, *values)))
    assert told["message"] == message and told.items() >= fields.items()


def test_a_value_can_not_replace_a_field_of_each_line() -> None:
    told = json.loads(JsonLines().format(record("x level=%s time=%s", "loud", "late")))
    assert (told["level"], told["level_"], told["time_"]) == ("info", "loud", "late")


def test_pairs_read_as_before_in_text() -> None:
    assert str(SESSION) == "session=3 engine=pod 0"
    assert Pairs({"name": "a\nb"}, is_quoted=True) == "name='a\\nb'"


def test_lines_left_out_are_a_field() -> None:
    one = record("refused number=%d", 5)
    one.left_out = 3
    told = json.loads(JsonLines().format(one))
    assert (told["message"], told["number"], told["left_out"]) == ("refused", 5, 3)


@pytest.mark.parametrize(
    ("flags", "variable", "text", "form"),
    [
        ((), "", "", "text"),
        (("--log-format", "json"), "", "", "json"),
        (("--log-format=json",), "text", "", "json"),
        ((), "json", 'log_format = "text"', "json"),
        ((), "", "broken [\n log_format='json' # as asked", "json"),
        ((), "", '# log_format = "json"', "text"),
    ],
)
def test_the_format_is_known_of_unusable_settings(
    flags: tuple[str, ...], variable: str, text: str, form: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("HOTKV_LOG_FORMAT", raising=False)
    if variable:
        monkeypatch.setenv("HOTKV_LOG_FORMAT", variable)
    file = tmp_path / "hotkv.toml"
    assert asked_format(flags, file) in (form, "text"), "there is no file"
    file.write_text(text)
    assert asked_format(flags, file) == form


UNUSABLE = {
    "a misspelt setting": ("--arena.byts", "1"),
    "a bad value": ("--arena.bytes", "much"),
    "no such file": ("--config", "/nowhere/hotkv.toml"),
    "too large": ("--arena.bytes", "900TiB"),
    "a path that is not its own": ("--arena.dir", "/tmp"),
}
DEFECT = """
import hotkv_server.daemon
async def serve(*_, **__):
    raise RuntimeError("a defect")
hotkv_server.daemon.serve = serve
import sys
from hotkv_server.cli import main
sys.exit(main())
"""


def run_json(folder: Path, *command: str) -> tuple[int, list[dict[str, Any]]]:
    """Of a start whose log is in JSON: exit status, and all lines of standard error."""
    flags = ["--runtime-dir", str(folder / "run"), "--http.port", "-1", "--log-format", "json"]
    done = subprocess.run(
        [sys.executable, *command, *flags], capture_output=True, text=True, check=False
    )
    return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]


@pytest.mark.parametrize("what", UNUSABLE)
def test_each_line_of_a_failed_start_is_json(what: str) -> None:
    with runtime_folder(1 << 20) as folder:
        status, lines = run_json(folder, "-m", "hotkv_server.cli", "run", *UNUSABLE[what])
    assert status in (1, 2) and lines[-1]["level"] == "critical"
    assert lines[-1]["logger"] == "hotkv_server" and "=" not in lines[0]["message"]


def test_a_defect_leaves_json_too() -> None:
    with runtime_folder(1 << 20) as folder:
        status, lines = run_json(folder, "-c", DEFECT, "run")
    assert status == 1 and lines[-1]["message"] == "ends by a defect"
    assert "RuntimeError: a defect" in lines[-1]["exception"]


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.names.append(record.name)


def test_lines_of_the_client_reach_vllms_handlers() -> None:
    handler = Kept()
    logging.getLogger("vllm").addHandler(handler)
    try:
        for name in ("vllm.hotkv", "hotkv_client.life", "hotkv_sparse.cuda.mapped_arena"):
            logging.getLogger(name).warning("a line")
    finally:
        logging.getLogger("vllm").removeHandler(handler)
    assert logger.name == "vllm.hotkv" and len(handler.names) == 3
