"""Limits how many requests may hold device blocks for a load at once."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Holder:
    """A request that was admitted and has not run since.

    held: blocks allocated at the admission.
    need: most that it will hold until its prompt is computed.
    """

    held: int
    need: int


class LoadRoom:
    """Prevents a deadlock of loads in models with sliding windows or chunked local attention.

    vLLM begins a load if its blocks fit beside those that requests in prefill still need. In such a
    group it takes the most blocks that a request ever holds, less the length of its block table,
    which includes freed blocks (`SingleTypeKVCacheManager.get_num_blocks_to_allocate`, vLLM 0.32
    and 0.33). So loads could fill the device, each request waiting for blocks that others hold.

    A request *holds* blocks from its admission with a load until its first step. If several do, the
    device has room for each to compute the rest of its prompt while the others keep theirs: the
    first in vLLM's queue can run, and vLLM can preempt it.

    After a refusal no later request of the step begins a load. So a request is overtaken only by
    those about which vLLM asks earlier, or while vLLM does not ask about it.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._max_tokens = int(vllm_config.model_config.max_model_len)
        drafts = int(vllm_config.num_speculative_tokens)
        self._ahead = drafts and 1 + drafts + int(vllm_config.num_lookahead_tokens)
        # None if vLLM's figures are right for this model.
        self._manager: Any = None
        self._needs: dict[str, int] = {}
        self.holders: dict[str, Holder] = {}
        self.has_refused = False

    def __repr__(self) -> str:
        return f"LoadRoom({self.holders}, has_refused={self.has_refused})"

    def bind(self, manager: Any) -> None:
        """Begins to limit loads if vLLM's figures are wrong. Not with a companion that
        frees blocks, which counts them all."""
        kinds = manager.coordinator.single_type_managers
        if any(one.max_admission_blocks_per_request is not None for one in kinds):
            self._manager = manager

    def comes(self, request: Any) -> None:
        """A request holds no blocks when vLLM asks for its hit (new, preempted, or its load
        failed): then vLLM's figure of its need is right."""
        self.ended(request.request_id)
        if self._manager is None:
            return
        coordinator = self._manager.coordinator
        num_tokens = min(request.num_tokens, self._max_tokens)
        self._needs[request.request_id] = coordinator.get_num_blocks_to_allocate(
            request.request_id,
            min(num_tokens + self._ahead, self._max_tokens),
            tuple(() for _ in coordinator.single_type_managers),
            0,
            0,
            0,
            num_tokens,
            apply_admission_cap=True,
        )

    def has_room(self, request: Any) -> bool:
        """Whether the request may begin a load. After `comes`."""
        others = self.holders.values()
        has_room = not others or (
            sum(one.held for one in others)
            + max(max(0, one.need - one.held) for one in others)
            + self._needs[request.request_id]
            # `Quarantine` has subtracted the blocks of hung loads.
            < self._manager.block_pool.num_gpu_blocks
        )
        self.has_refused |= not has_room
        return not self.has_refused

    def admitted(self, request_id: str, blocks: Any) -> None:
        need = self._needs.pop(request_id, None)
        if need is not None:
            held = sum(not one.is_null for group in blocks.blocks for one in group)
            self.holders[request_id] = Holder(held, need)

    def ran(self, request_ids: Collection[str]) -> None:
        """A request that has run needs no limit: vLLM can preempt it."""
        for request_id in self.holders.keys() & request_ids:
            del self.holders[request_id]

    def ended(self, request_id: str) -> None:
        self.holders.pop(request_id, None)
        self._needs.pop(request_id, None)
