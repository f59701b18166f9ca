"""The command `hotkv` as people type it: options anywhere, slips, pipes, servers that are not
there."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import grpc
import pytest
import tomllib

from demo.processes import ROOT, Server
from hotkv_client import BlockRun
from hotkv_client.channels import why_unanswered
from hotkv_client.command import cli
from hotkv_client.testing import PagedEngine
from tests.server.support import FULL, GroupsEngine, block_ids, hashes


def hotkv(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hotkv_client.command.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_the_programs_that_pip_installs_are_there() -> None:
    """The entry points as pyproject.toml names them: an installed environment may be older."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plugins = project["entry-points"]["vllm.general_plugins"]
    for name, value in {**project["scripts"], **plugins}.items():
        assert callable(EntryPoint(name, value, "").load()), name


def test_a_reader_that_stops_early_sees_no_traceback(server: Server) -> None:
    """As `hotkv status | head -0`."""
    command = [
        sys.executable,
        "-m",
        "hotkv_client.command.cli",
        "blocks",
        "--target",
        server.target,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_ctrl_c_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    """While it waits for a server that takes the call and never answers."""
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(tmp_path / "admin.sock"))
        hanging.listen()
        target = f"unix:{tmp_path}/grpc.sock"
        command = [sys.executable, "-m", "hotkv_client.command.cli", "status", "--target", target]
        with subprocess.Popen(
            [*command, "--timeout-s", "300"], stderr=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            asking, _ = hanging.accept()
            with asking:
                process.send_signal(signal.SIGINT)
                assert process.stderr is not None
                assert process.stderr.read() == ""
    assert process.returncode == cli.INTERRUPTED


def test_options_stand_before_or_after_the_command(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        ["--target", server.target, "--json", "ping"],
        ["--json", "ping", "--target", server.target],
        ["--target", "unix:/nowhere/grpc.sock", "ping", "--json", "--target", server.target],
    ):
        assert cli.main(arguments) == 0, arguments
        assert '"serving": true' in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["sta"], {"status"}),
        (["--tar"], {"--target"}),
        (["blocks", "--li"], {"--limit"}),
        (["--target", "unix:/x", "drain", "--timeout"], {"--timeout", "--timeout-s"}),
        (["completion", ""], {"bash", "zsh", "--help"}),
        (["ping", "--limit"], set()),
    ],
)
def test_bash_completes_commands_and_flags(typed: list[str], offered: set[str]) -> None:
    script = hotkv("completion", "bash").stdout
    words = " ".join(f"'{word}'" for word in ["hotkv", *typed])
    ask = f'COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _hotkv; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True)
    assert done.stderr == "" and set(done.stdout.split()) == offered


def test_completion_knows_every_command() -> None:
    shown = hotkv("completion", "zsh").stdout
    assert shown.startswith("autoload -U +X bashcompinit")
    assert all(f"    {name}) COMPREPLY" in shown for name in [*cli.COMMANDS, "doctor"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["statsu"], "hotkv: there is no command statsu; did you mean status?"),
        (["status", "--jsn"], "hotkv: there is no --jsn; did you mean --json?"),
        (["blocks", "--limt", "3"], "did you mean --limit?"),
    ],
)
def test_a_slip_is_one_line_that_says_what_was_meant(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and said in shown and len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("unix:/nowhere/grpc.sock", "no server runs there"),
        ("nosuch.host.invalid:1", "no host of that name is known"),
        ("127.0.0.1:9", "nobody listens there"),
    ],
)
def test_an_absent_server_is_a_sentence(
    capsys: pytest.CaptureFixture[str], target: str, said: str
) -> None:
    assert cli.main(["status", "--target", target, "--timeout-s", "5"]) == 1
    shown = capsys.readouterr().err
    assert said in shown and len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    ("code", "details", "said"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "closed the connection"),
        (grpc.StatusCode.UNAVAILABLE, "Domain name not found", "no host of that name"),
        (grpc.StatusCode.UNAVAILABLE, "something new", "can't be reached: something new"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "no answer in time"),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", "older than this client"),
        (grpc.StatusCode.DATA_LOSS, "odd", "DATA_LOSS: odd"),
    ],
)
def test_codes_are_sentences(code: grpc.StatusCode, details: str, said: str) -> None:
    shown = why_unanswered(code, details)
    assert said in shown and code.name in shown


def test_a_prompt_shorter_than_a_block_hits_nothing(
    server: Server, engine: Callable[..., PagedEngine]
) -> None:
    engine(model="short-prompts")
    done = hotkv("explain", "1", "2", "--target", server.target)
    assert "shorter than a block" in done.stdout and "0 of 0" not in done.stdout


def test_status_of_a_fleet_has_a_row_a_node_and_the_sum(server: Server, tmp_path: Path) -> None:
    with contextlib.closing(GroupsEngine(server.target, (FULL,), "fleet")) as engine:
        engine.store(BlockRun(0, hashes(4), block_ids(4)))
        alone = json.loads(hotkv("status", "--json", "--target", server.target).stdout)
        absent = f"unix:{tmp_path}/absent.sock"
        listed = tmp_path / "nodes"
        listed.write_text(f"# ours\n{server.target}\n\n{absent}  # new\n{server.target}\n")
        asked = hotkv("status", "--json", "--timeout-s", "5", "--target", f"@{listed}")
    assert asked.returncode == 1, "a node does not answer"
    fleet = json.loads(asked.stdout)
    first, second, third = fleet["nodes"]
    host = next(one for one in alone["tiers"] if one["name"] == "host")
    assert first["block_count"] == third["block_count"] == host["block_count"] >= 4
    assert second["target"] == absent and second["error"]
    assert fleet["sum"]["block_count"] == 2 * first["block_count"]
    shown = hotkv("status", "--target", f"{server.target},{server.target}")
    assert shown.returncode == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()] == [
        "node",
        server.target,
        server.target,
        "2",
    ]
    for wrong in ("@/nothing/there", f"@{tmp_path / 'empty'}"):
        (tmp_path / "empty").touch()
        assert hotkv("status", "--target", wrong).returncode == 2
