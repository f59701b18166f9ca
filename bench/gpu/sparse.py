"""Measures sparse decode's kernels on a GPU: scoring and building of sketches, in turns with copies
on the device, and a layer's whole selection step.

`python -m bench.gpu.sparse [--json]`, with CuPy; 20 s, 6 GB of device memory. 8 KV heads of 128
channels, 4 query heads per KV head, blocks of 16 tokens, a million tokens. Four arrays of sketches
take turns, beyond the device's caches.

The step has 128k tokens, in a CUDA graph of four layers, with all its work: sketches of new blocks,
always-kept blocks' mass, scores, choice, hot sets, block table. Queries are constant, so nothing is
copied from host memory.

Figures are medians by device events. Scoring's ratio: bytes scored per second, divided by those
that a copy reads and writes. Building's: its time, divided by that of a prefill of
`--prefill-us` microseconds per token and layer.
"""

import sys
from typing import Any

import numpy as np

from bench.gpu.context import (
    BLOCK_TOKENS,
    CONFIG,
    SMALL_CONFIG,
    Context,
    page_bytes_of,
    random_pages,
    registered,
)
from bench.gpu.figures import Figure, gpu_parser, print_figures
from bench.gpu.kernels import CudaArrays, HostArrays, array_kernels
from bench.gpu.model import LLAMA_8B, TINY, ModelShape
from bench.report import median
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.cuda.hotsets import CudaHotSets
from hotkv_sparse.cuda.index import Index, IndexShape, Pages
from hotkv_sparse.cuda.selector import CudaSelector, Queries
from hotkv_sparse.cuda.workspace import StepShape, Workspace

LAYER, NUM_POOLS, STEP_LAYERS = 2, 4, 4
COPY_BYTES = 1 << 30
BUILD_BLOCKS = 4096
STEP_TOKENS = 1 << 17
ROUNDS = 20
SCORE_TARGET, BUILD_TARGET, STEP_TARGET_US = 0.4, 0.03, 100.0
Some = CudaArrays | HostArrays


class Clock:
    """Times by operation."""

    def __init__(self, kernels: Some) -> None:
        self._kernels = kernels
        self.times_ms: dict[str, list[float]] = {}

    def time(self, name: str, run: Any) -> None:
        self.times_ms.setdefault(name, []).append(self._kernels.milliseconds(run))

    def median_ms(self, name: str) -> float:
        return median(self.times_ms[name])


class Layer:
    """Random sketches, scored from several pools in turn."""

    def __init__(self, kernels: Some, model: ModelShape, num_blocks: int, scorer: str) -> None:
        config, xp, device = SparseConfig(scorer=scorer), kernels.xp, kernels.device
        heads, size = model.kv_heads, model.head_size
        slots = 2 * (num_blocks // 10)
        shape = StepShape(1, num_blocks, BLOCK_TOKENS, model.heads, heads, size, slots)
        self.work, nowhere = Workspace(device, config, shape), Pages(0, "float16", 0, 0, 0)
        format_ = IndexShape(scorer, heads, size, BLOCK_TOKENS)
        self.index_bytes, self._size = num_blocks * heads * format_.head_bytes, size
        self.selectors = []
        for seed in range(NUM_POOLS):
            index = Index(device, format_, num_blocks)
            pool = xp.random.RandomState(seed).randint(0, 256, index.pool.shape, xp.uint8)
            # Finite, positive sigmas (float16): 0x3c is the high byte of 1.0.
            if scorer.startswith("rot"):
                rows = pool[:, : heads * format_.head_bytes].reshape(num_blocks, heads, -1)
                rows[:, :, -32:] = xp.bitwise_and(rows[:, :, -32:], 0x3C)
                pool[:, : heads * format_.head_bytes] = rows.reshape(num_blocks, -1)
            else:
                pool = xp.bitwise_and(pool, 0x3C)
            index.pool = pool
            hot = CudaHotSets(self.work, (), 0)
            self.selectors.append(CudaSelector(self.work, LAYER, index, nowhere, nowhere, hot))
        rows = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        self.work.set_blocks(0, 0, rows, np.zeros(num_blocks, np.int64))
        self.work.begin(xp.asarray(np.array([num_blocks * BLOCK_TOKENS], np.int32)))
        query = np.random.default_rng(9).standard_normal((1, model.heads, size))
        self._query = Queries(xp.asarray(query.astype(np.float16)), "float16", 0, size)

    def score(self, number: int) -> None:
        self.selectors[number % NUM_POOLS].score(self._query, self._size**-0.5)

    def choose(self, number: int) -> None:
        self.selectors[number % NUM_POOLS].choose()


class Builder:
    """Sketches of float16 keys in pages of [tokens, heads, channels] (NHD)."""

    def __init__(self, kernels: Some, model: ModelShape, num_blocks: int) -> None:
        heads, size, xp = model.kv_heads, model.head_size, kernels.xp
        shape = IndexShape("rot2u", heads, size, BLOCK_TOKENS)
        self._index = Index(kernels.device, shape, num_blocks)
        self.num_tokens = num_blocks * BLOCK_TOKENS
        keys = np.random.default_rng(1).standard_normal(
            (num_blocks, BLOCK_TOKENS, heads, size), np.float32
        )
        self._pages = Pages(
            xp.asarray(keys.astype(np.float16)),
            "float16",
            BLOCK_TOKENS * heads * size,
            heads * size,
            size,
        )
        self._order, self._count = xp.arange(num_blocks, dtype=np.int32), num_blocks

    def build(self) -> None:
        self._index.build(self._pages, self._order, self._order, self._count)


def step_us(kernels: Some, model: ModelShape, num_tokens: int, config: SparseConfig) -> float:
    """Median per layer."""
    pages = random_pages(num_tokens // BLOCK_TOKENS, page_bytes_of(model))
    arena = registered(pages)
    layers = min(STEP_LAYERS, model.layers)
    context = Context(
        kernels.device, config, num_tokens, pages, arena.address, kernels.address,
        shape=model, num_layers=layers,
    )  # fmt: skip
    context.catch_up()
    context.advance()
    context.step()
    run, times_ms = kernels.captured(context.step), []
    for _ in range(3 if kernels.is_made_up else ROUNDS):
        times_ms.append(kernels.milliseconds(run))
    if not context.check():
        raise ValueError("the hot sets are empty")
    arena.close()
    # By then hot sets hold all that is selected.
    return median(times_ms[len(times_ms) // 2 :]) * 1e3 / layers


def measure(
    kernels: Some, model: ModelShape, num_blocks: int, scorers: list[str], rounds: int
) -> tuple[Clock, dict[str, Layer], Builder, int]:
    xp, made_up = kernels.xp, kernels.is_made_up
    layers = {scorer: Layer(kernels, model, num_blocks, scorer) for scorer in scorers}
    builder = Builder(kernels, model, 16 if made_up else BUILD_BLOCKS)
    clock, copy_bytes = Clock(kernels), 1 << 20 if made_up else COPY_BYTES
    source, target = (xp.ones(copy_bytes, xp.uint8) for _ in range(2))
    for number in range(rounds + 3):
        if number == 3:
            clock.times_ms.clear()
        clock.time("copy", lambda: kernels.copy(target, source))
        for scorer, layer in layers.items():
            clock.time(f"score {scorer}", lambda: layer.score(number))  # noqa: B023
            clock.time(f"choose {scorer}", lambda: layer.choose(number))  # noqa: B023
        clock.time("build", builder.build)
    return clock, layers, builder, copy_bytes


def figures_of(
    clock: Clock, layers: dict[str, Layer], builder: Builder, copy_bytes: int, prefill_us: float
) -> list[Figure]:
    """copy_bytes: of the copies on the device.
    prefill_us: assumed, per token and layer.
    """
    copy_rate, figures = 2 * copy_bytes / clock.median_ms("copy"), []
    for scorer, layer in layers.items():
        share = layer.index_bytes / clock.median_ms(f"score {scorer}") / copy_rate
        target = SCORE_TARGET if scorer == "rot2u" else None
        figures += [
            Figure(f"sparse: score {scorer}, of device copy", share, target),
            Figure(f"sparse: score {scorer}, us", 1e3 * clock.median_ms(f"score {scorer}")),
            Figure(f"sparse: choose {scorer}, us", 1e3 * clock.median_ms(f"choose {scorer}")),
        ]
    token_us = clock.median_ms("build") * 1e3 / builder.num_tokens
    figures += [
        Figure("sparse: build, of prefill", token_us / prefill_us, BUILD_TARGET, True),
        Figure("sparse: device copy, GB/s", copy_rate / 1e6),
    ]
    return figures


def main() -> int:
    flags = gpu_parser("Scores, builds and whole selection steps on a GPU, beside its copies.")
    flags.add_argument("--tokens", type=int, default=1 << 20, help="context of the scored sequence")
    flags.add_argument(
        "--scorers", nargs="+", default=["rot2u"], help="sketches, rot2u unless named"
    )
    flags.add_argument(
        "--prefill-us",
        type=float,
        default=1.0,
        help="a prefill's time per token and layer; 1.0: a 14B model on an H200",
    )
    options = flags.parse_args()
    kernels, small = array_kernels(options.made_up), options.made_up
    model, tokens = (TINY, 1024) if small else (LLAMA_8B, options.tokens)
    figures: list[Figure] = []
    try:
        rounds = 2 if small or options.quick else ROUNDS
        found = measure(kernels, model, tokens // BLOCK_TOKENS, options.scorers, rounds)
        figures += figures_of(*found, options.prefill_us)
        del found
        us = step_us(
            kernels, model, 768 if small else STEP_TOKENS, SMALL_CONFIG if small else CONFIG
        )
        figures.append(
            Figure("sparse: selection step of 128k tokens, us a layer", us, STEP_TARGET_US, True)
        )
    finally:
        print_figures(figures, {"made_up": options.made_up}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
