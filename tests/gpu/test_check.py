"""Tests `bench/gpu/check.sh`, which runs the GPU tests and benchmarks, without a GPU."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.gpu.figures import Figure, read
from demo.processes import ROOT, SHM
from hotkv_server.settings import tomllib

SCRIPT = ROOT / "bench/gpu/check.sh"
ORDER = [
    "tests semantics",
    "tests server",
    "bench first",
    "tests runtime",
    "tests sparse",
    "tests server",
    "tests server",
    "bench arena",
    "bench sparse",
    "bench decode",
    "bench million",
    "bench transfer",
    "bench latency",
    "bench residency",
    "bench methods",
    "bench per_token",
]


def test_table_has_all_that_ended(tmp_path: Path) -> None:
    figures = [Figure("score", 0.5, 0.4), Figure("build", 0.5, 0.03, True)]
    reports = {
        "transfer": {
            "figures": [{"name": "load", "measured": 0.5, "target": 0.7, "at_most": False}]
        },
        "sparse": {"figures": [asdict(figure) for figure in figures], "copy_gb_s": 4000},
        "latency": {},
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
        and summary["methods"] == []
    )


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--help",), 0, "--wheels DIR"),
        (("--wheels",), 2, "--wheels needs a folder"),
        (("--part", "half"), 2, "--part needs tests or speed"),
        (("--what",), 2, "unknown argument --what"),
    ],
)
def test_the_command_line(arguments: tuple[str, ...], status: int, says: str) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status and says in done.stdout + done.stderr


def parts() -> list[tuple[str, int]]:
    """(kind and name, time limit in seconds), in the script's order."""
    found = re.findall(r'^(test|bench)_if "\$\w+" (\w+) (\d+)', SCRIPT.read_text(), re.MULTILINE)
    return [(f"{'tests' if kind == 'test' else kind} {name}", int(s)) for kind, name, s in found]


def test_bytes_and_copies_are_answered_in_time() -> None:
    """The limits bound the run even if every part hangs."""
    assert [name for name, _ in parts()] == ORDER
    limits = [limit for _, limit in parts()]
    (whole,) = re.findall(r"^ALL_SECONDS=(\d+)$", SCRIPT.read_text(), re.MULTILINE)
    assert sum(limits[:3]) <= 120 and sum(limits) <= int(whole) < 12 * 60
    assert sum(limits[:7]) <= 6 * 60 and sum(limits[7:]) <= 6 * 60


def test_the_wheels_are_those_that_a_server_needs() -> None:
    """The GPU machine has numpy, numba, tomli and xxhash."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    needed = {re.split(r"[>=<;\[]", one)[0] for one in wanted}
    carried = re.findall(r'"([a-z0-9-]+)>=', (ROOT / "tools/gpu_wheels.sh").read_text())
    assert needed - {"numpy", "numba", "tomli", "xxhash"} | {"pytest"} <= set(carried)


@pytest.mark.long
def test_a_part_that_hangs_costs_only_itself(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "*bench.gpu.figures*) ;;\n"
        f"*bench.gpu.arena*) mkdir {SHM}/hotkv-${{HOTKV_FOLDER_TAG}}left\n"
        f"  echo $HOTKV_FOLDER_TAG > {tmp_path}/tag; sleep 60 ;;\n"
        "*bench.gpu*) echo '{\"figures\": []}' ;;\n"
        "*pytest*) echo 1 passed ;;\n"
        "esac\n"
    )
    fake.chmod(0o755)
    script = tmp_path / "bench" / "gpu" / "check.sh"
    script.parent.mkdir(parents=True)
    text = SCRIPT.read_text()
    script.write_text(re.sub(r" arena \d+", " arena 1", text))
    done = subprocess.run(
        ["bash", str(script), "--made-up", "--out", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=50, env={**os.environ, "PYTHON": str(fake)},
    )  # fmt: skip
    lines = done.stdout.split("== after")[1]
    assert done.returncode == 1 and re.search(r"bench: arena +NOT ENDED in \d s", lines)
    assert re.search(r"bench: sparse +ended in", lines) and re.search(r"bench: methods", lines)
    assert not list(SHM.glob(f"hotkv-{(tmp_path / 'tag').read_text().strip()}*"))
    out = tmp_path / "out"
    reports = (out / "reports.txt").read_text().splitlines()
    benches = [name.removeprefix("bench ") for name in ORDER if name.startswith("bench")]
    assert reports == [f'{name} {{"figures": []}}' for name in benches if name != "arena"]
    # The GPU machine sends back only few files.
    assert {one.name for one in out.iterdir()} == {"reports.txt", "check.log"}


@pytest.mark.campaign
@pytest.mark.timeout(1400)
@pytest.mark.skipif(shutil.which("g++") is None, reason="kernels run on the CPU where g++ is")
def test_whole_check_runs_over_a_fake_device(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT), "--made-up", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=1390,
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    # Shown if it fails: the part from `== after` on.
    assert done.returncode == 0, done.stdout.partition("== after")[2][:3000] + done.stderr[-2000:]
    begun = re.findall(r"^== (tests|bench)/gpu/(?:test_)?(\w+)\.py", done.stdout, re.MULTILINE)
    needs_gpu = {"tests semantics", "tests runtime", "tests sparse"}
    assert [" ".join(one) for one in begun] == [one for one in ORDER if one not in needs_gpu]
    assert "NOT ENDED" not in done.stdout and "CRASHED" not in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) == {name.split()[1] for name in ORDER if name.startswith("bench")}
    assert all(summary.values())
    equal = [one for one in summary["decode"] if one["name"].startswith("decode: tokens")]
    assert [one["met"] for one in equal] == [True, True]
