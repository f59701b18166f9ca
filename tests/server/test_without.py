"""Tests that each capability can be deleted: its folder, and the lines that register it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hotkv_server.settings import tomllib
from hotkv_server.startup import capabilities
from tools.mutate_tests import TESTS

ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
CAPABILITIES = tuple(
    module.__name__.split(".")[1]
    for module in capabilities.CAPABILITIES
    if module.__name__.startswith("hotkv_server.")
)
"""Those of sparse decode go with `sparse/`: `tools.without_sparse`."""
QUICK = tuple(f"tests/server/test_{name}.py" for name in ("transfers", "flush", "ranks", "fence"))
SHORT = "tests/server/test_transfers.py::test_bytes_move_between_engines_and_are_stored_once"
SLOW = tuple(f"tests/server/test_{name}.py" for name in ("life", "restart"))
"""QUICK, SHORT and SLOW need no capability."""
LINES = re.compile(r"    (\w+),|from hotkv_server\.(\w+) import capability as \w+")


def without(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Copies the server. Environment of processes that import the copy."""
    server = folder / "hotkv_server"
    # Compiled kernels stay valid, as `copytree` keeps times. Files that others write at this
    # moment are left out.
    unfinished = shutil.ignore_patterns("*.pyc.*", "*.tmp.*")
    shutil.copytree(ROOT / "server" / "hotkv_server", server, ignore=unfinished)
    for name in names:
        shutil.rmtree(server / name)
    file = server / "startup" / "capabilities.py"
    kept, gone = list[str](), list[str]()
    for line in file.read_text().splitlines(keepends=True):
        found = LINES.fullmatch(line.strip("\n"))
        (gone if found and (found[1] or found[2]) in names else kept).append(line)
    assert len(gone) == 2 * len(names), f"two lines register each of {names}: {gone}"
    file.write_text("".join(kept))
    # Other packages come from this run's paths.
    path = filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": ":".join(path)}


SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()
"""Keeps the working directory out of the import path. Before Python 3.11, there is no such flag,
and nothing of hotkv there."""


def run(command: tuple[str, ...], environment: dict[str, str]) -> str:
    """Runs a module with the copy. Its output; a failure raises AssertionError."""

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (sys.executable, *SAFE_PATH, *arguments),
            env=environment, capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip

    shown = python("-c", "import hotkv_server; print(hotkv_server.__file__)")
    assert shown.stdout.startswith(environment["PYTHONPATH"].split(":")[0])
    ended = python("-m", *command)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    return ended.stdout


def run_tests(files: tuple[str, ...], environment: dict[str, str]) -> None:
    run(("pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *files), environment)


@pytest.mark.parametrize("name", CAPABILITIES)
def test_capability_is_where_contributing_says(name: str) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    protected = {module for one in contracts for module in one.get("protected_modules", ())}
    assert f"hotkv_server.{name}" in protected, "add it to an import contract of pyproject.toml"
    folder = f"server/hotkv_server/{name}/"
    assert (ROOT / folder / "README.md").is_file(), "write its README"
    assert any(path.startswith(folder) for path in TESTS), "add it to tools/mutate_tests.py"
    listed = re.search(r"((?:\w+/ )+\w+/)\n +the capabilities", CONTRIBUTING.read_text())
    assert listed and f"{name}/" in listed[1].split(), "add it to the list in CONTRIBUTING.md"


@pytest.mark.campaign
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_server_without_one_keeps_its_other_promises(name: str, tmp_path: Path) -> None:
    run_tests(QUICK[:1], without(tmp_path, (name,)))


def test_a_server_without_any_stores_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    environment = without(tmp_path, CAPABILITIES)
    with pytest.raises(AssertionError, match=r"absent\.py"):
        run_tests(("absent.py",), environment)
    run_tests((SHORT,), environment)


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(QUICK, marks=pytest.mark.long),
        pytest.param(SLOW, marks=[pytest.mark.campaign, pytest.mark.timeout(1200)]),
    ],
    ids=["quick", "restarts"],
)
def test_a_server_without_any_keeps_its_other_promises(
    files: tuple[str, ...], tmp_path: Path
) -> None:
    run_tests(files, without(tmp_path, CAPABILITIES))
