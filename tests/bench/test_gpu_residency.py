"""Tests the GPU benchmarks of residency on the CPU, with fewer layers and tokens, against dense
attention."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.gpu import context as contexts
from bench.gpu.kernels import HostTensors
from bench.gpu.model import TINY, DummyModel
from bench.gpu.resident_model import HostPages, Resident, dense_tokens, equal_share, resident_tokens
from tests.sparse.cuda_support import needs_compiler

pytestmark = needs_compiler


@pytest.mark.long
def test_tokens_are_dense_where_the_budget_covers() -> None:
    kernels, model = HostTensors(), DummyModel(TINY, torch.device("cpu"))
    host = HostPages(TINY, 512)
    wide = replace(contexts.SMALL_CONFIG, sparse_topk=1200)
    with torch.inference_mode():
        one = Resident(kernels, model, host, wide, rows=2, steps=4)
        told, answers = resident_tokens(one, None, 4)
        dense = dense_tokens(model, host, told, 2)
        assert equal_share(answers, dense) == 1.0 and one.context.pulled() > 0
        new_pages = one.context._table[:, 512 // contexts.BLOCK_TOKENS]
        for cache in one.context.caches:
            assert np.asarray(cache)[new_pages].any(axis=1).all(), "new tokens are written"
        few = Resident(kernels, model, host, contexts.SMALL_CONFIG, rows=2, steps=4)
        _, sparse = resident_tokens(few, told, 4)
        assert equal_share(sparse, dense) < 1.0
