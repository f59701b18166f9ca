"""Sequences whose blocks, but sinks and recent window, are only in host memory: sparse decode's
kernels without an engine, given what a worker gives.

All layers and sequences read the same host pages, to save memory; device pages and sketches are
their own. Pages are [H, N, 2, D] in float16: H KV heads, N tokens, keys and values, D channels.
"""

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.gpu.model import LLAMA_8B, ModelShape
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.cuda.device import Array, Device, address_of
from hotkv_sparse.cuda.hotsets import CudaHotSets, Fragment
from hotkv_sparse.cuda.index import Index, IndexShape, Pages, upload
from hotkv_sparse.cuda.mapped_arena import MappedArena
from hotkv_sparse.cuda.residents import EngineBatch, NamedRow, PagePlaces, Residents
from hotkv_sparse.cuda.selector import CudaSelector, Queries
from hotkv_sparse.cuda.workspace import StepShape, Workspace

BLOCK_TOKENS = 16
STEPS = 40
CONFIG = SparseConfig(sparse_topk=4096, dense_layers=(), min_context_tokens=0, residency="host")
SMALL_CONFIG = SparseConfig(
    sparse_topk=384,
    sink_tokens=32,
    recent_tokens=48,
    dense_layers=(),
    min_context_tokens=0,
    residency="host",
)
"""For short runs on the CPU in place of a GPU."""
U8 = npt.NDArray[np.uint8]


def page_bytes_of(shape: ModelShape) -> int:
    return BLOCK_TOKENS * shape.kv_heads * 2 * shape.head_size * 2


def random_pages(num_blocks: int, page_bytes: int) -> U8:
    """float16 of random sign, absolute values from 0.5 to 1: uint8 [blocks, bytes]. CUDA can
    register the memory."""
    memory = np.frombuffer(mmap.mmap(-1, num_blocks * page_bytes), np.uint8)
    rng, words = np.random.default_rng(1), memory.view(np.uint64)
    for start in range(0, len(words), 1 << 22):
        part = words[start : start + (1 << 22)]
        np.bitwise_and(
            rng.integers(0, 1 << 64, len(part), np.uint64), np.uint64(0x83FF83FF83FF83FF), out=part
        )
        np.bitwise_or(part, np.uint64(0x3800380038003800), out=part)
    return memory.reshape(num_blocks, page_bytes)


def registered(pages: U8) -> MappedArena:
    """Ends the program if the pages can't be registered."""
    arena = MappedArena(pages.reshape(-1), is_writable=True)
    arena.start()
    if not arena.wait():
        raise SystemExit(f"the arena can't be registered: {arena.error}")
    return arena


class Context:
    """Sequences of equal length, each a row of the batch.

    place: address of an array on the device.
    is_away: old blocks are only in host memory; else all are on the device, selected alike.
    """

    def __init__(
        self,
        device: Device,
        config: SparseConfig,
        num_tokens: int,
        arena: U8,
        address: int,
        place: Callable[[Array], int] = address_of,
        *,
        shape: ModelShape = LLAMA_8B,
        num_layers: int | None = None,
        steps: int = STEPS,
        rows: int = 1,
        is_away: bool = True,
        query_kind: str = "float32",
    ) -> None:
        """num_tokens: of each sequence before the first step.
        arena, address: the blocks, uint8 [blocks, page bytes], and where the device reads them.
        num_layers: None: as `shape`.
        steps: at most.
        rows: sequences.
        """
        self.device, self.config, self.arena, self.shape = device, config, arena, shape
        self.num_tokens, self.num_rows, self._place = num_tokens, rows, place
        self.page_bytes, self._is_away, self._kind = page_bytes_of(shape), is_away, query_kind
        self.max_blocks = -(-(num_tokens + steps) // BLOCK_TOKENS)
        self.num_slots = config.most_blocks(num_tokens + steps, BLOCK_TOKENS) + 8
        self.num_here = -(-config.sink_tokens // BLOCK_TOKENS)
        self.freed = (num_tokens - config.recent_tokens) // BLOCK_TOKENS
        here = [*range(self.num_here), *range(self.freed, self.max_blocks)]
        if not is_away:
            here = [*range(self.max_blocks)]
        self._of_row = len(here) + self.num_slots
        self.num_pages = 1 + rows * self._of_row
        self._table = np.zeros((rows, self.max_blocks), np.int32)
        for row in range(rows):
            first = 1 + row * self._of_row
            self._table[row, here] = np.arange(first, first + len(here))
        heads = shape.kv_heads
        step = StepShape(
            rows,
            self.max_blocks,
            BLOCK_TOKENS,
            shape.heads,
            heads,
            shape.head_size,
            self.num_slots,
        )
        self.residents = Residents(
            device, config, rows, rows, self.max_blocks, BLOCK_TOKENS, self.num_pages, rows
        )
        self.work = Workspace(device, config, step, self.residents)
        self._lengths = np.full(rows, num_tokens, np.int32)
        self.tokens = upload(device, self._lengths)
        self.batch = EngineBatch(
            self.tokens,
            upload(device, np.arange(rows + 1, dtype=np.int32)),
            upload(device, self._table),
            self.max_blocks,
            rows,
            rows,
        )
        self.query = device.zeros((rows, shape.heads, shape.head_size), np.float32)
        self._rng = np.random.default_rng(0)
        count = shape.layers if num_layers is None else num_layers
        self.caches = [self._cache() for _ in range(count)]
        self.layers = [self._layer(index, cache) for index, cache in enumerate(self.caches)]
        self._begin(address, len(here))

    def _cache(self) -> Array:
        return self.device.zeros((self.num_pages, self.page_bytes // 2), np.float16)

    def _layer(self, number: int, cache: Array) -> CudaSelector:
        size, heads = self.shape.head_size, self.shape.kv_heads
        address, head = self._place(cache), BLOCK_TOKENS * 2 * size
        keys, values = (
            Pages(address + part * size * 2, "float16", heads * head, 2 * size, head)
            for part in (0, 1)
        )
        shape = IndexShape(self.config.scorer, heads, size, BLOCK_TOKENS)
        index = Index(self.device, shape, self.num_rows * self.max_blocks)
        hot = CudaHotSets(self.work, [Fragment(0, address, self.page_bytes)], self.page_bytes)
        return CudaSelector(self.work, number, index, keys, values, hot)

    def _begin(self, address: int, num_here: int) -> None:
        blocks = np.arange(self.max_blocks, dtype=np.int32)
        addresses = address + np.arange(len(self.arena), dtype=np.int64) * self.page_bytes
        write, work = self.device.write, self.work
        for row in range(self.num_rows):
            first = 1 + row * self._of_row + num_here
            write(work.pages, (row, 0), np.arange(first, first + self.num_slots, dtype="i4")[None])
            write(work.arena, (row, 0), addresses[None])
            write(work.rows, (row, 0), (row * self.max_blocks + blocks)[None])
        self._start_rows()
        self.rename()

    def _start_rows(self) -> None:
        for row in range(self.num_rows):
            self.residents.begin_anew(row)
            if self._is_away:
                self.residents.give_back(row, self.freed)

    def fill(self, content: Callable[[int, np.ndarray], None]) -> None:
        """`content(layer, pages)` writes block b of the arena to page `pages[row, b]`, int32
        [rows, blocks]; page 0: not on the device."""
        for layer in range(len(self.caches)):
            content(layer, self._table[:, : len(self.arena)])

    def rename(self) -> None:
        """Names the next step's rows: kernels find a request by the page of its new token."""
        blocks = (self._lengths - 1) // BLOCK_TOKENS
        self.residents.name_rows(
            {
                int(self._table[row, block]): NamedRow(row, is_sparse=True)
                for row, block in enumerate(blocks)
            }
        )

    def places(self, layer: int) -> PagePlaces:
        return PagePlaces(self._place(self.caches[layer]), self.page_bytes, 0)

    def catch_up(self) -> None:
        """Builds all sketches. Once, before the first step."""
        self.work.begin_batch(self.batch)
        count, found = self.num_tokens // BLOCK_TOKENS, self.residents
        for number, layer in enumerate(self.layers):
            for row in range(self.num_rows):
                found.locate_keys(row, count, self.places(number), self.work.arena, self.work.rows)
                layer.build(None, found.found_rows, count, found.addresses)
        # Not a step: the next is the first, and fills the hot sets.
        self._start_rows()

    def advance(self, *, asks: bool = True) -> None:
        """The host's work between steps: a token more; new queries if `asks`."""
        self._lengths += 1
        self.device.write(self.tokens, (0,), self._lengths)
        if asks:
            shape = (self.num_rows, self.shape.heads, self.shape.head_size)
            values = self._rng.standard_normal(shape).astype(np.float32)
            self.device.write(self.query, (0, 0, 0), values)
        self.rename()

    def step(self) -> None:
        """Queues a decode step, which needs nothing of the host."""
        self.begin_step()
        for number in range(len(self.layers)):
            self.layer_step(number, self.query, self._kind)

    def begin_step(self) -> None:
        """What comes before the first layer."""
        self.work.begin_batch(self.batch)

    def layer_step(self, number: int, query: Array, kind: str) -> None:
        """Builds sketches of completed blocks, selects, writes the block table. query: [rows,
        query heads, channels]."""
        layer, residents, rows = self.layers[number], self.residents, self.num_rows
        size = self.shape.head_size
        layer.build(
            residents.complete_pages, residents.complete_rows, residents.num_complete(rows, rows)
        )
        layer.hot.grow()
        layer.step(Queries(query, kind, self.shape.heads * size, size))

    def stage(self, target: Array, count: int | None = None) -> None:
        """Copies layer 0 of the first sequence to `target`, as a prefill needs it: what is in
        host memory, or `count` blocks."""
        self.residents.stage(
            0,
            self.freed if count is None else count,
            self.places(0),
            self.work.arena,
            self._place(target),
            0,
            self.residents.found_rows,
            self.work.faults,
        )

    def pulled(self) -> int:
        """Pages copied from the arena so far."""
        return int(self.device.read(self.work.faults)[2])

    def check(self) -> int:
        """Compares hot slots with the arena; returns their number. Raises ValueError if one
        differs, or the kernels count faults."""
        count = 0
        faults = self.device.read(self.work.faults)
        if faults[0] or faults[1]:
            raise ValueError(f"the device counts faults: {faults.tolist()}")
        pages_RK = self.device.read(self.work.pages)
        for number, layer in enumerate(self.layers):
            cache: Any = self.device.read(self.caches[number]).view(np.uint8)
            states, blocks = (self.device.read(a) for a in (layer.hot.state, layer.hot.block_of))
            for pages, state, held in zip(pages_RK, states, blocks, strict=True):
                is_away = (held >= self.num_here) & (held < self.freed) & self._is_away
                for slot in np.flatnonzero((state == 1) & is_away):
                    if not np.array_equal(cache[pages[slot]], self.arena[held[slot]]):
                        raise ValueError(f"layer {number}: slot {slot} is not block {held[slot]}")
                    count += 1
        return count
