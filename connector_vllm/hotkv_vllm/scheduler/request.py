"""The scheduler side's state of a request, in parts with one owner each.

`HitState` belongs to `hits.HitFinder`, `StoreState` to `stores.StorePlanner`, `UseState` to
`reports.UseReports`, `HitChoice` to `load_choice.LoadChoice`, `Wait` to `prefill_wait.PrefillWait`.
Only the owner writes the fields of its part. The exception is a reset of the cache, which voids
`HitState`, `StoreState` and `UseState`.
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
"""By group, a mask of the blocks that are ready."""
Answer = tuple[int | None, bool]
"""The answer to vLLM about a request: how many tokens can be loaded beyond the hit in vLLM's own
prefix cache (None: not known yet), and whether the request waits while they are loaded."""
NO_HIT: Answer = (0, False)
ASK_AGAIN: Answer = (None, False)
"""The hit is not known yet, and the request waits."""


class Phase(enum.Enum):
    """The progress of a request's hit: from the question which blocks are ready (ASKED) over the
    lease (LEASING, then GRANTED) to the load (LOADING)."""

    IDLE = "idle"
    ASKED = "asked"
    LEASING = "leasing"
    GRANTED = "granted"
    LOADING = "loading"


@dataclass(slots=True)
class HitState:
    """The state of a request's hit.

    answer: future of the server call that the current `phase` waits for, at most until
        `deadline_s`.
    computed_tokens: length of the hit in vLLM's own prefix cache when the lease was acquired.
    leased: positions of the leased blocks, per group. The lease omits the positions `left_out` of
        the first group.
    ready: per group, which blocks of the hit are pinned, from the group's first block on. The
        blocks in `left_out` count as pinned.
    represented: by group, for which leased blocks the representation (a compact form of the keys)
        is pinned too.
    hint: masks of the blocks that were ready when the request arrived, per group; None if not
        known.
    unproved_loads: number of started loads whose completion has not been reported.
    asked: the measured times of the server calls for this hit.
    miss: reason why the last answer to vLLM was not a longer hit.
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
    """The figures about a request and its loads that are reported to the server once.

    device_hit_tokens: tokens found in vLLM's own prefix cache when vLLM last asked for a hit.
    external_tokens: tokens to load from hotkv, as of the request's last admission.
    refusal: reason why the server was not asked for a hit; None if it was asked.
    waits_since_s: time at which the present wait for an answer began; 0 if the request does not
        wait.
    waited_s: length of the earlier waits, seconds.
    load_began_s: time at which the request's last load began.
    report_id: number of the report about the request; 0 before it is made.
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

    budget_s: time limit for the server's answers and the load together; 0 if this choice sets no
        limit.
    num_tokens: tokens of the hit that the load would bring.
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

    until_s: time at which this engine would have computed the blocks itself, had it not waited.
    answer: future of the call that asks whether the blocks are ready, made at `asked_s`; None if
        no call is open.
    next_s: time at which the server is asked next.
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

    request: vLLM's object for the request.
    asked: hints that came with the request.
    choice: the decision whether to load the request's hit; None before the decision.
    wait: the request's wait for blocks that another engine computes; None before vLLM first asks
        for the request's hit.
    trace: the request's trace; None if the request is not traced.
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
        """Records the hints that came with the request."""
        self.asked = asked
        self.retention = asked.retention

    def leave(self) -> None:
        """Ends the request's trace, because the request goes on without hotkv."""
        if self.trace is not None:
            self.trace.left()
            self.trace = None

    @property
    def is_loading(self) -> bool:
        """Returns True if a load of the request has begun and its end is not known yet."""
        return self.hit.phase is Phase.LOADING
