"""Collects the blocks that are about to be written for the first time since vLLM reallocated them.
Everything noted about such blocks is void, and stores that read them must end.

Scheduler thread only.
"""

from collections.abc import Collection, Sequence
from typing import Any

from hotkv_vllm.compat import NULL_BLOCK, steps


class WrittenBlocks:
    """Collects the blocks from one step to the next.

    There are three sources. A step's prefill and decode appear in its schedule, and loads of this
    connector in its plan. Loads of another connector beside this one only appear when vLLM says
    that a request has its blocks.
    """

    def __init__(self, tokens_per_block: Sequence[int]) -> None:
        """tokens_per_block: tokens of a block, per vLLM group. 0: all blocks of the group count as
        written."""
        self._block_tokens = tuple(tokens_per_block)
        self._matched_tokens: dict[str, int] = {}
        self._blocks: set[int] = set()
        self._scheduler_output: Any = None

    def __repr__(self) -> str:
        return f"WrittenBlocks(requests {len(self._matched_tokens)}, blocks {len(self._blocks)})"

    def matched(self, request_id: str, num_tokens: int) -> None:
        """Records that vLLM's own prefix cache holds the first `num_tokens` of the request."""
        self._matched_tokens[request_id] = num_tokens

    def allocated(self, request: Any, blocks: Any) -> None:
        """Adds the blocks that vLLM has newly allocated to the request: those after its hit in
        vLLM's own prefix cache, or, when its load has ended, those after the loaded blocks."""
        valid_tokens = max(
            request.num_computed_tokens, self._matched_tokens.pop(request.request_id, 0)
        )
        for tokens, ids in zip(self._block_tokens, blocks.get_block_ids(), strict=True):
            self._blocks.update(ids[valid_tokens // tokens if tokens else 0 :])

    def add(self, blocks: Collection[int]) -> None:
        """Adds further reallocated blocks."""
        self._blocks.update(blocks)

    def ended(self, request_id: str) -> None:
        """Forgets the request."""
        self._matched_tokens.pop(request_id, None)

    def step(self, scheduler_output: Any) -> None:
        """Records the schedule of a step. The blocks that the step writes are computed only if
        `of_step` is called."""
        self._scheduler_output = scheduler_output

    def of_step(self) -> set[int]:
        """Returns blocks reallocated since the step before, and blocks that this step writes."""
        if self._scheduler_output is not None:
            self._blocks |= steps.fresh_block_ids(self._scheduler_output, self._block_tokens)
            self._scheduler_output = None
        self._blocks.discard(NULL_BLOCK)
        return self._blocks

    def take(self) -> set[int]:
        """Returns the blocks collected for the step and starts over: the step's workers receive
        them."""
        taken, self._blocks, self._scheduler_output = self._blocks, set(), None
        taken.discard(NULL_BLOCK)
        return taken
