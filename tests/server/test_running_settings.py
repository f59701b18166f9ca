"""Tests `hotkv config`: which settings a server runs with, and where each comes from."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.processes import Server, runtime_folder
from hotkv_server.settings import load_settings, sources
from tests.server.commands import Run, runner
from tests.support.waiting import wait_for

DIGEST = "0123456789abcdef" * 4
FILE = f"""
drain_timeout_s = 3
[leases]
unadmitted_share = 0.25
[security]
admin_token_sha256 = ["{DIGEST}"]
[[security.tenants]]
name = "alpha"
token_sha256 = ["{DIGEST}"]
"""


def test_the_source_that_counts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hotkv.toml"
    file.write_text('log_level = "error"\n[arena]\nbytes = "64MiB"\nkeep = false\n')
    file.chmod(0o600)
    monkeypatch.setenv("HOTKV_ARENA", '{"bytes": "32MiB", "pin": "off"}')
    monkeypatch.setenv("HOTKV_COPY__CUDA", "off")
    made = load_settings(file, ["--arena.bytes", "16MiB", "--http.port", "0"], "test")
    assert made.arena.bytes == 16 << 20 and made.arena.pin == "off"
    told = {name: made.origin(name) for name, _ in sources.leaves(type(made))}
    assert {name: source for name, source in told.items() if source != "default"} == {
        "log_level": "file",
        "arena.bytes": "flag",
        "arena.keep": "file",
        "arena.pin": "environment",
        "copy.cuda": "environment",
        "http.port": "flag",
    }


@pytest.fixture(scope="module")
def file() -> Iterator[Path]:
    with runtime_folder(64 << 20) as folder:
        path = folder / "hotkv.toml"
        path.write_text(FILE)
        yield path


@pytest.fixture(scope="module")
def server(file: Path) -> Iterator[Server]:
    with Server(file.parent, "16MiB", "--config", str(file)) as running:
        running.wait_ready()
        yield running


@pytest.fixture
def run(server: Server, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, server.target)


def test_config_shows_values_and_their_sources(run: Run, server: Server) -> None:
    status, shown, _ = run("config", "--changed")
    rows = dict(line.split(maxsplit=1) for line in shown.splitlines() if line.strip())
    assert status == 0
    assert rows["arena.bytes"].split() == ["16.0", "MiB", "flag", "--arena.bytes"]
    assert rows["leases.unadmitted_share"].split() == ["0.25", "file"]
    assert "log_level" not in rows and "log_level" in run("config", "LOG")[1]
    told = {one["name"]: one for one in json.loads(run("config", "--json")[1])["settings"]}
    assert told["copy.threads"]["value"] > 0 and told["copy.threads"]["origin"] == "default"
    assert told["security.admin_socket"]["value"] == server.target[5:].replace("grpc", "admin")
    assert told["log_level"]["is_live"] and not told["arena.numa"]["is_live"]


def test_no_digest_of_a_token_is_told(run: Run) -> None:
    for flags in ((), ("--json",)):
        shown = run("config", *flags)[1]
        assert "1 digest, not shown" in shown and "alpha" in shown and DIGEST not in shown


def test_an_unknown_name_is_refused(run: Run) -> None:
    status, _, said = run("config", "arena.size")
    assert status == 2 and "no setting has arena.size in its name" in said


def test_a_reload_is_told_and_what_needs_a_restart(run: Run, server: Server, file: Path) -> None:
    file.write_text(f"log_level = 'warning'\n{FILE.replace('0.25', '0.5')}")
    os.kill(server.pid, signal.SIGHUP)
    wait_for(lambda: "wait for a restart: leases.unadmitted_share" in run("config")[1])
    told = {one["name"]: one for one in json.loads(run("config", "--json")[1])["settings"]}
    assert (told["log_level"]["value"], told["log_level"]["origin"]) == ("warning", "file")
    assert told["leases.unadmitted_share"]["value"] == 0.25, "what the server runs with"
    assert told["leases.unadmitted_share"]["needs_restart"]
