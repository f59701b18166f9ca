"""Tests that processors without dot products of bytes compute the same scores."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core import config

from hotkv_sparse import formats
from hotkv_sparse.axes import Axes
from hotkv_sparse.scores import prepare, score
from hotkv_sparse.sketches import build
from tests.sparse.support import make_case

pytestmark = pytest.mark.skipif(
    config.CPU_FEATURES is not None, reason="the processor is chosen already"
)
PLAIN_X86 = (
    "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+cx16"
)
# All kernels would take four times as long.
SCORES = """
import pickle, sys, types
from pathlib import Path
from hotkv_sparse import score_kernels, vectors
sys.modules["hotkv_sparse.all_kernels"] = types.SimpleNamespace(**vars(score_kernels))
from hotkv_sparse.scores import score
assert not vectors.VNNI
file = Path(sys.argv[1])
file.write_bytes(pickle.dumps([score(*one) for one in pickle.loads(file.read_bytes())]))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names x86 features")
@pytest.mark.slow
@pytest.mark.long
def test_without_byte_products_the_scores_are_the_same(tmp_path: Path) -> None:
    asked = []
    for group in (1, 3, 4, 7):
        case = make_case(11, 40, 32, 2, group, 96, True, True)
        turn = np.linalg.qr(np.random.default_rng(12).standard_normal((2, 96, 96)))[0]
        axes = Axes(turn.astype(np.float32), np.ones((2, 2), np.float32))
        for name in formats.FORMATS:
            packed = build(name, case.keys, case.mu, case.num_tokens, axes=axes)
            asked.append((prepare(name, case.query, case.mu, axes=axes), packed))
    file = tmp_path / "scores"
    file.write_bytes(pickle.dumps(asked))
    # If two processes write the same index, numba keeps only one's kernels.
    features = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": PLAIN_X86}
    features["NUMBA_CACHE_DIR"] = str(Path(sys.prefix) / "numba-haswell")
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run(
        [sys.executable, "-c", SCORES, str(file)],
        env={**os.environ, **features, "PYTHONPATH": path},
        check=True,
        timeout=200,
    )
    for one, there in zip(asked, pickle.loads(file.read_bytes()), strict=True):
        np.testing.assert_allclose(there, score(*one), rtol=1e-3, atol=5e-3)
