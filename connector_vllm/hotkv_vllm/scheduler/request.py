"""The scheduler side's state of a request, in parts with one owner each.

`HitState` belongs to `hits.HitFinder`, `StoreState` to `stores.StorePlanner`, `UseState` to
`reports.UseReports`, `HitChoice` to `load_choice.LoadChoice`, `Wait` to `prefill_wait.PrefillWait`.
Only the owner writes a part's fields. The exception is a reset, which voids the first three.
"""

import enum
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.reports import Miss
from hotkv_vllm.costs.answer_time import AnswerTime
from hotkv_vllm.hints.requests import NOTHING, RequestHints
from hotkv_vllm.link import BoolMask
from hotkv_vllm.tracing.requests import RequestTrace

Masks = tuple[BoolMask, ...]
"""By group: which blocks are ready."""
Answer = tuple[int | None, bool]
"""The answer to vLLM: how many tokens beyond its own hit can be loaded, and whether the request has
to wait for the load."""
NO_HIT: Answer = (0, False)
ASK_AGAIN: Answer = (None, False)
"""The hit is not known yet, and the request waits."""


class Phase(enum.Enum):
    """How far the search for a request's hit has come."""

    IDLE = "idle"
    ASKED = "asked"
    LEASING = "leasing"
    GRANTED = "granted"
    LOADING = "loading"


@dataclass(slots=True)
class HitState:
    """The state of a request's hit.

    answer: answer of the call that the phase waits for, until `deadline_s`.
    computed_tokens: local hit for which the lease was acquired.
    leased: leased blocks per group. The blocks `left_out` of the first group are not leased.
    ready: by group, the blocks of the hit that are pinned.
    represented: by group, the leased blocks whose representation is leased too.
    hint: by group, blocks that were ready when the request arrived; None if not known.
    unproved_loads: loads begun whose end is not known.
    asked: the calls to the server for this hit.
    miss: why the last answer was not a longer hit.
    """

    phase: Phase = Phase.IDLE
    answer: "Future[Any] | None" = None
    deadline_s: float = 0.0
    lease_id: str = ""
    computed_tokens: int = 0
    hit_tokens: int = 0
    leased: list[range] = field(default_factory=list)
    left_out: range = range(0)
    ready: Masks = ()
    represented: dict[int, BoolMask] = field(default_factory=dict)
    granted_s: float = 0.0
    lease_ends_s: float = 0.0
    hint: Masks | None = None
    hint_until_s: float = 0.0
    miss_until_s: float = 0.0
    failed_loads: int = 0
    unproved_loads: int = 0
    asked: list[AnswerTime] = field(default_factory=list)
    counted: bool = False
    counted_hit: bool = False
    miss: Miss = Miss.ABSENT

    @property
    def server_s(self) -> float:
        """Returns the time that the server has used so far to answer for this hit, seconds."""
        return sum(one.seconds for one in self.asked)


@dataclass(slots=True)
class StoreState:
    """How far a request's blocks are stored.

    stored_blocks: per group, the first block not yet considered for storing.
    due_tokens: number of computed tokens at which full blocks are stored next.
    may_store: False if the request's blocks build on KV that a reset of the cache has made void.
    """

    stored_blocks: list[int]
    due_tokens: int
    may_store: bool = True


@dataclass(slots=True)
class UseState:
    """The figures to report once about a request and its loads.

    device_hit_tokens: hit in the engine's own cache, as of the last call.
    external_tokens: tokens to come from hotkv, as of the last admission.
    refusal: why hotkv was not asked; None if it was.
    waits_since_s: time since which the request waits for an answer; 0 if it does not wait.
    waited_s: how long the request waited before.
    load_began_s: time at which its last load began.
    report_id: number of the report; 0 before it.
    """

    device_hit_tokens: int = 0
    is_reported: bool = False
    refusal: Miss | None = None
    waits_since_s: float = 0.0
    waited_s: float = 0.0
    load_began_s: float = 0.0
    report_id: int = 0
    external_tokens: int = 0


class Verdict(enum.Enum):
    """The decision about a request's hit. TRY: computing seems faster than loading, but the load
    may prove otherwise within a short time limit."""

    TAKE = "take"
    TRY = "try"
    LEAVE = "leave"


@dataclass(slots=True)
class HitChoice:
    """Whether to load a hit, from the first question about it until its load has ended.

    budget_s: time limit for the server's answers and the load; 0 if this choice sets no limit.
    num_tokens: tokens of the hit.
    prefill_s: predicted time to compute these tokens.
    ask_s: time that the server used for its answers, up to the lease.
    load_s: time that the server used for the load of `num_tokens`; 0 if not known.
    is_late: True if a rank reached the time limit.
    """

    verdict: Verdict
    budget_s: float
    num_tokens: int = 0
    prefill_s: float = 0.0
    ask_s: float = 0.0
    load_s: float = 0.0
    is_late: bool = False


@dataclass(slots=True)
class Wait:
    """The wait of a request for blocks that another engine computes.

    until_s: the time at which computing would have ended.
    answer: the open question, asked at `asked_s`; None without one.
    next_s: the time of the next question.
    """

    until_s: float = 0.0
    answer: "Future[Masks] | None" = None
    asked_s: float = 0.0
    next_s: float = 0.0
    has_waited: bool = False
    is_over: bool = False


@dataclass(slots=True)
class RequestState:
    """A request of the engine, from its arrival to its end.

    request: vLLM's request.
    asked: hints that came with the request.
    wait: None before the request's hit is first asked for.
    trace: None if the request is not traced.
    """

    request: Any
    store: StoreState
    retention: Retention = NO_RETENTION
    arrived_s: float = 0.0
    hit: HitState = field(default_factory=HitState)
    use: UseState = field(default_factory=UseState)
    choice: "HitChoice | None" = None
    wait: Wait | None = None
    asked: RequestHints = NOTHING
    trace: RequestTrace | None = None

    def ask(self, asked: RequestHints) -> None:
        """Notes the hints that came with the request."""
        self.asked = asked
        self.retention = asked.retention

    def leave(self) -> None:
        """Ends the request's trace; the request goes on without hotkv."""
        if self.trace is not None:
            self.trace.left()
            self.trace = None

    @property
    def is_loading(self) -> bool:
        """Returns True if a load of the request has begun and its end is not known yet."""
        return self.hit.phase is Phase.LOADING
