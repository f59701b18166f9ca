"""The tier in Mooncake Store keeps the contract over a real store, and refuses what it did not
write. Skipped without `mooncake-transfer-engine-non-cuda` or the right to make a network
namespace."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.tiers.mooncake_world import CHECKS

pytest.importorskip("mooncake", reason="mooncake-transfer-engine-non-cuda brings the store")
if not shutil.which("unshare") or subprocess.run(["unshare", "-n", "true"]).returncode:
    pytest.skip("network namespaces are not allowed", allow_module_level=True)


@pytest.mark.parametrize("check", sorted(CHECKS))
def test_over_a_real_store(check: str) -> None:
    process = subprocess.Popen(
        ["unshare", "-n", sys.executable, "-m", "tests.tiers.mooncake_world", check],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, log = process.communicate(timeout=120)
    finally:
        # Its own session: whatever a failed check has left.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert not process.returncode and said.endswith("passed\n"), log[-4000:]
