"""The start of a connector whose handshake comes with a step's report, because vLLM has not
forwarded it (MultiConnector).

Until all ranks have reported theirs the scheduler side stores and loads nothing, so nothing needs
to be revoked either. Requests that arrive meanwhile are kept and answered "ask again": the step
that this leaves empty brings the reports within milliseconds. A rank that never answers delays the
first requests once, by `PATIENCE_S` at most.
"""

from typing import Any

from hotkv_vllm.link import logger
from hotkv_vllm.metadata import HotKVHandshake, HotKVWorkerMetadata

PATIENCE_S = 5.0


class Joining:
    """What is known while handshakes are awaited. Scheduler thread only."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._requests: dict[str, Any] = {}
        self._until_s: float | None = None
        self.was_late = False

    def __repr__(self) -> str:
        return (
            f"Joining(ranks={self._num_ranks}, requests={len(self._requests)}, "
            f"late={self.was_late})"
        )

    def arrived(self, request: Any) -> None:
        """Keeps a request until hotkv can look at it."""
        self._requests[request.request_id] = request

    def ended(self, request_id: str) -> None:
        """Forgets a request."""
        self._requests.pop(request_id, None)

    def asks_again(self, now_s: float) -> bool:
        """Returns True while a request is to be asked again; its time runs from the first call on.
        Warns once of ranks that are late."""
        if self._until_s is None:
            self._until_s = now_s + PATIENCE_S
        was_late, self.was_late = self.was_late, now_s >= self._until_s
        if self.was_late and not was_late:
            logger.warning(
                "hotkv is off until all ranks have told the scheduler what they store; the engine "
                "runs without it"
            )
        return not self.was_late

    def handshakes(self, report: HotKVWorkerMetadata) -> list[HotKVHandshake]:
        """The handshakes of all ranks; empty while one is missing."""
        return list(report.handshakes) if len(report.handshakes) >= self._num_ranks else []

    def take_requests(self) -> list[Any]:
        """The requests that wait, in the order of their arrival."""
        taken, self._requests = list(self._requests.values()), {}
        return taken
