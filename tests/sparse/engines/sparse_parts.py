"""KV pages filled by vLLM's own kernel."""

import numpy as np
import torch

from hotkv_sparse.vllm.attention_layers import stored_dtype
from hotkv_sparse.vllm.cpu.batch import SparseLayer
from hotkv_sparse.vllm.cpu.key_pages import KeyFormat, KeyPages, key_packing
from hotkv_sparse.vllm.cpu.pool import LayerShape

BLOCK, HEADS, GROUP = 32, 2, 3
QUERIES = HEADS * GROUP


KEY_SCALE, VALUE_SCALE = 0.5, 0.25
"""Of a cache in fp8."""


def _truncated(values: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """As vLLM's kernel, which rounds towards zero. A smaller code has a smaller size."""
    nearest = values.to(stored)
    is_above = nearest.float().abs() > values.abs()
    return (nearest.view(torch.uint8) - is_above.to(torch.uint8)).view(stored).float()


class Cache:
    """keys, values: as the cache has them after rounding, times their scales."""

    def __init__(
        self,
        num_blocks: int,
        head_size: int,
        dtype: torch.dtype,
        seed: int = 0,
        cache_dtype: str = "auto",
    ) -> None:
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        generator = torch.Generator().manual_seed(seed)
        shape = (num_blocks * BLOCK, HEADS, head_size)
        self.keys, self.values = (
            torch.randn(shape, generator=generator).to(dtype) for _ in range(2)
        )
        self.cache_dtype, stored = cache_dtype, stored_dtype(dtype, cache_dtype)
        is_8bit = stored.itemsize == 1
        self.key_scale, self.value_scale = (KEY_SCALE, VALUE_SCALE) if is_8bit else (1.0, 1.0)
        self.isa = _get_attn_isa(dtype, BLOCK, head_size, cache_dtype)
        page_dtype = torch.uint8 if is_8bit else dtype
        self.pages = torch.zeros((num_blocks, HEADS, BLOCK, 2 * head_size), dtype=page_dtype)
        key_pages, value_pages = self.pages.view(num_blocks, HEADS, 2 * BLOCK, head_size).chunk(
            2, dim=2
        )
        ops.cpu_attn_reshape_and_cache(
            self.keys,
            self.values,
            key_pages,
            value_pages,
            torch.arange(num_blocks * BLOCK),
            self.isa,
            k_scale=self.key_scale,
            v_scale=self.value_scale,
            kv_cache_dtype=cache_dtype,
        )
        if is_8bit:
            self.keys = _truncated(self.keys.float() / self.key_scale, stored) * self.key_scale
            self.values = (
                _truncated(self.values.float() / self.value_scale, stored) * self.value_scale
            )
        packing = key_packing(BLOCK, head_size, dtype, self.isa, cache_dtype)
        self.form = KeyFormat(packing, stored, lambda: self.key_scale)

    def keys_of(self, blocks: np.ndarray) -> np.ndarray:
        return KeyPages(self.pages, self.form).keys_of(blocks)

    def layer(
        self, formats: tuple[str, ...] = ("rot2u",), sink_logits: np.ndarray | None = None
    ) -> SparseLayer:
        num_blocks, heads, block_tokens, width = self.pages.shape
        shape = LayerShape(num_blocks, block_tokens, heads, width // 2, formats)
        return SparseLayer(
            "layer",
            5,
            0,
            shape,
            (width // 2) ** -0.5,
            KeyPages(self.pages, self.form),
            sink_logits,
        )
