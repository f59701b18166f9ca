"""KV cache specs of simulated models."""

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests.vllm.tiny import BLOCK_TOKENS

WINDOW = 80
CHUNK = 96
SIZES: dict[str, Any] = {
    "block_size": BLOCK_TOKENS,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.bfloat16,
}


def full_spec() -> FullAttentionSpec:
    return FullAttentionSpec(**SIZES)


def window_spec() -> SlidingWindowSpec:
    return SlidingWindowSpec(**SIZES, sliding_window=WINDOW)


def one_group(*layers: KVCacheSpec) -> UniformTypeKVCacheSpecs:
    """Its layers may differ."""
    specs = {f"layer.{at}": one for at, one in enumerate(layers)}
    return UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=specs)


def full_model() -> dict[str, KVCacheSpec]:
    return {f"layer.{i}": full_spec() for i in range(2)}


def hybrid_model() -> dict[str, KVCacheSpec]:
    """Several groups share a buffer."""
    return {f"layer.{i}": (full_spec() if i % 3 == 0 else window_spec()) for i in range(6)}


def mixed_model() -> dict[str, KVCacheSpec]:
    """With two dtypes vLLM zeroes new blocks."""
    specs = hybrid_model()
    return {
        name: replace(spec, dtype=torch.float16) if isinstance(spec, SlidingWindowSpec) else spec
        for name, spec in specs.items()
    }


def chunked_model() -> dict[str, KVCacheSpec]:
    chunked = ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=CHUNK)
    return {f"layer.{i}": (full_spec() if i == 0 else chunked) for i in range(4)}


def uneven_model() -> dict[str, KVCacheSpec]:
    """Hits end at every second block of the windows, which are narrower than a block."""
    full, window = replace(full_spec(), num_kv_heads=1), replace(window_spec(), sliding_window=20)
    return {f"layer.{i}": (full if i == 0 else window) for i in range(3)}


def two_windows_model() -> dict[str, KVCacheSpec]:
    wide = replace(window_spec(), sliding_window=2 * WINDOW)
    return {f"layer.{i}": (full_spec(), window_spec(), wide)[i % 3] for i in range(6)}


def windows_only_model() -> dict[str, KVCacheSpec]:
    wide = replace(window_spec(), sliding_window=2 * WINDOW)
    return {f"layer.{i}": (window_spec(), wide)[i % 2] for i in range(4)}


def state_spec() -> MambaSpec:
    """Pages as large as those of attention."""
    shape = (2 * 2 * 32 * BLOCK_TOKENS,)
    return MambaSpec(
        block_size=BLOCK_TOKENS,
        shapes=(shape,),
        dtypes=(torch.bfloat16,),
        mamba_cache_mode="align",
    )


def states_and_full_model() -> dict[str, KVCacheSpec]:
    return {f"layer.{i}": (full_spec() if i % 3 == 0 else state_spec()) for i in range(6)}


def checkpoints_model() -> dict[str, KVCacheSpec]:
    """A state before the end of a step that ends a prompt."""
    state = replace(state_spec(), num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)
    return {f"layer.{i}": (full_spec() if i % 3 == 0 else state) for i in range(6)}


def states_and_windows_model() -> dict[str, KVCacheSpec]:
    return {f"layer.{i}": (full_spec(), window_spec(), state_spec())[i % 3] for i in range(6)}


HYBRIDS = (hybrid_model, chunked_model, uneven_model, two_windows_model, windows_only_model)
