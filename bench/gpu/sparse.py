"""Sparse decode's kernels on a GPU: scoring, building and pulling, beside copies of the same device
that are measured in turn with them.

`python -m bench.gpu.sparse [--json]`, on a machine with CuPy; some 20 s and 6 GB of device memory.
One layer of 8 KV heads of 4 query heads, d = 128, blocks of 16, one sequence of a million tokens;
four pools take turns, so that no cache holds them. Figures are medians, timed by events of the
device. Ratios: the index's bytes a second over those of a device copy (read and written bytes
counted), the pulled bytes a second over those of a pinned copy to the device. `build_share`: time
to build over that of a prefill at `--prefill-us` microseconds a token and layer.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.report import median, parser, print_report
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.cuda.device import CupyDevice
from hotkv_sparse.cuda.hotsets import CudaHotSets, Fragment
from hotkv_sparse.cuda.index import Index, IndexShape, Pages
from hotkv_sparse.cuda.selector import CudaSelector, Queries
from hotkv_sparse.cuda.workspace import StepShape, Workspace

KV_HEADS, GROUP, HEAD_SIZE, BLOCK_TOKENS, LAYER = 8, 4, 128, 16, 2
NUM_HEADS = KV_HEADS * GROUP
NUM_POOLS = 4
COPY_BYTES = 1 << 30
PAGE_BYTES = BLOCK_TOKENS * HEAD_SIZE * 2 * 2
"""K and V of one KV head's block in float16: 8 KiB, the least that a pull moves."""
PULL_SEQUENCES = 64
BUILD_BLOCKS = 4096
ROUNDS = 20
TARGETS = {"score_ratio": 0.25, "build_share": 0.02, "pull_ratio": 0.6}


class Clock:
    """Milliseconds of work given to the stream, by events."""

    def __init__(self, cupy: Any, stream: Any) -> None:
        self._cupy, self._stream = cupy, stream
        self.times_ms: dict[str, list[float]] = {}

    def time(self, name: str, run: Callable[[], None]) -> None:
        start, end = (self._cupy.cuda.Event() for _ in range(2))
        start.record(self._stream)
        run()
        end.record(self._stream)
        end.synchronize()
        self.times_ms.setdefault(name, []).append(self._cupy.cuda.get_elapsed_time(start, end))

    def median_ms(self, name: str) -> float:
        return median(self.times_ms[name])


class Layer:
    """One sequence over `num_blocks` blocks of random codes, scored from several pools in turn."""

    def __init__(self, cupy: Any, device: CupyDevice, num_blocks: int, scorer: str) -> None:
        config = SparseConfig(scorer=scorer)
        shape = StepShape(
            1, num_blocks, BLOCK_TOKENS, NUM_HEADS, KV_HEADS, HEAD_SIZE, 2 * (num_blocks // 10)
        )
        self.work, nowhere = Workspace(device, config, shape), Pages(0, "float16", 0, 0, 0)
        self.index_bytes = (
            num_blocks * KV_HEADS * IndexShape(scorer, KV_HEADS, HEAD_SIZE, BLOCK_TOKENS).head_bytes
        )
        self.selectors = []
        for seed in range(NUM_POOLS):
            index = Index(device, IndexShape(scorer, KV_HEADS, HEAD_SIZE, BLOCK_TOKENS), num_blocks)
            pool = cupy.random.RandomState(seed).randint(0, 256, index.pool.shape, cupy.uint8)
            # Sigmas and scales that are finite and positive: 0x3c is the high byte of 1.0 in
            # float16.
            pool[:] = (
                cupy.bitwise_and(pool, 0x3C) if scorer in ("mean", "quest", "cuboid") else pool
            )
            if scorer.startswith("rot"):
                heads = pool.reshape(num_blocks, KV_HEADS, -1)
                heads[:, :, -32:] = cupy.bitwise_and(heads[:, :, -32:], 0x3C)
            index.pool = pool
            self.selectors.append(
                CudaSelector(
                    self.work, LAYER, index, nowhere, nowhere, CudaHotSets(self.work, (), 0)
                )
            )
        rows = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        self.work.set_blocks(0, 0, rows, np.zeros(num_blocks, np.int64))
        self.work.begin(cupy.asarray([num_blocks * BLOCK_TOKENS], dtype=cupy.int32))
        query = (
            cupy.random.RandomState(9)
            .standard_normal((1, NUM_HEADS, HEAD_SIZE))
            .astype(cupy.float16)
        )
        self._query = Queries(query, "float16", 0, HEAD_SIZE)

    def score(self, number: int) -> None:
        self.selectors[number % NUM_POOLS].score(self._query, HEAD_SIZE**-0.5)

    def choose(self, number: int) -> None:
        self.selectors[number % NUM_POOLS].choose()


class Builder:
    """Builds representations of float16 keys in NHD pages."""

    def __init__(self, cupy: Any, device: CupyDevice) -> None:
        self._index = Index(
            device, IndexShape("rot2u", KV_HEADS, HEAD_SIZE, BLOCK_TOKENS), BUILD_BLOCKS
        )
        keys = (
            cupy.random.RandomState(1)
            .standard_normal((BUILD_BLOCKS, BLOCK_TOKENS, KV_HEADS, HEAD_SIZE), cupy.float32)
            .astype(cupy.float16)
        )
        self._pages = Pages(
            keys, "float16", BLOCK_TOKENS * KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, HEAD_SIZE
        )
        self._order = cupy.arange(BUILD_BLOCKS, dtype=cupy.int32)

    def build(self) -> None:
        self._index.build(self._pages, self._order, self._order, BUILD_BLOCKS)


class Puller:
    """Pulls scattered fragments of 8 KiB from registered host memory: four blocks of each of many
    sequences, 8 KV heads a block."""

    def __init__(self, cupy: Any, device: CupyDevice) -> None:
        self._cupy, self._device = cupy, device
        loads, fragments = 4, KV_HEADS
        self.num_bytes = PULL_SEQUENCES * loads * fragments * PAGE_BYTES
        self._host = cupy.cuda.alloc_pinned_memory(2 * self.num_bytes)
        memory = np.frombuffer(self._host, np.uint8, 2 * self.num_bytes)
        memory[:] = np.random.default_rng(2).integers(0, 256, memory.size, np.uint8)
        self._flat = cupy.zeros(self.num_bytes, cupy.uint8)
        self._pages = cupy.zeros(self.num_bytes, cupy.uint8)
        block_bytes, rng = fragments * PAGE_BYTES, np.random.default_rng(3)
        sources = rng.permutation(2 * PULL_SEQUENCES * loads)[: PULL_SEQUENCES * loads].reshape(
            PULL_SEQUENCES, loads
        )
        blocks = np.tile(np.arange(loads, dtype=np.int32), (PULL_SEQUENCES, 1))
        counts = np.zeros((PULL_SEQUENCES, 8), np.int32)
        counts[:, 0] = loads
        pages = (
            rng.permutation(PULL_SEQUENCES * loads).astype(np.int32).reshape(PULL_SEQUENCES, loads)
        )
        places = [
            Fragment(i * PAGE_BYTES, self._pages.data.ptr + i * PAGE_BYTES, PAGE_BYTES)
            for i in range(fragments)
        ]
        table = np.array(
            [[place.offset_bytes, place.address, place.num_bytes] for place in places], np.int64
        )
        arena = memory.ctypes.data + sources.astype(np.int64) * block_bytes
        self._args = (
            cupy.asarray(np.stack([blocks, blocks], axis=1)), np.int32(loads),
            cupy.asarray(counts), cupy.arange(PULL_SEQUENCES, dtype=np.int32),
            cupy.asarray(arena), np.int32(loads),
            cupy.asarray(table), np.int32(fragments), np.int64(block_bytes), cupy.asarray(pages),
            np.int32(loads), cupy.zeros(2, np.int32),
        )  # fmt: skip
        self._expected = memory.reshape(-1, block_bytes)[sources.reshape(-1)], pages.reshape(-1)

    def pull(self) -> None:
        self._device.launch("pull_blocks", (4, 2, PULL_SEQUENCES), 256, self._args)

    def copy(self, stream: Any) -> None:
        self._flat.data.copy_from_host_async(self._host.ptr, self.num_bytes, stream)

    def check(self) -> None:
        """Every byte is where it belongs."""
        content, pages = self._expected
        held = self._cupy.asnumpy(self._pages).reshape(len(pages), -1)
        assert np.array_equal(held[pages], content), "a pull moved wrong bytes"


def measure(
    cupy: Any, num_blocks: int, scorers: list[str], prefill_us: float
) -> tuple[list[tuple[object, ...]], dict[str, object]]:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        device = CupyDevice(stream=stream.ptr)
        device.compile()
        layers = {scorer: Layer(cupy, device, num_blocks, scorer) for scorer in scorers}
        builder, puller, clock = Builder(cupy, device), Puller(cupy, device), Clock(cupy, stream)
        source, target = (cupy.ones(COPY_BYTES, cupy.uint8) for _ in range(2))
        for number in range(ROUNDS + 3):
            if number == 3:
                clock.times_ms.clear()
            clock.time(
                "copy", lambda: target.data.copy_from_device_async(source.data, COPY_BYTES, stream)
            )
            for scorer, layer in layers.items():
                clock.time(f"score {scorer}", lambda: layer.score(number))  # noqa: B023
                clock.time(f"choose {scorer}", lambda: layer.choose(number))  # noqa: B023
            clock.time("build", builder.build)
            clock.time("pull", puller.pull)
            clock.time("pinned copy", lambda: puller.copy(stream))
        puller.check()
    copy_rate = 2 * COPY_BYTES / clock.median_ms("copy")
    pinned_rate = puller.num_bytes / clock.median_ms("pinned copy")
    rows: list[tuple[object, ...]] = []
    figures: dict[str, object] = {"copy_gb_s": copy_rate / 1e6, "pinned_gb_s": pinned_rate / 1e6}
    for scorer, layer in layers.items():
        ratio = layer.index_bytes / clock.median_ms(f"score {scorer}") / copy_rate
        figures |= {
            f"score_ratio_{scorer}": ratio,
            f"score_us_{scorer}": clock.median_ms(f"score {scorer}") * 1e3,
        }
        figures[f"choose_us_{scorer}"] = clock.median_ms(f"choose {scorer}") * 1e3
        rows.append(
            (
                f"score {scorer}",
                f"{clock.median_ms(f'score {scorer}') * 1e3:.0f}",
                f"{ratio:.2f} of device copy",
                TARGETS["score_ratio"],
            )
        )
        rows.append(
            (f"choose {scorer}", f"{clock.median_ms(f'choose {scorer}') * 1e3:.0f}", "", "")
        )
    token_us = clock.median_ms("build") * 1e3 / (BUILD_BLOCKS * BLOCK_TOKENS)
    pull_ratio = puller.num_bytes / clock.median_ms("pull") / pinned_rate
    figures |= {
        "build_us_per_token": token_us,
        "build_share": token_us / prefill_us,
        "pull_ratio": pull_ratio,
    }
    rows.append(
        (
            "build, a token",
            f"{token_us:.4f}",
            f"{token_us / prefill_us:.4f} of prefill",
            TARGETS["build_share"],
        )
    )
    rows.append(
        (
            "pull",
            f"{clock.median_ms('pull') * 1e3:.0f}",
            f"{pull_ratio:.2f} of pinned copy",
            TARGETS["pull_ratio"],
        )
    )
    return rows, figures


def main() -> int:
    """Command line."""
    flags = parser("Scores, builds and pulls on a GPU, beside its copies.")
    flags.add_argument("--tokens", type=int, default=1 << 20, help="context of the scored sequence")
    flags.add_argument(
        "--scorers", nargs="+", default=["rot2u"], help="representations, rot2u unless named"
    )
    flags.add_argument(
        "--prefill-us",
        type=float,
        default=1.0,
        help="a prefill's time per token and layer; 1.0: a 14B model on an H200",
    )
    options = flags.parse_args()
    try:
        import cupy
    except ImportError:
        print(
            "bench.gpu.sparse needs CuPy and a GPU; install hotkv[cuda12] or hotkv[cuda13]",
            file=sys.stderr,
        )
        return 1
    rows, figures = measure(
        cupy, options.tokens // BLOCK_TOKENS, options.scorers, options.prefill_us
    )
    print_report(("what", "us", "ratio", "target"), rows, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
