"""Tests `hotkv` as users type it."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from demo.processes import ROOT, Server
from hotkv_client import GroupHashes
from hotkv_client.admin import AdminClient
from hotkv_client.command import cli, host_bench
from hotkv_client.command import fleet as fleet_command
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.command_line import INTERRUPTED
from hotkv_proto.reports import RequestReport
from hotkv_server.settings import tomllib
from tests.server.commands import HOTKV, prompt_hashes, runner
from tests.server.places import store
from tests.server.support import number_of
from tests.support.waiting import wait_for


def test_the_programs_that_pip_installs_are_there() -> None:
    """The installed metadata may be older than pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plugins = project["entry-points"]["vllm.general_plugins"]
    for name, value in {**project["scripts"], **plugins}.items():
        assert callable(EntryPoint(name, value, "").load()), name


def test_commands_say_what_there_is(server: Server, engine: Callable[..., PagedEngine]) -> None:
    one = engine(engine_id="cli-engine", model="cli-model")
    tokens = list(range(16 * 3 + 5))
    hashes = prompt_hashes(one, tokens)
    store(one, hashes[:2])
    assert "cli-model" in server.cli("status")
    assert "cli-engine" in server.cli("sessions")
    assert hashes[0].hex()[:16] in server.cli("blocks", "--limit", "10000")
    for command in (
        ["status"],
        ["sessions"],
        ["blocks"],
        ["hot"],
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
    # A hit never includes the prompt's last token.
    assert "16 of 32 tokens hit; a longer hit would" in server.cli(*explain[: 3 + 32])
    assert "evicted 2 blocks" in server.cli("evict", "--all", "--key-space", number)
    assert "`hotkv evict` or another call removed it" in server.cli(*explain)
    store(one, hashes[:2])
    assert "flushed 2 blocks" in server.cli("flush", "--key-space", number)
    assert "a flush of its key space dropped it" in server.cli(*explain)
    short = server.cli("explain", "--key-space", number, "1", "2")
    assert "shorter than a block" in short and "0 of 0" not in short
    one.session.close()
    unused = f"key space {number} (cli-model), which no connected engine uses: 0 of 48"
    wait_for(lambda: unused in server.cli(*explain))


SERVER = (sys.executable, "-m", "hotkv_server")
ESTIMATE = (sys.executable, "-m", "tools.estimate")
MODEL = ("--model", "llama-3.1-8b", "--tokens", "1000", "--device", "h100")


@pytest.mark.parametrize(
    "command",
    [(*HOTKV, "blocks"), (*SERVER, "run", "--help-settings"), (*ESTIMATE, *MODEL)],
)
def test_a_reader_that_stops_early_sees_no_traceback(
    server: Server, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """As in `hotkv status | head -0`."""
    monkeypatch.setenv("HOTKV_TARGET", server.target)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ((*HOTKV, "status"), 0),
        ((*HOTKV, "top", "--count", "1", "--interval", "0.1"), 0),
        ((*HOTKV, "blocks", "--limit", "0"), 2),
        ((*SERVER, "run", "--help-settings"), 0),
    ],
)
def test_streams_closed_by_the_caller_are_harmless(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    status: int,
) -> None:
    """As `hotkv status <&- >&- 2>&-` in a shell."""
    monkeypatch.setenv("HOTKV_TARGET", server.target)
    line = f"exec {shlex.join(command)} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", line], cwd=ROOT).returncode == status


def test_terminal_without_a_character_shows_question_mark(
    server: Server, engine: Callable[..., PagedEngine]
) -> None:
    engine(engine_id="Größe")
    command = [*HOTKV, "sessions", "--target", server.target]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0 and "Gr??e" in done.stdout, done.stderr


def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        command = [*SERVER, "run", "--help-settings"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr == "the output is not whole: No space left on device\n"


def test_ctrl_c_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    """The server accepts the call, but never answers."""
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
    assert process.returncode == INTERRUPTED


def test_hung_server_differs_from_stream_without_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(tmp_path / "admin.sock"))
        hanging.listen()
        ended, printed, said = runner(capsys, f"unix:{tmp_path}/grpc.sock")("events", "--seconds=1")
    assert (ended, printed) == (1, "") and "no answer in time" in said


def test_ctrl_c_ends_a_simulation_without_a_traceback(tmp_path: Path) -> None:
    os.mkfifo(trace := tmp_path / "trace")
    command = [*SERVER, "simulate", "--trace", str(trace)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    with process, trace.open("w"):
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == INTERRUPTED


def test_a_socket_of_this_folder_needs_no_path(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(server.runtime_folder)
    status, printed, said = runner(capsys, "unix:grpc.sock")("sessions")
    assert (status, said) == (0, "") and printed.startswith("session")


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


FILES = {
    "text": "Why?",
    "none": "{}",
    "cut": "{",
    "number": '{"messages": 5}',
    "salted": '{"prompt": "a", "cache_salt": "s"}',
    "truncated": '{"prompt": "a", "truncate_prompt_tokens": 8}',
    "image": '[{"role": "user", "content": [{"type": "image_url"}]}]',
    "trace": '{"timestamp": 1, "hash_ids": [1, 2]}\n',
    "bytes": "\xff\xfe",
    "deep": "[" * 100_000,
    "other": '{"format": "other", "key_space": {}}',
    "numbers": '{"format": "hotkv-blocks-1", "key_space": {"groups": [5]}}',
    "kinds": '{"format": "hotkv-blocks-1", "key_space": {"groups": [{"block_token_count": 1, '
    '"kind": []}]}}\n{"group_index": 0, "hashes": ["00"]}',
    "vast": '{"format": "hotkv-blocks-1", "key_space": {"groups": []}}\n{"group_index": 1e400}',
}
"""Used in SLIPS."""
ENGINE, WHOLE = "--engine http://127.0.0.1:9", "--bytes-per-token 1 --prefill-tokens-per-s 1"
SLIPS = [
    ("statsu", "no command statsu; did you mean status?"),
    ("status --jsn", "no --jsn; did you mean --json?"),
    ("blocks --limt 3", "did you mean --limit?"),
    ("blocks --limit -3", "'-3': give a whole number, 1 to 10,000"),
    ("flush --key-space 9999999999", "'9999999999': give a whole number, 0 to"),
    # An option of `blocks`, not of `ping`.
    ("ping --limit 3", "there is no --limit; did you mean --live?"),
    ("evict zz", "'zz' is no hexadecimal block hash"),
    ("evict ''", "'' is no hexadecimal block hash"),
    ("evict abc", "'abc' has 3 digits; give 4 to 64"),
    (f"evict {'a' * 65}", "has 65 digits"),
    ("evict", "give the hashes of blocks, or --all"),
    ("evict abcd12 --all", "give the hashes of blocks, or --all"),
    ("evict --all --group 0", "--all drops the blocks of all groups"),
    ("status --target @/nowhere", "/nowhere"),
    ("status --target ,", ", names no server; write A,B,C"),
    ("status --target ''", "'' names no server; give unix:/PATH or HOST:PORT"),
    ("ping --timeout-s inf", "'inf': give 0.001 to 10,000,000 seconds"),
    ("ping --timeout-s soon", "'soon': give 0.001"),
    ("record trace --seconds -5", "'-5': give 0 to 10,000,000 seconds"),
    ("export hot --gib inf", "'inf': give 0 to 1,000,000,000 GiB"),
    ("import bytes --wait nan", "'nan': give 0.001 to 60 seconds"),
    ("import bytes --wait 0", "'0': give 0.001 to 60 seconds"),
    ("drain --grace-s 0", "'0': give 0.001 to 10,000,000 seconds"),
    ("import vast --wait 60", "vast:2: group_index and hashes"),
    ("import deep --wait 0.001", "deep:1: this is no file of `hotkv export`"),
    ("import none", "none:1: this is no file of `hotkv export`"),
    ("import other", "other:1: this is no file of `hotkv export` (format is 'other')"),
    ("import numbers", "numbers:1: this is no file of `hotkv export`"),
    ("import kinds", "key_space: "),
    ("prefetch --prompts deep --like kinds", "deep:1: a JSON list of token ids was expected"),
    ("prefetch --prompts bytes --like bytes", "bytes:1: this is no file of `hotkv export`"),
    ("drain --grace-s inf", "'inf': give 0"),
    ("top --interval 0", "--interval 0: give 0.1"),
    ("size --seconds 0", "'0': give 0.1 to 10,000,000 seconds"),
    ("top --count -1", "--count -1"),
    ("bench --seconds 0", "--seconds 0: give 1 to 3600"),
    ("bench --arena-mib 16", "--arena-mib 16: give 256"),
    ("explain", "the prompt is empty"),
    ("explain @/nowhere", "/nowhere"),
    ("explain @bytes", "bytes: this is no text"),
    ("explain --chat text", "--chat FILE and --engine URL: give both or neither"),
    ("explain --engine http://a", "give both or neither"),
    ("explain --chat text --engine b 12", "give one of a prompt, --session and --chat"),
    ("explain --chat text --engine file:///etc", "give a URL"),
    (f"explain --chat text {ENGINE}", "--engine names a vLLM"),
    ("explain --chat text --engine 'http://a:9 b'", "--engine names a vLLM"),
    (f"explain --chat /nowhere {ENGINE}", "/nowhere"),
    (f"explain --chat none {ENGINE}", "no chat: give a request with messages or prompt"),
    (f"explain --chat deep {ENGINE}", "not JSON"),
    (f"explain --chat number {ENGINE}", "no chat: give a request with messages or prompt"),
    (f"explain --chat cut {ENGINE}", "not JSON"),
    (f"explain --chat salted {ENGINE}", "cache_salt changes the hashes"),
    (f"explain --chat truncated {ENGINE}", "truncate_prompt_tokens removes tokens"),
    (f"explain --chat image {ENGINE}", "a part of type image_url is in the hashes"),
    (
        "size trace --target unix:/nowhere/grpc.sock",
        "give --bytes-per-token and --prefill-tokens-per-s, or --target",
    ),
    ("size trace --bytes-per-token 1 --arena much", "'much' is no size"),
    ("size trace --bytes-per-token 1", "give --block-tokens"),
    ("size trace --block-tokens 0", "'0': give a whole number, 1 to"),
    ("size trace --bytes-per-token -1", "must be above 0"),
    ("size trace --bytes-per-token x", "'x' must be above 0"),
    (f"size /nowhere {WHOLE} --block-tokens 512", "/nowhere"),
]
"""Typing errors, with words of the answer."""
FAILURES = [
    ("blocks --key-space 4000", "key_space_id 4000 is unknown", "UNKNOWN_KEY_SPACE"),
    ("blocks --page zz", "page_token is none", "INVALID_FIELD"),
    ("status --target unix:/nowhere/grpc.sock", "no server runs there", "NO_ANSWER"),
    ("ping --target unix:/nowhere/grpc.sock", "no server runs there", "NO_ANSWER"),
    ("top --count 1 --target unix:/nowhere/grpc.sock", "no server runs there", "NO_ANSWER"),
    ("size --target unix:/nowhere/grpc.sock", "no server runs there", "NO_ANSWER"),
    ("size --token-file /nowhere --target localhost:9", "token_file '/nowhere'", "INVALID_FIELD"),
    ("status --tls-ca text --target localhost:9", "tls_ca 'text': has no PEM", "INVALID_FIELD"),
    ("status --tls-ca /no --target localhost:9", "tls_ca '/no': No such file", "INVALID_FIELD"),
    # The smallest and largest values are accepted.
    ("blocks --limit 1 --target unix:/nowhere/grpc.sock", "no server runs there", "NO_ANSWER"),
    ("blocks --limit 10000 --target unix:/nowhere/grpc.sock", "no server runs there", "NO_ANSWER"),
    ("export a --gib 0 --target unix:/nowhere/grpc.sock", "no server runs there", "NO_ANSWER"),
    ("status --target no.host.invalid:1", "no host of that name is known", "NO_ANSWER"),
    ("status --target http://a", "--target is unix:/PATH or HOST:PORT", "NO_ANSWER"),
    ("status --target 127.0.0.1:9", "nobody listens there", "NO_ANSWER"),
    ("bench --arena-mib 99999999", "smaller --arena-mib", "FAILED"),
    ("bench --arena-mib 256", "it is not installed: pip install ", "FAILED"),
]
"""Commands that fail otherwise, with words of the answer, and the reason."""
WRONG = [*((typed, 2, said, "USAGE") for typed, said in SLIPS)]
WRONG += [(typed, 1, said, reason) for typed, said, reason in FAILURES]


@pytest.mark.parametrize(("typed", "status", "said", "reason"), WRONG)
def test_what_is_wrong_is_one_line(
    server: Server,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    typed: str,
    status: int,
    said: str,
    reason: str,
) -> None:
    monkeypatch.setattr(host_bench, "COMMAND", (sys.executable, "-m", "no_such_server"))
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    run, words = runner(capsys, server.target), ["--timeout-s", "5", *shlex.split(typed)]
    ended, printed, plain = run(*words)
    assert (ended, printed) == (status, "") and said in plain, plain
    assert len(plain.splitlines()) == 1 + plain.startswith("hotkv bench: starting")
    for given in (["--json", *words], [*words, "--json"]):
        ended, printed, told = run(*given)
        assert (ended, printed) == (status, "")
        error = json.loads(told.splitlines()[-1])["error"]
        assert said in error["message"] and error["reason"] == reason
        assert error["retryable"] == (reason == "NO_ANSWER")
        assert reason != "NO_ANSWER" or plain.startswith(f"hotkv: {error['target']}: ")


def test_admin_socket_elsewhere_is_not_server_absence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In Kubernetes and Compose, the admin socket is in another directory."""
    target = f"unix:{tmp_path}/grpc.sock"
    run = runner(capsys, target)
    assert "no server runs there" in run("status")[2]
    with socket.create_server(os.fspath(tmp_path / "grpc.sock"), family=socket.AF_UNIX):
        for words in (["status"], ["status", "--json"], ["size"]):
            ended, printed, said = run(*words)
            assert (ended, printed) == (1, "")
            assert "the server's admin socket is elsewhere (security.admin_socket)" in said
        assert "admin socket is elsewhere" in run("status", "--target", f"{target},{target}")[1]


def test_fleet_status_has_node_rows_and_sum(
    server: Server,
    engine: Callable[..., PagedEngine],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = engine(model="fleet")
    stored = [bytes([number]) * 32 for number in range(4)]
    store(one, stored)
    # Of 160 tokens, the engine's own cache has 48, and the lease pins 4 blocks.
    assert all(one.session.acquire("fleet", [GroupHashes(0, stored)]).result(60).pinned[0])
    one.session.report_requests([RequestReport(stored, 160, 48, 64, 0.0)])
    one.session.ping(10)
    (host,) = [
        tier
        for tier in json.loads(server.cli("status", "--json"))["tiers"]
        if tier["name"] == "host"
    ]
    absent, listed = f"unix:{tmp_path}/absent.sock", tmp_path / "nodes"
    listed.write_text(f"# ours\n{server.target}\n\n{absent}  # new\n{server.target}\n")
    arguments = ["status", "--json", "--timeout-s", "5", "--target", f"@{listed}"]
    assert cli.main(arguments) == 1, "a node does not answer"
    fleet = json.loads(capsys.readouterr().out)
    first, second, third = fleet["nodes"]
    assert first["block_count"] == third["block_count"] == host["block_count"] >= 4
    assert second["target"] == absent and second["error"].startswith("there is no such socket")
    assert fleet["sum"]["block_count"] == 2 * first["block_count"]
    assert first["below_used_byte_count"] == 0 < first["host_used_byte_count"]
    assert cli.main(["status", "--target", f"{server.target},{server.target}"]) == 0
    assert "all answer " in capsys.readouterr().out
    assert cli.main(["status", "--target", f"{server.target},{absent}"]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:1] for row in rows[:5]] == [["node"], [server.target], [absent], ["2"], []]
    assert " ".join(rows[5]).startswith(f"{absent}: there is no such socket")
    assert rows[2][-9:] == ["-"] * 9 and rows[3][1:5] == ["nodes", "1", "without", "answer"]
    counters = server.status()["counters"]
    hits = counters["reported_hit_tokens_total"] / counters["reported_prompt_tokens_total"]
    assert hits < 1 and rows[1].count(f"{hits:.1%}") == 1
    (tmp_path / "empty").touch()
    for wrong in ("@/nothing/there", f"@{tmp_path / 'empty'}"):
        assert cli.main(["status", "--target", wrong]) == 2
    with AdminClient(server.target) as older:
        info = older.info()
        del info["counters"]["stored_bytes_total"]
        older.info = lambda: info  # type: ignore[method-assign]
        shown = fleet_command.show(fleet_command.status(["older"], lambda target: older))
    assert shown.splitlines()[1].split()[-3] == "0"
