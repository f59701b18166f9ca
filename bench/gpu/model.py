"""Dummy models in torch with the shapes of real ones: random weights, tokens in, tokens out.

All layers share the same weights, which are larger than a GPU's caches: each layer still reads
them, and an 8B model needs 3 GB. Shapes: B rows of a step, Q query heads, H KV heads, G = Q / H,
D channels, C tokens of a chunk, T of a context.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A layer's attention in a step: its number, q [B, Q, D], k and v [B, H, D] to [B, Q, D]."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """SwiGLU and grouped-query attention. `group`: query heads per KV head."""

    name: str
    layers: int
    hidden: int
    kv_heads: int
    group: int
    head_size: int
    mlp: int
    vocab: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def token_bytes(self) -> int:
        """In all layers, two bytes a value."""
        return self.layers * self.kv_heads * self.head_size * 4


LLAMA_8B = ModelShape("8B", 32, 4096, 8, 4, 128, 14336, 128256)
QWEN_14B = ModelShape("14B", 48, 5120, 8, 5, 128, 13824, 152064)
TINY = ModelShape("tiny", 2, 64, 2, 2, 32, 96, 97)
"""For the CPU in place of a GPU."""


class DummyModel:
    """kind: float16 on a GPU, float32 on a CPU."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.kind = torch.float16 if device.type == "cuda" else torch.float32
        torch.manual_seed(7)
        size, rows = shape.head_size, shape.heads + 2 * shape.kv_heads
        self._embedding = torch.randn(
            shape.vocab, shape.hidden, device=device, dtype=torch.float32
        ).to(self.kind)
        self._qkv = self._weight(shape.hidden, rows * size)
        self._out = self._weight(shape.heads * size, shape.hidden)
        self._up = self._weight(shape.hidden, 2 * shape.mlp)
        self._down = self._weight(shape.mlp, shape.hidden)
        self._head = self._weight(shape.hidden, shape.vocab)
        self._rates = 500000.0 ** (-torch.arange(0, size, 2, device=device) / size)

    def _weight(self, rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty(rows, columns, device=self.device, dtype=self.kind)
        return weight.normal_(std=1 / math.sqrt(rows))

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Next tokens [B], given the last ones at `positions`, both int64 [B]."""
        x = self._embedding[tokens]
        for layer in range(self.shape.layers):
            q, k, v = self.heads_of(x, positions)
            x = self.rest_of(x, attend(layer, q, k, v))
        return (self._norm(x) @ self._head).argmax(-1)

    def heads_of(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [B, Q, D], k and v [B, H, D] of a layer's input [B, hidden]."""
        shape = self.shape
        found = (self._norm(x) @ self._qkv).view(len(x), -1, shape.head_size)
        q, k, v = found.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        return self._turned(q, positions), self._turned(k, positions), v

    def rest_of(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """A layer's output, from its input and its attention's output."""
        x = x + attended.reshape(len(x), -1).to(self.kind) @ self._out
        gate, up = (self._norm(x) @ self._up).chunk(2, dim=-1)
        return x + (silu(gate) * up) @ self._down

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (self.shape.hidden,))

    def _turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = (positions[:, None].float() * self._rates)[:, None]
        one, other = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).to(self.kind)

    def chunk(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """A layer for a prefill chunk x [C, hidden] behind `keys` and `values` [H, T, D].

        Attention over context and chunk are only added, not joined exactly: only the time
        matters, and joining takes almost none.
        """
        shape = self.shape
        q, k, v = self.heads_of(x, torch.arange(len(x), device=self.device))
        wide_k, wide_v = (
            part.repeat_interleave(shape.group, dim=1).transpose(0, 1)[None] for part in (k, v)
        )
        out = scaled_dot_product_attention(q.transpose(0, 1)[None], wide_k, wide_v, is_causal=True)
        attended = out[0].transpose(0, 1)
        if keys.shape[1]:
            rows = q.view(len(x), shape.kv_heads, shape.group, -1).permute(1, 2, 0, 3)
            rows = rows.reshape(1, shape.kv_heads, -1, shape.head_size)
            before = scaled_dot_product_attention(rows, keys[None], values[None])
            before = before.view(shape.kv_heads, shape.group, len(x), -1).permute(2, 0, 1, 3)
            attended = attended + before.reshape(attended.shape)
        return self.rest_of(x, attended)


class DenseCache:
    """Keys and values [layers, B, H, T, D]. With fewer layers than the model, several share one,
    which costs the same time."""

    def __init__(self, model: DummyModel, rows: int, num_tokens: int, layers: int) -> None:
        shape = model.shape
        size = (layers, rows, shape.kv_heads, num_tokens, shape.head_size)
        self.keys, self.values = (
            torch.zeros(size, device=model.device, dtype=model.kind) for _ in range(2)
        )
        self._group, self.length = shape.group, num_tokens

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """An `Attend` over the first `length` tokens."""
        at, count = layer % len(self.keys), self.length
        keys, values = self.keys[at][:, :, :count], self.values[at][:, :, :count]
        keys[:, :, count - 1], values[:, :, count - 1] = k, v
        rows = q.unflatten(1, (-1, self._group))
        return scaled_dot_product_attention(rows, keys, values).flatten(1, 2)
