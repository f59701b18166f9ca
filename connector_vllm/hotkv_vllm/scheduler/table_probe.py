"""Looks at the mapped block table for what a request could hit. A hint: a lease settles it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hotkv_proto.groups import PREFIX_CLOSED, Int64s, longest_prefix
from hotkv_vllm.link import BoolMask, CacheSession
from hotkv_vllm.scheduler.groups import CachedGroups
from hotkv_vllm.scheduler.hidden_keys import HiddenKeys
from hotkv_vllm.scheduler.request import Masks


class TableProbe:
    """Probes group by group, those first whose ready blocks bound every hit."""

    def __init__(self, session: CacheSession, groups: CachedGroups, hidden: HiddenKeys) -> None:
        self._session = session
        self._groups = groups
        self._hidden = hidden
        specs = groups.specs
        self._order = sorted(
            range(len(specs)), key=lambda index: specs[index].kind not in PREFIX_CLOSED
        )

    def __repr__(self) -> str:
        return f"TableProbe({len(self._order)} groups)"

    def ready(self, request: Any, computed_tokens: int) -> Masks | None:
        """Which blocks are ready, per group; None if no table is mapped. `computed_tokens`: hit in
        the engine's own cache."""
        limit = request.num_tokens - 1
        specs = self._groups.specs
        masks: list[BoolMask] = [np.zeros(0, np.bool_)] * len(specs)
        for index in self._order:
            spec = specs[index]
            hashes = self._groups.hashes(request, index)[: self._groups.num_blocks(index, limit)]
            if spec.kind in PREFIX_CLOSED:
                ready = self._prefix(index, hashes, computed_tokens // spec.block_tokens)
            else:
                ready = self._session.probe(index, hashes)
            if ready is None:
                return None
            masks[index] = self._hidden.mask(index, hashes, ready)
            if spec.kind in PREFIX_CLOSED:
                # No hit is longer, so the other groups need not be looked at beyond.
                limit = min(limit, spec.reach_tokens(masks[index]))
                if limit <= computed_tokens:
                    break
        return tuple(masks)

    def may_lie_below(self, request: Any, masks: Masks, computed_tokens: int) -> bool:
        """Whether a hit may be longer than the table says, because the server has tiers."""
        limit = request.num_tokens - 1
        return self._session.has_tiers and not self._groups.is_whole(masks, computed_tokens, limit)

    def _prefix(self, index: int, hashes: Sequence[bytes], first: int) -> BoolMask | None:
        """Leading blocks that are ready, by a few probes. Blocks before `first` are the engine's
        own."""
        # Most requests that miss do so at their first block.
        head = self._session.probe(index, hashes[first : first + 1])
        if head is None:
            return None
        left = len(hashes) - first if head.all() else 0

        def ready_at(places: Int64s) -> BoolMask:
            ready = self._session.probe(index, [hashes[first + place] for place in places.tolist()])
            return np.zeros(len(places), np.bool_) if ready is None else ready

        return np.arange(len(hashes)) < first + longest_prefix(ready_at, max(0, left))
