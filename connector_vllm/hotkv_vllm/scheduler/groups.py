"""Two classes that depend on the KV cache groups (layers whose KV vLLM manages together) of a key
space (a model in a configuration).

`CachedGroups` computes the hashes that identify a request's blocks in the server. It also computes
the length of the hit that given ready blocks make. `SketchPlanner` plans which
sketches (compact forms of keys, for sparse decode) are stored and loaded together with
blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hotkv_client.session import Session
from hotkv_client.types import BlockRun, BoolMask, GroupHashes, LoadRun
from hotkv_proto.groups import GroupSpec, longest_hit
from hotkv_proto.keys import Sketch, group_hashes
from hotkv_vllm.compat import steps
from hotkv_vllm.identity.adapters import Adapters
from hotkv_vllm.scheduler.request import Masks

# ----------------------------------------------------------------------------------- names and hits


class CachedGroups:
    """Computes the shared names of a request's blocks, and the length of a hit from the blocks that
    are ready in the server. The shared name of a block is the hash by which all engines find the
    block in the server.

    Always true:
    - A hit ends at a multiple of `alignment_tokens` and does not cover the last token.
    - A request has no shared names if its LoRA adapter is not identified, or if vLLM's hashes don't
      cover the content of its media, the weights that encoded the media, or the positions of its
      prompt embeddings. Such a request gets no hit, and no other request finds its blocks.

    specs: the groups of the key space.
    hash_block_tokens: number of tokens of a hash block; vLLM computes one hash for each hash block
        of a request, over all tokens up to the block's end.
    alignment_tokens: every hit ends at a multiple of this.
    draft_groups: indices of the groups of a drafter (speculative decoding). In these groups the
        block after a hit's end must be ready too.
    adapters: computes the keys (hashes) of requests with LoRA adapters. None: such requests
        have vLLM's own hashes as keys.
    leaves_media_out: True if requests with media have no shared names: vLLM's hashes identify media
        by a counter, or old weights may have computed vLLM's encodings of media.
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

    def __repr__(self) -> str:
        return f"CachedGroups({len(self.specs)}, alignment {self.alignment_tokens} tokens)"

    def may_share(self, request: Any) -> bool:
        """Returns True if vLLM's hashes cover everything that determines the request's KV, except
        for the bytes of its LoRA adapter."""
        leaves_out = self.leaves_media_out and request.mm_features
        return not leaves_out and steps.covers_embeddings(request)

    def keys(self, request: Any) -> Sequence[bytes]:
        """Returns the hashes that identify a request's tokens in the server, one for each of vLLM's
        hashes. Empty for a request that must not share KV with other requests: its LoRA adapter is
        not identified, or vLLM's hashes do not cover its media or embeddings."""
        if not self.may_share(request):
            return ()
        plain: Sequence[bytes] = request.block_hashes
        return plain if self._adapters is None else self._adapters.keys(request)

    def hashes(self, request: Any, index: int) -> Sequence[bytes]:
        """Returns the shared names of the request's blocks in the group `index`: the hashes by
        which all engines find the blocks in the server. Has one hash for each block whose tokens
        are all known. Empty for a request that must not share KV with other requests: its LoRA
        adapter is not identified, or vLLM's hashes do not cover its media or embeddings."""
        return self._of_group(self.keys(request), index)

    def own_hashes(self, request: Any, index: int) -> Sequence[bytes]:
        """Returns vLLM's own hashes of the request's blocks in the group `index`, also for a
        request that may not share KV with other requests (for which `hashes` is empty).

        The caller must salt these hashes before it uses them as names of blocks in the server: two
        requests with equal hashes may differ in inputs that vLLM's hash does not cover.
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
        """Returns, per group, the shared names (hashes) of some of the request's blocks.

        blocks: per group, the indices of the wanted blocks among the request's blocks.
        left_out: indices of blocks in the first group that are omitted from the result.
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
        """Returns how many leading blocks of the group `index` must be looked up to find the
        longest hit of at most `limit_tokens`. In a drafter's group this includes the block after
        the hit's end."""
        return limit_tokens // self.specs[index].block_tokens + (index in self.draft_groups)

    def longest_hit(self, masks: Masks, computed_tokens: int, limit_tokens: int) -> int:
        """Returns the length of the longest hit that given blocks allow, in tokens.

        masks: which blocks of the request are ready in the server, per group.
        computed_tokens: number of leading tokens that the engine itself holds. Their blocks count
            as ready.
        limit_tokens: the hit may not be longer than this.
        """
        known = []
        for spec, mask in zip(self.specs, masks, strict=True):
            mask = mask.copy()
            mask[: computed_tokens // spec.block_tokens] = True
            known.append(mask)
        return longest_hit(
            self.specs, known, limit_tokens, self.alignment_tokens, self.draft_groups
        )

    def most_tokens(self, limit_tokens: int) -> int:
        """Returns the length of a request's hit if the server had all its full blocks.

        limit_tokens: the longest hit allowed: the number of the request's tokens without the last.
        """
        most = limit_tokens // self.alignment_tokens * self.alignment_tokens
        if not most or not self.draft_groups:
            return most
        # A draft group also needs the block after the hit's end, which may not be full.
        full = tuple(
            np.ones(
                min(self.num_blocks(index, limit_tokens), (limit_tokens + 1) // spec.block_tokens),
                np.bool_,
            )
            for index, spec in enumerate(self.specs)
        )
        return self.longest_hit(full, 0, limit_tokens)

    def is_whole(self, masks: Masks, computed_tokens: int, limit_tokens: int) -> bool:
        """Returns True if the hit can't become longer when more blocks become ready: the ready
        blocks (`masks`) give the longest possible hit, or no hit can be longer than
        `computed_tokens`.

        masks: which blocks of the request are ready in the server, per group.
        computed_tokens: number of leading tokens that the engine itself holds. Their blocks count
            as ready.
        limit_tokens: the longest hit allowed: the number of the request's tokens without the last.
        """
        longest = self.most_tokens(limit_tokens)
        if longest <= computed_tokens:
            # No hit can be longer than the engine's own hit, so `masks` need not be compared. They
            # may even be shorter than the engine's own hit, because `TableProbe.ready` does not
            # look up blocks that can't help.
            return True
        return self.longest_hit(masks, computed_tokens, limit_tokens) >= longest


# ---------------------------------------------------------------------------------- sketches


class SketchPlanner:
    """Plans which sketches of a request's blocks to lease, to load, and to store. A
    sketch is a compact form of a block's keys, for sparse attention.

    Sketches are stored and loaded together with their blocks. They are optional: a hit is as
    long without them, and the worker builds missing sketches from the keys in the blocks. In
    calls to the server, each kind of sketch has a group index, as if it were a further
    group: `kinds[i]` has the group index `num_groups + i`. A group for which no kind is declared
    has no sketches.

    num_groups: number of groups of the key space.
    kinds: the kinds that the session declares, at most one per group.
    """

    def __init__(self, num_groups: int, kinds: Sequence[Sketch] = ()) -> None:
        self.slot_bytes = tuple(kind.slot_bytes for kind in kinds)
        self._num_groups = num_groups
        self._of_group = {kind.group_index: num_groups + place for place, kind in enumerate(kinds)}

    def __repr__(self) -> str:
        return f"Represented(groups {sorted(self._of_group)})"

    def asked(self, groups: Sequence[GroupHashes]) -> list[GroupHashes]:
        """Returns the hashes of the sketches (compact forms of keys) of the blocks in
        `groups`. A call for a lease on these blocks must list them too, so that the lease pins the
        sketches.

        groups: the hashes of the blocks to lease, by group.
        """
        return [
            GroupHashes(self._of_group[g.group_index], g.hashes)
            for g in groups
            if g.group_index in self._of_group
        ]

    def granted(self, pinned: Sequence[BoolMask]) -> dict[int, BoolMask]:
        """Returns, by group, a mask of the leased blocks: True if the lease has also pinned the
        block's sketch (compact form of keys).

        pinned: for each `GroupHashes` that `asked` returned, in the same order: which of its
            sketches the lease has pinned.
        """
        return dict(zip(sorted(self._of_group), pinned, strict=True))

    def loads(
        self, granted: Mapping[int, BoolMask], runs: Sequence[LoadRun]
    ) -> tuple[LoadRun, ...]:
        """Returns the sketches (compact forms of keys) to load together with the blocks in
        `runs`. Only sketches that the lease has pinned are loaded.

        granted: by group, a mask of the leased blocks whose sketch is pinned.
        runs: the blocks to load.
        """
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
        """Returns a mask over `hashes`: True if the server lacks the sketch (compact form
        of keys) of this block, according to the mapped block table. The answer is a hint, because
        the server may evict at any time. All True if no block table is mapped. Returns None for a
        group without sketches."""
        kind = self._of_group.get(group)
        if kind is None:
            return None
        ready = session.probe(kind, hashes)
        return np.ones(len(hashes), np.bool_) if ready is None else ~ready

    def of_run(self, run: BlockRun) -> BlockRun:
        """Returns a copy of `run` (consecutive blocks to store), changed so that it stores the
        blocks' sketches (compact forms of keys) instead of the blocks."""
        return replace(
            run, group_index=self._of_group[run.group_index], token_ids=(), extra_keys=()
        )

    def split(self, runs: Sequence[BlockRun]) -> tuple[tuple[BlockRun, ...], tuple[BlockRun, ...]]:
        """Splits the runs (consecutive blocks of a group) of a store, by their group index, into
        two: the runs of blocks, and the runs of sketches (compact forms of the blocks'
        keys)."""
        blocks = tuple(run for run in runs if run.group_index < self._num_groups)
        return blocks, tuple(run for run in runs if run.group_index >= self._num_groups)
