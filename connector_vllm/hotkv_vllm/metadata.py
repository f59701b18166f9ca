"""Messages between the connector's two sides. vLLM carries them once per step.

Scheduler to worker: `HotKVMetadata`. Worker to scheduler: `HotKVWorkerMetadata`, joined over all
ranks, and once at the start `HotKVHandshake`. vLLM forwards the handshake; if it does not, the
scheduler asks for it and a report carries it. All are small picklable values: hashes and ids, never
KV bytes.
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
    """Blocks of a request to load under a read lease.

    representations: representations (compact forms of keys, for sparse attention) to load with the
        blocks, as runs (blocks of a group).
    traceparent: names the load's trace span to the server; None if the request is not traced.
    """

    request_id: str
    transfer_id: str
    lease_id: str
    runs: tuple[LoadRun, ...]
    timeout_s: float
    representations: tuple[LoadRun, ...] = ()
    traceparent: str | None = None


@dataclass(slots=True)
class StoreJob:
    """Blocks to store that are complete at the end of the step. All ranks store their shard under
    the same lease.

    representations: blocks whose representations (compact forms of keys, for sparse attention) are
        to be stored. These blocks are among `runs` or were stored earlier.
    fence_index: the word of the fence (shared page) by which the scheduler revokes the store; 0 if
        only workers revoke it.
    request_id: the resident request to which the store belongs, or empty. `options` name it to the
        server.
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
    held_loads: transfers whose blocks the scheduler holds back from vLLM's pool, so their requests
        need not wait.
    asks_links: True if each rank must report whether it has a session.
    lost_track: True if it is not known which blocks this step reallocates. Workers then revoke all
        stores and forget all representations (compact forms of keys).
    sparse_rows: the rows (requests) that attend sparsely; all other rows attend to their whole
        context. None without sparse decode.
    resident: the step's requests and where their blocks are; None unless contexts can live in host
        memory.
    allocated_blocks: blocks that are about to be filled.
    last_reports_of: ended requests for which the workers report the last selections (blocks
        attended to).
    wants_handshake: True while the scheduler has no handshake.
    settles_step, timed_step: numbers to report with this step's output; 0: report no number.
    adapters: LoRA adapters to identify, and ids to release.
    weights: the order to check weights that may have changed.
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
    """The end of a store: the `BlockResult` bytes of its blocks, one entry per rank, in arbitrary
    order. The entry of a rank is empty if its transfer failed as a whole."""

    results: list[bytes]

    def join(self, other: "StoreReport") -> "StoreReport":
        """Returns the report with the entries of both reports."""
        return StoreReport(sorted(self.results + other.results))


STILL_CONNECTING = "not connected yet"
"""The reason that a rank reports for having no session, until its first try to connect has
ended."""


@dataclass(slots=True)
class HotKVHandshake(KVConnectorHandshakeMetadata):
    """A rank's findings when it registered its memory: the key space, or why it runs without the
    cache.

    why_off: why the rank has no key space.
    representations: kinds of representation (compact form of keys, for sparse attention) that the
        rank stores and loads with blocks.
    sparse_layers: (layer, vLLM's group) of the rank's sparse layers.
    fence: the shared page by which the scheduler revokes the rank's stores; None if only workers
        revoke stores.
    host: id of the rank's machine (`hotkv_vllm.identity.ranks.this_host`).
    absent: why the rank has no session yet; empty if it has a session.
    weights_in_doubt: True if the rank's weights may differ from the weights that the key space
        names.
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
    """The workers' report about a step: transfers that ended since the last step, and more.

    Always true: the reports of several ranks give the same result in whatever order and grouping
    vLLM joins them. For most fields the worst report of any rank counts (`JOINS`).

    stores: ended stores, by id.
    counters: summed over ranks.
    sparse, adapters: None without a report.
    handshakes: one per rank, if the scheduler asked for them.
    settled_step, timed_step: the step's numbers; 0 without a number.
    overdue_loads: transfers that the server was asked to end, and that have not ended.
    settled_loads: by held transfer, the number of ranks in which the server can't write any more.
    load_seconds: by request, the longest time that the server took for its load in any rank. Below
        0 if a rank's time limit was reached.
    links: by rank, why the rank has no session; empty if the rank has a session.
    weights: reports by rank.
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
        """Returns the joined report of two ranks. Changes neither report."""
        if not isinstance(other, HotKVWorkerMetadata):
            return self
        return HotKVWorkerMetadata(
            **{
                name: join(getattr(self, name), getattr(other, name))
                for name, join in JOINS.items()
            }
        )

    def is_empty(self) -> bool:
        """Returns True if the report is empty."""
        return self == HotKVWorkerMetadata()


Value = TypeVar("Value")
Number = TypeVar("Number", int, float)
Join = Callable[[Any, Any], Any]


def _each(join: Join) -> Join:
    """Returns a function that joins two mappings: `join` joins the values of keys that both
    mappings have; the other values are copied."""

    def joined(one: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
        shared = {key: join(one[key], other[key]) for key in one.keys() & other.keys()}
        return one | other | shared

    return joined


def _if_any(one: Value | None, other: Value | None) -> Value | None:
    """Joins values that may be None, by the value's own `join`."""
    if one is None or other is None:
        return other if one is None else one
    joined: Value = one.join(other)  # type: ignore[attr-defined]
    return joined


def _sum(one: Number, other: Number) -> Number:
    return one + other


def _ordered(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of both, sorted and without duplicates."""
    return tuple(sorted({*one, *other}))


def _by_rank(
    one: tuple[HotKVHandshake, ...], other: tuple[HotKVHandshake, ...]
) -> tuple[HotKVHandshake, ...]:
    return tuple(sorted(one + other, key=lambda said: (said.rank, repr(said))))


def _slower(one: float, other: float) -> float:
    """Returns the longer of two load times. The result is negative if either is, which marks a load
    whose time limit was reached."""
    longest = max(abs(one), abs(other))
    return -longest if min(one, other) < 0 else longest


def _worse_answer(one: WeightsReport, other: WeightsReport) -> WeightsReport:
    """Joins two reports of the same rank. For each field the worse value counts: a notice before an
    answer, changed weights before original weights, written before not written."""
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
"""How the values of two ranks are joined, by field of `HotKVWorkerMetadata`."""
