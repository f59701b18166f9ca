"""The mean key, batch by batch."""

import numpy as np
import pytest

from hotkv.errors import HotKVError
from hotkv.sparse.centre import MIN_TOKENS, CentreEstimate


def test_the_mean_of_all_batches() -> None:
    keys = np.random.default_rng(0).standard_normal((3000, 2, 16)).astype(np.float32) + 3
    estimate = CentreEstimate(2, 16)
    estimate.add(keys[: MIN_TOKENS - 1])
    assert estimate.mu() is None
    estimate.add(keys[MIN_TOKENS - 1 :])
    broken = keys[:5].copy()
    broken[:, 1, 3] = np.inf
    estimate.add(broken)
    assert estimate.num_tokens == 3000
    np.testing.assert_allclose(estimate.mu(), keys.mean(axis=0), rtol=1e-5)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(HotKVError, match=r"pass \[tokens, 2, 16\]"):
        CentreEstimate(2, 16).add(np.zeros((4, 16, 2), np.float32))
