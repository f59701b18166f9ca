"""Which blocks to store after a step, and which stores a step has to wait for. Scheduler thread
only; never blocks.

What is always true: a block being stored is not written before its store has ended, because every
step that may write blocks for the first time (new requests, growth, loads by whomever) lists the
stores that read any of them, and the worker waits for those first. Block tables are read from vLLM
at each step and never kept. A block has at most one store in flight. Only blocks that a hit can use
are stored (`reach`), and only exact ones (`exactness`). What holds for a block that is stored holds
for one whose representation is. With `Revocations` a store is revoked here, before any worker gets
the step that gives its blocks away.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotkv.retention import NO_RETENTION, Retention
from hotkv_client.fence import Revocations
from hotkv_client.types import BlockResult, BlockRun, Int32s
from hotkv_vllm.compat import NULL_BLOCK
from hotkv_vllm.compat.kv_groups import CacheGroup
from hotkv_vllm.compat.steps import event_extra_keys, shared_prefix_boundary
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.link import BoolMask, CacheSession
from hotkv_vllm.metadata import HotKVWorkerMetadata, StoreJob, StoreReport
from hotkv_vllm.scheduler.exactness import EVERYTHING, Exactness
from hotkv_vllm.scheduler.hits import HitFinder, RequestState
from hotkv_vllm.scheduler.storable import StorableBlocks, prompt_boundaries
from hotkv_vllm.stats import HotKVStats

_store_ids = itertools.count(1)
"""Of all planners of this process: workers may report stores of one that is gone."""
UNREPORTED_S = 60.0
"""A store that no rank has reported for this long was lost on the way: it is taken back and
forgotten."""
STORE_BLOCKS = 1 << 13
"""Most blocks of one store. The server takes no more than 2^16 in a call, and the sooner a store
ends the sooner its blocks are found."""


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


@dataclass(slots=True)
class StoreInFlight:
    """A store that ranks are working at. `read`: all blocks it reads. `ranks_left`: ranks that have
    not reported its end. `fence_index`: the word that revokes it; 0 for none. `planned_s`: when it
    was planned.
    """

    runs: tuple[BlockRun, ...]
    read: tuple[int, ...]
    num_bytes: int
    ranks_left: int
    results: list[bytes]
    fence_index: int = 0
    planned_s: float = 0.0


class StorePlanner:
    """Plans stores and fences."""

    def __init__(
        self,
        session: CacheSession,
        finder: HitFinder,
        groups: Sequence[CacheGroup],
        num_ranks: int,
        config: ConnectorConfig,
        stats: HotKVStats,
        id_prefix: str,
        revocations: Revocations | None = None,
        exactness: Exactness | None = None,
    ) -> None:
        self._session = session
        self._exactness = exactness or Exactness((), 1)
        self._revocations = revocations
        self._finder = finder
        self._groups = tuple(groups)
        self._represented = finder.represented
        self._slot_bytes = (
            *(spec.slot_bytes for spec in finder.specs),
            *finder.represented.slot_bytes,
        )
        self._reach = tuple(
            StorableBlocks(
                spec,
                finder.alignment_tokens,
                config.state_interval_tokens,
                index in finder.draft_groups,
            )
            for index, spec in enumerate(finder.specs)
        )
        self._num_ranks = num_ranks
        self._max_bytes = config.max_inflight_store_mib << 20
        self._stats = stats
        self._prefix = id_prefix
        self._in_flight: dict[int, StoreInFlight] = {}
        self._last_planned = self._last_sent = 0
        self._accounted: HotKVWorkerMetadata | None = None
        self._bytes = 0
        self._reading: dict[int, int] = {}
        self._tails: list[tuple[Retention, tuple[BlockRun, ...]]] = []
        self._tail_blocks: set[int] = set()
        self._smallest_block = min(group.block_tokens for group in self._groups)
        self.is_held = False
        """Nothing new is stored, and every step waits for what is in flight."""
        self.is_rekeying = False
        """The same, while it is not known which key space stands for the engine's weights."""

    def __repr__(self) -> str:
        return (
            f"StorePlanner(in_flight={len(self._in_flight)}, bytes={self._bytes}, "
            f"blocks_read={len(self._reading)})"
        )

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def first_check_tokens(self) -> int:
        """Computed tokens at which a new request has its first full block."""
        return self._smallest_block

    def plan(
        self,
        scheduled: Sequence[tuple[RequestState, int]],
        block_ids: Callable[[str], tuple[list[int], ...] | None],
        handoffs: dict[str, list[tuple[int, int, int]]],
        fresh_blocks: Callable[[], set[int]],
    ) -> tuple[tuple[StoreJob, ...], tuple[int, ...]]:
        """This step's stores, and the stores in flight that it has to wait for.

        `scheduled`: requests and how many tokens the step computes for each. `fresh_blocks`: blocks
        that the step, or a load that begins with it, may write for the first time; asked only where
        something reads blocks.
        """
        self._last_sent = self._last_planned
        flush = tuple(sorted({*self._lost(), *self._fences(fresh_blocks)}))
        if self.is_held or self.is_rekeying:
            return (), self.take_all_back()
        batches: dict[Retention, list[BlockRun]] = {}
        for retention, tail in self._tails:
            batches.setdefault(retention, []).extend(tail)
        self.forget()
        planned = {int(b) for runs in batches.values() for run in runs for b in run.block_ids}
        if self._session.connected:
            for state, num_tokens in scheduled:
                computed = state.request.num_computed_tokens + num_tokens
                runs = (
                    self._runs_of(state, computed, block_ids, planned)
                    if computed >= state.next_store_tokens
                    else []
                )
                runs += self._handed_over(
                    state, handoffs.get(state.request.request_id, ()), planned
                )
                if runs:
                    batches.setdefault(state.retention, []).extend(runs)
        jobs = [
            self._job(part, retention)
            for retention, runs in batches.items()
            for part in portions(runs)
        ]
        return tuple(job for job in jobs if job is not None), flush

    def finish(
        self, state: RequestState, block_ids: Sequence[Sequence[int]], known_tokens: int
    ) -> None:
        """A request ends: blocks whose hash became known after their last step are stored with the
        next one, if still unwritten then."""
        if (
            self.is_held
            or self.is_rekeying
            or not self._session.connected
            or known_tokens < state.next_store_tokens
        ):
            return
        runs = self._runs_of(
            state,
            known_tokens,
            lambda _: tuple(list(ids) for ids in block_ids),
            self._tail_blocks,
            last=True,
        )
        if runs:
            self._tails.append((state.retention, tuple(runs)))

    def reported(self, report: HotKVWorkerMetadata) -> None:
        """Ranks report stores that ended."""
        for store in self.account(report):
            self._settle(store)

    def account(self, report: HotKVWorkerMetadata) -> list[StoreInFlight]:
        """Strikes off the stores that all ranks have ended by now, and returns them. Takes a report
        once, however often it is called."""
        ended: list[StoreInFlight] = []
        if self._accounted is report:
            return ended
        self._accounted = report
        for store_id, part in report.stores.items():
            store = self._in_flight.get(store_id)
            if store is not None:
                store.results += part.results
                store.ranks_left -= len(part.results)
        for store_id in report.stores:
            store = self._in_flight.get(store_id)
            if store is not None and store.ranks_left <= 0:
                ended.append(store)
                self._drop(store_id)
        return ended

    def plan_broke(self) -> None:
        """The step's plan is lost: stores that no worker was told of are struck off; all others are
        revoked where that is done here."""
        unsent = [
            store for store_id, store in self._in_flight.items() if store_id > self._last_sent
        ]
        self._in_flight = {
            store_id: store
            for store_id, store in self._in_flight.items()
            if store_id <= self._last_sent
        }
        self._reading = {
            block: store_id for store_id, store in self._in_flight.items() for block in store.read
        }
        self._bytes = sum(store.num_bytes for store in self._in_flight.values())
        self._tails, self._tail_blocks = [], set()
        if self._revocations is not None:
            self._revocations.revoke_all()
            for store in unsent:
                self._revocations.end(store.fence_index)

    def _lost(self) -> list[int]:
        """Strikes off stores that somehow were not, and those whose reports never came; the step
        waits for them, where a worker has them after all.
        """
        until_s = time.monotonic() - UNREPORTED_S
        lost = [
            store_id
            for store_id, store in self._in_flight.items()
            if store.ranks_left <= 0 or store.planned_s <= until_s
        ]
        for store_id in lost:
            self._stats.add(
                "dropped_blocks", sum(len(run.hashes) for run in self._in_flight[store_id].runs)
            )
            self._drop(store_id)
        return lost

    def _drop(self, store_id: int) -> None:
        """Nothing is known of the store any more, and nothing waits for it."""
        self._unfence(store_id)
        store = self._in_flight.pop(store_id)
        self._bytes -= store.num_bytes
        if self._revocations is not None:
            # A rank may have given up waiting for the server, which may still be at work.
            self._revocations.end(store.fence_index)

    def forget(self) -> None:
        """Drops tails that wait for the next step."""
        self._tails.clear()
        self._tail_blocks.clear()

    def take_all_back(self) -> tuple[int, ...]:
        """What a step waits for that may give away any block; what was not yet planned is
        dropped."""
        for store_id in self._in_flight:
            self._take_back(store_id)
        self.forget()
        return tuple(sorted(self._in_flight))

    def _fences(self, fresh_blocks: Callable[[], set[int]]) -> tuple[int, ...]:
        if not self._reading and not self._tails:
            return ()
        fresh = fresh_blocks()
        self._tails = [
            (kept, tail)
            for kept, tail in self._tails
            if not any(int(b) in fresh for run in tail for b in run.block_ids)
        ]
        flush = (
            {self._reading[block] for block in fresh if block in self._reading}
            if self._reading
            else set()
        )
        for store_id in flush:
            self._take_back(store_id)
        return tuple(sorted(flush))

    def _take_back(self, store_id: int) -> None:
        if self._revocations is not None:
            self._revocations.revoke(self._in_flight[store_id].fence_index)
        self._unfence(store_id)

    def _unfence(self, store_id: int) -> None:
        for block in self._in_flight[store_id].read:
            if self._reading.get(block) == store_id:
                del self._reading[block]

    def _runs_of(
        self,
        state: RequestState,
        computed_tokens: int,
        block_ids: Callable[[str], tuple[list[int], ...] | None],
        planned: set[int],
        last: bool = False,
    ) -> list[BlockRun]:
        """Full blocks of a request that nobody has stored, as chains of neighbours; moves the
        request's marks on."""
        request = state.request
        known = min(
            computed_tokens, request.num_tokens, self._exactness.exact_tokens(request.request_id)
        )
        decoding = known > request.num_prompt_tokens
        tables = None
        runs: list[BlockRun] = []
        next_tokens = EVERYTHING
        for index, group in enumerate(self._groups):
            hashes = self._finder.hashes(request, index)
            end = min(known // group.block_tokens, len(hashes))
            if group.is_draft and decoding and not last:
                end -= 1
            begin = min(state.stored_blocks[index], len(hashes))
            if end > begin and not group.states_by_handoff:
                if self._over_bound(len(planned) * self._slot_bytes[index]):
                    # Looked at again in the next step, when some stores may have ended.
                    if last:
                        self._stats.add("dropped_blocks", end - begin)
                    return runs
                if tables is None:
                    tables = block_ids(request.request_id)
                    if tables is None:
                        return runs
                ids = np.asarray(tables[group.vllm_group][begin:end], np.int32)
                runs += self._missing(state, index, hashes, begin, ids, planned)
            state.stored_blocks[index] = max(begin, end)
            next_tokens = min(next_tokens, (max(begin, end) + 1) * group.block_tokens)
        # Behind inexact tokens no block is ever stored.
        state.next_store_tokens = (
            next_tokens if known == min(computed_tokens, request.num_tokens) else EVERYTHING
        )
        return runs

    def _missing(
        self,
        state: RequestState,
        index: int,
        hashes: Sequence[bytes],
        begin: int,
        ids: Int32s,
        planned: set[int],
    ) -> list[BlockRun]:
        """What of one group's blocks, from block `begin` on, is to be stored, as chains of
        neighbours; adds them to `planned`.

        A representation is stored with its block, or after it where the server lacks it.
        """
        if not len(ids):
            return []
        end, wanted = begin + len(ids), ids != NULL_BLOCK
        if not self._reach[index].is_everything:
            reachable = self._reachable(state, index, begin, end)
            unreachable = int((wanted & ~reachable).sum())
            if unreachable:
                self._stats.add("unreachable_blocks", unreachable)
            wanted &= reachable
        if self._reading or planned:
            wanted &= np.fromiter(
                (b not in self._reading and b not in planned for b in ids.tolist()),
                np.bool_,
                len(ids),
            )
        lacking = self._represented.lacking(self._session, index, hashes[begin:end])
        along = (
            []
            if lacking is None
            else self._chains(state, index, hashes, begin, ids, wanted & lacking)
        )
        ready = self._session.probe(index, hashes[begin:end])
        if ready is not None:
            wanted &= ~self._finder.hidden.mask(index, hashes[begin:end], ready)
        runs = self._chains(state, index, hashes, begin, ids, wanted) + [
            self._represented.of_run(run) for run in along
        ]
        planned.update(block for run in runs for block in run.block_ids.tolist())
        return runs

    def _chains(
        self,
        state: RequestState,
        index: int,
        hashes: Sequence[bytes],
        begin: int,
        ids: Int32s,
        wanted: BoolMask,
    ) -> list[BlockRun]:
        """The wanted ones of a group's blocks `ids`, the first of which is block `begin`, as chains
        of neighbours."""
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
        stop, tokens = first + len(ids), self._groups[index].block_tokens
        parent = hashes[first - 1] if first else b""
        if not self._session.wants_token_ids:
            return BlockRun(index, list(hashes[first:stop]), ids, parent, first)
        token_ids = state.request.all_token_ids[first * tokens : stop * tokens]
        extra_keys = event_extra_keys(state.request, range(first, stop), tokens)
        return BlockRun(
            index, list(hashes[first:stop]), ids, parent, first, token_ids, extra_keys=extra_keys
        )

    def _reachable(self, state: RequestState, index: int, begin: int, end: int) -> BoolMask:
        ends = prompt_boundaries(
            state.request.num_prompt_tokens,
            self._finder.alignment_tokens,
            bool(self._finder.draft_groups),
        )
        return self._reach[index].mask(begin, end, (*ends, shared_prefix_boundary(state.request)))

    def _handed_over(
        self, state: RequestState, entries: Sequence[tuple[int, int, int]], planned: set[int]
    ) -> list[BlockRun]:
        """States at block boundaries that vLLM names itself (Mamba "align" mode): (group, block,
        boundary in tokens)."""
        runs: list[BlockRun] = []
        for vllm_group, block, boundary in entries:
            index = next((i for i, g in enumerate(self._groups) if g.vllm_group == vllm_group), -1)
            if index < 0 or boundary % self._groups[index].block_tokens:
                continue
            if boundary > self._exactness.exact_tokens(state.request.request_id):
                continue
            place, hashes = (
                boundary // self._groups[index].block_tokens - 1,
                self._finder.hashes(state.request, index),
            )
            if 0 <= place < len(hashes):
                runs += self._missing(
                    state, index, hashes, place, np.array([block], np.int32), planned
                )
        return runs

    def _over_bound(self, more_bytes: int) -> bool:
        return bool(self._in_flight) and self._bytes + more_bytes >= self._max_bytes

    def _job(
        self, runs: Sequence[BlockRun], retention: Retention = NO_RETENTION
    ) -> StoreJob | None:
        """The store of these runs; None where it could not be revoked."""
        fence_index = self._revocations.take() if self._revocations is not None else 0
        if self._revocations is not None and not fence_index:
            self._stats.add("dropped_blocks", sum(len(run.hashes) for run in runs))
            return None
        store_id = self._last_planned = next(_store_ids)
        num_bytes = sum(len(run.hashes) * self._slot_bytes[run.group_index] for run in runs)
        blocks, representations = self._represented.split(runs)
        read = tuple(dict.fromkeys(block for run in runs for block in run.block_ids.tolist()))
        self._in_flight[store_id] = StoreInFlight(
            blocks, read, num_bytes, self._num_ranks, [], fence_index, time.monotonic()
        )
        self._bytes += num_bytes
        self._reading.update(dict.fromkeys(read, store_id))
        self._stats.add("stores")
        return StoreJob(
            store_id, f"{self._prefix}-w{store_id}", blocks, retention, representations, fence_index
        )

    def _settle(self, store: StoreInFlight) -> None:
        """Counts what a store has come to, and offers again what it has stored."""
        num_blocks = sum(len(run.hashes) for run in store.runs)
        answers = np.full((max(1, len(store.results)), num_blocks), BlockResult.ABORTED, np.uint8)
        for row, result in enumerate(store.results):
            answers[row, : min(len(result), num_blocks)] = np.frombuffer(result, np.uint8)[
                :num_blocks
            ]
        whole = (answers <= BlockResult.WRITTEN).all(axis=0) & (answers <= BlockResult.PRESENT).any(
            axis=0
        )
        stored = int((whole & (answers == BlockResult.STORED).any(axis=0)).sum())
        kept = int(whole.sum())
        for name, count in (
            ("stored_blocks", stored),
            ("present_blocks", kept - stored),
            ("refused_blocks", num_blocks - kept),
        ):
            if count:
                self._stats.add(name, count)
        if len(self._finder.hidden):
            hashes = (
                (run.group_index, block_hash) for run in store.runs for block_hash in run.hashes
            )
            for (group, block_hash), good in zip(
                hashes, np.atleast_1d(whole).tolist(), strict=True
            ):
                if good:
                    self._finder.hidden.clear(group, block_hash)


def report_of(result_arrays: Sequence[Any]) -> StoreReport:
    """A rank's report of one store; no arrays for a store that failed as a whole."""
    return StoreReport([b"".join(np.asarray(a, np.uint8).tobytes() for a in result_arrays)])


def nothing_to_write(job: StoreJob) -> StoreReport:
    """The report of a rank that holds a copy of what another rank writes."""
    return report_of(
        [np.full(sum(len(run.hashes) for run in job.runs), BlockResult.WRITTEN, np.uint8)]
    )
