"""Lets a request wait for blocks that another engine is computing for it.

Used if one engine computes prompts and another decodes: a request may reach the decoding engine
before the last blocks of its prompt have reached the server.

Always true:
- A request waits no longer than this engine would take to compute the missing tokens, according to
  its measured prefill speed. Until the speed is measured, no request waits.
- A request waits at most once, before its hit is leased. After the wait it is looked up anew, so
  its hit includes all blocks that have arrived meanwhile.

Scheduler thread only; never blocks.
"""

from concurrent.futures import Future
from typing import Any, Protocol

from hotkv_vllm.costs.prefill_speed import PrefillSpeed
from hotkv_vllm.scheduler.request import (
    REMOTE_PREFILL,
    Masks,
    Phase,
    RequestState,
    Wait,
    names_an_engine,
    transfer_params,
)
from hotkv_vllm.stats import HotKVStats

ASK_S = 0.005
"""Shortest pause between two lookups for a waiting request, seconds. If the server answers slowly,
the pause is as long as the last lookup took."""


class Table(Protocol):
    """The part of `TableProbe` that `PrefillWait` uses."""

    def ready(self, request: Any, computed_tokens: int) -> Masks | None: ...

    def may_lie_below(self, request: Any, masks: Masks, computed_tokens: int) -> bool: ...


class Groups(Protocol):
    """The part of `CachedGroups` that `PrefillWait` uses."""

    def is_whole(self, masks: Masks, computed_tokens: int, limit_tokens: int) -> bool: ...


class Finder(Protocol):
    """The part of `HitFinder` that `PrefillWait` uses."""

    @property
    def table(self) -> Table: ...

    @property
    def groups(self) -> Groups: ...

    @property
    def is_connected(self) -> bool: ...

    def lookup(self, state: RequestState) -> "Future[Masks]": ...

    def forget(self, state: RequestState) -> None: ...


class PrefillWait:
    """Decides whether a request waits for blocks that another engine computes, and for how long.

    The field `do_remote_prefill` of a request's `kv_transfer_params` says whether another engine
    computes its prompt. In an engine with `kv_role="kv_consumer"` every request waits unless this
    field is false. In other engines a request waits only if this field is true. A request whose
    blocks another connector fetches never waits.

    decodes_only: True for an engine with `kv_role="kv_consumer"`.
    """

    def __init__(self, prefill: PrefillSpeed, stats: HotKVStats, *, decodes_only: bool) -> None:
        self._prefill = prefill
        self._stats = stats
        self._decodes_only = decodes_only

    def __repr__(self) -> str:
        return f"PrefillWait(decodes_only={self._decodes_only})"

    def goes_on(
        self, finder: Finder, state: RequestState, computed_tokens: int, now_s: float
    ) -> bool:
        """Returns True while the request must wait for blocks that another engine computes. Called
        each time vLLM asks for the request's hit.

        computed_tokens: length of the request's hit in vLLM's own prefix cache.
        """
        if state.wait is None:
            state.wait = self._begin(finder, state, computed_tokens, now_s)
        wait = state.wait
        if wait.is_over:
            return False
        is_whole = self._is_whole(finder, state, wait, computed_tokens, now_s)
        if not is_whole and now_s < wait.until_s and finder.is_connected:
            wait.has_waited = True
            return True
        wait.is_over = True
        if wait.has_waited:
            self._stats.add("awaited_requests" if is_whole else "awaited_in_vain")
            # Makes the finder look the request up anew. Otherwise it would answer with the hit that
            # it found before the wait.
            finder.forget(state)
        return False

    def _begin(
        self, finder: Finder, state: RequestState, computed_tokens: int, now_s: float
    ) -> Wait:
        if not self.is_meant(state.request) or not finder.is_connected:
            return Wait(is_over=True)
        last_tokens = state.request.num_tokens - 1
        prefill_s = self._prefill.seconds(computed_tokens, last_tokens)
        wait = Wait(now_s + prefill_s, is_over=not prefill_s)
        if not wait.is_over and state.hit.phase is Phase.ASKED:
            wait.answer, wait.asked_s = state.hit.answer, now_s
        return wait

    def is_meant(self, request: Any) -> bool:
        """Returns True if another engine computes the request's prompt, according to the request
        and the engine's role."""
        params = transfer_params(request)
        if names_an_engine(params):
            return False
        remote = params.get(REMOTE_PREFILL)
        return remote is True or (self._decodes_only and remote is not False)

    def _is_whole(
        self,
        finder: Finder,
        state: RequestState,
        wait: Wait,
        computed_tokens: int,
        now_s: float,
    ) -> bool:
        """Returns True if the server has all blocks that the request's longest possible hit needs.
        They must be in host memory, according to the block table; if no block table is mapped, they
        may be in any tier, according to a lookup.

        Also sends a lookup if the pause since the last lookup is over, because a lookup makes the
        server fetch blocks from lower tiers. Sends no lookup if a block table is mapped and the
        server has no lower tiers.
        """
        masks = finder.table.ready(state.request, computed_tokens)
        asks = masks is None or finder.table.may_lie_below(state.request, masks, computed_tokens)
        if wait.answer is not None and wait.answer.done():
            answer, wait.answer = wait.answer, None
            wait.next_s = now_s + max(ASK_S, now_s - wait.asked_s)
            if masks is None and answer.exception() is None:
                masks = answer.result()
        limit = state.request.num_tokens - 1
        if masks is not None and finder.groups.is_whole(masks, computed_tokens, limit):
            return True
        if asks and wait.answer is None and now_s >= wait.next_s:
            wait.answer, wait.asked_s = finder.lookup(state), now_s
        return False
