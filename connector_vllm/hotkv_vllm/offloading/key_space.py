"""Computes the key space for rows of vLLM's primary tier (the CPU memory of its offloading). A row
holds a chunk (one or several blocks) of one KV cache group, with the parts of all ranks.

vLLM's `OffloadKey`, the key of a chunk, identifies tokens and a KV cache group, but not the model.
So the key space covers everything else that decides the bytes of a row: the settings that
`HotKVConnector` uses too (`compat.key_space`), and where each part of a chunk is in a row.

With vLLM's canonical layout (`canonical_layout` in the connector's settings) rows have the same
bytes for all tensor-parallel sizes. The key space then does not contain the tensor-parallel size,
so engines with different sizes share KV.

Parts of vLLM that this module reads: `OffloadingConfig` and its parts
(`vllm.v1.kv_offload.config`).
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
"""Version of the format of rows, a part of each key space. Must be changed in each release of hotkv
whose engines write other bytes to rows, so that engines of both releases share nothing."""


def is_portable(config: Any) -> bool:
    """Returns True if the rows of this engine would have the same bytes with any tensor-parallel
    size. This holds only with vLLM's canonical layout. In other layouts a row contains the pages of
    each rank side by side, and so depends on the number of ranks.

    Source: vLLM's `OffloadingConfig.canonical_layout` and `is_parallelism_agnostic`. vLLM's worker
    refuses to start if a layer can't be written in the canonical layout.

    config: vLLM's `OffloadingConfig`.
    """
    return bool(config.canonical_layout and config.parallel.is_parallelism_agnostic)


def rank_factors(vllm_config: Any, kv_cache_config: Any, config: Any) -> tuple[str, ...]:
    """Returns vLLM's settings that decide KV bytes (`fingerprint.key_space_factors`), for the key
    space. Must be called in a rank's process after the model was loaded, because models change some
    settings when they are loaded, such as the quantization. The scheduler does not see such changes
    if the rank runs in another process.

    config: vLLM's `OffloadingConfig`.
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
    """Returns the key space of an engine with `HotKVOffloadingConnector`, in which hotkv knows
    vLLM's whole configuration. Raises Unsupported if it can't be determined what decides the KV
    bytes.

    config: vLLM's `OffloadingConfig`.
    row_bytes: bytes of a row of vLLM's primary tier, padding included.
    formats: the reports of all ranks: how each packs K and V inside pages (KV of a block in one
        layer), and its settings.
    settings: hotkv's settings.
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
    # Joins the factors (settings that decide KV bytes) of all ranks, because ranks of other
    # pipeline stages have other layers.
    factors = dict.fromkeys(factor for one in by_rank for factor in one.factors)
    return replace(
        space,
        hash_block_tokens=config.cache.tokens_per_hash,
        extra=(*factors, *_row_factors(config)),
    )


def stated_key_space(config: Any, row_bytes: int, settings: ConnectorConfig) -> KeySpace:
    """Returns the key space of an engine without `HotKVOffloadingConnector`, in which the user has
    named hotkv's tier in vLLM's setting `secondary_tiers`. hotkv then knows only vLLM's
    `OffloadingConfig`. So the setting `hotkv.weights_identity` must not be empty: it stands for
    everything else that decides KV bytes.

    config: vLLM's `OffloadingConfig`.
    row_bytes: bytes of a row of vLLM's primary tier, padding included.
    settings: hotkv's settings.
    """
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
    """Returns the settings that decide where each byte of a chunk is in a row, for the key space.

    config: vLLM's `OffloadingConfig`.
    """
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
