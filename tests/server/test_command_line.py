"""The command `hotkv` as people type it: options anywhere, slips, pipes, servers that are not
there."""

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from demo.processes import ROOT, Server
from hotkv_client.admin import AdminClient
from hotkv_client.command import cli
from hotkv_client.testing import PagedEngine
from hotkv_proto.keys import token_block_hashes
from hotkv_server.settings import tomllib
from tests.server.places import store
from tests.server.support import number_of

HOTKV = (sys.executable, "-m", "hotkv_client.command.cli")


def hotkv(*arguments: str) -> str:
    command = [*HOTKV, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60).stdout


def test_the_programs_that_pip_installs_are_there() -> None:
    """The entry points as pyproject.toml names them: an installed environment may be older."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plugins = project["entry-points"]["vllm.general_plugins"]
    for name, value in {**project["scripts"], **plugins}.items():
        assert callable(EntryPoint(name, value, "").load()), name


def test_commands_say_what_there_is(server: Server, engine: Callable[..., PagedEngine]) -> None:
    one = engine(engine_id="cli-engine", model="cli-model")
    tokens, space = list(range(16 * 3 + 5)), one.key_space
    hashes = token_block_hashes(
        tokens, space.hash_block_tokens, space.hash_algorithm, space.hash_seed
    )
    store(one, hashes[:2])
    assert "cli-model" in server.cli("status")
    assert "cli-engine" in server.cli("sessions")
    assert hashes[0].hex()[:16] in server.cli("blocks", "--limit", "1000")
    for command in (
        ["status"],
        ["sessions"],
        ["blocks"],
        ["explain", hashes[0].hex()],
        ["evict", "--key-space", "1", hashes[0].hex()],
    ):
        assert json.loads(server.cli(*command, "--json"))
    store(one, hashes[:2])
    with AdminClient(server.target) as admin:
        number = str(number_of(admin, "cli-model"))
    explain = ("explain", "--key-space", number, *map(str, tokens))
    assert f"key space {number} (cli-model): 32 of 48 tokens hit" in server.cli(*explain)
    assert "never stored" in server.cli(*explain)
    assert "evicted 2 blocks" in server.cli("evict", "--all", "--key-space", number)
    assert "`hotkv evict` or another call removed it" in server.cli(*explain)
    store(one, hashes[:2])
    assert "flushed 2 blocks" in server.cli("flush", "--key-space", number)
    assert "a flush of its key space dropped it" in server.cli(*explain)
    short = server.cli("explain", "--key-space", number, "1", "2")
    assert "shorter than a block" in short and "0 of 0" not in short


def test_a_reader_that_stops_early_sees_no_traceback(server: Server) -> None:
    """As `hotkv status | head -0`."""
    command = [*HOTKV, "blocks", "--target", server.target]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_ctrl_c_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    """While it waits for a server that takes the call and never answers."""
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(tmp_path / "admin.sock"))
        hanging.listen()
        command = [*HOTKV, "status", "--target", f"unix:{tmp_path}/grpc.sock", "--timeout-s", "300"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
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
        assert json.loads(capsys.readouterr().out) == {"serving": True}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["sta"], {"status"}),
        (["--tar"], {"--target"}),
        (["blocks", "--li"], {"--limit"}),
        (["--target", "unix:/x", "drain", "--timeout"], {"--timeout", "--timeout-s"}),
        (["completion", ""], {"bash", "zsh", "fish", "--help"}),
        (["ping", "--limit"], set()),
    ],
)
def test_bash_completes_commands_and_flags(typed: list[str], offered: set[str]) -> None:
    words = " ".join(f"'{word}'" for word in ["hotkv", *typed])
    ask = f'COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _hotkv; echo "${{COMPREPLY[@]}}"'
    command = ["bash", "-c", f"{hotkv('completion', 'bash')}\n{ask}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == "" and set(done.stdout.split()) == offered


def test_zsh_completes_every_command() -> None:
    shown = hotkv("completion", "zsh")
    assert all(f"    {name}) COMPREPLY" in shown for name in [*cli.COMMANDS, "doctor"])


@pytest.mark.parametrize(
    ("typed", "status", "said"),
    [
        ("statsu", 2, "no command statsu; did you mean status?"),
        ("status --jsn", 2, "no --jsn; did you mean --json?"),
        ("blocks --limt 3", 2, "did you mean --limit?"),
        ("evict zz", 2, "'zz' is no hexadecimal block hash"),
        ("evict", 2, "give the hashes of blocks, or --all"),
        ("explain @/nowhere", 2, "/nowhere"),
        ("blocks --key-space 4000", 1, "key_space_id 4000 is unknown"),
        ("blocks --limit -3", 1, "page_size"),
        ("status --timeout-s 5 --target unix:/nowhere/grpc.sock", 1, "no server runs there"),
        ("status --timeout-s 5 --target no.host.invalid:1", 1, "no host of that name is known"),
        ("status --timeout-s 5 --target 127.0.0.1:9", 1, "nobody listens there"),
    ],
)
def test_what_is_wrong_is_one_line(
    server: Server, capsys: pytest.CaptureFixture[str], typed: str, status: int, said: str
) -> None:
    try:
        ended = cli.main(["--target", server.target, *typed.split()])
    except SystemExit as slip:
        ended = int(str(slip.code))
    shown = capsys.readouterr().err
    assert ended == status and said in shown and len(shown.splitlines()) == 1


def test_status_of_a_fleet_has_a_row_a_node_and_the_sum(
    server: Server,
    engine: Callable[..., PagedEngine],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = engine(model="fleet")
    store(one, [bytes([number]) * 32 for number in range(4)])
    (host,) = [
        tier
        for tier in json.loads(hotkv("status", "--json", "--target", server.target))["tiers"]
        if tier["name"] == "host"
    ]
    absent, listed = f"unix:{tmp_path}/absent.sock", tmp_path / "nodes"
    listed.write_text(f"# ours\n{server.target}\n\n{absent}  # new\n{server.target}\n")
    arguments = ["status", "--json", "--timeout-s", "5", "--target", f"@{listed}"]
    assert cli.main(arguments) == 1, "a node does not answer"
    fleet = json.loads(capsys.readouterr().out)
    first, second, third = fleet["nodes"]
    assert first["block_count"] == third["block_count"] == host["block_count"] >= 4
    assert second["target"] == absent and second["error"]
    assert fleet["sum"]["block_count"] == 2 * first["block_count"]
    assert cli.main(["status", "--target", f"{server.target},{server.target}"]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert rows == ["node", server.target, server.target, "2"]
    (tmp_path / "empty").touch()
    for wrong in ("@/nothing/there", f"@{tmp_path / 'empty'}"):
        assert cli.main(["status", "--target", wrong]) == 2
