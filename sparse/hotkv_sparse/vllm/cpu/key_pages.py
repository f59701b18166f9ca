"""Reads keys, or the attention mass of tokens, from a layer's pages as vLLM's CPU kernels arrange
them. Never calls these kernels or writes pages. A block id outside the layer raises IndexError.

Shapes: B blocks, T tokens of a block, H KV heads, Q query heads, D channels, n blocks to read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hotkv_proto import native
from hotkv_sparse.decode import Always
from hotkv_sparse.selection import exact_log_mass
from hotkv_sparse.vllm.attention_layers import stored_dtype
from hotkv_vllm.compat import Unsupported

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
_LOG2_E = np.float32(1.4426950408889634)
_KINDS = {
    torch.bfloat16: 0,
    torch.float16: 1,
    torch.float32: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
_LANES = 16
_DIGIT = 8
"""Integers below are exact in every dtype."""


# ------------------------------------------------------------------------------------- arrangement


@dataclass(frozen=True, slots=True)
class KeyPacking:
    """How vLLM's CPU kernels arrange the keys of one head in a block.

    Usually each `run` tokens form an array [head_size / pair][run][pair]: the first `pair` channels
    of each token, then the next `pair` of each, and so on.

    order: any other arrangement: position of each channel of each token, int64 [tokens *
        head_size].
    """

    run: int
    pair: int
    order: torch.Tensor | None = None


def key_packing(
    block_tokens: int, head_size: int, dtype: torch.dtype, isa: str, cache_dtype: str = "auto"
) -> KeyPacking:
    """Finds the arrangement by a trial: the kernel writes known numbers. Raises Unsupported if it
    does more than permute.

    dtype: of the model.
    isa: vLLM's name of the kernel's instruction set.
    cache_dtype: vLLM's `kv_cache_dtype`.
    """
    from vllm import _custom_ops as ops

    stored = stored_dtype(dtype, cache_dtype)
    page_dtype = torch.uint8 if stored.itemsize == 1 else stored
    token = torch.arange(block_tokens)[:, None].expand(block_tokens, head_size)
    channel = torch.arange(head_size)[None, :].expand(block_tokens, head_size)
    origin = torch.zeros(block_tokens * head_size, dtype=torch.long)
    for number, most, unit in ((token, block_tokens, head_size), (channel, head_size, 1)):
        power = 1
        while power < most:
            keys = (number // power % _DIGIT).to(dtype)[:, None].contiguous()
            pages = torch.zeros((2, 1, 2 * block_tokens, head_size), dtype=page_dtype)
            key_pages, value_pages = pages.chunk(2, dim=2)
            ops.cpu_attn_reshape_and_cache(
                keys,
                torch.zeros_like(keys),
                key_pages,
                value_pages,
                torch.arange(block_tokens),
                isa,
                kv_cache_dtype=cache_dtype,
            )
            digit = key_pages[0].reshape(-1).view(stored).float().round().long()
            origin += digit * power * unit
            power *= _DIGIT
    numbers = torch.arange(block_tokens * head_size)
    for run in (run for run in (block_tokens, 32, 16) if block_tokens % run == 0):
        for pair in (1, 2, 4, head_size):
            packed = numbers.view(block_tokens // run, run, head_size // pair, pair).permute(
                0, 2, 1, 3
            )
            if torch.equal(packed.reshape(-1), origin):
                return KeyPacking(run, pair)
    if not torch.equal(origin.sort().values, numbers):
        raise Unsupported(f"vLLM packs keys for {isa} in a way that can't be read back")
    return KeyPacking(0, 0, origin.argsort())


def unpacked_keys(
    pages: torch.Tensor, blocks: torch.Tensor, packing: KeyPacking, stored: torch.dtype
) -> torch.Tensor:
    """In token order, float32 [blocks, tokens, heads, head_size].

    pages: of a layer on a CPU, [number of blocks, heads, tokens, 2 * head_size].
    stored: `stored_dtype`.
    """
    num_blocks, heads, tokens, width = pages.shape
    count, head_size = len(blocks), width // 2
    packed = pages.view(num_blocks, heads, 2, tokens * head_size)[:, :, 0].index_select(0, blocks)
    packed = packed.view(stored).float()
    if packing.order is not None:
        keys = (
            packed.index_select(2, packing.order)
            .view(count, heads, tokens, head_size)
            .transpose(1, 2)
        )
    else:
        run, pair = packing.run, packing.pair
        keys = packed.view(count, heads, tokens // run, head_size // pair, run, pair).permute(
            0, 2, 4, 1, 3, 5
        )
    return keys.reshape(count, tokens, heads, head_size).contiguous()


# ------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class KeyFormat:
    """scale: what the stored values must be multiplied by; vLLM may change it with the weights."""

    packing: KeyPacking
    stored: torch.dtype
    scale: Callable[[], float] = lambda: 1.0


class KeyPages:
    """Reads the pages of a layer.

    pages: [blocks, KV heads, tokens, 2 * channels]: per head keys, then values.
    page_bytes: of all heads.
    """

    def __init__(self, pages: torch.Tensor, form: KeyFormat) -> None:
        self._pages = pages
        self._form = form
        packing = form.packing
        self._kind = _KINDS.get(form.stored)
        self._address = 0
        self._bytes: U8 = np.empty((0, 0, 0), np.uint8)
        self._is_plain = _is_plain(packing, self._kind, pages.shape[2])
        self._numbers = (pages.shape[2], packing.run, packing.pair, self._kind or 0)
        self._nothing = np.empty(0, np.float32)
        self.page_bytes = pages[0].numel() * pages.element_size()

    def __repr__(self) -> str:
        return f"KeyPages({list(self._pages.shape)}, {self._form})"

    @property
    def tensor(self) -> torch.Tensor:
        return self._pages

    def over(self, pages: torch.Tensor) -> "KeyPages":
        """A reader of other pages of the same layer, such as copies."""
        return KeyPages(pages, self._form)

    def keys_of(self, blocks: I32) -> F32:
        """float32 [n, tokens, KV heads, channels]."""
        form = self._form
        found = unpacked_keys(self._pages, torch.from_numpy(blocks), form.packing, form.stored)
        scale = form.scale()
        keys: F32 = (found if scale == 1.0 else found * scale).numpy()
        return keys

    def log_mass(self, query_QD: F32, blocks: I32, num_tokens: int, scale: float) -> F32:
        """logsumexp of q · k * scale over the tokens, float32 [query heads]; -inf without tokens.

        num_tokens: from the first token of the first block on.
        """
        if not num_tokens or not self._is_plain:
            keys = self.keys_of(blocks)
            return exact_log_mass(query_QD, keys.reshape(-1, *keys.shape[2:])[:num_tokens], scale)
        # As uint32 a negative number is large: one comparison checks both bounds.
        if blocks.view(np.uint32).max() >= len(self._pages):
            raise IndexError(f"blocks {blocks.tolist()} of a layer that has {len(self._pages)}")
        out = np.empty(len(query_QD), np.float32)
        query = query_QD * np.float32(scale * self._form.scale() * _LOG2_E)
        native.require("hotkv_sparse.all_kernels").page_log_mass(
            self._view(), blocks, num_tokens, *self._numbers, query, out
        )
        return out

    def always(
        self, query_QD: F32, blocks: I32, num_tokens: int, scale: float, sink_logits: F32 | None
    ) -> Always:
        """The mass of the tokens that every step attends to, for `hotkv_sparse.decode.decode`.

        num_tokens: from the first token of the first block on.
        sink_logits: float32 [query heads].
        """
        log_mass = sink_logits
        if log_mass is None:
            if len(self._nothing) != len(query_QD):
                self._nothing = np.full(len(query_QD), -np.inf, np.float32)
            log_mass = self._nothing
        if num_tokens and self._is_plain:
            numbers = (num_tokens, *self._numbers)
            return Always(log_mass, self._view(), blocks, numbers, self._form.scale())
        return Always.known(
            np.logaddexp(self.log_mass(query_QD, blocks, num_tokens, scale), log_mass)
        )

    def _view(self) -> U8:
        """uint8 [blocks, KV heads, bytes]; a new view if the tensor's memory has moved."""
        if self._address != self._pages.data_ptr():
            self._address = self._pages.data_ptr()
            self._bytes = (
                self._pages.detach().view(*self._pages.shape[:2], -1).view(torch.uint8).numpy()
            )
        return self._bytes


def _is_plain(packing: KeyPacking, kind: int | None, block_tokens: int) -> bool:
    """The compiled kernel `page_log_mass` can read such pages: sixteen consecutive tokens must be
    contiguous, per channel or pair of channels.

    kind: of `_KINDS`; None for another dtype.
    """
    pairs = (1, 2) if kind in (_KINDS[torch.bfloat16], _KINDS[torch.float16]) else (1,)
    return (
        kind is not None
        and packing.order is None
        and packing.pair in pairs
        and not (packing.run | block_tokens) % _LANES
    )
