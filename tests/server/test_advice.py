"""Tests the advice in messages, alerts and help: commands run as printed, packages are on an
index."""

import ast
import functools
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from demo.processes import ROOT, Server
from hotkv_client.command import cli, draining, help_text
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto import extras
from hotkv_server.settings import tomllib
from tests.server.commands import TOKENS, Tokenizer, prompt_hashes, tokenizer_url
from tests.server.places import store
from tests.simulate.traces import write_trace
from tests.support import daemons

__all__ = ["tokenizer_url"]

PACKAGES = ("client", "server", "connector_vllm", "proto", "sparse")
QUOTED = re.compile(r"`(hotkv(?:-server)? [^`]+)`")
BARE = re.compile(r"\b(hotkv-server (?:arenas|compile|simulate|tiers check)(?: --[a-z-]+)*)")
"""Outside of backticks, texts name only commands of the server."""
PLACEHOLDER = "{}"


@functools.cache
def texts(package: str) -> list[tuple[str, str]]:
    """(File and line, text) of each string but docstrings. PLACEHOLDER replaces values in
    f-strings."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            continue
        tree = ast.parse(path.read_text())
        inner = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            for part in node.values
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                inner.add(id(node.value))
        for node in ast.walk(tree):
            if id(node) not in inner and (text := _text(node)):
                found.append((f"{path.relative_to(ROOT)}:{node.lineno}", text))  # type: ignore[attr-defined]
    return found


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        parts = (one.value if isinstance(one, ast.Constant) else PLACEHOLDER for one in node.values)
        return "".join(map(str, parts))
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return str(node.value) if is_text else ""  # type: ignore[attr-defined]


def advised() -> dict[str, str]:
    """Each command that a text names, and a place where it stands."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        for place, text in texts(package):
            for command in (*QUOTED.findall(text), *BARE.findall(QUOTED.sub("", text))):
                found.setdefault(command.replace("%s", PLACEHOLDER), place)
    for name in ("prometheus/hotkv.rules.yml", "grafana/hotkv.json"):
        text = (ROOT / "deploy" / name).read_text()
        alerts = re.findall(r"^ +command: (hotkv.*)$", text, re.M)
        for command in (*QUOTED.findall(text), *alerts):
            found.setdefault(command, name)
    page = (ROOT / "server/hotkv_server/monitoring/pages/page.html").read_text()
    for command in re.findall(r"<code>(hotkv(?:-server)? [^<]+)</code>", page):
        found.setdefault(command, "page.html")
    return found


@pytest.fixture
def stocked(own_server: Server, engine: Callable[..., PagedEngine]) -> PagedEngine:
    """Has stored a prompt, and the block whose hash the help of `hotkv evict` uses."""
    one = engine(own_server.target, model_names=["tiny"])
    store(one, prompt_hashes(one))
    store(one, [bytes.fromhex("4fd2a1".ljust(64, "0"))], 10)
    return one


def run(words: list[str], server: Server, folder: Path) -> int:
    """Exit status. `folder` replaces placeholders, and the paths of real installations."""
    program, name, *rest = words
    rest = [str(folder) if word == PLACEHOLDER else word for word in rest]
    if program == "hotkv-server":
        config = folder / "hotkv.toml"
        config.write_text(f"[tiers.disk]\npath = '{folder}'\nbytes = '64MiB'\n")
        rest = [str(config) if word == "/etc/hotkv/hotkv.toml" else word for word in rest]
        if name == "run":
            # `run` itself would not end.
            rest = ["--help-settings"]
        if name == "arenas" and "--folder" not in rest:
            # Else it would remove caches of this machine's real servers.
            rest += ["--folder", str(folder)]
        return daemons.run(name, *rest, timeout_s=240).returncode
    if name == "resize" and "--help" not in rest:
        # The server of the tests has less room than those of the examples.
        rest = ["15MiB"]
    try:
        return cli.main([name, *rest, "--target", server.target])
    except SystemExit as end:
        return int(str(end.code))


NAMES = ("export", "record", "evict", "resize", "bench", "size", "top", "try")
"""Texts name these without arguments, although they need some, an engine, or much time."""


def test_each_command_that_is_advised_runs(
    own_server: Server, stocked: PagedEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = advised()
    assert {"hotkv status", "hotkv doctor"} <= set(commands)
    assert "hotkv savings --since 1h" in commands
    for command, place in commands.items():
        words = shlex.split(command)
        if words[1] in NAMES:
            words += ["--help"]
        if command == "hotkv-server simulate":
            words += ["--trace", "/nowhere"]
        if command == "hotkv-server tiers check":
            words += ["--config", "/etc/hotkv/hotkv.toml"]
        # 1: this host has a fault. 2: there is no trace.
        fine = {"doctor": (0, 1)}.get(words[1], (2,) if "/nowhere" in words else (0,))
        status = run(words, own_server, tmp_path)
        assert status in fine, (command, place, capsys.readouterr())


@pytest.mark.parametrize("extra", ["server", "cli", "events", "otel", "s3", "mooncake", "cuda12"])
def test_advice_names_what_the_extra_needs(extra: str) -> None:
    def names(requirements: list[str]) -> list[str]:
        return sorted(re.split(r"[<>=!~ ;]", one)[0].lower() for one in requirements)

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["optional-dependencies"][extra]
    assert names(extras.packages(extra)) == names(needed) != []
    assert extras.advice(extra).startswith("pip install ") and "hotkv" not in extras.advice(extra)


def test_no_message_names_an_unpublished_package() -> None:
    assert extras.advice("nothing") == "pip install '.[nothing]' in a clone of hotkv"
    found = [place for package in PACKAGES for place, text in texts(package) if "hotkv[" in text]
    assert found == []


def test_each_example_runs(
    own_server: Server,
    stocked: PagedEngine,
    tmp_path: Path,
    tokenizer_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Examples that take long get a shorter duration."""
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "trace.jsonl", [(float(at), [1, 2, 3]) for at in range(4)])
    (tmp_path / "chat.json").write_text(json.dumps([{"role": "user", "content": "Why?"}]))
    (tmp_path / "prompts.jsonl").write_text(json.dumps(TOKENS) + "\n")
    shorter = {"http://127.0.0.1:8000": tokenizer_url}
    takes_time = ("record", "events", "bench")
    last = ("flush", "drain")
    for name in sorted(help_text.EXAMPLES, key=last.count):
        words = shlex.split(help_text.EXAMPLES[name].partition(" > ")[0])
        assert words[:2] == ["hotkv", name]
        if name == "record":
            # Later examples read that file as a trace.
            words[2] = "other.jsonl"
        words = [shorter.get(word, word) for word in words]
        if name in takes_time:
            words[words.index("--seconds") + 1] = "1"
        if name == "bench":
            words += ["--arena-mib", "256"]
        if name in ("try", "prove"):
            # `tests/vllm/test_http.py` has the engine that they need.
            words += ["--help"]
        if name == "completion":
            assert cli.main(words[1:]) == 0
            continue
        fine = (0, 1) if name == "doctor" else (0,)
        status = run(words, own_server, tmp_path)
        shown = capsys.readouterr()
        assert status in fine and (shown.out.strip() or name == "events"), (name, shown)
        if name == "explain":
            assert Tokenizer.asked[0] == "/tokenize"
    assert not draining.is_listening(own_server.target)
