"""Plans which blocks to store after a step, and which stores must end before it writes the blocks
that they read. Never blocks.

- Before a step writes a block that a store reads, the store has ended or is revoked
  (`stores_in_flight.StoreFence`).
- A request's block ids are read from vLLM at each step and never kept.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hotkv_client.session import Session
from hotkv_client.types import BlockRun, BoolMask, Int32s
from hotkv_proto.blocks import MAX_PRIORITY, Retention, StoreOptions
from hotkv_proto.groups import PREFIX_CLOSED, GroupKind, GroupSpec
from hotkv_proto.messages.fields import MAX_IDENTIFIER
from hotkv_vllm.companion import Keeper
from hotkv_vllm.compat import NULL_BLOCK, steps
from hotkv_vllm.compat.kv_groups import CacheGroup
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.identity.exactness import EVERYTHING, Exactness
from hotkv_vllm.metadata import StepReport, StoreJob
from hotkv_vllm.scheduler.groups import Attachments, CachedGroups
from hotkv_vllm.scheduler.hidden_keys import HiddenKeys
from hotkv_vllm.scheduler.request import RequestState, StoreState
from hotkv_vllm.scheduler.store.stores_in_flight import StoreFence, StoresInFlight, settle
from hotkv_vllm.stats import HotKVStats
from hotkv_vllm.tracing.request_traces import RequestTrace

# ----------------------------------------------------------------------- which blocks a hit can use


class StorableBlocks:
    """The blocks of a group that a hit could use; only these are stored.

    A hit needs consecutive blocks up to its end, and its first is never earlier than a shorter
    hit's. So the shortest hit that ends at or after a block decides. The pattern repeats along the
    prompt, but for `state_interval_tokens`, which may have any length.

    state_interval_tokens: recurrent states are stored at multiples of it, rounded up to
        `alignment_tokens`; 0: all.
    is_draft: a hit needs the block after its end too (`hotkv_proto.groups.longest_hit`).
    is_everything: hits could use every block.
    """

    def __init__(
        self,
        spec: GroupSpec,
        alignment_tokens: int,
        state_interval_tokens: int = 0,
        is_draft: bool = False,
    ) -> None:
        self._spec = spec
        self._is_draft = is_draft
        self._alignment = alignment_tokens
        # In multiples of `alignment_tokens`; 0: none.
        self._interval = (
            -(-state_interval_tokens // alignment_tokens) if spec.kind is GroupKind.MAMBA else 0
        )
        period_tokens = math.lcm(
            alignment_tokens,
            spec.window_tokens if spec.kind is GroupKind.CHUNKED_LOCAL else 1,
        )
        self._pattern: BoolMask = np.array(
            [self._at(block) for block in range(period_tokens // spec.block_tokens)], np.bool_
        )
        self.is_everything = self._interval <= 1 and bool(self._pattern.all())

    def __repr__(self) -> str:
        return (
            f"StorableBlocks({self._spec.kind.name}, {int(self._pattern.sum())} of "
            f"{len(self._pattern)} blocks)"
        )

    def _at(self, block: int) -> bool:
        end_tokens = (block + 1) * self._spec.block_tokens
        if self._is_draft and block * self._spec.block_tokens % self._alignment == 0:
            return True
        boundary = -(-end_tokens // self._alignment) * self._alignment
        return self._spec.first_needed_block(boundary) <= block

    def mask(self, first: int, stop: int, kept_boundaries: tuple[int, ...] = ()) -> BoolMask:
        """For the request's blocks `first` to `stop`.

        kept_boundaries: positions in tokens at which a state is stored whatever the interval.
        """
        blocks = np.arange(first, stop)
        mask = np.take(self._pattern, blocks % len(self._pattern))
        if self._interval:
            end_tokens = (blocks + 1) * self._spec.block_tokens
            mask &= end_tokens // self._alignment % self._interval == 0
            for boundary in kept_boundaries:
                block = boundary // self._spec.block_tokens - 1
                if boundary % self._alignment == 0 and first <= block < stop:
                    mask[block - first] = True
        return mask


def prompt_boundaries(
    prompt_tokens: int, alignment_tokens: int, drops_last_block: bool
) -> tuple[int, ...]:
    """Positions in tokens at which the hit of a request that repeats or extends the prompt ends.

    drops_last_block: a drafter recomputes a hit's last block, so an alignment earlier counts
        too.
    """
    ends = {(prompt_tokens - 1) // alignment_tokens, prompt_tokens // alignment_tokens}
    if drops_last_block:
        ends |= {end - 1 for end in ends}
    return tuple(sorted(end * alignment_tokens for end in ends if end > 0))


# -------------------------------------------------------------------- which blocks the server lacks

STORE_BLOCKS = 1 << 13
"""The server takes 2^16 in a call, but a shorter store is visible sooner."""
STORE_RUNS = 256
"""The server refuses more than 1024, and reserves slots for all runs before it serves another
call."""
Handoff = tuple[int, int, int]
"""A recurrent state that vLLM offers in this step (Mamba "align" mode): its vLLM group, block
id, and the tokens that it covers."""
Tables = Callable[[str], "tuple[Sequence[int], ...] | None"]
"""A request's block ids per vLLM group, as of this step; None if vLLM does not know it."""
Handoffs = Mapping[str, Sequence[Handoff]]


class MissingBlocks:
    """Which of a request's full blocks and their attachments the server lacks, as runs: only those
    that a hit can use and that no store in flight reads."""

    def __init__(
        self,
        session: Session,
        groups: CachedGroups,
        attachments: Attachments,
        hidden: HiddenKeys,
        cache_groups: tuple[CacheGroup, ...],
        state_interval_tokens: int,
        stats: HotKVStats,
        in_flight: StoresInFlight,
    ) -> None:
        self._in_flight = in_flight
        self._session = session
        self._groups = groups
        self._cache_groups = cache_groups
        self._attachments = attachments
        self._hidden = hidden
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
        """Runs of blocks and of attachments to store; the server may have one without the other.

        hashes: of all the request's blocks in the group.
        begin: index of the first of `ids` among the request's blocks.
        ids: consecutive device blocks, int32.
        planned: device blocks that this step already stores; those of the result are added.
        """
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
        lacking = self._attachments.lacking(self._session, index, names)
        along = (
            []
            if lacking is None
            else self._chains(state, index, hashes, begin, ids, wanted & lacking)
        )
        ready = self._session.probe(index, names)
        if ready is not None:
            wanted &= ~self._hidden.mask(index, names, ready)
        runs = self._chains(state, index, hashes, begin, ids, wanted) + [
            self._attachments.of_run(run) for run in along
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
        """Each state to store as a run of one block.

        exact_tokens: leading tokens whose KV is exact; a state that covers more is skipped.
        """
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
        """The wanted blocks, as runs of at most STORE_BLOCKS; the rest as for `runs`."""
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
        """With what events need (tokens, adapter, extra keys) if the server publishes them. Not
        for a block with a private name or an adapter's name that is too long: routers would
        expect hits that can't be."""
        request, stop = state.request, first + len(ids)
        tokens = self._groups.specs[index].block_tokens
        parent = hashes[first - 1] if first else b""
        run = BlockRun(index, list(hashes[first:stop]), ids, parent, first)
        adapter = request.lora_request.lora_name if request.lora_request is not None else ""
        if not self._session.wants_token_ids or len(adapter) > MAX_IDENTIFIER:
            return run
        if run.hashes != list(self._groups.hashes(request, index)[first:stop]):
            return run
        token_ids = request.all_token_ids[first * tokens : stop * tokens]
        extra_keys = steps.event_extra_keys(request, range(first, stop), tokens)
        return replace(run, token_ids=token_ids, lora_name=adapter, extra_keys=extra_keys)


def portions(runs: Sequence[BlockRun]) -> list[list[BlockRun]]:
    """Stores of at most STORE_BLOCKS blocks and STORE_RUNS runs each, in order."""
    stores: list[list[BlockRun]] = []
    room = 0
    for run in runs:
        if not stores or len(run.hashes) > room or len(stores[-1]) == STORE_RUNS:
            stores.append([])
            room = STORE_BLOCKS
        stores[-1].append(run)
        room -= len(run.hashes)
    return stores


# -------------------------------------------------------------------------- tails of ended requests

Tail = tuple[Retention, RequestTrace | None, tuple[BlockRun, ...]]


class Tails:
    """Last blocks of ended requests, whose hashes became known only after the last step. The
    next step stores them, up to the first that it writes, because no hit reaches beyond a
    missing block; a tail of several runs is dropped whole."""

    def __init__(self) -> None:
        self.waiting: list[Tail] = []
        self.blocks: set[int] = set()

    def __repr__(self) -> str:
        return f"Tails({len(self.waiting)})"

    def add(
        self, retention: Retention, runs: Sequence[BlockRun], trace: RequestTrace | None = None
    ) -> None:
        if runs:
            self.waiting.append((retention, trace, tuple(runs)))

    def cut_before(self, written: Collection[int]) -> None:
        cut = ((by, trace, _before(tail, written)) for by, trace, tail in self.waiting)
        self.waiting = [one for one in cut if one[2]]

    def take(self) -> list[Tail]:
        taken, self.waiting, self.blocks = self.waiting, [], set()
        return taken

    def forget(self) -> None:
        self.waiting = []
        self.blocks = set()


def _before(tail: tuple[BlockRun, ...], written: Collection[int]) -> tuple[BlockRun, ...]:
    """The tail before its first written block; empty if that cuts a tail of several runs."""
    kept = [
        next((n for n, block in enumerate(run.block_ids.tolist()) if block in written), None)
        for run in tail
    ]
    if all(length is None for length in kept):
        return tail
    (run, length), *others = zip(tail, kept, strict=True)
    if others or not length:
        return ()
    tokens = len(run.token_ids) // len(run.hashes)
    return (
        replace(
            run,
            hashes=run.hashes[:length],
            block_ids=run.block_ids[:length],
            token_ids=run.token_ids[: length * tokens],
            extra_keys=run.extra_keys[:length],
        ),
    )


# ----------------------------------------------------------------------------- the stores of a step

ANSWER_BLOCKS = 8
"""Blocks of an answer are stored so many at a time: few long stores cost the server less. With
sliding windows or recurrent states they are stored at once, like a prompt's."""

UNSHARED = Retention(priority=-MAX_PRIORITY)
"""For blocks with private names, by which no other request finds them: evicted first, and copied
to no tier, because they are useless after their request."""
StoreTraits = tuple[Retention, bool, str, RequestTrace | None]
"""What all blocks of a store share: retention, whether names are private, id of a
request with a `Keeper` or empty, trace."""


class StorePlanner:
    """Plans each step's stores.

    fence: None: only workers revoke stores.
    exactness: None: all tokens count as exact.
    keeper: stores inexact blocks of its requests too; None without one.
    unfinished_tokens: last computed tokens whose KV the next step may change.
    """

    def __init__(
        self,
        session: Session,
        groups: CachedGroups,
        attachments: Attachments,
        hidden: HiddenKeys,
        cache_groups: Sequence[CacheGroup],
        num_ranks: int,
        config: ConnectorConfig,
        stats: HotKVStats,
        id_prefix: str,
        fence: StoreFence | None = None,
        exactness: Exactness | None = None,
        keeper: Keeper | None = None,
        unfinished_tokens: int = 0,
    ) -> None:
        self._session = session
        self._hidden = hidden
        self._unfinished_tokens = unfinished_tokens
        self._groups = groups
        self._cache_groups = tuple(cache_groups)
        self._attachments = attachments
        self._keeper = keeper
        self._exactness = exactness or Exactness((), 1)
        # With sliding windows or recurrent states blocks can't wait: vLLM frees them while the
        # request decodes.
        keeps_blocks = all(spec.kind in PREFIX_CLOSED for spec in self._groups.specs)
        block_tokens = min(group.block_tokens for group in self._cache_groups)
        self._answer_wait_tokens = (ANSWER_BLOCKS - 1) * block_tokens if keeps_blocks else 0
        self._slot_bytes = (
            *(spec.slot_bytes for spec in self._groups.specs),
            *self._attachments.slot_bytes,
        )
        self._stats = stats
        max_bytes = config.max_inflight_store_mib << 20
        on_end = (lambda store: None) if keeper is None else keeper.stored
        self.in_flight = StoresInFlight(
            num_ranks, max_bytes, fence or StoreFence(), id_prefix, on_end
        )
        interval = config.state_interval_tokens
        self._missing = MissingBlocks(
            session,
            groups,
            attachments,
            hidden,
            self._cache_groups,
            interval,
            stats,
            self.in_flight,
        )
        self.tails = Tails()
        self.is_held = False
        """During a reset: each step revokes the stores in flight and plans none."""
        self.is_rekeying = False
        """As `is_held`, while the weights' key space is unknown."""

    def __repr__(self) -> str:
        return f"StorePlanner({self.in_flight}, {self.tails})"

    # ------------------------------------------------------------------------------------- requests

    def new_state(self) -> StoreState:
        block_tokens = min(group.block_tokens for group in self._cache_groups)
        return StoreState([0] * len(self._cache_groups), block_tokens)

    def comes(self, state: RequestState) -> None:
        """All blocks must be considered again: the request holds none on the device, as it is
        new, was preempted (stores may have been revoked), or its load has failed."""
        if not self._has_kept(state):
            state.store = replace(self.new_state(), may_store=state.store.may_store)

    def loaded(self, state: RequestState, stored_blocks: Sequence[int]) -> None:
        """stored_blocks: leading ones per group that the server has."""
        for index, num_blocks in enumerate(stored_blocks):
            mine = state.store.stored_blocks
            mine[index] = max(mine[index], num_blocks)

    def reset(self, state: RequestState) -> None:
        """A request with computed tokens, which depends on KV from before the reset, is no
        longer stored; others are stored in full. A cancelled load does not count; if it
        succeeds, `Exactness` excludes its KV. A kept request on the device goes on under
        private names."""
        if self._keeper is not None and self._has_kept(state):
            self._keeper.reset(state.request.request_id)
        elif state.request.num_computed_tokens and not state.is_loading:
            state.store.may_store = False
        else:
            self.comes(state)

    def finish(
        self, state: RequestState, block_ids: Sequence[Sequence[int]], known_tokens: int
    ) -> None:
        """Queues the last blocks of an ended request for the next step.

        known_tokens: leading tokens whose KV may be stored.
        """
        if self._is_closed or not self._session.connected:
            return

        def tables(_: str) -> tuple[Sequence[int], ...]:
            return tuple(list(ids) for ids in block_ids)

        runs = self._runs_of(state, known_tokens, tables, self.tails.blocks, last=True)
        self.tails.add(state.retention, runs, state.trace)

    def due(
        self,
        requests: Mapping[str, RequestState],
        num_scheduled_tokens: Mapping[str, int],
        held: Collection[str],
        handoffs: Handoffs,
    ) -> list[tuple[RequestState, int]]:
        """Requests with blocks to store after this step, and their computed tokens after it."""
        found = []
        for request_id, num_tokens in num_scheduled_tokens.items():
            state = requests.get(request_id)
            if state is None or not state.store.may_store or request_id in held:
                continue
            computed = state.request.num_computed_tokens + num_tokens
            if computed >= state.store.due_tokens or request_id in handoffs:
                found.append((state, computed))
        return found

    def plan(
        self,
        scheduled: Sequence[tuple[RequestState, int]],
        tables: Tables,
        handoffs: Handoffs,
        written_blocks: Callable[[], Collection[int]],
    ) -> tuple[tuple[StoreJob, ...], tuple[int, ...]]:
        """This step's stores, and the ids of stores that must end before it writes blocks.

        written_blocks: called only if needed, because it costs time.
        """
        lost = self.in_flight.step()
        if lost:
            self._stats.add("dropped_blocks", sum(store.num_blocks for store in lost.values()))
        flush = tuple(sorted({*lost, *self._fences(written_blocks)}))
        if self._is_closed:
            return (), tuple(sorted({*flush, *self.take_all_back()}))
        batches: dict[StoreTraits, list[BlockRun]] = {}
        for retention, trace, tail in self.tails.take():
            batches.setdefault((retention, False, "", trace), []).extend(tail)
        planned = {int(b) for runs in batches.values() for run in runs for b in run.block_ids}
        for state, computed in scheduled if self._session.connected else ():
            runs: list[BlockRun] = []
            if computed >= state.store.due_tokens:
                runs += self._runs_of(state, computed, tables, planned)
            request_id = state.request.request_id
            if entries := handoffs.get(request_id):
                exact_tokens = self._exactness.exact_tokens(request_id)
                runs += self._missing.handed_over(state, entries, exact_tokens, planned)
            for run in runs:
                is_kept = self._is_kept(state, self._attachments.group_of(run.group_index))
                is_private = is_kept and run.depth >= self._private_from(state)
                retention = UNSHARED if is_private else state.retention
                traits = retention, is_private, request_id if is_kept else "", state.trace
                batches.setdefault(traits, []).append(run)
        jobs = [self._job(part, by) for by, runs in batches.items() for part in portions(runs)]
        return tuple(job for job in jobs if job is not None), flush

    def reported(self, report: StepReport) -> None:
        for store in self.in_flight.account(report):
            settle(store, self._stats, self._hidden)

    def plan_broke(self) -> None:
        self.tails.forget()
        self.in_flight.plan_broke()

    def take_all_back(self) -> tuple[int, ...]:
        """Revokes all stores and drops the tails. The ids, which the step's message must list."""
        taken_back = self.in_flight.take_all_back()
        self.tails.forget()
        return taken_back

    @property
    def _is_closed(self) -> bool:
        return self.is_held or self.is_rekeying

    def _fences(self, written_blocks: Callable[[], Collection[int]]) -> set[int]:
        """Revokes the stores of blocks about to be written, and cuts the tails."""
        if not self.in_flight.reading and not self.tails.waiting:
            return set()
        written = written_blocks()
        self.tails.cut_before(written)
        return self.in_flight.take_back_readers(written)

    def _runs_of(
        self,
        state: RequestState,
        computed_tokens: int,
        tables_of: Tables,
        planned: set[int],
        last: bool = False,
    ) -> list[BlockRun]:
        """`state.store` then says when to consider the next blocks.

        computed_tokens: after this step.
        last: the request has ended; blocks left out now are never stored.
        """
        request, store = state.request, state.store
        exact = self._exactness.exact_tokens(request.request_id)
        finished = min(computed_tokens, request.num_tokens) - self._unfinished_tokens
        tables = None
        runs: list[BlockRun] = []
        next_tokens = EVERYTHING
        for index, group in enumerate(self._cache_groups):
            is_kept = self._is_kept(state, index)
            known = finished if is_kept else min(finished, exact)
            if is_kept and self._keeper is not None:
                hashes = self._keeper.names(state, known // group.block_tokens)
            else:
                hashes = self._groups.hashes(request, index)
            end = min(known // group.block_tokens, len(hashes))
            if group.is_draft and known > request.num_prompt_tokens and not last:
                end -= 1
            begin = min(store.stored_blocks[index], len(hashes))
            if end > begin and not group.states_by_handoff:
                if self.in_flight.is_full(len(planned) * self._slot_bytes[index]):
                    # Considered again in the next step, when some stores may have ended.
                    if last:
                        self._stats.add("dropped_blocks", end - begin)
                    return runs
                tables = tables_of(request.request_id) if tables is None else tables
                if tables is None:
                    return runs
                table = tables[group.vllm_group]
                private_from = self._private_from(state) if is_kept else EVERYTHING
                cut = max(begin, min(private_from, end))
                for part in (range(begin, cut), range(cut, end)):
                    if part:
                        ids = np.asarray(table[part.start : part.stop], np.int32)
                        runs += self._missing.runs(state, index, hashes, part.start, ids, planned)
            store.stored_blocks[index] = max(begin, end)
            # After an inexact token no later block is ever stored.
            if known == finished:
                next_tokens = min(next_tokens, (max(begin, end) + 1) * group.block_tokens)
        # A kept request needs each full block in the server at once.
        if next_tokens > request.num_prompt_tokens and not self._has_kept(state):
            next_tokens += self._answer_wait_tokens
        store.due_tokens = min(next_tokens + self._unfinished_tokens, EVERYTHING)
        return runs

    def _has_kept(self, state: RequestState) -> bool:
        return self._keeper is not None and self._keeper.keeps(state.request.request_id)

    def _is_kept(self, state: RequestState, index: int) -> bool:
        """The server keeps the request's blocks of a group for it alone."""
        return self._keeper is not None and index == self._keeper.group and self._has_kept(state)

    def _private_from(self, state: RequestState) -> int:
        """Index of the first block with a private name; EVERYTHING if none has one."""
        if self._keeper is None:
            return EVERYTHING
        return self._keeper.private_from(state.request.request_id)

    def _job(self, runs: Sequence[BlockRun], whose: StoreTraits) -> StoreJob | None:
        """None, and the blocks count as dropped, if no word of the fence is free to revoke the
        store."""
        (retention, is_private, request_id, trace), keeper = whose, self._keeper
        kept_as = "" if keeper is None else keeper.kept_as(request_id)
        num_bytes = sum(len(run.hashes) * self._slot_bytes[run.group_index] for run in runs)
        blocks, attached = self._attachments.split(runs)
        options = StoreOptions(retention, kept_as, is_private=is_private)
        job = self.in_flight.begin(blocks, attached, num_bytes, options, request_id, trace)
        if job is None:
            self._stats.add("dropped_blocks", sum(len(run.hashes) for run in runs))
        else:
            self._stats.add("stores")
            if keeper is not None and request_id:
                keeper.storing(request_id, job)
        return job
