"""What contexts in host memory add to a prefill, a chunk at a time: each layer puts the context
before the chunk together out of the arena, and builds the chunk's representations."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.gpu.context import BLOCK_TOKENS, Context, page_bytes_of
from bench.gpu.model import DummyModel
from bench.gpu.resident_model import HostPages, Some
from bench.report import median
from hotkv_sparse.config import SparseConfig
from hotkv_sparse.cuda.index import upload

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Seconds of a whole prompt in all layers: a dense prefill, and what residency adds."""

    dense_s: float
    added_s: float

    @property
    def overhead(self) -> float:
        return self.added_s / self.dense_s


class Prefill:
    """Times chunks behind nothing, half and all of the context. A chunk's time grows with what is
    before it, so a prompt's is the mean of those, by Simpson's rule, for each chunk and layer."""

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
        """Waits for the device."""
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
        """Representations of a chunk, from keys on the device."""
        self._context.layers[0].build(self._pages, self._rows, self._chunk // BLOCK_TOKENS)

    def _check(self) -> None:
        staged = self._kernels.device.read(self._target)[self._context.num_here :]
        expected = self._host.pages[self._context.num_here : self._context.freed]
        if not np.array_equal(staged, expected):
            raise ValueError("the staging area has not the arena's bytes")
