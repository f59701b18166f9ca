"""Compares the CUDA kernels that build and score sketches, on the CPU, with the numpy
references."""

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hotkv_proto.errors import HotKVError
from hotkv_sparse import formats
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.cuda.device import FOLDER
from hotkv_sparse.cuda.hotsets import CudaHotSets
from hotkv_sparse.cuda.index import Index, IndexShape, Pages
from hotkv_sparse.cuda.selector import CudaSelector, Queries
from hotkv_sparse.cuda.workspace import StepShape, Workspace
from hotkv_sparse.scores import prepare, score
from hotkv_sparse.sketches import build
from tests.oracles.sparse import approximate_keys, as_stored, unpack_tokens
from tests.sparse.cuda_support import CpuDevice, needs_compiler
from tests.sparse.support import SUMMARIES, TOKEN_FORMATS, Case, make_case
from tools import check_kernels

pytestmark = [needs_compiler, pytest.mark.long]
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LAYOUTS = ("NHD", "HND", "pairs")
BF16_NAN, FP8_NAN = 0x7FC0, 0x7F
COMPILER = check_kernels.find_compiler()


def paged(
    keys_BTHD: np.ndarray, layout: str, dtype: str, order: np.ndarray
) -> tuple[Pages, np.ndarray]:
    """An engine's KV cache with block i in page `order[i]` and NaN elsewhere, and the keys as it
    rounds them.

    keys_BTHD: blocks, tokens, KV heads, channels.
    layout: "HND": heads before tokens; "pairs": keys and values of a block side by side; else
        tokens first.
    """
    block_tokens, kv_heads, head_size = keys_BTHD.shape[1:]
    scales = None
    if dtype.startswith("float8"):
        scales = np.linspace(0.5, 2.0, kv_heads, dtype=np.float32)
        held, stored = as_stored(keys_BTHD / scales[:, None], dtype)
        held = held * scales[:, None]
    else:
        held, stored = as_stored(keys_BTHD, dtype)
    body = stored.transpose((0, 2, 1, 3) if layout == "HND" else (0, 1, 2, 3))
    shape = (int(order.max(initial=0)) + 1, 2, *body.shape[1:])
    nothing = {"bfloat16": BF16_NAN, "float8_e4m3fn": FP8_NAN, "float8_e5m2": FP8_NAN}
    cache = np.full(shape, nothing.get(dtype, np.nan), stored.dtype)
    cache[order, 0] = body
    if layout != "pairs":
        cache = np.ascontiguousarray(cache.swapaxes(0, 1))
    page, inner = body[0].size * (2 if layout == "pairs" else 1), (kv_heads * head_size, head_size)
    token, head = (head_size, block_tokens * head_size) if layout == "HND" else inner
    return Pages(cache, dtype, page, token, head, scales, int(scales is not None)), held


def built(
    case: Case, name: str, dtype: str, layout: str, seed: int
) -> tuple[Index, np.ndarray, np.ndarray]:
    """(index, row of each block or -1 without a sketch, rounded keys)."""
    num_blocks, block_tokens, kv_heads, head_size = case.keys.shape
    rng, shape = np.random.default_rng(seed), IndexShape(name, kv_heads, head_size, block_tokens)
    index = Index(CpuDevice(seed), shape, num_blocks + 3, case.mu)
    index.pool[:] = 0xA5
    order = rng.permutation(num_blocks + 2)[:num_blocks].astype(np.int32)
    rows = rng.permutation(np.arange(-1, num_blocks + 3))[:num_blocks].astype(np.int32)
    keys, held = paged(case.keys, layout, dtype, order)
    index.build(keys, order, rows, num_blocks, case.num_tokens)
    return index, rows, held


def heads_of(index: Index) -> np.ndarray:
    shape = index.shape
    return index.pool[:, : shape.kv_heads * shape.head_bytes].reshape(
        index.num_rows, shape.kv_heads, shape.head_bytes
    )


small = st.builds(
    make_case,
    seed=st.integers(0, 2**32 - 1),
    num_blocks=st.integers(1, 6),
    block_tokens=st.sampled_from([1, 7, 16, 20, 32, 48]),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 4, 7, 8, 9]),
    head_size=st.sampled_from([16, 40, 64, 80, 96, 128, 192, 256]),
    ragged=st.booleans(),
    centred=st.booleans(),
)


@given(
    small,
    st.sampled_from(TOKEN_FORMATS),
    st.sampled_from(["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]),
    st.sampled_from(LAYOUTS),
    st.integers(0, 9),
)
@quick
def test_builds_what_the_reference_builds(
    case: Case, name: str, dtype: str, layout: str, seed: int
) -> None:
    index, rows, held = built(case, name, dtype, layout, seed)
    size, found = case.keys.shape[3], heads_of(index)[rows[rows >= 0]]
    expected = build(name, held, case.mu, case.num_tokens)[rows >= 0]
    want, have = (unpack_tokens(name, packed, size) for packed in (expected, found))
    same = want.levels[..., :size] == have.levels[..., :size]
    whole = same.all(axis=-1)
    assert np.array_equal(want.sigma < 0, have.sigma < 0)
    # Halfway values may be rounded either way, and sigma may differ in its last bit.
    assert same.mean() > 0.999 or (~same).sum() <= 2
    np.testing.assert_allclose(have.sigma[whole], want.sigma[whole], rtol=2**-9, atol=2**-23)
    keys = [approximate_keys(name, packed, size) for packed in (found, expected)]
    np.testing.assert_allclose(*keys, rtol=0.01, atol=0.8 * np.abs(held).max())
    untouched = np.setdiff1d(np.arange(index.num_rows), rows)
    assert (index.pool[untouched] == 0xA5).all()


def selector_of(
    case: Case, name: str, rows: np.ndarray, packed: np.ndarray, seed: int
) -> CudaSelector:
    """All blocks but the last may be selected.

    rows: of each block's sketch.
    packed: all sketches, one a row.
    """
    num_blocks, block_tokens, kv_heads, head_size = case.keys.shape
    device, most = CpuDevice(seed), num_blocks + 2
    config = SparseConfig(scorer=name, sink_tokens=0, recent_tokens=1, dense_layers=())
    sizes = (len(case.query), kv_heads, head_size, most)
    work = Workspace(device, config, StepShape(2, most, block_tokens, *sizes))
    index = Index(device, IndexShape(name, kv_heads, head_size, block_tokens), len(packed), case.mu)
    heads_of(index)[:] = packed
    pages = Pages(np.zeros(1, np.float32), "float32", 0, 0, 0)
    selector = CudaSelector(work, 0, index, pages, pages, CudaHotSets(work, (), 0))
    work.set_blocks(1, 0, rows, np.zeros(num_blocks, np.int64))
    work.begin(np.array([0, (num_blocks - 1) * block_tokens + 1], np.int32))
    work.scores[:] = np.nan
    return selector


@given(small, st.sampled_from(TOKEN_FORMATS + SUMMARIES), st.integers(0, 9))
@example(make_case(1, 150, 16, 2, 3, 64, False, True), "rot2u", 3)
@quick
def test_scores_what_the_reference_scores(case: Case, name: str, seed: int) -> None:
    num_blocks, block_tokens, _, head_size = case.keys.shape
    rows = np.random.default_rng(seed).permutation(num_blocks + 2)[:num_blocks].astype(np.int32)
    num_bytes = formats.head_bytes(name, block_tokens, head_size)
    packed = np.zeros((num_blocks + 2, case.kv_heads, num_bytes), np.uint8)
    packed[rows] = build(name, case.keys, case.mu, case.num_tokens)
    selector = selector_of(case, name, rows, packed, seed)
    queries = np.stack([np.full_like(case.query, np.nan), case.query])
    scale = 1.0 / np.sqrt(head_size)
    selector.score(Queries(queries, "float32", case.query.size, head_size), scale)
    first, last = selector._workspace.plan[1, :2]
    assert (first, last) == (0, num_blocks - 1)
    found = selector._workspace.scores
    expected = score(prepare(name, case.query, case.mu), packed, rows)
    np.testing.assert_allclose(found[1, :, :last], expected[:, :last], rtol=2e-5, atol=2e-4)
    assert np.isnan(found[0]).all() and np.isnan(found[1, :, last:]).all()


@pytest.mark.skipif(COMPILER is None, reason="neither NVRTC nor nvcc here")
def test_rot2u_scores_in_few_instructions() -> None:
    """Of sm_90, for 32 tokens of 128 channels, in blocks of 16, of 32, and of more tokens."""
    assert COMPILER is not None
    source = FOLDER / "score.cu"
    cubin = COMPILER.compile(source, 90, check_kernels.instances_of(source))
    loops = [one for one in check_kernels.tensor_loops(cubin) if "ILi2ELi2E" in one.kernel]
    counts = sorted(8 * loop.instructions / loop.products for loop in loops)
    assert len(counts) == 3 and counts[1] <= 250 and counts[2] <= 300


@pytest.mark.parametrize(
    ("name", "size"), [("rot2u", 257), ("rot4u", 64), ("mean", 0), ("mix2", 64)]
)
def test_refuses_what_no_kernel_does(name: str, size: int) -> None:
    with pytest.raises(HotKVError):
        _ = IndexShape(name, 1, size, 16).form
