"""Reads the blocks and requests of a step that vLLM's scheduler has planned. The functions from
`tell_written` on correct the state of vLLM's own offloading, for `HotKVOffloadingConnector`. In
their docstrings, a chunk is a number of consecutive blocks that vLLM offloads as one unit.

Parts of vLLM that this module reads: `SchedulerOutput` (new, cached and resumed requests with their
block ids, `kv_cache_block_copies`, `new_block_ids_to_zero`, `kv_connector_block_state`), block
tables by `KVCacheManager.get_blocks`, `Request.shared_prefix_boundary`, `prompt_is_token_ids` and
`prompt_token_ids`, and the extra keys that are hashed into a request's blocks in addition to its
tokens.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress, repeat
from typing import Any, overload

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec

from hotkv_vllm.compat import NULL_BLOCK

READ_ONLY = "diffusion_read_only"
"""Name of the extra sampling argument by which a request makes a diffusion model read an answer
without writing the answer's KV."""


class BlockIds(Sequence[int]):
    """A view of a request's block table (its block ids) in one group. Reads an id from vLLM's block
    object only when the id is asked for. So the cost of a read grows with the number of returned
    ids, not with the length of the table. Valid only while the step is planned."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __repr__(self) -> str:
        return f"BlockIds({len(self)} blocks)"

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            return [block.block_id for block in self._blocks[at]]
        return int(self._blocks[at].block_id)


def read_in_place(scheduler_output: Any, manager: Any) -> Any:
    """Returns a copy of a step's `SchedulerOutput` whose `get_block_ids` returns views of block
    tables (`BlockIds`). vLLM's own `get_block_ids` builds a request's whole table, which takes 50
    to 100 us at 128k tokens.

    scheduler_output: vLLM's `SchedulerOutput` of the step.
    manager: vLLM's `KVCacheManager`; if it is None, the step is returned unchanged.
    """
    if manager is None:
        return scheduler_output
    step = copy.copy(scheduler_output)
    step.kv_connector_block_state = replace(
        scheduler_output.kv_connector_block_state,
        resolve_block_ids=lambda request_id: tuple(
            map(BlockIds, manager.get_blocks(request_id).blocks)
        ),
    )
    return step


def fresh_block_ids(scheduler_output: Any, tokens_per_block: tuple[int, ...]) -> set[int]:
    """Returns the ids of the blocks that vLLM has reallocated and that this step may write. Leaves
    out blocks of hits in vLLM's own prefix cache. Source: `SchedulerOutput` in vLLM 0.32.

    tokens_per_block: tokens of a block, per vLLM group. 0: all blocks of a request in this group
        are returned.
    """
    fresh: set[int] = set()
    for new in scheduler_output.scheduled_new_reqs:
        for tokens, ids in zip(tokens_per_block, new.block_ids, strict=False):
            fresh.update(ids[new.num_computed_tokens // tokens if tokens else 0 :])
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, computed, new_ids in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=False
    ):
        if new_ids is None:
            continue
        resumed = request_id in cached.resumed_req_ids
        for tokens, ids in zip(tokens_per_block, new_ids, strict=False):
            fresh.update(ids[computed // tokens :] if resumed and tokens else ids)
    fresh.update(copy.dst_block_id for copy in scheduler_output.kv_cache_block_copies or ())
    # `new_block_ids_to_zero` also has the blocks of requests that were preempted while the step was
    # planned.
    fresh.update(scheduler_output.new_block_ids_to_zero or ())
    fresh.discard(NULL_BLOCK)
    return fresh


def scheduled_rows(scheduler_output: Any) -> Iterator[tuple[int, int]]:
    """Yields, for each request of a step, the number of tokens that the step computes, and the
    number of tokens computed before.

    Source: `SchedulerOutput` in vLLM 0.32.
    """
    scheduled = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        yield scheduled.get(new.req_id, 0), new.num_computed_tokens
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=False):
        yield scheduled.get(request_id, 0), computed


def event_extra_keys(
    request: Any, blocks: range, block_tokens: int
) -> tuple[tuple[Any, ...] | None, ...]:
    """Returns, for each block, the extra keys that vLLM hashes into the block's hash in addition to
    its tokens (for an adapter, media, a cache salt or prompt embeddings), in the form of vLLM's
    events. Empty if no block has extra keys.

    blocks: the blocks, as a range of indices among the request's blocks.

    Source: `BlockPool.cache_full_blocks` in vLLM 0.32.
    """
    has_inputs = request.mm_features or request.prompt_embeds is not None
    if not (has_inputs or request.cache_salt or request.lora_request):
        return ()
    keys: list[tuple[Any, ...] | None] = []
    place = 0
    for block in blocks:
        extra, place = generate_block_hash_extra_keys(
            request, block * block_tokens, (block + 1) * block_tokens, place
        )
        keys.append(extra)
    return tuple(to_event_extra_keys(keys) or ()) if any(keys) else ()


def covers_embeddings(request: Any) -> bool:
    """Returns True if vLLM's block hashes of a request show at which positions its prompt has
    embeddings in place of token ids. They do not show it if one of the prompt's token ids is 0.

    Source: `Request.__init__` in vLLM 0.32 (vLLM's issue 56655): an embedding's position is hashed
    as token id 0.
    """
    mask = request.prompt_is_token_ids
    return mask is None or 0 not in compress(request.prompt_token_ids or repeat(0), mask)


def shared_prefix_boundary(request: Any) -> int:
    """Returns the length, in tokens, of the prefix for which vLLM keeps a recurrent state because
    several requests share it; 0 without such a prefix."""
    return int(request.shared_prefix_boundary)


def written_tokens(request: Any) -> int:
    """Returns how many leading tokens of an ended request have KV: vLLM's number of computed
    tokens, with one exception. A request may make a diffusion model (`diffusion_gemma`) read an
    answer without writing the answer's KV. Then only the prompt has KV, although vLLM counts the
    answer as computed. Source: vLLM 0.32."""
    extra = getattr(getattr(request, "sampling_params", None), "extra_args", None) or {}
    computed = int(request.num_computed_tokens)
    return min(computed, request.num_prompt_tokens) if extra.get(READ_ONLY) else computed


class WholeSet(set[int]):
    """A set that ignores `add` and `update`, so that it keeps its first contents. `tell_written`
    gives such a set to vLLM's offloading, so that vLLM can't add wrong blocks to it."""

    def add(self, element: int, /) -> None:
        """Does nothing, so that the set keeps its first contents."""

    def update(self, *others: Iterable[int]) -> None:
        """Does nothing, so that the set keeps its first contents."""


def tell_written(offloading: Any, written: Collection[int]) -> None:
    """Replaces vLLM's own record of the blocks that a step writes, because this record is wrong.
    Must be called before vLLM's offloading plans the stores of the step.

    offloading: vLLM's `OffloadingConnectorScheduler`.
    written: ids of the blocks that vLLM has newly allocated; without blocks that it reuses.

    Source: vLLM 0.32 and 0.33. Their record also contains the blocks of a new request's prefix hit,
    which the step does not write. vLLM's offloading assumes that every block in the record was
    taken from its old owner. So if another request has the same prefix, vLLM stores that request's
    chunks (blocks that are offloaded as one unit) without these blocks, or with other blocks in
    their places. The record of 0.32 also lacks blocks into which another connector of a
    MultiConnector loads KV.
    """
    offloading._current_batch_allocated_block_ids = WholeSet(written)


def withdraw_states(
    state: Any,
    written: Collection[int],
    block_sizes: Sequence[int],
    num_drafts: int,
    offloading: Any = None,
) -> None:
    """Removes some states from `state`, the recurrent states that vLLM offers for storing in a
    step. A state is removed in two cases:
    - The step may overwrite the state's block, because vLLM has just reallocated the block.
    - The state covers more tokens than vLLM's offloading may store of its request (`limit_stores`).

    state: the step's `KVConnectorBlockState`.
    written: ids of the blocks that vLLM has newly allocated. A new request's own states are among
        them.
    block_sizes: tokens of a block, per vLLM group.
    num_drafts: draft tokens of a step for each request; 0 without a drafter.
    offloading: vLLM's `OffloadingConnectorScheduler`, if it may store the states.

    Source: vLLM 0.32 and 0.33. About the first case: if accepted draft tokens complete a state,
    vLLM offers this state only when it plans the next step. By then vLLM may have reallocated the
    state's block to another request. A state at a position inside a block is not concerned, because
    the step copies it to a separate block, which vLLM retains. About the second case: vLLM's
    offloading asserts that a state inside a block does not exceed the limit, but it treats a limit
    of 0 as no limit.

    A layer may write a state within the step that computes the end of a prompt (Mamba-2). With a
    drafter, the block of this state is behind the state's place in the request's block table. The
    last blocks of the table hold the states at the end of the step, one for each draft.
    """
    statuses = {} if offloading is None else offloading._req_status

    def is_kept(offer: tuple[int, int, int]) -> bool:
        group, block, tokens = offer
        place, is_inside = divmod(tokens, block_sizes[group])
        table = tables[group]
        stop = max(place, len(table) - 1 - num_drafts)
        is_whole = bool(is_inside or block not in written or block in table[place - 1 : stop])
        return is_whole and (limit is None or tokens <= limit)

    for request_id, offers in state.boundary_state_offloads.items():
        tables = state.get_block_ids(request_id) or [()] * len(block_sizes)
        limit = getattr(statuses.get(request_id), "max_offload_tokens", None)
        offers[:] = filter(is_kept, offers)


def hit_states(
    scheduler_output: Any, block_sizes: Mapping[int, int]
) -> dict[str, list[tuple[int, int, int]]]:
    """Returns the recurrent states with which the requests continue that a step admits: by request
    id, in the form of `KVConnectorBlockState.boundary_state_offloads`. Leaves out a state inside a
    block. The step does not write the blocks of these states.

    block_sizes: tokens of a block, by number of each vLLM group with recurrent states.

    Source: vLLM 0.32 and 0.33. vLLM offers a state for storing when it is computed or loaded, but
    not when a request hits it in vLLM's own prefix cache.
    """
    cached = scheduler_output.scheduled_cached_reqs
    admitted = [
        (new.req_id, new.num_computed_tokens, new.block_ids)
        for new in scheduler_output.scheduled_new_reqs
    ]
    rows = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
    admitted += [row for row in rows if row[0] in cached.resumed_req_ids]
    found: dict[str, list[tuple[int, int, int]]] = {}
    for request_id, tokens, tables in admitted:
        for group, size in block_sizes.items():
            place, is_inside = divmod(tokens, size)
            for block in () if is_inside or not place else tables[group][place - 1 : place]:
                if block != NULL_BLOCK:
                    found.setdefault(request_id, []).append((group, block, tokens))
    return found


def give_up_stores(offloading: Any, invalid_blocks: Collection[int]) -> set[Any]:
    """Prevents vLLM's offloading from storing wrong KV, after another connector of a MultiConnector
    has failed to load blocks. Requests that hold one of these blocks store no further chunks
    (blocks offloaded as one unit). Returns the keys of their stores in progress. The caller must
    add these keys to the set that it passed to `fail_stores`, so that these stores fail.

    offloading: vLLM's `OffloadingConnectorScheduler`.
    invalid_blocks: ids of the blocks that were not loaded.

    Source: vLLM 0.32. When vLLM learns that a synchronous load has failed, it has already planned
    the stores of the load's step, and perhaps of the next step.
    """
    keys: set[Any] = set()
    for status in offloading._req_status.values():
        if any(
            not set(group.block_ids).isdisjoint(invalid_blocks) for group in status.group_states
        ):
            status.max_offload_tokens = 0
            jobs = [offloading._jobs[number] for number in status.transfer_jobs]
            keys.update(key for job in jobs if job.is_store for key in job.keys)
    return keys


def without_loading(scheduler_output: Any, offloading: Any) -> Any:
    """Returns a copy of a step's `SchedulerOutput` in which no preempted request has a load that
    begins in this step: such requests are removed from `preempted_req_ids`.

    offloading: vLLM's `OffloadingConnectorScheduler`.

    Source: vLLM 0.32 asserts that preempted requests have no load (0.33 does not). But a reset may
    preempt running requests and keep the contents of vLLM's CPU tier. Then the next step may begin
    loads of these requests, and the assertion would fail. The removal does no harm: vLLM lists
    preempted requests only to end their stores, and a request with a store in progress begins no
    load.
    """
    loading = {job.req_id for job in offloading._current_batch_load_jobs.values()}
    preempted = scheduler_output.preempted_req_ids - loading
    return replace(scheduler_output, preempted_req_ids=preempted)


def before_stores(offloading: Any, then: Callable[[Any], None]) -> None:
    """Makes vLLM's offloading call `then` in each step, with the step's `SchedulerOutput`. It calls
    `then` after it has recorded the blocks of all requests, and before it plans the step's stores.

    offloading: vLLM's `OffloadingConnectorScheduler`.
    """
    update = offloading._update_req_states

    def update_and_then(scheduler_output: Any) -> None:
        update(scheduler_output)
        then(scheduler_output)

    offloading._update_req_states = update_and_then


def leave_out_holes(offloading: Any, scheduler_output: Any) -> None:
    """Prevents vLLM's offloading from storing wrong chunks. A chunk (consecutive blocks that are
    offloaded as one unit) would be wrong if it lacked a block that a hit needs, or had a block at
    another block's place. Blocks that no hit needs may be missing.

    offloading: vLLM's `OffloadingConnectorScheduler`.

    Source: vLLM 0.32 and 0.33. These versions check only whether a chunk has its last block.
    Earlier blocks of the chunk are missing (id 0) in two cases: they lie before the windows of a
    hit on the device; or vLLM has reallocated them. vLLM copies the present blocks of a store to
    consecutive places in the store's chunks, beginning at the place of the first present block. So
    blocks after a missing block would be copied to wrong places.
    """
    config = offloading.config
    # Every hit ends at a multiple of `unit` tokens, or one token earlier.
    unit = math.gcd(*(group.tokens_per_chunk for group in config.kv_group_configs))
    ended = scheduler_output.finished_req_ids
    for request_id in chain(scheduler_output.num_scheduled_tokens, ended):
        status = offloading._req_status.get(request_id)
        if status is None or config.blocks_per_chunk == 1:
            continue
        for at in offloading._sliding_window_groups:
            group, state = config.kv_group_configs[at], status.group_states[at]
            if isinstance(group.kv_cache_spec, MambaSpec):
                continue
            first = state.next_stored_chunk_idx
            if request_id in ended and config.alignment_tokens:
                # When a request ends, vLLM considers once more the chunks after the end of the last
                # possible hit. So this function begins as many chunks earlier.
                first -= min(first, max(0, config.alignment_tokens // group.tokens_per_chunk - 1))
            _leave_out_holes(group, state.block_ids, first, unit)


def _leave_out_holes(group: Any, ids: list[int], first_chunk: int, unit: int) -> None:
    """Marks blocks as missing (sets their ids in `ids` to 0), so that vLLM does not store them. Of
    the chunks (blocks that are offloaded as one unit) that vLLM then stores, only the first may
    lack blocks, and only at its beginning.

    group: the group in the config of vLLM's offloading.
    ids: the request's block ids in the group; 0 for a missing block.
    first_chunk: index of the request's first chunk that vLLM has not considered yet.
    unit: number of tokens; a hit ends at a multiple of it, or one token before a multiple.
    """
    size = group.tokens_per_chunk
    per_chunk = size // group.tokens_per_block
    is_first = True
    for chunk in range(first_chunk, len(ids) // per_chunk):
        start, stop = chunk * per_chunk, (chunk + 1) * per_chunk
        if not ids[stop - 1]:
            continue
        begin = next((at + 1 for at in range(stop - 1, start - 1, -1) if not ids[at]), start)
        needed_token = _first_needed_token(group.kv_cache_spec, chunk * size + unit - 1)
        if begin > start and not (is_first and begin <= needed_token // group.tokens_per_block):
            ids[stop - 1] = 0
            continue
        ids[start:begin] = [0] * (begin - start)
        is_first = False


def _first_needed_token(spec: Any, hit_tokens: int) -> int:
    """Returns the position of the first token whose KV a layer needs to compute the tokens after a
    hit.

    spec: the layer's KV cache spec, with a sliding window or a chunk.
    hit_tokens: length of the hit.
    """
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return hit_tokens // spec.attention_chunk_size * spec.attention_chunk_size
    return int(hit_tokens - (spec.sliding_window - 1 + spec.extra_retained_tokens))


def flushed_stores(offloading: Any, meta: Any) -> set[Any]:
    """Returns the keys of the stores for which the workers wait in a step, because the step
    reallocates their blocks.

    offloading: vLLM's `OffloadingConnectorScheduler`.
    meta: the `OffloadingConnectorMetadata` of the step.
    """
    # `get` returns None for a job that a reset of vLLM's offloading has removed.
    jobs = [offloading._jobs.get(number) for number in meta.jobs_to_flush or ()]
    return {key for job in jobs if job is not None and job.is_store for key in job.keys}


def fail_stores(manager: Any, spoilt: set[Any]) -> None:
    """Makes vLLM's offloading treat a store as failed if one of its keys is in `spoilt`. vLLM's
    primary tier (its CPU memory) then frees the memory of the store, and does not pass the store to
    the tiers below. When a store ends, its keys are removed from `spoilt`.

    manager: vLLM's `TieringOffloadingManager`. Its method `complete_store` is replaced.
    spoilt: the keys; the caller may add keys later.
    """
    complete = manager.complete_store

    def complete_store(keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        is_spoilt = not spoilt.isdisjoint(keys)
        spoilt.difference_update(keys)
        complete(keys, req_context, success and not is_spoilt)

    manager.complete_store = complete_store


def limit_stores(offloading: Any, request_id: str, num_tokens: int) -> None:
    """Limits what vLLM's offloading may store of a request: only blocks within the request's first
    `num_tokens` tokens.

    offloading: vLLM's `OffloadingConnectorScheduler`.
    """
    status = offloading._req_status.get(request_id)
    if status is not None:
        limits = (status.max_offload_tokens, num_tokens)
        status.max_offload_tokens = min(limit for limit in limits if limit is not None)


@contextlib.contextmanager
def no_loads(offloading: Any, request_id: str) -> Iterator[None]:
    """Makes vLLM's offloading answer "no hit" for a request, without any lookup, until the context
    ends.

    offloading: vLLM's `OffloadingConnectorScheduler`.
    """
    status = offloading._req_status[request_id]
    limit, status.max_load_tokens = status.max_load_tokens, 0
    try:
        yield
    finally:
        status.max_load_tokens = limit


def promotes(manager: Any, request_id: str) -> bool:
    """Returns True if the request's lookups in this step have begun a promotion (a copy from a tier
    into the primary tier, vLLM's CPU memory).

    manager: vLLM's `TieringOffloadingManager`.

    The caller must know this because of a fault in vLLM. Source: vLLM 0.32 and 0.33. To make room
    for a promotion, `_initiate_promotion` may evict any chunk (blocks offloaded as one unit) that
    no transfer uses, even a chunk that a lookup of the same request has just found. This happens
    with sliding windows: vLLM may begin a promotion for one window and then find a complete window
    at an earlier position. It assumes that all chunks that it has found are still present, and an
    assertion in its `prepare_load` fails.
    """
    return any(request_id in tier for tier in manager._pending_load_submissions.values())


def forget_blocks(offloading: Any, request: Any) -> None:
    """Clears the block ids that vLLM's offloading has recorded for a request with streamed input.
    Must be called when the request's next turn gets its blocks. Does nothing for other requests.

    offloading: vLLM's `OffloadingConnectorScheduler`.

    Source: vLLM 0.32; 0.33 clears the ids itself. `_update_req_states` appends the blocks that a
    step lists to the recorded ids. In the request's next turn, a step lists all blocks of the
    request again. If the recorded ids were not cleared, a block would be stored under the key of
    another block.
    """
    if getattr(request, "resumable", False):
        for group in offloading._req_status[request.request_id].group_states:
            group.block_ids.clear()
