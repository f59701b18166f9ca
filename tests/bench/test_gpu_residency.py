"""The benchmarks of residency do on the CPU what they do on a GPU, with fewer layers and tokens:
steps run, slots hold the arena's bytes, and tokens are those of dense attention."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.gpu import context as contexts
from bench.gpu.kernels import HostTensors
from bench.gpu.model import TINY, DummyModel
from bench.gpu.resident_model import (
    HostPages,
    Resident,
    dense_tokens,
    equal_share,
    resident_tokens,
)
from tests.sparse.cuda_support import CpuDevice, needs_compiler

pytestmark = needs_compiler


@pytest.mark.long
def test_its_steps_pull_the_bytes_of_the_arena() -> None:
    page_bytes = contexts.page_bytes_of(TINY)
    pages = contexts.random_pages(48, page_bytes)
    assert np.isfinite(pages.view(np.float16)).all() and pages.view(np.float16).std() > 0.5
    context = contexts.Context(
        CpuDevice(3),
        contexts.SMALL_CONFIG,
        768,
        pages,
        pages.ctypes.data,
        lambda array: array.ctypes.data,  # type: ignore[attr-defined]
        shape=TINY,
        steps=6,
        rows=2,
    )
    context.catch_up()
    assert all(np.any(layer.index.pool) for layer in context.layers)  # type: ignore[call-overload]
    context.step()
    held = context.check()
    assert held > 40, "a first step fills the hot sets"
    for _ in range(3):
        context.advance()
        context.step()
    assert context.check() >= held
    assert context.pulled() > 40
    target = context.device.zeros((context.freed, page_bytes), np.uint8)
    context.stage(target)
    staged = context.device.read(target)[context.num_here :]
    assert np.array_equal(staged, pages[context.num_here : context.freed])
    context.caches[0][5:] = 0  # type: ignore[index]
    with pytest.raises(ValueError, match="is not block"):
        context.check()


@pytest.mark.long
def test_tokens_are_those_of_dense_attention_where_the_budget_covers() -> None:
    """And not where it doesn't: else nothing was shown."""
    kernels, model = HostTensors(), DummyModel(TINY, torch.device("cpu"))
    host = HostPages(TINY, 512)
    wide = replace(contexts.SMALL_CONFIG, sparse_topk=600)
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
