"""The scheduler side's access to the block manager of residency: which device blocks requests hold,
and how to move, preempt or fail a request."""

import sys
import time
from collections.abc import Callable, Collection, Mapping, Set
from itertools import islice
from types import FrameType
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from hotkv_sparse.vllm.block_manager import (
    AwaitedRequest,
    ResidentManager,
    beside_groups,
    resident_group,
    resident_spec,
)
from hotkv_sparse.vllm.scheduler.moves import BlockDemand, Relief
from hotkv_vllm.link import logger


class DevicePool:
    """Without residency its methods do nothing: every request stays on the device. Usable after
    `bind`.

    spec: None without residency.
    group: vLLM's number of the group of residency.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self.spec = resident_spec(kv_cache_config)
        self.group = resident_group(kv_cache_config) or 0
        self._beside = () if self.spec is None else beside_groups(vllm_config, kv_cache_config)
        self.max_model_len = int(vllm_config.model_config.max_model_len)
        self._num_blocks = int(kv_cache_config.num_blocks) - 1
        self._manager: ResidentManager | None = None
        self._scheduler: Any = None
        self._watermark_blocks = 0

    def __repr__(self) -> str:
        return f"DevicePool({self._num_blocks} blocks, {self.spec})"

    def bind(
        self,
        kv_cache_manager: Any,
        stored_tokens: Callable[[str], int],
        exact_tokens: Callable[[Any], int],
        has_room: Callable[[str], bool],
        step_starts: Callable[[], None],
    ) -> None:
        """Call while the constructor of vLLM's scheduler, found on the call stack, binds its
        block manager to the connector. The functions as in `ResidentManager`."""
        self._scheduler = _scheduler_of_caller()
        managers = kv_cache_manager.coordinator.single_type_managers
        found = next((one for one in managers if isinstance(one, ResidentManager)), None)
        if found is not None:
            found.stored_tokens = stored_tokens
            found.exact_tokens = exact_tokens
            found.has_room = has_room
            found.step_starts = step_starts
            found.find_hit = kv_cache_manager.coordinator.find_longest_cache_hit
            found.accompany([(group, managers[group.index]) for group in self._beside])
            self._manager = found
            self._watermark_blocks = int(kv_cache_manager.watermark_blocks)
            scheduler = self._scheduler
            if scheduler is not None and self._beside:
                scheduler._handle_invalid_blocks = self._handle_invalid_blocks
            if scheduler is not None and scheduler.vllm_config.max_concurrent_batches > 1:
                # vLLM counts steps (`planned_step`) only with this flag, and sets it itself
                # unless `kv_role` is `kv_producer`.
                scheduler.defer_block_free = True

    def _handle_invalid_blocks(
        self, invalid_block_ids: Set[int], num_scheduled_tokens: Mapping[str, int]
    ) -> set[str]:
        """In place of vLLM's, which raises with several KV cache groups, since ids might be of one
        only; here all share a pool. Returns requests whose output of the step must not be used."""
        lost = set(self.requests_of(invalid_block_ids)).intersection(num_scheduled_tokens)
        for request_id in lost:
            self._scheduler.requests[request_id].num_computed_tokens = 0
        return lost

    def leave_out(self, held: Collection[str]) -> None:
        """Leaves `held` out of the step about to be planned. Preempts running requests that have
        lost blocks, before vLLM preempts others to make room for them."""
        scheduler = self._scheduler
        if scheduler is None or self._manager is None:
            return
        for request_id in held:
            request = scheduler.requests.get(request_id)
            if request is not None:
                eligible = max(request.next_decode_eligible_step, scheduler.current_step + 1)
                request.next_decode_eligible_step = eligible
        for request_id in [*self._manager.lost]:
            request = scheduler.requests.get(request_id)
            if request in scheduler.running:
                # If the preemption raises, the request is still in a queue; in none it would
                # never end.
                scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
                scheduler.running.remove(request)

    def was_preempted(self, request_id: str) -> bool:
        """By `leave_out` or `Scheduler.reset_prefix_cache` since the last planned step. The step
        planned now must not resume it: its message tells workers of the preemption."""
        scheduler = None if self.spec is None else self._scheduler
        return scheduler is not None and request_id in scheduler.reset_preempted_req_ids

    def heed_wait(self, request: Any, waits: bool) -> bool:
        """Makes vLLM 0.32 heed 'ask again' about a request that must not read the prefix cache, as
        with prompt logprobs, which it would admit before its time, or none behind it. Returns
        whether the request waits.

        So `skip_reading_prefix_cache` is False meanwhile. Before such a request begins it waits for
        one more step, in which vLLM reads no hit, and does not ask.
        """
        if self.spec is None or not request.get_skip_reading_prefix_cache():
            return waits
        has_read = not request.skip_reading_prefix_cache
        request.skip_reading_prefix_cache = not waits
        return waits or has_read

    def describe(self) -> str:
        assert self.spec is not None
        held = self.spec.device_blocks(self.max_model_len) + self._num_beside(self.max_model_len)
        size = held * self.spec.page_size_bytes / 2**20
        where = "the whole KV cache is in host memory"
        if self.spec.begins_whole:
            where = "contexts move to host memory once the device lacks room; then"
        return (
            f"{where}; a request of up to {self.max_model_len} tokens holds at most {held} of the "
            f"device's {self._num_blocks} blocks ({size:.1f} MiB a layer, {self.spec.hot_blocks} "
            f"of them hot slots), so {self._num_blocks // held} of them decode at a time"
        )

    def longest(self, request: Any) -> int:
        return min(int(request.num_prompt_tokens + request.max_tokens), self.max_model_len)

    def holds_whole(self, request: Any) -> bool:
        spec = self.spec
        return spec is None or -(-self.longest(request) // spec.block_size) <= spec.whole_blocks

    def left_out(self, hit_tokens: int) -> range:
        """Blocks of a hit that are neither leased nor loaded, as `ResidentManager._gap` returns.

        Empty with `residency = "auto"`: `ResidentManager` decides at the allocation, so all are
        leased.
        """
        spec = self.spec
        return range(0) if spec is None or spec.begins_whole else spec.gap(hit_tokens)

    # ------------------------------------------------------------------- requests that may be whole

    def begin_whole(self, request_id: str, is_meant: bool) -> None:
        """Decides whether a request without blocks begins wholly on the device, although
        `residency` is `host` or it was moved before."""
        manager = self._manager
        if manager is None or self.has_blocks(request_id):
            return
        if is_meant:
            manager.whole.add(request_id)
            manager.moved.discard(request_id)
        else:
            manager.whole.discard(request_id)

    def begins_alone(self, request_id: str) -> bool:
        """Begins wholly on the device only because of `begin_whole`."""
        return self._manager is not None and request_id in self._manager.whole

    def could_be_whole(self, request: Any) -> bool:
        spec, tokens = self.spec, int(request.num_tokens)
        if spec is None:
            return False
        return -(-tokens // spec.block_size) + self._num_beside(tokens) <= self._num_blocks

    def _num_beside(self, num_tokens: int) -> int:
        return sum(group.blocks(num_tokens) for group in self._beside)

    def stays_whole(self, request: Any) -> bool:
        """All its present blocks may stay on the device, although it may outgrow it later."""
        return not self.is_moved(request.request_id) and self.could_be_whole(request)

    def is_moved(self, request_id: str) -> bool:
        """Its old blocks may leave the device."""
        manager, spec = self._manager, self.spec
        if manager is None:
            return spec is None or not spec.begins_whole
        return request_id in manager.moved or not manager.begins_whole(request_id)

    def has_room_for(self, request: Any, device_tokens: int) -> bool:
        """A new request whose blocks must be loaded can begin wholly on the device now.
        `device_tokens`: of its hit there, with which it surely can."""
        spec, manager = self.spec, self._manager
        if spec is None or manager is None or not self.stays_whole(request):
            return False
        room = manager.room_for(request.request_id, loads=True)
        tokens = int(request.num_tokens)
        needed = -(-tokens // spec.block_size) + self._num_beside(tokens)
        return device_tokens > 0 or needed <= room

    def demand(self, has_room: Callable[[str], bool]) -> BlockDemand | None:
        """What the coming step needs and the pool has. None if it surely has enough, or no
        request begins whole."""
        spec, manager, scheduler = self.spec, self._manager, self._scheduler
        if spec is None or manager is None or scheduler is None:
            return None
        if not (spec.begins_whole or manager.whole):
            return None
        free = manager.block_pool.get_num_free_blocks()
        budget = int(scheduler.max_num_scheduled_tokens)
        num_more = max(0, scheduler.max_num_active_reqs - len(scheduler.running))
        manager.awaited = {
            request.request_id: AwaitedRequest(
                -(-int(request.num_tokens) // spec.block_size),
                self._num_beside(int(request.num_tokens)),
                request.block_hashes,
            )
            for request in islice(scheduler.waiting, num_more)
        }
        is_awaited = scheduler.waiting or scheduler.kv_holding_waiting
        num_groups = 1 + len(self._beside)
        most = num_groups * (budget // spec.block_size + 1 + len(scheduler.running))
        most += spec.hot_blocks * manager.num_without_hot
        if not is_awaited and free >= most:
            return None
        running = 0
        for request in scheduler.running:
            done = request.num_computed_tokens
            wanted = request.num_tokens_with_spec + request.num_output_placeholders - done
            new = max(0, min(int(wanted), budget))
            budget -= new
            running += manager.needs(request.request_id, done + new)
        first = self._first_needs(has_room)
        return BlockDemand(free, manager.promised_blocks, running, first)

    def _first_needs(self, has_room: Callable[[str], bool]) -> int | None:
        """Free blocks that vLLM needs to admit the first waiting request; 0 if it holds blocks
        already; None if none waits or may run."""
        spec, scheduler, manager = self.spec, self._scheduler, self._manager
        assert spec is not None and manager is not None
        if len(scheduler.running) >= scheduler.max_num_active_reqs:
            return None
        if scheduler.kv_holding_waiting:
            # `promised_blocks` counts what it still needs.
            return 0
        if not scheduler.waiting:
            return None
        request = scheduler.waiting.peek_request()
        needed = -(-int(request.num_tokens) // spec.block_size)
        needed -= manager.shared_blocks(request)
        if spec.moved_blocks < needed and has_room(request.request_id):
            needed = spec.moved_blocks
        return needed + self._num_beside(int(request.num_tokens)) + self._watermark_blocks

    def running_requests(self) -> list[str]:
        """In the order of their admission."""
        return [request.request_id for request in self._scheduler.running]

    def relief(self, request_id: str, stored_tokens: int) -> Relief | None:
        """`ResidentManager.relief`; None without blocks or if moved already."""
        manager = self._manager
        if manager is None or not self.has_blocks(request_id) or self.is_moved(request_id):
            return None
        request = self._scheduler.requests[request_id]
        return manager.relief(request_id, _processed(request), stored_tokens)

    def keep(self, unsure: Set[str]) -> None:
        """Makes requests free no blocks in the coming step (`ResidentManager.unsure`)."""
        if self._manager is not None:
            self._manager.unsure = unsure

    def move(self, request_id: str) -> None:
        assert self._manager is not None
        self._manager.move(request_id, _processed(self._scheduler.requests[request_id]))

    def forget(self, request_id: str) -> None:
        if self._manager is not None:
            self._manager.forget(request_id)

    def distrust(self) -> None:
        """What is on the device has become inexact: nobody may hit it."""
        if self._manager is not None:
            pool = self._manager.block_pool
            pool.evict_blocks(set(range(pool.num_gpu_blocks)))

    # ------------------------------------------------------------------------- what requests hold

    def hot_blocks(self, request_id: str) -> tuple[int, ...]:
        return () if self._manager is None else self._manager.hot_ids.get(request_id, ())

    def has_blocks(self, request_id: str) -> bool:
        return self._manager is not None and request_id in self._manager.req_to_blocks

    def is_running(self, request_id: str) -> bool:
        request = None if self._scheduler is None else self._scheduler.requests.get(request_id)
        return request is not None and request in self._scheduler.running

    def is_in_flight(self, request_id: str) -> bool:
        """A step in progress computes tokens of it."""
        request = None if self._scheduler is None else self._scheduler.requests.get(request_id)
        return request is not None and bool(request.num_in_flight_tokens)

    @property
    def planned_step(self) -> int:
        """0 if vLLM does not count steps: only if it may plan one before the last has ended."""
        return int(getattr(self._scheduler, "sched_step_seq", 0))

    @property
    def ended_step(self) -> int:
        """Last step whose result has reached vLLM; 0 as `planned_step`."""
        return int(getattr(self._scheduler, "processed_step_seq", 0))

    def num_freed(self, request_id: str) -> int:
        """First block after its freed ones, which begin after the sinks; 0 if none was. Only
        with residency."""
        assert self._manager is not None
        return self._manager.freed_blocks.get(request_id, 0)

    def has_away(self, request_id: str) -> bool:
        return self.spec is not None and self.num_freed(request_id) > self.spec.sink_blocks

    @property
    def has_lost(self) -> bool:
        """A request has lost blocks in the server, and vLLM has not preempted it yet."""
        return self._manager is not None and bool(self._manager.lost)

    def lose(self, request_id: str) -> None:
        """Makes vLLM preempt a request that has lost blocks, and drop its output in flight."""
        request = None if self._scheduler is None else self._scheduler.requests.get(request_id)
        if request is None:
            return
        # vLLM can preempt only running requests. One that waits for its load must get its
        # blocks, or all behind it would wait for ever.
        if self._manager is not None and request in self._scheduler.running:
            self._manager.lost.add(request_id)
        request.drop_stale_output = True
        request.num_stale_output_tokens = request.num_in_flight_tokens

    def lose_blocks(self, first_blocks: Set[int]) -> None:
        """`lose` for requests that hold one of these first blocks. A fallback, which does not
        call `lose`: the exception may come from there."""
        if self._manager is not None:
            for request in self._scheduler.running:
                blocks = self._manager.req_to_blocks[request.request_id]
                if not first_blocks.isdisjoint(block.block_id for block in blocks):
                    self._manager.lost.add(request.request_id)
                    request.drop_stale_output = True
                    request.num_stale_output_tokens = request.num_in_flight_tokens

    def fail(self, request_id: str, why: str) -> None:
        """Makes vLLM end the request with an error, as it does after an encoder cache mismatch."""
        logger.error("hotkv: request %s ends with an error: %s", request_id, why)
        if self._scheduler is not None:
            self._scheduler.encoder_cache_mismatch_reqs.add(request_id)

    def requests_of(self, blocks: Set[int]) -> list[str]:
        """Requests that hold one of these blocks, reported as lost. One that got a block since
        is recomputed in vain."""
        tables = {} if self._manager is None else self._manager.req_to_blocks
        return [
            request_id
            for request_id, table in tables.items()
            if not blocks.isdisjoint(block.block_id for block in table)
        ]


def _processed(request: Any) -> int:
    """Tokens whose computation has ended."""
    return int(request.num_computed_tokens - request.num_in_flight_tokens)


def _scheduler_of_caller() -> Any:
    """From the call stack of `bind_kv_cache_manager`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and isinstance(owner, Scheduler):
            return owner
        frame = frame.f_back
    return None
