"""Converts the server's events about blocks to vLLM's.

Media are as in the server's own events: CPU is host memory; STORAGE is a lower tier, LOCAL for
the server's disk, REMOTE for a shared store, which `ownership` names.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from hotkv_client.types import BlocksRemoved, BlocksStored
from hotkv_proto.groups import GroupKind
from hotkv_vllm.compat.kv_groups import CacheGroup

MEDIA = {"CPU": ("CPU", None), "DISK": ("STORAGE", "LOCAL"), "REMOTE": ("STORAGE", "REMOTE")}
"""Of vLLM (medium, locality), by the server's."""
KINDS = {
    GroupKind.FULL_ATTENTION: "full_attention",
    GroupKind.MLA: "mla_attention",
    GroupKind.SLIDING_WINDOW: "sliding_window",
    GroupKind.CHUNKED_LOCAL: "chunked_local_attention",
    GroupKind.MAMBA: "mamba",
}


class DeviceClears:
    """Notices that vLLM has emptied its prefix cache, and so published AllBlocksCleared: only
    `BlockPool.reset_prefix_cache` does, and replaces `cached_block_hash_to_block`."""

    def __init__(self) -> None:
        self._blocks: Any = None

    def __repr__(self) -> str:
        return f"DeviceClears(has a pool: {self._blocks is not None})"

    def since_last(self, manager: Any) -> bool:
        """manager: vLLM's `KVCacheManager`, or None."""
        pool = getattr(manager, "block_pool", None)
        before, self._blocks = self._blocks, getattr(pool, "cached_block_hash_to_block", None)
        return before is not None and self._blocks is not before


def stored(group: CacheGroup, run: BlocksStored) -> BlockStored:
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
    medium, locality = MEDIA[gone.medium]
    return BlockRemoved(
        block_hashes=[_external(one) for one in gone.hashes],
        medium=medium,
        group_idx=group.vllm_group,
        locality=locality,
        ownership=_owner(gone),
    )


def note_host_blocks(names: dict[int, set[Any]], found: Iterable[Any]) -> None:
    """Updates the blocks that the server has in host memory.

    names: their hashes as in events, by vLLM group.
    """
    for event in found:
        if event.medium == MEDIUM_CPU:
            known = names.setdefault(event.group_idx, set())
            change = known.update if isinstance(event, BlockStored) else known.difference_update
            change(event.block_hashes)


def without_removals(found: Iterable[Any], names: Mapping[int, Collection[Any]]) -> Iterator[Any]:
    """vLLM's events without removals from host memory of blocks in `names`, which the server
    still has: routers see both places as one medium."""
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
