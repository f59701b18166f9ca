"""Reports the engine's admitted requests to the server. So the server also learns of hits in vLLM's
own prefix cache on the device. It counts these hits in the hotness of the blocks (how much they are
used), by which it chooses the blocks to evict.

Each request is reported once, when vLLM first admits it. One message per step carries all reports
that have collected since the last step. The message also says which requests and which of their
loads have ended: how long each load took, and whether it failed.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from hotkv_client.session import Session
from hotkv_client.types import EndedRequest, LoadEnd, RequestReport
from hotkv_proto.reports import Miss
from hotkv_vllm.costs.prefill_speed import PrefillSpeed
from hotkv_vllm.scheduler.request import RequestState
from hotkv_vllm.stats import HotKVStats

_report_ids = itertools.count(1)
"""Generates the ids of reports, for all sessions of the process, because a load may end after the
session has changed."""


class UseReports:
    """Collects reports about requests, until `send` sends them to the server. Owns the `UseState`
    of each request (the figures to report about it).

    is_waiting: True if reports wait to be sent.
    """

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
        """Creates an empty collection of reports.

        hash_block_tokens: number of tokens for which vLLM computes a hash.
        keys: takes vLLM's object of a request, and returns the hashes of its tokens, one for each
            `hash_block_tokens` tokens. Empty for a request without shared names (`CachedGroups`);
            such a request is reported too, so that its tokens count as missed.
        prefill: predicts the prefill time that a hit saves; None: this time is reported as 0.
        tells_speed: True sends the engine's prefill speed with the reports. The server then does
            not fetch blocks from a slow tier if the engine computes them sooner.
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
        """Records the length of the request's hit in vLLM's own prefix cache, for the report."""
        state.use.device_hit_tokens = device_hit_tokens

    def answered(self, state: RequestState, waits: bool, refusal: Miss | None) -> None:
        """Records how vLLM's question for the request's hit was answered.

        waits: True if the answer was "ask again".
        refusal: reason why the request may not load from hotkv; None if it may.
        """
        use = state.use
        use.refusal = refusal or (None if self._session.connected else Miss.NO_SERVER)
        if waits and not use.waits_since_s:
            use.waits_since_s = time.monotonic()
        elif not waits and use.waits_since_s:
            use.waited_s += time.monotonic() - use.waits_since_s
            use.waits_since_s = 0.0

    def admitted(self, state: RequestState, external_tokens: int) -> None:
        """Records that vLLM has allocated the request's blocks. The first call adds the request to
        the next message.

        external_tokens: number of tokens to load from hotkv.
        """
        if external_tokens:
            state.use.external_tokens = external_tokens
            state.use.load_began_s = time.monotonic()
        if not state.use.is_reported:
            state.use.is_reported = True
            state.use.report_id = next(_report_ids)
            self._waiting.append((state, external_tokens))
            self.is_waiting = True

    def admitted_short(self, request: Any, arrived_s: float) -> None:
        """Adds a short request (`Admission.short`) to the next message."""
        age_s = max(0.0, time.monotonic() - arrived_s)
        self._short.append(
            RequestReport((), request.num_prompt_tokens, 0, 0, age_s, miss=Miss.PARTIAL_BLOCK)
        )
        self.is_waiting = True

    def ended(self, state: RequestState) -> None:
        """Records that a request has ended, and ends its trace. The next message then reports two
        ends:
        - the end of the request, if it was admitted and its hints (about retention, sent by the
          client) name a client session or contain actions (`RequestHints.lasts`);
        - the end of its load, if a load of the request is in progress."""
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
        """Records that the request's load has ended, for the next message and the trace. If the
        load failed, both show that the request has no hit, unless a later load of the request
        succeeds.

        is_late: True if the engine has cancelled the load, because computing is faster.
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
        """Sends all collected reports with one call. Drops them if the session has no server."""
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
        )
