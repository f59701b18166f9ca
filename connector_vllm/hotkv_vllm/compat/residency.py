"""Residency on vLLM's side: a KV cache spec whose old blocks live in host memory, its manager, and
how many blocks a request holds on the device.

A request holds its first blocks (sinks), the recent window with what is in flight, and hot slots:
blocks of vLLM's pool that belong to no position, with contents of their own in each layer. All
other complete blocks are given back to the pool once `ResidentManager.stored_tokens` says that the
server keeps them; in the block table they become the null block.

What is always true: no block is given back before the server has pinned its bytes; a request that
has lost bytes gets no more blocks, so that vLLM preempts it and computes it anew.

Uses, of vLLM 0.32: `AttentionBackend.customize_spec` (temporary there, see RFC #42449),
`FullAttentionSpec`, `FullAttentionManager` with its block tables and pool, `KVCacheSpecRegistry`,
`VllmConfig.max_in_flight_tokens`.
"""

import sys
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, fields
from types import FrameType
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from hotkv_sparse import SparseConfig
from hotkv_sparse.hotset import USUAL_SETS
from hotkv_vllm.config import SPARSE, ConfigError
from hotkv_vllm.link import logger

# ------------------------------------------------------------------------------- what vLLM is given


SPARE_SLOTS = 8
"""Hot slots beyond a hot set's capacity, in which blocks arrive that the next step adopts."""


@dataclass(frozen=True, kw_only=True)
class ResidentSpec(FullAttentionSpec):
    """Full attention whose old blocks live in host memory.

    `keeps_tokens`: what a request keeps on the device whatever it is: the recent window, tokens in
    flight, and those whose store is under way. `sparse_from_tokens`: contexts below are dense, so
    they stay on the device as a whole.
    """

    sink_blocks: int
    recent_tokens: int
    keeps_tokens: int
    hot_blocks: int
    sparse_from_tokens: int

    @staticmethod
    def of(spec: FullAttentionSpec, config: SparseConfig, vllm_config: Any) -> "ResidentSpec":
        """Returns the spec of a layer that vLLM would keep on the device as a whole."""
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
        )

    @property
    def whole_blocks(self) -> int:
        """Most blocks of a request none of which is ever given back."""
        window = _blocks(self.keeps_tokens, self.block_size) + 1
        short = _blocks(self.sparse_from_tokens, self.block_size) + 1
        return max(self.sink_blocks + window, short)

    def device_blocks(self, num_tokens: int) -> int:
        """Most blocks that a request of so many tokens holds, hot slots included."""
        needed = _blocks(num_tokens, self.block_size)
        return needed if needed <= self.whole_blocks else self.whole_blocks + self.hot_blocks

    def gap(self, hit_tokens: int) -> range:
        """Blocks between the sinks and the recent window of a hit that outgrows the device."""
        if _blocks(hit_tokens, self.block_size) <= self.whole_blocks:
            return range(0)
        return range(self.sink_blocks, (hit_tokens - self.recent_tokens) // self.block_size)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """What vLLM's start asks of the pool for one request."""
        return self.device_blocks(vllm_config.model_config.max_model_len) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        """Returns the spec of one group, that of its first layer. Raises AssertionError if layers
        differ; vLLM's own would merge them."""
        return KVCacheSpec.merge.__func__(cls, specs)


def hot_blocks(config: SparseConfig, block_tokens: int) -> int:
    """Hot slots of a request: as many as the hot set of a layer can use at most."""
    endless = 1 << 40
    budget = config.budget_blocks(endless, block_tokens)
    return USUAL_SETS * max(budget, config.max_always_blocks(block_tokens)) + SPARE_SLOTS


def _blocks(num_tokens: int, block_tokens: int) -> int:
    return -(-num_tokens // block_tokens)


class ResidentManager(FullAttentionManager):
    """vLLM's manager of the blocks of resident requests. The scheduler side sets `stored_tokens`
    and `has_room`; `freed_blocks` says, by request, up to which block those behind the sinks
    were given back; `hot` has the hot slots."""

    def __init__(self, kv_cache_spec: ResidentSpec, **more: Any) -> None:
        super().__init__(kv_cache_spec, **more)
        self.spec = kv_cache_spec
        # vLLM gives a cap only to the kinds of specs that it knows.
        self.max_admission_blocks_per_request = kv_cache_spec.whole_blocks
        self.stored_tokens: Callable[[str], int] = lambda request_id: 0
        self.has_room: Callable[[str], bool] = lambda request_id: True
        self.hot: dict[str, list[KVCacheBlock]] = {}
        self.hot_ids: dict[str, tuple[int, ...]] = {}
        self.freed_blocks: dict[str, int] = {}
        self.lost: set[str] = set()
        self.most_held = 0
        self._longest: dict[str, int] = {}

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *_: Any, **__: Any
    ) -> Any:
        """No hits of the device's own: what it has of a prefix is no proof that the server has the
        rest. The connector answers."""
        return tuple([] for _ in kv_cache_group_ids), 0

    # --------------------------------------------------------------------------------- hot slots

    def _missing_hot(self, request_id: str, num_tokens: int) -> int:
        """Hot slots still to take for a request that is to have so many tokens: all or none."""
        if not self._outgrows(request_id, num_tokens):
            return 0
        return self.spec.hot_blocks - len(self.hot.get(request_id, ()))

    def _outgrows(self, request_id: str, num_tokens: int) -> bool:
        """Returns whether a request that is to have so many tokens, or was admitted with more, has
        hot slots. Only such a one gives blocks back."""
        longest = max(num_tokens, self._longest.get(request_id, 0))
        return _blocks(longest, self.block_size) > self.spec.whole_blocks

    # -------------------------------------------------------------------------------- allocation

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
        """As vLLM's, for what stays on the device."""
        if request_id in self.lost:
            # No allocation succeeds, so the scheduler preempts the request, and it starts anew.
            return int(self.block_pool.num_gpu_blocks) + 1
        if apply_admission_cap:
            self._longest[request_id] = num_tokens
        is_new = not self.req_to_blocks.get(request_id)
        if is_new and self._outgrows(request_id, num_tokens) and not self.has_room(request_id):
            # Requests that ask for no hit don't wait for the answer to it.
            return int(self.block_pool.num_gpu_blocks) + 1
        needed: int = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap=apply_admission_cap,
            prefill_end=prefill_end,
        )
        is_hit = total_computed_tokens > num_local_computed_tokens
        if request_id not in self.num_cached_block and is_hit and not apply_admission_cap:
            held = len(new_computed_blocks) + len(self.req_to_blocks.get(request_id, ()))
            first, last = self._gap(request_id, total_computed_tokens, held)
            needed -= last - first
        return needed + self._missing_hot(request_id, num_tokens)

    def _gap(self, request_id: str, computed_tokens: int, num_held: int) -> tuple[int, int]:
        """Blocks [first, last) of a hit that are never allocated nor loaded: those between the
        sinks and the recent window, as far as the server keeps them for the request."""
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
        """Blocks for sinks and recent window of a hit; null blocks between them."""
        total = num_local_computed_tokens + num_external_computed_tokens
        blocks = self.req_to_blocks[request_id]
        first, last = self._gap(request_id, total, len(blocks))
        if last > first:
            self._take(blocks, first - len(blocks), record_for_zeroing)
            blocks.extend([self._null_block] * (last - first))
            self.freed_blocks[request_id] = last
        self._take(blocks, _blocks(total, self.block_size) - len(blocks), record_for_zeroing)

    def _take(self, blocks: list[KVCacheBlock], count: int, record_for_zeroing: bool) -> None:
        """Appends new blocks of the pool."""
        if count <= 0:
            return
        new = self.block_pool.get_new_blocks(count)
        blocks.extend(new)
        if self.records_new_block_ids and record_for_zeroing:
            self.new_block_ids.extend(block.block_id for block in new)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """As vLLM's, and the hot slots with the first of them."""
        count = self._missing_hot(request_id, num_tokens)
        if count > 0:
            hot = self.hot[request_id] = self.block_pool.get_new_blocks(count)
            self.hot_ids[request_id] = tuple(block.block_id for block in hot)
        new: list[KVCacheBlock] = super().allocate_new_blocks(
            request_id, num_tokens, num_tokens_main_model
        )
        freed = max(0, self.freed_blocks.get(request_id, 0) - self.spec.sink_blocks)
        held = len(self.req_to_blocks[request_id]) - freed + len(self.hot.get(request_id, ()))
        self.most_held = max(self.most_held, held)
        return new

    # ------------------------------------------------------------------------------- giving back

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Gives back what the server keeps, behind the recent window of tokens whose steps have
        ended. vLLM calls it before it allocates for the request."""
        spec = self.spec
        if request_id not in self.hot:
            return
        kept = min(processed_computed_tokens - spec.recent_tokens, self.stored_tokens(request_id))
        first = max(spec.sink_blocks, self.freed_blocks.get(request_id, 0))
        last = min(kept // self.block_size, len(self.req_to_blocks[request_id]))
        if last > first:
            self._remove_blocks_in_range(request_id, spec.sink_blocks, last)
            self.freed_blocks[request_id] = last

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """As vLLM's, with the hot slots."""
        self.lost.discard(request_id)
        self.freed_blocks.pop(request_id, None)
        self.hot_ids.pop(request_id, None)
        self._longest.pop(request_id, None)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks + self.hot.pop(request_id, [])


def customized(spec: Any, config: SparseConfig, vllm_config: Any) -> Any:
    """Returns the spec of a layer of a resident engine; layers that are not of plain full attention
    keep theirs."""
    if type(spec) is not FullAttentionSpec:
        return spec
    if spec.sliding_window or spec.attention_chunk_size or spec.non_causal:
        return spec
    return ResidentSpec.of(spec, config, vllm_config)


def resident_spec(kv_cache_config: Any) -> ResidentSpec | None:
    """Returns the spec of the engine's one group, if that is resident."""
    groups = kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if len(groups) == 1 else None
    return spec if isinstance(spec, ResidentSpec) else None


def check_residency(vllm_config: Any, kv_cache_config: Any, config: SparseConfig) -> None:
    """Refuses (ConfigError) engines whose context can't be resident in host memory."""
    name = f"{SPARSE}.residency"
    spec = resident_spec(kv_cache_config)
    if spec is None:
        kinds = sorted({type(g.kv_cache_spec).__name__ for g in kv_cache_config.kv_cache_groups})
        raise ConfigError(
            f"{name} = 'host': it needs a model all of whose layers are of plain full attention, "
            f"and hotkv's attention in vLLM; this one has {', '.join(kinds)}; leave it out"
        )
    transfer = vllm_config.kv_transfer_config
    if not transfer.is_kv_producer:
        raise ConfigError(
            f"{name} = 'host': with kv_role {transfer.kv_role!r} this engine stores nothing, and "
            "what is not stored can't leave the device; set kv_role to 'kv_both'"
        )
    num_blocks = kv_cache_config.num_blocks - 1
    needed = spec.device_blocks(vllm_config.model_config.max_model_len)
    if config.adaptive_p is not None:
        raise ConfigError(
            f"{name} = 'host': it needs hot sets of one size; leave out {SPARSE}.adaptive_p"
        )
    if num_blocks < needed:
        raise ConfigError(
            f"{name} = 'host': a request holds up to {needed} blocks of {spec.block_size} tokens "
            f"on the device, the pool has {num_blocks}; raise kv_cache_memory_bytes, or lower "
            f"max_num_batched_tokens ({vllm_config.scheduler_config.max_num_batched_tokens}) or "
            f"sparse_topk ({config.sparse_topk})"
        )


def _register() -> None:
    """Makes spec and manager known to vLLM, in each process that imports this module. Its own come
    first: a registry that is not empty counts as complete."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(ResidentSpec, ResidentManager, uniform_type_base_spec=ResidentSpec)


_register()


# --------------------------------------------------------------------- what the scheduler side sees


class DevicePool:
    """The pool of a resident engine as the scheduler side sees it: what requests hold, and how one
    is lost or fails.

    Uses, of vLLM 0.32: what `ResidentManager` holds, `Scheduler.requests` and
    `encoder_cache_mismatch_reqs`, and of `Request` what says how much output is in flight.

    The engine's pool as the scheduler side sees it, once vLLM has made it (`bind`). `spec`: None
    for an engine that is not resident.
    """

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
            found.stored_tokens = stored_tokens
            found.has_room = has_room
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
        """Returns whether a request stays on the device as a whole, as long as it may grow."""
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
        """Returns whether the request has blocks of the device."""
        return self._manager is not None and request_id in self._manager.req_to_blocks

    def num_freed(self, request_id: str) -> int:
        """Blocks of the request from the sinks up to here were given back."""
        return 0 if self._manager is None else self._manager.freed_blocks.get(request_id, 0)

    def has_away(self, request_id: str) -> bool:
        """Returns whether blocks of the request are in host memory only."""
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
        """Returns the requests that have one of these blocks. Beside the one that was meant, when
        its step was planned, that is whoever has been given the block since; vLLM sets both
        back."""
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
