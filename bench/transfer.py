"""Measures stores and loads of paged KV through the server, against a memcpy of the same bytes with
as many threads.

`python -m bench.transfer [--json]`. 16 layers, 8 KV heads of 128 channels, bfloat16; 64 MiB an
operation; blocks of 4 to 256 tokens, so pieces of 16 KiB to 1 MiB. Every load is compared.
Store, load and memcpy take turns, from the client's call; before each, a single block brings the
server's code back into the caches, from which comparing evicted it.
"""

import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bench.report import median, parser, percentile, print_report
from bench.servers import new_hashes, serving
from demo.processes import Server
from hotkv_client import BlockResult, BlockRun, GroupHashes, LoadRun, TransferStatus
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto import native

LAYERS = 16
TOKEN_BYTES = 2 * 8 * 128 * 2
OPERATION_BYTES = 64 << 20
BLOCK_TOKENS = (4, 16, 64, 256)
ARENA_BYTES = 1 << 30
ROUNDS = 25
COPY_THREADS = min(8, max(1, len(os.sched_getaffinity(0)) // 2))


class Engine(PagedEngine):
    """Has memory for two operations."""

    def __init__(self, target: str, block_tokens: int) -> None:
        self.page_bytes = block_tokens * TOKEN_BYTES
        self.num_blocks = OPERATION_BYTES // (LAYERS * self.page_bytes)
        pool = 2 * self.num_blocks
        super().__init__(
            target,
            layers=LAYERS,
            num_blocks=pool,
            page_bytes=self.page_bytes,
            model=f"bench-{block_tokens}",
            engine_id=f"engine-{block_tokens}",
            block_tokens=block_tokens,
        )
        self.kv[:] = np.random.default_rng(block_tokens).integers(
            0, 256, self.kv.shape, dtype=np.uint8
        )
        self.connect()
        # Neighbours in the prompt are not adjacent in memory.
        order = np.random.default_rng(1).permutation(pool).astype(np.int32)
        self.sources, self.destinations = order[: self.num_blocks], order[self.num_blocks :]
        self.positions = np.arange(self.num_blocks, dtype=np.int32)

    def store(self, hashes: list[bytes], name: str) -> float:
        """Returns seconds."""
        start_s = time.perf_counter()
        result = self.session.store(name, name, [BlockRun(0, hashes, self.sources)], 30).result(30)
        taken_s = time.perf_counter() - start_s
        assert result.status is TransferStatus.DONE and np.all(
            result.results[0] == BlockResult.STORED
        ), result
        return taken_s

    def one_block(self, name: str) -> None:
        """A store and a load of a block, untimed. The empty lookup returns last: calls are
        answered in order."""
        block = new_hashes(1)
        self.session.store(name, name, [BlockRun(0, block, self.sources[:1])], 30).result(30)
        self.session.acquire(f"{name}-l", [GroupHashes(0, block)]).result(10)
        self.session.load(
            f"{name}-l", f"{name}-l", [LoadRun(0, self.positions[:1], self.destinations[:1])], 30
        ).result(30)
        self.session.release(f"{name}-l")
        self.session.lookup([]).result(10)

    def load(self, hashes: list[bytes], name: str) -> float:
        """Returns seconds without the lease; compares every byte."""
        # Blocks never used are evicted first.
        assert self.session.acquire(name, [GroupHashes(0, hashes)]).result(10).pinned[0].all(), (
            "stored blocks are missing"
        )
        self.one_block(f"warm-{name}")
        self.kv[:, self.destinations] = 0
        start_s = time.perf_counter()
        result = self.session.load(
            name, name, [LoadRun(0, self.positions, self.destinations)], 30
        ).result(30)
        taken_s = time.perf_counter() - start_s
        assert result.status is TransferStatus.DONE, result
        assert np.array_equal(self.kv[:, self.destinations], self.kv[:, self.sources]), (
            "wrong bytes"
        )
        self.session.release(name)
        return taken_s


def threaded_memcpy(dst: NDArray[np.uint8], src: NDArray[np.uint8]) -> Callable[[], float]:
    """A function that copies with the server's number of threads; returns seconds."""
    kernels = native.load("hotkv_proto.table_reading")
    assert kernels is not None, "the benchmark needs numba"
    bounds = np.linspace(0, dst.nbytes, COPY_THREADS + 1).astype(np.int64)

    def part(i: int) -> None:
        offsets, length = bounds[i : i + 1].copy(), np.array([bounds[i + 1] - bounds[i]])
        kernels.copy_runs(dst.ctypes.data, src.ctypes.data, offsets, offsets, length, 0, 1, False)

    def run() -> float:
        threads = [threading.Thread(target=part, args=(i,)) for i in range(1, COPY_THREADS)]
        start_s = time.perf_counter()
        for thread in threads:
            thread.start()
        part(0)
        for thread in threads:
            thread.join()
        return time.perf_counter() - start_s

    return run


def wait_for_huge_pages(server: Server, timeout_s: float = 60.0) -> float:
    """Share of the arena in huge pages, once the server no longer converts it."""
    deadline_s, last = time.monotonic() + timeout_s, -1.0
    while time.monotonic() < deadline_s and last != (
        last := server.counter("arena_huge_page_bytes")
    ):
        time.sleep(0.5)
    return last / ARENA_BYTES


def measure(target: str, block_tokens: int, memcpy: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds by operation. The arena is full first, so that every store evicts."""
    engine = Engine(target, block_tokens)
    times: dict[str, list[float]] = {"memcpy": [], "store": [], "load": []}
    for i in range(ARENA_BYTES // OPERATION_BYTES):
        engine.store(new_hashes(engine.num_blocks), f"fill-{i}")
    for i in range(ROUNDS):
        hashes = new_hashes(engine.num_blocks)
        times["memcpy"].append(memcpy())
        engine.one_block(f"warm-s{i}")
        times["store"].append(engine.store(hashes, f"s{i}"))
        times["load"].append(engine.load(hashes, f"l{i}"))
    engine.close()
    return times


def main() -> int:
    options = parser("Time stores and loads.").parse_args()
    rows, store_ratio, load_ratio, spread = [], {}, {}, {}
    source, target = np.ones(OPERATION_BYTES, np.uint8), np.ones(OPERATION_BYTES, np.uint8)
    memcpy = threaded_memcpy(target, source)
    for block_tokens in BLOCK_TOKENS:
        with serving(ARENA_BYTES) as server:
            huge_share = wait_for_huge_pages(server)
            times = measure(server.target, block_tokens, memcpy)
        run_bytes = block_tokens * TOKEN_BYTES
        ceiling_s = median(times["memcpy"])
        store_ratio[run_bytes] = ceiling_s / median(times["store"])
        load_ratio[run_bytes] = ceiling_s / median(times["load"])
        spread[run_bytes] = {
            name: percentile(values, 0.9) / median(values) for name, values in times.items()
        }
        for name, values in times.items():
            rate = OPERATION_BYTES / median(values) / 1e9
            ratio, tail = ceiling_s / median(values), spread[run_bytes][name]
            shown = (round(figure, 2) for figure in (rate, ratio, tail, huge_share))
            rows.append((run_bytes >> 10, name, *shown))
    figures: dict[str, object] = {
        "store_ratio": store_ratio,
        "load_ratio": load_ratio,
        "p90_over_p50": spread,
        "copy_threads": COPY_THREADS,
    }
    print_report(
        ("run KiB", "what", "GB/s", "of memcpy", "p90/p50", "huge"),
        rows,
        figures,
        as_json=options.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
