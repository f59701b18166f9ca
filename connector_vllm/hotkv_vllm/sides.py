"""The hooks of each side, as the connector calls them, and what they answer where hotkv is not.

`HotKVConnector` holds one object for each side: the real one for its own role, and for the other,
or with hotkv off, one of these classes, whose answers leave vLLM as it would be without hotkv. So
no hook asks whether there is a side. `scheduler.side` and `worker.side` override all of them.
"""

from typing import Any

from hotkv_vllm.metadata import HotKVHandshake, HotKVMetadata, HotKVWorkerMetadata
from hotkv_vllm.stats import HotKVStats


class Side:
    """Both sides."""

    def count(self, name: str) -> None:
        """Adds one to a counter of `stats.COUNTERS`."""

    def shutdown(self) -> None:
        """Ends what the side has begun."""


class RequestSide:
    """Hooks about one request, in the scheduler's process. `*_broke`: what makes up for a hook that
    has raised."""

    def arrived(self, request: Any) -> None:
        """A request is new to the engine."""

    def request_broke(self, request_id: str) -> None:
        """The request goes on as one that hotkv does not know."""

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the engine's own hit can be loaded; None for 'ask again'."""
        return 0, False

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks, of which a load is to fill `num_external_tokens`."""

    def alloc_broke(self, request_id: str, num_external_tokens: int) -> None:
        """It is not known which blocks have changed hands, nor whether a load was planned."""

    def finished(self, request: Any, block_ids: Any) -> None:
        """A request has ended, or was aborted."""

    def end_broke(self, request_id: str) -> None:
        """A request has ended, and its end was not taken in."""


class SchedulerSide(Side):
    """Hooks about the engine and its steps, in the scheduler's process; `requests` has those about
    one request."""

    requests: RequestSide = RequestSide()

    def connect(self, handshakes: list[HotKVHandshake]) -> None:
        """The ranks have said what they found."""

    def turn_off(self) -> None:
        """From now on this engine runs without hotkv."""

    def bind_pool(self, pool: Any) -> None:
        """vLLM's pool of blocks."""

    def build_meta(self, scheduler_output: Any) -> HotKVMetadata:
        """A step's work for the workers."""
        return HotKVMetadata()

    def plan_broke(self) -> HotKVMetadata:
        """The work of a step whose planning broke."""
        return HotKVMetadata()

    def update(self, output: Any) -> None:
        """Takes in a step's results, joined over all ranks."""

    def update_broke(self, output: Any) -> None:
        """A step's results were not all taken in."""

    def reset_cache(self) -> bool | None:
        """vLLM empties its caches; None if there is nothing to empty."""
        return None

    def reset_broke(self) -> bool:
        """A reset was not taken in. Returns whether it succeeded all the same."""
        return False

    def take_stats(self) -> HotKVStats | None:
        """Growth of the counters since the last call; None for no growth."""
        return None


class WorkerSide(Side):
    """Hooks in a rank's process. `*_broke`: what makes up for a hook that has raised."""

    def register(self, kv_caches: dict[str, Any]) -> None:
        """vLLM has made its KV caches: a tensor per layer."""

    def unregister(self) -> None:
        """vLLM is about to discard the KV memory."""

    def unregister_broke(self) -> None:
        """The memory is given up, and it is not known what still reaches it."""

    def restore(self) -> None:
        """The KV memory is there again, with other contents."""

    def memory_broke(self, why: str) -> None:
        """The memory could not be shown to the server."""

    def handshake(self) -> HotKVHandshake | None:
        """What the scheduler has to know of this rank."""
        return None

    def before_step(self, meta: HotKVMetadata) -> None:
        """A step is about to write blocks."""

    def distrust(self) -> None:
        """It is not known which blocks a step overwrites."""

    def start_loads(self, meta: HotKVMetadata) -> None:
        """Begins a step's loads."""

    def loads_broke(self, meta: HotKVMetadata) -> None:
        """Whatever was not begun of a step's loads has failed."""

    def save(self, meta: HotKVMetadata) -> None:
        """Begins a step's stores."""

    def stores_broke(self, meta: HotKVMetadata) -> None:
        """Whatever was not sent of a step's stores has failed."""

    def take_results(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended, and those of them whose load failed."""
        return set(), set()

    def take_failed_results(self) -> set[str]:
        """Requests whose load is over, all of which count as failed."""
        return set()

    def take_report(self, meta: HotKVMetadata | None) -> HotKVWorkerMetadata | None:
        """What the scheduler is to hear of this step; None for nothing."""
        return None
