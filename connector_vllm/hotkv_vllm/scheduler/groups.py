"""The groups of a key space as the scheduler side uses them: what names a block, which hit a set of
ready blocks makes (`CachedGroups`), and which representations go with blocks
(`RepresentationPlanner`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hotkv_client.types import BlockRun, GroupHashes, LoadRun
from hotkv_proto.groups import GroupSpec, longest_hit, needed_blocks
from hotkv_proto.keys import Representation, group_hashes
from hotkv_vllm.identity.adapters import Adapters
from hotkv_vllm.link import BoolMask, CacheSession
from hotkv_vllm.scheduler.request import Masks

# ----------------------------------------------------------------------------------- names and hits


class CachedGroups:
    """The groups of a key space as the scheduler side uses them: what names a block, and which hit
    a set of ready blocks makes.

    What is always true: a hit ends at a multiple of the alignment and leaves at least one token to
    compute; a request that may not be shared (its adapter is not known, or vLLM's hashes don't
    cover its media) has no shared names, and so neither hits nor stores that others find.

    `draft_groups`: indices of groups whose hits must know one block more. `counts_media`: vLLM's
    hashes name media by a counter, so requests with media have no shared names.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        hash_block_tokens: int,
        alignment_tokens: int,
        draft_groups: frozenset[int] = frozenset(),
        adapters: Adapters | None = None,
        counts_media: bool = False,
    ) -> None:
        self.specs = tuple(specs)
        self.hash_block_tokens = hash_block_tokens
        self.alignment_tokens = alignment_tokens
        self.draft_groups = draft_groups
        self._adapters = adapters
        self._counts_media = counts_media

    def __repr__(self) -> str:
        return f"CachedGroups({len(self.specs)}, alignment {self.alignment_tokens} tokens)"

    def may_share(self, request: Any) -> bool:
        """Whether vLLM's hashes cover all that decides the request's KV, but for its adapter's
        bytes."""
        return not (self._counts_media and request.mm_features)

    def keys(self, request: Any) -> Sequence[bytes]:
        """Shared names of a request's tokens, one for each of vLLM's hash blocks, as far as its
        tokens are known. None of them for a request that may not be shared."""
        if not self.may_share(request):
            return ()
        plain: Sequence[bytes] = request.block_hashes
        if self._adapters is None or request.lora_request is None:
            return plain
        return self._adapters.keys(request)

    def hashes(self, request: Any, index: int) -> Sequence[bytes]:
        """Shared names of one group's blocks, as far as the request's tokens are known."""
        return self._of_group(self.keys(request), index)

    def own_hashes(self, request: Any, index: int) -> Sequence[bytes]:
        """vLLM's hashes of one group's blocks, which every request has. They tell blocks of one
        request apart, and must be salted before they name any: what they leave out may differ
        between two requests."""
        return self._of_group(request.block_hashes, index)

    def _of_group(self, keys: Sequence[bytes], index: int) -> Sequence[bytes]:
        hashes: Sequence[bytes] = group_hashes(
            keys, self.hash_block_tokens, self.specs[index].block_tokens
        )
        return hashes

    def named(
        self, request: Any, blocks: Sequence[range], left_out: range = range(0)
    ) -> list[GroupHashes]:
        """The request's blocks in these ranges, one per group, as a call to the server names
        them. `left_out`: but for these of the first group."""
        named = [
            GroupHashes(index, self.hashes(request, index)[part.start : part.stop])
            for index, part in enumerate(blocks)
        ]
        if left_out:
            start, stop = (
                max(0, edge - blocks[0].start) for edge in (left_out.start, left_out.stop)
            )
            hashes = named[0].hashes
            named[0] = GroupHashes(0, [*hashes[:start], *hashes[stop:]])
        return named

    def num_blocks(self, index: int, limit_tokens: int) -> int:
        """Blocks of a group that matter to hits of up to `limit_tokens`."""
        return limit_tokens // self.specs[index].block_tokens + (index in self.draft_groups)

    def longest_hit(self, masks: Masks, computed_tokens: int, limit_tokens: int) -> int:
        """Tokens of the longest hit over the masks. What the engine holds itself counts as
        ready."""
        known = []
        for spec, mask in zip(self.specs, masks, strict=True):
            mask = mask.copy()
            mask[: computed_tokens // spec.block_tokens] = True
            known.append(mask)
        return longest_hit(
            self.specs, known, limit_tokens, self.alignment_tokens, self.draft_groups
        )

    def is_whole(self, masks: Masks, computed_tokens: int, limit_tokens: int) -> bool:
        """Whether no hit could be longer than that over these masks."""
        all_of = tuple(
            np.ones(self.num_blocks(index, limit_tokens), np.bool_)
            for index in range(len(self.specs))
        )
        longest = self.longest_hit(all_of, computed_tokens, limit_tokens)
        return self.longest_hit(masks, computed_tokens, limit_tokens) >= longest

    def missing_blocks(self, hit_tokens: int, computed_tokens: int) -> list[range]:
        """Per group: the blocks that a hit needs and the engine does not hold."""
        return [
            range(max(blocks.start, computed_tokens // spec.block_tokens), blocks.stop)
            for spec, blocks in zip(self.specs, needed_blocks(self.specs, hit_tokens), strict=True)
        ]


# ---------------------------------------------------------------------------------- representations


class RepresentationPlanner:
    """Representations of a request's blocks, from the scheduler's side: what to ask a lease for,
    what to load, what is missing.

    They go with blocks and are never waited for: a hit is as long without them, and the worker
    builds what did not come. In a session the first kind has the index that follows the groups.
    Groups without a kind pass by untouched.

    The kinds that a session declares, one a group at most.
    """

    def __init__(self, num_groups: int, kinds: Sequence[Representation] = ()) -> None:
        self.slot_bytes = tuple(kind.slot_bytes for kind in kinds)
        self._num_groups = num_groups
        self._of_group = {kind.group_index: num_groups + place for place, kind in enumerate(kinds)}

    def __repr__(self) -> str:
        return f"Represented(groups {sorted(self._of_group)})"

    def asked(self, groups: Sequence[GroupHashes]) -> list[GroupHashes]:
        """What a lease over `groups` asks for besides: the representations of the same blocks."""
        return [
            GroupHashes(self._of_group[g.group_index], g.hashes)
            for g in groups
            if g.group_index in self._of_group
        ]

    def granted(self, pinned: Sequence[BoolMask]) -> dict[int, BoolMask]:
        """By group: of which leased blocks the representation is pinned. `pinned` is a grant's
        answer to `asked`."""
        return dict(zip(sorted(self._of_group), pinned, strict=True))

    def loads(
        self, granted: Mapping[int, BoolMask], runs: Sequence[LoadRun]
    ) -> tuple[LoadRun, ...]:
        """What comes along with the blocks of `runs`."""
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

    def lacking(
        self, session: CacheSession, group: int, hashes: Sequence[bytes]
    ) -> BoolMask | None:
        """Of which blocks of a group the server has no representation, as a hint; None for a group
        without them."""
        kind = self._of_group.get(group)
        if kind is None:
            return None
        ready = session.probe(kind, hashes)
        return np.ones(len(hashes), np.bool_) if ready is None else ~ready

    def of_run(self, run: BlockRun) -> BlockRun:
        """The run of a chain's representations."""
        return replace(
            run, group_index=self._of_group[run.group_index], token_ids=(), extra_keys=()
        )

    def split(self, runs: Sequence[BlockRun]) -> tuple[tuple[BlockRun, ...], tuple[BlockRun, ...]]:
        """Runs of blocks, and runs of representations."""
        blocks = tuple(run for run in runs if run.group_index < self._num_groups)
        return blocks, tuple(run for run in runs if run.group_index >= self._num_groups)
