"""Implements residency (old blocks of long contexts only in the server's memory) in vLLM's block
management: a KV cache spec for the layers (`ResidentSpec`), the manager of their blocks
(`ResidentManager`), and the scheduler side's access to both (`DevicePool`).

On the device a request holds
- its first blocks (sinks),
- its recent window (last tokens) together with tokens in flight,
- hot slots. A hot slot is a block of vLLM's pool into which selected blocks are copied: it belongs
  to no position of the context, and has other contents in each layer.

All other complete blocks return to the pool once the server has pinned them
(`ResidentManager.stored_tokens`). The request's block table then has the null block in their place.

With `residency = "auto"`, or if the server is away when a request begins (`ResidentManager.whole`),
the request holds all its blocks and no hot slots until it is moved off the device
(`ResidentManager.moved`). From then on the device holds only its sinks, its recent window and its
hot slots.

Always true:
- No block is freed before the server has pinned its bytes.
- A request that has lost blocks in the server gets no further block, so vLLM preempts it and
  computes it anew.

Parts of vLLM 0.32 that this module uses: `AttentionBackend.customize_spec` (temporary in vLLM, see
RFC #42449), `FullAttentionSpec`, `FullAttentionManager` with its block tables, its pool and
`new_step_starts`, `KVCacheSpecRegistry`, `VllmConfig.max_in_flight_tokens`.
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
from hotkv_vllm import versions
from hotkv_vllm.config import ALLOW_UNTESTED, SPARSE, ConfigError, flat
from hotkv_vllm.link import logger
from hotkv_vllm.residency.moves import Demand, Relief

# ------------------------------------------------------------------------- the spec and its manager


SPARE_SLOTS = 8
"""Number of additional hot slots (device blocks for selected blocks) of a request. A request has as
many hot slots as its hot set (the blocks to attend to) can use, and these additional slots. Each
of them is reserved for a block that a step has selected, but that only the next step adds to the
hot set."""


@dataclass(frozen=True, kw_only=True)
class ResidentSpec(FullAttentionSpec):
    """The KV cache spec of a full-attention layer in an engine with residency (contexts beyond
    device memory).

    sink_blocks: number of a context's first blocks (sinks), which stay on the device.
    recent_tokens: number of a context's last tokens (the recent window), which stay on the device.
    keeps_tokens: the most tokens at the end of a context that the device may hold: the recent
        window, tokens in flight, and tokens whose store has not ended.
    hot_blocks: number of hot slots (device blocks for selected blocks) of a request.
    sparse_from_tokens: a context below this length attends to all its blocks, so they all stay on
        the device.
    begins_whole: True with `residency = "auto"`: all blocks of a request stay on the device until
        the request is moved off the device.
    """

    sink_blocks: int
    recent_tokens: int
    keeps_tokens: int
    hot_blocks: int
    sparse_from_tokens: int
    begins_whole: bool = False

    @staticmethod
    def of(spec: FullAttentionSpec, config: SparseConfig, vllm_config: Any) -> "ResidentSpec":
        """Returns the KV cache spec with residency (contexts beyond device memory) that replaces
        vLLM's own spec of a layer.

        spec: vLLM's own spec.
        config: the settings of sparse decode.
        """
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
        """Returns the greatest length, in blocks, of a request that has all its blocks on the
        device. Only longer requests have blocks in the server only."""
        window = _blocks(self.keeps_tokens, self.block_size) + 1
        short = _blocks(self.sparse_from_tokens, self.block_size) + 1
        return max(self.sink_blocks + window, short)

    def device_blocks(self, num_tokens: int) -> int:
        """Returns how many device blocks a request of `num_tokens` holds at most, including its hot
        slots (device blocks for selected blocks)."""
        needed = _blocks(num_tokens, self.block_size)
        return needed if needed <= self.whole_blocks else self.moved_blocks

    @property
    def moved_blocks(self) -> int:
        """Returns how many device blocks a request holds at most, hot slots (device blocks for
        selected blocks) included, if only a part of its context is on the device."""
        return self.whole_blocks + self.hot_blocks

    def gap(self, hit_tokens: int) -> range:
        """Returns which blocks of a hit need not be on the device, as a range of block indices:
        those between the sinks (first blocks) and the recent window (last tokens). The range is
        empty if the hit is short enough to be wholly on the device.

        hit_tokens: length of the hit.
        """
        if _blocks(hit_tokens, self.block_size) <= self.whole_blocks:
            return range(0)
        return range(self.sink_blocks, (hit_tokens - self.recent_tokens) // self.block_size)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Returns how many bytes a request of the longest context needs on the device for this
        layer. At the engine's start vLLM checks that its block pool is large enough for this."""
        return self.device_blocks(vllm_config.model_config.max_model_len) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        """Returns the common spec of the layers of a group. Raises AssertionError if the layers'
        specs differ. (The method of `FullAttentionSpec` would merge specs that differ.)"""
        return KVCacheSpec.merge.__func__(cls, specs)


def hot_blocks(config: SparseConfig, block_tokens: int) -> int:
    """Returns the number of hot slots (device blocks for selected blocks) of a request. This is the
    number that the hot set of a layer (the blocks to attend to) can use at most, plus SPARE_SLOTS.
    """
    endless = 1 << 40
    # The budget includes the blocks that are always kept (first blocks and recent window; see
    # `SparseConfig.check`), so these need no further slots.
    return config.most_blocks(endless, block_tokens) + SPARE_SLOTS


def _blocks(num_tokens: int, block_tokens: int) -> int:
    return -(-num_tokens // block_tokens)


class ResidentManager(FullAttentionManager):
    """Manages the device blocks of all requests in an engine with residency (contexts beyond device
    memory), for vLLM's scheduler.

    stored_tokens: takes a request id, and returns how many leading tokens of the request the server
        has pinned. The scheduler side sets this function, `has_room` and `step_starts`
        (`DevicePool.bind`).
    has_room: takes a request id, and returns True if the server has reserved room for the request.
    step_starts: called before vLLM plans a step.
    freed_blocks: by request, the index of the first block after its freed blocks. The freed blocks
        begin after the sinks (first blocks).
    hot: by request, its hot slots (device blocks for selected blocks).
    hot_ids: by request, the ids of its hot slots.
    lost: ids of requests that have lost blocks in the server; they get no further block.
    moved: ids of the requests that were moved off the device.
    whole: ids of the requests that begin wholly on the device because the server is away.
    unsure: ids of requests of which the server may have lost blocks; they free none in this step.
    awaited: the requests that waited for admission when the step began: by request id, the fewest
        blocks with which the request can begin; empty unless `residency = "auto"`.
    """

    def __init__(self, kv_cache_spec: ResidentSpec, **more: Any) -> None:
        super().__init__(kv_cache_spec, **more)
        self.spec = kv_cache_spec
        # vLLM's cap: the most blocks that it demands for the admission of a request. It is set here
        # because vLLM sets it only for the kinds of specs that it knows.
        self.max_admission_blocks_per_request = kv_cache_spec.whole_blocks
        self.stored_tokens: Callable[[str], int] = lambda request_id: 0
        self.has_room: Callable[[str], bool] = lambda request_id: True
        self.step_starts: Callable[[], None] = lambda: None
        self.hot: dict[str, list[KVCacheBlock]] = {}
        self.hot_ids: dict[str, tuple[int, ...]] = {}
        self.freed_blocks: dict[str, int] = {}
        self.lost: set[str] = set()
        self.moved: set[str] = set()
        self.whole: set[str] = set()
        self.unsure: Set[str] = frozenset()
        self.awaited: dict[str, int] = {}
        self._begins_moved: set[str] = set()
        self._counted_gap = range(0)
        self._longest: dict[str, int] = {}

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *_: Any, **__: Any
    ) -> Any:
        """Overrides vLLM's method: returns no hit in vLLM's own prefix cache, so that all hits come
        from the connector. The reason: a request with residency needs its older blocks in the
        server, but a block in vLLM's cache does not mean that the server has this block and the
        blocks before it."""
        return tuple([] for _ in kv_cache_group_ids), 0

    def new_step_starts(self) -> None:
        """Calls `step_starts`. vLLM calls this method before it plans a step."""
        super().new_step_starts()
        self.step_starts()

    # --------------------------------------------------------------------------------- hot slots

    def _missing_hot(self, request_id: str, num_tokens: int) -> int:
        """Returns how many hot slots (device blocks for selected blocks) must still be allocated to
        a request of `num_tokens`. Returns 0 if the request has its hot slots already or needs
        none."""
        if not self._outgrows(request_id, num_tokens):
            return 0
        return self.spec.hot_blocks - len(self.hot.get(request_id, ()))

    def _outgrows(self, request_id: str, num_tokens: int) -> bool:
        """Returns True if some blocks of the request do not stay on the device. Only such a request
        has hot slots (device blocks for selected blocks) and frees blocks.

        num_tokens: length of the request. If the request was admitted with a greater length, the
            greater length counts.
        """
        if not self._is_moved(request_id):
            return False
        return self._most_blocks(request_id, num_tokens) > self.spec.whole_blocks

    def _most_blocks(self, request_id: str, num_tokens: int) -> int:
        """Returns the number of blocks of a context of `num_tokens`. If the request was admitted
        with a greater length, the greater length counts."""
        return _blocks(max(num_tokens, self._longest.get(request_id, 0)), self.block_size)

    def begins_whole(self, request_id: str) -> bool:
        """Returns True if the request begins, or has begun, with all its blocks on the device."""
        return self.spec.begins_whole or request_id in self.whole

    def _is_moved(self, request_id: str) -> bool:
        is_moved = request_id in self.moved or request_id in self._begins_moved
        return is_moved or not self.begins_whole(request_id)

    # -------------------------------------------------------------------------------- allocation

    def needs(self, request_id: str, num_tokens: int) -> int:
        """Returns how many blocks a running request must allocate to grow to `num_tokens`,
        including hot slots (device blocks for selected blocks)."""
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
        """Overrides vLLM's method: returns how many blocks must be allocated for the request.
        Counts only the blocks that stay on the device, and the hot slots (device blocks for
        selected blocks). If the request must get no block now, because it has lost blocks or the
        server has no room for it, returns more blocks than the pool has."""
        if request_id in self.lost:
            # Demands more blocks than there are. The allocation then fails, so vLLM's scheduler
            # preempts the request and computes it anew.
            return int(self.block_pool.num_gpu_blocks) + 1
        is_decided = request_id in self._longest and not apply_admission_cap
        if apply_admission_cap:
            self._longest[request_id] = num_tokens
        is_new = not self.req_to_blocks.get(request_id)
        if is_new and self.spec.begins_whole and not is_decided:
            self._decide(request_id, num_tokens, total_computed_tokens > num_local_computed_tokens)
        if is_new and self._outgrows(request_id, num_tokens) and not self.has_room(request_id):
            # Demands more blocks than there are, so that vLLM does not admit the request yet: the
            # server may not have reserved room for it. (Usually the connector's answer makes the
            # request wait for that, but vLLM does not ask the connector about every request.)
            return int(self.block_pool.num_gpu_blocks) + 1
        needed: int = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            # vLLM's cap (the most blocks that it demands for the admission of a request) applies
            # only to a request that outgrows the device, because all blocks of other requests stay
            # there.
            apply_admission_cap=apply_admission_cap and self._outgrows(request_id, num_tokens),
            prefill_end=prefill_end,
        )
        is_hit = total_computed_tokens > num_local_computed_tokens
        if request_id not in self.num_cached_block and is_hit and not apply_admission_cap:
            self._counted_gap = self._gap(request_id, total_computed_tokens)
            needed -= len(self._counted_gap)
        return needed + self._missing_hot(request_id, num_tokens)

    def _decide(self, request_id: str, num_tokens: int, is_hit: bool) -> None:
        """Decides, with `residency = "auto"`, whether a new request begins as if it had been moved
        off the device. The request begins so if three conditions hold:
        - The device now lacks room for all blocks of the request (`room_for`).
        - The device has room for the blocks that stay on the device if the request is moved.
        - The server has reserved room for the request.

        The decision is made again each time vLLM tries to admit the request."""
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
        """Returns how many blocks of vLLM's block pool a new request may use to begin wholly on the
        device: the free blocks, minus the blocks that admitted requests still need for their
        prompts.

        is_hit: True for a request with a hit. The result is then reduced further, by the blocks
            that other waiting requests need. Otherwise the request might soon be moved off the
            device to make room for them, and the load of its hit would be wasted.
        """
        room = self.block_pool.get_num_free_blocks() - self.promised_blocks
        if is_hit:
            room -= sum(
                blocks
                for name, blocks in self.awaited.items()
                if name != request_id and not self.req_to_blocks.get(name)
            )
        return room

    def _gap(self, request_id: str, computed_tokens: int) -> range:
        """Returns which blocks of a hit stay in the server, as a range of block indices. These
        blocks are neither allocated on the device nor loaded: they are between the sinks (first
        blocks) and the recent window (last tokens), and the server has pinned them for the request.

        computed_tokens: length of the hit.
        """
        kept = min(computed_tokens - self.spec.recent_tokens, self.stored_tokens(request_id))
        if not self._outgrows(request_id, computed_tokens):
            return range(0)
        return range(self.spec.sink_blocks, kept // self.block_size)

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        """Overrides vLLM's method: allocates the blocks of a hit. Only the sinks (first blocks) and
        the recent window (last tokens) get blocks of vLLM's pool; the block table has null blocks
        between them. vLLM has just called `get_num_blocks_to_allocate` for the request, and the
        pool has as many free blocks as that method returned."""
        total = num_local_computed_tokens + num_external_computed_tokens
        blocks, gap = self.req_to_blocks[request_id], self._counted_gap
        if gap:
            self._take(blocks, gap.start, record_for_zeroing)
            blocks.extend([self._null_block] * len(gap))
            self.freed_blocks[request_id] = gap.stop
        self._take(blocks, _blocks(total, self.block_size) - len(blocks), record_for_zeroing)

    def _take(self, blocks: list[KVCacheBlock], count: int, record_for_zeroing: bool) -> None:
        """Takes `count` free blocks from vLLM's block pool and appends them to `blocks`."""
        if count <= 0:
            return
        new = self.block_pool.get_new_blocks(count)
        blocks.extend(new)
        if self.records_new_block_ids and record_for_zeroing:
            self.new_block_ids.extend(block.block_id for block in new)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Overrides vLLM's method: first allocates the hot slots (device blocks for selected
        blocks) that the request still needs, then the new blocks."""
        if request_id in self._begins_moved:
            self._begins_moved.discard(request_id)
            self.moved.add(request_id)
        self._take_hot(request_id, self._missing_hot(request_id, num_tokens))
        new: list[KVCacheBlock] = super().allocate_new_blocks(
            request_id, num_tokens, num_tokens_main_model
        )
        return new

    def _take_hot(self, request_id: str, count: int) -> None:
        if count > 0:
            hot = self.hot[request_id] = self.block_pool.get_new_blocks(count)
            self.hot_ids[request_id] = tuple(block.block_id for block in hot)

    # -------------------------------------------------------------------------------------- moving

    @property
    def promised_blocks(self) -> int:
        """Returns how many more blocks the admitted requests need together until their prompts are
        computed."""
        return sum(self._promised(name, self._is_moved(name)) for name in self.req_to_blocks)

    def _promised(self, request_id: str, is_moved: bool) -> int:
        needed = self._most_blocks(request_id, 0)
        if is_moved:
            needed = min(needed, self.spec.whole_blocks)
        return max(0, needed - len(self.req_to_blocks[request_id]))

    def relief(self, request_id: str, processed_tokens: int, stored_tokens: int) -> Relief:
        """Returns what would be gained by moving the request off the device (`Relief`): how many
        blocks vLLM's block pool gains, and how many fewer blocks the request still needs for its
        prompt.

        processed_tokens: number of the request's tokens whose computation has ended.
        stored_tokens: number of the request's leading tokens that the server has pinned.
        """
        blocks = self._freeable(request_id, processed_tokens, stored_tokens)
        return Relief(
            len(blocks) - self.spec.hot_blocks,
            self._promised(request_id, False) - self._promised(request_id, True),
        )

    def move(self, request_id: str, processed_tokens: int) -> None:
        """Moves a request off the device. Frees the blocks that the server has pinned, except for
        the sinks (first blocks) and the recent window (last tokens). Allocates the request's hot
        slots (device blocks for selected blocks)."""
        self.moved.add(request_id)
        self._free(request_id, processed_tokens)
        self._take_hot(request_id, self.spec.hot_blocks)

    def forget(self, request_id: str) -> None:
        """Forgets a request that has ended."""
        self.moved.discard(request_id)
        self.whole.discard(request_id)
        self._begins_moved.discard(request_id)
        self._longest.pop(request_id, None)

    # ------------------------------------------------------------------------------------- freeing

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Overrides vLLM's method: frees the request's device blocks that the server has pinned and
        that are older than the recent window (the last tokens whose computation has ended). Does
        nothing for a request without hot slots (device blocks for selected blocks), whose blocks
        all stay on the device. vLLM calls this method before it allocates blocks for the request.
        """
        if request_id in self.hot and request_id not in self.unsure:
            self._free(request_id, processed_computed_tokens)

    def _free(self, request_id: str, processed_tokens: int) -> None:
        stored_tokens = self.stored_tokens(request_id)
        blocks = self._freeable(request_id, processed_tokens, stored_tokens)
        if blocks:
            self._remove_blocks_in_range(request_id, self.spec.sink_blocks, blocks.stop)
            self.freed_blocks[request_id] = blocks.stop

    def _freeable(self, request_id: str, processed_tokens: int, stored_tokens: int) -> range:
        """Returns which blocks of the request can be freed now, as a range of block indices. It
        begins after the sinks (first blocks) and the blocks freed earlier. It ends before the
        recent window (last tokens), and before the first block that the server has not pinned.

        processed_tokens: number of the request's tokens whose computation has ended.
        stored_tokens: number of the request's leading tokens that the server has pinned.
        """
        first = max(self.spec.sink_blocks, self.freed_blocks.get(request_id, 0))
        kept = min(processed_tokens - self.spec.recent_tokens, stored_tokens)
        return range(first, min(kept // self.block_size, len(self.req_to_blocks[request_id])))

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Overrides vLLM's method: removes and returns all blocks of a request, including its hot
        slots (device blocks for selected blocks)."""
        self.lost.discard(request_id)
        self.whole.discard(request_id)
        self.freed_blocks.pop(request_id, None)
        self.hot_ids.pop(request_id, None)
        self._longest.pop(request_id, None)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks + self.hot.pop(request_id, [])


def customized(spec: Any, config: SparseConfig, vllm_config: Any) -> Any:
    """Returns the KV cache spec of a layer in an engine with residency (contexts beyond device
    memory): a `ResidentSpec` for plain full attention.

    Returns `spec` unchanged for a layer of another kind, and for all layers if hotkv is off with
    this version of vLLM. vLLM then requires that the longest context fits on the device.

    spec: vLLM's spec of the layer.
    """
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
    """Returns the `ResidentSpec` of the engine; None if the engine has several groups or a group of
    another kind."""
    groups = kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if len(groups) == 1 else None
    return spec if isinstance(spec, ResidentSpec) else None


def check_residency(vllm_config: Any, kv_cache_config: Any, config: SparseConfig) -> None:
    """Raises ConfigError if residency (contexts beyond device memory) can't work in this engine.
    The message says which setting to change."""
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
    """Registers `ResidentSpec` and `ResidentManager` with vLLM. Runs in each process that imports
    this module. Makes vLLM register its own specs first, because vLLM registers them only if the
    registry is empty."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(ResidentSpec, ResidentManager, uniform_type_base_spec=ResidentSpec)


_register()


# ------------------------------------------------------------------------ the scheduler side's view


class DevicePool:
    """Gives the scheduler side access to the device's blocks in an engine with residency (contexts
    beyond device memory): which blocks requests hold, and functions to move, preempt or fail a
    request. In an engine without residency its methods do nothing, and every request stays on the
    device.

    Usable after `bind`. Parts of vLLM 0.32 that this class uses: the state of `ResidentManager`,
    `Scheduler.requests`, `running`, `waiting`, `kv_holding_waiting`, `max_num_active_reqs`,
    `max_num_scheduled_tokens`, `current_step`, `defer_block_free`, `sched_step_seq`,
    `processed_step_seq`, `_preempt_request`, `reset_preempted_req_ids` and
    `encoder_cache_mismatch_reqs`, of `Request` the fields that count output in flight and
    `next_decode_eligible_step`, and `VllmConfig.max_concurrent_batches`.

    spec: the KV cache spec with residency; None in an engine without residency.
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
        """Connects this object to vLLM's block manager. Must be called while the constructor of
        vLLM's scheduler binds its block manager to the connector, because the scheduler is found on
        the call stack.

        stored_tokens: takes a request id, and returns how many leading tokens of the request the
            server has pinned.
        has_room: takes a request id, and returns True if the server has reserved room for the
            request.
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
            scheduler = self._scheduler
            if scheduler is not None and scheduler.vllm_config.max_concurrent_batches > 1:
                # vLLM counts steps (`planned_step`) only with this flag. It sets the flag itself
                # unless `kv_role` is `kv_producer`.
                scheduler.defer_block_free = True

    def leave_out(self, held: Collection[str]) -> None:
        """Leaves the requests in `held` (request ids) out of the step that vLLM is about to plan.
        Also preempts running requests that have lost blocks in the server. Such a request can't get
        further blocks, and if it stayed in the queue, vLLM might preempt other requests to make
        room for it."""
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
                # Preempts the request before removing it from `running`: if the preemption raises,
                # the request is still in a queue. A request in no queue would never end.
                scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
                scheduler.running.remove(request)

    def was_preempted(self, request_id: str) -> bool:
        """Returns True if `leave_out` or `Scheduler.reset_prefix_cache` has preempted the request
        since vLLM planned its last step. The step that vLLM plans now must not resume such a
        request, because the message of this step tells the workers that the request was preempted.
        Always False in an engine without residency (contexts beyond device memory)."""
        scheduler = None if self.spec is None else self._scheduler
        return scheduler is not None and request_id in scheduler.reset_preempted_req_ids

    def heed_wait(self, request: Any, waits: bool) -> None:
        """Makes vLLM heed the connector's answer 'ask again' (let the request wait). vLLM ignores
        this answer about a request that must not read the prefix cache, for example because it
        returns prompt logprobs. So vLLM would try to admit such a request before it may begin, and
        would admit no request behind it.

        Therefore this method sets the request's flag `skip_reading_prefix_cache` to False while the
        answer is 'ask again'. Nothing is read from the prefix cache then, because an engine with
        residency (contexts beyond device memory) has no hits there. Does nothing in an engine
        without residency.

        waits: True if the answer is 'ask again'.

        Source: vLLM 0.32.
        """
        if self.spec is not None:
            may_not_read = request.get_skip_reading_prefix_cache()
            request.skip_reading_prefix_cache = may_not_read and not waits

    def describe(self) -> str:
        """Returns a text for the log: how many device blocks a request holds, and how many requests
        fit on the device."""
        assert self.spec is not None
        held = self.spec.device_blocks(self.max_model_len)
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
        """Returns the greatest length, in tokens, that a request can reach."""
        return min(int(request.num_prompt_tokens + request.max_tokens), self.max_model_len)

    def holds_whole(self, request: Any) -> bool:
        """Returns True if the whole request stays on the device even at its greatest length."""
        spec = self.spec
        return spec is None or -(-self.longest(request) // spec.block_size) <= spec.whole_blocks

    def left_out(self, hit_tokens: int) -> range:
        """Returns which blocks of a hit are neither leased nor loaded, as a range of block indices:
        those that need not be on the device once the server has pinned them. `ResidentManager._gap`
        returns the same range.

        Empty in an engine without residency (contexts beyond device memory). Also empty with
        `residency = "auto"`: there `ResidentManager` decides only at the allocation which blocks
        are loaded to the device, so all blocks of the hit are leased.

        hit_tokens: length of the hit.
        """
        spec = self.spec
        return range(0) if spec is None or spec.begins_whole else spec.gap(hit_tokens)

    # ------------------------------------------------------------------- requests that may be whole

    def begin_whole(self, request_id: str, is_meant: bool) -> None:
        """Decides, for a request without blocks on the device, whether it begins wholly on the
        device although `residency` is `host` or the request was moved before. Does nothing for a
        request with blocks."""
        manager = self._manager
        if manager is None or self.has_blocks(request_id):
            return
        if is_meant:
            manager.whole.add(request_id)
            manager.moved.discard(request_id)
        else:
            manager.whole.discard(request_id)

    def begins_alone(self, request_id: str) -> bool:
        """Returns True if the request begins wholly on the device only because of `begin_whole`."""
        return self._manager is not None and request_id in self._manager.whole

    def could_be_whole(self, request: Any) -> bool:
        """Returns True if all present blocks of the request fit in vLLM's block pool."""
        spec = self.spec
        if spec is None:
            return False
        return -(-int(request.num_tokens) // spec.block_size) <= self._num_blocks

    def stays_whole(self, request: Any) -> bool:
        """Returns True if all present blocks of the request may stay on the device, although the
        request can outgrow the device later: it begins whole (`ResidentManager.begins_whole`), was
        not moved off the device, and its present blocks fit in vLLM's block pool."""
        spec = self.spec
        if spec is None or self._is_moved(request.request_id):
            return False
        return -(-int(request.num_tokens) // spec.block_size) <= self._num_blocks

    def _is_moved(self, request_id: str) -> bool:
        manager, spec = self._manager, self.spec
        if manager is None:
            return spec is None or not spec.begins_whole
        return request_id in manager.moved or not manager.begins_whole(request_id)

    def has_room_for(self, request: Any) -> bool:
        """Returns True if vLLM's block pool has room now for all blocks of a new request with a
        hit, so that the request can begin wholly on the device."""
        spec, manager = self.spec, self._manager
        if spec is None or manager is None or not self.stays_whole(request):
            return False
        room = manager.room_for(request.request_id, is_hit=True)
        return -(-int(request.num_tokens) // spec.block_size) <= room

    def demand(self, has_room: Callable[[str], bool]) -> Demand | None:
        """Returns how many blocks the coming step needs and how many blocks of the device's pool
        are free (`Demand`), so that the caller can decide whether to move requests off the device.
        Returns None if the pool surely has enough free blocks, or if no request begins whole.

        has_room: takes a request id, and returns True if the server has reserved room for the
            request.
        """
        spec, manager, scheduler = self.spec, self._manager, self._scheduler
        if spec is None or manager is None or scheduler is None:
            return None
        if not (spec.begins_whole or manager.whole):
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
        """Returns how many free blocks vLLM needs to admit the first waiting request. Returns 0 if
        this request holds blocks already: its further blocks are counted in `promised_blocks`.
        Returns None if no request waits, or if vLLM may not run more requests."""
        spec, scheduler = self.spec, self._scheduler
        assert spec is not None
        if len(scheduler.running) >= scheduler.max_num_active_reqs:
            return None
        if scheduler.kv_holding_waiting:
            # The first waiting request holds blocks already. The blocks that it still needs are
            # counted in `promised_blocks`.
            return 0
        if not scheduler.waiting:
            return None
        request = scheduler.waiting.peek_request()
        needed = -(-int(request.num_tokens) // spec.block_size)
        if spec.moved_blocks < needed and has_room(request.request_id):
            needed = spec.moved_blocks
        return needed + self._watermark_blocks

    def running_requests(self) -> list[str]:
        """Returns the ids of the running requests, in the order in which they were admitted."""
        return [request.request_id for request in self._scheduler.running]

    def relief(self, request_id: str, stored_tokens: int) -> Relief | None:
        """Returns what would be gained by moving the request off the device (`Relief`): how many
        blocks vLLM's block pool gains, and how many fewer blocks the request still needs for its
        prompt. Returns None if the request has no blocks or was moved already.

        stored_tokens: number of leading tokens that the server has pinned.
        """
        manager = self._manager
        if manager is None or not self.has_blocks(request_id) or self._is_moved(request_id):
            return None
        request = self._scheduler.requests[request_id]
        return manager.relief(request_id, _processed(request), stored_tokens)

    def keep(self, unsure: Set[str]) -> None:
        """Makes requests free no blocks in the coming step (`ResidentManager.unsure`)."""
        if self._manager is not None:
            self._manager.unsure = unsure

    def move(self, request_id: str) -> None:
        """Moves a running request off the device. Only its sinks (first blocks), its recent window
        (last tokens) and its hot slots (device blocks for selected blocks) stay on the device."""
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

    def is_running(self, request_id: str) -> bool:
        """Returns True if the request is among vLLM's running requests."""
        request = None if self._scheduler is None else self._scheduler.requests.get(request_id)
        return request is not None and request in self._scheduler.running

    def is_in_flight(self, request_id: str) -> bool:
        """Returns True if a step in progress computes tokens of the request."""
        request = None if self._scheduler is None else self._scheduler.requests.get(request_id)
        return request is not None and bool(request.num_in_flight_tokens)

    @property
    def planned_step(self) -> int:
        """Returns the number of the last planned step. Returns 0 if vLLM does not count steps: it
        counts them only if it may plan a step before the last step has ended."""
        return int(getattr(self._scheduler, "sched_step_seq", 0))

    @property
    def ended_step(self) -> int:
        """Returns the number of the last step whose result has reached vLLM; 0 if vLLM does not
        count steps (see `planned_step`)."""
        return int(getattr(self._scheduler, "processed_step_seq", 0))

    def num_freed(self, request_id: str) -> int:
        """Returns the index of the request's first block after its freed blocks, which begin after
        the sinks (first blocks). 0 if no block was freed. Must be called only in an engine with
        residency (contexts beyond device memory)."""
        assert self._manager is not None
        return self._manager.freed_blocks.get(request_id, 0)

    def has_away(self, request_id: str) -> bool:
        """Returns True if some blocks of the request are only in host memory."""
        return self.spec is not None and self.num_freed(request_id) > self.spec.sink_blocks

    @property
    def has_lost(self) -> bool:
        """Returns True if a request has lost blocks in the server and vLLM has not preempted the
        request yet."""
        return self._manager is not None and bool(self._manager.lost)

    def lose(self, request_id: str) -> None:
        """Handles a request that has lost blocks in the server. Makes vLLM preempt the request
        before it gets another block, and makes vLLM drop the output of the request's steps in
        flight."""
        request = None if self._scheduler is None else self._scheduler.requests.get(request_id)
        if request is None:
            return
        # Only a running request is marked as lost, because vLLM can preempt only running requests.
        # A request that waits for its load must still get its blocks, or all requests behind it
        # would wait for ever.
        if self._manager is not None and request in self._scheduler.running:
            self._manager.lost.add(request_id)
        request.drop_stale_output = True
        request.num_stale_output_tokens = request.num_in_flight_tokens

    def lose_blocks(self, first_blocks: Set[int]) -> None:
        """Makes vLLM preempt the requests that hold one of these blocks, and drop the output of
        their steps in flight. Used as a fallback after an exception. The exception may come from
        `lose`, so this method does not call `lose`.

        first_blocks: ids of the first blocks of requests.
        """
        if self._manager is not None:
            for request in self._scheduler.running:
                blocks = self._manager.req_to_blocks[request.request_id]
                if not first_blocks.isdisjoint(block.block_id for block in blocks):
                    self._manager.lost.add(request.request_id)
                    request.drop_stale_output = True
                    request.num_stale_output_tokens = request.num_in_flight_tokens

    def fail(self, request_id: str, why: str) -> None:
        """Logs `why`, and makes vLLM end the request with an error. For this the request is added
        to the scheduler's set of requests with an encoder cache mismatch: vLLM ends every request
        in that set."""
        logger.error("hotkv: request %s ends with an error: %s", request_id, why)
        if self._scheduler is not None:
            self._scheduler.encoder_cache_mismatch_reqs.add(request_id)

    def requests_of(self, blocks: Set[int]) -> list[str]:
        """Returns the ids of the requests that hold one of these blocks, which a worker has
        reported as lost. Since the report, vLLM may have reallocated a block to another request.
        Then that request is in the result too, and is recomputed although it has lost nothing."""
        tables = {} if self._manager is None else self._manager.req_to_blocks
        return [
            request_id
            for request_id, table in tables.items()
            if not blocks.isdisjoint(block.block_id for block in table)
        ]


def _processed(request: Any) -> int:
    """Returns the number of a request's tokens whose computation has ended: vLLM's number of
    computed tokens, minus the tokens that steps in flight still compute."""
    return int(request.num_computed_tokens - request.num_in_flight_tokens)


def _scheduler_of_caller() -> Any:
    """Finds vLLM's scheduler on the call stack and returns it; None if there is none. This works
    during `bind_kv_cache_manager`, which the scheduler calls from its constructor. vLLM does not
    pass the scheduler to connectors."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and isinstance(owner, Scheduler):
            return owner
        frame = frame.f_back
    return None
