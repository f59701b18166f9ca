"""Blocks that vLLM gives to requests. Whoever fills them, they are about to be written, and what
was known of them is void.

A step's prefill and decode show in its schedule, loads of this connector in its plan. What another
connector loads, beside this one, shows nowhere else. Scheduler thread only.
"""

from collections.abc import Sequence
from typing import Any

from hotkv_vllm.compat import NULL_BLOCK


class Allocations:
    """Collects them from one step to the next."""

    def __init__(self, tokens_per_block: Sequence[int]) -> None:
        """`tokens_per_block`: per vLLM group; 0 takes all blocks of the group."""
        self._block_tokens = tuple(tokens_per_block)
        self._matched_tokens: dict[str, int] = {}
        self._blocks: set[int] = set()

    def __repr__(self) -> str:
        return f"Allocations(requests {len(self._matched_tokens)}, blocks {len(self._blocks)})"

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

    def ended(self, request_id: str) -> None:
        """The request is no more."""
        self._matched_tokens.pop(request_id, None)

    def take(self) -> set[int]:
        """Blocks allocated since the last call."""
        taken, self._blocks = self._blocks, set()
        taken.discard(NULL_BLOCK)
        return taken
