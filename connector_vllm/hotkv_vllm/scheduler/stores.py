"""Which blocks to store after a step, and which stores a step has to wait for. Scheduler thread
only; never blocks.

What is always true: a block being stored is not written before its store has ended or is revoked
(`fence`), because every step that may write blocks for the first time lists the stores that read
any of them, whoever writes them. Block tables are read from vLLM at each step and never kept. A
block has at most one store in flight (`stores_in_flight`). Which of a request's blocks are worth
storing is `missing_blocks`'.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hotkv_client.types import BlockRun
from hotkv_proto.retention import Retention
from hotkv_proto.store_options import StoreOptions
from hotkv_vllm.compat.kv_groups import CacheGroup
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.identity.exactness import EVERYTHING, Exactness
from hotkv_vllm.link import CacheSession
from hotkv_vllm.metadata import HotKVWorkerMetadata, StoreJob
from hotkv_vllm.residency.resident_requests import ResidentRequests
from hotkv_vllm.scheduler.fence import Fence
from hotkv_vllm.scheduler.hits import HitFinder
from hotkv_vllm.scheduler.missing_blocks import Handoffs, MissingBlocks, Tables, portions
from hotkv_vllm.scheduler.request import RequestState, StoreState
from hotkv_vllm.scheduler.store_results import settle
from hotkv_vllm.scheduler.stores_in_flight import StoresInFlight
from hotkv_vllm.scheduler.tails import Tails
from hotkv_vllm.stats import HotKVStats
from hotkv_vllm.tracing.requests import RequestTrace

Whose = tuple[Retention, str, RequestTrace | None]
"""What blocks of one store share: retention, the resident request (or none), the traced one."""


class StorePlanner:
    """Plans stores and fences. Owns the `StoreState` of requests."""

    def __init__(
        self,
        session: CacheSession,
        finder: HitFinder,
        cache_groups: Sequence[CacheGroup],
        num_ranks: int,
        config: ConnectorConfig,
        stats: HotKVStats,
        id_prefix: str,
        fence: Fence | None = None,
        exactness: Exactness | None = None,
        residencies: ResidentRequests | None = None,
    ) -> None:
        self._session = session
        self._finder, self._groups = finder, finder.groups
        self._cache_groups = tuple(cache_groups)
        self._representations = finder.representations
        self._residencies = residencies
        self._exactness = exactness or Exactness((), 1)
        self._slot_bytes = (
            *(spec.slot_bytes for spec in self._groups.specs),
            *self._representations.slot_bytes,
        )
        self._stats = stats
        max_bytes = config.max_inflight_store_mib << 20
        on_end = (lambda store: None) if residencies is None else residencies.stored
        self.in_flight = StoresInFlight(num_ranks, max_bytes, fence or Fence(), id_prefix, on_end)
        interval = config.state_interval_tokens
        self._missing = MissingBlocks(
            session, finder, self._cache_groups, interval, stats, self.in_flight
        )
        self.tails = Tails()
        self.is_held = False
        """Nothing new is stored, and every step waits for what is in flight."""
        self.is_rekeying = False
        """The same, while it is not known which key space stands for the engine's weights."""

    def __repr__(self) -> str:
        return f"StorePlanner({self.in_flight}, {self.tails})"

    # ------------------------------------------------------------------------------------- requests

    def new_state(self) -> StoreState:
        """The state of a request of which nothing is stored yet."""
        first_check = min(group.block_tokens for group in self._cache_groups)
        return StoreState([0] * len(self._cache_groups), first_check)

    def loaded(self, state: RequestState, stored_blocks: Sequence[int]) -> None:
        """A load has ended well: per group, the server has this many leading blocks."""
        for index, num_blocks in enumerate(stored_blocks):
            mine = state.store.stored_blocks
            mine[index] = max(mine[index], num_blocks)

    def reset(self, state: RequestState) -> None:
        """What was stored of the request is void. It stores anew, unless it holds blocks from
        before; those of a resident request nobody else finds."""
        if self._residencies is not None and self._is_resident(state):
            self._residencies.reset(state.request.request_id)
        elif state.request.num_computed_tokens:
            state.store.may_store = False
        else:
            state.store = replace(self.new_state(), may_store=state.store.may_store)

    def finish(
        self, state: RequestState, block_ids: Sequence[Sequence[int]], known_tokens: int
    ) -> None:
        """A request ends: blocks whose hash became known after their last step are stored with the
        next one, if still unwritten then."""
        if (
            self._is_closed
            or not self._session.connected
            or known_tokens < state.store.next_check_tokens
        ):
            return
        tables = tuple(list(ids) for ids in block_ids)
        runs = self._runs_of(state, known_tokens, lambda _: tables, self.tails.blocks, last=True)
        self.tails.add(state.retention, runs, state.trace)

    def due(
        self,
        requests: Mapping[str, RequestState],
        num_scheduled_tokens: Mapping[str, int],
        held: Collection[str],
        handoffs: Handoffs,
    ) -> list[tuple[RequestState, int]]:
        """The requests that fill a block in this step, each with how many of its tokens are then
        computed. `held`: requests of which nothing may be stored now."""
        found = []
        for request_id, num_tokens in num_scheduled_tokens.items():
            state = requests.get(request_id)
            if state is None or not state.store.may_store or request_id in held:
                continue
            computed = state.request.num_computed_tokens + num_tokens
            if computed >= state.store.next_check_tokens or request_id in handoffs:
                found.append((state, computed))
        return found

    def plan(
        self,
        scheduled: Sequence[tuple[RequestState, int]],
        tables: Tables,
        handoffs: Handoffs,
        written_blocks: Callable[[], Collection[int]],
    ) -> tuple[tuple[StoreJob, ...], tuple[int, ...]]:
        """This step's stores, and the stores in flight that it has to wait for.

        `scheduled`: as `due` returns them. `written_blocks`: blocks that somebody is about to write
        for the first time; asked only if something reads blocks.
        """
        lost = self.in_flight.step()
        if lost:
            self._stats.add("dropped_blocks", sum(store.num_blocks for store in lost.values()))
        flush = tuple(sorted({*lost, *self._fences(written_blocks)}))
        if self._is_closed:
            return (), self.take_all_back()
        batches: dict[Whose, list[BlockRun]] = {}
        for retention, trace, tail in self.tails.take():
            batches.setdefault((retention, "", trace), []).extend(tail)
        planned = {int(b) for runs in batches.values() for run in runs for b in run.block_ids}
        for state, computed in scheduled if self._session.connected else ():
            runs: list[BlockRun] = []
            if computed >= state.store.next_check_tokens:
                runs += self._runs_of(state, computed, tables, planned)
            request_id = state.request.request_id
            if entries := handoffs.get(request_id):
                exact_tokens = self._exactness.exact_tokens(request_id)
                runs += self._missing.handed_over(state, entries, exact_tokens, planned)
            if runs:
                owner = request_id if self._is_resident(state) else ""
                batches.setdefault((state.retention, owner, state.trace), []).extend(runs)
        jobs = [self._job(part, by) for by, runs in batches.items() for part in portions(runs)]
        return tuple(job for job in jobs if job is not None), flush

    def reported(self, report: HotKVWorkerMetadata) -> None:
        """Takes in which stores have ended, as ranks report them."""
        for store in self.in_flight.account(report):
            settle(store, self._stats, self._finder.hidden)

    def plan_broke(self) -> None:
        """The step's plan is lost, and with it what waited for the step."""
        self.tails.forget()
        self.in_flight.plan_broke()

    def take_all_back(self) -> tuple[int, ...]:
        """What a step waits for that may give away any block; what was not yet planned is
        dropped."""
        taken_back = self.in_flight.take_all_back()
        self.tails.forget()
        return taken_back

    @property
    def _is_closed(self) -> bool:
        return self.is_held or self.is_rekeying

    def _fences(self, written_blocks: Callable[[], Collection[int]]) -> set[int]:
        """Takes back stores that read blocks which are about to be written, and drops such
        tails."""
        if not self.in_flight.reading and not self.tails.waiting:
            return set()
        written = written_blocks()
        self.tails.drop_written(written)
        return self.in_flight.take_back_readers(written)

    def _runs_of(
        self,
        state: RequestState,
        computed_tokens: int,
        tables_of: Tables,
        planned: set[int],
        last: bool = False,
    ) -> list[BlockRun]:
        """Full blocks of a request that nobody has stored, as chains of neighbours; adds them to
        `planned` and moves the request's marks on."""
        request, store = state.request, state.store
        is_resident = self._is_resident(state)
        exact = EVERYTHING if is_resident else self._exactness.exact_tokens(request.request_id)
        known = min(computed_tokens, request.num_tokens, exact)
        decoding = known > request.num_prompt_tokens
        tables = None
        runs: list[BlockRun] = []
        next_tokens = EVERYTHING
        for index, group in enumerate(self._cache_groups):
            if is_resident and self._residencies is not None:
                hashes = self._residencies.names(state, known // group.block_tokens)
            else:
                hashes = self._groups.hashes(request, index)
            end = min(known // group.block_tokens, len(hashes))
            if group.is_draft and decoding and not last:
                end -= 1
            begin = min(store.stored_blocks[index], len(hashes))
            if end > begin and not group.states_by_handoff:
                if self.in_flight.is_full(len(planned) * self._slot_bytes[index]):
                    # Looked at again in the next step, when some stores may have ended.
                    if last:
                        self._stats.add("dropped_blocks", end - begin)
                    return runs
                tables = tables_of(request.request_id) if tables is None else tables
                if tables is None:
                    return runs
                ids = np.asarray(tables[group.vllm_group][begin:end], np.int32)
                runs += self._missing.runs(state, index, hashes, begin, ids, planned)
            store.stored_blocks[index] = max(begin, end)
            next_tokens = min(next_tokens, (max(begin, end) + 1) * group.block_tokens)
        # Behind inexact tokens no block is ever stored.
        is_exact = known == min(computed_tokens, request.num_tokens)
        store.next_check_tokens = next_tokens if is_exact else EVERYTHING
        return runs

    def _is_resident(self, state: RequestState) -> bool:
        """Whether the server is to keep all of the request's blocks, exact or not."""
        residencies = self._residencies
        return residencies is not None and residencies.is_resident(state.request.request_id)

    def _job(self, runs: Sequence[BlockRun], whose: Whose) -> StoreJob | None:
        """The store of these runs; None if it could not be revoked."""
        (retention, request_id, trace), residencies = whose, self._residencies
        residency_id = residencies.residency_of(request_id) if residencies else ""
        num_bytes = sum(len(run.hashes) * self._slot_bytes[run.group_index] for run in runs)
        blocks, representations = self._representations.split(runs)
        options = StoreOptions(retention, residency_id)
        job = self.in_flight.begin(blocks, representations, num_bytes, options, request_id, trace)
        if job is None:
            self._stats.add("dropped_blocks", sum(len(run.hashes) for run in runs))
        else:
            self._stats.add("stores")
            if residencies is not None and request_id:
                residencies.stores(request_id, job)
        return job
