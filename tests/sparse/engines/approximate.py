"""The harness with sparse decode: rows that are sparse, or read inexact KV, write values off by
`INEXACT`."""

from typing import Any

import numpy as np

from hotkv_sparse import SparseConfig
from hotkv_sparse.vllm.worker import companion as rank_side
from hotkv_vllm.compat import Unsupported
from tests.vllm.harness import Engine, _layer
from tests.vllm.other_connectors import ours

SPARSE = {
    "sparse": {
        "scorer": "rot2u",
        "sparse_topk": 0.7,
        "sink_tokens": 1,
        "recent_tokens": 1,
        "min_context_tokens": 97,
    }
}
INEXACT = 0x2A5A


def without_layers(monkeypatch: Any) -> None:
    """Workers report a sparse layer that the model lacks, so that the scheduler counts rows as
    sparse."""
    cannot_install(monkeypatch)
    monkeypatch.setattr(rank_side.SparseRank, "note", ((0, -1),))


def cannot_install(monkeypatch: Any) -> None:
    """Workers find no sparse layers, and contexts may be shorter than a selection needs."""

    monkeypatch.setattr(SparseConfig, "check", lambda *_: None)

    def install(*_: Any) -> Any:
        raise Unsupported("the harness has no layers that could decode sparsely")

    monkeypatch.setattr(rank_side, "install", install)


class Approximate(Engine):
    sparse_rows: frozenset[str] = frozenset()
    num_sparse_rows = 0

    @property
    def tints(self) -> tuple[int, ...]:
        return 0, INEXACT

    def _forward(self, scheduled: Any) -> dict[str, list[int]]:
        step = ours(scheduled.kv_connector_metadata).companion
        self.sparse_rows = frozenset(step.rows.request_ids if step is not None else ())
        self.num_sparse_rows += len(self.sparse_rows)
        return super()._forward(scheduled)

    def _write(self, name: str, computed: int, count: int) -> None:
        flip = INEXACT if name in self.sparse_rows or self._reads_inexact(name, computed) else 0
        for group_id, group in enumerate(self.kv_config.kv_cache_groups):
            blocks, offsets, values = self._places(name, group_id, computed, computed + count)
            count = len(values)
            for layer in group.layer_names:
                self._write_layer(layer, blocks[:count], offsets[:count], values ^ flip)

    def _reads_inexact(self, name: str, computed: int) -> bool:
        found = False
        for group_id, group in enumerate(self.kv_config.kv_cache_groups):
            window = getattr(group.kv_cache_spec, "sliding_window", None)
            first = max(0, computed - (window - 1)) if window else 0
            blocks, offsets, values = self._places(name, group_id, first, computed)
            kept = blocks != 0
            for layer in group.layer_names:
                cells = self._cells(layer)[blocks[kept], :, offsets[kept], :]
                rows = cells ^ (values[kept] ^ _layer(layer) ^ self.salt)[:, None, None]
                assert np.isin(rows, (0, INEXACT)).all(), f"{name}: neither exact nor our own"
                found |= bool(rows.any())
        return found

    def _check(self, name: str, computed: int) -> None:
        """`_write` checks what a row reads."""
