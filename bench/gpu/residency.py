"""Contexts in host memory on a GPU: a decode step of an 8B-shaped model, what it pulls out of the
arena, and a layer's whole context put together as a prefill needs it.

`python -m bench.gpu.residency [--json] [--quick]`, on a machine with CuPy; 30 s, 4 GB of device
memory, 512 MiB of host memory. 32 layers of 8 KV heads of 4 query heads, d = 128, blocks of 16, one
sequence of 32k and of 128k tokens, budget 2048. Keys and queries are random, the hard case: real
queries change less from step to step. All layers read the same host pages, at addresses of their
own in the cache; the bytes moved are those of 32. Attention itself is not timed (that is vLLM's
kernel), nor is the model. Each hot slot is compared with the arena at the end.
"""

import mmap
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.gpu.figures import Figure, gpu_parser, print_figures
from bench.report import median
from hotkv_sparse.budget import USUAL_SETS
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.cuda.arena import MappedArena
from hotkv_sparse.cuda.device import Array, CupyDevice, Device, address_of
from hotkv_sparse.cuda.hotsets import CudaHotSets, Fragment
from hotkv_sparse.cuda.index import Index, IndexShape, Pages, upload
from hotkv_sparse.cuda.residents import EngineBatch, PagePlaces, Residents
from hotkv_sparse.cuda.selector import CudaSelector, Queries
from hotkv_sparse.cuda.workspace import StepShape, Workspace

LAYERS, KV_HEADS, GROUP, HEAD_SIZE, BLOCK_TOKENS = 32, 8, 4, 128, 16
STEPS = 40
CONFIG = SparseConfig(
    sparse_topk=2048,
    dense_layers=(),
    min_context_tokens=0,
    residency="host",
)
U8 = npt.NDArray[np.uint8]


class Context:
    """One sequence whose blocks are all in host memory, but for sinks and recent window. `place`:
    the address of an array of the device."""

    def __init__(
        self,
        device: Device,
        config: SparseConfig,
        num_tokens: int,
        arena: U8,
        address: int,
        place: Callable[[Array], int] = address_of,
        num_layers: int = LAYERS,
        steps: int = STEPS,
    ) -> None:
        """`arena` uint8 [blocks, page bytes], which the device reads from `address` on."""
        self.device, self.config, self.arena = device, config, arena
        self.num_tokens, self._place = num_tokens, place
        self.page_bytes = BLOCK_TOKENS * KV_HEADS * 2 * HEAD_SIZE * 2
        self.max_blocks = -(-(num_tokens + steps) // BLOCK_TOKENS)
        num_slots = USUAL_SETS * config.budget_blocks(num_tokens + steps, BLOCK_TOKENS) + 8
        sinks = -(-config.sink_tokens // BLOCK_TOKENS)
        self.freed = (num_tokens - config.recent_tokens) // BLOCK_TOKENS
        here = [*range(sinks), *range(self.freed, self.max_blocks)]
        self.num_pages = 1 + len(here) + num_slots
        table = np.zeros((1, self.max_blocks), np.int32)
        table[0, here] = np.arange(1, 1 + len(here))
        shape = StepShape(
            1, self.max_blocks, BLOCK_TOKENS, KV_HEADS * GROUP, KV_HEADS, HEAD_SIZE, num_slots
        )
        self.residents = Residents(
            device, config, 1, 1, self.max_blocks, BLOCK_TOKENS, self.num_pages, 1
        )
        self.work = Workspace(device, config, shape, self.residents)
        self._table, self.num_here = table, sinks
        self.tokens = upload(device, np.array([num_tokens], np.int32))
        self.batch = EngineBatch(
            self.tokens,
            upload(device, np.array([0, 1], np.int32)),
            upload(device, table),
            self.max_blocks,
            1,
            1,
        )
        self.query = device.zeros((1, KV_HEADS * GROUP, HEAD_SIZE), np.float32)
        self._rng = np.random.default_rng(0)
        self.caches = [self._cache() for _ in range(num_layers)]
        self.layers = [self._layer(index, cache) for index, cache in enumerate(self.caches)]
        self._begin(address, num_slots, 1 + len(here))

    def _cache(self) -> Array:
        return self.device.zeros((self.num_pages, self.page_bytes // 2), np.float16)

    def _layer(self, number: int, cache: Array) -> CudaSelector:
        address, head = self._place(cache), BLOCK_TOKENS * 2 * HEAD_SIZE
        keys, values = (
            Pages(address + part * HEAD_SIZE * 2, "float16", KV_HEADS * head, 2 * HEAD_SIZE, head)
            for part in (0, 1)
        )
        shape = IndexShape(self.config.scorer, KV_HEADS, HEAD_SIZE, BLOCK_TOKENS)
        index = Index(self.device, shape, self.max_blocks)
        hot = CudaHotSets(self.work, [Fragment(0, address, self.page_bytes)], self.page_bytes)
        return CudaSelector(self.work, number, index, keys, values, hot)

    def _begin(self, address: int, num_slots: int, first_hot: int) -> None:
        count = len(self.arena)
        hot = np.arange(first_hot, first_hot + num_slots, dtype=np.int32)
        addresses = address + np.arange(count, dtype=np.int64) * self.page_bytes
        self.device.write(self.work.pages, (0, 0), hot[None])
        self.device.write(self.work.arena, (0, 0), addresses[None])
        rows = np.arange(self.max_blocks, dtype=np.int32)
        self.device.write(self.work.rows, (0, 0), rows[None])
        self.residents.begin_anew(0)
        self.residents.give_back(0, self.freed)
        self.rename()

    def rename(self) -> None:
        """The block that the coming step writes names its row."""
        tokens = int(self.device.read(self.tokens)[0])
        self.residents.name_rows({int(self._table[0, (tokens - 1) // BLOCK_TOKENS]): 0})

    def places(self, layer: int) -> PagePlaces:
        return PagePlaces(self._place(self.caches[layer]), self.page_bytes, 0)

    def catch_up(self) -> None:
        """Representations of the whole context in all layers, from keys in the arena."""
        self.work.begin_batch(self.batch)
        count, found = self.num_tokens // BLOCK_TOKENS, self.residents
        for number, layer in enumerate(self.layers):
            found.locate_keys(0, count, self.places(number), self.work.arena, self.work.rows)
            layer.build(None, found.found_rows, count, found.addresses)
        # This was no step: the next one is the first, and fills the hot sets.
        found.begin_anew(0)
        found.give_back(0, self.freed)

    def advance(self) -> None:
        """The host's part between two steps: another token, other queries."""
        tokens = self.device.read(self.tokens) + 1
        self.device.write(self.tokens, (0,), tokens)
        self.device.write(
            self.query,
            (0, 0, 0),
            self._rng.standard_normal((1, KV_HEADS * GROUP, HEAD_SIZE)).astype(np.float32),
        )
        self.rename()

    def step(self) -> None:
        """What a decode step gives to the device: nothing of it needs the host."""
        self.work.begin_batch(self.batch)
        residents = self.residents
        queries = Queries(self.query, "float32", self.query.shape[1] * HEAD_SIZE, HEAD_SIZE)
        for layer in self.layers:
            layer.build(
                residents.complete_pages, residents.complete_rows, residents.num_complete(1, 1)
            )
            layer.hot.grow()
            layer.step(queries)

    def stage(self, target: Array) -> None:
        """A layer's whole context, side by side."""
        self.residents.stage(
            0,
            self.freed,
            self.places(0),
            self.work.arena,
            self._place(target),
            0,
            self.residents.found_rows,
            self.work.faults,
        )

    def check(self) -> int:
        """Compares the hot slots of all layers with the arena; returns how many hold a block.
        Raises ValueError where one differs."""
        count = 0
        faults = self.device.read(self.work.faults)
        if faults[0] or faults[1]:
            raise ValueError(f"the device counts faults: {faults.tolist()}")
        pages = self.device.read(self.work.pages)[0]
        for number, layer in enumerate(self.layers):
            state, held = (self.device.read(a)[0] for a in (layer.hot.state, layer.hot.block_of))
            cache = self.device.read(self.caches[number]).view(np.uint8)
            is_away = (held >= self.num_here) & (held < self.freed)
            for slot in np.flatnonzero((state == 1) & is_away):
                if not np.array_equal(cache[pages[slot]], self.arena[held[slot]]):
                    raise ValueError(f"layer {number}: slot {slot} is not block {held[slot]}")
                count += 1
        return count


def random_pages(num_blocks: int, page_bytes: int) -> U8:
    """Random keys and values in float16, in memory that can be registered: uint8 [blocks,
    bytes]."""
    memory = np.frombuffer(mmap.mmap(-1, num_blocks * page_bytes), np.uint8)
    pages = memory.reshape(num_blocks, page_bytes)
    rng = np.random.default_rng(1)
    for page in pages:
        page.view(np.float16)[:] = rng.standard_normal(page_bytes // 2, np.float32)
    return pages


def measure(cupy: Any, num_tokens: int) -> list[Figure]:
    """All figures of one length."""
    stream = cupy.cuda.Stream(non_blocking=True)
    device = CupyDevice(0, stream.ptr)
    device.compile()
    page_bytes = BLOCK_TOKENS * KV_HEADS * 2 * HEAD_SIZE * 2
    pages = random_pages(num_tokens // BLOCK_TOKENS, page_bytes)
    began_s = time.perf_counter()
    arena = MappedArena(pages.reshape(-1), is_writable=True)
    arena.start()
    if not arena.wait():
        raise SystemExit(f"the arena can't be registered: {arena.error}")
    registered_s = time.perf_counter() - began_s
    context = Context(device, CONFIG, num_tokens, pages, arena.address)
    kilo = f"{num_tokens >> 10}k"
    caught_up_s = _seconds(cupy, stream, context.catch_up)
    first_s = _seconds(cupy, stream, context.step)
    stream.begin_capture()
    context.step()
    graph = stream.end_capture()
    pulled, times_s = int(device.read(context.work.faults)[2]), []
    for _ in range(STEPS - 2):
        context.advance()
        times_s.append(_seconds(cupy, stream, lambda: graph.launch(stream)))
    pulled = (int(device.read(context.work.faults)[2]) - pulled) // len(times_s)
    target = device.zeros((context.freed, page_bytes), np.uint8)
    staged_s = median([_seconds(cupy, stream, lambda: context.stage(target)) for _ in range(3)])
    staged = device.read(target)[context.num_here :]
    if not np.array_equal(staged, pages[context.num_here : context.freed]) or not context.check():
        raise ValueError("the device's bytes are not those of the arena")
    arena.close()
    step_s = median(times_s)
    return [
        Figure(f"residency {kilo}: register, GB/s", pages.nbytes / registered_s / 1e9),
        Figure(f"residency {kilo}: representations of a hit, s", caught_up_s),
        Figure(f"residency {kilo}: first step, ms", 1e3 * first_s),
        Figure(f"residency {kilo}: choose and pull, ms a step", 1e3 * step_s),
        Figure(f"residency {kilo}: pages pulled a step", pulled),
        Figure(f"residency {kilo}: pulled, GB/s", pulled * page_bytes / step_s / 1e9),
        Figure(f"residency {kilo}: staging, GB/s", context.freed * page_bytes / staged_s / 1e9),
    ]


def _seconds(cupy: Any, stream: Any, run: Callable[[], None]) -> float:
    start, end = (cupy.cuda.Event() for _ in range(2))
    start.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3


def main() -> int:
    """Command line."""
    import cupy

    options = gpu_parser(__doc__ or "").parse_args()
    figures = []
    for num_tokens in (1 << 15,) if options.quick else (1 << 15, 1 << 17):
        figures += measure(cupy, num_tokens)
    print_figures(figures, {}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
