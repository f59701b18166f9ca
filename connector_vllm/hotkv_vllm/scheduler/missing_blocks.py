"""Which of a request's full blocks the server lacks, as runs of neighbours.

What is always true: only blocks that a hit can use are stored (`storable`), only exact ones
(`exactness`), and no block twice at a time. What holds for a block that is stored holds for one
whose representation is.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hotkv_client.types import BlockRun, Int32s
from hotkv_vllm.compat import NULL_BLOCK, steps
from hotkv_vllm.compat.kv_groups import CacheGroup
from hotkv_vllm.link import BoolMask, CacheSession
from hotkv_vllm.scheduler.hits import HitFinder
from hotkv_vllm.scheduler.request import RequestState
from hotkv_vllm.scheduler.storable import StorableBlocks, prompt_boundaries
from hotkv_vllm.scheduler.stores_in_flight import StoresInFlight
from hotkv_vllm.stats import HotKVStats

STORE_BLOCKS = 1 << 13
"""Most blocks of one store. The server takes no more than 2^16 in a call, and the sooner a store
ends the sooner its blocks are found."""
Handoff = tuple[int, int, int]
"""A state at a block boundary that vLLM names itself (Mamba "align" mode): vLLM's group, block,
boundary in tokens."""
Tables = Callable[[str], "tuple[Sequence[int], ...] | None"]
"""A request's block ids per vLLM group, as they are in this step."""
Handoffs = Mapping[str, Sequence[Handoff]]
"""By request: states that vLLM names itself."""


class MissingBlocks:
    """Finds the blocks of a request that are to be stored now."""

    def __init__(
        self,
        session: CacheSession,
        finder: HitFinder,
        cache_groups: tuple[CacheGroup, ...],
        state_interval_tokens: int,
        stats: HotKVStats,
        in_flight: StoresInFlight,
    ) -> None:
        self._in_flight = in_flight
        self._session = session
        self._finder = finder
        self._groups = finder.groups
        self._cache_groups = cache_groups
        self._representations = finder.representations
        self._stats = stats
        self._storable = tuple(
            StorableBlocks(
                spec,
                self._groups.alignment_tokens,
                state_interval_tokens,
                index in self._groups.draft_groups,
            )
            for index, spec in enumerate(self._groups.specs)
        )

    def __repr__(self) -> str:
        return f"MissingBlocks({self._groups})"

    def runs(
        self,
        state: RequestState,
        index: int,
        hashes: Sequence[bytes],
        begin: int,
        ids: Int32s,
        planned: set[int],
    ) -> list[BlockRun]:
        """What of one group's blocks `ids`, the first of which is block `begin`, is to be stored.
        `planned`: blocks that are about to be stored; these are added.

        A representation is stored with its block, or after it if the server lacks it.
        """
        if not len(ids):
            return []
        end, wanted = begin + len(ids), ids != NULL_BLOCK
        if not self._storable[index].is_everything:
            storable = self._storable_mask(state, index, begin, end)
            num_useless = int((wanted & ~storable).sum())
            if num_useless:
                self._stats.add("unreachable_blocks", num_useless)
            wanted &= storable
        reading = self._in_flight.reading
        if reading or planned:
            wanted &= np.fromiter(
                (b not in reading and b not in planned for b in ids.tolist()), np.bool_, len(ids)
            )
        names = hashes[begin:end]
        lacking = self._representations.lacking(self._session, index, names)
        along = (
            []
            if lacking is None
            else self._chains(state, index, hashes, begin, ids, wanted & lacking)
        )
        ready = self._session.probe(index, names)
        if ready is not None:
            wanted &= ~self._finder.hidden.mask(index, names, ready)
        runs = self._chains(state, index, hashes, begin, ids, wanted) + [
            self._representations.of_run(run) for run in along
        ]
        planned.update(block for run in runs for block in run.block_ids.tolist())
        return runs

    def handed_over(
        self,
        state: RequestState,
        entries: Sequence[Handoff],
        exact_tokens: int,
        planned: set[int],
    ) -> list[BlockRun]:
        """What of the states `entries` is to be stored: none behind the request's `exact_tokens`.
        `planned`: as in `runs`."""
        found: list[BlockRun] = []
        groups = self._cache_groups
        for vllm_group, block, boundary in entries:
            index = next((i for i, g in enumerate(groups) if g.vllm_group == vllm_group), -1)
            if index < 0 or boundary % groups[index].block_tokens or boundary > exact_tokens:
                continue
            place = boundary // groups[index].block_tokens - 1
            hashes = self._groups.hashes(state.request, index)
            if 0 <= place < len(hashes):
                one = np.array([block], np.int32)
                found += self.runs(state, index, hashes, place, one, planned)
        return found

    def _storable_mask(self, state: RequestState, index: int, begin: int, end: int) -> BoolMask:
        """Which of a group's blocks [begin, end) a hit could use."""
        ends = prompt_boundaries(
            state.request.num_prompt_tokens,
            self._groups.alignment_tokens,
            bool(self._groups.draft_groups),
        )
        kept = (*ends, steps.shared_prefix_boundary(state.request))
        return self._storable[index].mask(begin, end, kept)

    def _chains(
        self,
        state: RequestState,
        index: int,
        hashes: Sequence[bytes],
        begin: int,
        ids: Int32s,
        wanted: BoolMask,
    ) -> list[BlockRun]:
        """The wanted ones of the blocks `ids` as chains of neighbours, each no longer than a
        store."""
        places = np.flatnonzero(wanted)
        chains = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else []
        chains = [
            chain[start : start + STORE_BLOCKS]
            for chain in chains
            for start in range(0, len(chain), STORE_BLOCKS)
        ]
        return [
            self._run(state, index, hashes, begin + int(chain[0]), ids[chain]) for chain in chains
        ]

    def _run(
        self, state: RequestState, index: int, hashes: Sequence[bytes], first: int, ids: Int32s
    ) -> BlockRun:
        """A chain of neighbours that begins with the group's block `first`."""
        stop, tokens = first + len(ids), self._groups.specs[index].block_tokens
        parent = hashes[first - 1] if first else b""
        if not self._session.wants_token_ids:
            return BlockRun(index, list(hashes[first:stop]), ids, parent, first)
        token_ids = state.request.all_token_ids[first * tokens : stop * tokens]
        extra_keys = steps.event_extra_keys(state.request, range(first, stop), tokens)
        return BlockRun(
            index, list(hashes[first:stop]), ids, parent, first, token_ids, extra_keys=extra_keys
        )


def portions(runs: Sequence[BlockRun]) -> list[list[BlockRun]]:
    """Runs of at most STORE_BLOCKS blocks each, in their order, as stores of no more than that."""
    stores: list[list[BlockRun]] = []
    room = 0
    for run in runs:
        if not stores or len(run.hashes) > room:
            stores.append([])
            room = STORE_BLOCKS
        stores[-1].append(run)
        room -= len(run.hashes)
    return stores
