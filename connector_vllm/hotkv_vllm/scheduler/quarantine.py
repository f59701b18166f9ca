"""Blocks of hung loads, kept out of vLLM's pool until the server can't write them any more.
Scheduler thread only.

A hung server may write the blocks of a load at any later time, so nobody else may get them; but the
request need not wait. What is always true: when a worker may report such a load as failed (it reads
of it in `held`), the pool counts one more user of its blocks. So they stay out of the pool after
vLLM has freed the request's own, and return to it when all ranks say, in one step, that their
transfer is over. Meanwhile the pool is smaller by them: vLLM resets its prefix cache only if no
block is in use, and a pause or a sleep would fail. The sides send each other states, anew in each
step, so that a lost message costs a step and nothing else.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hotkv_vllm import link
from hotkv_vllm.metadata import LoadJob

logger = link.logger


@dataclass(frozen=True, slots=True)
class _Load:
    """A load in flight and vLLM's block objects that it writes."""

    transfer_id: str
    blocks: tuple[Any, ...]


class Quarantine:
    """See the module. `pool` is vLLM's; without one nothing is kept back, and requests wait for
    the server.

    `loading`, by request: loads that vLLM has not heard the end of; whoever tells it of an end
    takes them out.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.loading: dict[str, _Load] = {}
        self._held: dict[str, tuple[Any, ...]] = {}
        self.pool: Any = None

    def __repr__(self) -> str:
        return (
            f"Quarantine({len(self.loading)} loading, {self.num_blocks} blocks of "
            f"{len(self._held)} loads held)"
        )

    @property
    def held(self) -> tuple[str, ...]:
        """Transfers whose blocks are held back."""
        return tuple(self._held)

    @property
    def num_blocks(self) -> int:
        return sum(len(blocks) for blocks in self._held.values())

    def begun(self, job: LoadJob, blocks: Any) -> None:
        """`blocks`: vLLM's `KVCacheBlocks` of the request."""
        written = {block for run in job.runs for block in run.block_ids.tolist()}
        mine = {
            block.block_id: block
            for group in blocks.blocks
            for block in group
            if block.block_id in written
        }
        self.loading[job.request_id] = _Load(job.transfer_id, tuple(mine.values()))

    def overdue(self, transfer_ids: Iterable[str]) -> int:
        """Holds the blocks of these transfers; returns how many transfers are new among them."""
        if self.pool is None:
            return 0
        wanted = set(transfer_ids) - self._held.keys()
        num_new = 0
        for request_id, load in self.loading.items():
            if load.transfer_id in wanted:
                self._held[load.transfer_id] = load.blocks
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

    def settled(self, num_ranks_of: Mapping[str, int]) -> None:
        """How many ranks can't be written any more, by transfer."""
        for transfer_id, num_ranks in num_ranks_of.items():
            if num_ranks >= self._num_ranks and transfer_id in self._held:
                blocks = self._held.pop(transfer_id)
                self.pool.free_blocks(blocks)
                self.pool.num_gpu_blocks += len(blocks)
