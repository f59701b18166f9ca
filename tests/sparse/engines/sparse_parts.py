"""KV pages filled by vLLM's own kernel."""

import numpy as np
import torch

from hotkv_sparse.vllm.cpu.batch import SparseLayer
from hotkv_sparse.vllm.cpu.key_pages import KeyPages
from hotkv_sparse.vllm.cpu.pool import LayerShape
from hotkv_vllm.worker.layout import key_packing, unpacked_keys

BLOCK, HEADS, GROUP = 32, 2, 3
QUERIES = HEADS * GROUP


class Cache:
    def __init__(self, num_blocks: int, head_size: int, dtype: torch.dtype, seed: int = 0) -> None:
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        generator = torch.Generator().manual_seed(seed)
        shape = (num_blocks * BLOCK, HEADS, head_size)
        self.keys, self.values = (
            torch.randn(shape, generator=generator).to(dtype) for _ in range(2)
        )
        self.isa = _get_attn_isa(dtype, BLOCK, head_size)
        self.pages = torch.zeros((num_blocks, HEADS, BLOCK, 2 * head_size), dtype=dtype)
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
        )
        self.packing = key_packing(BLOCK, head_size, dtype, self.isa)

    def keys_of(self, blocks: np.ndarray) -> np.ndarray:
        return unpacked_keys(self.pages, torch.from_numpy(blocks), self.packing).numpy()

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
            KeyPages(self.pages, self.packing),
            sink_logits,
        )
