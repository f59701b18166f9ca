"""Reads the blocks and requests of a planned step.

From `tell_written` on, functions correct the state of vLLM's own offloading for
`HotKVOffloadingConnector`; there `offloading` is vLLM's `OffloadingConnectorScheduler` and
`manager` its `TieringOffloadingManager`. All is as of vLLM 0.32 and 0.33, if nothing else is
said.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress, repeat
from typing import Any, overload

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec

from hotkv_vllm.compat import NULL_BLOCK

READ_ONLY = "diffusion_read_only"
"""Extra sampling argument: a diffusion model reads an answer without writing its KV."""


class BlockIds(Sequence[int]):
    """View of a request's block table in one group, read as far as asked for. Valid only while
    the step is planned."""

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
    """A copy of the step whose `get_block_ids` returns `BlockIds`; vLLM's own builds the whole
    table, 50 to 100 us at 128k tokens. Unchanged without a `KVCacheManager`."""
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
    """Reallocated blocks that this step may write; not those of hits in vLLM's own prefix cache.

    tokens_per_block: per vLLM group. 0: all of a request's blocks.
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
    # Also of requests that were preempted while the step was planned.
    fresh.update(scheduler_output.new_block_ids_to_zero or ())
    fresh.discard(NULL_BLOCK)
    return fresh


def blocks_touched_early(scheduler_output: Any) -> set[int]:
    """Blocks that this step zeroes or copies to before its forward pass, also those that a load is
    to write."""
    touched = set(scheduler_output.new_block_ids_to_zero or ())
    touched.update(copy.dst_block_id for copy in scheduler_output.kv_cache_block_copies or ())
    return touched


def frees_after_steps() -> bool:
    """A request gets no block that an earlier step, still in flight, may touch, if it may load
    (`Scheduler.defer_block_free`)."""
    return hasattr(Scheduler, "_drain_deferred_frees")


def scheduled_rows(scheduler_output: Any) -> Iterator[tuple[int, int]]:
    """Per request, tokens that the step computes and tokens computed before."""
    scheduled = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        yield scheduled.get(new.req_id, 0), new.num_computed_tokens
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=False):
        yield scheduled.get(request_id, 0), computed


def event_extra_keys(
    request: Any, blocks: range, block_tokens: int
) -> tuple[tuple[Any, ...] | None, ...]:
    """Per block, what vLLM hashes besides its tokens (adapter, media, cache salt, prompt
    embeddings), as in vLLM's events (`BlockPool.cache_full_blocks`). Empty if no block has any.

    blocks: indices among the request's blocks.
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
    """Whether block hashes show where the prompt has embeddings in place of token ids: not if
    one of its ids is 0, because an embedding is hashed as 0 (`Request.__init__`, vLLM's issue
    56655)."""
    mask = request.prompt_is_token_ids
    return mask is None or 0 not in compress(request.prompt_token_ids or repeat(0), mask)


def shared_prefix_boundary(request: Any) -> int:
    """Tokens of the prefix for which vLLM keeps a recurrent state because requests share it; 0
    without."""
    return int(request.shared_prefix_boundary)


def written_tokens(request: Any) -> int:
    """Leading tokens of an ended request that have KV: all computed ones, but only the prompt if
    a diffusion model (`diffusion_gemma`) only reads the answer."""
    extra = getattr(getattr(request, "sampling_params", None), "extra_args", None) or {}
    computed = int(request.num_computed_tokens)
    return min(computed, request.num_prompt_tokens) if extra.get(READ_ONLY) else computed


class WholeSet(set[int]):
    """Ignores additions: vLLM's offloading would add wrong blocks."""

    def add(self, element: int, /) -> None: ...

    def update(self, *others: Iterable[int]) -> None: ...


def tell_written(offloading: Any, written: Collection[int]) -> None:
    """Replaces vLLM's wrong record of the blocks that a step writes, before it plans the stores.

    It also has the blocks of a new request's prefix hit. vLLM takes all blocks in it from their old
    owners, so it stores chunks of another request with this prefix without them, or with others in
    their places. 0.32's lacks blocks into which another connector loads.

    written: newly allocated, without reused blocks.
    """
    offloading._current_batch_allocated_block_ids = WholeSet(written)


def withdraw_states(
    state: Any,
    written: Collection[int],
    block_sizes: Sequence[int],
    num_drafts: int,
    offloading: Any = None,
) -> None:
    """Removes recurrent states that vLLM offers for storing, if
    - the step may overwrite a state's block, just reallocated: a state that accepted drafts
      complete is offered only when the next step is planned. (A state inside a block is copied to
      one that vLLM keeps.)
    - the state covers more tokens than may be stored (`limit_stores`): vLLM asserts that a state
      inside a block does not, but takes a limit of 0 for none.

    A layer may write a state within the step that computes a prompt's end (Mamba-2). With a drafter
    its block is then behind its place in the table, whose last blocks hold the states at the step's
    end, one per draft.

    state: the step's `KVConnectorBlockState`.
    written: newly allocated blocks; a new request's own states are among them.
    offloading: only if it may store the states.
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
    """Recurrent states with which admitted requests go on, as in
    `KVConnectorBlockState.boundary_state_offloads`, without states inside a block. vLLM does not
    offer states that a request hits in its own prefix cache. The step does not write their
    blocks."""
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
    """Another connector has failed to load `invalid_blocks`: requests with one of them store no
    more. Keys of their stores in progress, for the set passed to `fail_stores`.

    When vLLM learns of a failed synchronous load, it has planned the stores of that step, and
    maybe of the next.
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
    """A copy of the step in which `preempted_req_ids` has no request that begins a load.

    0.32 asserts that there is none, but a reset may preempt requests and keep the CPU tier, from
    which the next step loads. vLLM lists preempted requests only to end their stores, and one
    with a store begins no load.
    """
    loading = {job.req_id for job in offloading._current_batch_load_jobs.values()}
    preempted = scheduler_output.preempted_req_ids - loading
    return replace(scheduler_output, preempted_req_ids=preempted)


def before_stores(offloading: Any, then: Callable[[Any], None]) -> None:
    """Calls `then` in each step with its `SchedulerOutput`: after vLLM's offloading has recorded
    all requests' blocks, before it plans stores."""
    update = offloading._update_req_states

    def update_and_then(scheduler_output: Any) -> None:
        update(scheduler_output)
        then(scheduler_output)

    offloading._update_req_states = update_and_then


def leave_out_holes(offloading: Any, scheduler_output: Any) -> None:
    """Prevents stores of chunks that lack a block that a hit needs, or have one at another's place.

    vLLM checks only a chunk's last block. Earlier ones are missing (id 0) if they lie before the
    windows of a hit on the device, or were reallocated. vLLM copies a store's blocks to
    consecutive places from the first one's on, so those after a missing one would be misplaced.
    """
    config = offloading.config
    # Every hit ends at a multiple of `unit`, or one token earlier.
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
                # At a request's end vLLM considers the chunks after the last possible hit once
                # more.
                first -= min(first, max(0, config.alignment_tokens // group.tokens_per_chunk - 1))
            _leave_out_holes(group, state.block_ids, first, unit)


def _leave_out_holes(group: Any, ids: list[int], first_chunk: int, unit: int) -> None:
    """Sets ids to 0, so that of the chunks that vLLM stores only the first lacks blocks, at its
    beginning.

    ids: of the request in the group; 0: missing.
    first_chunk: first that vLLM has not considered.
    unit: as in `leave_out_holes`.
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
    """First token whose KV a layer needs after a hit."""
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return hit_tokens // spec.attention_chunk_size * spec.attention_chunk_size
    return int(hit_tokens - (spec.sliding_window - 1 + spec.extra_retained_tokens))


def flushed_stores(offloading: Any, meta: Any) -> set[Any]:
    """Keys of the stores for which workers wait in a step that reallocates their blocks."""
    # A reset of vLLM's offloading may have removed a job.
    jobs = [offloading._jobs.get(number) for number in meta.jobs_to_flush or ()]
    return {key for job in jobs if job is not None and job.is_store for key in job.keys}


def fail_stores(manager: Any, spoilt: set[Any]) -> None:
    """Makes stores with a key in `spoilt` fail: the primary tier frees their memory and passes
    nothing to lower tiers. A store's keys leave `spoilt` at its end."""
    complete = manager.complete_store

    def complete_store(keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        is_spoilt = not spoilt.isdisjoint(keys)
        spoilt.difference_update(keys)
        complete(keys, req_context, success and not is_spoilt)

    manager.complete_store = complete_store


def limit_stores(offloading: Any, request_id: str, num_tokens: int) -> None:
    """Only blocks within the first `num_tokens` may be stored."""
    status = offloading._req_status.get(request_id)
    if status is not None:
        limits = (status.max_offload_tokens, num_tokens)
        status.max_offload_tokens = min(limit for limit in limits if limit is not None)


@contextlib.contextmanager
def no_loads(offloading: Any, request_id: str) -> Iterator[None]:
    """In the context vLLM's offloading answers "no hit", without a lookup."""
    status = offloading._req_status[request_id]
    limit, status.max_load_tokens = status.max_load_tokens, 0
    try:
        yield
    finally:
        status.max_load_tokens = limit


def promotes(manager: Any, request_id: str) -> bool:
    """Whether the request's lookups in this step have begun a promotion.

    To make room for one, `_initiate_promotion` may evict any unused chunk, even one that a
    lookup of the same request has just found, as with sliding windows: after a promotion for one
    window vLLM may find a complete one earlier. Its `prepare_load` then fails an assertion.
    """
    return any(request_id in tier for tier in manager._pending_load_submissions.values())


def forget_blocks(offloading: Any, request: Any) -> None:
    """For streamed input, when the next turn gets its blocks: 0.32's `_update_req_states`
    appends all of the request's blocks to the recorded ids again, so a block would be stored
    under another's key. 0.33 clears them itself."""
    if getattr(request, "resumable", False):
        for group in offloading._req_status[request.request_id].group_states:
            group.block_ids.clear()
