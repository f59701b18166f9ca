"""Limits how many requests may hold device blocks for a load at once. Scheduler thread only."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Holder:
    """The device blocks of a request that vLLM has admitted and that has not run since.

    held: number of blocks that vLLM allocated at the admission.
    need: the greatest number of blocks that the request will hold until its prompt is computed.
    """

    held: int
    need: int


class LoadRoom:
    """Limits how many requests may hold device blocks for a load at once. Needed for models with
    sliding windows or chunked local attention, because vLLM underestimates the blocks that requests
    of such a model still need.

    The problem: vLLM lets a load begin if its blocks fit beside the blocks that all requests in
    prefill still need. In a group with a sliding window or with chunks, vLLM computes a request's
    need as a difference: the most blocks that the request ever holds at once, minus the length of
    its block table (`SingleTypeKVCacheManager.get_num_blocks_to_allocate`, vLLM 0.32 and 0.33). The
    table includes freed blocks, so the result is too small. So loads could fill the device, and
    each loaded request would then wait for blocks that other loaded requests hold: a deadlock.

    The limit: a request *holds* blocks for a load from its admission with a load by this connector
    until its first step. Always true: if two or more requests hold blocks for a load, the device
    has room for each of them to compute the rest of its prompt while the others keep their blocks.
    So the first request in vLLM's queue can run, and vLLM can preempt a running request. The need
    of a request without blocks is computed by vLLM (`comes`), which is correct in this case.

    The order: if the load of a request is refused, no request about which vLLM asks later in the
    same step begins a load. In each step vLLM asks in the order of its queue. So another request
    begins its load before a refused request only in two cases: vLLM asks about it earlier; or vLLM
    does not ask about the refused request, for example because that request's LoRA adapter has to
    wait. Scheduler thread only.

    holders: by request id, the requests that were admitted and have not run since.
    has_refused: True if the load of a request was refused in the step that vLLM is planning. Each
        step's plan sets it to False.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._max_tokens = int(vllm_config.model_config.max_model_len)
        drafts = int(vllm_config.num_speculative_tokens)
        self._ahead = drafts and 1 + drafts + int(vllm_config.num_lookahead_tokens)
        # vLLM's block manager; None if no limit is needed, because vLLM computes the needed blocks
        # of this model's requests correctly.
        self._manager: Any = None
        self._needs: dict[str, int] = {}
        self.holders: dict[str, Holder] = {}
        self.has_refused = False

    def __repr__(self) -> str:
        return f"LoadRoom({self.holders}, has_refused={self.has_refused})"

    def bind(self, manager: Any) -> None:
        """Connects this object to vLLM's block manager. From then on it limits the loads if vLLM
        underestimates the blocks that requests of this model need. Must not be called in an engine
        with residency (contexts beyond device memory), whose `ResidentManager` counts all blocks of
        a request."""
        kinds = manager.coordinator.single_type_managers
        if any(one.max_admission_blocks_per_request is not None for one in kinds):
            self._manager = manager

    def comes(self, request: Any) -> None:
        """Computes and records how many blocks the request will need. Called when vLLM asks for the
        request's hit. The request holds no blocks at this time: it is new, was preempted, or its
        load has failed."""
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
        """Returns True if the device has enough blocks for the request to begin a load beside the
        requests in `holders`, and no load was refused in this step. `comes` must have been called
        for the request."""
        others = self.holders.values()
        has_room = not others or (
            sum(one.held for one in others)
            + max(max(0, one.need - one.held) for one in others)
            + self._needs[request.request_id]
            # `num_gpu_blocks` does not count the blocks of hung loads, which `Quarantine` has
            # subtracted.
            < self._manager.block_pool.num_gpu_blocks
        )
        self.has_refused |= not has_room
        return not self.has_refused

    def admitted(self, request_id: str, blocks: Any) -> None:
        """Records that vLLM has allocated blocks to the request, possibly for a load."""
        need = self._needs.pop(request_id, None)
        if need is not None:
            held = sum(not one.is_null for group in blocks.blocks for one in group)
            self.holders[request_id] = Holder(held, need)

    def ran(self, request_ids: Collection[str]) -> None:
        """Removes the requests that a step runs from `holders`. They need no limit any more: if the
        device lacks blocks, vLLM can preempt a request that has run."""
        for request_id in self.holders.keys() & request_ids:
            del self.holders[request_id]

    def ended(self, request_id: str) -> None:
        """Forgets a request, because it has ended or holds no blocks any more."""
        self.holders.pop(request_id, None)
        self._needs.pop(request_id, None)
