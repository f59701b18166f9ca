"""The key space of rows in the primary tier.

vLLM's `OffloadKey` names tokens and a group, but no model. So the key space covers
`HotKVConnector`'s settings (`compat.key_space`) and where each part of a chunk is in a row. With
vLLM's `canonical_layout` rows are equal for all tensor-parallel sizes, which share KV.

Reads `OffloadingConfig` and its parts (`vllm.v1.kv_offload.config`).
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_vllm import versions
from hotkv_vllm.compat import Unsupported, fingerprint
from hotkv_vllm.compat.key_space import key_space as own_key_space
from hotkv_vllm.compat.kv_groups import cache_groups, layer_specs
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.offloading.messages import PageFormat

FORM = "vllm-offload-rows-1"
"""Must change with each release whose engines write other bytes to rows."""


def is_portable(config: Any) -> bool:
    """Whether rows have the same bytes with any tensor-parallel size: only in the canonical
    layout (`OffloadingConfig.canonical_layout`, `is_parallelism_agnostic`; vLLM's worker refuses
    layers that it does not fit). Others put each rank's pages side by side."""
    return bool(config.canonical_layout and config.parallel.is_parallelism_agnostic)


def rank_factors(vllm_config: Any, kv_cache_config: Any, config: Any) -> tuple[str, ...]:
    """vLLM's settings that decide KV bytes (`fingerprint.key_space_factors`).

    Call in a rank after the model was loaded: loading changes some, such as the quantization,
    and the scheduler's process may not see it.
    """
    read = fingerprint.portable_factors if is_portable(config) else fingerprint.key_space_factors
    return read(vllm_config, layer_specs(kv_cache_config))


def full_key_space(
    vllm_config: Any,
    kv_cache_config: Any,
    config: Any,
    row_bytes: int,
    formats: Collection[PageFormat],
    settings: ConnectorConfig,
    weights_identity: str,
) -> KeySpace:
    """Of an engine with `HotKVOffloadingConnector`. Raises Unsupported if what decides the KV bytes
    is unknown.

    config: vLLM's `OffloadingConfig`.
    row_bytes: padding included.
    formats: of all ranks.
    """
    per_chunk = config.cache.blocks_per_chunk
    groups = tuple(
        replace(group, block_tokens=group.block_tokens * per_chunk)
        for group in cache_groups(vllm_config, kv_cache_config)
    )
    if [group.vllm_group for group in groups] != [group.group_id for group in config.groups]:
        raise Unsupported("vLLM's offloading keeps other KV cache groups than hotkv would")
    sizes = (row_bytes,) * len(groups)
    page_format = "|".join(sorted({one.text for one in formats}))
    space = own_key_space(
        vllm_config, kv_cache_config, settings, groups, sizes, 1, page_format, weights_identity
    )
    if is_portable(config):
        space = replace(space, parallel_shape="any tensor-parallel size")
    by_rank = sorted(formats, key=lambda one: one.rank)
    # Ranks of other pipeline stages have other layers.
    factors = dict.fromkeys(factor for one in by_rank for factor in one.factors)
    return replace(
        space,
        hash_block_tokens=config.cache.tokens_per_hash,
        extra=(*factors, *_row_factors(config)),
    )


def stated_key_space(config: Any, row_bytes: int, settings: ConnectorConfig) -> KeySpace:
    """For a tier named in `secondary_tiers`, which sees only vLLM's `OffloadingConfig`. The
    setting `hotkv.weights_identity`, not empty, stands for the rest."""
    per_chunk = config.cache.blocks_per_chunk
    groups = tuple(
        GroupSpec(
            GroupKind.FULL_ATTENTION,
            group.tokens_per_block * per_chunk,
            (row_bytes,),
            layer_names=tuple(group.layer_names),
        )
        for group in config.groups
    )
    return KeySpace(
        model=config.model.name,
        weights_identity=settings.weights_identity,
        dtype=str(config.model.dtype),
        groups=groups,
        hash_block_tokens=config.cache.tokens_per_hash,
        tenant=settings.tenant,
        page_format="stated by the user",
        extra=(f"vllm={versions.VERSION}", *_row_factors(config)),
    )


def _row_factors(config: Any) -> tuple[str, ...]:
    """Where each byte of a chunk is in a row."""
    parallel = config.parallel
    if is_portable(config):
        shape = "any"
    else:
        sizes = (parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size)
        shape = "/".join(str(size) for size in (*sizes, config.worker_kv_bytes_per_block))
    return (
        FORM,
        f"blocks_per_chunk={config.cache.blocks_per_chunk}",
        f"ranks={shape}",
        f"replicated={config.replicated_layout}",
        f"canonical={config.canonical_layout}",
        f"layout={config.kv_cache_layout}",
    )
