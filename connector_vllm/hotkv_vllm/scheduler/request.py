"""What the scheduler side knows of one request of the engine, in parts that have one owner each.

`HitState` belongs to `hits.HitFinder`, `StoreState` to `stores.StorePlanner`, `UseState` to
`reports.UseReports`, `HitChoice` to `load_choice.LoadChoice`. Nobody else writes their fields, but
for a reset, which voids the first three.
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
"""What vLLM is told: how many tokens beyond its own hit can be loaded, and whether it has to wait
for the load."""
NO_HIT: Answer = (0, False)
ASK_AGAIN: Answer = (None, False)
"""Not known yet: the request waits."""


class Phase(enum.Enum):
    """Where a request stands with its hit."""

    IDLE = "idle"
    ASKED = "asked"
    LEASING = "leasing"
    GRANTED = "granted"
    LOADING = "loading"


@dataclass(slots=True)
class HitState:
    """A request's way to its hit.

    `answer`: of the call that the phase waits for, until `deadline_s`. `computed_tokens`: local hit
    for which the lease was taken. `leased`: leased blocks per group, but for `left_out` of the
    first; `represented`: by group, of which of them the representation is leased too.
    `unproved_loads`: loads begun whose end is not known. `asked`: what this hit has asked of the
    server. `miss`: why there is no longer hit, as last asked.
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
        """What the server has taken so far for the answers of this hit."""
        return sum(one.seconds for one in self.asked)


@dataclass(slots=True)
class StoreState:
    """How far a request's blocks are stored.

    `stored_blocks`: per group the first block not yet considered for storing. `next_check_tokens`:
    computed tokens at which another block is full. `may_store`: False if its blocks build on KV
    that a reset of the cache has made void.
    """

    stored_blocks: list[int]
    next_check_tokens: int
    may_store: bool = True


@dataclass(slots=True)
class UseState:
    """What is reported of a request once, and of its loads. `device_hit_tokens`: hit in the
    engine's own cache, as last asked; `external_tokens`: that were to come from hotkv, as last
    admitted. `refusal`: why hotkv was not asked; None if it was. `waits_since_s`: since when the
    request waits for an answer, 0 if it does not; `waited_s`: how long it did before.
    `load_began_s`: when its last load did. `report_id`: 0 before the report."""

    device_hit_tokens: int = 0
    is_reported: bool = False
    refusal: Miss | None = None
    waits_since_s: float = 0.0
    waited_s: float = 0.0
    load_began_s: float = 0.0
    report_id: int = 0
    external_tokens: int = 0


class Verdict(enum.Enum):
    """What is done about a request's hit. TRY: it loses by what is known, but may have a little
    time to show otherwise."""

    TAKE = "take"
    TRY = "try"
    LEAVE = "leave"


@dataclass(slots=True)
class HitChoice:
    """Whether a hit is taken, from the first question about it until its load has ended.

    `budget_s`: the server's time for answers and load, 0 for no bound of its own. `ask_s`,
    `load_s`: what it has taken for its answers up to the lease, and for the load of `num_tokens`, 0
    if that is not known. `is_late`: its time was up in a rank. `prefill_s`: what computing these
    was thought to take.
    """

    verdict: Verdict
    budget_s: float
    num_tokens: int = 0
    prefill_s: float = 0.0
    ask_s: float = 0.0
    load_s: float = 0.0
    is_late: bool = False


@dataclass(slots=True)
class RequestState:
    """One request of the engine, from its arrival to its end. `request` is vLLM's. `trace`: None
    if it is not traced."""

    request: Any
    store: StoreState
    retention: Retention = NO_RETENTION
    arrived_s: float = 0.0
    hit: HitState = field(default_factory=HitState)
    use: UseState = field(default_factory=UseState)
    choice: "HitChoice | None" = None
    asked: RequestHints = NOTHING
    trace: RequestTrace | None = None

    def ask(self, asked: RequestHints) -> None:
        """Notes what the request asks of the cache."""
        self.asked = asked
        self.retention = asked.retention

    def leave(self) -> None:
        """The request goes on without hotkv: its trace ends."""
        if self.trace is not None:
            self.trace.left()
            self.trace = None

    @property
    def is_loading(self) -> bool:
        """A load of the request was begun, and its end is not known yet."""
        return self.hit.phase is Phase.LOADING
