"""Reads keys, or the attention mass of tokens, from a layer's pages as vLLM's CPU kernels arrange
them. Never calls these kernels or writes pages. A block id outside the layer raises IndexError.

Shapes: B blocks, T tokens of a block, H KV heads, Q query heads, D channels, n blocks to read.
"""

import numpy as np
import numpy.typing as npt
import torch

from hotkv_proto import native
from hotkv_sparse.decode import Always
from hotkv_sparse.selection import exact_log_mass
from hotkv_vllm.worker.layout import KeyPacking, unpacked_keys

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
_LOG2_E = np.float32(1.4426950408889634)
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_LANES = 16


class KeyPages:
    """Reads the pages of a layer.

    pages: [blocks, KV heads, tokens, 2 * channels]: per head keys, arranged as `packing` says, then
        values.
    page_bytes: of all heads.
    """

    def __init__(self, pages: torch.Tensor, packing: KeyPacking) -> None:
        self._pages = pages
        self._packing = packing
        self._kind = _KINDS.get(pages.dtype)
        self._address = 0
        self._bytes: U8 = np.empty((0, 0, 0), np.uint8)
        self._is_plain = _is_plain(packing, self._kind, pages.shape[2])
        self._numbers = (pages.shape[2], packing.run, packing.pair, self._kind or 0)
        self._nothing = np.empty(0, np.float32)
        self.page_bytes = pages[0].numel() * pages.element_size()

    def __repr__(self) -> str:
        return f"KeyPages({list(self._pages.shape)}, {self._pages.dtype}, {self._packing})"

    @property
    def tensor(self) -> torch.Tensor:
        return self._pages

    def over(self, pages: torch.Tensor) -> "KeyPages":
        """A reader of other pages of the same layer, such as copies."""
        return KeyPages(pages, self._packing)

    def keys_of(self, blocks: I32) -> F32:
        """float32 [n, tokens, KV heads, channels]."""
        keys: F32 = unpacked_keys(self._pages, torch.from_numpy(blocks), self._packing).numpy()
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
        run, pair, block_tokens = self._packing.run, self._packing.pair, self._pages.shape[2]
        query = query_QD * np.float32(scale * _LOG2_E)
        native.require("hotkv_sparse.all_kernels").page_log_mass(
            self._view(), blocks, num_tokens, block_tokens, run, pair, self._kind, query, out
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
            return Always(log_mass, self._view(), blocks, (num_tokens, *self._numbers))
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
    pairs = (1,) if kind == _KINDS[torch.float32] else (1, 2)
    return (
        kind is not None
        and packing.order is None
        and packing.pair in pairs
        and not (packing.run | block_tokens) % _LANES
    )
