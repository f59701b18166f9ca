"""What the workers are to do about loads with the next step, and whose ends vLLM waits for.
Scheduler thread only.

What is always true: a load that vLLM waits for is begun, cancelled or named as abandoned in some
step, and its end is taken in once. Ends of other connectors' loads pass by.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from hotkv_vllm.metadata import LoadJob
from hotkv_vllm.scheduler.quarantine import Quarantine


class LoadOrders:
    """See the module. Fallbacks of broken hooks read and write the plain attributes, and call none
    of the methods: a fault in one of these must not break both."""

    def __init__(self, num_ranks: int) -> None:
        self.quarantine = Quarantine(num_ranks)
        self.jobs: dict[str, LoadJob] = {}
        self.cancelled: list[str] = []
        self.abandoned: list[str] = []
        self.awaited: set[str] = set()

    def __repr__(self) -> str:
        return (
            f"LoadOrders({len(self.jobs)} to begin, {len(self.cancelled)} to cancel, "
            f"{len(self.awaited)} awaited, {self.quarantine})"
        )

    @property
    def is_empty(self) -> bool:
        """Returns True if the next step has nothing to say of loads."""
        return not self.jobs and not self.cancelled and not self.abandoned

    def begin(self, job: LoadJob, blocks: Any) -> None:
        """The next step begins this load. `blocks`: vLLM's `KVCacheBlocks` of the request."""
        self.quarantine.begun(job, blocks)
        self.jobs[job.request_id] = job
        self.awaited.add(job.request_id)

    def cancel(self, request_id: str) -> None:
        """The next step asks to end the request's load."""
        self.cancelled.append(request_id)

    def abandon(self, request_id: str) -> None:
        """vLLM waits for a load that will not be: the workers report it as failed."""
        self.jobs.pop(request_id, None)
        self.abandoned.append(request_id)
        self.quarantine.loading.pop(request_id, None)
        self.awaited.add(request_id)

    def ended(self, request_ids: Iterable[str]) -> Iterator[str]:
        """Loads that a step reports as ended. Yields those of this connector, and strikes each off
        as it does."""
        for request_id in request_ids:
            if request_id in self.awaited:
                self.awaited.discard(request_id)
                self.quarantine.loading.pop(request_id, None)
                yield request_id

    def take(self) -> tuple[tuple[LoadJob, ...], tuple[str, ...], tuple[str, ...]]:
        """Loads to begin, and requests whose load is cancelled or abandoned. They are told once."""
        taken = tuple(self.jobs.values()), tuple(self.cancelled), tuple(self.abandoned)
        self.jobs, self.cancelled, self.abandoned = {}, [], []
        return taken
