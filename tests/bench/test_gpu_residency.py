"""The benchmark of residency does on the CPU what it does on a GPU, with fewer layers and tokens:
its steps run and its slots hold the arena's bytes."""

import numpy as np
import pytest

from bench.gpu import residency
from hotkv_sparse.config import SparseConfig
from tests.sparse.cuda_support import CpuDevice, needs_compiler

pytestmark = needs_compiler
CONFIG = SparseConfig(sparse_topk=256, dense_layers=(), min_context_tokens=0, residency="host")


@pytest.mark.long
def test_its_steps_pull_the_bytes_of_the_arena() -> None:
    page_bytes = 16 * residency.KV_HEADS * 2 * residency.HEAD_SIZE * 2
    pages = residency.random_pages(48, page_bytes)
    context = residency.Context(
        CpuDevice(3),
        CONFIG,
        768,
        pages,
        pages.ctypes.data,
        lambda array: array.ctypes.data,  # type: ignore[attr-defined]
        num_layers=2,
        steps=6,
    )
    context.catch_up()
    assert all(np.any(layer.index.pool) for layer in context.layers)  # type: ignore[call-overload]
    context.step()
    assert context.check() > 40, "a first step fills the hot sets"
    for _ in range(3):
        context.advance()
        context.step()
    assert context.check() > 40
    assert int(context.work.faults[2]) > 40  # type: ignore[index]
    target = context.device.zeros((context.freed, page_bytes), np.uint8)
    context.stage(target)
    staged = context.device.read(target)[context.num_here :]
    assert np.array_equal(staged, pages[context.num_here : context.freed])
    context.caches[0][5:] = 0  # type: ignore[index]
    with pytest.raises(ValueError, match="is not block"):
        context.check()
