"""How many requests may hold blocks of the device for a load at once, where vLLM counts too few.

vLLM lets a load begin if its blocks fit beside those that all requests in their prompts still need.
Of a sliding window or a chunk it counts too few: it takes the request's whole table, freed blocks
among them, off the most blocks that the request ever holds at once
(`SingleTypeKVCacheManager.get_num_blocks_to_allocate`, vLLM 0.32 and 0.33). So loads can fill the
device, and then each loaded request waits for blocks that the others hold: nothing runs any more.

Always true, of the requests that this connector loads, from their admission to their first step:
either there is only one, or the device has room for each of them to end its prompt while the others
keep their blocks. So the first in vLLM's queue can run, and vLLM can take back the blocks of a
request that runs. vLLM's own count is right for a request without blocks, and is used for it.

A request that was refused begins next: requests that came later wait behind it. Scheduler thread
only.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from hotkv_vllm.compat.residency import ResidentManager


@dataclass(slots=True)
class Holder:
    """Blocks of a request that was admitted: those it holds, and the most it will hold until its
    prompt is through."""

    held: int
    need: int


class LoadRoom:
    """See the module. `holders`: the requests that were admitted and have not run since."""

    def __init__(self, vllm_config: Any) -> None:
        self._max_tokens = int(vllm_config.model_config.max_model_len)
        drafts = int(vllm_config.num_speculative_tokens)
        self._ahead = drafts and 1 + drafts + int(vllm_config.num_lookahead_tokens)
        # None where vLLM counts right.
        self._manager: Any = None
        self._needs: dict[str, int] = {}
        self._next = ""
        self.holders: dict[str, Holder] = {}

    def __repr__(self) -> str:
        return f"LoadRoom({self.holders}, next {self._next!r})"

    def bind(self, manager: Any) -> None:
        """Takes vLLM's manager of blocks. A resident request is counted in full by its own."""
        kinds = manager.coordinator.single_type_managers
        if not any(isinstance(one, ResidentManager) for one in kinds) and any(
            one.max_admission_blocks_per_request is not None for one in kinds
        ):
            self._manager = manager

    def comes(self, request: Any) -> None:
        """vLLM asks for a request, which has no blocks: it is new, was preempted, or its load has
        failed."""
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

    def has_room(self, request_id: str) -> bool:
        """Whether the request that has come may begin a load beside the others."""
        if self._next not in ("", request_id):
            return False
        others = self.holders.values()
        has_room = not others or (
            sum(one.held for one in others)
            + max(max(0, one.need - one.held) for one in others)
            + self._needs[request_id]
            # Blocks of loads that hang are not among them.
            < self._manager.block_pool.num_gpu_blocks
        )
        self._next = "" if has_room else request_id
        return has_room

    def admitted(self, request_id: str, blocks: Any) -> None:
        """vLLM has given the request blocks; it may be for a load."""
        need = self._needs.pop(request_id, None)
        if need is not None:
            held = sum(not one.is_null for group in blocks.blocks for one in group)
            self.holders[request_id] = Holder(held, need)

    def ran(self, request_ids: Collection[str]) -> None:
        """A step runs these requests. vLLM takes blocks from those that run if others lack them."""
        for request_id in self.holders.keys() & request_ids:
            del self.holders[request_id]

    def ended(self, request_id: str) -> None:
        """The request has no blocks any more, or is gone."""
        self.holders.pop(request_id, None)
        self._needs.pop(request_id, None)
        if self._next == request_id:
            self._next = ""
