"""Residency in vLLM's block management: a KV cache spec (`ResidentSpec`) and the manager of its
blocks (`ResidentManager`).

On the device a request holds its sinks, its recent window with tokens in flight, and hot slots:
blocks of vLLM's pool without a position in the context, with other contents in each layer. All
other complete blocks return to the pool once the server has pinned them; the block table then has
the null block.

With `residency = "auto"`, or if the server is away when it begins (`ResidentManager.whole`), it
holds all its blocks and no hot slots until it is moved off the device (`ResidentManager.moved`).

- A request that begins wholly on the device shares blocks there with others, as vLLM does: it hits
  vLLM's own prefix cache, which has only blocks with exact KV. One that begins as if moved does not
  hit: a block on the device does not mean that the server has it and those before.
- No block is freed before the server has pinned its bytes.
- A request that has lost blocks in the server gets no further block, so vLLM preempts it and
  computes it anew.

Builds on `AttentionBackend.customize_spec` (temporary in vLLM, see RFC #42449).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice, takewhile
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    get_kv_cache_spec_kind,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from hotkv_sparse import SparseConfig
from hotkv_sparse.vllm.scheduler.moves import Relief
from hotkv_sparse.vllm.settings import SPARSE
from hotkv_vllm import versions
from hotkv_vllm.config import ALLOW_UNTESTED, ConfigError, flat

# ------------------------------------------------------------------------- the spec and its manager


SPARE_SLOTS = 8
"""Hot slots beyond those that the hot set can use, for blocks that a step has selected and only
the next adds."""


@dataclass(frozen=True, kw_only=True)
class ResidentSpec(FullAttentionSpec):
    """sink_blocks, recent_tokens: stay on the device.
    keeps_tokens: most tokens at the end of a context that the device may hold: recent window,
        tokens in flight, and tokens whose store has not ended.
    sparse_from_tokens: a shorter context attends to all its blocks, which stay on the device. 0
        with `residency = "auto"`, where a moved one attends sparsely.
    begins_whole: `residency = "auto"`.
    """

    HARMLESS_FIELDS: ClassVar[frozenset[str]] = frozenset(
        {"sink_blocks", "recent_tokens", "keeps_tokens", "hot_blocks"}
        | {"sparse_from_tokens", "begins_whole"}
    )
    """Outside the key space: only blocks with exact KV are shared, and which blocks stay on the
    device does not change their bytes."""
    sink_blocks: int
    recent_tokens: int
    keeps_tokens: int
    hot_blocks: int
    sparse_from_tokens: int
    begins_whole: bool = False

    @staticmethod
    def of(spec: FullAttentionSpec, config: SparseConfig, vllm_config: Any) -> "ResidentSpec":
        tokens = spec.block_size
        scheduler = vllm_config.scheduler_config
        step_tokens = int(scheduler.max_num_batched_tokens)
        return ResidentSpec(
            **{f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec) if f.init},
            sink_blocks=_blocks(config.sink_tokens, tokens),
            recent_tokens=config.recent_tokens,
            keeps_tokens=config.recent_tokens + vllm_config.max_in_flight_tokens + step_tokens,
            hot_blocks=hot_blocks(config, tokens),
            sparse_from_tokens=0 if config.residency == "auto" else config.min_context_tokens,
            begins_whole=config.residency == "auto",
        )

    @property
    def whole_blocks(self) -> int:
        """Greatest length, in blocks, at which all blocks stay on the device."""
        window = _blocks(self.keeps_tokens, self.block_size) + 1
        short = _blocks(self.sparse_from_tokens, self.block_size) + 1
        return max(self.sink_blocks + window, short)

    def device_blocks(self, num_tokens: int) -> int:
        """Most device blocks that a request of `num_tokens` holds, hot slots included."""
        needed = _blocks(num_tokens, self.block_size)
        return needed if needed <= self.whole_blocks else self.moved_blocks

    @property
    def moved_blocks(self) -> int:
        """As `device_blocks`, of a request that is only in part on the device."""
        return self.whole_blocks + self.hot_blocks

    def gap(self, hit_tokens: int) -> range:
        """Blocks of a hit that need not be on the device, between sinks and recent window; empty
        if it is short enough."""
        if _blocks(hit_tokens, self.block_size) <= self.whole_blocks:
            return range(0)
        return range(self.sink_blocks, (hit_tokens - self.recent_tokens) // self.block_size)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Of the longest context in this layer: vLLM checks its block pool against it."""
        return self.device_blocks(vllm_config.model_config.max_model_len) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        """Raises AssertionError if the specs differ; `FullAttentionSpec`'s would merge them."""
        return KVCacheSpec.merge.__func__(cls, specs)


@dataclass(frozen=True, slots=True)
class BesideGroup:
    """A group of another kind in the same pool, such as sliding windows.

    most_blocks: that a request ever holds at a time.
    """

    index: int
    block_tokens: int
    most_blocks: int

    def blocks(self, num_tokens: int) -> int:
        """The most that a request of `num_tokens` holds."""
        return min(_blocks(num_tokens, self.block_tokens), self.most_blocks)


def beside_groups(vllm_config: Any, kv_cache_config: Any) -> tuple[BesideGroup, ...]:
    """All but that of residency. `most_blocks` as vLLM computes it."""
    return tuple(
        BesideGroup(
            index,
            group.kv_cache_spec.block_size,
            _blocks(
                group.kv_cache_spec.max_memory_usage_bytes(vllm_config),
                group.kv_cache_spec.page_size_bytes,
            ),
        )
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        if not isinstance(group.kv_cache_spec, ResidentSpec)
    )


@dataclass(frozen=True, slots=True)
class AwaitedRequest:
    """num_blocks: of its present tokens.
    beside_blocks: in other groups.
    hashes: of its complete blocks, vLLM's: two that are equal stand for equal prefixes.
    """

    num_blocks: int = 0
    beside_blocks: int = 0
    hashes: Sequence[Any] = ()

    def num_common(self, other: "AwaitedRequest") -> int:
        """Leading blocks that both have."""
        lengths = range(min(len(self.hashes), len(other.hashes)))
        return bisect_left(lengths, 1, key=lambda at: self.hashes[at] != other.hashes[at])


NOT_AWAITED = AwaitedRequest()


def num_shared(blocks: Sequence[KVCacheBlock]) -> int:
    """Those that requests hold: others count as free."""
    return sum(block.ref_cnt > 0 for block in blocks)


def hot_blocks(config: SparseConfig, block_tokens: int) -> int:
    """Of a request: what a layer's hot set can use at most, plus SPARE_SLOTS."""
    endless = 1 << 40
    # The budget includes sinks and recent window (`SparseConfig.check`).
    return config.most_blocks(endless, block_tokens) + SPARE_SLOTS


def _blocks(num_tokens: int, block_tokens: int) -> int:
    return -(-num_tokens // block_tokens)


class ResidentManager(FullAttentionManager):
    """Manages all requests' device blocks for vLLM's scheduler.

    stored_tokens: a request's leading tokens that the server has pinned. Set, like the next three,
        by `DevicePool.bind`.
    exact_tokens: leading ones of vLLM's `Request` whose KV is exact, as far as planned.
    has_room: the server has reserved room for a request.
    step_starts: called before vLLM plans a step.
    find_hit: vLLM's hit over all groups. Set as the above.
    freed_blocks: by request, the first block after its freed ones, which begin after the sinks.
    lost: requests that have lost blocks in the server.
    moved: requests that were moved off the device.
    whole: requests that begin wholly on the device because the server is away.
    unsure: requests of which the server may have lost blocks: they free none in this step.
    awaited: with `residency = "auto"`, requests that waited when the step began.
    beside: the other groups, with their managers.
    """

    _managers: ClassVar[WeakKeyDictionary[Any, "ResidentManager"]] = WeakKeyDictionary()
    """By block pool: vLLM finds hits by a class method."""

    def __init__(self, kv_cache_spec: ResidentSpec, **more: Any) -> None:
        super().__init__(kv_cache_spec, **more)
        self.spec = kv_cache_spec
        # Most blocks that vLLM demands for an admission, which it sets only for specs that it
        # knows.
        self.max_admission_blocks_per_request = kv_cache_spec.whole_blocks
        self.stored_tokens: Callable[[str], int] = lambda request_id: 0
        self.exact_tokens: Callable[[Any], int] = lambda request: 0
        self.has_room: Callable[[str], bool] = lambda request_id: True
        self.step_starts: Callable[[], None] = lambda: None
        self.find_hit: Callable[[Any, int], Any] = lambda block_hashes, max_length: (((),),)
        self.hot: dict[str, list[KVCacheBlock]] = {}
        self.hot_ids: dict[str, tuple[int, ...]] = {}
        self.freed_blocks: dict[str, int] = {}
        self.lost: set[str] = set()
        self.moved: set[str] = set()
        self.whole: set[str] = set()
        self.unsure: Set[str] = frozenset()
        self.awaited: dict[str, AwaitedRequest] = {}
        self.beside: tuple[tuple[BesideGroup, Any], ...] = ()
        self._begins_moved: set[str] = set()
        self._counted_gap = range(0)
        self._longest: dict[str, int] = {}
        self._lists_all_hits = False
        self._managers[self.block_pool] = self

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> Any:
        """No hit for a request that may have to begin as if moved."""
        found, hit_tokens = super().find_longest_cache_hit(
            block_hashes,
            max_length,
            kv_cache_group_ids,
            block_pool,
            kv_cache_spec,
            drop_eagle_block,
            alignment_tokens,
            dcp_world_size,
            pcp_world_size,
        )
        manager = cls._managers[block_pool]
        # vLLM never hits a prompt's last token.
        if manager._lists_all_hits or manager._fits_whole(max_length + 1, num_shared(found[0])):
            return found, hit_tokens
        return tuple([] for _ in found), 0

    def cache_blocks(self, request: Any, num_tokens: int, *more: Any, **named: Any) -> None:
        num_exact = min(num_tokens, self.shareable_tokens(request))
        super().cache_blocks(request, num_exact, *more, **named)

    def shareable_tokens(self, request: Any) -> int:
        """Leading ones that vLLM's own prefix cache may have, those with exact KV. Whether a token
        of the answer gets exact KV is decided after vLLM has planned its step: the next caches its
        block."""
        settled = max(request.num_prompt_tokens, request.num_computed_tokens)
        return min(settled, self.exact_tokens(request))

    def accompany(self, beside: Sequence[tuple[BesideGroup, Any]]) -> None:
        """The other groups' blocks get into vLLM's own prefix cache as this one's: their layers'
        KV is inexact where this one's is. What vLLM counts for an admission is mended for them
        too."""
        self.beside = tuple(beside)
        for group, manager in beside:
            manager.cache_blocks = partial(self._cache_beside, manager.cache_blocks)
            manager.get_num_blocks_to_allocate = partial(
                self._needs_beside, group, manager, manager.get_num_blocks_to_allocate
            )

    def _cache_beside(
        self, cache_blocks: Any, request: Any, num_tokens: int, *more: Any, **named: Any
    ) -> None:
        cache_blocks(request, min(num_tokens, self.shareable_tokens(request)), *more, **named)

    def _needs_beside(
        self,
        group: BesideGroup,
        manager: Any,
        count: Any,
        request_id: str,
        *more: Any,
        **named: Any,
    ) -> int:
        """As `get_num_blocks_to_allocate` for an admitted request."""
        needed: int = count(request_id, *more, **named)
        if named.get("apply_admission_cap") and manager.req_to_blocks.get(request_id):
            needed = max(needed, self._promised_by(group, manager, request_id))
        return needed

    def beside_blocks(self, num_tokens: int) -> int:
        """The most that a request of `num_tokens` holds in other groups."""
        return sum(group.blocks(num_tokens) for group, _ in self.beside)

    def _fits_whole(self, num_tokens: int, shared: int) -> bool:
        """A new request can begin wholly on the device. `shared`: its blocks that running requests
        hold."""
        needed = _blocks(num_tokens, self.block_size)
        if needed <= self.spec.whole_blocks:
            return True
        needed += self.beside_blocks(num_tokens)
        room = self.block_pool.get_num_free_blocks() - self.promised_blocks
        return self.spec.begins_whole and needed - shared <= room

    def shared_blocks(self, request: Any) -> int:
        """Leading blocks of a waiting request that running ones hold on the device."""
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return 0
        if self.beside:
            # A hit ends where all groups have one.
            self._lists_all_hits = True
            try:
                most = int(request.num_tokens) - 1
                found = self.find_hit(request.block_hashes, most)
            finally:
                self._lists_all_hits = False
            return num_shared(found[0][self.kv_cache_group_id])
        whole = (int(request.num_tokens) - 1) // self.block_size
        found = (
            self.block_pool.get_cached_block(block_hash, [self.kv_cache_group_id])
            for block_hash in islice(request.block_hashes, whole)
        )
        return num_shared([blocks[0] for blocks in takewhile(bool, found)])

    def new_step_starts(self) -> None:
        super().new_step_starts()
        self.step_starts()

    # --------------------------------------------------------------------------------- hot slots

    def _missing_hot(self, request_id: str, num_tokens: int) -> int:
        if not self._outgrows(request_id, num_tokens):
            return 0
        return self.spec.hot_blocks - len(self.hot.get(request_id, ()))

    @property
    def num_without_hot(self) -> int:
        """Requests that will take hot slots once they outgrow what stays on the device."""
        return sum(self._is_moved(name) and name not in self.hot for name in self.req_to_blocks)

    def _outgrows(self, request_id: str, num_tokens: int) -> bool:
        """Whether some blocks do not stay on the device; only then a request has hot slots and
        frees blocks.

        num_tokens: or the length at its admission, if greater.
        """
        if not self._is_moved(request_id):
            return False
        return self._most_blocks(request_id, num_tokens) > self.spec.whole_blocks

    def _most_blocks(self, request_id: str, num_tokens: int) -> int:
        return _blocks(max(num_tokens, self._longest.get(request_id, 0)), self.block_size)

    def begins_whole(self, request_id: str) -> bool:
        return self.spec.begins_whole or request_id in self.whole

    def _is_moved(self, request_id: str) -> bool:
        is_moved = request_id in self.moved or request_id in self._begins_moved
        return is_moved or not self.begins_whole(request_id)

    # -------------------------------------------------------------------------------- allocation

    def needs(self, request_id: str, num_tokens: int) -> int:
        """Blocks, hot slots included, that a running request must get to grow to `num_tokens`."""
        managers = (self, *(manager for _, manager in self.beside))
        lacks = (
            _blocks(num_tokens, one.block_size) - len(one.req_to_blocks.get(request_id, ()))
            for one in managers
        )
        return sum(max(0, lack) for lack in lacks) + self._missing_hot(request_id, num_tokens)

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
        """Counts only blocks that stay on the device, and hot slots. More than the pool has if
        the request must get none, as it has lost blocks or the server has no room."""
        if request_id in self.lost:
            # The allocation fails, so vLLM preempts the request and computes it anew.
            return int(self.block_pool.num_gpu_blocks) + 1
        is_decided = request_id in self._longest and not apply_admission_cap
        if apply_admission_cap:
            self._longest[request_id] = num_tokens
        is_new = not self.req_to_blocks.get(request_id)
        if is_new and self.spec.begins_whole and not is_decided:
            is_loaded = total_computed_tokens > num_local_computed_tokens
            self._decide(request_id, num_tokens, has_hit=bool(new_computed_blocks), loads=is_loaded)
        if is_new and self._outgrows(request_id, num_tokens) and not self.has_room(request_id):
            # Not admitted yet. Usually the connector's answer makes it wait, but vLLM does not
            # always ask.
            return int(self.block_pool.num_gpu_blocks) + 1
        needed: int = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            # All blocks of other requests stay on the device, so the cap is not for them.
            apply_admission_cap=apply_admission_cap and self._outgrows(request_id, num_tokens),
            prefill_end=prefill_end,
        )
        if apply_admission_cap and not is_new:
            # vLLM takes the blocks that an admitted request lacks from its cap, null blocks too,
            # and would let loads take what those before them lack: none could go on.
            needed = max(needed, self._promised(request_id, self._is_moved(request_id)))
        is_hit = total_computed_tokens > num_local_computed_tokens
        if request_id not in self.num_cached_block and is_hit and not apply_admission_cap:
            self._counted_gap = self._gap(request_id, total_computed_tokens)
            needed -= len(self._counted_gap)
        return needed + self._missing_hot(request_id, num_tokens)

    def _decide(self, request_id: str, num_tokens: int, *, has_hit: bool, loads: bool) -> None:
        """With `residency = "auto"`: a new request begins as if moved if the device lacks room
        for all its blocks (`room_for`), has room for those of a moved one, and the server has
        reserved room. Decided anew at each try to admit it. With a hit on the device it begins
        whole: `find_longest_cache_hit` has decided."""
        self._begins_moved.discard(request_id)
        if has_hit:
            return
        free = self.block_pool.get_num_free_blocks()
        needed = self._most_blocks(request_id, num_tokens)
        beside = self.beside_blocks(num_tokens)
        if (
            request_id not in self.moved
            and needed + beside > self.room_for(request_id, loads=loads)
            and self.spec.moved_blocks <= min(free - beside, needed - 1)
            and self.has_room(request_id)
        ):
            self._begins_moved.add(request_id)

    def room_for(self, request_id: str, *, loads: bool) -> int:
        """Blocks that a new request may use to begin wholly on the device: the free ones, less what
        admitted requests still need for their prompts.

        loads: also less what other waiting requests need beside it, for which it might soon be
            moved, its load wasted.
        """
        room = self.block_pool.get_num_free_blocks() - self.promised_blocks
        if loads:
            own = self.awaited.get(request_id, NOT_AWAITED)
            room -= sum(
                min(self.spec.moved_blocks, one.num_blocks - one.num_common(own))
                + one.beside_blocks
                for name, one in self.awaited.items()
                if name != request_id and not self.req_to_blocks.get(name)
            )
        return room

    def _gap(self, request_id: str, computed_tokens: int) -> range:
        """Blocks of a hit that are neither allocated nor loaded: pinned in the server, between
        sinks and recent window."""
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
        """Blocks of a hit: null blocks between sinks and recent window. vLLM has just called
        `get_num_blocks_to_allocate`, and the pool has that many."""
        total = num_local_computed_tokens + num_external_computed_tokens
        blocks, gap = self.req_to_blocks[request_id], self._counted_gap
        if gap:
            self._take(blocks, gap.start, record_for_zeroing)
            blocks.extend([self._null_block] * len(gap))
            self.freed_blocks[request_id] = gap.stop
        self._take(blocks, _blocks(total, self.block_size) - len(blocks), record_for_zeroing)

    def _take(self, blocks: list[KVCacheBlock], count: int, record_for_zeroing: bool) -> None:
        if count <= 0:
            return
        new = self.block_pool.get_new_blocks(count)
        blocks.extend(new)
        if self.records_new_block_ids and record_for_zeroing:
            self.new_block_ids.extend(block.block_id for block in new)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Missing hot slots first."""
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
        """That admitted requests together still need until their prompts are computed."""
        return sum(
            self._promised(name, self._is_moved(name)) + self._promised_beside(name)
            for name in self.req_to_blocks
        )

    def _promised_beside(self, request_id: str) -> int:
        return sum(self._promised_by(*one, request_id) for one in self.beside)

    def _promised_by(self, group: BesideGroup, manager: Any, request_id: str) -> int:
        """In a group beside: most blocks at a time, less those held."""
        # Blocks before a window are null.
        held = manager.req_to_blocks.get(request_id, ())[-group.most_blocks :]
        most = group.blocks(self._longest.get(request_id, 0))
        return max(0, most - sum(not block.is_null for block in held))

    def _promised(self, request_id: str, is_moved: bool, num_freed: int = 0) -> int:
        """num_freed: blocks that a move would free."""
        num_blocks = len(self.req_to_blocks[request_id])
        promised = self._most_blocks(request_id, 0) - num_blocks
        if is_moved:
            # Blocks freed before are null.
            num_null = max(0, self.freed_blocks.get(request_id, 0) - self.spec.sink_blocks)
            held = num_blocks - num_null - num_freed
            promised = min(promised, self.spec.whole_blocks - held)
        return max(0, promised)

    def relief(self, request_id: str, processed_tokens: int, stored_tokens: int) -> Relief:
        """processed_tokens: whose computation has ended.
        stored_tokens: leading ones that the server has pinned.
        """
        blocks = self._freeable(request_id, processed_tokens, stored_tokens)
        held = self.req_to_blocks[request_id]
        freed = sum(block.ref_cnt == 1 for block in held[blocks.start : blocks.stop])
        return Relief(
            freed - self.spec.hot_blocks,
            self._promised(request_id, False) - self._promised(request_id, True, len(blocks)),
        )

    def move(self, request_id: str, processed_tokens: int) -> None:
        """Frees what the server has pinned between sinks and recent window, and takes hot slots."""
        self.moved.add(request_id)
        self._free(request_id, processed_tokens)
        self._take_hot(request_id, self.spec.hot_blocks)

    def forget(self, request_id: str) -> None:
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
        """Frees what the server has pinned before the recent window; nothing of a request
        without hot slots. vLLM calls this before it allocates blocks."""
        if request_id in self.hot and request_id not in self.unsure:
            self._free(request_id, processed_computed_tokens)

    def _free(self, request_id: str, processed_tokens: int) -> None:
        stored_tokens = self.stored_tokens(request_id)
        blocks = self._freeable(request_id, processed_tokens, stored_tokens)
        if blocks:
            self._remove_blocks_in_range(request_id, self.spec.sink_blocks, blocks.stop)
            self.freed_blocks[request_id] = blocks.stop

    def _freeable(self, request_id: str, processed_tokens: int, stored_tokens: int) -> range:
        """Between the sinks and blocks freed earlier, and the recent window or what the server has
        not pinned.

        processed_tokens: whose computation has ended.
        """
        first = max(self.spec.sink_blocks, self.freed_blocks.get(request_id, 0))
        kept = min(processed_tokens - self.spec.recent_tokens, stored_tokens)
        return range(first, min(kept // self.block_size, len(self.req_to_blocks[request_id])))

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self.lost.discard(request_id)
        self.moved.discard(request_id)
        self.whole.discard(request_id)
        self.freed_blocks.pop(request_id, None)
        self.hot_ids.pop(request_id, None)
        self._longest.pop(request_id, None)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks + self.hot.pop(request_id, [])


def customized(spec: Any, config: SparseConfig, vllm_config: Any) -> Any:
    """A `ResidentSpec` for plain full attention.

    Others stay, and all if hotkv is off with this vLLM, which then requires that the longest
    context fits on the device.
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


_BESIDE = (KVCacheSpecKind.SLIDING_WINDOW, KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION)
"""Kinds that groups beside that of residency may have: a request holds a bounded number of their
blocks, of the same size."""


def resident_group(kv_cache_config: Any) -> int | None:
    """vLLM's number of the group of residency; None if there is not exactly one, or one of a kind
    that can't be beside it."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    found = [index for index, spec in enumerate(specs) if isinstance(spec, ResidentSpec)]
    others = [spec for spec in specs if not isinstance(spec, ResidentSpec)]
    if len(found) != 1 or any(get_kv_cache_spec_kind(spec) not in _BESIDE for spec in others):
        return None
    return found[0]


def resident_layers(kv_cache_config: Any) -> list[str]:
    """Of `resident_group`, in vLLM's order."""
    index = resident_group(kv_cache_config)
    return [] if index is None else list(kv_cache_config.kv_cache_groups[index].layer_names)


def layers_in_pool(kv_cache_config: Any) -> int:
    """Layers of a block of the pool: groups take turns with it."""
    return max(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)


def resident_spec(kv_cache_config: Any) -> ResidentSpec | None:
    """Of `resident_group`."""
    index = resident_group(kv_cache_config)
    return None if index is None else kv_cache_config.kv_cache_groups[index].kv_cache_spec


def check_residency(vllm_config: Any, kv_cache_config: Any, config: SparseConfig) -> None:
    """Raises ConfigError if residency can't work in this engine."""
    name = f"{SPARSE}.residency = {config.residency!r}"
    spec = resident_spec(kv_cache_config)
    if spec is None:
        kinds = sorted({type(g.kv_cache_spec).__name__ for g in kv_cache_config.kv_cache_groups})
        raise ConfigError(
            f"{name}: it needs one KV cache group of plain full attention, with hotkv's attention "
            f"in vLLM, and beside it none but sliding windows or chunks; this one has "
            f"{', '.join(kinds)}. Recurrent states need blocks of many hundred tokens, too large "
            "to select by; leave it out"
        )
    transfer = vllm_config.kv_transfer_config
    if not transfer.is_kv_producer:
        raise ConfigError(
            f"{name}: with kv_role {transfer.kv_role!r} this engine stores nothing, and "
            "what is not stored can't leave the device; set kv_role to 'kv_both'"
        )
    num_blocks = kv_cache_config.num_blocks - 1
    longest = vllm_config.model_config.max_model_len
    needed = spec.device_blocks(longest)
    needed += sum(g.blocks(longest) for g in beside_groups(vllm_config, kv_cache_config))
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
    """In each process that imports this module. vLLM registers its own specs only in an empty
    registry, so they come first."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(ResidentSpec, ResidentManager, uniform_type_base_spec=ResidentSpec)


_register()
