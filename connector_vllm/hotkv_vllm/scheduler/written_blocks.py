"""Blocks that somebody is about to write for the first time since vLLM gave them away: what was
known of them is void, and stores that read them must end.

A step's prefill and decode show in its schedule, loads of this connector in its plan. What another
connector loads, beside this one, shows only where vLLM says that a request has its blocks. This is
the one collector of all three. Scheduler thread only.
"""

from collections.abc import Collection, Sequence
from typing import Any

from hotkv_vllm.compat import NULL_BLOCK, steps


class WrittenBlocks:
    """Collects them from one step to the next."""

    def __init__(self, tokens_per_block: Sequence[int]) -> None:
        """`tokens_per_block`: per vLLM group; 0 takes all blocks of the group."""
        self._block_tokens = tuple(tokens_per_block)
        self._matched_tokens: dict[str, int] = {}
        self._blocks: set[int] = set()
        self._scheduler_output: Any = None

    def __repr__(self) -> str:
        return f"WrittenBlocks(requests {len(self._matched_tokens)}, blocks {len(self._blocks)})"

    def matched(self, request_id: str, num_tokens: int) -> None:
        """vLLM's own prefix cache holds the first `num_tokens`."""
        self._matched_tokens[request_id] = num_tokens

    def allocated(self, request: Any, blocks: Any) -> None:
        """The request has its blocks; those behind its own prefix hit, or behind a load that has
        ended, are new to it."""
        valid_tokens = max(
            request.num_computed_tokens, self._matched_tokens.pop(request.request_id, 0)
        )
        for tokens, ids in zip(self._block_tokens, blocks.get_block_ids(), strict=True):
            self._blocks.update(ids[valid_tokens // tokens if tokens else 0 :])

    def add(self, blocks: Collection[int]) -> None:
        """These were given away, too."""
        self._blocks.update(blocks)

    def ended(self, request_id: str) -> None:
        """The request is no more."""
        self._matched_tokens.pop(request_id, None)

    def step(self, scheduler_output: Any) -> None:
        """A step is planned. What it writes is looked up only if somebody asks."""
        self._scheduler_output = scheduler_output

    def of_step(self) -> set[int]:
        """Blocks that were given away since the step before, and those that this step writes."""
        if self._scheduler_output is not None:
            self._blocks |= steps.fresh_block_ids(self._scheduler_output, self._block_tokens)
            self._scheduler_output = None
        self._blocks.discard(NULL_BLOCK)
        return self._blocks

    def take(self) -> set[int]:
        """What is known of the step by now, and begins anew: the step's workers are told."""
        taken, self._blocks, self._scheduler_output = self._blocks, set(), None
        taken.discard(NULL_BLOCK)
        return taken
