"""Requests whose load failed."""

from collections.abc import Iterable

ADMISSION_PATIENCE_S = 0.25
"""While failed requests wait to be scheduled, a granted hit waits no longer for admission."""


class FailedLoads:
    """Requests whose load failed and that vLLM has not scheduled since.

    With vLLM 0.32's `kv_load_failure_policy` `recompute`, they could stall a full engine for ever
    in two ways (vllm-project/vllm#44560; similar: #53868, #57841):

    - vLLM keeps blocks reserved for a failed request until it schedules it, and admits loads, but
      not computations, only beside all reservations. So `outwait` drops hits.
    - vLLM leaves a failed request at the head of its queue of requests that hold blocks. Without
      room for it, those behind never run. So `steps_aside` answers 'ask again' once, and vLLM
      moves it to its ordinary queue.
    """

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        self._in_the_way: set[str] = set()

    def __len__(self) -> int:
        return len(self.waiting | self._in_the_way)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.waiting

    def __repr__(self) -> str:
        return f"FailedLoads({len(self.waiting)} wait, {len(self._in_the_way)} in the way)"

    def add(self, request_id: str) -> None:
        self.waiting.add(request_id)
        self._in_the_way.add(request_id)

    def steps_aside(self, request_id: str) -> bool:
        """True once per failed load: vLLM must be answered 'ask again'."""
        if request_id not in self._in_the_way:
            return False
        self._in_the_way.discard(request_id)
        return True

    def outwait(self, granted_s: float, now_s: float) -> bool:
        return bool(self.waiting) and now_s > granted_s + ADMISSION_PATIENCE_S

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """vLLM drops the reservations of requests that run."""
        if self.waiting:
            self.waiting.difference_update(request_ids)

    def ended(self, request_id: str) -> None:
        self.waiting.discard(request_id)
        self._in_the_way.discard(request_id)
