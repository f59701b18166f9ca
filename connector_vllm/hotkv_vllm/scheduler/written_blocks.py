"""Reallocated device blocks that the next step, or a load, is about to write. Stores that read
them must end before, and notes about their old contents are deleted."""

from collections.abc import Collection, Sequence
from typing import Any

from hotkv_vllm.compat import NULL_BLOCK, steps


class WrittenBlocks:
    """`allocated` adds what vLLM allocates at an admission, which loads of any connector may
    write; `step` and `of_step` add what a step's prefill and decode write."""

    def __init__(self, tokens_per_block: Sequence[int]) -> None:
        """tokens_per_block: per vLLM group. 0: vLLM allocates new blocks for the tokens of a
        hit, so all of a request's blocks count as written."""
        self._block_tokens = tuple(tokens_per_block)
        self._matched_tokens: dict[str, int] = {}
        self.collected: set[int] = set()
        self._scheduler_output: Any = None

    def __repr__(self) -> str:
        return f"WrittenBlocks(requests {len(self._matched_tokens)}, blocks {len(self.collected)})"

    def matched(self, request_id: str, num_tokens: int) -> None:
        """The blocks of a hit in vLLM's own prefix cache are not written."""
        self._matched_tokens[request_id] = num_tokens

    def allocated(self, request: Any, blocks: Any) -> None:
        """Adds the blocks after the request's hit in vLLM's own prefix cache or, once its load
        has ended, after the loaded tokens."""
        valid_tokens = max(
            request.num_computed_tokens, self._matched_tokens.pop(request.request_id, 0)
        )
        for tokens, ids in zip(self._block_tokens, blocks.get_block_ids(), strict=True):
            self.collected.update(ids[valid_tokens // tokens if tokens else 0 :])
        self.collected.discard(NULL_BLOCK)

    def add(self, blocks: Collection[int]) -> None:
        self.collected.update(blocks)

    def ended(self, request_id: str) -> None:
        self._matched_tokens.pop(request_id, None)

    def step(self, scheduler_output: Any) -> None:
        """Which blocks the step writes is determined only by `of_step`, because that takes time."""
        self._scheduler_output = scheduler_output

    def of_step(self) -> set[int]:
        """With those of the present step."""
        if self._scheduler_output is not None:
            self.collected |= steps.fresh_block_ids(self._scheduler_output, self._block_tokens)
            self._scheduler_output = None
        return self.collected

    def take(self) -> set[int]:
        """Those of the present step only after `of_step`."""
        taken, self.collected, self._scheduler_output = self.collected, set(), None
        return taken
