"""Runs `mooncake_world`'s checks against a real Mooncake Store. Skipped without Mooncake's
client (`make programs`) or network namespaces."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.tiers.mooncake_world import CHECKS


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    done = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True)
    if done.returncode:
        pytest.skip("Mooncake's client can't be loaded (`make programs`)")
    if not shutil.which("unshare") or subprocess.run(["unshare", "-n", "true"]).returncode:
        pytest.skip("network namespaces are not allowed")


LONG = ("compressed", "full")


@pytest.mark.parametrize(
    "check",
    [pytest.param(one, marks=[pytest.mark.long] * (one in LONG)) for one in sorted(CHECKS)],
)
@pytest.mark.timeout(600)
def test_over_a_real_store(check: str) -> None:
    process = subprocess.Popen(
        ["unshare", "-n", sys.executable, "-m", "tests.tiers.mooncake_world", check],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, log = process.communicate(timeout=500)
    finally:
        # Of a failed check.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert not process.returncode and said.endswith("passed\n"), log[-4000:]
