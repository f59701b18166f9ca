"""Representations of a request's blocks, from the scheduler's side: what to ask a lease for, what
to load, what is missing.

They go with blocks and are never waited for: a hit is as long without them, and the worker builds
what did not come. In a session the first kind has the index that follows the groups. Groups without
a kind pass by untouched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hotkv_client.types import BlockRun, GroupHashes, LoadRun
from hotkv_proto.keys import Representation
from hotkv_vllm.link import BoolMask, CacheSession


class RepresentationPlanner:
    """The kinds that a session declares, one a group at most."""

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
