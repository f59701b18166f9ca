"""Runs the tests of kernels with numba's checks of array bounds, which the product leaves out.

Not covered is access by address: `hotkv_proto.table_reading`, `integrity.sum_kernels.add_sums`,
`tiers.disk.disk_kernels`, the groups of `tiers.compression.codec_kernels`,
`hotkv_sparse.vectors`. `tests/core/test_kernel_addresses.py` checks that arrays behind addresses
are alive.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo.processes import ROOT

TESTS = {
    "core": ("index", "slabs", "hotness", "policy", "duel", "checks"),
    "dataplane": ("plans",),
    "tiers": ("disk_kernels", "compression"),
    "sparse": ("scores", "selection", "sketches", "hotset", "axes"),
}


def checked(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs Python with bounds checks; kernels are compiled into `folder`."""
    checks = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(folder)}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **checks, "HYPOTHESIS_PROFILE": "quick"},
    )


BEYOND = """
import numba, numpy as np

@numba.njit
def beyond(values):
    return values[len(values)]

beyond(np.zeros(3))
"""


@pytest.mark.long
def test_an_index_beyond_an_array_is_found(tmp_path: Path) -> None:
    assert "IndexError: index is out of bounds" in checked("-c", BEYOND, folder=tmp_path).stderr


PACKS = """
import numpy as np
from hotkv_server.events.event_kernels import MOST_BYTES, pack_int32s

edges = [1 << bits for bits in (5, 7, 8, 15, 16, 31)]
values = np.array([sign * (one - 1) for one in edges for sign in (1, -1)], np.int32)
assert pack_int32s(values, np.zeros(MOST_BYTES * len(values), np.uint8)) > len(values)
assert pack_int32s(np.full(9, 1 << 30, np.int32), np.zeros(9 * MOST_BYTES, np.uint8)) == 45
"""


@pytest.mark.long
def test_the_packing_of_events_stays_in_its_arrays(tmp_path: Path) -> None:
    done = checked("-c", PACKS, folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", TESTS)
def test_no_kernel_leaves_its_arrays(part: str, tmp_path: Path) -> None:
    files = [f"tests/{part}/test_{name}.py" for name in TESTS[part]]
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not long and not slow"]
    done = checked("-m", "pytest", *options, *files, folder=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]
