"""`SparseScheduler`s without an engine."""

from types import SimpleNamespace
from typing import Any

from hotkv_sparse.vllm.scheduler.companion import SparseScheduler


def companion(edge: Any, pool: Any = None, residents: Any = None, sequences: Any = None) -> Any:
    """pool: a double of `DevicePool`; None without residency."""
    one = SparseScheduler.__new__(SparseScheduler)
    one.edge, one.pool, one.frees_blocks = edge, pool, pool is not None
    if pool is None:
        one.pool = SimpleNamespace(holds_whole=lambda _: True)  # type: ignore[assignment]
    one.residents, one.sequences = residents, sequences
    one.rows = SimpleNamespace(arrived=lambda _: None, ended=lambda _: None)  # type: ignore[assignment]
    return one
