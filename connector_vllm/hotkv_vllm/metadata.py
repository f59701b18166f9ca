"""Messages between the connector's scheduler side and worker sides.

In each step vLLM carries one `HotKVMetadata` from the scheduler to the workers, and one
`HotKVWorkerMetadata` with the reports of all ranks from the workers to the scheduler. At the
start each rank sends a `HotKVHandshake` (whether it can use hotkv, and with which key space).
Normally vLLM forwards the handshakes to the scheduler. If vLLM does not (MultiConnector), the
scheduler side asks for them, and the next report contains them. All messages are small picklable
values: they contain hashes and ids, never KV bytes.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hotkv_client.fence import FencePlace
from hotkv_client.types import BlockRun, LoadRun
from hotkv_proto.blocks import NO_OPTIONS, StoreOptions
from hotkv_proto.keys import KeySpace, Sketch
from hotkv_vllm.identity.adapters import NO_WORK, AdapterReport, AdapterWork
from hotkv_vllm.identity.rekeying import WeightsOrder, WeightsReport
from hotkv_vllm.report_ids import ReportId, SeenReports
from hotkv_vllm.residency.step import ResidentStep
from hotkv_vllm.sparse.reporter import SparseReport
from hotkv_vllm.sparse.rows import SparseRows


@dataclass(slots=True)
class LoadJob:
    """An order to load blocks of a request under a read lease.

    transfer_id: id of the load, the same in all ranks.
    lease_id: the lease that pins the blocks.
    runs: the blocks to load, and the device blocks to load them into; one entry per group.
    timeout_s: the load is cancelled after this time.
    sketches: sketches (compact forms of keys, for sparse attention) to load with the
        blocks.
    traceparent: names the load's trace span to the server; None if the request is not traced.
    """

    request_id: str
    transfer_id: str
    lease_id: str
    runs: tuple[LoadRun, ...]
    timeout_s: float
    sketches: tuple[LoadRun, ...] = ()
    traceparent: str | None = None


@dataclass(slots=True)
class StoreJob:
    """An order to store blocks that are complete at the end of the step. Each rank stores its shard
    (its part) of the blocks, under the same lease.

    lease_id: id of the write lease, which reserves the slots of the blocks. The first rank whose
        store reaches the server acquires the lease; the other ranks join it.
    runs: the blocks to store, as runs (consecutive blocks of a group).
    options: how long the server should retain the blocks, and other options of the store.
    sketches: runs of the sketches (compact forms of keys, for sparse attention) to
        store. Their blocks are in `runs` or were stored earlier.
    fence_index: index of the store's word (flag by which the scheduler revokes the store, on a page
        shared with the ranks); 0 if only workers revoke the store.
    request_id: id of the request to which the store belongs, if the request is resident (its old
        blocks may be only in the server's memory); otherwise empty.
    """

    store_id: int
    lease_id: str
    runs: tuple[BlockRun, ...]
    options: StoreOptions = NO_OPTIONS
    sketches: tuple[BlockRun, ...] = ()
    fence_index: int = 0
    request_id: str = ""


@dataclass(slots=True)
class HotKVMetadata(KVConnectorMetadata):
    """The scheduler's message to the workers for one step.

    loads: loads to begin.
    stores: stores to begin after the step.
    flush_stores: ids of the stores that must have ended, or be revoked, before this step's first
        write.
    cancel_loads: ids of the requests whose load is to be cancelled.
    abandoned_loads: ids of the requests whose load was never begun. The workers report it to vLLM
        as failed.
    held_loads: transfer ids of the hung loads (loads that the server does not end). The scheduler
        holds the blocks of these loads back from vLLM's pool. Workers report these loads to vLLM as
        failed. Each worker also reports which of these loads can't write to its memory any more
        (`StepReport.settled_loads`).
    asks_links: True if each rank must report whether it has a session (connection to the server).
    lost_track: True if it is not known which blocks this step reallocates. Workers then revoke all
        stores and discard all sketches (compact forms of keys).
    sparse_rows: the rows (requests) that attend sparsely; all other rows attend to their whole
        context. None without sparse decode.
    resident: the step's requests and where their blocks are; None without residency (contexts in
        host memory).
    allocated_blocks: ids of the blocks that the step or a load is about to write; empty without
        sparse decode.
    last_reports_of: ids of ended requests. The workers must report the last selections (blocks that
        sparse decode has chosen) of these requests.
    wants_handshake: True while handshakes of ranks are missing. Each rank must then report its
        handshake.
    settles_step: number of this step, which the workers report when the step has ended. By this
        report the scheduler learns whether loads by other connectors failed in the step
        (`OtherLoads`). 0: report no number.
    timed_step: number of this step, which the workers report when the step has ended, so that
        `PrefillSpeed` can measure how long the step took; 0: report no number.
    adapters: the LoRA adapters to identify, and the adapters whose bytes may be released.
    weights: the order to check whether the weights have changed; None without such an order.
    is_quiet: True if the step has nothing for the workers, except that `weights` is repeated. All
        other fields then have their default values.
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
    is_quiet: bool = False


QUIET = HotKVMetadata(is_quiet=True)
"""The message of a quiet step without an order about weights. Never changed."""


STILL_CONNECTING = "not connected yet"
"""A rank reports this text as the reason why it has no session until its first try to connect has
ended."""


@dataclass(slots=True)
class HotKVHandshake(KVConnectorHandshakeMetadata):
    """A rank's message to the scheduler after it has registered its KV memory: the key space (a
    model in a configuration), or why the rank runs without hotkv.

    key_space: the key space on which all ranks have agreed; None if the rank runs without hotkv.
    why_off: why the rank has no key space.
    sketches: kinds of sketch (compact form of keys, for sparse attention) that the
        rank stores and loads with blocks.
    sparse_layers: the rank's layers with sparse attention, as (layer number, number of its vLLM
        group).
    fence: where to find the page, shared with the scheduler, in which it revokes the rank's stores;
        None if only workers revoke stores.
    host: id of the rank's machine (`hotkv_vllm.identity.ranks.this_host`).
    rank: vLLM's number of the rank.
    absent: why the rank has no session (connection to the server) yet; empty if it has a session.
    weights_in_doubt: True if the rank's weights may differ from the weights that
        `KeySpace.weights_identity` identifies.
    is_reading: True while the rank reads the weights' files to identify them; its key space follows
        later.
    """

    key_space: KeySpace | None
    why_off: str = ""
    sketches: tuple[Sketch, ...] = ()
    sparse_layers: tuple[tuple[int, int], ...] = ()
    fence: FencePlace | None = None
    host: str = ""
    rank: int = 0
    absent: str = ""
    weights_in_doubt: bool = False
    is_reading: bool = False


@dataclass(slots=True)
class StepReport:
    """What ranks report to the scheduler about a step: transfers that have ended since their last
    report, and their states. `JOINS` says how each field of several reports is joined.

    stores: by store id and rank, how the store has ended: a byte per block with the server's
        `BlockResult`; empty if the rank's transfer failed as a whole.
    counters: growth of counters, by name.
    sparse: report about sparse decode; None without a report.
    handshakes: by rank, its handshake, if the scheduler asked for it.
    settled_step, timed_step: the numbers `settles_step` and `timed_step` of the step's
        `HotKVMetadata`; 0 without a number.
    overdue_loads: transfer ids of the loads that were cancelled and that the server has not ended
        in time.
    settled_loads: by transfer id of a load in `HotKVMetadata.held_loads`, the ranks to whose memory
        the load can't write any more.
    load_seconds: by request id, the time that the server took for the request's load in the slowest
        rank. Negative if the load reached its time limit in any rank.
    links: by rank, why the rank has no session; empty if it has one.
    adapters: report about LoRA adapters; None without a report.
    weights: reports about weights, by rank.
    """

    stores: dict[int, dict[int, bytes]] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    sparse: SparseReport | None = None
    handshakes: dict[int, HotKVHandshake] = field(default_factory=dict)
    settled_step: int = 0
    timed_step: int = 0
    overdue_loads: tuple[str, ...] = ()
    settled_loads: dict[str, frozenset[int]] = field(default_factory=dict)
    load_seconds: dict[str, float] = field(default_factory=dict)
    links: dict[int, str] = field(default_factory=dict)
    adapters: AdapterReport | None = None
    weights: dict[int, WeightsReport] = field(default_factory=dict)

    def count(self, name: str, value: float) -> None:
        """Adds `value` to a counter of `counter_help.COUNTERS`."""
        self.counters[name] = self.counters.get(name, 0) + value

    def join(self, other: "StepReport") -> "StepReport":
        """Returns the report that joins this report and another, of another rank or a later one of
        the same rank. Changes neither report."""
        joined = {name: join(getattr(self, name), getattr(other, name)) for name, join in JOINS}
        return StepReport(**joined)

    def is_empty(self) -> bool:
        """Returns True if the report is empty."""
        return self == StepReport()


@dataclass(slots=True)
class HotKVWorkerMetadata(KVConnectorWorkerMetadata):
    """The workers' message to the scheduler: the reports of ranks, by id. vLLM joins the messages
    of all ranks with `aggregate`, in any order, and possibly several times."""

    reports: dict[ReportId, StepReport] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "HotKVWorkerMetadata":
        """Returns a message with the reports of both messages. Changes neither message."""
        if not isinstance(other, HotKVWorkerMetadata):
            return self
        return HotKVWorkerMetadata(self.reports | other.reports)

    def joined(self, seen: SeenReports) -> StepReport:
        """Returns the join of the reports that were not handled before, and records them as
        handled."""
        return reduce(
            StepReport.join, [self.reports[one] for one in seen.fresh(self.reports)], StepReport()
        )


Value = TypeVar("Value")
Join = Callable[[Any, Any], Any]


def _each(join: Join) -> Join:
    """Returns a function that joins two mappings into one. If a key is in both mappings, its two
    values are joined with `join`; all other entries are copied."""

    def joined(one: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
        shared = {key: join(one[key], other[key]) for key in one.keys() & other.keys()}
        return one | other | shared

    return joined


def _if_any(one: Value | None, other: Value | None) -> Value | None:
    """Joins two values by their method `join`. If one value is None, returns the other value."""
    if one is None or other is None:
        return other if one is None else one
    joined: Value = one.join(other)  # type: ignore[attr-defined]
    return joined


def _slower(one: float, other: float) -> float:
    """Returns the longer of two load times. The result is negative if either time is negative: the
    load reached its time limit in that rank."""
    longest = max(abs(one), abs(other))
    return -longest if min(one, other) < 0 else longest


def _worse_answer(one: WeightsReport, other: WeightsReport) -> WeightsReport:
    """Joins two reports about weights of the same rank, by choosing one of them. Prefers a notice
    that the weights were written to an answer to a check of the weights; then the answer to the
    earlier check; then an answer with changed weights. The result says that weights were written if
    either report says so."""
    worse = min(one, other, key=lambda said: (said.question, said.is_original, said.digest))
    return replace(worse, was_written=one.was_written or other.was_written)


JOINS: tuple[tuple[str, Join], ...] = (
    ("stores", _each(operator.or_)),
    ("counters", _each(operator.add)),
    ("sparse", _if_any),
    ("handshakes", operator.or_),
    ("settled_step", max),
    ("timed_step", max),
    ("overdue_loads", lambda one, other: tuple(sorted({*one, *other}))),
    ("settled_loads", _each(operator.or_)),
    ("load_seconds", _each(_slower)),
    ("links", operator.or_),
    ("adapters", _if_any),
    ("weights", _each(_worse_answer)),
)
"""The fields of `StepReport`, each with the function that joins the values of two reports. The
second report may be a later one of the same rank."""
