"""Measures sparse decode of one layer on one thread: scoring, choosing, attention over the chosen
blocks, against dense attention.

8 KV heads, 4 query heads each, 128 channels, blocks of 16 tokens, contexts of 1k, 8k and 64k
blocks; the speed-up at 2k blocks (32k tokens). Attention is vLLM's own CPU kernel in bf16: dense
over all pages, sparse over those of a full hot set, twice what a step selects. Queries vary around
a mean with a cosine of .84 between steps (FreeKV), so the hot set lacks a sixth of what is selected
(with a real model 7 %). Variants take turns, in caches as attention leaves them.

`--json` prints a JSON object last:

- `dense_ms`, `attend_ms`, `<scorer>_ms`: dense attention, sparse attention, scoring, by number of
  blocks.
- `other_us`: what follows scoring: weights, choice, hot set, copies of some missing blocks of 64
  KiB from the arena, block table.
- `schedule_us`: the attention kernel's schedule, which layers with equally many blocks share in a
  step.
- `decode_us`: one compiled call, as engines make it: scores by `rot2u`, choice, hot set.
- `missing_ratio`: share of selected blocks that the hot set lacked.
- `speedup`, for each scorer: dense attention, divided by a sparse step (scoring, other, attention)
  that selects 10 % of 32k tokens.
- `service_select_us`, `local_select_us`: a whole selection from 8k blocks with `rot2u`, by the
  server (`SelectBlocks`, with the round trip) and in this process.
"""

import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

import hotkv_sparse
from bench.report import median, parser, print_figures, print_json, rows_table
from bench.servers import MIB, new_hashes, serving
from hotkv_client import BlockRun, EngineMemory, Role, SelectConfig, Session, SessionConfig
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace, Sketch
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_sparse.decode import Always, Scorer, decode
from hotkv_sparse.selection import Source, choose, select_layer

KV_HEADS, GROUP, HEAD_SIZE, BLOCK_TOKENS = 8, 4, 128, 16
QUERY_HEADS = KV_HEADS * GROUP
DISTINCT_BLOCKS = 512
"""Larger pools repeat them: times do not depend on values."""

# ------------------------------------------------------------------------------------ By the server
# `SelectBlocks` against the same selection in this process, in turns, over the same bytes: a
# layer's sketches, stored in a real server by an engine.

PAGE_BYTES = 4096
"""Stored for a block's KV, which a selection does not read."""
CONFIG = hotkv_sparse.SparseConfig(sparse_topk=0.1, dense_layers=())
ARENA_BYTES = 512 * MIB


def service_figures(num_blocks: int = 8192, rounds: int = 200) -> dict[str, float]:
    """Median and least microseconds, by the server and in this process. Takes seconds, with a
    server of its own."""
    with serving(ARENA_BYTES) as server:
        server.wait_filled()
        engine = _Engine(server.target, num_blocks)
        try:
            return engine.measure(rounds)
        finally:
            engine.close()


class _Engine:
    """A session that stores random blocks' sketches."""

    def __init__(self, target: str, num_blocks: int) -> None:
        random = np.random.default_rng(num_blocks)
        keys = random.standard_normal(
            (DISTINCT_BLOCKS, BLOCK_TOKENS, KV_HEADS, HEAD_SIZE), np.float32
        )
        built = np.tile(
            hotkv_sparse.build(CONFIG.scorer, keys), (-(-num_blocks // DISTINCT_BLOCKS), 1, 1)
        )[:num_blocks]
        size = built[0].size
        self.queries = random.standard_normal((64, QUERY_HEADS, HEAD_SIZE), np.float32)
        self.fds = {
            "kv": os.memfd_create("bench-kv"),
            "sketches": os.memfd_create("bench-sketches"),
        }
        for name, page in (("kv", PAGE_BYTES), ("sketches", size)):
            os.posix_fallocate(self.fds[name], 0, num_blocks * page)
        memory = np.frombuffer(mmap.mmap(self.fds["sketches"], num_blocks * size), np.uint8)
        self.pool: NDArray[np.uint8] = memory.reshape(built.shape)
        self.pool[:] = built
        groups = (GroupSpec(GroupKind.FULL_ATTENTION, BLOCK_TOKENS, (PAGE_BYTES,)),)
        kind = Sketch(0, CONFIG.scorer, 1, (size,))
        key_space = KeySpace("bench-select", "bench-select", "bfloat16", groups, BLOCK_TOKENS)
        config = SessionConfig(target, "bench-select", Role.WORKER, key_space, sketches=(kind,))
        self.group = config.sketch_group(kind)
        tensors = (
            PageTensor(0, "kv", 0, PAGE_BYTES, PAGE_BYTES, 0),
            PageTensor(self.group, "sketches", 0, size, size, 0),
        )
        handles = (
            MemoryHandle("kv", num_blocks * PAGE_BYTES),
            MemoryHandle("sketches", num_blocks * size),
        )
        self.session = Session(
            config, EngineMemory(Layout(0, num_blocks, handles, tensors, "LBHNC"), self.fds)
        )
        self.session.start()
        assert self.session.wait_connected(20), "the server does not answer"
        hashes = new_hashes(num_blocks)
        ids = np.arange(num_blocks, dtype=np.int32)
        self.session.store(
            "s", "s", [BlockRun(group, hashes, ids) for group in (0, self.group)], 60
        ).result(60)
        select = SelectConfig(CONFIG, self.group, (0,), KV_HEADS, HEAD_SIZE)
        created = self.session.create_sequence("bench", 0, hashes, select).result(60)
        assert created.covered_blocks == num_blocks, "the server does not cover all blocks"
        self.rows = ids
        self.log_mass = np.full(QUERY_HEADS, 5.0, np.float32)

    def measure(self, rounds: int) -> dict[str, float]:
        tokens = len(self.rows) * BLOCK_TOKENS
        source = {CONFIG.scorer: Source(self.pool)}
        times_s: dict[str, list[float]] = {"service": [], "local": []}
        with self.session.selects() as stream:
            stream.select("bench", 0, self.queries[0], tokens, self.log_mass)
            for number in range(rounds):
                query = self.queries[number % len(self.queries)]
                began_s = time.perf_counter()
                answer = stream.select("bench", 0, query, tokens, self.log_mass)
                between_s = time.perf_counter()
                local = select_layer(
                    CONFIG, 0, query, source, self.rows, self.log_mass, tokens, BLOCK_TOKENS
                )
                times_s["local"].append(time.perf_counter() - between_s)
                times_s["service"].append(between_s - began_s)
                assert np.array_equal(answer.positions, local.blocks), (
                    "server and engine select different blocks"
                )
        figures = {f"{name}_select_us": median(values) * 1e6 for name, values in times_s.items()}
        return figures | {
            f"{name}_select_min_us": min(values) * 1e6 for name, values in times_s.items()
        }

    def close(self) -> None:
        self.session.close()
        for fd in self.fds.values():
            os.close(fd)


# ---------------------------------------------------------------------------------- In this process

SIZES = (1024, 2048, 8192, 65536)
MOST_DENSE_BLOCKS = 8192
"""Dense attention over more is extrapolated: 64k blocks take 4 GB."""
SPEEDUP_BLOCKS = 2048
BUDGET = 0.1
MAX_CORRECTIONS = 4
SCORERS = ("mean", "rot2u")
PAGE_TOKENS = 32
BLOCKS_PER_PAGE = PAGE_TOKENS // BLOCK_TOKENS
STEP_COSINE = 0.84
SETTLING_STEPS = 60
T = TypeVar("T")


class PagedAttention:
    """vLLM's CPU attention, a decode step of one sequence. A page has 32 tokens, the kernel's
    least: two blocks.
    """

    def __init__(self, num_pages: int) -> None:
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        self._ops = ops
        self._isa = _get_attn_isa(torch.bfloat16, PAGE_TOKENS, HEAD_SIZE)
        pages = torch.randn(num_pages, KV_HEADS, 2 * PAGE_TOKENS, HEAD_SIZE).to(torch.bfloat16)
        self.blocks = pages.view(torch.int16).numpy().reshape(num_pages * BLOCKS_PER_PAGE, -1)
        """The memory of the pages, int16, with a row for each block of 16 tokens: as many bytes as
        its keys and values of all heads."""
        self._keys, self._values = pages.chunk(2, dim=2)
        self._query = torch.randn(1, QUERY_HEADS, HEAD_SIZE).to(torch.bfloat16)
        self._output = torch.empty_like(self._query)
        self._starts = torch.tensor([0, 1], dtype=torch.int32)

    def plan(self, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Length in tokens, and the kernel's schedule; vLLM computes both whenever the block
        table changes."""
        lengths = torch.tensor([num_pages * PAGE_TOKENS], dtype=torch.int32)
        schedule = self._ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=QUERY_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_SIZE,
            seq_lens=lengths,
            dtype=torch.bfloat16,
            query_start_loc=self._starts,
            causal=True,
            sliding_window_size=-1,
            isa=self._isa,
            enable_kv_split=True,
        )
        return lengths, schedule

    def attend(
        self, table: torch.Tensor, lengths: torch.Tensor, schedule: torch.Tensor
    ) -> torch.Tensor:
        """[1, query heads, channels].

        table: int32 [1, n], indices of pages.
        lengths, schedule: of `plan`, for as many.
        """
        self._ops.cpu_attention_with_kv_cache(
            query=self._query,
            key_cache=self._keys,
            value_cache=self._values,
            output=self._output,
            query_start_loc=self._starts,
            seq_lens=lengths,
            scale=HEAD_SIZE**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0.0,
            scheduler_metadata=schedule,
            s_aux=None,
        )
        return self._output


@dataclass
class Layer:
    """Sketches, a hot set, and pages for attention; times each part of a step."""

    num_blocks: int
    times_s: dict[str, list[float]] = field(default_factory=dict)
    num_missing: int = 0
    num_selected: int = 0

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.num_blocks)
        self.queries = self.varied(random)
        keys = random.standard_normal(
            (DISTINCT_BLOCKS, BLOCK_TOKENS, KV_HEADS, HEAD_SIZE), np.float32
        )
        self.pools = {
            name: np.tile(
                hotkv_sparse.build(name, keys), (self.num_blocks // DISTINCT_BLOCKS, 1, 1)
            )
            for name in SCORERS
        }
        self.rows = np.arange(self.num_blocks, dtype=np.int32)
        self.where = hotkv_sparse.CandidateSpan(2, self.num_blocks - 5, self.num_blocks)
        self.always_log_mass = np.full(QUERY_HEADS, 5.0, np.float32)
        self.budget = max(16, int(BUDGET * self.num_blocks))
        self.hot = hotkv_sparse.HotSet(2 * self.budget, 2 * MAX_CORRECTIONS)
        self.decoded = hotkv_sparse.HotSet(2 * self.budget, 2 * MAX_CORRECTIONS)
        for hot in (self.hot, self.decoded):
            hot.extend(self.where, self.num_blocks, self.num_blocks)
            hot.seed(self.where.always)
        self.scorer = Scorer.of(
            "rot2u", Source(self.pools["rot2u"]), QUERY_HEADS, HEAD_SIZE, HEAD_SIZE**-0.5
        )
        self.arriving = np.empty(0, np.int32)
        self.selected = np.zeros(self.num_blocks, np.bool_)
        self.dense_blocks = min(self.num_blocks, MOST_DENSE_BLOCKS)
        self.attention = PagedAttention(self.dense_blocks // BLOCKS_PER_PAGE)
        self.whole_table = torch.randperm(self.dense_blocks // BLOCKS_PER_PAGE).to(torch.int32)[
            None
        ]
        self.page_of = (
            np.arange(2 * self.num_blocks, dtype=np.int32)
            % len(self.attention.blocks)
            // BLOCKS_PER_PAGE
        )
        self.table = torch.empty((1, self.num_blocks), dtype=torch.int32)
        self.table_row = self.table[0].numpy()
        self.whole_plan = self.attention.plan(self.whole_table.shape[1])
        # After some steps it holds what most steps select.
        for number in range(SETTLING_STEPS):
            budget, most = (
                (self.budget, MAX_CORRECTIONS) if number else (2 * self.budget, self.num_blocks)
            )
            selection = choose(
                self.score("rot2u", next(self.queries)), self.always_log_mass, self.where, budget
            )
            self.hot.step(selection, most)
            self.decode(next(self.queries), budget, most)

    @staticmethod
    def varied(
        random: np.random.Generator,
    ) -> Iterator[np.ndarray[tuple[int, int], np.dtype[np.float32]]]:
        """Float32 [query heads, channels] of successive steps, with a cosine of STEP_COSINE."""
        mean = random.standard_normal((QUERY_HEADS, HEAD_SIZE), np.float32)
        while True:
            own = random.standard_normal((QUERY_HEADS, HEAD_SIZE), np.float32)
            yield (STEP_COSINE**0.5 * mean + (1 - STEP_COSINE) ** 0.5 * own).astype(np.float32)

    def score(
        self, name: str, query: np.ndarray[tuple[int, int], np.dtype[np.float32]]
    ) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        """Float32 [query heads, candidates]."""
        return hotkv_sparse.score(
            hotkv_sparse.prepare(name, query),
            self.pools[name],
            self.rows[self.where.first : self.where.last],
        )

    def choose(self, scores: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> int:
        """Between scoring and attention: choice, hot set, copies of what is added, block table.
        Returns the number of pages."""
        selection = choose(scores, self.always_log_mass, self.where, self.budget)
        step = self.hot.step(selection, MAX_CORRECTIONS)
        blocks = self.attention.blocks
        for block, slot in zip(step.load.blocks.tolist(), step.load.slots.tolist(), strict=True):
            blocks[slot % len(blocks)] = blocks[block % len(blocks)]
        self.num_missing += step.num_selected - step.num_resident
        self.num_selected += step.num_selected
        # As many pages as the hot set fills; which, costs nothing.
        slots = step.map.slots[::BLOCKS_PER_PAGE]
        self.table_row[: len(slots)] = self.page_of[slots]
        return len(slots)

    def decode(
        self, query: np.ndarray[tuple[int, int], np.dtype[np.float32]], budget: int, most: int
    ) -> None:
        """Query to hot set in one compiled call, with another hot set than `choose`, without
        copies and block table. most: blocks that may be added."""
        always = Always.known(self.always_log_mass)
        found = decode(
            self.decoded, self.scorer, query, self.rows, always, budget, most, self.arriving,
            self.selected,
        )  # fmt: skip
        self.arriving = found.ahead

    def measure(self, what: str, function: Callable[[], T]) -> T:
        began_s = time.perf_counter()
        result = function()
        self.times_s.setdefault(what, []).append(time.perf_counter() - began_s)
        return result

    def round(self) -> None:
        """Blocks are chosen by the last scorer."""
        query = next(self.queries)
        self.measure("dense", lambda: self.attention.attend(self.whole_table, *self.whole_plan))
        for name in SCORERS:
            scores = self.measure(name, lambda name=name: self.score(name, query))  # type: ignore[misc]
        num_pages = self.measure("other", lambda: self.choose(scores))
        self.measure("decode", lambda: self.decode(query, self.budget, MAX_CORRECTIONS))
        schedule = self.measure("schedule", lambda: self.attention.plan(num_pages))
        self.measure("attend", lambda: self.attention.attend(self.table, *schedule))

    def ms(self, what: str) -> float:
        """Median. Dense attention is extrapolated to the whole context."""
        value = median(self.times_s[what]) * 1e3
        return value * self.num_blocks / self.dense_blocks if what == "dense" else value

    def speedup(self, name: str) -> float:
        """A sparse step with this scorer, over dense attention."""
        return self.ms("dense") / (self.ms(name) + self.ms("other") + self.ms("attend"))


def bandwidth_gb_s() -> float:
    """Rate at which one thread reads memory."""
    data = np.ones(1 << 26, np.float32)
    times_s = []
    for _ in range(5):
        began_s = time.perf_counter()
        data.sum()
        times_s.append(time.perf_counter() - began_s)
    return data.nbytes / min(times_s) / 1e9


def main() -> int:
    flags = parser("Cost of sparse decode for a layer, beside dense attention.")
    flags.add_argument("--rounds", type=int, default=30)
    options = flags.parse_args()
    torch.set_num_threads(1)
    layers = {size: Layer(size) for size in SIZES}
    for number in range(options.rounds):
        for size, layer in layers.items():
            if size < SIZES[-1] or number % 5 == 0:
                layer.round()
    figures: dict[str, Any] = {"bandwidth_gb_s": bandwidth_gb_s()}
    rows = []
    for size, layer in layers.items():
        costs = {
            "dense_ms": layer.ms("dense"),
            **{f"{name}_ms": layer.ms(name) for name in SCORERS},
            "other_us": layer.ms("other") * 1e3,
            "schedule_us": layer.ms("schedule") * 1e3,
            "decode_us": layer.ms("decode") * 1e3,
            "attend_ms": layer.ms("attend"),
            "missing_ratio": layer.num_missing / layer.num_selected,
        }
        rows.append({"blocks": size, **costs})
        for name, value in costs.items():
            figures.setdefault(name, {})[str(size)] = value
    print(rows_table(rows))
    print()
    selections = service_figures()
    speedup = {name: layers[SPEEDUP_BLOCKS].speedup(name) for name in SCORERS}
    print_figures(selections | {f"speedup {name}": value for name, value in speedup.items()}, {})
    print_json({**figures, **selections, "speedup": speedup}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
