"""Reports admitted requests to the server, so that the hotness of blocks includes hits in vLLM's
own prefix cache.

A request is reported once, when vLLM first admits it. One message per step carries all reports,
and the ends of requests and loads.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from hotkv_client.session import Session
from hotkv_client.types import EndedRequest, LoadEnd, RequestReport
from hotkv_proto.messages.fields import MAX_IDENTIFIER
from hotkv_proto.reports import Miss
from hotkv_vllm.costs.prefill_speed import PrefillSpeed
from hotkv_vllm.scheduler.request import RequestState
from hotkv_vllm.stats import HotKVStats

_report_ids = itertools.count(1)
"""For all sessions of the process: a load may end after the session has changed."""


class UseReports:
    """Collects reports until `send`. Of a request come `matched` and `answered`, perhaps often;
    `admitted` once; `load_ended` per load; `ended`. *Short* requests fill no block: they are
    reported without hashes."""

    def __init__(
        self,
        session: Session,
        hash_block_tokens: int,
        stats: HotKVStats,
        keys: Callable[[Any], Sequence[bytes]],
        prefill: PrefillSpeed | None = None,
        *,
        tells_speed: bool = True,
    ) -> None:
        """hash_block_tokens: tokens per hash of vLLM.
        keys: a request's hashes. A request without is reported too, so that its tokens count as
            missed.
        prefill: predicts the time that a hit saves; None: 0 is reported.
        tells_speed: sends the engine's prefill speed, so that the server leaves blocks in a slow
            tier if the engine computes them sooner.
        """
        self._session = session
        self._hash_block_tokens = hash_block_tokens
        self._stats = stats
        self._keys = keys
        self._prefill = prefill or PrefillSpeed(stats)
        self._tells_speed = tells_speed
        self._waiting: list[tuple[RequestState, int]] = []
        self._short: list[RequestReport[Sequence[bytes]]] = []
        self._ended: list[RequestState] = []
        self._loads: list[LoadEnd] = []
        self.is_waiting = False

    def matched(self, state: RequestState, device_hit_tokens: int) -> None:
        state.use.device_hit_tokens = device_hit_tokens

    def answered(self, state: RequestState, waits: bool, refusal: Miss | None) -> None:
        """refusal: why the request may not load; None if it may."""
        use = state.use
        use.refusal = refusal or (None if self._session.connected else Miss.NO_SERVER)
        if waits and not use.waits_since_s:
            use.waits_since_s = time.monotonic()
        elif not waits and use.waits_since_s:
            use.waited_s += time.monotonic() - use.waits_since_s
            use.waits_since_s = 0.0

    def admitted(self, state: RequestState, external_tokens: int) -> None:
        """The first call adds the request to the next message."""
        if external_tokens:
            state.use.external_tokens = external_tokens
            state.use.load_began_s = time.monotonic()
        if not state.use.is_reported:
            state.use.is_reported = True
            state.use.report_id = next(_report_ids)
            self._waiting.append((state, external_tokens))
            self.is_waiting = True

    def admitted_short(self, request: Any, arrived_s: float) -> None:
        age_s = max(0.0, time.monotonic() - arrived_s)
        self._short.append(
            RequestReport(
                (),
                request.num_prompt_tokens,
                0,
                0,
                age_s,
                miss=Miss.PARTIAL_BLOCK,
                request_id=_told_id(request),
            )
        )
        self.is_waiting = True

    def ended(self, state: RequestState) -> None:
        """The next message reports the end of an admitted request with a client session or
        actions (`RequestHints.lasts`), and of its load, if it is loading."""
        if state.asked.lasts and state.use.is_reported:
            self._ended.append(state)
            self.is_waiting = True
        if state.is_loading:
            self._loads.append(LoadEnd(state.use.report_id, 0.0, failed=True))
            self.is_waiting = True
        if state.trace is not None:
            use = state.use
            miss = state.hit.miss if use.refusal is None else use.refusal
            state.trace.ended(
                state.request.num_prompt_tokens,
                use.device_hit_tokens,
                use.external_tokens,
                miss,
                use.waited_s,
            )

    def load_ended(self, state: RequestState, failed: bool, *, is_late: bool = False) -> None:
        """A failed load shows as no hit, unless a later one succeeds.

        is_late: the engine cancelled it, because computing is faster.
        """
        miss = Miss.FAILED_LOAD
        if is_late:
            miss = Miss.COMPUTED_SOONER
        elif state.hit.is_cancelled:
            miss = Miss.NOT_ASKED
        if failed:
            state.use.external_tokens, state.hit.miss = 0, miss
        if state.trace is not None:
            state.trace.load_ended(failed)
        if state.use.report_id and state.use.load_began_s:
            wait_s = time.monotonic() - state.use.load_began_s
            self._loads.append(LoadEnd(state.use.report_id, wait_s, failed, miss))
            self.is_waiting = True

    def send(self, now_s: float) -> None:
        """One call; drops the reports if the session has no server."""
        if not self.is_waiting:
            return
        self.is_waiting = False
        reports, self._short = self._short, []
        waiting, self._waiting = self._waiting, []
        over, self._ended = self._ended, []
        loads, self._loads = self._loads, []
        if not self._session.connected:
            return
        for state, external_tokens in waiting:
            reports.append(self._report(state, external_tokens, now_s))
        self._session.report_requests(
            reports,
            self._prefill.tokens_per_s if self._tells_speed else 0.0,
            list(map(self._ended_report, over)),
            loads,
        )
        if reports:
            self._stats.add("reported_requests", len(reports))

    def _ended_report(self, state: RequestState) -> EndedRequest[Sequence[bytes]]:
        return EndedRequest(self._keys(state.request), state.asked.session_id, state.asked.at_end())

    def _report(
        self, state: RequestState, external_tokens: int, now_s: float
    ) -> RequestReport[Sequence[bytes]]:
        request, use = state.request, state.use
        on_device = min(use.device_hit_tokens, request.num_prompt_tokens)
        hit_tokens = min(use.device_hit_tokens + external_tokens, request.num_prompt_tokens)
        return RequestReport(
            hashes=self._keys(request)[: request.num_prompt_tokens // self._hash_block_tokens],
            prompt_tokens=request.num_prompt_tokens,
            device_hit_tokens=on_device,
            hit_tokens=hit_tokens,
            age_s=max(0.0, now_s - state.arrived_s),
            retention=state.retention,
            session_id=state.asked.session_id,
            hints=state.asked.hints,
            miss=state.hit.miss if use.refusal is None else use.refusal,
            saved_s=self._prefill.seconds(on_device, hit_tokens),
            wait_s=use.waited_s,
            report_id=use.report_id,
            request_id=_told_id(request),
        )


def _told_id(request: Any) -> str:
    """Clients may choose it: only what the server accepts."""
    return "".join(filter(str.isprintable, request.request_id[:MAX_IDENTIFIER]))
