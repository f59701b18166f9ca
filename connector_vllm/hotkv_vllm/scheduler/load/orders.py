"""Which loads are in progress, and how they end."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hotkv_vllm.link import logger
from hotkv_vllm.metadata import LoadJob

# ---------------------------------------------------------------------------- orders to the workers


class LoadOrders:
    """Orders for the next step, and the loads whose end vLLM awaits.

    The workers get an order to begin each of these or to report it as failed; its end is handled
    once. Fallbacks use the attributes directly, because a method of this class may be what raised.

    jobs: to begin, by request id.
    abandoned: requests whose load was never begun, to report as failed.
    awaited: requests that wait in vLLM for their load's end.
    """

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

    def begin(self, job: LoadJob, blocks: Any) -> None:
        self.quarantine.begun(job, blocks)
        self.jobs[job.request_id] = job
        self.awaited.add(job.request_id)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def abandon(self, request_id: str) -> None:
        """Before the workers begin the load."""
        self.jobs.pop(request_id, None)
        self.abandoned.append(request_id)
        self.quarantine.loading.pop(request_id, None)
        self.awaited.add(request_id)

    def ended(self, request_ids: Iterable[str]) -> Iterator[str]:
        for request_id in request_ids:
            if request_id in self.awaited:
                self.awaited.discard(request_id)
                self.quarantine.loading.pop(request_id, None)
                yield request_id

    def take(self) -> tuple[tuple[LoadJob, ...], tuple[str, ...], tuple[str, ...]]:
        """The loads to begin, and the request ids to cancel and to report as failed."""
        taken = tuple(self.jobs.values()), tuple(self.cancelled), tuple(self.abandoned)
        self.jobs = {}
        self.cancelled = []
        self.abandoned = []
        return taken


# ----------------------------------------------------------------------------- blocks of hung loads


@dataclass(frozen=True, slots=True)
class _Load:
    transfer_id: str
    blocks: tuple[Any, ...]


class Quarantine:
    """Keeps the blocks of hung loads out of vLLM's pool; the load's own request goes on in others.

    The scheduler takes a reference to the blocks before a worker may report the load as failed:
    workers wait until a message lists it in `held`. The blocks return when all ranks report in one
    step that the server can't write to them. Both are repeated in every step, so a lost message
    costs one.

    Meanwhile the pool's `num_gpu_blocks` is smaller by them: vLLM resets its prefix cache, as a
    pause or a sleep needs, only if no block is in use.

    pool: None: no block is held, and a request whose load hangs waits for the server.
    loading: by request, the loads whose end vLLM does not know.
    kept: vLLM's objects for the withheld blocks, by transfer id.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.loading: dict[str, _Load] = {}
        self.kept: dict[str, tuple[Any, ...]] = {}
        self.pool: Any = None

    def __repr__(self) -> str:
        return (
            f"Quarantine({len(self.loading)} loading, {self.num_blocks} blocks of "
            f"{len(self.kept)} loads held)"
        )

    @property
    def held(self) -> tuple[str, ...]:
        return tuple(self.kept)

    @property
    def num_blocks(self) -> int:
        return sum(len(blocks) for blocks in self.kept.values())

    def begun(self, job: LoadJob, blocks: Any) -> None:
        """blocks: vLLM's `KVCacheBlocks`."""
        written = {block for run in job.runs for block in run.block_ids.tolist()}
        mine = {
            block.block_id: block
            for group in blocks.blocks
            for block in group
            if block.block_id in written
        }
        self.loading[job.request_id] = _Load(job.transfer_id, tuple(mine.values()))

    def overdue(self, transfer_ids: Iterable[str]) -> int:
        """Withholds the blocks of hung loads. Number of loads not withheld before."""
        if self.pool is None:
            return 0
        wanted = set(transfer_ids) - self.kept.keys()
        num_new = 0
        for request_id, load in self.loading.items():
            if load.transfer_id in wanted:
                self.kept[load.transfer_id] = load.blocks
                self.pool.touch(load.blocks)
                self.pool.num_gpu_blocks -= len(load.blocks)
                num_new += 1
                logger.warning(
                    "hotkv: the server does not end the load of request %s; the request goes on "
                    "without it, and %d blocks are out of use "
                    "until the server answers or is stopped",
                    request_id,
                    len(load.blocks),
                )
        return num_new

    def settled(self, ranks_of: Mapping[str, Collection[int]]) -> None:
        """ranks_of: by transfer id, the ranks to whose memory it can't write any more."""
        for transfer_id, ranks in ranks_of.items():
            if len(ranks) >= self._num_ranks and transfer_id in self.kept:
                blocks = self.kept.pop(transfer_id)
                self.pool.free_blocks(blocks)
                self.pool.num_gpu_blocks += len(blocks)
