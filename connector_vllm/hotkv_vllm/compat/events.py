"""Converts the server's events about blocks to vLLM's event classes.

An event names the storage medium of its blocks, in the same way as the events that the server
itself publishes. The medium CPU is host memory; STORAGE is a tier below host memory. STORAGE has
the locality LOCAL for the server's disk, and REMOTE for a store that several nodes share. The field
`ownership` is the name of this shared store.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from hotkv_client.types import BlocksRemoved, BlocksStored
from hotkv_proto.groups import GroupKind
from hotkv_vllm.compat.kv_groups import CacheGroup

MEDIA = {"CPU": ("CPU", None), "DISK": ("STORAGE", "LOCAL"), "REMOTE": ("STORAGE", "REMOTE")}
"""vLLM's medium and locality, by the server's name of a medium."""
KINDS = {
    GroupKind.FULL_ATTENTION: "full_attention",
    GroupKind.MLA: "mla_attention",
    GroupKind.SLIDING_WINDOW: "sliding_window",
    GroupKind.CHUNKED_LOCAL: "chunked_local_attention",
    GroupKind.MAMBA: "mamba",
}
"""The value of vLLM's `KVCacheSpecKind`, by kind of group."""


class DeviceClears:
    """Notices that vLLM has emptied its prefix cache on the device. vLLM then publishes the event
    AllBlocksCleared of this engine.

    Source: `BlockPool.reset_prefix_cache` replaces `cached_block_hash_to_block`, and only this
    method publishes AllBlocksCleared.
    """

    def __init__(self) -> None:
        self._blocks: Any = None

    def __repr__(self) -> str:
        return f"DeviceClears(has a pool: {self._blocks is not None})"

    def since_last(self, manager: Any) -> bool:
        """Returns True if the prefix cache was emptied since the last call. `manager`: vLLM's
        `KVCacheManager`, or None."""
        pool = getattr(manager, "block_pool", None)
        before, self._blocks = self._blocks, getattr(pool, "cached_block_hash_to_block", None)
        return before is not None and self._blocks is not before


def stored(group: CacheGroup, run: BlocksStored) -> BlockStored:
    """Converts the server's event "these consecutive blocks became ready" to vLLM's event class.

    group: the KV cache group of the blocks.
    run: the server's event.
    """
    medium, locality = MEDIA[run.medium]
    tokens = run.token_ids.tolist()
    return BlockStored(
        block_hashes=[_external(one) for one in run.hashes],
        parent_block_hash=_external(run.parent_hash) if run.parent_hash else None,
        token_ids=tokens,
        block_size=group.block_tokens if tokens else 0,
        lora_id=None,
        medium=medium,
        lora_name=run.lora_name or None,
        extra_keys=[None if keys is None else tuple(keys) for keys in run.extra_keys] or None,
        group_idx=group.vllm_group,
        kv_cache_spec_kind=KINDS[group.kind],
        kv_cache_spec_sliding_window=group.window_tokens
        if group.kind is GroupKind.SLIDING_WINDOW
        else None,
        locality=locality,
        ownership=_owner(run),
    )


def removed(group: CacheGroup, gone: BlocksRemoved) -> BlockRemoved:
    """Converts the server's event "these blocks were removed" to vLLM's event class.

    group: the KV cache group of the blocks.
    gone: the server's event.
    """
    medium, locality = MEDIA[gone.medium]
    return BlockRemoved(
        block_hashes=[_external(one) for one in gone.hashes],
        medium=medium,
        group_idx=group.vllm_group,
        locality=locality,
        ownership=_owner(gone),
    )


def note_host_blocks(names: dict[int, set[Any]], found: Iterable[Any]) -> None:
    """Updates `names` from new events. `names` lists the blocks that the server has in host memory,
    according to all events so far.

    names: hashes of these blocks, in the form that they have in events, by number of vLLM's group.
    found: new events about blocks in the server.
    """
    for event in found:
        if event.medium == MEDIUM_CPU:
            known = names.setdefault(event.group_idx, set())
            change = known.update if isinstance(event, BlockStored) else known.difference_update
            change(event.block_hashes)


def without_removals(found: Iterable[Any], names: Mapping[int, Collection[Any]]) -> Iterator[Any]:
    """Yields the events of vLLM's offloading, but leaves out that a block in `names` was removed
    from host memory: the server still has this block in host memory. In an event both places have
    the same medium (CPU), so routers would forget the server's block too.

    names: the result of `note_host_blocks`.
    """
    for event in found:
        if isinstance(event, BlockRemoved) and event.medium == MEDIUM_CPU:
            kept = names.get(event.group_idx or 0, ())
            event.block_hashes = [one for one in event.block_hashes if one not in kept]
            if not event.block_hashes:
                continue
        yield event


def _external(block_hash: bytes) -> Any:
    return maybe_convert_block_hash(BlockHash(block_hash))


def _owner(event: BlocksStored | BlocksRemoved) -> str | None:
    return event.tier if event.medium == "REMOTE" else None
