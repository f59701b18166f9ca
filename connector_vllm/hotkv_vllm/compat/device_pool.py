"""The pool of a resident engine as the scheduler side sees it: what requests hold, and how one is
lost or fails.

Uses, of vLLM 0.32: what `residency.ResidentManager` holds, `Scheduler.requests` and
`encoder_cache_mismatch_reqs`, and of `Request` what says how much output is in flight.
"""

import sys
from collections.abc import Callable, Set
from types import FrameType
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from hotkv_vllm import link
from hotkv_vllm.compat.residency import ResidentManager, resident_spec

logger = link.logger


class DevicePool:
    """The engine's pool as the scheduler side sees it, once vLLM has made it (`bind`). `spec`: None
    for an engine that is not resident."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self.spec = resident_spec(kv_cache_config)
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        self._num_blocks = int(kv_cache_config.num_blocks) - 1
        self._manager: ResidentManager | None = None
        self._scheduler: Any = None

    def __repr__(self) -> str:
        return f"DevicePool({self._num_blocks} blocks, {self.spec})"

    def bind(
        self,
        kv_cache_manager: Any,
        stored_tokens: Callable[[str], int],
        has_room: Callable[[str], bool],
    ) -> None:
        """Called by vLLM's scheduler as it is made. `stored_tokens`: leading tokens of a request
        that need not stay on the device. `has_room`: whether one that outgrows it may begin."""
        self._scheduler = _scheduler_of_caller()
        managers = kv_cache_manager.coordinator.single_type_managers
        found = next((one for one in managers if isinstance(one, ResidentManager)), None)
        if found is not None:
            found.stored_tokens, found.has_room = stored_tokens, has_room
            self._manager = found

    def describe(self) -> str:
        """What a request holds on the device, and how many fit, for the log."""
        assert self.spec is not None
        held = self.spec.device_blocks(self.max_model_len)
        size = held * self.spec.page_size_bytes / 2**20
        return (
            f"the whole KV cache is in host memory; a request of up to {self.max_model_len} tokens "
            f"holds at most {held} of the device's {self._num_blocks} blocks ({size:.1f} MiB a "
            f"layer, {self.spec.hot_blocks} of them hot slots), so {self._num_blocks // held} of "
            "them decode at a time"
        )

    def longest(self, request: Any) -> int:
        """Most tokens that a request can come to."""
        return min(int(request.num_prompt_tokens + request.max_tokens), self.max_model_len)

    def holds_whole(self, request: Any) -> bool:
        """Whether a request stays on the device as a whole, as long as it may grow."""
        spec = self.spec
        return spec is None or -(-self.longest(request) // spec.block_size) <= spec.whole_blocks

    def left_out(self, hit_tokens: int) -> range:
        """Blocks of a hit that need not come to the device, if the server keeps them all for the
        request. As `ResidentManager` has it."""
        spec = self.spec
        return range(0) if spec is None else spec.gap(hit_tokens)

    def hot_blocks(self, request_id: str) -> tuple[int, ...]:
        """Ids of the request's hot slots."""
        return () if self._manager is None else self._manager.hot_ids.get(request_id, ())

    def has_blocks(self, request_id: str) -> bool:
        """Whether the request has blocks of the device."""
        return self._manager is not None and request_id in self._manager.req_to_blocks

    def num_freed(self, request_id: str) -> int:
        """Blocks of the request from the sinks up to here were given back."""
        return 0 if self._manager is None else self._manager.freed_blocks.get(request_id, 0)

    def has_away(self, request_id: str) -> bool:
        """Whether blocks of the request are in host memory only."""
        return self.spec is not None and self.num_freed(request_id) > self.spec.sink_blocks

    @property
    def has_lost(self) -> bool:
        """Whether vLLM is still to preempt a request that was lost."""
        return self._manager is not None and bool(self._manager.lost)

    def lose(self, request_id: str) -> None:
        """Makes vLLM preempt the request before it gets another block, and drop what steps in
        flight answer for it."""
        if self._manager is not None and request_id in self._manager.req_to_blocks:
            self._manager.lost.add(request_id)
        request = None if self._scheduler is None else self._scheduler.requests.get(request_id)
        if request is not None:
            request.drop_stale_output = True
            request.num_stale_output_tokens = request.num_in_flight_tokens

    def lose_blocks(self, first_blocks: Set[int]) -> None:
        """The same for the requests that have one of these blocks. Shares nothing with `lose`."""
        if self._manager is not None:
            for request_id, blocks in self._manager.req_to_blocks.items():
                if not first_blocks.isdisjoint(block.block_id for block in blocks):
                    self._manager.lost.add(request_id)
                    request = self._scheduler.requests.get(request_id)
                    request.drop_stale_output = True
                    request.num_stale_output_tokens = request.num_in_flight_tokens

    def fail(self, request_id: str, why: str) -> None:
        """Makes vLLM end the request with an error. Its scheduler has one list of requests to end
        so with the next output, whatever made them fail."""
        logger.error("hotkv: request %s ends with an error: %s", request_id, why)
        if self._scheduler is not None:
            self._scheduler.encoder_cache_mismatch_reqs.add(request_id)

    def requests_of(self, blocks: Set[int]) -> list[str]:
        """The requests that have one of these blocks. Beside the one that was meant, when its step
        was planned, that is whoever has been given the block since; vLLM sets both back."""
        tables = {} if self._manager is None else self._manager.req_to_blocks
        return [
            request_id
            for request_id, table in tables.items()
            if not blocks.isdisjoint(block.block_id for block in table)
        ]


def _scheduler_of_caller() -> Any:
    """vLLM's scheduler, which calls `bind_kv_cache_manager` as it is made and is shown to no
    connector; None without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and isinstance(owner, Scheduler):
            return owner
        frame = frame.f_back
    return None
