"""Reports of the requests that the engine has admitted, so that the server's hotness sees hits in
the engine's own device cache.

Each request is reported once, when it is first admitted; all of a step go in one message.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hotkv_client.types import EndedRequest, RequestReport
from hotkv_vllm.link import CacheSession
from hotkv_vllm.scheduler.prefill_speed import PrefillSpeed
from hotkv_vllm.scheduler.request import RequestState
from hotkv_vllm.stats import HotKVStats


class UseReports:
    """What is to be reported with the next message. Owns the `UseState` of requests."""

    def __init__(
        self,
        session: CacheSession,
        hash_block_tokens: int,
        stats: HotKVStats,
        keys: Callable[[Any], Sequence[bytes]],
        prefill: PrefillSpeed | None = None,
    ) -> None:
        """`keys`: a request's hashes, one for each hash block; none if its blocks can't be named.
        `prefill`: told to the server with the reports."""
        self._session = session
        self._hash_block_tokens = hash_block_tokens
        self._stats = stats
        self._keys = keys
        self._prefill = prefill
        self._waiting: list[tuple[RequestState, int]] = []
        self._ended: list[RequestState] = []

    def matched(self, state: RequestState, device_hit_tokens: int) -> None:
        """vLLM has looked at its own cache for the request."""
        state.use.device_hit_tokens = device_hit_tokens

    def admitted(self, state: RequestState, external_tokens: int) -> None:
        """The engine has given the request its blocks; `external_tokens` are to come from hotkv."""
        if not state.use.is_reported:
            state.use.is_reported = True
            if not self._keys(state.request) and state.request.block_hashes:
                return
            self._waiting.append((state, external_tokens))

    def ended(self, state: RequestState) -> None:
        """A request that was reported has ended: the server is told if it has a session, or hints
        that wait for this."""
        if state.asked.lasts and state.use.is_reported:
            self._ended.append(state)

    def send(self, now_s: float) -> None:
        """One message for all that waits; nothing without a server."""
        if not self._waiting and not self._ended:
            return
        waiting, self._waiting = self._waiting, []
        over, self._ended = self._ended, []
        if not self._session.connected:
            return
        self._session.report_requests(
            [self._report(state, external_tokens, now_s) for state, external_tokens in waiting],
            self._prefill.tokens_per_s if self._prefill is not None else 0.0,
            [
                EndedRequest(
                    self._keys(state.request), state.asked.session_id, state.asked.at_end()
                )
                for state in over
            ],
        )
        if waiting:
            self._stats.add("reported_requests", len(waiting))

    def _report(self, state: RequestState, external_tokens: int, now_s: float) -> RequestReport:
        request, on_device = state.request, state.use.device_hit_tokens
        return RequestReport(
            hashes=self._keys(request)[: request.num_prompt_tokens // self._hash_block_tokens],
            prompt_tokens=request.num_prompt_tokens,
            device_hit_tokens=min(on_device, request.num_prompt_tokens),
            hit_tokens=min(
                state.use.device_hit_tokens + external_tokens, request.num_prompt_tokens
            ),
            age_s=max(0.0, now_s - state.arrived_s),
            retention=state.retention,
            session_id=state.asked.session_id,
            hints=state.asked.hints,
        )
