"""Works round what vLLM's scheduler does with a request whose load failed.

Source: the scheduler of vLLM 0.32 with `kv_load_failure_policy` `recompute`. Reservations came with
vllm-project/vllm#44560; #53868 and #57841 describe stalls with the same end. Two things can stall a
full engine for ever:

- vLLM goes on reserving blocks for such a request until it is scheduled, and admits asynchronous
  loads (not plain prefills) only beside all reservations. If nothing else fits, a granted hit would
  wait for ever. So it is given up after PATIENCE_S, and its request is computed.
- vLLM leaves such a request at the head of its queue of requests that hold blocks, although it
  holds none any more. If it does not fit, those behind it never give theirs back. Answered 'ask
  again' once, it moves to the ordinary queue.
"""

from collections.abc import Iterable

PATIENCE_S = 0.25
"""How long a hit may wait for admission while requests whose load failed wait too."""


class FailedLoads:
    """Requests whose load failed and that vLLM has not scheduled since. Scheduler thread only."""

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self._in_the_way: set[str] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __repr__(self) -> str:
        return f"FailedLoads({len(self._waiting)} wait, {len(self._in_the_way)} in the way)"

    @property
    def is_empty(self) -> bool:
        """Returns True if nothing is known of any request."""
        return not self._waiting and not self._in_the_way

    def add(self, request_id: str) -> None:
        """vLLM was told, or will be, that the request's load failed."""
        self._waiting.add(request_id)
        self._in_the_way.add(request_id)

    def steps_aside(self, request_id: str) -> bool:
        """vLLM asks for the request's hit. Returns True once, if it must be told 'ask again'."""
        if request_id not in self._in_the_way:
            return False
        self._in_the_way.discard(request_id)
        return True

    def outwait(self, granted_s: float, now_s: float) -> bool:
        """Returns True if a hit that was granted at `granted_s` should wait no longer."""
        return bool(self._waiting) and now_s > granted_s + PATIENCE_S

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """A step runs these requests: vLLM reserves nothing for them any more."""
        if self._waiting:
            self._waiting.difference_update(request_ids)

    def ended(self, request_id: str) -> None:
        """Forgets a request."""
        self._waiting.discard(request_id)
        self._in_the_way.discard(request_id)
