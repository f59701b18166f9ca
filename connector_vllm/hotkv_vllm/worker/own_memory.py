"""A rank's KV memory as it finds it when vLLM registers it: shown to the server, and described for
the engine's other ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotkv_proto.keys import KeySpace
from hotkv_vllm.compat import Unsupported, key_space, kv_groups, places, reuse
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.identity import ranks
from hotkv_vllm.identity.ranks import RankNote
from hotkv_vllm.link import logger
from hotkv_vllm.worker.exported import ExportedMemory
from hotkv_vllm.worker.layout import describe, export


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """`note`: what the other ranks must know. `memory`: None if it can't be shown; the note says
    why."""

    note: RankNote
    memory: ExportedMemory | None = None
    groups: tuple[kv_groups.CacheGroup, ...] = ()
    device: Any = None


def find_own(
    kv_caches: Mapping[str, Any],
    vllm_config: Any,
    kv_cache_config: Any,
    config: ConnectorConfig,
    place: places.RankPlace,
    known_space: KeySpace | None,
) -> OwnMemory:
    """Reads the layout off the tensors and exports them. Raises nothing: the other ranks wait for
    the note.

    `known_space`: after a sleep, this rank's key space from before; None to work it out.
    """
    host = ranks.this_host()
    try:
        reuse.check_reuse(vllm_config, kv_cache_config)
        groups = kv_groups.cache_groups(vllm_config, kv_cache_config)
        found = describe(kv_caches, kv_cache_config, groups)
        if not found.storages:
            raise Unsupported(f"pipeline stage {place.stage} has no layer with a KV cache")
        device = next(iter(found.storages.values())).device
        packing = key_space.packing(vllm_config, kv_cache_config, groups, device.type)
        page_format = f"{found.page_format};{packing}"
        # A key space has no group without bytes; the sizes of the whole slot come with the other
        # ranks' notes.
        sizes = tuple(size or 1 for size in found.shard_bytes)
        space = known_space or key_space.key_space(
            vllm_config, kv_cache_config, config, groups, sizes, 1, page_format
        )
        name = str(getattr(kv_cache_config, "kv_cache_layout", "") or "")
        memory = export(found, kv_cache_config.num_blocks, place.shard_index, name)
    except (Unsupported, OSError, ValueError) as error:
        return OwnMemory(RankNote(place, host, None, why_off=str(error) or type(error).__name__))
    except Exception as error:  # noqa: BLE001 - a rank that raised would leave the others waiting
        logger.exception("hotkv: the KV cache's layout can't be read")
        return OwnMemory(RankNote(place, host, None, why_off=f"{type(error).__name__}: {error}"))
    return OwnMemory(RankNote(place, host, space, tuple(found.shard_bytes)), memory, groups, device)
