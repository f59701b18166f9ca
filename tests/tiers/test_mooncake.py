"""The tier in Mooncake Store keeps the contract over a real store and refuses foreign values. Two
daemons share a real store while their parts are killed. Skipped without the libraries of Mooncake's
client (`make programs`) or the right to make a network namespace."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.tiers.mooncake_world import CHECKS


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    done = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True)
    if done.returncode:
        pytest.skip("Mooncake's client can't be loaded (`make programs`)")
    if not shutil.which("unshare") or subprocess.run(["unshare", "-n", "true"]).returncode:
        pytest.skip("network namespaces are not allowed")


LONG = ("kills", "compressed", "full")
MANY = pytest.param("kills", ("2", "30"), marks=pytest.mark.campaign, id="many kills")
"""Enough faults for each kind with each part."""


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        *(
            pytest.param(one, (), id=one, marks=[pytest.mark.long] * (one in LONG))
            for one in sorted(CHECKS)
        ),
        MANY,
    ],
)
@pytest.mark.timeout(1800)
def test_over_a_real_store(check: str, arguments: Sequence[str]) -> None:
    process = subprocess.Popen(
        ["unshare", "-n", sys.executable, "-m", "tests.tiers.mooncake_world", check, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, log = process.communicate(timeout=1800 if arguments else 600)
    finally:
        # End the processes that a failed check has left in its session.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert not process.returncode and said.endswith("passed\n"), log[-4000:]
