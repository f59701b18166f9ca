"""Tests `bench/gpu/check.sh`, which runs the GPU tests and benchmarks in calls, without a GPU."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.gpu import calls
from bench.gpu.calls import CALL_SECONDS, CALLS, GRACE_S, PYTHON, SHM, Runner, Step, tell
from bench.gpu.figures import Figure, read
from demo.processes import ROOT
from hotkv_server.settings import tomllib

SCRIPT = ROOT / "bench/gpu/check.sh"
COLLECT = ROOT / "bench/gpu/vllm/collect.sh"
HERE = {"numpy", "numba", "tomli", "xxhash", "uvloop", "rich"}
"""Packages of the GPU machine."""


def check(*arguments: str, timeout_s: float = 60, **environment: str) -> tuple[int, str]:
    """Exit status and output."""
    done = subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        capture_output=True, text=True, timeout=timeout_s,
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **environment},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_table_has_all_that_ended(tmp_path: Path) -> None:
    figures = [Figure("score", 0.5, 0.4), Figure("build", 0.5, 0.03, True)]
    reports = {
        "transfer": {
            "figures": [{"name": "load", "measured": 0.5, "target": 0.7, "at_most": False}]
        },
        "sparse": {"figures": [asdict(figure) for figure in figures], "copy_gb_s": 4000},
        "latency": {},
        "engines": {"own_equal": 1, "step": 2.5, "bounds": {"step": "<= 2"}},
    }
    lines = [f"{name} {json.dumps(report)}" for name, report in reports.items()]
    (tmp_path / "reports.txt").write_text("\n".join([*lines, "methods {broken\n"]))
    assert [figure.met for figure in read(json.dumps(reports["sparse"]))] == [True, False]
    command = [sys.executable, "-m", "bench.gpu.figures", str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (
        "methods: no figures" in said
        and "latency: no figures" in said
        and ">= 0.7" in said
        and "NO" in said
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (
        summary["transfer"][0]["met"] is False
        and len(summary["sparse"]) == 2
        and [one["met"] for one in summary["engines"]] == [None, False]
        and summary["methods"] == []
    )


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--help",), 0, "--bundle DIR"),
        (("1", "--bundle"), 2, "--bundle needs a folder"),
        (("4",), 2, "invalid choice"),
    ],
)
def test_the_command_line(arguments: tuple[str, ...], status: int, says: str) -> None:
    found, said = check(*arguments)
    assert found == status and says in said


@pytest.mark.parametrize("call", CALLS)
def test_a_calls_limits_fit_into_it(call: str) -> None:
    steps = CALLS[call]
    assert sum(step.seconds for step in steps) <= CALL_SECONDS - 2 * GRACE_S < 600
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        assert " " not in step.name or step.name.startswith("tests ")
        if step.command[0] == "-m":
            assert find_spec(step.command[1]) is not None
            assert not {"--made-up", "--cpu"} & set(step.command)
        for word in step.command:
            assert not word.endswith(".py") or (ROOT / word).is_file()
        if step.rehearsal:
            assert {"--made-up", "--cpu", "pytest"} & set(step.rehearsal)


def test_every_benchmark_can_be_rehearsed() -> None:
    needs_gpu = {step.name for steps in CALLS.values() for step in steps if not step.rehearsal}
    assert needs_gpu == {
        "tests semantics", "tests runtime", "tests sparse", "counters", "sanitizer",
    }  # fmt: skip


def test_a_step_that_hangs_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calls, "GRACE_S", 0.5)
    leave = (
        "import os, pathlib, time; pathlib.Path('/dev/shm/hotkv-' + os.environ['HOTKV_FOLDER_TAG']"
    )
    leave += " + 'left').mkdir(); time.sleep(60)"
    report = json.dumps(
        {"figures": [asdict(Figure("a figure", 1.0))], "server": {"order": ["flags"]}}
    )
    steps = [
        Step("hangs", 2, (PYTHON, "-c", leave)),
        Step("fails", 9, (PYTHON, "-c", "raise SystemExit('no luck')")),
        Step("reports", 9, (PYTHON, "-c", f"print('text'); print('{report}')")),
        Step("lacks", 9, (PYTHON,), ("no_such_program",)),
        Step("waits", 9, (PYTHON, "-c", "")),
    ]
    monkeypatch.setattr(calls, "has_gpu", lambda: True)
    begin_s = time.monotonic()
    runner = Runner(tmp_path, False, begin_s + 60)
    for step in steps[:4]:
        runner.run(step)
    assert time.monotonic() - begin_s < 20 and not list(SHM.glob(f"hotkv-check{os.getpid()}-*"))
    Runner(tmp_path, False, time.monotonic() + 1).run(steps[4])
    tell(runner, ["commit abc"], tmp_path, steps)
    said = capsys.readouterr().out
    table = said.partition("== steps")[2]
    assert re.search(r"hangs +\d s of +2  NOT ENDED", table)
    assert re.search(r"fails .*FAILED with 1: no luck", table)
    assert re.search(r"reports .* ended", table) and re.search(r"lacks .*no no_such_program", table)
    assert re.search(r"waits .*left out: no time", table)
    assert "commit abc" in table and '"order": ["flags"]' in table and "a figure" in said
    # The GPU machine sends back only few files.
    assert {one.name for one in tmp_path.iterdir()} == {"reports.txt", "check.log", "summary.json"}


def test_parts_of_two_calls_are_joined(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "packed.py").write_text("HERE = 1\n")
    command = ["tar", "cJf", "all", "-C", "site", "."]
    subprocess.run(command, cwd=tmp_path, check=True)
    content, bundle = (tmp_path / "all").read_bytes(), tmp_path / "bundle"
    environment = {"TMPDIR": str(tmp_path), "OUT": str(tmp_path / "out")}
    for number, part in ((1, content[:50]), (2, content[50:])):
        folder = bundle / str(number)
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(part)
        (folder / "count").write_text("2\n")
        flags = ("1", "--bundle", str(bundle), "--rehearse", "--only", "tests semantics")
        status, said = check(*flags, **environment)
        assert status == 0 and ("2 parts of the bundle, not all here yet" in said) == (number == 1)
        (folder / "part").unlink()
    assert "needs a GPU" in said
    assert (tmp_path / "hotkv-bundle/site/packed.py").exists()


def test_bundle_has_what_a_server_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    needed = {re.split(r"[>=<;\[]", one)[0] for one in wanted}
    (carried,) = re.findall(r"^HOTKV=\(([^)]*)\)", COLLECT.read_text(), re.MULTILINE)
    assert needed - HERE <= set(carried.split())


@pytest.mark.long
def test_a_call_is_rehearsed(tmp_path: Path) -> None:
    status, said = check(
        "1", "--rehearse", "--out", str(tmp_path), "--only", "stages", timeout_s=500
    )
    table = said.partition("== steps")[2]
    assert status == 0, said[-3000:]
    assert "REHEARSAL" in table and "unknown" not in table and '"ping_us"' in table
    assert re.search(r"stages .* ended", table)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.keys() == {"stages"} and summary["stages"]
    assert (tmp_path / "stages.json").exists()


@pytest.mark.campaign
@pytest.mark.timeout(3500)
@pytest.mark.parametrize("call", CALLS)
def test_whole_calls_are_rehearsed(tmp_path: Path, call: str) -> None:
    status, said = check(call, "--rehearse", "--out", str(tmp_path), timeout_s=3400)
    assert status == 0, said.partition("== steps")[2] + said[-3000:]
    assert "NOT ENDED" not in said and "FAILED" not in said
