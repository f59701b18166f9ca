"""Finds out whether the server has the chunks for which a request waits because another engine
computes them. Scheduler thread only."""

import math
from concurrent.futures import Future
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, make_offload_key

from hotkv_client.types import GroupHashes
from hotkv_proto.groups import GroupKind
from hotkv_proto.keys import KeySpace
from hotkv_vllm.offloading.tier import HotKVTier
from hotkv_vllm.scheduler.request import Masks, RequestState


class AwaitedChunks:
    """Implements `prefill_wait.Finder`: of each group, the last chunk that the longest possible hit
    needs, because the other engine stores it last.

    Skips recurrent states, which it may not store at this position, and chunks in the primary tier.

    primary: vLLM's `CPUPrimaryTierOffloadingManager`.
    """

    def __init__(self, tier: HotKVTier, space: KeySpace, primary: Any) -> None:
        self._tier = tier
        self._space = space
        self._primary = primary

    @property
    def table(self) -> "AwaitedChunks":
        return self

    @property
    def groups(self) -> "AwaitedChunks":
        return self

    @property
    def is_connected(self) -> bool:
        return self._tier.is_usable

    def ready(self, request: Any, computed_tokens: int) -> Masks | None:
        """Per awaited chunk, a mask of one element; None without a block table."""
        session = self._tier.session
        assert session is not None
        masks = []
        for group in self._chunks(request, computed_tokens):
            mask = session.probe(group.group_index, group.hashes)
            if mask is None:
                return None
            masks.append(mask)
        return tuple(masks)

    def may_lie_below(self, request: Any, masks: Masks, computed_tokens: int) -> bool:
        session = self._tier.session
        return session is not None and session.has_tiers and not all(one.all() for one in masks)

    def is_whole(self, masks: Masks, computed_tokens: int, limit_tokens: int) -> bool:
        return all(mask.all() for mask in masks)

    def lookup(self, state: RequestState) -> "Future[Masks]":
        """Also finds chunks in lower tiers."""
        assert self._tier.session is not None
        return self._tier.session.lookup(self._chunks(state.request, 0))

    def forget(self, state: RequestState) -> None:
        """Nothing: the tier looks a request up only after its wait."""

    def _chunks(self, request: Any, computed_tokens: int) -> list[GroupHashes]:
        found = []
        groups, theirs = self._space.groups, self._tier.config.groups
        unit, size = (
            math.lcm(*(group.block_tokens for group in groups)),
            self._space.hash_block_tokens,
        )
        end = min(request.num_tokens - 1, len(request.block_hashes) * size) // unit * unit
        for index, (group, their) in enumerate(zip(groups, theirs, strict=True)):
            if group.kind is GroupKind.MAMBA or end <= computed_tokens:
                continue
            block_hash = request.block_hashes[end // size - 1]
            key = make_offload_key(block_hash, their.group_id)
            if self._primary.lookup(key, None) is LookupResult.MISS:
                found.append(GroupHashes(index, [block_hash]))
        return found
