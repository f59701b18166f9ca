"""A dummy model that decodes over contexts in host memory, with torch's attention, and the same
model over contexts that are on the device whole.

Torch's attention knows no block tables: the hot set's pages are put side by side for each layer
first, which vLLM's kernels need not.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu.context import BLOCK_TOKENS, U8, Context, page_bytes_of, random_pages
from bench.gpu.kernels import CudaTensors, HostTensors
from bench.gpu.model import DenseCache, DummyModel, ModelShape
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.cuda.arena import MappedArena

Some = CudaTensors | HostTensors


class HostPages:
    """One layer's pages of a context in host memory that the device reads, and the same as keys and
    values [H, T, D] on the device."""

    def __init__(self, shape: ModelShape, num_tokens: int) -> None:
        self.shape, self.num_tokens = shape, num_tokens
        self.pages: U8 = random_pages(num_tokens // BLOCK_TOKENS, page_bytes_of(shape))
        self._arena = MappedArena(self.pages.reshape(-1), is_writable=True)
        self._arena.start()
        if not self._arena.wait():
            raise SystemExit(f"the arena can't be registered: {self._arena.error}")
        self.address = self._arena.address

    def close(self) -> None:
        self._arena.close()

    def parts(self, model: DummyModel) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [H, T, D]."""
        held = torch.from_numpy(self.pages.view(np.float16)).to(model.device)
        paged = held.view(-1, self.shape.kv_heads, BLOCK_TOKENS, 2, self.shape.head_size)
        keys, values = (
            paged.select(3, part).transpose(0, 1).flatten(1, 2).to(model.kind) for part in (0, 1)
        )
        return keys, values


@dataclass(slots=True)
class Tokens:
    """Of a step, in device memory."""

    ids: torch.Tensor
    positions: torch.Tensor


class Resident:
    """`rows` sequences over `host`, decoded by `model`. `is_away` False: all blocks are on the
    device and the choice is the same."""

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
        # What sinks and recent window hold, as an engine has computed it.
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
        """The host's part before a step: the token that it computes is one more of the context."""
        self.context.advance(asks=False)

    def step(self) -> torch.Tensor:
        """The tokens [B] that come next; `tokens.ids` at `tokens.positions` are the last ones."""
        self.context.begin_step()
        return self.model.step(self.tokens.ids, self.tokens.positions, self.attend)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """An `Attend`: writes the token, chooses, pulls, and attends over the table."""
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
    """What the model answers over whole contexts on the device, told the tokens `ids`."""
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
    """Tokens told and answered in so many steps: its own answers are told to it unless there are
    `ids`."""
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
    """Of the tokens of both."""
    return float((torch.stack(one) == torch.stack(other)).double().mean())
