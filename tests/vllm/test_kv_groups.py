"""How vLLM's KV cache groups are read, and which are refused."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    MambaSpec,
    SlidingWindowMLASpec,
)

from hotkv_proto.groups import GroupKind
from hotkv_vllm.compat import Unsupported, kv_groups
from hotkv_vllm.compat.kv_groups import CacheGroup
from tests.vllm.specs import CHUNK, SIZES, WINDOW, full_spec, one_group, window_spec
from tests.vllm.tiny import BLOCK_TOKENS

CHUNKED = ChunkedLocalAttentionSpec(
    block_size=BLOCK_TOKENS,
    num_kv_heads=2,
    head_size=32,
    dtype=torch.bfloat16,
    attention_chunk_size=CHUNK,
)


def states(mode: str = "all") -> MambaSpec:
    return MambaSpec(
        block_size=32, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )


def group(spec: Any, *names: str, is_draft: bool = False) -> Any:
    layers = list(names) or ["layer"]
    return SimpleNamespace(kv_cache_spec=spec, layer_names=layers, is_eagle_group=is_draft)


def kv_config(
    *groups: Any,
    cacheable: Sequence[int] | None = None,
    alignment: int = 0,
    in_host: bool = False,
) -> Any:
    return SimpleNamespace(
        kv_cache_groups=list(groups),
        hisparse_host_num_blocks=64 if in_host else None,
        prefix_cacheable_group_ids=range(len(groups)) if cacheable is None else cacheable,
        cache_hit_alignment_tokens=alignment,
    )


def vllm_config(*, drops: bool | None = None, stages: int = 1, dcp: int = 1, pcp: int = 1) -> Any:
    """drops: a hit's last block is computed again; None: no drafter.
    dcp, pcp: ranks of decode and prefill context parallelism.
    """
    parallel = SimpleNamespace(
        pipeline_parallel_size=stages,
        decode_context_parallel_size=dcp,
        prefill_context_parallel_size=pcp,
        distributed_executor_backend="mp",
        world_size=stages,
    )
    drafter = None if drops is None else SimpleNamespace(use_eagle_block_drop=lambda: drops)
    return SimpleNamespace(parallel_config=parallel, speculative_config=drafter)


CROSS = CrossAttentionSpec(
    block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.bfloat16
)


def groups_of(*groups: Any, **engine: Any) -> tuple[CacheGroup, ...]:
    return kv_groups.cache_groups(vllm_config(**engine), kv_config(*groups))


def test_each_layer_kind_is_a_known_group() -> None:
    """An uncached group is left out; others keep their numbers."""
    specs = [
        SimpleNamespace(prefix_cacheable=False),
        full_spec(),
        window_spec(),
        CHUNKED,
        states(),
        states("align"),
    ]
    config = kv_config(*map(group, specs), cacheable=[1, 2, 3, 4, 5])
    assert kv_groups.cache_groups(vllm_config(), config) == (
        CacheGroup(1, GroupKind.FULL_ATTENTION, BLOCK_TOKENS),
        CacheGroup(2, GroupKind.SLIDING_WINDOW, BLOCK_TOKENS, WINDOW),
        CacheGroup(3, GroupKind.CHUNKED_LOCAL, BLOCK_TOKENS, CHUNK),
        CacheGroup(4, GroupKind.MAMBA, 32),
        # The only mode in which vLLM names the states to store.
        CacheGroup(5, GroupKind.MAMBA, 32, states_by_handoff=True),
    )


def test_window_is_as_wide_as_widest_layer() -> None:
    wide = replace(window_spec(), sliding_window=WINDOW + 5, extra_retained_tokens=0)
    keeps = replace(window_spec(), extra_retained_tokens=9)
    for spec, tokens in (
        (one_group(wide, window_spec()), WINDOW + 5),
        (one_group(window_spec(), wide), WINDOW + 5),
        (keeps, WINDOW + 9),
    ):
        assert [one.window_tokens for one in groups_of(group(spec))] == [tokens]


@pytest.mark.parametrize(
    "config, engine, why",
    [
        (kv_config(group(full_spec()), cacheable=[]), {}, "may not be transferred"),
        (kv_config(), {}, "no KV cache group"),
        (kv_config(group(full_spec()), in_host=True), {}, "HiSparse keeps KV in host memory"),
        (kv_config(group(states("none"))), {}, "no states at block boundaries"),
        (kv_config(group(CROSS)), {}, "CrossAttentionSpec, which is not supported"),
        (kv_config(group(states())), {"pcp": 2}, "KV cache group 0: kind MAMBA"),
        (kv_config(group(full_spec())), {"pcp": 2}, "prefill context parallelism"),
        (
            kv_config(group(replace(window_spec(), dcp_sharded=True))),
            {"dcp": 2},
            "KV cache group 0: kind SLIDING_WINDOW",
        ),
    ],
)
def test_unrestorable_hit_is_refused_with_reason(
    config: Any, engine: dict[str, int], why: str
) -> None:
    with pytest.raises(Unsupported, match=why):
        kv_groups.cache_groups(vllm_config(**engine), config)


def test_an_engine_without_prefill_ranks_has_one() -> None:
    """With two ranks states would be refused."""
    engine = vllm_config()
    del engine.parallel_config.prefill_context_parallel_size
    assert kv_groups.cache_groups(engine, kv_config(group(states())))


def test_blocks_shared_by_ranks_count_all_tokens() -> None:
    """It is 0 where vLLM allocates also for a hit's tokens."""
    specs = [replace(full_spec(), dcp_sharded=sharded) for sharded in (True, False)]
    config = kv_config(*map(group, specs))
    found = kv_groups.cache_groups(vllm_config(dcp=2), config)
    assert [one.block_tokens for one in found] == [2 * BLOCK_TOKENS, BLOCK_TOKENS]
    replayed = SlidingWindowMLASpec(**SIZES, sliding_window=WINDOW, bounded_replay=True)
    config = kv_config(*map(group, [*specs, states(), replayed]))
    found_tokens = kv_groups.group_block_tokens(vllm_config(dcp=2), config)
    assert found_tokens == (2 * BLOCK_TOKENS, BLOCK_TOKENS, 0, 0)
    found_tokens = kv_groups.hit_block_tokens(vllm_config(dcp=2), config)
    assert found_tokens == (2 * BLOCK_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS, 0)


@pytest.mark.parametrize(
    "drops, stages, marked, is_draft, dropping",
    [
        # No group drops a hit's last block.
        (None, 1, False, [False] * 3, set()),
        (False, 1, False, [False] * 3, set()),
        (None, 2, False, [False] * 3, set()),
        (False, 2, False, [False] * 3, set()),
        # vLLM's marked group does, else all but states.
        (True, 1, True, [False, True, False], {1}),
        (True, 1, False, [False] * 3, {0, 1}),
        # In a pipeline one stage sees the mark, so all but states do.
        (True, 2, True, [True, True, False], {0, 1}),
        (True, 2, False, [True, True, False], {0, 1}),
        # Marked, but no block is dropped.
        (False, 1, True, [False, True, False], set()),
    ],
)
def test_which_groups_hold_a_drafters_layers(
    drops: bool | None, stages: int, marked: bool, is_draft: list[bool], dropping: set[int]
) -> None:
    config = kv_config(group(full_spec()), group(window_spec(), is_draft=marked), group(states()))
    engine = vllm_config(drops=drops, stages=stages)
    groups = kv_groups.cache_groups(engine, config)
    assert [one.is_draft for one in groups] == is_draft
    assert kv_groups.draft_groups(engine, groups) == dropping


def test_drafters_recomputed_tokens_are_unfinished() -> None:
    for lookahead, tokens in ((0, 0), (1, 0), (3, 2)):
        engine = SimpleNamespace(num_prefill_lookahead_tokens=lookahead)
        assert kv_groups.unfinished_tokens(engine) == tokens


def test_hits_are_multiples_of_all_sizes() -> None:
    groups = tuple(CacheGroup(0, GroupKind.MLA, tokens) for tokens in (15, 9))
    for given, alignment in ((0, 45), (1, 45), (10, 90)):
        found = kv_groups.hit_alignment_tokens(kv_config(alignment=given), groups)
        assert found == alignment
