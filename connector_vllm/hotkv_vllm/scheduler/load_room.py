"""How many requests may hold blocks of the device for a load at once, where vLLM counts too few.

vLLM lets a load begin if its blocks fit beside those that all requests in their prompts still need.
Of a sliding window or a chunk it counts too few: it takes the request's whole table, freed blocks
among them, off the most blocks that the request ever holds at once
(`SingleTypeKVCacheManager.get_num_blocks_to_allocate`, vLLM 0.32 and 0.33). So loads can fill the
device, and then each loaded request waits for blocks that the others hold: nothing runs any more.

What is always true: one request alone was admitted and has not run since, or all those together
find room for what they need until their prompts are through. Then one can run, whatever the others
hold. Scheduler thread only.
"""

from collections.abc import Collection
from typing import Any


class LoadRoom:
    """Requests that were admitted and have not run since; `needs`: the blocks that each needs."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._num_blocks = int(kv_cache_config.num_blocks) - 1
        self._max_tokens = int(vllm_config.model_config.max_model_len)
        drafts = int(vllm_config.num_speculative_tokens)
        self._ahead = drafts and 1 + drafts + int(vllm_config.num_lookahead_tokens)
        self._groups: list[tuple[int, int]] = []
        """Tokens of a block, and most blocks at once; empty where vLLM counts right."""
        self.needs: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"LoadRoom({self.needs}, {self._num_blocks} blocks)"

    def bind(self, manager: Any) -> None:
        """Takes vLLM's manager of blocks."""
        most = [
            (one.block_size, one.max_admission_blocks_per_request)
            for one in manager.coordinator.single_type_managers
        ]
        if any(blocks is not None for _, blocks in most):
            self._groups = [
                (size, self._num_blocks if blocks is None else blocks) for size, blocks in most
            ]

    def has_room(self, request: Any) -> bool:
        """Whether the request may begin a load beside the others."""
        others = sum(self.needs.values())
        return not others or others + self._need(request) <= self._num_blocks

    def admitted(self, request: Any) -> None:
        """vLLM has given the request blocks; it may be for a load."""
        if self._groups:
            self.needs[request.request_id] = self._need(request)

    def ran(self, request_ids: Collection[str]) -> None:
        """A step runs these requests. vLLM takes blocks from those that run if others lack them."""
        for request_id in self.needs.keys() & request_ids:
            del self.needs[request_id]

    def ended(self, request_id: str) -> None:
        """The request has no blocks any more."""
        self.needs.pop(request_id, None)

    def _need(self, request: Any) -> int:
        """Blocks that the request holds at most until its prompt is through."""
        tokens = min(request.num_tokens + self._ahead, self._max_tokens)
        return sum(min(-(-tokens // size), most) for size, most in self._groups)
