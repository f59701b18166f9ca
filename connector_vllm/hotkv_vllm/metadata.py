"""Messages between the connector's two sides, sent through vLLM once per step.

Scheduler to worker: `HotKVMetadata`. Worker to scheduler: `HotKVWorkerMetadata`, aggregated over
ranks, and once at the start `HotKVHandshake`. vLLM forwards the handshake, or a report carries it
if the scheduler asks for it. All are small picklable values: hashes and ids, never KV bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hotkv_client.fence import FencePlace
from hotkv_client.types import BlockRun, LoadRun
from hotkv_proto.blocks import NO_OPTIONS, StoreOptions
from hotkv_proto.keys import KeySpace, Representation
from hotkv_vllm.identity.adapters import NO_WORK, AdapterReport, AdapterWork
from hotkv_vllm.identity.rekeying import WeightsOrder, WeightsReport
from hotkv_vllm.residency.step import ResidentStep
from hotkv_vllm.sparse.reporter import SparseReport
from hotkv_vllm.sparse.rows import SparseRows


@dataclass(slots=True)
class LoadJob:
    """Blocks of one request to load under a read lease, with their representations.
    `traceparent`: names its span to the server; None for none."""

    request_id: str
    transfer_id: str
    lease_id: str
    runs: tuple[LoadRun, ...]
    timeout_s: float
    representations: tuple[LoadRun, ...] = ()
    traceparent: str | None = None


@dataclass(slots=True)
class StoreJob:
    """Blocks to store that are complete at the end of the step.

    All ranks store their shard under the same lease. `representations`: the blocks, among these or
    stored earlier, whose representations are to be stored. `fence_index`: the word in which the
    scheduler revokes the store; 0 if only workers revoke it. `request_id`: of the resident request
    that it belongs to, which `options` name at the server; empty for others.
    """

    store_id: int
    lease_id: str
    runs: tuple[BlockRun, ...]
    options: StoreOptions = NO_OPTIONS
    representations: tuple[BlockRun, ...] = ()
    fence_index: int = 0
    request_id: str = ""


@dataclass(slots=True)
class HotKVMetadata(KVConnectorMetadata):
    """One step's work for a worker.

    flush_stores: stores that must have ended before this step's first write.
    cancel_loads: request ids whose load is to be cancelled.
    abandoned_loads: request ids whose load was never begun and is to be reported as failed.
    held_loads: transfers whose blocks the scheduler holds back, so their requests need not wait.
    asks_links: each rank reports whether it has a session.
    lost_track: it is not known which blocks this step gives away; workers take back all stores and
        forget all representations.
    sparse_rows: the rows that attend sparsely, all others attend to everything; None without sparse
        decode.
    allocated_blocks: blocks that are about to be filled.
    last_reports_of: ended requests whose last selections the workers report.
    wants_handshake: the scheduler has no handshake yet.
    settles_step, timed_step: numbers to be reported with this step's output; 0 for none.
    adapters: LoRA adapters to name, and ids to release.
    weights: the order about weights that may have changed.
    """

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    flush_stores: tuple[int, ...] = ()
    cancel_loads: tuple[str, ...] = ()
    abandoned_loads: tuple[str, ...] = ()
    held_loads: tuple[str, ...] = ()
    asks_links: bool = False
    lost_track: bool = False
    sparse_rows: SparseRows | None = None
    resident: ResidentStep | None = None
    allocated_blocks: tuple[int, ...] = ()
    last_reports_of: tuple[str, ...] = ()
    wants_handshake: bool = False
    settles_step: int = 0
    timed_step: int = 0
    adapters: AdapterWork = NO_WORK
    weights: WeightsOrder | None = None


@dataclass(slots=True)
class StoreReport:
    """How one store ended: `BlockResult` bytes of its blocks, one entry for each rank, in no order
    that means anything.

    The bytes of a rank are empty if its transfer failed as a whole."""

    results: list[bytes]

    def join(self, other: "StoreReport") -> "StoreReport":
        """Returns the entries of both."""
        return StoreReport(sorted(self.results + other.results))


@dataclass(slots=True)
class HotKVHandshake(KVConnectorHandshakeMetadata):
    """A rank's result of registering its memory: the key space, or why it runs without the cache.

    `representations`: those that the rank stores and loads with blocks. `sparse_layers`: (layer,
    vLLM's group) of its sparse layers. `fence`: the page in which the scheduler revokes the rank's
    stores; None if it need not. `host`: the rank's `hotkv_vllm.identity.ranks.this_host`. `absent`:
    why the rank has no session yet; empty if it has one. `weights_in_doubt`: the rank's weights may
    differ from those that the key space names.
    """

    key_space: KeySpace | None
    why_off: str = ""
    representations: tuple[Representation, ...] = ()
    sparse_layers: tuple[tuple[int, int], ...] = ()
    fence: FencePlace | None = None
    host: str = ""
    rank: int = 0
    absent: str = ""
    weights_in_doubt: bool = False


@dataclass(slots=True)
class HotKVWorkerMetadata(KVConnectorWorkerMetadata):
    """What the workers report with a step: transfers that ended since the last one, and more.

    What is always true: the reports of several ranks join to the same, in whatever order and
    grouping vLLM joins them, and each field keeps the worst that a rank said (`JOINS`).

    `counters`: summed over ranks. `sparse`, `adapters`: None if there is nothing to report.
    `handshakes`: one of each rank, if the scheduler asked for them. `settled_step`, `timed_step`:
    the step's numbers, if it has any. `overdue_loads`: transfers that the server was asked to end
    and has not ended. `settled_loads`: by transfer that is held back, the number of ranks in which
    it can't write any more. `load_seconds`: by request, the longest that the server took for its
    load in any rank; below 0 if its time was up in one. `links`: by rank, why it has no session;
    empty if it has one. `weights`: reports by rank.
    """

    stores: dict[int, StoreReport] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    sparse: SparseReport | None = None
    handshakes: tuple[HotKVHandshake, ...] = ()
    settled_step: int = 0
    timed_step: int = 0
    overdue_loads: tuple[str, ...] = ()
    settled_loads: dict[str, int] = field(default_factory=dict)
    load_seconds: dict[str, float] = field(default_factory=dict)
    links: dict[int, str] = field(default_factory=dict)
    adapters: AdapterReport | None = None
    weights: dict[int, WeightsReport] = field(default_factory=dict)

    def count(self, name: str, value: float) -> None:
        """Adds `value` to a counter of `counter_help.COUNTERS`."""
        self.counters[name] = self.counters.get(name, 0) + value

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "HotKVWorkerMetadata":
        """Returns the reports of two ranks joined; both stay as they are."""
        if not isinstance(other, HotKVWorkerMetadata):
            return self
        return HotKVWorkerMetadata(
            **{
                name: join(getattr(self, name), getattr(other, name))
                for name, join in JOINS.items()
            }
        )

    def is_empty(self) -> bool:
        """Returns True if there is nothing to report."""
        return self == HotKVWorkerMetadata()


Value = TypeVar("Value")
Number = TypeVar("Number", int, float)
Join = Callable[[Any, Any], Any]


def _each(join: Join) -> Join:
    """Joins mappings: what both have by `join`, the rest as it is."""

    def joined(one: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
        shared = {key: join(one[key], other[key]) for key in one.keys() & other.keys()}
        return one | other | shared

    return joined


def _if_any(one: Value | None, other: Value | None) -> Value | None:
    """Joins what ranks may leave out, by its own `join`."""
    if one is None or other is None:
        return other if one is None else one
    joined: Value = one.join(other)  # type: ignore[attr-defined]
    return joined


def _sum(one: Number, other: Number) -> Number:
    return one + other


def _ordered(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """Each name once, in order."""
    return tuple(sorted({*one, *other}))


def _by_rank(
    one: tuple[HotKVHandshake, ...], other: tuple[HotKVHandshake, ...]
) -> tuple[HotKVHandshake, ...]:
    return tuple(sorted(one + other, key=lambda said: (said.rank, repr(said))))


def _slower(one: float, other: float) -> float:
    """The longer of two times of a load. Below 0, as one whose time was up is, if either is."""
    longest = max(abs(one), abs(other))
    return -longest if min(one, other) < 0 else longest


def _worse_answer(one: WeightsReport, other: WeightsReport) -> WeightsReport:
    """Of two reports of one rank: a notice before an answer, other weights before the original, and
    that they were written before that they were not."""
    worse = min(one, other, key=lambda said: (said.question, said.is_original, said.digest))
    return replace(worse, was_written=one.was_written or other.was_written)


JOINS: dict[str, Join] = {
    "stores": _each(StoreReport.join),
    "counters": _each(_sum),
    "sparse": _if_any,
    "handshakes": _by_rank,
    "settled_step": max,
    "timed_step": max,
    "overdue_loads": _ordered,
    "settled_loads": _each(_sum),
    "load_seconds": _each(_slower),
    "links": _each(max),
    "adapters": _if_any,
    "weights": _each(_worse_answer),
}
"""By field of `HotKVWorkerMetadata`: how those of two ranks make one."""
