"""Collects the device blocks that vLLM has reallocated and that the next step, or a load, is about
to write. Other parts need this list for two purposes: the store that still reads such a block must
end before the block is written, and notes about the block's old contents (such as "inexact") must
be deleted. Scheduler thread only."""

from collections.abc import Collection, Sequence
from typing import Any

from hotkv_vllm.compat import NULL_BLOCK, steps


class WrittenBlocks:
    """Collects reallocated blocks for the message of the next step.

    `allocated` adds the blocks that vLLM allocates when it admits a request. Loads of this
    connector, or of another connector in a MultiConnector, may write these blocks. `step` and
    `of_step` add the reallocated blocks that a step's prefill and decode write.

    collected: ids of the blocks that were collected since the last call of `take`.
    """

    def __init__(self, tokens_per_block: Sequence[int]) -> None:
        """Begins without collected blocks.

        tokens_per_block: number of tokens of a block, per vLLM group. 0: vLLM allocates new blocks
            in the group for the tokens of a hit, so all blocks of a request in this group count as
            written.
        """
        self._block_tokens = tuple(tokens_per_block)
        self._matched_tokens: dict[str, int] = {}
        self.collected: set[int] = set()
        self._scheduler_output: Any = None

    def __repr__(self) -> str:
        return f"WrittenBlocks(requests {len(self._matched_tokens)}, blocks {len(self.collected)})"

    def matched(self, request_id: str, num_tokens: int) -> None:
        """Records the length of the request's hit in vLLM's own prefix cache. The blocks of the hit
        are not written."""
        self._matched_tokens[request_id] = num_tokens

    def allocated(self, request: Any, blocks: Any) -> None:
        """Adds the blocks that vLLM has newly allocated to the request: the blocks after its hit in
        vLLM's own prefix cache or, once its load has ended, after the loaded tokens.

        blocks: vLLM's `KVCacheBlocks` of the request.
        """
        valid_tokens = max(
            request.num_computed_tokens, self._matched_tokens.pop(request.request_id, 0)
        )
        for tokens, ids in zip(self._block_tokens, blocks.get_block_ids(), strict=True):
            self.collected.update(ids[valid_tokens // tokens if tokens else 0 :])
        self.collected.discard(NULL_BLOCK)

    def add(self, blocks: Collection[int]) -> None:
        """Adds blocks whose old content this step overwrites, such as hot slots (device blocks into
        which selected blocks are copied)."""
        self.collected.update(blocks)

    def ended(self, request_id: str) -> None:
        """Forgets a request that has ended."""
        self._matched_tokens.pop(request_id, None)

    def step(self, scheduler_output: Any) -> None:
        """Records the schedule of a step (vLLM's `SchedulerOutput`). Which blocks the step writes
        is determined only if `of_step` is called, because that takes time."""
        self._scheduler_output = scheduler_output

    def of_step(self) -> set[int]:
        """Returns the ids of all blocks that were collected since the last call of `take`. First
        adds the reallocated blocks that the step last passed to `step` is about to write."""
        if self._scheduler_output is not None:
            self.collected |= steps.fresh_block_ids(self._scheduler_output, self._block_tokens)
            self._scheduler_output = None
        return self.collected

    def take(self) -> set[int]:
        """Returns the ids of the collected blocks, for the step's message, and forgets them. If the
        blocks that the present step writes must be included, call `of_step` before."""
        taken, self.collected, self._scheduler_output = self.collected, set(), None
        return taken
