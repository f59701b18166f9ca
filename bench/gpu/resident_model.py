"""A dummy model that decodes over contexts in host memory, with torch's attention. For comparison,
the same model also decodes over contexts that are wholly on the device.

Torch's attention does not support block tables. So in each layer, the pages of the hot set (the
blocks to attend to) are first copied into one tensor. vLLM's kernels need no such copy.
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
    """The pages of one layer's context in host memory that is registered with CUDA, so that the
    device reads it. All layers use the same pages."""

    def __init__(self, shape: ModelShape, num_tokens: int) -> None:
        self.shape, self.num_tokens = shape, num_tokens
        self.pages: U8 = random_pages(num_tokens // BLOCK_TOKENS, page_bytes_of(shape))
        self._arena = registered(self.pages)
        self.address = self._arena.address

    def close(self) -> None:
        self._arena.close()

    def parts(self, model: DummyModel) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and the values on the device, [KV heads, tokens, channels] each."""
        held = torch.from_numpy(self.pages.view(np.float16)).to(model.device)
        paged = held.view(-1, self.shape.kv_heads, BLOCK_TOKENS, 2, self.shape.head_size)
        keys, values = (
            paged.select(3, part).transpose(0, 1).flatten(1, 2).to(model.kind) for part in (0, 1)
        )
        return keys, values


@dataclass(slots=True)
class Tokens:
    """The input tokens of a step and their positions, in device memory."""

    ids: torch.Tensor
    positions: torch.Tensor


class Resident:
    """Sequences that `model` decodes, one for each of `rows`, over the context `host`.

    is_away: if True, old blocks are only in host memory. If False, all blocks are on the device,
        but steps select the same blocks.
    """

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
        # Copies the blocks that are always on the device (the first blocks and the recent window),
        # which a real engine would have computed.
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
        """Does the host's part before a step: extends the context by the token that the step
        computes."""
        self.context.advance(asks=False)

    def step(self) -> torch.Tensor:
        """Runs a decode step. Returns the next token of each sequence, int64 [rows]. The step's
        input are `tokens.ids` at `tokens.positions`."""
        self.context.begin_step()
        return self.model.step(self.tokens.ids, self.tokens.positions, self.attend)

    def go_on(self) -> None:
        """Runs a step, and makes its output tokens the input of the next step."""
        self.tokens.ids.copy_(self.step())
        self.tokens.positions.add_(1)

    def step_times_ms(self, count: int) -> list[float]:
        """Captures a step as a CUDA graph and replays it `count` times. Returns the milliseconds of
        each replay. Each step continues from the tokens of the step before, so the caller must have
        run a step first. At the end, checks the blocks that were copied from host memory."""
        self.advance()
        run, times_ms = self._kernels.captured(self.go_on), []
        for _ in range(count):
            self.advance()
            times_ms.append(self._kernels.milliseconds(run))
        self.context.check()
        return times_ms

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Computes a layer's attention in a step: writes the new token, selects blocks, copies
        missing blocks from the arena, and attends over the hot set (the selected blocks of recent
        steps). Has the signature of `Attend`."""
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
    """Decodes over whole contexts on the device, with dense attention and the input tokens `ids` of
    each step. Returns the output tokens of each step, to be compared with those of
    `resident_tokens`."""
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
    """Decodes `steps` tokens over contexts in host memory. Returns the input tokens and the output
    tokens of each step. The inputs are `ids`, or each step's previous output if `ids` is None."""
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
    """Returns the share of tokens that are equal in both lists."""
    return float((torch.stack(one) == torch.stack(other)).double().mean())


# ------------------------------------------------------------------------------------------ Prefill
# The time that contexts in host memory add to a prefill, for a chunk (the tokens of one prefill
# step): each layer copies the context before the chunk out of the arena, and builds the chunk's
# sketches (compact forms of keys).

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Seconds of a whole prompt's prefill in all layers: of dense attention (`dense_s`), and of the
    work that contexts in host memory add (`added_s`)."""

    dense_s: float
    added_s: float

    @property
    def overhead(self) -> float:
        return self.added_s / self.dense_s


class Prefill:
    """Measures how long a prefill of a whole prompt takes, from three chunks (the tokens of one
    prefill step): at the start, after half of the context, and after all of it. A chunk's time
    grows with the context before it. So the time of a whole prompt is extrapolated from the three
    times by Simpson's rule, for each chunk and layer."""

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
        """Returns the times for a whole prompt. Waits for the device."""
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
        """Builds the sketches (compact summaries of the blocks' keys) of a prefill chunk,
        from keys on the device."""
        self._context.layers[0].build(self._pages, self._rows, self._chunk // BLOCK_TOKENS)

    def _check(self) -> None:
        staged = self._kernels.device.read(self._target)[self._context.num_here :]
        expected = self._host.pages[self._context.num_here : self._context.freed]
        if not np.array_equal(staged, expected):
            raise ValueError("the staging area has not the arena's bytes")
