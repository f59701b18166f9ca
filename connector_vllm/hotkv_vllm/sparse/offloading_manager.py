"""The scheduler's side of sparse offloading (vLLM RFC #37263): blocks of host memory by hash.

Always true: a pinned host block is not given out again; a block is ready only when its copy in host
memory is complete.

Shapes: Q query heads, D channels, C blocks of the context.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv.errors import HotKVError, Reason
from hotkv_sparse import SparseConfig, prepare, score, span
from hotkv_sparse.selector import select_layer
from hotkv_vllm.sparse.pool import BlockReprManager

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
NO_BLOCKS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Pinned blocks of host memory, int32."""

    blocks: I32


class SparseOffloadingManager:
    """Host blocks by hash. The representations are those that `representations` has, by host block.
    One thread."""

    def __init__(
        self,
        config: SparseConfig,
        num_blocks: int,
        block_tokens: int,
        representations: BlockReprManager,
    ) -> None:
        self._config = config
        self._block_tokens = block_tokens
        self._reprs = representations
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._is_ready = np.zeros(num_blocks, np.bool_)
        self._pins = np.zeros(num_blocks, np.int32)
        self._free = list(range(num_blocks - 1, -1, -1))

    def __repr__(self) -> str:
        return (
            f"SparseOffloadingManager(ready {int(self._is_ready.sum())}, free "
            f"{len(self._free)}, pinned {int((self._pins > 0).sum())})"
        )

    def lookup_with_sparse(
        self, block_hashes: Sequence[bytes], query: F32, layer_idx: int
    ) -> tuple[I32, F32]:
        """(selected_blocks, scores) of the longest prefix that is ready, for a query float32 [Q,
        D].

        `selected_blocks` int32 are host blocks in the context's order, `scores` float32 their share
        of the attention mass, inf where a block is kept whatever its score. The mass of those is
        estimated, too: no keys are at hand here.
        """
        rows = self._ready_prefix(block_hashes)
        context_tokens = len(rows) * self._block_tokens
        if not len(rows):
            return NO_BLOCKS, np.empty(0, np.float32)
        always = rows[span(self._config, context_tokens, self._block_tokens).always]
        sources = self._reprs.sources(layer_idx)
        name, source = next(iter(sources.items()))
        kept = score(prepare(name, query, source.mu), source.pool, always)
        log_mass = (
            np.logaddexp.reduce(kept, axis=1) if len(always) else np.full(len(query), -np.inf)
        )
        selection = select_layer(
            self._config,
            layer_idx,
            query,
            sources,
            rows,
            log_mass.astype(np.float32),
            context_tokens,
            self._block_tokens,
        )
        return rows[selection.blocks], selection.weights

    def _ready_prefix(self, block_hashes: Sequence[bytes]) -> I32:
        rows = []
        for block_hash in block_hashes:
            block = self._block_of.get(block_hash)
            if block is None or not self._is_ready[block]:
                break
            rows.append(block)
        return np.array(rows, np.int32)

    def prepare_sparse_load(self, selected_blocks: I32) -> LoadSpec:
        """Pins the blocks until `complete_load`; INVALID_FIELD if one isn't ready."""
        if not self._is_ready[selected_blocks].all():
            raise HotKVError(
                Reason.INVALID_FIELD,
                "selected_blocks include some that are not ready; pass those of lookup_with_sparse",
            )
        np.add.at(self._pins, selected_blocks, 1)
        return LoadSpec(selected_blocks)

    def complete_load(self, selected_blocks: I32) -> None:
        """Unpins blocks that were loaded or will not be."""
        if not (self._pins[selected_blocks] > 0).all():
            raise HotKVError(
                Reason.INVALID_FIELD,
                (
                    "selected_blocks include some that are not pinned; call complete_load once for "
                    "each load"
                ),
            )
        np.subtract.at(self._pins, selected_blocks, 1)

    def prepare_store(self, block_hashes: Sequence[bytes]) -> I32:
        """Host blocks int32 for new blocks, which are not ready before `complete_store`; OVERLOADED
        if there are too few."""
        fresh = [block_hash for block_hash in block_hashes if block_hash not in self._block_of]
        if len(fresh) > len(self._free):
            raise HotKVError(
                Reason.OVERLOADED,
                (
                    f"{len(fresh)} new blocks, {len(self._free)} free in host memory; give it more "
                    "blocks"
                ),
            )
        for block_hash in fresh:
            block = self._free.pop()
            self._block_of[block_hash], self._hash_of[block] = block, block_hash
        return np.array([self._block_of[block_hash] for block_hash in block_hashes], np.int32)

    def complete_store(self, new_blocks: I32, success: bool = True) -> None:
        """Host memory holds `new_blocks`, or, without success, they are free again."""
        for block in new_blocks.tolist():
            if block not in self._hash_of:
                raise HotKVError(
                    Reason.INVALID_FIELD,
                    f"block {block} was not reserved; pass blocks of prepare_store",
                )
        if success:
            self._is_ready[new_blocks] = True
            return
        for block in new_blocks[~self._is_ready[new_blocks]].tolist():
            del self._block_of[self._hash_of.pop(block)]
            self._free.append(block)
