"""Tests that a server needs no name for its user, and no directory of compiled kernels that it may
write: OpenShift runs an image as a random user id in group 0."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from demo.processes import ROOT, Server
from hotkv_client import BlockRun, GroupHashes
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto import native
from tests.server.faulty import folder
from tests.server.support import block_ids, hashes

__all__ = ["folder"]

UID = 1_000_680_000
COMPILED_S = 300.0
"""A busy machine compiles all kernels in that time."""
MODULE = """\
import numba

@numba.njit(cache=True)
def double(number):
    return 2 * number
"""
WITHOUT_PLACES = """\
import logging, sys
from numba.core import caching
places = caching.CodeLibraryCacheImpl._locator_classes
places[:] = [one for one in places if "UserProvided" in one.__name__]
logging.basicConfig(format="%(message)s", level="INFO")
from hotkv_proto import native
"""
"""numba looks for a directory in NUMBA_CACHE_DIR only: root may write everywhere else."""


def ran(code: str, folder: Path, cache: str) -> subprocess.CompletedProcess[str]:
    where = [str(folder), *sys.path]
    env = {**os.environ, "NUMBA_CACHE_DIR": cache, "TMPDIR": str(folder)}
    env["PYTHONPATH"] = os.pathsep.join(where)
    command = [sys.executable, "-c", WITHOUT_PLACES + code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=120)


@pytest.mark.parametrize("cache", ["", "/dev/null/kernels"])
def test_kernels_without_a_directory_are_compiled_again(tmp_path: Path, cache: str) -> None:
    (tmp_path / "some_kernels.py").write_text(MODULE)
    code = "print(native.load('some_kernels').double(21), native.is_temporary())"
    done = ran(code, tmp_path, cache)
    assert (done.returncode, done.stdout) == (0, "42 True\n"), done.stderr
    assert native.NO_DIRECTORY in done.stderr and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("hotkv-kernels-*")), "the process removes what it compiled"
    kept = ran(code, tmp_path, str(tmp_path / "kernels"))
    assert (kept.stdout, kept.stderr) == ("42 False\n", "")


def test_compiling_ahead_needs_a_directory(tmp_path: Path) -> None:
    (tmp_path / "some_kernels.py").write_text(MODULE)
    code = (
        "from hotkv_server import cli; cli.kernels = lambda: ['some_kernels']\n"
        "sys.exit(cli.main(['compile']))"
    )
    done = ran(code, tmp_path, "")
    assert done.returncode == 1 and f"hotkv-server: {native.NO_DIRECTORY}" in done.stderr
    assert ran(code, tmp_path, str(tmp_path / "kernels")).returncode == 0


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_user_without_a_name_serves(folder: Path) -> None:
    """With one capability, to read this interpreter's files."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("setpriv is not installed")
    read = "-all,+dac_read_search"
    user = (f"--reuid={UID}", "--regid=0", "--clear-groups")
    bare = ("env", "--unset=NUMBA_CACHE_DIR", "HOME=/")
    rights = (f"--inh-caps={read}", f"--ambient-caps={read}")
    command = (setpriv, *user, *rights, *bare, sys.executable, "-m", "hotkv_server.cli", "run")
    folder.chmod(0o755)
    for name, mode in (("run", 0o755), ("arena", 0o700)):
        (folder / name).mkdir(mode=mode)
        os.chown(folder / name, UID, 0)
    with Server(folder, "16MiB", command=command) as server:
        server.wait_ready(COMPILED_S)
        assert native.NO_DIRECTORY in server.log.read_text()
        assert {path.stat().st_uid for path in (folder / "run").iterdir()} == {UID}
        with contextlib.closing(PagedEngine(server.target).connect()) as engine:
            chain = hashes(2)
            stored = engine.session.store("s", "s", [BlockRun(0, chain, block_ids(2))], 60)
            assert stored.result(60).results[0].tolist() == [1, 1]
            found = engine.session.acquire("r", [GroupHashes(0, chain)]).result(60)
            assert found.pinned[0].all()
