"""The groups of a key space as the scheduler side uses them: the names of blocks and the hit that a
set of ready blocks makes (`CachedGroups`), and the representations that travel with blocks
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
    """Names the blocks of a key space's groups, and computes the hit that a set of ready blocks
    makes.

    Always true:
    - A hit ends at a multiple of the alignment and does not cover the last token.
    - A request that may not be shared has no shared names. So it gets no hit, and other requests
      can't find its stores. Its adapter is unknown, or vLLM's hashes don't cover its media.

    draft_groups: indices of groups in which a hit requires the hash of a further block.
    counts_media: True if vLLM's hashes name media by a counter. Requests with media then have no
        shared names.
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
        """Returns True if vLLM's hashes cover all that determines the request's KV, apart from the
        bytes of its adapter."""
        return not (self._counts_media and request.mm_features)

    def keys(self, request: Any) -> Sequence[bytes]:
        """Returns the shared names of a request's tokens, one per hash block of vLLM, as far as the
        tokens are known. Empty for a request that may not be shared."""
        if not self.may_share(request):
            return ()
        plain: Sequence[bytes] = request.block_hashes
        if self._adapters is None or request.lora_request is None:
            return plain
        return self._adapters.keys(request)

    def hashes(self, request: Any, index: int) -> Sequence[bytes]:
        """Returns the shared names of a group's blocks, as far as the request's tokens are
        known."""
        return self._of_group(self.keys(request), index)

    def own_hashes(self, request: Any, index: int) -> Sequence[bytes]:
        """Returns vLLM's hashes of a group's blocks; every request has them.

        They distinguish the blocks of a request. They must be salted before they name blocks in the
        server, because two requests with equal hashes may differ in inputs that vLLM's hash does
        not cover.
        """
        return self._of_group(request.block_hashes, index)

    def _of_group(self, keys: Sequence[bytes], index: int) -> Sequence[bytes]:
        hashes: Sequence[bytes] = group_hashes(
            keys, self.hash_block_tokens, self.specs[index].block_tokens
        )
        return hashes

    def named(
        self, request: Any, blocks: Sequence[range], left_out: range = range(0)
    ) -> list[GroupHashes]:
        """Returns the names of the request's blocks for a call to the server.

        blocks: a range of blocks per group.
        left_out: blocks of the first group to leave out.
        """
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
        """Returns how many blocks of a group matter to hits of up to `limit_tokens`."""
        return limit_tokens // self.specs[index].block_tokens + (index in self.draft_groups)

    def longest_hit(self, masks: Masks, computed_tokens: int, limit_tokens: int) -> int:
        """Returns the length of the longest hit over the masks, in tokens. Blocks in the engine's
        own cache count as ready."""
        known = []
        for spec, mask in zip(self.specs, masks, strict=True):
            mask = mask.copy()
            mask[: computed_tokens // spec.block_tokens] = True
            known.append(mask)
        return longest_hit(
            self.specs, known, limit_tokens, self.alignment_tokens, self.draft_groups
        )

    def is_whole(self, masks: Masks, computed_tokens: int, limit_tokens: int) -> bool:
        """Returns True if no masks could make a longer hit than these masks do."""
        all_of = tuple(
            np.ones(self.num_blocks(index, limit_tokens), np.bool_)
            for index in range(len(self.specs))
        )
        longest = self.longest_hit(all_of, computed_tokens, limit_tokens)
        return self.longest_hit(masks, computed_tokens, limit_tokens) >= longest

    def missing_blocks(self, hit_tokens: int, computed_tokens: int) -> list[range]:
        """Returns per group the blocks that a hit needs and the engine does not hold."""
        return [
            range(max(blocks.start, computed_tokens // spec.block_tokens), blocks.stop)
            for spec, blocks in zip(self.specs, needed_blocks(self.specs, hit_tokens), strict=True)
        ]


# ---------------------------------------------------------------------------------- representations


class RepresentationPlanner:
    """Plans the representations of a request's blocks: which to lease, which to load, which the
    server lacks.

    Representations travel with blocks and nothing waits for them. A hit is as long without them,
    and the worker builds those that did not arrive. In a session the first kind has the index that
    follows the last group. Groups without a kind are ignored.

    kinds: the kinds that the session declares, at most one per group.
    """

    def __init__(self, num_groups: int, kinds: Sequence[Representation] = ()) -> None:
        self.slot_bytes = tuple(kind.slot_bytes for kind in kinds)
        self._num_groups = num_groups
        self._of_group = {kind.group_index: num_groups + place for place, kind in enumerate(kinds)}

    def __repr__(self) -> str:
        return f"Represented(groups {sorted(self._of_group)})"

    def asked(self, groups: Sequence[GroupHashes]) -> list[GroupHashes]:
        """Returns the representations of the same blocks, for a lease over `groups`."""
        return [
            GroupHashes(self._of_group[g.group_index], g.hashes)
            for g in groups
            if g.group_index in self._of_group
        ]

    def granted(self, pinned: Sequence[BoolMask]) -> dict[int, BoolMask]:
        """Returns by group which leased blocks have a pinned representation. `pinned` is the
        grant's answer to `asked`."""
        return dict(zip(sorted(self._of_group), pinned, strict=True))

    def loads(
        self, granted: Mapping[int, BoolMask], runs: Sequence[LoadRun]
    ) -> tuple[LoadRun, ...]:
        """Returns the representations to load with the blocks of `runs`."""
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
        """Returns which blocks of a group have no representation in the server, as a hint. Returns
        None for a group without representations."""
        kind = self._of_group.get(group)
        if kind is None:
            return None
        ready = session.probe(kind, hashes)
        return np.ones(len(hashes), np.bool_) if ready is None else ~ready

    def of_run(self, run: BlockRun) -> BlockRun:
        """Returns the run of the representations of `run`'s blocks."""
        return replace(
            run, group_index=self._of_group[run.group_index], token_ids=(), extra_keys=()
        )

    def split(self, runs: Sequence[BlockRun]) -> tuple[tuple[BlockRun, ...], tuple[BlockRun, ...]]:
        """Splits runs into runs of blocks and runs of representations."""
        blocks = tuple(run for run in runs if run.group_index < self._num_groups)
        return blocks, tuple(run for run in runs if run.group_index >= self._num_groups)
