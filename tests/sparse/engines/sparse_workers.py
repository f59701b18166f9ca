"""`SparseWorker` step by step, without an engine."""

from dataclasses import replace

import numpy as np
import torch

from hotkv_sparse import SparseConfig
from hotkv_sparse.vllm.cpu.batch import Batch, Rewrite
from hotkv_sparse.vllm.cpu.worker import SparseWorker
from hotkv_sparse.vllm.scheduler.rows import SparseRows
from tests.sparse.engines.sparse_parts import BLOCK, QUERIES, Cache

CONFIG = SparseConfig(sparse_topk=640, min_context_tokens=256, max_correction_blocks=2)
BLOCKS = 40


class Engine:
    """Layers 2 and 7. A context is all blocks, in its own order.

    sink_logits: float32 [query heads].
    """

    def __init__(
        self,
        config: SparseConfig = CONFIG,
        sink_logits: np.ndarray | None = None,
    ) -> None:
        caches = [Cache(BLOCKS, 64, torch.bfloat16, seed) for seed in range(2)]
        self.layers = [
            replace(cache.layer(sink_logits=sink_logits), name=f"layer{n}", index=n)
            for cache, n in zip(caches, (2, 7), strict=True)
        ]
        self.worker = SparseWorker(config, self.layers)
        self.random = np.random.default_rng(0)
        self.context_tokens = BLOCKS * BLOCK - 20

    def table(self, request_id: str) -> list[int]:
        return np.random.default_rng(ord(request_id)).permutation(BLOCKS).tolist()

    def batch(self, request_ids: str) -> Batch:
        rows = len(request_ids)
        tables = np.array([self.table(request_id) for request_id in request_ids], np.int32).reshape(
            rows, BLOCKS
        )
        lengths = np.full(rows, self.context_tokens, np.int32)
        return Batch(
            np.arange(rows + 1, dtype=np.int32), lengths, tables, np.full(rows, -1, np.int64)
        )

    def step(
        self,
        request_ids: str,
        ended: tuple[str, ...] = (),
        break_layer: int = -1,
        queries: np.ndarray | None = None,
    ) -> list[Rewrite | None]:
        """Rewritten block tables, by layer.

        request_ids: a letter each.
        break_layer: its queries raise; -1: none.
        queries: None: random.
        """
        last = (self.context_tokens - 1) // BLOCK
        self.worker.begin_step(
            SparseRows(tuple(self.table(r)[last] for r in request_ids), tuple(request_ids), ended)
        )
        batch, found = self.batch(request_ids), []
        for place, layer in enumerate(self.layers):
            drawn = (
                self.random.standard_normal((len(request_ids), QUERIES, 64)).astype(np.float32) * 2
                if queries is None
                else queries
            )

            def query_of(token: int, place: int = place, drawn: np.ndarray = drawn) -> np.ndarray:
                if place == break_layer:
                    raise RuntimeError("injected")
                return drawn[token]

            try:
                rewrite = self.worker.attend(layer, batch, lambda: batch, query_of)
                found.append(
                    None
                    if rewrite is None
                    else Rewrite(rewrite.tables.copy(), rewrite.seq_lens.copy())
                )
            except RuntimeError:
                self.worker.fault(layer.name)
                found.append(None)
        return found
