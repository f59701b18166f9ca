"""Translates vLLM's KV cache groups into hotkv's groups: their kinds, block sizes and windows, and
which groups belong to a drafter.

Parts of vLLM that this module reads: `KVCacheConfig.kv_cache_groups` and each group's
`kv_cache_spec`, `prefix_cacheable_group_ids` and `cache_hit_alignment_tokens`, the context-parallel
sizes of `parallel_config`, `SpeculativeConfig.use_eagle_block_drop`, `num_speculative_tokens`,
`num_prefill_lookahead_tokens` and `async_scheduling`.
"""

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
    """A KV cache group of vLLM that hotkv stores. Its index in hotkv is its position in the result
    of `cache_groups`.

    vllm_group: number of the group in vLLM.
    kind: kind of attention of the group's layers.
    block_tokens: tokens of a block.
    window_tokens: length of the sliding window or chunk; 0 for other kinds.
    states_by_handoff: True in Mamba's "align" mode: only the blocks that vLLM offers for storing
        (`boundary_state_offloads`) hold a state that can be stored.
    is_draft: True if the group has layers of a drafter (speculative decoding). While a request
        decodes, the group's last full block may still change.
    """

    vllm_group: int
    kind: GroupKind
    block_tokens: int
    window_tokens: int = 0
    states_by_handoff: bool = False
    is_draft: bool = False


def cache_groups(vllm_config: Any, kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """Returns the groups that hotkv stores: the groups of vLLM that prefix caching can use. Raises
    Unsupported if a hit could not restore everything that the engine needs."""
    parallel = vllm_config.parallel_config
    pcp_size = getattr(parallel, "prefill_context_parallel_size", 1)
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        raise Unsupported("HiSparse keeps KV in host memory, whose blocks have ids of their own")
    # Only the pipeline stage that has the layers of the drafter (model that proposes tokens) knows
    # to which group these layers belong. So all stages treat every group as a drafter's group.
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
    """Returns the alignment of hits, in tokens: every hit ends at a multiple of this number. The
    alignment is a multiple of vLLM's own alignment and of the block size of every group."""
    return math.lcm(
        kv_cache_config.cache_hit_alignment_tokens or 1, *(group.block_tokens for group in groups)
    )


def draft_groups(vllm_config: Any, groups: tuple[CacheGroup, ...]) -> frozenset[int]:
    """Returns the indices of the groups in which the KV of a token depends on the next token, as
    with the drafter (model that proposes tokens) EAGLE. In such a group the block after the end of
    a hit must be ready too. Empty if the engine has no such drafter.

    If the engine has such a drafter but no group is marked as a drafter's, returns all groups
    except groups of Mamba states. Source: the EAGLE last-block drop of `HybridKVCacheCoordinator`
    in vLLM 0.32.
    """
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
    """Returns how many of a request's last computed tokens have KV that the next step may change.

    The cause is a drafter with several MTP modules: the last module reads this many tokens further
    ahead than the first module. So the next step computes the KV of these tokens again, together
    with the tokens that were accepted after them. Source:
    `KVCacheCoordinator.get_num_cacheable_tokens` in vLLM 0.32.
    """
    return max(0, int(vllm_config.num_prefill_lookahead_tokens) - 1)


def group_block_tokens(vllm_config: Any, kv_cache_config: Any) -> tuple[int, ...]:
    """Returns the number of tokens of a block, per vLLM group; 0 for a group of recurrent states,
    and for a group that prefix caching can't use. In a group with 0, a token's position does not
    show which block holds its KV: a recurrent state covers all tokens before it."""
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    return tuple(
        0
        if not g.kv_cache_spec.prefix_cacheable
        or get_kv_cache_spec_kind(g.kv_cache_spec) is KVCacheSpecKind.MAMBA
        else resolve_dcp_kv_block_size(g.kv_cache_spec, dcp)
        for g in kv_cache_config.kv_cache_groups
    )


def hit_block_tokens(vllm_config: Any, kv_cache_config: Any) -> tuple[int, ...]:
    """Returns the number of tokens of a block, per vLLM group. Returns 0 for a group that prefix
    caching can't use, because vLLM allocates new blocks in it for the tokens of a hit. In all other
    groups, blocks before the end of a hit in vLLM's own prefix cache are not written."""
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    specs = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    return tuple(
        resolve_dcp_kv_block_size(spec, dcp) if spec.prefix_cacheable else 0 for spec in specs
    )


def doubtful_tokens(vllm_config: Any, tokens_per_block: Sequence[int]) -> int | None:
    """Returns how many tokens may have wrong KV when a request with streamed input begins a later
    turn. These are the last tokens that earlier turns have computed. 0: only a recurrent state may
    be wrong. None: all KV is right.

    tokens_per_block: the result of `group_block_tokens`.

    Source: `Scheduler._update_request_as_session` and `_handle_stopped_request` in vLLM 0.32. The
    causes: without asynchronous scheduling, vLLM may accept draft tokens that come after the token
    that stops a turn, and counts them as computed. A recurrent state may include tokens that come
    after the turn's last token.
    """
    drafts = int(vllm_config.num_speculative_tokens)
    is_async = bool(vllm_config.scheduler_config.async_scheduling)
    has_states = 0 in tokens_per_block
    is_doubtful = (drafts > 0 or is_async) if has_states else (drafts > 0 and not is_async)
    return drafts if is_doubtful else None


def layer_specs(kv_cache_config: Any) -> dict[str, Any]:
    """Returns the KV cache spec of each layer of this worker, by layer name."""
    return {
        name: getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
    }
