"""Selects by exact attention in an engine's layer, in place of its sketches: what a perfect scorer
would attend to. Needs vLLM to be loaded before (`bench.sparse.engine`).

Shapes: B blocks, T tokens of a block, H KV heads, G query heads per KV head, D channels.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hotkv_sparse import CandidateSpan, SparseConfig, choose
from hotkv_sparse.selection import Source
from hotkv_sparse.vllm.cpu.batch import SparseLayer
from hotkv_sparse.vllm.cpu.sequence import Attended, LayerDecoder, LayerSequence

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


class ExactDecoder(LayerDecoder):
    """Each step selects the whole budget afresh."""

    def __init__(self, config: SparseConfig, layer: SparseLayer) -> None:
        super().__init__(config, layer)
        self._own = (config, layer)

    def step(
        self,
        own: LayerSequence,
        sources: Mapping[str, Source],
        query_QD: F32,
        rows_C: I32,
        always_blocks: I32,
        always_tokens: int,
        context_tokens: int,
        where: CandidateSpan,
        selected: npt.NDArray[np.bool_],
    ) -> Attended:
        """As `LayerDecoder.step`, without use of `own` and `sources`."""
        config, layer = self._own
        always = layer.pages.log_mass(query_QD, always_blocks, always_tokens, layer.scale)
        scores = log_mass(query_QD, layer.keys_of(rows_C[where.first : where.last]), layer.scale)
        budget = config.budget_blocks(context_tokens, layer.shape.block_tokens)
        selection = choose(scores, always, where, budget)
        selected[selection.blocks] = True
        return Attended(selection.blocks, selection, 0, 0, 0, 0, 0)


def log_mass(query_QD: F32, keys_BTHD: F32, scale: float) -> F32:
    """Log of the sum of exp(q · k * scale) over each block's tokens, float32 [Q, B]."""
    num_blocks, block_tokens, kv_heads, head_size = keys_BTHD.shape
    query_HGD = query_QD.reshape(kv_heads, -1, head_size) * np.float32(scale)
    scores = query_HGD @ keys_BTHD.reshape(-1, kv_heads, head_size).transpose(1, 2, 0)
    scores_QBT = scores.reshape(len(query_QD), num_blocks, block_tokens)
    result: F32 = np.logaddexp.reduce(scores_QBT, axis=2)
    return result


def decoders(config: SparseConfig, layers: list[SparseLayer]) -> dict[int, Any]:
    """For `SparseWorker`, by index of the layer."""
    return {layer.index: ExactDecoder(config, layer) for layer in layers}
