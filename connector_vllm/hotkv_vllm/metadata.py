"""What the connector's two sides send each other through vLLM, once per step.

Scheduler to worker: `HotKVMetadata`. Worker to scheduler: `HotKVWorkerMetadata`, aggregated over ranks, and once at the start
`HotKVHandshake`. Plain values, small, picklable: hashes and ids, never KV bytes.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hotkv.keys import KeySpace, Representation
from hotkv.retention import NO_RETENTION, Retention
from hotkv_client.fence import FencePlace
from hotkv_client.types import BlockRun, LoadRun
from hotkv_vllm.sparse.reporter import HotSets, SparseReport
from hotkv_vllm.sparse.rows import SparseRows


@dataclass(slots=True)
class LoadJob:
    """Blocks of one request to load under a read lease, and the representations that come along."""

    request_id: str
    transfer_id: str
    lease_id: str
    runs: tuple[LoadRun, ...]
    timeout_s: float
    representations: tuple[LoadRun, ...] = ()


@dataclass(slots=True)
class StoreJob:
    """Blocks that are complete at the end of the step. All ranks store their shard under the same lease.

    `representations`: which of these blocks, or of others that are stored already, want theirs stored. `fence_index`: the word in which the
    scheduler revokes it; 0 where only workers do.
    """

    store_id: int
    lease_id: str
    runs: tuple[BlockRun, ...]
    retention: Retention = NO_RETENTION
    representations: tuple[BlockRun, ...] = ()
    fence_index: int = 0


@dataclass(slots=True)
class HotKVMetadata(KVConnectorMetadata):
    """One step's work for a worker.

    flush_stores: stores that must have ended before this step's first write. cancel_loads, abandoned_loads: request ids whose load
    is to be cancelled, or was never begun and is to be reported as failed. sparse_rows: None without sparse decode; allocated_blocks:
    blocks that somebody is about to fill. remembered: hot sets that requests start from; hot_sets_of: ended requests whose own are wanted.
    """

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    flush_stores: tuple[int, ...] = ()
    cancel_loads: tuple[str, ...] = ()
    abandoned_loads: tuple[str, ...] = ()
    sparse_rows: SparseRows | None = None
    allocated_blocks: tuple[int, ...] = ()
    remembered: HotSets = field(default_factory=dict)
    hot_sets_of: tuple[str, ...] = ()


@dataclass(slots=True)
class StoreReport:
    """How one store ended: `BlockResult` bytes of its blocks, per rank (empty where a rank's transfer failed as a whole)."""

    results: list[bytes]


@dataclass(slots=True)
class HotKVWorkerMetadata(KVConnectorWorkerMetadata):
    """What ended since the last step. `counters` are summed over ranks. `sparse`: None for nothing to report."""

    stores: dict[int, StoreReport] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    sparse: SparseReport | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "HotKVWorkerMetadata":
        """Joins what two ranks report."""
        if not isinstance(other, HotKVWorkerMetadata):
            return self
        stores = {store_id: StoreReport(list(report.results)) for store_id, report in self.stores.items()}
        for store_id, report in other.stores.items():
            stores.setdefault(store_id, StoreReport([])).results.extend(report.results)
        counters = dict(self.counters)
        for name, value in other.counters.items():
            counters[name] = counters.get(name, 0) + value
        reports = [one.sparse for one in (self, other) if one.sparse is not None]
        sparse = reports[0].join(reports[1]) if len(reports) == 2 else next(iter(reports), None)
        return HotKVWorkerMetadata(stores, counters, sparse)

    def is_empty(self) -> bool:
        return not self.stores and not self.counters and self.sparse is None


@dataclass(slots=True)
class HotKVHandshake(KVConnectorHandshakeMetadata):
    """What a rank found out when it registered its memory: the key space, or why it runs without the cache.

    `representations`: those that it stores and loads with blocks. `sparse_layers`: (layer, vLLM's group) of its sparse layers. `fence`: the
    page in which the scheduler revokes its stores; None where it need not.
    """

    key_space: KeySpace | None
    why_off: str = ""
    representations: tuple[Representation, ...] = ()
    sparse_layers: tuple[tuple[int, int], ...] = ()
    fence: FencePlace | None = None
