"""Messages between the scheduler side and the worker sides: small picklable values, never KV bytes.

In each step vLLM carries one `HotKVMetadata` to the workers and one `HotKVWorkerMetadata` with
all ranks' reports back. At the start each rank sends a `HotKVHandshake`. If vLLM does not
forward it (MultiConnector), the scheduler side asks for it, and the next report contains it.
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
from hotkv_proto.keys import KeySpace
from hotkv_vllm.companion import Attachment
from hotkv_vllm.identity.adapters import NO_WORK, AdapterReport, AdapterWork
from hotkv_vllm.identity.rekeying import WeightsOrder, WeightsReport
from hotkv_vllm.report_ids import ReportId, SeenReports


@dataclass(slots=True)
class LoadJob:
    """transfer_id: the same in all ranks.
    runs: one entry per group.
    timeout_s: the load is cancelled after this time.
    traceparent: of the load's trace span; None if not traced.
    at_once: no step touches its blocks, so that it needs no mark.
    """

    request_id: str
    transfer_id: str
    lease_id: str
    runs: tuple[LoadRun, ...]
    timeout_s: float
    attached: tuple[LoadRun, ...] = ()
    traceparent: str | None = None
    at_once: bool = False


@dataclass(slots=True)
class StoreJob:
    """Blocks that are complete at the end of the step. Each rank stores its shard under one lease.

    lease_id: the first rank to reach the server acquires it; the others join.
    attached: their blocks are in `runs` or were stored earlier.
    fence_index: the store's word in the fence's page; 0 if only workers revoke the store.
    request_id: only if a `Keeper` keeps its blocks; otherwise empty.
    """

    store_id: int
    lease_id: str
    runs: tuple[BlockRun, ...]
    options: StoreOptions = NO_OPTIONS
    attached: tuple[BlockRun, ...] = ()
    fence_index: int = 0
    request_id: str = ""


@dataclass(slots=True)
class HotKVMetadata(KVConnectorMetadata):
    """The scheduler's message to the workers for one step.

    stores: begin after the step.
    flush_stores: store ids that must have ended, or be revoked, before this step's first write.
    cancel_loads: request ids.
    abandoned_loads: requests whose load was never begun; reported to vLLM as failed.
    held_loads: transfer ids of hung loads, whose blocks the scheduler withholds from vLLM's pool.
        Workers report them to vLLM as failed, and in `StepReport.settled_loads` once they can't
        write any more.
    asks_links: each rank reports whether it has a session.
    lost_track: which blocks this step reallocates is unknown: workers revoke all stores.
    companion: for the ranks' companions; None without.
    allocated_blocks: that the step or a load is about to write; empty without a companion.
    wants_handshake: each rank reports its handshake.
    settles_step: number to report when the step has ended, by which `OtherLoads` learns whether
        loads of other connectors failed in it; 0: none.
    timed_step: number to report when the step has ended, for `PrefillSpeed`; 0: none.
    is_quiet: nothing for the workers but `weights`, repeated; all other fields have their
        defaults.
    """

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    flush_stores: tuple[int, ...] = ()
    cancel_loads: tuple[str, ...] = ()
    abandoned_loads: tuple[str, ...] = ()
    held_loads: tuple[str, ...] = ()
    asks_links: bool = False
    lost_track: bool = False
    companion: Any = None
    allocated_blocks: tuple[int, ...] = ()
    wants_handshake: bool = False
    settles_step: int = 0
    timed_step: int = 0
    adapters: AdapterWork = NO_WORK
    weights: WeightsOrder | None = None
    is_quiet: bool = False


QUIET = HotKVMetadata(is_quiet=True)
"""A quiet step without an order about weights. Never changed."""


STILL_CONNECTING = "not connected yet"
"""Why a rank has no session until its first try to connect has ended."""


@dataclass(slots=True)
class HotKVHandshake(KVConnectorHandshakeMetadata):
    """A rank's message after it has registered its memory.

    key_space: agreed by all ranks; None if the rank runs without hotkv, see `why_off`.
    attachments: that the rank stores and loads with blocks.
    companion: its note (`RankCompanion.note`).
    fence: None if only workers revoke the rank's stores.
    absent: why the rank has no session yet; empty if it has one.
    weights_in_doubt: its weights may differ from `KeySpace.weights_identity`.
    is_reading: it reads the weights' files to identify them; the key space follows.
    """

    key_space: KeySpace | None
    why_off: str = ""
    attachments: tuple[Attachment, ...] = ()
    companion: Any = None
    fence: FencePlace | None = None
    host: str = ""
    rank: int = 0
    absent: str = ""
    weights_in_doubt: bool = False
    is_reading: bool = False


@dataclass(slots=True)
class StepReport:
    """What ranks report since their last report.

    stores: by store id and rank, a byte (`BlockResult`) per block; empty if the rank's transfer
        failed as a whole.
    counters: their growth.
    handshakes: by rank, if the scheduler asked for them.
    settled_step, timed_step: of the step's `HotKVMetadata`; 0 without a number.
    overdue_loads: transfer ids of cancelled loads that the server has not ended in time.
    settled_loads: by transfer id of `HotKVMetadata.held_loads`, the ranks to whose memory it can't
        write any more.
    load_seconds: by request, in the slowest rank. Negative if any rank's load reached its time
        limit.
    links: by rank, why it has no session; empty if it has one.
    companion: joined with `join`, like `adapters`.
    """

    stores: dict[int, dict[int, bytes]] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    companion: Any = None
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
        """Adds to a counter of `counter_help.COUNTERS`."""
        self.counters[name] = self.counters.get(name, 0) + value

    def join(self, other: "StepReport") -> "StepReport":
        """Joins with a report of another rank, or a later one of the same rank. Changes neither."""
        joined = {name: join(getattr(self, name), getattr(other, name)) for name, join in JOINS}
        return StepReport(**joined)

    def is_empty(self) -> bool:
        return self == StepReport()


@dataclass(slots=True)
class HotKVWorkerMetadata(KVConnectorWorkerMetadata):
    """The workers' message: reports by id. vLLM joins those of all ranks in any order, possibly
    several times."""

    reports: dict[ReportId, StepReport] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "HotKVWorkerMetadata":
        """Changes neither message."""
        if not isinstance(other, HotKVWorkerMetadata):
            return self
        return HotKVWorkerMetadata(self.reports | other.reports)

    def joined(self, seen: SeenReports) -> StepReport:
        """Joins the reports that were not handled before, and records them as handled."""
        return reduce(
            StepReport.join, [self.reports[one] for one in seen.fresh(self.reports)], StepReport()
        )


Value = TypeVar("Value")
Join = Callable[[Any, Any], Any]


def _each(join: Join) -> Join:
    """Joins mappings; a key in both has its values joined with `join`."""

    def joined(one: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
        shared = {key: join(one[key], other[key]) for key in one.keys() & other.keys()}
        return one | other | shared

    return joined


def _if_any(one: Value | None, other: Value | None) -> Value | None:
    if one is None or other is None:
        return other if one is None else one
    joined: Value = one.join(other)  # type: ignore[attr-defined]
    return joined


def _slower(one: float, other: float) -> float:
    """The longer time; negative if either is."""
    longest = max(abs(one), abs(other))
    return -longest if min(one, other) < 0 else longest


def _worse_answer(one: WeightsReport, other: WeightsReport) -> WeightsReport:
    """Of the same rank: a notice of written weights before an answer, then the earlier check,
    then changed weights. `was_written` if either says so."""
    worse = min(one, other, key=lambda said: (said.question, said.is_original, said.digest))
    return replace(worse, was_written=one.was_written or other.was_written)


JOINS: tuple[tuple[str, Join], ...] = (
    ("stores", _each(operator.or_)),
    ("counters", _each(operator.add)),
    ("companion", _if_any),
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
"""How each field of two `StepReport`s is joined. The second may be a later one of the same rank."""
