"""Lets a request wait for blocks that another engine computes for it: its prompt's last blocks may
not have reached the server yet.

- It waits no longer than this engine would take to compute the missing tokens; not at all until
  that speed is measured.
- It waits at most once, before its hit is leased, and is then looked up anew.

Never blocks.
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
"""Shortest pause between two lookups; as long as the last lookup, if that took longer."""


class Table(Protocol):
    """Part of `TableProbe`."""

    def ready(self, request: Any, computed_tokens: int) -> Masks | None: ...

    def may_lie_below(self, request: Any, masks: Masks, computed_tokens: int) -> bool: ...


class Groups(Protocol):
    """Part of `CachedGroups`."""

    def is_whole(self, masks: Masks, computed_tokens: int, limit_tokens: int) -> bool: ...


class Finder(Protocol):
    """Part of `HitFinder`."""

    @property
    def table(self) -> Table: ...

    @property
    def groups(self) -> Groups: ...

    @property
    def is_connected(self) -> bool: ...

    def lookup(self, state: RequestState) -> "Future[Masks]": ...

    def forget(self, state: RequestState) -> None: ...


class PrefillWait:
    """With `kv_role="kv_consumer"` every request waits unless `do_remote_prefill` of its
    `kv_transfer_params` is false; elsewhere only if it is true. A request whose blocks another
    connector fetches never waits."""

    def __init__(self, prefill: PrefillSpeed, stats: HotKVStats, *, decodes_only: bool) -> None:
        self._prefill = prefill
        self._stats = stats
        self._decodes_only = decodes_only

    def __repr__(self) -> str:
        return f"PrefillWait(decodes_only={self._decodes_only})"

    def goes_on(
        self, finder: Finder, state: RequestState, computed_tokens: int, now_s: float
    ) -> bool:
        """Called each time vLLM asks for the hit."""
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
            # Otherwise the finder would answer with the hit from before the wait.
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
        """Whether the server has all blocks of the longest possible hit: in host memory by the
        block table, or in any tier by a lookup without one.

        Also sends a lookup after each pause if lower tiers may have blocks: it makes the server
        fetch them.
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
