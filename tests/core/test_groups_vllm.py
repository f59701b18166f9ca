"""Compares the hit rule with vLLM's KV cache coordinators. Hits are equal but for the cases of
`excuse`; `check_context_parallel` raises exactly when vLLM's coordinator fails an assertion."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from hotkv_proto.groups import (
    WINDOWED,
    BoolMask,
    GroupKind,
    GroupSpec,
    alignment_tokens,
    check_context_parallel,
    longest_hit,
)
from tests.core.support import hash_of

coordinators = pytest.importorskip("vllm.v1.core.kv_cache_coordinator")
interface = pytest.importorskip("vllm.v1.kv_cache_interface")
torch = pytest.importorskip("torch")
utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")

HASH_BLOCK_TOKENS = 2
MAX_HASHES = 48
NUM_MODELS, NUM_PROMPTS = 400, 12
HASHES = [hash_of(number) for number in range(MAX_HASHES)]


def vllm_spec(group: GroupSpec, *, is_sharded: bool = False) -> Any:
    if group.kind is GroupKind.MAMBA:
        return interface.MambaSpec(
            block_size=group.block_tokens,
            shapes=((1,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="all",
        )
    more: dict[str, Any] = {"block_size": group.block_tokens, "num_kv_heads": 1, "head_size": 8}
    more |= {"dtype": torch.float16, "dcp_sharded": is_sharded}
    match group.kind:
        case GroupKind.SLIDING_WINDOW:
            return interface.SlidingWindowSpec(sliding_window=group.window_tokens, **more)
        case GroupKind.CHUNKED_LOCAL:
            return interface.ChunkedLocalAttentionSpec(
                attention_chunk_size=group.window_tokens, **more
            )
        case GroupKind.MLA:
            return interface.MLAAttentionSpec(**more)
        case _:
            return interface.FullAttentionSpec(**more)


def coordinator(
    specs: list[Any], drafts: set[int], *, decode_ranks: int = 1, prefill_ranks: int = 1
) -> Any:
    """drafts: indices of the draft model's groups.
    decode_ranks, prefill_ranks: of context parallelism.
    """
    groups = [
        interface.KVCacheGroupSpec([f"layer.{i}"], spec, is_eagle_group=i in drafts)
        for i, spec in enumerate(specs)
    ]
    config = interface.KVCacheConfig(
        num_blocks=1 + len(specs) * MAX_HASHES, kv_cache_tensors=[], kv_cache_groups=groups
    )
    blocks = [utils.resolve_dcp_kv_block_size(spec, decode_ranks) for spec in specs]
    return coordinators.get_kv_cache_coordinator(
        config,
        max_model_len=4096,
        max_in_flight_tokens=4096,
        use_eagle=bool(drafts),
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=decode_ranks,
        pcp_world_size=prefill_ranks,
        scheduler_block_size=int(np.lcm.reduce(blocks)),
        hash_block_size=HASH_BLOCK_TOKENS if len(specs) > 1 else blocks[0],
    )


def vllm_hit(
    ours: Any, groups: list[GroupSpec], ready: list[BoolMask], num_hashes: int, limit_tokens: int
) -> int:
    """vLLM's hit in tokens. Empties the pool afterwards."""
    pool, hash_tokens = ours.block_pool, ours.block_pool.hash_block_size
    blocks = iter(pool.blocks[1:])
    for index, (group, mask) in enumerate(zip(groups, ready, strict=True)):
        step = group.block_tokens // hash_tokens
        for depth in np.flatnonzero(mask).tolist():
            key = utils.make_block_hash_with_group_id(HASHES[(depth + 1) * step - 1], index)
            pool._insert_block_hash(key, next(blocks), num_tokens=group.block_tokens)
    found: int = ours.find_longest_cache_hit(HASHES[:num_hashes], limit_tokens)[1]
    for block in pool.blocks[1:]:
        if block.block_hash is not None:
            pool._maybe_evict_cached_block(block)
    return found


def random_model(rng: np.random.Generator) -> tuple[list[GroupSpec], set[int]]:
    """(Groups that vLLM accepts, indices of the draft model's). Equal groups belong to the same
    model."""
    equal_blocks = rng.random() < 0.5
    kinds = (
        list(GroupKind)
        if equal_blocks
        else [kind for kind in GroupKind if kind is not GroupKind.CHUNKED_LOCAL]
    )
    size = int(rng.choice([2, 4, 8]))
    groups = []
    for _ in range(rng.integers(1, 6)):
        kind = kinds[rng.integers(len(kinds))]
        block_tokens = size if equal_blocks else int(rng.choice([2, 4, 8, 6]))
        window_tokens = {
            GroupKind.SLIDING_WINDOW: [1, 2, 9, 16, 33, 200],
            GroupKind.CHUNKED_LOCAL: [8, 12, 16, 32, 5],
        }.get(kind, [0])
        groups.append(GroupSpec(kind, block_tokens, (1,), int(rng.choice(window_tokens))))
    if rng.random() < 0.6 or any(group.kind is GroupKind.CHUNKED_LOCAL for group in groups):
        return groups, set()
    chosen = groups[rng.integers(len(groups))]
    if chosen.kind is GroupKind.MAMBA:
        return groups, set()
    return groups, {index for index, group in enumerate(groups) if group == chosen}


def excuse(
    groups: list[GroupSpec], drafts: set[int], num_tokens: int, ours: int, theirs: int
) -> str:
    """Why the two hits may differ; "" if they must be equal."""
    if ours > theirs:
        # vLLM does not look up a single group's last block. With a draft model, it would prove
        # the hit of those before it.
        if len(groups) == 1 and drafts and num_tokens % groups[0].block_tokens == 0:
            return "drafter alone"
        # If window blocks reach back to the prompt's start, vLLM shortens twice: it rounds down,
        # and drops the block for the draft model.
        if any(
            groups[i].kind is GroupKind.SLIDING_WINDOW
            and groups[i].block_tokens < alignment_tokens(groups)
            for i in drafts
        ):
            return "drafter rounded down twice"
        # A window of one token is the token that is computed, so no block is needed; vLLM
        # requires one.
        return "window of one token" if any(group.window_tokens == 1 for group in groups) else ""
    # vLLM counts blocks before the last chunk as hits without a look. If it then shortens into
    # the chunk before, they may be absent.
    if any(
        group.kind is GroupKind.CHUNKED_LOCAL and group.window_tokens % group.block_tokens
        for group in groups
    ):
        return "chunk of broken blocks"
    return ""


@pytest.mark.long
def test_hits_are_those_of_vllm() -> None:
    rng = np.random.default_rng(32)
    seen: Counter[str] = Counter()
    for _ in range(NUM_MODELS):
        groups, drafts = random_model(rng)
        beside = coordinator([vllm_spec(group) for group in groups], drafts)
        hash_tokens = beside.block_pool.hash_block_size
        for _ in range(NUM_PROMPTS):
            num_hashes = int(rng.integers(MAX_HASHES // 2, MAX_HASHES))
            num_tokens = min(
                num_hashes * HASH_BLOCK_TOKENS // hash_tokens * hash_tokens
                + int(rng.integers(hash_tokens)),
                96,
            )
            num_hashes = num_tokens // hash_tokens
            density = rng.choice([0.02, 0.1, 0.4])
            ready = [
                rng.random(num_tokens // group.block_tokens) >= density * rng.choice([0.1, 1])
                for group in groups
            ]
            theirs = vllm_hit(beside, groups, ready, num_hashes, num_tokens - 1)
            ours = longest_hit(groups, ready, num_tokens - 1, alignment_tokens(groups), drafts)
            reason = excuse(groups, drafts, num_tokens, ours, theirs) if ours != theirs else "equal"
            assert reason, (
                f"ours {ours}, vLLM's {theirs}: {groups} drafts={drafts} num_tokens={num_tokens} "
                f"{[m.astype(int) for m in ready]}"
            )
            seen[reason] += 1
            seen["hits"] += theirs > 0
    num_cases = NUM_MODELS * NUM_PROMPTS
    assert seen["equal"] > 0.95 * num_cases and seen["hits"] > 0.3 * num_cases, seen


@pytest.mark.parametrize("decode_ranks", [1, 2])
@pytest.mark.parametrize("prefill_ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "is_sharded"),
    [
        (kind, dealt)
        for kind in GroupKind
        for dealt in (False, True)
        if not dealt or kind is not GroupKind.MAMBA
    ],
)
def test_context_parallelism_is_refused_where_vllm_asserts(
    kind: GroupKind, is_sharded: bool, decode_ranks: int, prefill_ranks: int
) -> None:
    window_tokens = 16 if kind in WINDOWED else 0
    spec = vllm_spec(GroupSpec(kind, 8, (1,), window_tokens), is_sharded=is_sharded)
    full = vllm_spec(GroupSpec(GroupKind.FULL_ATTENTION, 8, (1,)), is_sharded=True)
    block_tokens = utils.resolve_dcp_kv_block_size(spec, decode_ranks)
    ranks = {"decode_ranks": decode_ranks, "prefill_ranks": prefill_ranks}
    refusal: type[Exception] | None = None
    try:
        coordinator([full, spec], set(), **ranks)
    except AssertionError:
        refusal = ValueError
    with pytest.raises(refusal, match=f"kind {kind.name}") if refusal else nullcontext():
        check_context_parallel(kind, block_tokens, is_sharded=is_sharded, **ranks)
