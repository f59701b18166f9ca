"""Kernels compiled for a processor without byte dot products give the same scores."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core import config

from hotkv_sparse import formats
from hotkv_sparse.axes import Axes
from hotkv_sparse.representations import build
from hotkv_sparse.scores import prepare, score
from tests.sparse.support import make_case

pytestmark = pytest.mark.skipif(
    config.CPU_FEATURES is not None, reason="the processor is chosen already"
)
PLAIN_X86 = (
    "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+cx16"
)
GROUPS = (1, 3, 4, 7)


def results() -> dict[str, np.ndarray]:
    found = {}
    for group in GROUPS:
        case = make_case(11, 40, 32, 2, group, 96, True, True)
        turn = np.linalg.qr(np.random.default_rng(12).standard_normal((2, 96, 96)))[0]
        axes = Axes(turn.astype(np.float32), np.ones((2, 2), np.float32))
        for name in formats.FORMATS:
            packed = build(name, case.keys, case.mu, case.num_tokens, axes=axes)
            found[f"{name} {group} bytes"] = packed
            query = prepare(name, case.query, case.mu, axes=axes)
            found[f"{name} {group}"] = score(query, packed)
    return found


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names x86 features")
@pytest.mark.slow
@pytest.mark.long
def test_without_byte_products_the_scores_are_the_same(tmp_path: Path) -> None:
    target = tmp_path / "scores.npz"
    # A separate folder: if two processes write an index, numba keeps the kernels of only one.
    features = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": PLAIN_X86}
    features["NUMBA_CACHE_DIR"] = str(Path(sys.prefix) / "numba-haswell")
    # Compiles only the kernels that `results` calls: all of them would take twice as long.
    code = (
        "import sys, types, numpy as np\n"
        "from hotkv_sparse import build_kernels, score_kernels, vectors\n"
        "used = types.SimpleNamespace(**(vars(build_kernels) | vars(score_kernels)))\n"
        "sys.modules['hotkv_sparse.kernels'] = used\n"
        "from tests.sparse.test_other_machines import results\n"
        "assert not vectors.VNNI\n"
        "np.savez(sys.argv[1], **results())\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run(
        [sys.executable, "-c", code, str(target)],
        env={**os.environ, **features, "PYTHONPATH": path},
        check=True,
        timeout=200,
    )
    with np.load(target) as there:
        for name, here in results().items():
            if name.endswith("bytes"):
                assert np.count_nonzero(there[name] != here) <= 1e-3 * here.size
            else:
                np.testing.assert_allclose(there[name], here, rtol=1e-3, atol=5e-3)
