"""A dummy model that decodes over contexts in host memory, with torch's attention, and over
contexts wholly on the device.

torch has no block tables, so each layer first copies the hot set's pages into one tensor; vLLM's
kernels need no such copy.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu.context import BLOCK_TOKENS, U8, Context, page_bytes_of, random_pages, registered
from bench.gpu.kernels import CudaTensors, HostTensors
from bench.gpu.model import DenseCache, DummyModel, ModelShape
from bench.report import median
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.cuda.index import upload

# ------------------------------------------------------------------------------------------- Decode

Some = CudaTensors | HostTensors


class HostPages:
    """One layer's context in memory that the device reads; all layers use it."""

    def __init__(self, shape: ModelShape, num_tokens: int) -> None:
        self.shape, self.num_tokens = shape, num_tokens
        self.pages: U8 = random_pages(num_tokens // BLOCK_TOKENS, page_bytes_of(shape))
        self._arena = registered(self.pages)
        self.address = self._arena.address

    def close(self) -> None:
        self._arena.close()

    def parts(self, model: DummyModel) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values on the device, [KV heads, tokens, channels]."""
        held = torch.from_numpy(self.pages.view(np.float16)).to(model.device)
        paged = held.view(-1, self.shape.kv_heads, BLOCK_TOKENS, 2, self.shape.head_size)
        keys, values = (
            paged.select(3, part).transpose(0, 1).flatten(1, 2).to(model.kind) for part in (0, 1)
        )
        return keys, values


@dataclass(slots=True)
class Tokens:
    """A step's input on the device."""

    ids: torch.Tensor
    positions: torch.Tensor


class Resident:
    """Decodes a sequence per row over `host`. Not `is_away`: all blocks are on the device,
    selected alike."""

    def __init__(
        self,
        kernels: Some,
        model: DummyModel,
        host: HostPages,
        config: SparseConfig,
        *,
        rows: int,
        steps: int,
        is_away: bool = True,
    ) -> None:
        self.model, self._kernels = model, kernels
        self._kind = str(model.kind).removeprefix("torch.")
        self.context = Context(
            kernels.device, config, host.num_tokens, host.pages, host.address, kernels.address,
            shape=model.shape, steps=steps, rows=rows, is_away=is_away, query_kind=self._kind,
        )  # fmt: skip
        self.tokens = Tokens(
            torch.zeros(rows, dtype=torch.int64, device=model.device),
            torch.full((rows,), host.num_tokens, dtype=torch.int64, device=model.device),
        )
        # Sinks and recent window, which a real engine would have computed.
        content = torch.from_numpy(host.pages.view(np.float16))

        def copy(layer: int, table: np.ndarray) -> None:
            where = torch.from_numpy(table.astype(np.int64))
            row, block = (where > 0).nonzero(as_tuple=True)
            cache: Any = self.context.caches[layer]
            for start in range(0, len(row), 4096):
                some = slice(start, start + 4096)
                pages = where[row[some], block[some]].to(model.device)
                cache[pages] = content[block[some]].to(model.device)

        self.context.fill(copy)

    def advance(self) -> None:
        """The host's part before a step."""
        self.context.advance(asks=False)

    def step(self) -> torch.Tensor:
        """Next tokens, int64 [rows], of `tokens`."""
        self.context.begin_step()
        return self.model.step(self.tokens.ids, self.tokens.positions, self.attend)

    def go_on(self) -> None:
        """Makes a step's output the next one's input."""
        self.tokens.ids.copy_(self.step())
        self.tokens.positions.add_(1)

    def step_times_ms(self, count: int) -> list[float]:
        """Of a CUDA graph's replays. The caller must have run a step. Checks what was copied
        from host memory."""
        self.advance()
        run, times_ms = self._kernels.captured(self.go_on), []
        for _ in range(count):
            self.advance()
            times_ms.append(self._kernels.milliseconds(run))
        self.context.check()
        return times_ms

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """An `Attend`: writes the token, selects, copies what is missing, attends over the hot
        set."""
        context, shape = self.context, self.model.shape
        cache: Any = context.caches[layer]
        paged = cache.view(-1, shape.kv_heads, BLOCK_TOKENS, 2, shape.head_size)
        last: Any = context.tokens
        last = last.long() - 1
        table: Any = context.batch.table
        page = table.long().gather(1, (last // BLOCK_TOKENS)[:, None])[:, 0]
        for part, new in enumerate((k, v)):
            paged[page, :, last % BLOCK_TOKENS, part] = new.to(torch.float16)
        query: Any = q.contiguous()
        context.layer_step(layer, query, self._kind)
        chosen: Any = context.residents.table
        lengths: Any = context.residents.lengths
        chosen = chosen[:, : context.num_slots].long().clamp_(0, context.num_pages - 1)
        held = paged.transpose(0, 1)[:, chosen].to(self.model.kind)
        keys, values = (held.select(4, part).flatten(2, 3) for part in (0, 1))
        is_there = torch.arange(keys.shape[2], device=q.device)[None] < lengths[:, None]
        rows = q.unflatten(1, (-1, shape.group)).transpose(0, 1)
        out = scaled_dot_product_attention(rows, keys, values, attn_mask=is_there[None, :, None])
        return out.transpose(0, 1).flatten(1, 2)


def dense_tokens(
    model: DummyModel, host: HostPages, ids: list[torch.Tensor], rows: int
) -> list[torch.Tensor]:
    """Output tokens of each step over whole contexts, given `ids` as input."""
    cache = DenseCache(model, rows, host.num_tokens + len(ids), model.shape.layers)
    keys, values = host.parts(model)
    cache.keys[:, :, :, : host.num_tokens] = keys
    cache.values[:, :, :, : host.num_tokens] = values
    found = []
    for number, last in enumerate(ids):
        cache.length = host.num_tokens + number + 1
        positions = torch.full_like(last, host.num_tokens + number)
        found.append(model.step(last, positions, cache.attend))
    return found


def resident_tokens(one: Resident, ids: list[torch.Tensor] | None, steps: int) -> tuple[
    list[torch.Tensor], list[torch.Tensor]
]:  # fmt: skip
    """Input and output tokens of each step. `ids`: None: each step's previous output."""
    one.context.catch_up()
    told, answers = [], []
    last = torch.ones_like(one.tokens.ids)
    for number in range(steps):
        if ids is not None:
            last = ids[number]
        told.append(last)
        one.tokens.ids.copy_(last)
        one.advance()
        answers.append(one.step().clone())
        one.tokens.positions += 1
        last = answers[-1]
    one.context.check()
    return told, answers


def equal_share(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return float((torch.stack(one) == torch.stack(other)).double().mean())


# ------------------------------------------------------------------------------------------ Prefill
# Each layer copies the context before the chunk from the arena, and builds the chunk's sketches.

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Of a whole prompt in all layers: dense attention, and what residency adds."""

    dense_s: float
    added_s: float

    @property
    def overhead(self) -> float:
        return self.added_s / self.dense_s


class Prefill:
    """Three chunks, at the start, the middle and the end; a chunk's time grows with the context
    before it, so Simpson's rule gives the whole prompt's."""

    def __init__(
        self, kernels: Some, model: DummyModel, host: HostPages, config: SparseConfig, chunk: int
    ) -> None:
        self._kernels, self._model, self._host, self._chunk = kernels, model, host, chunk
        self._context = Context(
            kernels.device, config, host.num_tokens, host.pages, host.address, kernels.address,
            shape=model.shape, num_layers=1,
        )  # fmt: skip
        order = np.arange(chunk // BLOCK_TOKENS, dtype=np.int32)
        self._rows = upload(kernels.device, order)
        self._pages = upload(kernels.device, order % self._context.num_pages)
        self._target = kernels.device.zeros(
            (self._context.freed, page_bytes_of(model.shape)), np.uint8
        )

    def measured(self) -> PrefillTimes:
        """Waits for the device."""
        context, shape = self._context, self._model.shape
        context.catch_up()
        count = context.freed * BLOCK_TOKENS
        size = (shape.kv_heads, count, shape.head_size)
        keys, values = (
            torch.ones(size, device=self._model.device, dtype=self._model.kind) for _ in range(2)
        )
        x = torch.ones(self._chunk, shape.hidden, device=self._model.device).to(self._model.kind)
        dense, added = [], []
        for before in (0, count // 2, count):
            blocks = before // BLOCK_TOKENS

            def compute(before: int = before) -> None:
                self._model.chunk(x, keys[:, :before], values[:, :before])

            def stage(blocks: int = blocks) -> None:
                if blocks:
                    context.stage(self._target, blocks)
                self._build()

            dense.append(self._median_s(compute))
            added.append(self._median_s(stage))
        self._check()
        chunks = self._host.num_tokens / self._chunk
        whole = [chunks * shape.layers * (a + 4 * b + c) / 6 for a, b, c in (dense, added)]
        return PrefillTimes(*whole)

    def _median_s(self, run: Any) -> float:
        self._kernels.milliseconds(run)
        return median([self._kernels.milliseconds(run) for _ in range(ROUNDS)]) / 1e3

    def _build(self) -> None:
        self._context.layers[0].build(self._pages, self._rows, self._chunk // BLOCK_TOKENS)

    def _check(self) -> None:
        staged = self._kernels.device.read(self._target)[self._context.num_here :]
        expected = self._host.pages[self._context.num_here : self._context.freed]
        if not np.array_equal(staged, expected):
            raise ValueError("the staging area has not the arena's bytes")
