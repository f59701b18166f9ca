"""Converts events into vLLM's event classes, which msgspec encodes for ZMQ.

The classes copy `vllm.distributed.kv_events` of vLLM 0.32 field by field, so that the bytes are an
engine's; vLLM is not imported, a test compares. Host memory is medium "CPU"; tiers are "STORAGE"
with locality "LOCAL" (disk) or "REMOTE". `ownership` names a shared store; a disk has none, as
Dynamo's indexer counts a block for an engine only if its event names no owner.

A run with unknown token ids has no tokens and block size 0, as in vLLM: routers that match
tokens skip it, those that match hashes can use it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hotkv_proto import native
from hotkv_proto.groups import GroupKind
from hotkv_proto.keys import KeySpace
from hotkv_server.cache.values import Medium
from hotkv_server.events.drive import Event, KeySpaceCleared, RemovedEvent, StoredEvent

MEDIA = {
    Medium.CPU: ("CPU", None),
    Medium.DISK: ("STORAGE", "LOCAL"),
    Medium.REMOTE: ("STORAGE", "REMOTE"),
}
"""(medium, locality) of vLLM."""
RANK = 0
"""Data parallel rank; the server has none."""
KINDS = {
    GroupKind.FULL_ATTENTION: "full_attention",
    GroupKind.MLA: "mla_attention",
    GroupKind.SLIDING_WINDOW: "sliding_window",
    GroupKind.CHUNKED_LOCAL: "chunked_local_attention",
    GroupKind.MAMBA: "mamba",
}
"""vLLM's `KVCacheSpecKind`. A test proves that none is missing."""

ExternalHash = bytes | int


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Encoded as a map whose key `type` has the class's name."""


class BlockStored(KVCacheEvent):
    block_hashes: list[ExternalHash]
    parent_block_hash: ExternalHash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[ExternalHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent): ...


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Payload of a ZMQ message. `ts`: seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def external_hashes(words: NDArray[Any], hash_bytes: int) -> list[ExternalHash]:
    """Hashes as vLLM's events have them by default: their last 8 bytes as an integer. Source:
    `maybe_convert_block_hash` in vLLM 0.32.

    `words`: uint32 [n, 8] or [8].
    `hash_bytes`: the rest of the 32 bytes is padding.
    """
    rows = words.reshape(-1, 8).view(np.uint8)
    packed = np.ascontiguousarray(rows[:, hash_bytes - 8 : hash_bytes])
    hashes: list[ExternalHash] = packed.view(">u8").ravel().tolist()
    return hashes


LONGEST_HEAD = 5
"""Of `_array_head`, in bytes."""


def _array_head(count: int) -> bytes:
    """MessagePack's "array format family"."""
    if count < 16:
        return bytes((0x90 | count,))
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def _owner(event: StoredEvent | RemovedEvent) -> str | None:
    return event.tier if event.medium is Medium.REMOTE else None


class Translator:
    def __init__(self, key_spaces: Mapping[int, KeySpace]) -> None:
        self._key_spaces = key_spaces
        self._kernels = native.require("hotkv_server.events.event_kernels")

    def translate(
        self, events: Iterable[Event], *, is_alone: bool
    ) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Converts events for one topic. `is_alone`: no other key space shares it, so that a
        `KeySpaceCleared` may become an AllBlocksCleared; otherwise it becomes removals."""
        translated: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        for event in events:
            match event:
                case StoredEvent():
                    translated.append(self._stored(event))
                case RemovedEvent():
                    translated.append(self._removed(event))
                case KeySpaceCleared() if is_alone:
                    translated.append(AllBlocksCleared())
                case KeySpaceCleared(removed=removed):
                    translated.extend(map(self._removed, removed))
        return translated

    def _stored(self, event: StoredEvent) -> BlockStored:
        key_space = self._key_spaces[event.key_space_id]
        group, content = key_space.groups[event.group_index], event.content
        hashes = external_hashes(event.hashes, key_space.hash_bytes)
        parents = (
            [] if event.parent is None else external_hashes(event.parent, key_space.hash_bytes)
        )
        medium, locality = MEDIA[event.medium]
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=parents[0] if parents else None,
            token_ids=self._encoded(content.token_ids),
            block_size=group.block_tokens if len(content.token_ids) else 0,
            lora_id=None,
            medium=medium,
            lora_name=content.lora_name or None,
            extra_keys=list(content.extra_keys) or None,
            group_idx=event.group_index,
            kv_cache_spec_kind=KINDS[group.kind],
            kv_cache_spec_sliding_window=group.window_tokens
            if group.kind is GroupKind.SLIDING_WINDOW
            else None,
            locality=locality,
            ownership=_owner(event),
        )

    def _encoded(self, token_ids: NDArray[np.int32]) -> msgspec.Raw:
        count = len(token_ids)
        packed = np.empty(LONGEST_HEAD + self._kernels.MOST_BYTES * count, np.uint8)
        head = _array_head(count)
        packed[: len(head)] = np.frombuffer(head, np.uint8)
        num_bytes = self._kernels.pack_int32s(token_ids, packed[len(head) :])
        return msgspec.Raw(packed[: len(head) + num_bytes].tobytes())

    def _removed(self, event: RemovedEvent) -> BlockRemoved:
        hash_bytes = self._key_spaces[event.key_space_id].hash_bytes
        hashes = external_hashes(event.hashes, hash_bytes)
        medium, locality = MEDIA[event.medium]
        return BlockRemoved(
            block_hashes=hashes,
            medium=medium,
            group_idx=event.group_index,
            locality=locality,
            ownership=_owner(event),
        )
