"""`HitAnswers` answers vLLM's question for a request's hit. It may wait a few ms for the server
(`hits.Patience`).

1. While the bytes of the request's adapter are not known: ask again.
2. While another engine computes the blocks for this one (`PrefillWait`): ask again.
3. The hit in the server (`HitFinder`), unless computing its tokens is faster (`LoadChoice`).
4. While another request loads the same blocks (`CommonLoads`), or the device has no room for one
   more load (`LoadRoom`): ask again.
5. As much of the hit as the companion says.
"""

from collections.abc import Callable, Collection
from typing import Any

from hotkv_proto.groups import PREFIX_CLOSED
from hotkv_proto.reports import Miss
from hotkv_vllm.companion import SchedulerCompanion
from hotkv_vllm.costs.prefill_speed import PrefillSpeed
from hotkv_vllm.identity.adapters import Adapters, Standing
from hotkv_vllm.scheduler.find.common_loads import CommonLoads
from hotkv_vllm.scheduler.find.hits import HitFinder
from hotkv_vllm.scheduler.find.load_choice import LoadChoice
from hotkv_vllm.scheduler.find.prefill_wait import ASK_S, PrefillWait
from hotkv_vllm.scheduler.request import ASK_AGAIN, NO_HIT, Answer, Phase, RequestState
from hotkv_vllm.stats import HotKVStats


class HitAnswers:
    """has_room: whether a request may begin a load.
    is_idle: vLLM has admitted no request, so that its scheduler may pause.
    """

    def __init__(
        self,
        prefill: PrefillSpeed,
        stats: HotKVStats,
        adapters: Adapters,
        companion: SchedulerCompanion | None,
        has_room: Callable[[Any], bool],
        is_idle: Callable[[], bool],
        *,
        weighs_loads: bool,
        shares_loads: bool,
        decodes_only: bool,
    ) -> None:
        """weighs_loads: if False, every hit is loaded.
        shares_loads: requests find each other's loaded blocks in vLLM's own prefix cache.
        decodes_only: as for `PrefillWait`.
        """
        self.choice = LoadChoice(prefill if weighs_loads else None, stats)
        self.common = CommonLoads()
        self._wait = PrefillWait(prefill, stats, decodes_only=decodes_only)
        self._adapters = adapters
        self._companion = companion
        self._has_room = has_room
        self._is_idle = is_idle
        self._shares_loads = shares_loads

    def __repr__(self) -> str:
        return f"HitAnswers({self.choice}, {self.common})"

    def answer(self, finder: HitFinder, state: RequestState, computed: int, now_s: float) -> Answer:
        """computed: tokens of the hit in vLLM's own prefix cache."""
        if state.request.lora_request is not None:
            standing = self._adapters.standing(state.request, now_s)
            if standing is not Standing.KNOWN:
                finder.give_back(state)
                state.hit.miss = Miss.NOT_ASKED
                waits = standing is Standing.WAIT and finder.is_connected
                return ASK_AGAIN if waits else NO_HIT
        if not finder.can_hit(state.request, computed):
            return finder.match(state, computed, now_s)
        if self._wait.goes_on(finder, state, computed, now_s):
            if self._is_idle() and state.wait is not None:
                finder.patience.rest(ASK_S, state.wait.answer)
            return ASK_AGAIN
        answer = self.choice.match(finder, state, computed, now_s)
        if answer[0] and self._waits_for_load(finder, state, computed, computed + answer[0], now_s):
            return ASK_AGAIN
        if answer[0] and not self._has_room(state.request):
            return ASK_AGAIN
        if self._companion is None or not answer[0]:
            return answer
        usable = self._companion.usable_tokens(state.request, computed, computed + answer[0])
        if usable is None:
            return ASK_AGAIN
        if usable >= computed + answer[0]:
            return answer
        state.hit.miss = Miss.NOT_ASKED
        finder.shorten(state, usable)
        return ASK_AGAIN if usable > computed else NO_HIT

    def _waits_for_load(
        self, finder: HitFinder, state: RequestState, computed: int, hit_tokens: int, now_s: float
    ) -> bool:
        if not self._shares_loads:
            return False
        size = finder.groups.specs[0].block_tokens
        hashes = finder.groups.hashes(state.request, 0)
        other = self.common.awaited(
            computed, hit_tokens, lambda tokens: hashes[tokens // size - 1], now_s
        )
        if not other or state.hit.waits_for not in ("", other):
            return False
        state.hit.waits_for = other
        # `FailedLoads.outwait` must not count this wait as one for admission.
        state.hit.granted_s = now_s
        return True

    def load_begins(self, finder: HitFinder, state: RequestState, until_s: float) -> None:
        """Lets other requests with the same prefix wait for this load, until `until_s`.

        With sliding windows or recurrent states, vLLM's prefix cache keeps only the blocks that
        a hit at the end of a prompt needs: only loads of the longest possible hit are recorded.
        """
        groups, end_tokens = finder.groups, state.hit.hit_tokens
        is_closed = all(spec.kind in PREFIX_CLOSED for spec in groups.specs)
        if not (is_closed or state.hit.miss is Miss.PARTIAL_BLOCK):
            return
        place = end_tokens // groups.specs[0].block_tokens - 1
        name = groups.hashes(state.request, 0)[place]
        self.common.begin(state.request.request_id, end_tokens, name, until_s)

    def load_was_late(self, request_id: str, states: Collection[RequestState]) -> None:
        """A load has reached its time limit, so the server is slow: requests that wait for it
        compute."""
        for state in states:
            if state.hit.waits_for == request_id and state.hit.phase is Phase.GRANTED:
                self.choice.leave(state)

    def drop(self, state: RequestState) -> None:
        """Nothing is loaded of the hit."""
        self.choice.drop(state, state.hit.server_s)
