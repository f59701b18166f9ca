"""Residency (old blocks of long contexts only in the server's memory) as vLLM's classes: a KV cache
spec for such layers, the manager of their blocks, and the number of blocks that a request holds on
the device.

A request holds its first blocks (sinks), the recent window together with tokens in flight, and hot
slots. A hot slot is a block of vLLM's pool that belongs to no position and has contents of its own
in each layer. All other complete blocks return to the pool once `ResidentManager.stored_tokens`
says that the server has pinned them; the block table then has the null block in their place.

With `residency = "auto"` a request holds all its blocks and no hot slots until it is moved
(`ResidentManager.moved`). From then on to its end it holds blocks as described above.

Always true:
- No block is freed before the server has pinned its bytes.
- A request that has lost bytes gets no further block, so vLLM preempts it and computes it anew.

Uses, of vLLM 0.32: `AttentionBackend.customize_spec` (temporary there, see RFC #42449),
`FullAttentionSpec`, `FullAttentionManager` with its block tables, its pool and `new_step_starts`,
`KVCacheSpecRegistry`, `VllmConfig.max_in_flight_tokens`.
"""

import sys
import time
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, fields
from itertools import islice
from types import FrameType
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from hotkv_sparse import SparseConfig
from hotkv_sparse.hotset import USUAL_SETS
from hotkv_vllm import versions
from hotkv_vllm.config import ALLOW_UNTESTED, SPARSE, ConfigError, flat
from hotkv_vllm.link import logger
from hotkv_vllm.residency.moves import Demand, Relief

# ------------------------------------------------------------------------- the spec and its manager


SPARE_SLOTS = 8
"""Number of hot slots (device blocks for selected blocks) beyond the capacity of a hot set. They
receive blocks that are copied ahead, and that the next step adds to the hot set."""


@dataclass(frozen=True, kw_only=True)
class ResidentSpec(FullAttentionSpec):
    """The spec of full attention whose old blocks are in host memory only.

    keeps_tokens: tokens that any request keeps on the device: the recent window, tokens in flight,
        and tokens whose store is under way.
    sparse_from_tokens: shorter contexts are dense, so they stay on the device as a whole.
    begins_whole: True if requests stay on the device as a whole until they are moved.
    """

    sink_blocks: int
    recent_tokens: int
    keeps_tokens: int
    hot_blocks: int
    sparse_from_tokens: int
    begins_whole: bool = False

    @staticmethod
    def of(spec: FullAttentionSpec, config: SparseConfig, vllm_config: Any) -> "ResidentSpec":
        """Returns the resident spec in place of vLLM's spec of a layer."""
        tokens = spec.block_size
        scheduler = vllm_config.scheduler_config
        step_tokens = int(scheduler.max_num_batched_tokens)
        return ResidentSpec(
            **{f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec) if f.init},
            sink_blocks=_blocks(config.sink_tokens, tokens),
            recent_tokens=config.recent_tokens,
            keeps_tokens=config.recent_tokens + vllm_config.max_in_flight_tokens + step_tokens,
            hot_blocks=hot_blocks(config, tokens),
            sparse_from_tokens=config.min_context_tokens,
            begins_whole=config.residency == "auto",
        )

    @property
    def whole_blocks(self) -> int:
        """Returns the most blocks that a request can have and still stay on the device as a
        whole."""
        window = _blocks(self.keeps_tokens, self.block_size) + 1
        short = _blocks(self.sparse_from_tokens, self.block_size) + 1
        return max(self.sink_blocks + window, short)

    def device_blocks(self, num_tokens: int) -> int:
        """Returns the most blocks that a request of `num_tokens` holds, hot slots included."""
        needed = _blocks(num_tokens, self.block_size)
        return needed if needed <= self.whole_blocks else self.moved_blocks

    @property
    def moved_blocks(self) -> int:
        """Returns the most blocks that a request holds on the device if only a part of its context
        is on the device."""
        return self.whole_blocks + self.hot_blocks

    def gap(self, hit_tokens: int) -> range:
        """Returns the blocks between the sinks and the recent window of a hit; empty if the hit
        fits on the device as a whole."""
        if _blocks(hit_tokens, self.block_size) <= self.whole_blocks:
            return range(0)
        return range(self.sink_blocks, (hit_tokens - self.recent_tokens) // self.block_size)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Returns the bytes that one request needs of the pool. vLLM checks this number at its
        start."""
        return self.device_blocks(vllm_config.model_config.max_model_len) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        """Returns the first layer's spec for a group. Raises AssertionError if layers differ;
        vLLM's own method would merge them."""
        return KVCacheSpec.merge.__func__(cls, specs)


def hot_blocks(config: SparseConfig, block_tokens: int) -> int:
    """Returns the number of hot slots (device blocks for selected blocks) of a request: the most
    that the hot set of a layer can use."""
    endless = 1 << 40
    budget = config.budget_blocks(endless, block_tokens)
    return USUAL_SETS * max(budget, config.max_always_blocks(block_tokens)) + SPARE_SLOTS


def _blocks(num_tokens: int, block_tokens: int) -> int:
    return -(-num_tokens // block_tokens)


class ResidentManager(FullAttentionManager):
    """Manages the blocks of resident requests for vLLM. The scheduler side sets `stored_tokens`,
    `has_room` and `step_starts`.

    `freed_blocks`: by request, the end of the freed blocks, which begin behind the sinks.
    `hot`: the hot slots by request.
    `moved`: with `begins_whole`, requests that are no longer on the device as a whole.
    `awaited`: with `begins_whole`, for each request that waited for admission when the step began,
        the fewest blocks with which it can begin.
    """

    def __init__(self, kv_cache_spec: ResidentSpec, **more: Any) -> None:
        super().__init__(kv_cache_spec, **more)
        self.spec = kv_cache_spec
        # vLLM gives a cap only to the kinds of specs that it knows.
        self.max_admission_blocks_per_request = kv_cache_spec.whole_blocks
        self.stored_tokens: Callable[[str], int] = lambda request_id: 0
        self.has_room: Callable[[str], bool] = lambda request_id: True
        self.step_starts: Callable[[], None] = lambda: None
        self.hot: dict[str, list[KVCacheBlock]] = {}
        self.hot_ids: dict[str, tuple[int, ...]] = {}
        self.freed_blocks: dict[str, int] = {}
        self.lost: set[str] = set()
        self.moved: set[str] = set()
        self.awaited: dict[str, int] = {}
        self._begins_moved: set[str] = set()
        self.most_held = 0
        self._longest: dict[str, int] = {}

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *_: Any, **__: Any
    ) -> Any:
        """Finds no hit on the device: blocks on the device don't prove that the server has the rest
        of the prefix. The connector looks hits up instead."""
        return tuple([] for _ in kv_cache_group_ids), 0

    def new_step_starts(self) -> None:
        """Notifies the scheduler side that vLLM is about to plan a step. vLLM calls this method."""
        super().new_step_starts()
        self.step_starts()

    # --------------------------------------------------------------------------------- hot slots

    def _missing_hot(self, request_id: str, num_tokens: int) -> int:
        """Returns how many hot slots (device blocks for selected blocks) a request of `num_tokens`
        still needs: all of them or 0."""
        if not self._outgrows(request_id, num_tokens):
            return 0
        return self.spec.hot_blocks - len(self.hot.get(request_id, ()))

    def _outgrows(self, request_id: str, num_tokens: int) -> bool:
        """Returns True if a request of `num_tokens`, or admitted with more, does not stay on the
        device as a whole. Only such a request has hot slots and frees blocks."""
        if self.spec.begins_whole and not self._is_moved(request_id):
            return False
        return self._most_blocks(request_id, num_tokens) > self.spec.whole_blocks

    def _most_blocks(self, request_id: str, num_tokens: int) -> int:
        """Returns the number of blocks of a request of `num_tokens`, or of the longer length with
        which it was admitted."""
        return _blocks(max(num_tokens, self._longest.get(request_id, 0)), self.block_size)

    def _is_moved(self, request_id: str) -> bool:
        return request_id in self.moved or request_id in self._begins_moved

    # -------------------------------------------------------------------------------- allocation

    def needs(self, request_id: str, num_tokens: int) -> int:
        """Returns how many more blocks a running request must allocate to have `num_tokens`."""
        held = len(self.req_to_blocks.get(request_id, ()))
        lacks = max(0, _blocks(num_tokens, self.block_size) - held)
        return lacks + self._missing_hot(request_id, num_tokens)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Returns how many blocks must be allocated, as vLLM's method does, but counts only the
        blocks that stay on the device. Returns more blocks than the pool has if the request may get
        no block now."""
        if request_id in self.lost:
            # No allocation succeeds, so the scheduler preempts the request, and it starts anew.
            return int(self.block_pool.num_gpu_blocks) + 1
        is_decided = request_id in self._longest and not apply_admission_cap
        if apply_admission_cap:
            self._longest[request_id] = num_tokens
        is_new = not self.req_to_blocks.get(request_id)
        if is_new and self.spec.begins_whole and not is_decided:
            self._decide(request_id, num_tokens, total_computed_tokens > num_local_computed_tokens)
        if is_new and self._outgrows(request_id, num_tokens) and not self.has_room(request_id):
            # A request that asks for no hit has not waited for the answer, so check for room here
            # too.
            return int(self.block_pool.num_gpu_blocks) + 1
        needed: int = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            # What is on the device as a whole is not capped.
            apply_admission_cap=apply_admission_cap and self._outgrows(request_id, num_tokens),
            prefill_end=prefill_end,
        )
        is_hit = total_computed_tokens > num_local_computed_tokens
        if request_id not in self.num_cached_block and is_hit and not apply_admission_cap:
            held = len(new_computed_blocks) + len(self.req_to_blocks.get(request_id, ()))
            first, last = self._gap(request_id, total_computed_tokens, held)
            needed -= last - first
        return needed + self._missing_hot(request_id, num_tokens)

    def _decide(self, request_id: str, num_tokens: int, is_hit: bool) -> None:
        """Decides whether a request without blocks begins as if it had been moved off the device.
        The request does so if its blocks do not fit (`room_for`) and the server has room for the
        blocks. The decision is made anew until the request has blocks."""
        self._begins_moved.discard(request_id)
        free = self.block_pool.get_num_free_blocks()
        needed = self._most_blocks(request_id, num_tokens)
        if (
            request_id not in self.moved
            and needed > self.room_for(request_id, is_hit)
            and self.spec.moved_blocks <= min(free, needed - 1)
            and self.has_room(request_id)
        ):
            self._begins_moved.add(request_id)

    def room_for(self, request_id: str, is_hit: bool) -> int:
        """Returns how many free blocks a request without blocks may use to begin on the device as a
        whole. Blocks that admitted prompts still need do not count. For a hit, blocks that other
        waiting requests need do not count either: if the hit were moved to make room for them, its
        load would have been in vain."""
        room = self.block_pool.get_num_free_blocks() - self.promised_blocks
        if is_hit:
            room -= sum(
                blocks
                for name, blocks in self.awaited.items()
                if name != request_id and not self.req_to_blocks.get(name)
            )
        return room

    def _gap(self, request_id: str, computed_tokens: int, num_held: int) -> tuple[int, int]:
        """Returns the positions [first, last) of a hit's blocks that are neither allocated nor
        loaded. These blocks lie between the sinks and the recent window, and the server has pinned
        them for the request."""
        first = max(self.spec.sink_blocks, num_held)
        kept = min(computed_tokens - self.spec.recent_tokens, self.stored_tokens(request_id))
        if not self._outgrows(request_id, computed_tokens):
            return first, first
        return first, max(first, kept // self.block_size)

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        """Allocates blocks for the sinks and the recent window of a hit; null blocks between
        them."""
        total = num_local_computed_tokens + num_external_computed_tokens
        blocks = self.req_to_blocks[request_id]
        first, last = self._gap(request_id, total, len(blocks))
        if last > first:
            self._take(blocks, first - len(blocks), record_for_zeroing)
            blocks.extend([self._null_block] * (last - first))
            self.freed_blocks[request_id] = last
        self._take(blocks, _blocks(total, self.block_size) - len(blocks), record_for_zeroing)

    def _take(self, blocks: list[KVCacheBlock], count: int, record_for_zeroing: bool) -> None:
        """Appends `count` new blocks of the pool to `blocks`."""
        if count <= 0:
            return
        new = self.block_pool.get_new_blocks(count)
        blocks.extend(new)
        if self.records_new_block_ids and record_for_zeroing:
            self.new_block_ids.extend(block.block_id for block in new)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Allocates blocks as vLLM's method does. With a request's first blocks the method also
        allocates the request's hot slots (device blocks for selected blocks)."""
        if request_id in self._begins_moved:
            self._begins_moved.discard(request_id)
            self.moved.add(request_id)
        self._take_hot(request_id, self._missing_hot(request_id, num_tokens))
        new: list[KVCacheBlock] = super().allocate_new_blocks(
            request_id, num_tokens, num_tokens_main_model
        )
        freed = max(0, self.freed_blocks.get(request_id, 0) - self.spec.sink_blocks)
        held = len(self.req_to_blocks[request_id]) - freed + len(self.hot.get(request_id, ()))
        self.most_held = max(self.most_held, held)
        return new

    def _take_hot(self, request_id: str, count: int) -> None:
        if count > 0:
            hot = self.hot[request_id] = self.block_pool.get_new_blocks(count)
            self.hot_ids[request_id] = tuple(block.block_id for block in hot)

    # -------------------------------------------------------------------------------------- moving

    @property
    def promised_blocks(self) -> int:
        """Returns how many more blocks the admitted requests need for their prompts."""
        return sum(self._promised(name, self._is_moved(name)) for name in self.req_to_blocks)

    def _promised(self, request_id: str, is_moved: bool) -> int:
        needed = self._most_blocks(request_id, 0)
        if is_moved:
            needed = min(needed, self.spec.whole_blocks)
        return max(0, needed - len(self.req_to_blocks[request_id]))

    def relief(self, request_id: str, processed_tokens: int, stored_tokens: int) -> Relief:
        """Returns how many blocks the pool gains if the request is moved off the device."""
        blocks = self._freeable(request_id, processed_tokens, stored_tokens)
        return Relief(
            len(blocks) - self.spec.hot_blocks,
            self._promised(request_id, False) - self._promised(request_id, True),
        )

    def move(self, request_id: str, processed_tokens: int) -> None:
        """Moves a request off the device: frees the blocks that the server has pinned, and
        allocates its hot slots (device blocks for selected blocks)."""
        self.moved.add(request_id)
        self._free(request_id, processed_tokens)
        self._take_hot(request_id, self.spec.hot_blocks)

    def forget(self, request_id: str) -> None:
        """Forgets a request that has ended."""
        self.moved.discard(request_id)
        self._begins_moved.discard(request_id)
        self._longest.pop(request_id, None)

    # ------------------------------------------------------------------------------------- freeing

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Frees the device blocks whose copies the server has pinned and whose tokens are older
        than the recent window. The window ends at the last token of the completed steps. vLLM calls
        this method before it allocates blocks for the request."""
        if request_id in self.hot:
            self._free(request_id, processed_computed_tokens)

    def _free(self, request_id: str, processed_tokens: int) -> None:
        stored_tokens = self.stored_tokens(request_id)
        blocks = self._freeable(request_id, processed_tokens, stored_tokens)
        if blocks:
            self._remove_blocks_in_range(request_id, self.spec.sink_blocks, blocks.stop)
            self.freed_blocks[request_id] = blocks.stop

    def _freeable(self, request_id: str, processed_tokens: int, stored_tokens: int) -> range:
        """Returns the positions of the blocks that can be freed now. These blocks follow the blocks
        freed earlier, end before the recent window, and lie within the `stored_tokens` leading
        tokens that the server has pinned."""
        first = max(self.spec.sink_blocks, self.freed_blocks.get(request_id, 0))
        kept = min(processed_tokens - self.spec.recent_tokens, stored_tokens)
        return range(first, min(kept // self.block_size, len(self.req_to_blocks[request_id])))

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Removes and returns the blocks of a request, as vLLM's method does, including its hot
        slots (device blocks for selected blocks)."""
        self.lost.discard(request_id)
        self.freed_blocks.pop(request_id, None)
        self.hot_ids.pop(request_id, None)
        self._longest.pop(request_id, None)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks + self.hot.pop(request_id, [])


def customized(spec: Any, config: SparseConfig, vllm_config: Any) -> Any:
    """Returns the spec of a layer of a resident engine. A layer without plain full attention
    retains its spec, and so do all layers if hotkv is off with this version of vLLM: vLLM then
    checks that the longest context fits on the device."""
    if type(spec) is not FullAttentionSpec:
        return spec
    extra = flat(vllm_config.kv_transfer_config.kv_connector_extra_config)
    if why_off := versions.why_off(versions.OWN, extra.get(ALLOW_UNTESTED) is True):
        versions.say_once(f"hotkv is off, so {SPARSE}.residency has no effect: {why_off}")
        return spec
    if spec.sliding_window or spec.attention_chunk_size or spec.non_causal:
        return spec
    return ResidentSpec.of(spec, config, vllm_config)


def resident_spec(kv_cache_config: Any) -> ResidentSpec | None:
    """Returns the spec of the engine's only group if it is resident; None otherwise."""
    groups = kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if len(groups) == 1 else None
    return spec if isinstance(spec, ResidentSpec) else None


def check_residency(vllm_config: Any, kv_cache_config: Any, config: SparseConfig) -> None:
    """Raises ConfigError if the engine's contexts can't be resident in host memory."""
    name = f"{SPARSE}.residency = {config.residency!r}"
    spec = resident_spec(kv_cache_config)
    if spec is None:
        kinds = sorted({type(g.kv_cache_spec).__name__ for g in kv_cache_config.kv_cache_groups})
        raise ConfigError(
            f"{name}: it needs a model all of whose layers are of plain full attention, "
            f"and hotkv's attention in vLLM; this one has {', '.join(kinds)}. vLLM itself "
            "frees blocks of other kinds, in the same pool, so hotkv could not promise a request "
            "its room; leave it out"
        )
    transfer = vllm_config.kv_transfer_config
    if not transfer.is_kv_producer:
        raise ConfigError(
            f"{name}: with kv_role {transfer.kv_role!r} this engine stores nothing, and "
            "what is not stored can't leave the device; set kv_role to 'kv_both'"
        )
    num_blocks = kv_cache_config.num_blocks - 1
    needed = spec.device_blocks(vllm_config.model_config.max_model_len)
    if config.adaptive_p is not None:
        raise ConfigError(f"{name}: it needs hot sets of one size; leave out {SPARSE}.adaptive_p")
    if num_blocks < needed:
        raise ConfigError(
            f"{name}: a request holds up to {needed} blocks of {spec.block_size} tokens "
            f"on the device, the pool has {num_blocks}; raise kv_cache_memory_bytes, or lower "
            f"max_num_batched_tokens ({vllm_config.scheduler_config.max_num_batched_tokens}) or "
            f"sparse_topk ({config.sparse_topk})"
        )


def _register() -> None:
    """Registers spec and manager with vLLM, in each process that imports this module. vLLM's own
    specs come first, because vLLM takes a registry that is not empty for complete."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(ResidentSpec, ResidentManager, uniform_type_base_spec=ResidentSpec)


_register()


# ------------------------------------------------------------------------ the scheduler side's view


class DevicePool:
    """The pool of a resident engine as the scheduler side sees it: which blocks requests hold, and
    how to preempt or fail a request.

    Usable once vLLM has constructed its pool and called `bind`. Uses, of vLLM 0.32: the state of
    `ResidentManager`, `Scheduler.requests`, `running`, `waiting`, `kv_holding_waiting`,
    `max_num_active_reqs`, `max_num_scheduled_tokens`, `current_step`, `_preempt_request`,
    `reset_preempted_req_ids` and `encoder_cache_mismatch_reqs`, and of `Request` the fields that
    count output in flight and `next_decode_eligible_step`.

    spec: None for an engine that is not resident.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self.spec = resident_spec(kv_cache_config)
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
        has_room: Callable[[str], bool],
        step_starts: Callable[[], None],
    ) -> None:
        """Connects this object to vLLM's block manager. vLLM's scheduler calls this method from its
        constructor.

        stored_tokens: returns the leading tokens of a request that need not stay on the device.
        has_room: returns True if a request that outgrows the device may begin.
        step_starts: called before vLLM plans a step.
        """
        self._scheduler = _scheduler_of_caller()
        managers = kv_cache_manager.coordinator.single_type_managers
        found = next((one for one in managers if isinstance(one, ResidentManager)), None)
        if found is not None:
            found.stored_tokens = stored_tokens
            found.has_room = has_room
            found.step_starts = step_starts
            self._manager = found
            self._watermark_blocks = int(kv_cache_manager.watermark_blocks)

    def leave_out(self, held: Collection[str]) -> None:
        """Leaves these requests out of the step that vLLM is about to plan, and preempts the
        running requests that are lost. vLLM would preempt others in their place."""
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
                scheduler.running.remove(request)
                try:
                    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
                except Exception:
                    # A request in no queue would never end.
                    scheduler.running.append(request)
                    raise

    def was_preempted(self, request_id: str) -> bool:
        """Returns True if the request of a resident engine was preempted since vLLM planned its
        last step. The coming step must not resume the request, because that step's message still
        says that the request has lost its blocks.

        `Scheduler.reset_prefix_cache` preempts between steps, and so does `leave_out`.
        """
        scheduler = None if self.spec is None else self._scheduler
        return scheduler is not None and request_id in scheduler.reset_preempted_req_ids

    def describe(self) -> str:
        """Returns a text for the log: how many blocks a request holds on the device, and how many
        requests fit."""
        assert self.spec is not None
        held = self.spec.device_blocks(self.max_model_len)
        size = held * self.spec.page_size_bytes / 2**20
        where = "the whole KV cache is in host memory"
        if self.spec.begins_whole:
            where = "contexts move to host memory once the device lacks room; then"
        return (
            f"{where}; a request of up to {self.max_model_len} tokens "
            f"holds at most {held} of the device's {self._num_blocks} blocks ({size:.1f} MiB a "
            f"layer, {self.spec.hot_blocks} of them hot slots), so {self._num_blocks // held} of "
            "them decode at a time"
        )

    def longest(self, request: Any) -> int:
        """Returns the most tokens that a request can reach."""
        return min(int(request.num_prompt_tokens + request.max_tokens), self.max_model_len)

    def holds_whole(self, request: Any) -> bool:
        """Returns True if a request stays on the device as a whole, even at its greatest length."""
        spec = self.spec
        return spec is None or -(-self.longest(request) // spec.block_size) <= spec.whole_blocks

    def left_out(self, hit_tokens: int) -> range:
        """Returns the positions of a hit's blocks that need not be loaded if the server pins them
        all for the request. Agrees with `ResidentManager._gap`. Empty in an engine without
        residency, and with `begins_whole`: there the manager decides only when the request gets its
        blocks, so all blocks are leased."""
        spec = self.spec
        return range(0) if spec is None or spec.begins_whole else spec.gap(hit_tokens)

    # ------------------------------------------------------------------- requests that may be whole

    def stays_whole(self, request: Any) -> bool:
        """Returns True if the request was not moved, and the whole pool is large enough for all its
        blocks."""
        spec = self.spec
        if spec is None or not spec.begins_whole or self._is_moved(request.request_id):
            return False
        return -(-int(request.num_tokens) // spec.block_size) <= self._num_blocks

    def _is_moved(self, request_id: str) -> bool:
        return self._manager is not None and request_id in self._manager.moved

    def has_room_for(self, request: Any) -> bool:
        """Returns True if the request, which has no blocks, can begin as a whole with a hit."""
        spec, manager = self.spec, self._manager
        if spec is None or manager is None or not self.stays_whole(request):
            return False
        room = manager.room_for(request.request_id, is_hit=True)
        return -(-int(request.num_tokens) // spec.block_size) <= room

    def demand(self, has_room: Callable[[str], bool]) -> Demand | None:
        """Returns how many blocks the coming step needs; None if the pool is surely large enough,
        or if no request can be moved."""
        spec, manager, scheduler = self.spec, self._manager, self._scheduler
        if spec is None or not spec.begins_whole or manager is None or scheduler is None:
            return None
        free = manager.block_pool.get_num_free_blocks()
        budget = int(scheduler.max_num_scheduled_tokens)
        num_more = max(0, scheduler.max_num_active_reqs - len(scheduler.running))
        manager.awaited = {
            request.request_id: min(
                spec.moved_blocks, -(-int(request.num_tokens) // spec.block_size)
            )
            for request in islice(scheduler.waiting, num_more)
        }
        is_awaited = scheduler.waiting or scheduler.kv_holding_waiting
        if not is_awaited and free >= budget // spec.block_size + 1 + len(scheduler.running):
            return None
        running = 0
        for request in scheduler.running:
            done = request.num_computed_tokens
            wanted = request.num_tokens + request.num_output_placeholders - done
            new = max(0, min(int(wanted), budget))
            budget -= new
            running += manager.needs(request.request_id, done + new)
        first = self._first_needs(has_room)
        return Demand(free, manager.promised_blocks, running, first)

    def _first_needs(self, has_room: Callable[[str], bool]) -> int | None:
        """Returns the fewest blocks with which vLLM admits the first waiting request. Returns None
        if no request waits, or if vLLM may not run more requests."""
        spec, scheduler = self.spec, self._scheduler
        assert spec is not None
        if len(scheduler.running) >= scheduler.max_num_active_reqs:
            return None
        if scheduler.kv_holding_waiting:
            # The blocks that it needs are promised.
            return 0
        if not scheduler.waiting:
            return None
        request = scheduler.waiting.peek_request()
        needed = -(-int(request.num_tokens) // spec.block_size)
        if spec.moved_blocks < needed and has_room(request.request_id):
            needed = spec.moved_blocks
        return needed + self._watermark_blocks

    def running_requests(self) -> list[str]:
        """Returns the running requests, in the order in which they were admitted."""
        return [request.request_id for request in self._scheduler.running]

    def relief(self, request_id: str, stored_tokens: int) -> Relief | None:
        """Returns how many blocks the pool gains if the request is moved off the device; None if
        the request has no blocks or was moved already."""
        manager = self._manager
        if manager is None or not self.has_blocks(request_id) or self._is_moved(request_id):
            return None
        request = self._scheduler.requests[request_id]
        return manager.relief(request_id, _processed(request), stored_tokens)

    def move(self, request_id: str) -> None:
        """Moves a running request off the device: only its sinks (first blocks), its recent window
        and its hot slots (device blocks for selected blocks) stay."""
        assert self._manager is not None
        self._manager.move(request_id, _processed(self._scheduler.requests[request_id]))

    def forget(self, request_id: str) -> None:
        """Forgets a request that has ended."""
        if self._manager is not None:
            self._manager.forget(request_id)

    # ------------------------------------------------------------------------- what requests hold

    def hot_blocks(self, request_id: str) -> tuple[int, ...]:
        """Returns the ids of the request's hot slots (device blocks for selected blocks)."""
        return () if self._manager is None else self._manager.hot_ids.get(request_id, ())

    def has_blocks(self, request_id: str) -> bool:
        """Returns True if the request has blocks on the device."""
        return self._manager is not None and request_id in self._manager.req_to_blocks

    def is_in_flight(self, request_id: str) -> bool:
        """Returns True if a step of the request is under way."""
        request = None if self._scheduler is None else self._scheduler.requests.get(request_id)
        return request is not None and bool(request.num_in_flight_tokens)

    def num_freed(self, request_id: str) -> int:
        """Returns the position at which the request's freed blocks end; they begin after the sinks.
        0 if no block was freed."""
        return 0 if self._manager is None else self._manager.freed_blocks.get(request_id, 0)

    def has_away(self, request_id: str) -> bool:
        """Returns True if some blocks of the request are in host memory only."""
        return self.spec is not None and self.num_freed(request_id) > self.spec.sink_blocks

    @property
    def has_lost(self) -> bool:
        """Returns True if vLLM has not yet preempted a lost request."""
        return self._manager is not None and bool(self._manager.lost)

    def lose(self, request_id: str) -> None:
        """Makes vLLM preempt the request before it gets another block, and drop the output of steps
        in flight for it."""
        if self._manager is not None and request_id in self._manager.req_to_blocks:
            self._manager.lost.add(request_id)
        request = None if self._scheduler is None else self._scheduler.requests.get(request_id)
        if request is not None:
            request.drop_stale_output = True
            request.num_stale_output_tokens = request.num_in_flight_tokens

    def lose_blocks(self, first_blocks: Set[int]) -> None:
        """Makes vLLM preempt the requests that hold one of these blocks. Does not call `lose`,
        because a fault of `lose` may be the reason of this call."""
        if self._manager is not None:
            for request_id, blocks in self._manager.req_to_blocks.items():
                if not first_blocks.isdisjoint(block.block_id for block in blocks):
                    self._manager.lost.add(request_id)
                    request = self._scheduler.requests.get(request_id)
                    request.drop_stale_output = True
                    request.num_stale_output_tokens = request.num_in_flight_tokens

    def fail(self, request_id: str, why: str) -> None:
        """Makes vLLM end the request with an error, in the next output. Uses the set that vLLM has
        for mismatches of its encoder cache: vLLM ends all requests in this set, whatever the
        cause."""
        logger.error("hotkv: request %s ends with an error: %s", request_id, why)
        if self._scheduler is not None:
            self._scheduler.encoder_cache_mismatch_reqs.add(request_id)

    def requests_of(self, blocks: Set[int]) -> list[str]:
        """Returns the requests that hold one of these blocks. A block may have moved to another
        request since its step was planned; then the result has that request too, and vLLM
        recomputes both requests."""
        tables = {} if self._manager is None else self._manager.req_to_blocks
        return [
            request_id
            for request_id, table in tables.items()
            if not blocks.isdisjoint(block.block_id for block in table)
        ]


def _processed(request: Any) -> int:
    """Returns the number of a request's tokens whose computation has ended: its computed tokens
    without those that steps in flight still compute."""
    return int(request.num_computed_tokens - request.num_in_flight_tokens)


def _scheduler_of_caller() -> Any:
    """Returns vLLM's scheduler from the call stack; None without a scheduler. The scheduler calls
    `bind_kv_cache_manager` from its constructor and is not passed to connectors."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and isinstance(owner, Scheduler):
            return owner
        frame = frame.f_back
    return None
