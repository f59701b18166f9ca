"""Translates vLLM's KV cache groups into hotkv's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import KVCacheSpecKind, get_kv_cache_spec_kind, iter_layer_specs

from hotkv_proto.groups import GroupKind, check_context_parallel
from hotkv_vllm.compat import Unsupported
from hotkv_vllm.compat.checks import check_ranks

_KINDS: dict[KVCacheSpecKind, GroupKind] = {
    KVCacheSpecKind.FULL_ATTENTION: GroupKind.FULL_ATTENTION,
    KVCacheSpecKind.MLA_ATTENTION: GroupKind.MLA,
    KVCacheSpecKind.SLIDING_WINDOW: GroupKind.SLIDING_WINDOW,
    KVCacheSpecKind.SLIDING_WINDOW_MLA: GroupKind.SLIDING_WINDOW,
    KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION: GroupKind.CHUNKED_LOCAL,
    KVCacheSpecKind.MAMBA: GroupKind.MAMBA,
}


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """hotkv's index is the position in `cache_groups`.

    window_tokens: of the sliding window or chunk; 0 for other kinds.
    states_by_handoff: Mamba's "align" mode: only blocks that vLLM offers
        (`boundary_state_offloads`) hold a state to store.
    is_draft: has layers of a drafter: while a request decodes, its last full block may change.
    """

    vllm_group: int
    kind: GroupKind
    block_tokens: int
    window_tokens: int = 0
    states_by_handoff: bool = False
    is_draft: bool = False


def cache_groups(vllm_config: Any, kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """Those of vLLM that prefix caching can use. Raises Unsupported if a hit could not restore
    all that the engine needs."""
    parallel = vllm_config.parallel_config
    pcp_size = getattr(parallel, "prefill_context_parallel_size", 1)
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        raise Unsupported("HiSparse keeps KV in host memory, whose blocks have ids of their own")
    # Only the drafter's stage knows its groups, so all stages treat every group as a drafter's.
    all_are_draft = parallel.pipeline_parallel_size > 1 and _drops_last_block(vllm_config)
    groups = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if group_id not in kv_cache_config.prefix_cacheable_group_ids:
            if spec.prefix_cacheable:
                raise Unsupported(f"KV cache group {group_id} may not be transferred")
            continue
        found = _cache_group(group_id, group, parallel.decode_context_parallel_size, pcp_size)
        groups.append(
            replace(found, is_draft=True)
            if all_are_draft and found.kind is not GroupKind.MAMBA
            else found
        )
    check_ranks(vllm_config)
    if not groups:
        raise Unsupported("the model has no KV cache group that prefix caching could use")
    return tuple(groups)


def _cache_group(group_id: int, group: Any, dcp_size: int, pcp_size: int) -> CacheGroup:
    spec = group.kv_cache_spec
    kind = get_kv_cache_spec_kind(spec)
    layers = list(iter_layer_specs(spec))
    if kind not in _KINDS:
        raise Unsupported(
            f"KV cache group {group_id} is of kind {type(spec).__name__}, which is not supported"
        )
    first = layers[0]
    window = 0
    if _KINDS[kind] is GroupKind.SLIDING_WINDOW:
        window = max(layer.sliding_window + layer.extra_retained_tokens for layer in layers)
    elif _KINDS[kind] is GroupKind.CHUNKED_LOCAL:
        window = first.attention_chunk_size
    mamba_mode = getattr(first, "mamba_cache_mode", "")
    if mamba_mode == "none":
        raise Unsupported(
            f"KV cache group {group_id} keeps no states at block boundaries (mamba_cache_mode is "
            "'none')"
        )
    block_tokens = resolve_dcp_kv_block_size(spec, dcp_size)
    try:
        check_context_parallel(
            _KINDS[kind],
            block_tokens,
            is_sharded=spec.dcp_sharded,
            decode_ranks=dcp_size,
            prefill_ranks=pcp_size,
        )
    except ValueError as error:
        raise Unsupported(f"KV cache group {group_id}: {error}") from None
    return CacheGroup(
        group_id,
        _KINDS[kind],
        block_tokens,
        window,
        mamba_mode == "align",
        bool(group.is_eagle_group),
    )


def hit_alignment_tokens(kv_cache_config: Any, groups: tuple[CacheGroup, ...]) -> int:
    """Every hit ends at a multiple; itself a multiple of vLLM's alignment and of all block
    sizes."""
    return math.lcm(
        kv_cache_config.cache_hit_alignment_tokens or 1, *(group.block_tokens for group in groups)
    )


def draft_groups(vllm_config: Any, groups: tuple[CacheGroup, ...]) -> frozenset[int]:
    """Groups in which a token's KV depends on the next token, as with EAGLE: the block after a
    hit must be ready too. All but Mamba's if none is marked (last-block drop of
    `HybridKVCacheCoordinator`, vLLM 0.32); empty without such a drafter."""
    if not _drops_last_block(vllm_config):
        return frozenset()
    marked = frozenset(index for index, group in enumerate(groups) if group.is_draft)
    return marked or frozenset(
        index for index, group in enumerate(groups) if group.kind is not GroupKind.MAMBA
    )


def _drops_last_block(vllm_config: Any) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.use_eagle_block_drop())


def unfinished_tokens(vllm_config: Any) -> int:
    """Last computed tokens whose KV the next step may change: the last of several MTP modules
    reads so much further ahead (`KVCacheCoordinator.get_num_cacheable_tokens`, vLLM 0.32)."""
    return max(0, int(vllm_config.num_prefill_lookahead_tokens) - 1)


def group_block_tokens(vllm_config: Any, kv_cache_config: Any) -> tuple[int, ...]:
    """Per vLLM group; 0 for recurrent states, which cover all tokens before, and groups that
    prefix caching can't use: a token's position does not show its block."""
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    return tuple(
        0
        if not g.kv_cache_spec.prefix_cacheable
        or get_kv_cache_spec_kind(g.kv_cache_spec) is KVCacheSpecKind.MAMBA
        else resolve_dcp_kv_block_size(g.kv_cache_spec, dcp)
        for g in kv_cache_config.kv_cache_groups
    )


def hit_block_tokens(vllm_config: Any, kv_cache_config: Any) -> tuple[int, ...]:
    """Per vLLM group; 0 if prefix caching can't use it, so that vLLM allocates new blocks for a
    hit. In others, blocks of a hit in vLLM's own prefix cache are not written."""
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    specs = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    return tuple(
        resolve_dcp_kv_block_size(spec, dcp) if spec.prefix_cacheable else 0 for spec in specs
    )


def doubtful_tokens(vllm_config: Any, tokens_per_block: Sequence[int]) -> int | None:
    """Last tokens of earlier turns of streamed input that may have wrong KV when the next begins.
    0: only a recurrent state may be wrong. None: all is right.

    tokens_per_block: of the groups that hotkv caches; 0 stands for recurrent states.

    Without asynchronous scheduling vLLM may accept draft tokens behind the one that stops a
    turn; a recurrent state may include later tokens (`Scheduler._update_request_as_session`,
    `_handle_stopped_request`, vLLM 0.32).
    """
    drafts = int(vllm_config.num_speculative_tokens)
    is_async = bool(vllm_config.scheduler_config.async_scheduling)
    has_states = 0 in tokens_per_block
    is_doubtful = (drafts > 0 or is_async) if has_states else (drafts > 0 and not is_async)
    return drafts if is_doubtful else None


def layer_specs(kv_cache_config: Any) -> dict[str, Any]:
    return {
        name: getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
    }
