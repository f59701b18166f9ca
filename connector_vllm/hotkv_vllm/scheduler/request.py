"""The scheduler side's state of a request, in parts with one owner each.

Only the owner writes its part, but for a reset and fallbacks of callbacks: `HitState`
`hits.HitFinder`, `StoreState` `stores.StorePlanner`, `UseState` `reports.UseReports`,
`HitChoice` `load_choice.LoadChoice`, `Wait` `prefill_wait.PrefillWait`.
"""

import enum
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hotkv_client.types import BoolMask
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.reports import Miss
from hotkv_vllm.costs.answer_time import AnswerTime
from hotkv_vllm.hints.hint_reader import NOTHING, RequestHints
from hotkv_vllm.tracing.request_traces import RequestTrace

Masks = tuple[BoolMask, ...]
"""Per group, which of the request's blocks are ready, from the first on."""
Answer = tuple[int | None, bool]
"""For vLLM's `get_num_new_matched_tokens`: tokens to load beyond the hit in vLLM's own prefix
cache (None: not known yet), and whether the load is asynchronous."""
NO_HIT: Answer = (0, False)
ASK_AGAIN: Answer = (None, False)
"""vLLM leaves the request in its queue and asks again in a later step."""
ANY_LENGTH = 1 << 62


REMOTE_PREFILL = "do_remote_prefill"
"""A router says whether another engine computes the prompt."""
OTHER_CONNECTOR = "remote_"
"""Prefix of the `kv_transfer_params` that say where another connector fetches the blocks, as
NixlConnector's `remote_engine_id`. A wait in `PrefillWait` would delay that."""


def is_fetched_elsewhere(request: Any) -> bool:
    """Whether another connector has yet to fetch the prompt's blocks. It sets
    `do_remote_prefill` to false when it begins (`NixlConnector`, `MooncakeConnector` of vLLM
    0.32)."""
    params = transfer_params(request)
    return bool(params.get(REMOTE_PREFILL)) and names_an_engine(params)


def transfer_params(request: Any) -> dict[Any, Any]:
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}


def names_an_engine(params: dict[Any, Any]) -> bool:
    """Whether another connector is told where to fetch blocks. None doesn't count: vLLM's
    example proxy sends it to the engine that computes the prompt itself."""
    return any(
        str(name).startswith(OTHER_CONNECTOR) and value is not None
        for name, value in params.items()
    )


class Phase(enum.Enum):
    """Progress of a request's hit. ASKED: a lookup is in flight; LEASING: the call for a lease."""

    IDLE = "idle"
    ASKED = "asked"
    LEASING = "leasing"
    GRANTED = "granted"
    LOADING = "loading"


@dataclass(slots=True)
class HitState:
    """answer: of the call in flight; not waited for after `deadline_s`.
    computed_tokens: hit in vLLM's own prefix cache when the lease was acquired.
    hit_tokens: `computed_tokens` included.
    most_tokens: limit of the next hit.
    leased: per group, indices among the request's blocks.
    left_out: such indices that the lease omits in the group `CachedGroups.kept`.
    ready: per group, which of the hit's blocks are pinned, `left_out` included.
    attached: by group, which leased blocks have their attachment pinned too.
    connection: on which the lease was asked for; the lease ends with it.
    lease_ends_s: the earliest expiry; the load must begin before.
    offer_until_s: then the request is looked up anew.
    has_expired: a lease has expired before its grant was read.
    waits_for: the one request for whose load this one waits or has waited (`CommonLoads`).
    hint: ready blocks at the arrival; None if unknown.
    hint_until_s: end of the hint, or of the answer to the lookup at the arrival; 0 once vLLM has
        asked.
    miss_until_s: no lookup before.
    unhandled_loads: begun, and their end not handled.
    is_cancelled: by this engine: its weights or an adapter may have changed, or a reset.
    counted: as offered a hit, or as a miss.
    counted_hit: a load has succeeded.
    miss: why the last answer was a miss, or a shorter hit than possible.
    """

    phase: Phase = Phase.IDLE
    answer: "Future[Any] | None" = None
    deadline_s: float = 0.0
    lease_id: str = ""
    computed_tokens: int = 0
    hit_tokens: int = 0
    most_tokens: int = ANY_LENGTH
    leased: list[range] = field(default_factory=list)
    left_out: range = range(0)
    ready: Masks = ()
    attached: dict[int, BoolMask] = field(default_factory=dict)
    granted_s: float = 0.0
    lease_asked_s: float = 0.0
    connection: int = 0
    lease_ends_s: float = 0.0
    offer_until_s: float = 0.0
    has_expired: bool = False
    waits_for: str = ""
    hint: Masks | None = None
    hint_until_s: float = 0.0
    miss_until_s: float = 0.0
    has_failed: bool = False
    unhandled_loads: int = 0
    is_cancelled: bool = False
    asked: list[AnswerTime] = field(default_factory=list)
    counted: bool = False
    counted_hit: bool = False
    miss: Miss = Miss.ABSENT

    @property
    def server_s(self) -> float:
        return sum(one.seconds for one in self.asked)


@dataclass(slots=True)
class StoreState:
    """stored_blocks: per group, leading blocks considered for storing.
    due_tokens: when so many are computed, the next store is planned.
    may_store: False if the request depends on KV from before a reset.
    """

    stored_blocks: list[int]
    due_tokens: int
    may_store: bool = True


@dataclass(slots=True)
class UseState:
    """device_hit_tokens: in vLLM's own prefix cache, when vLLM last asked.
    is_reported: vLLM has admitted the request.
    refusal: why the server was not asked for a hit; None if it was.
    waits_since_s: of the present wait for a hit; 0 without.
    waited_s: in earlier waits.
    load_began_s: the last; 0 before the first.
    external_tokens: of the last load.
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
    """TRY: computing seems faster; load a part within a short limit, to measure loads.
    LEAVE: compute the hit's tokens.
    """

    TAKE = "take"
    TRY = "try"
    LEAVE = "leave"


@dataclass(slots=True)
class HitChoice:
    """Whether to load or compute a hit, until the load's end or until nothing is to be loaded.
    After a load that reached its limit it stays, as LEAVE.

    budget_s: for the server's answers and the load together; 0: no limit.
    prefill_s: predicted, for `num_tokens`.
    ask_s: for lookup and lease.
    load_s: in the slowest rank; 0 if unknown.
    is_late: a rank's load reached the limit.
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
    """For blocks that another engine computes.

    until_s: when this engine could have computed the tokens.
    answer: of the lookup sent at `asked_s`.
    next_s: earliest next lookup.
    has_waited: vLLM was answered "ask again" because of it.
    is_over: no wait is needed, or it has ended.
    """

    until_s: float = 0.0
    answer: "Future[Masks] | None" = None
    asked_s: float = 0.0
    next_s: float = 0.0
    has_waited: bool = False
    is_over: bool = False


@dataclass(slots=True)
class RequestState:
    """choice: None before the decision.
    wait: None before vLLM first asks for the hit.
    trace: None if not traced.
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
        self.asked = asked
        self.retention = asked.retention

    def leave(self) -> None:
        """hotkv no longer follows the request."""
        if self.trace is not None:
            self.trace.left()
            self.trace = None

    @property
    def is_loading(self) -> bool:
        return self.hit.phase is Phase.LOADING
