"""Measures the cache's core without a server: time for a long prompt, memory of the index per
block, and how both grow.

A prompt has 1024 blocks that the full cache lacks, so each evicts one: look up, reserve, make
ready, mark as used. Slots have 4 KiB; no arena is mapped. Caches of all sizes take turns. `--json`
prints a JSON object last:

- `prompt_1024_ms`: for a prompt of 1024 blocks, in a cache of a million.
- `bytes_per_block_10m`: growth of resident memory per block while ten million fill up, before
  evictions, whose ghosts take memory too.
- `cost_growth`: time per block at the largest size, divided by that at the smallest.
- `longest_hold_ms`: longest processor time for which an operation on the largest cache blocks
  the event loop (`bench.holds`). `--holds` measures only this.
"""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.holds import operations
from bench.policies import POLICIES
from bench.report import at_most, median, parser, print_figures, print_report
from hotkv_proto.blocks import BlockResult
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.table import SLOT_ALIGN, BlockTable, TableGeometry, Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.removal import finished
from hotkv_server.cache.values import CoreConfig, HashList, Run

SIZES = (100_000, 1_000_000, 10_000_000)
PROMPT_SIZE = 1_000_000
PROMPT_BLOCKS = 1024
FILL_BLOCKS = 1 << 17
SLAB_BYTES = 4 << 20
STEP_S = 0.2
"""Time between two prompts on the policy's clock."""
PARTS = ("lookup", "reserve", "commit", "touch")
BOUNDS = {
    "prompt_1024_ms": at_most(1.0),
    "bytes_per_block_10m": at_most(100.0),
    "cost_growth": at_most(2.0),
    "longest_hold_ms": at_most(20.0),
}


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@dataclass
class Bench:
    """A full cache. Records the seconds of each of PARTS."""

    num_blocks: int
    policy: str
    costs_s: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    now_s: float = 0.0
    bytes_per_block: float = 0.0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.num_blocks)
        before_bytes = resident_bytes()
        arena_bytes = -(-self.num_blocks * SLOT_ALIGN // SLAB_BYTES) * SLAB_BYTES
        geometry = TableGeometry.for_capacity(self.num_blocks, 1, arena_bytes)
        block_table = BlockTable(np.zeros(geometry.file_bytes, np.uint8), geometry)
        config = CoreConfig(arena_bytes, SLAB_BYTES, self.num_blocks)
        self.core = CacheCore(config, block_table, POLICIES[self.policy](self.num_blocks))
        self.core.space.index.back(self.num_blocks)
        groups = (GroupSpec(GroupKind.FULL_ATTENTION, 16, (SLOT_ALIGN,)),)
        self.session = self.core.open_session(
            "bench", "tool", KeySpace("bench", "bench", "bfloat16", groups, 16), 0.0
        ).number
        for start in range(0, self.num_blocks, FILL_BLOCKS):
            self.serve(self.new_hashes(min(FILL_BLOCKS, self.num_blocks - start)), measure=False)
        self.bytes_per_block = (resident_bytes() - before_bytes) / self.num_blocks

    def new_hashes(self, count: int) -> Words:
        """uint32 [count, 8]."""
        return self.random.integers(0, 1 << 32, (count, 8), np.uint32)

    def serve(self, hashes: Words, *, measure: bool = True) -> None:
        """The core's work for a prompt of new blocks. hashes: uint32 [blocks, 8]."""
        core, session = self.core, self.session
        self.now_s += STEP_S
        times_s = [time.perf_counter()]
        core.lookup(1, [HashList(0, hashes)])
        times_s.append(time.perf_counter())
        runs = [Run(0, hashes)]
        finished(core.begin_store(session, "t", "l", runs, 0, 0.0, self.now_s))
        times_s.append(time.perf_counter())
        (results,) = core.end_store(session, "t", True, self.now_s)
        core.take_effects()
        times_s.append(time.perf_counter())
        core.touch(session, [HashList(0, hashes)], self.now_s)
        times_s.append(time.perf_counter())
        assert np.all(results == BlockResult.STORED), "a block was not stored"
        if measure:
            for part, cost_s in zip(PARTS, np.diff(times_s).tolist(), strict=True):
                self.costs_s[part].append(cost_s)

    def prompt_ms(self, part: str = "") -> float:
        """Median; of all parts if `part` is empty."""
        costs_s = (
            self.costs_s[part]
            if part
            else [sum(row) for row in zip(*self.costs_s.values(), strict=True)]
        )
        return median(costs_s) * 1e3


def print_holds(bench: Bench) -> float:
    """Empties the cache. Returns the longest processor time in ms."""
    holds = operations(bench.core, bench.session, bench.now_s, bench.new_hashes)
    times_s = ((hold.longest_cpu_s, hold.longest_s, hold.total_s) for hold in holds)
    rows = [
        (hold.name, *(f"{t * 1e3:.1f}" for t in times), hold.num_parts)
        for hold, times in zip(holds, times_s, strict=True)
    ]
    headers = (
        f"operation on {bench.num_blocks:,} blocks",
        "longest ms",
        "by the clock",
        "in all ms",
        "parts",
    )
    print_report(headers, rows, {}, as_json=False)
    return max(hold.longest_cpu_s for hold in holds) * 1e3


def main() -> int:
    flags = parser("Cost of the core for a prompt, and of its index for a block.")
    flags.add_argument("--policy", default="hotness", choices=sorted(POLICIES))
    flags.add_argument("--rounds", type=int, default=200)
    flags.add_argument(
        "--holds", action="store_true", help="only how long operations hold the event loop"
    )
    options = flags.parse_args()
    # Loads the kernels first.
    Bench(2 * PROMPT_BLOCKS, options.policy).serve(np.zeros((1, 8), np.uint32))
    if options.holds:
        bench = Bench(SIZES[-1], options.policy)
        held = {"longest_hold_ms": print_holds(bench)}
        print_figures(held, BOUNDS, as_json=options.json, beside={"policy": options.policy})
        return 0
    # The largest first: it could reuse memory that smaller ones have freed.
    benches = {size: Bench(size, options.policy) for size in sorted(SIZES, reverse=True)}
    for bench in benches.values():
        for _ in range(options.rounds // 10):
            bench.serve(bench.new_hashes(PROMPT_BLOCKS), measure=False)
    for _ in range(options.rounds):
        for bench in benches.values():
            bench.serve(bench.new_hashes(PROMPT_BLOCKS))
    figures = {
        "prompt_1024_ms": benches[PROMPT_SIZE].prompt_ms(),
        "bytes_per_block_10m": benches[SIZES[-1]].bytes_per_block,
        "cost_growth": benches[SIZES[-1]].prompt_ms() / benches[SIZES[0]].prompt_ms(),
    }
    rows: list[tuple[object, ...]] = []
    for size in SIZES:
        bench = benches[size]
        parts = (f"{bench.prompt_ms(part):.3f}" for part in PARTS)
        rows.append(
            (f"{size:,}", f"{bench.prompt_ms():.3f}", *parts, f"{bench.bytes_per_block:.1f}")
        )
    print_report(("blocks", "prompt ms", *PARTS, "bytes/block"), rows, {}, as_json=False)
    print()
    figures["longest_hold_ms"] = print_holds(benches[SIZES[-1]])
    print()
    print_figures(figures, BOUNDS, as_json=options.json, beside={"policy": options.policy})
    return 0


if __name__ == "__main__":
    sys.exit(main())
