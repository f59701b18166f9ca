"""Tests `drain --wait`, `size`, `explain --chat`, help, and completion."""

import ast
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.processes import ROOT, Server
from hotkv_client import RequestReport
from hotkv_client.admin import AdminClient
from hotkv_client.command import cli, completion, draining, help_text, options, recorder, sizing
from hotkv_client.command.tables import human_seconds
from hotkv_client.paged_engine import PagedEngine
from tests.server.commands import (
    HOTKV,
    TOKENS,
    Run,
    Tokenizer,
    prompt_hashes,
    runner,
    tokenizer_url,
)
from tests.server.places import store
from tests.server.support import hashes
from tests.simulate.traces import write_trace

__all__ = ["tokenizer_url"]
NOWHERE = "unix:/nowhere/grpc.sock"


@pytest.fixture
def run(own_server: Server, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, own_server.target)


@pytest.fixture
def alone(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, NOWHERE)


@pytest.fixture
def stocked(own_server: Server, engine: Callable[..., PagedEngine]) -> PagedEngine:
    one = engine(own_server.target, model_names=["tiny"], engine_name="pod-0")
    store(one, prompt_hashes(one))
    return one


def test_resize_takes_sizes_and_says_what_moved(run: Run, stocked: PagedEngine) -> None:
    told, printed, _ = run("resize", "15MiB")
    assert told == 0 and "the arena has 15.0 MiB now, and can grow to 16.0 MiB" in printed
    told, _, errors = run("resize", "1TiB")
    assert told == 1 and "set arena.bytes and restart it: its blocks stay" in errors
    assert "such as 96GiB" in run("resize", "96 gigs")[2]


# drain --wait


def test_drain_waits_until_the_server_has_ended(
    run: Run, own_server: Server, stocked: PagedEngine
) -> None:
    assert draining.is_listening(own_server.target)
    status, printed, _ = run("drain", "--wait")
    assert status == 0 and printed.startswith("the server has ended, after ")
    own_server._child.process.wait(20)
    assert not draining.is_listening(own_server.target)


def test_tcp_host_is_asked_for_its_port() -> None:
    assert not draining.is_listening("127.0.0.1:9")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listening:
        assert draining.is_listening(f"127.0.0.1:{listening.getsockname()[1]}")


# Help


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(59.97, "1m 0s"), (119.6, "2m 0s"), (3599.7, "1h 0m"), (59.94, "59.9s"), (3725, "1h 2m")],
)
def test_a_time_is_never_sixty_of_a_unit(seconds: float, shown: str) -> None:
    assert human_seconds(seconds) == shown


def test_help_lists_commands_once_with_example(alone: Run) -> None:
    names = [*cli.COMMANDS, *cli.LOCAL_COMMANDS]
    listed = [name for group in help_text.GROUPS.values() for name in group]
    assert sorted(listed) == sorted(names) == sorted(help_text.EXAMPLES)
    status, shown, _ = alone("--help")
    assert status == 0 and all(len(line) <= help_text.WIDTH for line in shown.splitlines())
    for title, group in help_text.GROUPS.items():
        part = shown.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  (\w+)  ", part, re.M) == list(group)
        assert f"  $ {help_text.EXAMPLES[group[0]]}" in part
    for name in names:
        status, shown, _ = alone(name, "--help")
        assert status == 0 and shown.startswith(f"usage: hotkv {name} ")
        assert f"example:\n  {help_text.EXAMPLES[name]}" in shown


# What a command imports is most of its time


IMPORTED = """
import sys
from hotkv_client.command import cli
cli.main(sys.argv[1:])
print(set(sys.modules))
"""


def imported(*words: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *words], capture_output=True, text=True, check=True
    )
    found: set[str] = ast.literal_eval(done.stdout.splitlines()[-1])
    return found


def test_commands_import_no_numpy(own_server: Server) -> None:
    at = ("--target", own_server.target)
    top = ["top", "--count", "1", "--interval", "0.1"]
    for words in (["status"], top, ["evict", "--all"], ["explain", "1234"]):
        assert not {"numpy", "rich", "urllib.request", "email"} & imported(*words, *at), words


def test_the_servers_help_imports_no_server() -> None:
    code = "import sys; from hotkv_server.cli import parser_of_all; parser_of_all(('run',)); "
    code += "print({'numpy', 'pydantic', 'grpc', 'asyncio'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_command_that_asks_no_server_imports_no_grpc() -> None:
    assert not {"numpy", "grpc", "google.protobuf"} & imported("completion", "bash")


# explain --chat


MESSAGES = [{"role": "user", "content": "Why?"}]


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (json.dumps(MESSAGES), {"messages": MESSAGES}),
        (
            json.dumps({"model": "tiny", "messages": MESSAGES, "stream": True, "tools": []}),
            {"model": "tiny", "messages": MESSAGES, "tools": []},
        ),
        (
            json.dumps({"messages": MESSAGES, "documents": [{"text": "So."}]}),
            {"messages": MESSAGES, "chat_template_kwargs": {"documents": [{"text": "So."}]}},
        ),
        (
            json.dumps(
                {"messages": MESSAGES, "reasoning_effort": "none", "chat_template_kwargs": {"a": 1}}
            ),
            {
                "messages": MESSAGES,
                "chat_template_kwargs": {
                    "enable_thinking": False,
                    "a": 1,
                    "reasoning_effort": "none",
                },
            },
        ),
        (json.dumps({"prompt": "Why?", "max_tokens": 4}), {"prompt": "Why?"}),
        ("Why?\n", {"prompt": "Why?"}),
    ],
)
def test_a_chat_is_tokenised_by_its_engine(
    run: Run,
    stocked: PagedEngine,
    tokenizer_url: str,
    tmp_path: Path,
    text: str,
    asked: dict[str, Any],
) -> None:
    path = tmp_path / "chat"
    path.write_text(text)
    status, printed, _ = run("explain", "--chat", str(path), "--engine", f"{tokenizer_url}/")
    assert status == 0 and "key space 1 (tiny): all 48 of 48 whole-block tokens hit" in printed
    assert Tokenizer.asked == ("/tokenize", asked)


def test_a_chat_is_utf_8_in_every_locale(
    own_server: Server, stocked: PagedEngine, tokenizer_url: str, tmp_path: Path
) -> None:
    (path := tmp_path / "chat").write_text("Größe?", encoding="utf-8")
    command = [*HOTKV, "explain", "--chat", str(path), "--engine", tokenizer_url]
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [*command, "--target", own_server.target],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, **ascii_only},
    )  # fmt: skip
    assert done.returncode == 0 and Tokenizer.asked[1] == {"prompt": "Größe?"}, done.stderr


def test_an_answer_of_tokenize_is_a_prompt(run: Run, stocked: PagedEngine, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({"count": 3, "tokens": TOKENS, "max_model_len": 2048}))
    assert "all 48 of 48 whole-block tokens hit" in run("explain", f"@{path}")[1]


@pytest.mark.parametrize(
    ("text", "answer", "said"),
    [
        ("Why?", (404, '{"detail": "Not Found"}'), '/tokenize answers 404: {"detail"'),
        ("Why?", (400, '{"error": {"message": "no such\\nmodel"}}'), "answers 400: no such model"),
        ("Why?", (200, "<html>"), "/tokenize: not JSON"),
        ("Why?", (200, '{"tokens": ["a"]}'), "no list `tokens` of token ids"),
        ('{"model": "tuned", "prompt": "Why?"}', (200, '{"tokens": [1]}'), "tuned is an adapter"),
        (json.dumps(MESSAGES), (200, '{"tokens": [200006, 17360, 200008, 1]}'), "gpt-oss gets"),
    ],
)
def test_what_can_not_be_tokenised(
    alone: Run, tokenizer_url: str, tmp_path: Path, text: str, answer: tuple[int, str], said: str
) -> None:
    Tokenizer.answer = answer
    path = tmp_path / "chat"
    path.write_text(text)
    status, printed, error = alone("explain", "--chat", str(path), "--engine", tokenizer_url)
    assert status == 2 and not printed and said in error and len(error.splitlines()) == 1


def test_other_versions_server_is_named_in_line(
    run: Run, own_server: Server, monkeypatch: Any
) -> None:
    monkeypatch.setattr(AdminClient, "info", lambda _: {"version": "0.0.1"})
    status, printed, error = run("status")
    assert status == 1 and not printed and "of another version" in error
    assert '"version": "0.0.1"' in run("status", "--json")[1]
    for words in (["top", "--count", "1"], ["devices"], ["drain", "--wait"]):
        status, printed, error = run(*words)
        assert status == 1 and not printed and "of another version" in error, words
    status, printed, _ = run("status", "--target", f"{NOWHERE},{own_server.target}")
    assert status == 1 and "of another version" in printed and "no server runs there" in printed


@pytest.mark.parametrize(("key", "said"), [("k", "tuned is an adapter"), ("", "VLLM_API_KEY")])
def test_engine_with_api_key_hides_no_adapter(
    alone: Run, tokenizer_url: str, tmp_path: Path, monkeypatch: Any, key: str, said: str
) -> None:
    monkeypatch.setattr(Tokenizer, "key", "k")
    monkeypatch.setattr(Tokenizer, "answer", (200, '{"tokens": [1]}'))
    monkeypatch.setenv("VLLM_API_KEY", key)
    (path := tmp_path / "chat").write_text('{"model": "tuned", "prompt": "Why?"}')
    status, _, error = alone("explain", "--chat", str(path), "--engine", tokenizer_url)
    assert status == 2 and said in error


# size


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten prompts of four blocks (512 tokens), each requested twice within the hour."""
    prompts = [[10 * number + block for block in range(4)] for number in range(10)]
    return write_trace(
        tmp_path / "trace.jsonl",
        [(120.0 * at, ids) for at, ids in enumerate([*prompts, *prompts])] + [(3600.0, [999])],
    )


WHOLE = ("--bytes-per-token", "131072", "--prefill-tokens-per-s", "1000", "--block-tokens", "512")


def test_a_trace_is_answered_in_gib_and_seconds(alone: Run, trace: Path) -> None:
    """An arena of 3 GiB holds all prompts."""
    status, printed, _ = alone("size", str(trace), "--arena", "640MiB,3GiB", *WHOLE)
    assert status == 0, printed
    answer = json.loads(alone("size", str(trace), "--arena", "3GiB", *WHOLE, "--json")[1])
    (found,) = answer["traces"]
    (size,) = found["sizes"]
    # An engine always computes the last token.
    assert size["hit_token_count"] == size["saved_token_count"] == 10 * (4 * 512 - 1)
    assert found["prompt_token_count"] == 81 * 512 and found["seconds"] == 3600
    assert size["saved_s_per_hour"] == pytest.approx(20.47)
    assert found["endless"]["hit_token_count"] == size["hit_token_count"]
    assert found["enough_byte_count"] == 3 << 30
    lines = printed.splitlines()
    assert "3.0 GiB" in lines[3] and "49%" in lines[3] and "20.5 s" in lines[3]
    assert lines[-1] == (
        "With 3.0 GiB 49% of prompt tokens hit, which saves about 20.5 s of prefill an hour; an "
        "endless cache hits 49%."
    )


def test_trace_may_come_through_a_pipe(trace: Path) -> None:
    """As `<(...)` in a shell does."""
    command = [*HOTKV, "size", "/dev/fd/{}", "--arena", "3GiB", *WHOLE]
    with subprocess.Popen(["cat", str(trace)], stdout=subprocess.PIPE) as cat:
        assert cat.stdout is not None
        fd = cat.stdout.fileno()
        command[command.index("/dev/fd/{}")] = f"/dev/fd/{fd}"
        done = subprocess.run(command, pass_fds=(fd,), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "49%" in done.stdout, done.stderr


def test_live_traffic_is_recorded_and_sized(
    run: Run, stocked: PagedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speed comes from the engine, bytes per token from the server. Hits in the engine's own
    cache save nothing. Three blocks end the recording."""
    monkeypatch.setattr(sizing, "MAX_BLOCKS", 3)
    stop, device = threading.Event(), 320

    def traffic() -> None:
        while not stop.is_set():
            report = RequestReport(hashes(40), 40 * 16 + 1, device, device, 0.0)
            stocked.session.report_requests([report, report], 2000.0)
            stop.wait(0.05)

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        status, printed, said = run("size", "--seconds", "250", "--json")
    finally:
        stop.set()
        thread.join()
    assert status == 0 and "recording requests for 250 s" in said, said
    (found,) = json.loads(printed)["traces"]
    assert found["bytes_per_token"] == 2 * 4096 / 16
    assert found["prefill_tokens_per_s"] == 2000.0 and found["block_token_count"] == 512
    assert found["device_hit_token_count"] == device * found["request_count"] > 0
    saved = found["endless"]["saved_token_count"]
    assert saved >= 2 * (512 - device) and saved % (512 - device) == 0
    assert found["endless"]["hit_token_count"] == found["device_hit_token_count"] + saved


def test_short_prompts_are_recorded_in_wanted_blocks(
    run: Run, own_server: Server, stocked: PagedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, 48 tokens are less than a block. The error names `--block-tokens`."""
    monkeypatch.setattr(sizing, "MAX_BLOCKS", 1)
    stop = threading.Event()

    def traffic() -> None:
        while not stop.is_set():
            report = RequestReport(hashes(3), 3 * 16, 0, 0, 0.0)
            stocked.session.report_requests([report], 1000.0)
            stop.wait(0.05)

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        status, printed, said = run("size", "--seconds", "250", "--block-tokens", "32", "--json")
        assert status == 0, said
        (found,) = json.loads(printed)["traces"]
        assert found["block_token_count"] == 32
    finally:
        stop.set()
        thread.join()
    short = {"request_count": 3, "block_count": 0, "block_token_count": 512, "seconds": 2.0}
    monkeypatch.setattr(recorder, "record", lambda *_: short)
    status, _, said = run("size", "--seconds", "2")
    assert status == 1 and "all 3 prompts are shorter than 512 tokens" in said, said
    assert "--block-tokens" in said


def test_an_hour_without_requests_is_no_size(
    run: Run,
    own_server: Server,
    engine: Callable[..., PagedEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status, _, said = run("size", "--seconds", "0.2")
    assert status == 1 and "name a key space with --key-space; known are none yet" in said
    engine(own_server.target)
    status, _, said = run("size", "--seconds", "0.2")
    assert status == 1 and "no engine has reported a request" in said
    monkeypatch.setattr(sizing, "COMMAND", (HOTKV[0], "-m", "no_such_module"))
    status, _, said = run("size", __file__, *WHOLE)
    assert status == 1 and "part of the server, which is not installed" in said


# Completion in shells

MODULES = {"hotkv": "hotkv_client.command.cli", "hotkv-server": "hotkv_server.cli"}
FAKE = """
import contextlib
from hotkv_client import admin
from hotkv_client.command import completion
admin.AdminClient = lambda *given: contextlib.nullcontext(given)
def listed(client, word):
    yield from dict.fromkeys(("4fab", "17", "ab", "a`touch was_run`", "*"), client[0]).items()
completion.OF_FLAGS = {"--key-space": listed, "--session": listed}
completion.OF_WORDS = {"evict": listed, "explain": listed}
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with both commands."""
    return made_programs(tmp_path, "")


def made_programs(folder: Path, before: str) -> Path:
    """before: code that runs before each command."""
    for name, module in MODULES.items():
        code = folder / f"{name}.py"
        code.write_text(f"import sys\nfrom {module} import main\n{before}\nsys.exit(main())\n")
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {code} "$@"\n')
        program.chmod(0o755)
    return folder


def offered(folder: Path, line: str) -> set[str]:
    """By bash, for the line's last word."""
    ask = (
        "source <(hotkv completion bash); COMP_TYPE=9; COMP_POINT=${#COMP_LINE}; "
        """_python_argcomplete ${COMP_LINE%% *}; printf '%s\\n' "${COMPREPLY[@]}" """
    )
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "COMP_LINE": line}
    done = subprocess.run(
        ["bash", "-c", ask], capture_output=True, text=True, env=environment, cwd=folder
    )
    assert done.stderr == ""
    return {word.rstrip() for word in done.stdout.splitlines()} - {""}


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


@needs_bash
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hotkv sta", {"status"}),
        ("hotkv --target unix:/x drain --timeout", {"--timeout-s"}),
        ("hotkv savings --by ", {"engine", "model", "tenant"}),
        ("hotkv savings --since ", {"10m", "1h", "24h", "7d"}),
        ("hotkv top --interval ", set()),
        ("hotkv record hotkv.", {"hotkv.py"}),
        ("hotkv status --token-file hotkv.", {"hotkv.py"}),
        ("hotkv-server run --log-level ", {"debug", "info", "warning", "error"}),
        ("hotkv-server run --arena.keep ", {"true", "false"}),
        ("hotkv-server run --arena.bytes ", set()),
        ("hotkv-server run --security.tls.key hotkv.", {"hotkv.py"}),
        ("hotkv completion ", {"bash", "zsh", "fish", "--help"}),
        ("hotkv ping --limit", set()),
        ("hotkv-server run --arena.by", {"--arena.bytes"}),
        ("hotkv-server tiers check --js", {"--json"}),
    ],
)
def test_bash_completes_commands_and_flags(line: str, words: set[str], programs: Path) -> None:
    assert offered(programs, line) == words


def test_behind_a_flag_come_its_values_or_nothing(tmp_path: Path) -> None:
    (tmp_path / "a_file").touch()
    command = [sys.executable, "-m", "tests.server.completed"]
    path = ":".join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "HOTKV_TARGET": NOWHERE, "PYTHONPATH": path}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )
    seen: dict[str, list[str]] = json.loads(done.stdout)
    assert [line for line, words in seen.items() if any(w.startswith("-") for w in words)] == []
    assert seen["hotkv record --seconds "] == [] and len(seen) > 150
    assert seen["hotkv-server run --arena.dir "] == seen["hotkv import --tls-ca "] == ["a_file"]


@needs_bash
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hotkv flush --key-space 1", {"17"}),
        ("hotkv explain --session a", {"ab", r"a\`touch\ was_run\`"}),
        ("hotkv evict 4f", {"4fab"}),
    ],
)
def test_bash_completes_values_and_runs_none(line: str, words: set[str], tmp_path: Path) -> None:
    assert offered(made_programs(tmp_path, FAKE), line) == words
    assert not (tmp_path / "was_run").exists()


@needs_bash
def test_values_of_a_server_are_completed(
    own_server: Server, stocked: PagedEngine, programs: Path
) -> None:
    at = f"--target {own_server.target}"
    assert offered(programs, f"hotkv flush {at} --key-space ") == {"1"}
    found = offered(programs, f"hotkv evict {at} ") - {"--help"}
    hashes = {word for word in found if not word.startswith("-")}
    assert len(hashes) == 3
    first = min(hashes)
    assert first in offered(programs, f"hotkv evict {at} {first[:4]}")
    assert not offered(programs, "hotkv flush --target unix:/nowhere/grpc.sock --key-space ")


@pytest.mark.parametrize("shell", options.SHELLS)
def test_script_is_for_both_commands(shell: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, script, _ = run("completion", shell)
    assert status == 0 and all(f"{name}" in script for name in completion.PROGRAMS)
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    monkeypatch.delitem(sys.modules, "argcomplete.shell_integration", raising=False)
    status, script, said = run("completion", shell)
    assert (status, script) == (1, "") and "argcomplete is not installed: pip install" in said
