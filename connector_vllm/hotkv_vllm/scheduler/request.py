"""The scheduler side's state of a request (`RequestState`), in parts with one owner each.

`HitState` belongs to `hits.HitFinder`, `StoreState` to `stores.StorePlanner`, `UseState` to
`reports.UseReports`, `HitChoice` to `load_choice.LoadChoice`, `Wait` to `prefill_wait.PrefillWait`.
Normally only the owner writes the fields of its part. A reset of the cache, and the fallback of a
callback that has raised, also write some fields.
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
"""One mask per group: which of the request's blocks are ready, from the group's first block on."""
Answer = tuple[int | None, bool]
"""The answer to vLLM's `get_num_new_matched_tokens`. First: how many tokens can be loaded beyond
the hit in vLLM's own prefix cache (None: not known yet). Second: True if the load is asynchronous,
so that the request must wait for its end."""
NO_HIT: Answer = (0, False)
ASK_AGAIN: Answer = (None, False)
"""The hit is not known yet: vLLM leaves the request in its queue and asks again in a later step."""
ANY_LENGTH = 1 << 62
"""The value of `HitState.most_tokens` without a limit."""


REMOTE_PREFILL = "do_remote_prefill"
"""The field of vLLM's `kv_transfer_params` by which a router says whether another engine computes
the prompt (true or false)."""
OTHER_CONNECTOR = "remote_"
"""Prefix of the `kv_transfer_params` fields that say where another connector can fetch the blocks,
such as `remote_engine_id` of vLLM's NixlConnector. A request with such a field does not wait for
blocks in hotkv (`PrefillWait`): in a MultiConnector the wait would delay the other connector's
fetch."""


def is_fetched_elsewhere(request: Any) -> bool:
    """Returns True if another connector of a MultiConnector is to fetch the blocks of the request's
    prompt: the request names the engine that has computed the prompt, and the fetch has not begun.
    Returns False again once the other connector has begun, because it then sets `do_remote_prefill`
    to false.

    Source: `NixlConnector` and `MooncakeConnector` of vLLM 0.32.
    """
    params = transfer_params(request)
    return bool(params.get(REMOTE_PREFILL)) and names_an_engine(params)


def transfer_params(request: Any) -> dict[Any, Any]:
    """Returns the request's `kv_transfer_params`; empty if it has none."""
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}


def names_an_engine(params: dict[Any, Any]) -> bool:
    """Returns True if the parameters tell another connector where to fetch blocks. Fields with the
    value None do not count: vLLM's example of a proxy sends them to the engine that computes the
    prompt itself, and so need not fetch blocks."""
    return any(
        str(name).startswith(OTHER_CONNECTOR) and value is not None
        for name, value in params.items()
    )


class Phase(enum.Enum):
    """The progress of a request's hit.

    IDLE: the request has no lease and no call in flight.
    ASKED: a lookup at the server is in flight.
    LEASING: the call for a lease is in flight.
    GRANTED: the lease is granted, and its blocks are pinned.
    LOADING: the load has begun.
    """

    IDLE = "idle"
    ASKED = "asked"
    LEASING = "leasing"
    GRANTED = "granted"
    LOADING = "loading"


@dataclass(slots=True)
class HitState:
    """The state of a request's hit (the leading blocks that it can load from the server).

    answer: future of the server call in flight (lookup or lease); None without such a call. After
        `deadline_s` the request no longer waits for it.
    computed_tokens: length of the hit in vLLM's own prefix cache when the lease was acquired.
    hit_tokens: length of the whole hit, including `computed_tokens`.
    most_tokens: the next hit has at most this many tokens; ANY_LENGTH without a limit.
    leased: the leased blocks: per group, a range of indices among the request's blocks.
    left_out: blocks of the first group that the lease omits: a range of such indices.
    ready: per group, a mask of the hit's blocks that are pinned, from the group's first block on.
        The blocks in `left_out` count as pinned.
    represented: by group, a mask of the leased blocks whose sketch (a compact form of the
        keys) is pinned too.
    granted_s: time at which the lease was granted.
    lease_asked_s: time at which the lease was asked for.
    connection: number of the connection to the server on which the lease was asked for. If this
        connection has ended, so has the lease.
    lease_ends_s: the lease expires at this time at the earliest; the load must begin before.
    offer_until_s: vLLM is offered the hit before this time. Later the request is looked up anew.
    has_expired: True once a lease has expired before its grant was read.
    waits_for: id of the request for whose load this request waits or has waited, because that load
        loads the same blocks (`CommonLoads`). A request waits for one load at most.
    hint: masks of the blocks that were ready when the request arrived, per group; None if not
        known.
    hint_until_s: the hint, or the answer to the lookup that was sent at the arrival, is valid until
        this time; 0 once vLLM has asked for the hit.
    miss_until_s: the request is not looked up again before this time, because it has missed.
    unproved_loads: number of loads that have begun and whose end has not been handled.
    is_cancelled: True if this engine has cancelled the load, because its weights or an adapter may
        have changed, or because of a reset.
    asked: the measured times of the server calls for this hit.
    counted: True once the request was counted as offered a hit, or as a miss.
    counted_hit: True once the request was counted as a hit, because a load of it has succeeded.
    miss: reason why the last answer to vLLM was a miss, or a shorter hit than it could have been.
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
    represented: dict[int, BoolMask] = field(default_factory=dict)
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
    failed_loads: int = 0
    unproved_loads: int = 0
    is_cancelled: bool = False
    asked: list[AnswerTime] = field(default_factory=list)
    counted: bool = False
    counted_hit: bool = False
    miss: Miss = Miss.ABSENT

    @property
    def server_s(self) -> float:
        """Returns the seconds that the server has taken so far for its answers about this hit."""
        return sum(one.seconds for one in self.asked)


@dataclass(slots=True)
class StoreState:
    """Tracks how far a request's blocks are stored.

    stored_blocks: per group, the number of the request's leading blocks that were already
        considered for storing.
    due_tokens: the next store is planned when this many tokens of the request are computed.
    may_store: False if no further block of the request may be stored, because it depends on KV from
        before a reset of the cache.
    """

    stored_blocks: list[int]
    due_tokens: int
    may_store: bool = True


@dataclass(slots=True)
class UseState:
    """The figures about a request that `UseReports` reports to the server.

    device_hit_tokens: tokens found in vLLM's own prefix cache when vLLM last asked for a hit.
    is_reported: True once vLLM has admitted the request.
    refusal: reason why the server was not asked for a hit; None if it was asked.
    waits_since_s: time at which the request's present wait for a hit began, with the first answer
        "ask again"; 0 if the request does not wait.
    waited_s: total duration of the request's earlier waits for a hit, seconds.
    load_began_s: time at which the request's last load began; 0 before the first.
    report_id: id of the report about the request; 0 before the report is made.
    external_tokens: number of tokens that the request's last load was to load from hotkv.
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
    """The decision about a request's hit (`LoadChoice`).

    TAKE: load the hit.
    TRY: computing seems faster. Load the hit or a part of it nevertheless, within a short time
        limit, to measure how long a load takes now.
    LEAVE: compute the hit's tokens.
    """

    TAKE = "take"
    TRY = "try"
    LEAVE = "leave"


@dataclass(slots=True)
class HitChoice:
    """The decision whether to load or to compute a hit. Exists from the time when vLLM first asks
    for the hit until the hit's load has ended, or until there is no hit to load. After a load that
    reached its time limit the decision stays, as LEAVE, so that the hit's tokens are computed.

    verdict: the decision.
    budget_s: time limit for the server's answers and the load together, seconds; 0: no limit.
    num_tokens: number of tokens to load.
    prefill_s: predicted time to compute these tokens.
    ask_s: time that the server took for its answers (lookup and lease).
    load_s: time that the server took for the load, in the slowest rank; 0 if not known.
    is_late: True if a rank's load reached the time limit.
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

    until_s: the wait ends at this time at the latest. By then this engine could have computed the
        missing tokens itself.
    answer: future of the lookup that asks the server which blocks are ready, sent at `asked_s`;
        None if no lookup is in flight.
    next_s: earliest time of the next lookup.
    has_waited: True once vLLM was answered "ask again" because of this wait.
    is_over: True if the request need not wait, or has waited.
    """

    until_s: float = 0.0
    answer: "Future[Masks] | None" = None
    asked_s: float = 0.0
    next_s: float = 0.0
    has_waited: bool = False
    is_over: bool = False


@dataclass(slots=True)
class RequestState:
    """The scheduler side's state of a request, from its arrival to its end.

    request: vLLM's object for the request.
    retention: how the server should retain the request's blocks, according to its hints.
    asked: the hints that came with the request.
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
        """Ends the request's trace, because hotkv no longer follows the request."""
        if self.trace is not None:
            self.trace.left()
            self.trace = None

    @property
    def is_loading(self) -> bool:
        """Returns True if a load of the request has begun and its end is not known yet."""
        return self.hit.phase is Phase.LOADING
