"""Hashes and hits over a key space's groups, and what goes along with blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hotkv_client.session import Session
from hotkv_client.types import BlockRun, BoolMask, GroupHashes, LoadRun
from hotkv_proto.groups import GroupSpec, longest_hit
from hotkv_proto.keys import group_hashes
from hotkv_vllm.companion import Attachment
from hotkv_vllm.compat import steps
from hotkv_vllm.identity.adapters import Adapters
from hotkv_vllm.scheduler.request import Masks

# ----------------------------------------------------------------------------------- names and hits


class CachedGroups:
    """Hashes by which all engines find a request's blocks, and the hit that ready blocks give.

    A request has no hashes if its LoRA adapter is not identified, or vLLM's hashes don't cover its
    media, the weights that encoded them, or the positions of its prompt embeddings.

    hash_block_tokens: vLLM computes one hash per so many tokens.
    alignment_tokens: a hit ends at a multiple.
    draft_groups: of a drafter: the block after a hit's end must be ready too.
    adapters: None: vLLM's own hashes serve for LoRA requests.
    leaves_media_out: vLLM identifies media by a counter, or old weights may have encoded them.
    kept: the group of which a companion may leave blocks out of a load (`Keeper.group`).
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        hash_block_tokens: int,
        alignment_tokens: int,
        draft_groups: frozenset[int] = frozenset(),
        adapters: Adapters | None = None,
        leaves_media_out: bool = False,
    ) -> None:
        self.specs = tuple(specs)
        self.hash_block_tokens = hash_block_tokens
        self.alignment_tokens = alignment_tokens
        self.draft_groups = draft_groups
        self._adapters = adapters
        self.leaves_media_out = leaves_media_out
        self.kept = 0

    def __repr__(self) -> str:
        return f"CachedGroups({len(self.specs)}, alignment {self.alignment_tokens} tokens)"

    def may_share(self, request: Any) -> bool:
        """Whether vLLM's hashes cover all that determines the KV, but the LoRA adapter's bytes."""
        leaves_out = self.leaves_media_out and request.mm_features
        return not leaves_out and steps.covers_embeddings(request)

    def keys(self, request: Any) -> Sequence[bytes]:
        """Empty for a request that must not share KV."""
        if not self.may_share(request):
            return ()
        plain: Sequence[bytes] = request.block_hashes
        return plain if self._adapters is None else self._adapters.keys(request)

    def hashes(self, request: Any, index: int) -> Sequence[bytes]:
        """One per block whose tokens are all known; empty for a request that must not share KV."""
        return self._of_group(self.keys(request), index)

    def own_hashes(self, request: Any, index: int) -> Sequence[bytes]:
        """vLLM's own, also of a request that must not share KV. The caller must salt them: they
        may not cover all inputs."""
        return self._of_group(request.block_hashes, index)

    def _of_group(self, keys: Sequence[bytes], index: int) -> Sequence[bytes]:
        hashes: Sequence[bytes] = group_hashes(
            keys, self.hash_block_tokens, self.specs[index].block_tokens
        )
        return hashes

    def named(
        self, request: Any, blocks: Sequence[range], left_out: range = range(0)
    ) -> list[GroupHashes]:
        """blocks, left_out: indices among the request's blocks; `left_out` in the group `kept`."""
        named = [
            GroupHashes(index, self.hashes(request, index)[part.start : part.stop])
            for index, part in enumerate(blocks)
        ]
        if left_out:
            start, stop = (
                max(0, edge - blocks[self.kept].start) for edge in (left_out.start, left_out.stop)
            )
            hashes = named[self.kept].hashes
            named[self.kept] = GroupHashes(self.kept, [*hashes[:start], *hashes[stop:]])
        return named

    def num_blocks(self, index: int, limit_tokens: int) -> int:
        """To look up for a hit of at most `limit_tokens`; one more in a drafter's group."""
        return limit_tokens // self.specs[index].block_tokens + (index in self.draft_groups)

    def longest_hit(self, masks: Masks, computed_tokens: int, limit_tokens: int) -> int:
        """computed_tokens: leading tokens that the engine holds, whose blocks count as ready."""
        known = []
        for spec, mask in zip(self.specs, masks, strict=True):
            mask = mask.copy()
            mask[: computed_tokens // spec.block_tokens] = True
            known.append(mask)
        return longest_hit(
            self.specs, known, limit_tokens, self.alignment_tokens, self.draft_groups
        )

    def most_tokens(self, limit_tokens: int) -> int:
        """Length of the hit if the server had all full blocks.

        limit_tokens: the request's tokens without the last.
        """
        most = limit_tokens // self.alignment_tokens * self.alignment_tokens
        if not most or not self.draft_groups:
            return most
        # A draft group also needs the block after the hit, which may not be full.
        full = tuple(
            np.ones(
                min(self.num_blocks(index, limit_tokens), (limit_tokens + 1) // spec.block_tokens),
                np.bool_,
            )
            for index, spec in enumerate(self.specs)
        )
        return self.longest_hit(full, 0, limit_tokens)

    def is_whole(self, masks: Masks, computed_tokens: int, limit_tokens: int) -> bool:
        """Whether no further ready block can lengthen the hit. Parameters as for `longest_hit`."""
        longest = self.most_tokens(limit_tokens)
        if longest <= computed_tokens:
            # `masks` may be shorter than the engine's own hit: `TableProbe.ready` skips blocks
            # that can't help.
            return True
        return self.longest_hit(masks, computed_tokens, limit_tokens) >= longest


# ------------------------------------------------------------------------------- attachments


class Attachments:
    """Which attachments to lease, load and store with blocks.

    A hit is as long without them; the companion makes missing ones. In calls to the server
    `kinds[i]`, at most one per group, is a further group with index `num_groups + i`.
    """

    def __init__(self, num_groups: int, kinds: Sequence[Attachment] = ()) -> None:
        self.slot_bytes = tuple(kind.slot_bytes for kind in kinds)
        self._num_groups = num_groups
        self._groups = (*range(num_groups), *(kind.group_index for kind in kinds))
        self._of_group = {kind.group_index: num_groups + place for place, kind in enumerate(kinds)}

    def __repr__(self) -> str:
        return f"Attachments(groups {sorted(self._of_group)})"

    def asked(self, groups: Sequence[GroupHashes]) -> list[GroupHashes]:
        """Attachments of the blocks to lease, for the same call, so that the lease pins them."""
        return [
            GroupHashes(self._of_group[g.group_index], g.hashes)
            for g in groups
            if g.group_index in self._of_group
        ]

    def granted(self, pinned: Sequence[BoolMask]) -> dict[int, BoolMask]:
        """By group, which leased blocks have theirs pinned; `pinned` as asked."""
        return dict(zip(sorted(self._of_group), pinned, strict=True))

    def loads(
        self, granted: Mapping[int, BoolMask], runs: Sequence[LoadRun]
    ) -> tuple[LoadRun, ...]:
        """Only pinned ones."""
        found = []
        for run in runs:
            mask = granted.get(run.group_index)
            if mask is not None and (come := mask[run.lease_positions]).any():
                found.append(
                    LoadRun(
                        self._of_group[run.group_index],
                        run.lease_positions[come],
                        run.block_ids[come],
                    )
                )
        return tuple(found)

    def lacking(self, session: Session, group: int, hashes: Sequence[bytes]) -> BoolMask | None:
        """By the block table: a hint. All True without a table; None for a group without
        attachments."""
        kind = self._of_group.get(group)
        if kind is None:
            return None
        ready = session.probe(kind, hashes)
        return np.ones(len(hashes), np.bool_) if ready is None else ~ready

    def group_of(self, index: int) -> int:
        """Of the blocks; `index` may be that of their attachments."""
        return self._groups[index]

    def of_run(self, run: BlockRun) -> BlockRun:
        return replace(
            run, group_index=self._of_group[run.group_index], token_ids=(), extra_keys=()
        )

    def split(self, runs: Sequence[BlockRun]) -> tuple[tuple[BlockRun, ...], tuple[BlockRun, ...]]:
        blocks = tuple(run for run in runs if run.group_index < self._num_groups)
        return blocks, tuple(run for run in runs if run.group_index >= self._num_groups)
