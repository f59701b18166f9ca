"""Plans which blocks to store after a step, and which stores must end before the step writes
the blocks that they read. Scheduler thread only; never blocks.

Always true:
- Before a step writes a block that a store reads, the store has ended or is revoked
  (`stores_in_flight.StoreFence`). For this, the message of each step lists the stores whose blocks
  the step is about to write.
- A request's block table (its block ids in vLLM) is read from vLLM at each step and never retained.
- A block has at most one store in flight (`stores_in_flight`).

`StorePlanner` plans the stores of a step. It uses the other classes of this module:
`StorableBlocks` (which blocks a hit can use), `MissingBlocks` (which of a request's blocks the
server lacks) and `Tails` (last blocks of ended requests).
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
from hotkv_vllm.compat import NULL_BLOCK, steps
from hotkv_vllm.compat.kv_groups import CacheGroup
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.identity.exactness import EVERYTHING, Exactness
from hotkv_vllm.metadata import StepReport, StoreJob
from hotkv_vllm.residency.resident_requests import ResidentRequests
from hotkv_vllm.scheduler.hits import HitFinder
from hotkv_vllm.scheduler.request import RequestState, StoreState
from hotkv_vllm.scheduler.stores_in_flight import StoreFence, StoresInFlight, settle
from hotkv_vllm.stats import HotKVStats
from hotkv_vllm.tracing.request_traces import RequestTrace

# ----------------------------------------------------------------------- which blocks a hit can use


class StorableBlocks:
    """Determines the blocks of a group that a hit could ever use. Only these blocks are stored.

    A hit ends at a multiple of `alignment_tokens`. It needs consecutive blocks of the group up to
    its end: with full attention all blocks, with a sliding window only the last blocks. The first
    block that a hit needs is never earlier than the first block that a shorter hit needs. So to
    find out whether any hit needs a block, it is enough to examine the shortest hit that ends at or
    after the block. The pattern of needed blocks repeats along the prompt, so it is computed for
    one period only. The interval of stored recurrent states (`state_interval_tokens`) is not a part
    of this pattern, because it may have any length.

    alignment_tokens: every hit ends at a multiple of this, which is a multiple of the group's block
        size.
    state_interval_tokens: for groups of recurrent states only. This number is rounded up to a
        multiple of `alignment_tokens`, and the states at multiples of the result are stored. 0: all
        states are stored.
    is_draft: True for a group of a drafter (model that proposes tokens), in which a hit also needs
        the block after its end (`hotkv_proto.groups.longest_hit`).
    is_everything: True if hits could use every block of the group.
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
        # The interval of stored states, in multiples of `alignment_tokens`; 0: no interval.
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
            f"Reach({self._spec.kind.name}, {int(self._pattern.sum())} of "
            f"{len(self._pattern)} blocks)"
        )

    def _at(self, block: int) -> bool:
        end_tokens = (block + 1) * self._spec.block_tokens
        if self._is_draft and block * self._spec.block_tokens % self._alignment == 0:
            return True
        boundary = -(-end_tokens // self._alignment) * self._alignment
        return self._spec.first_needed_block(boundary) <= block

    def mask(self, first: int, stop: int, kept_boundaries: tuple[int, ...] = ()) -> BoolMask:
        """Returns a mask of the request's blocks `first` to `stop` (exclusive, counted from its
        beginning): True if a hit could use the block.

        kept_boundaries: positions, in tokens, at which a recurrent state is stored even if the
            position is not a multiple of the interval of stored states (`state_interval_tokens`).
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
    """Returns the positions, in tokens, at which the hit of a later request ends, if the later
    request repeats or extends a prompt of `prompt_tokens`.

    alignment_tokens: hits end at multiples of this.
    drops_last_block: True if a drafter recomputes the last block of a hit. Then the result also
        includes each position minus `alignment_tokens`.
    """
    ends = {(prompt_tokens - 1) // alignment_tokens, prompt_tokens // alignment_tokens}
    if drops_last_block:
        ends |= {end - 1 for end in ends}
    return tuple(sorted(end * alignment_tokens for end in ends if end > 0))


# -------------------------------------------------------------------- which blocks the server lacks

STORE_BLOCKS = 1 << 13
"""Most blocks of one store. The server accepts up to 2^16 blocks in a call, but the blocks of a
shorter store become visible to other engines sooner."""
STORE_RUNS = 256
"""Most runs (consecutive blocks of a group) of one store. The server refuses more than 1024 runs in
a call, and reserves slots for all runs of a call before it serves another call."""
Handoff = tuple[int, int, int]
"""A recurrent state that vLLM offers for storing in this step (Mamba "align" mode): number of its
vLLM group, id of its block, and the number of tokens that the state covers."""
Tables = Callable[[str], "tuple[Sequence[int], ...] | None"]
"""A function that returns the block ids of a request (given by its id) per vLLM group, as of this
step; None if vLLM does not know the request."""
Handoffs = Mapping[str, Sequence[Handoff]]
"""By request id: the recurrent states that vLLM offers for storing in this step."""


class MissingBlocks:
    """Finds which of a request's full blocks the server lacks, as runs (consecutive blocks of a
    group). Also finds the blocks whose sketch (a compact form of the keys, for sparse
    attention) the server lacks.

    state_interval_tokens: the setting `hotkv.state_interval_tokens` (`StorableBlocks`).
    in_flight: the stores on which ranks are working.

    Always true: a hit can use each block in the result (`StorableBlocks`), and no store in flight
    reads the block. The same is true if only the block's sketch is to be stored.
    """

    def __init__(
        self,
        session: Session,
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
        self._sketches = finder.sketches
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
        """Returns the blocks among `ids` that are to be stored, as runs (consecutive blocks). Also
        returns runs of the sketches (compact forms of keys) that the server lacks, for those
        blocks that a hit could use. The server may lack the sketch of a block although it
        has the block.

        state: the request that holds the blocks.
        index: index of the group.
        hashes: the hashes of all the request's blocks in the group.
        begin: index, among the request's blocks, of the first block of `ids`.
        ids: ids of consecutive device blocks of the request, int32.
        planned: ids of blocks that this step already stores; the method adds the blocks of the
            returned runs.
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
        lacking = self._sketches.lacking(self._session, index, names)
        along = (
            []
            if lacking is None
            else self._chains(state, index, hashes, begin, ids, wanted & lacking)
        )
        ready = self._session.probe(index, names)
        if ready is not None:
            wanted &= ~self._finder.hidden.mask(index, names, ready)
        runs = self._chains(state, index, hashes, begin, ids, wanted) + [
            self._sketches.of_run(run) for run in along
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
        """Returns the recurrent states among `entries` to store, each as a run of one block.

        entries: the request's recurrent states that vLLM offers for storing in this step.
        exact_tokens: number of the request's leading tokens whose KV is exact. A state that covers
            more tokens is skipped.
        planned: ids of blocks that this step already stores; the method adds the blocks of the
            returned runs.
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
        """Returns a mask of the blocks in the group `index` at positions `begin` to `end`
        (exclusive): True if a hit could use the block."""
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
        """Returns the blocks in `ids` for which the mask `wanted` is True, as runs of consecutive
        blocks. A run has at most STORE_BLOCKS blocks.

        index: index of the group.
        hashes: the hashes of all the request's blocks in the group.
        begin: index, among the request's blocks, of the first block of `ids`.
        ids: ids of consecutive device blocks of the request, int32.
        """
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
        """Returns the run (consecutive blocks, to be stored together) for the blocks `ids`, with
        the hash of the block before them. If the server publishes events, the run also has the
        blocks' tokens, the name of the request's adapter and further inputs of the hashes. All of
        these are left out in two cases: a block has a private name, by which no other request finds
        it; or the adapter's name is too long for the server. Otherwise routers would expect a
        prompt to hit blocks that it can't hit.

        index: index of the group.
        hashes: the hashes of all the request's blocks in the group.
        first: index, among the request's blocks, of the first block of `ids`.
        ids: ids of consecutive device blocks of the request, int32.
        """
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
    """Distributes runs (consecutive blocks of a group), in their order, over stores. Each store
    gets at most STORE_BLOCKS blocks and STORE_RUNS runs. A run must not have more than STORE_BLOCKS
    blocks."""
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
    """Holds the tails of ended requests until the next step stores them. A tail is the last blocks
    of a request: their hashes became known only after the request's last step.

    Always true: the step that is being planned writes no block of a tail. If it would write such a
    block, `cut_before` removes the block and all later blocks from the tail, because no hit reaches
    beyond a missing block. If the tail has several runs, `cut_before` drops the whole tail.
    Scheduler thread only.

    waiting: the tails that wait to be stored.
    blocks: ids of the blocks that were added to `waiting`.
    """

    def __init__(self) -> None:
        self.waiting: list[Tail] = []
        self.blocks: set[int] = set()

    def __repr__(self) -> str:
        return f"Tails({len(self.waiting)})"

    def add(
        self, retention: Retention, runs: Sequence[BlockRun], trace: RequestTrace | None = None
    ) -> None:
        """Adds the last blocks (tail) of an ended request, to be stored with the next step.

        retention: how the server should retain these blocks.
        trace: the trace of the request; None if the request is not traced.
        """
        if runs:
            self.waiting.append((retention, trace, tuple(runs)))

    def cut_before(self, written: Collection[int]) -> None:
        """Cuts each tail (last blocks of an ended request) before its first block in `written`."""
        cut = ((by, trace, _before(tail, written)) for by, trace, tail in self.waiting)
        self.waiting = [one for one in cut if one[2]]

    def take(self) -> list[Tail]:
        """Returns the tails (last blocks of ended requests) and forgets them."""
        taken, self.waiting, self.blocks = self.waiting, [], set()
        return taken

    def forget(self) -> None:
        """Drops all tails (last blocks of ended requests)."""
        self.waiting = []
        self.blocks = set()


def _before(tail: tuple[BlockRun, ...], written: Collection[int]) -> tuple[BlockRun, ...]:
    """Returns the part of a tail (last blocks of an ended request) before its first block that is
    in `written`: the whole tail if it has no such block. A tail of several runs can't be cut, so if
    it has such a block, the result is empty."""
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
"""A decoding request stores this many blocks of its answer at a time, and the remaining blocks at
its end, because few long stores cost the server less than many short stores. Blocks of the prompt
are stored as soon as they are computed. In models with sliding windows or recurrent states, blocks
of the answer are stored as soon as they are computed too."""

UNSHARED = Retention(priority=-MAX_PRIORITY)
"""The retention of blocks with private names (hashes by which no other request finds the blocks).
Once their request has ended, they are useless. So the server evicts them first, and copies them to
no tier (`StoreOptions.is_private`)."""
Whose = tuple[Retention, bool, str, RequestTrace | None]
"""Properties that all blocks of a store share: retention; True for private names (by which no other
request finds the blocks); id of the request if it is resident (its old blocks may be only in the
server's memory), otherwise empty; trace of the request, or None."""


class StorePlanner:
    """Plans the stores of each step, and revokes stores whose blocks the step is about to write.
    Owns the `StoreState` of each request.

    num_ranks: number of ranks that must report the end of each store.
    id_prefix: beginning of the ids of write leases (a write lease is the right to write the slots
        of a store).
    fence: revokes stores by flags in memory shared with the ranks; None: only the workers revoke
        stores.
    exactness: knows which tokens have exact KV, so that only their blocks are stored; None: all
        tokens count as exact.
    residencies: the resident requests (requests whose old blocks may be only in the server's
        memory), whose inexact blocks are stored too; None without residency.
    unfinished_tokens: number of a request's last computed tokens that are not stored yet, because
        the next step may change their KV.
    in_flight: the stores on which ranks are working.
    tails: the last blocks of ended requests, to be stored with the next step.
    """

    def __init__(
        self,
        session: Session,
        finder: HitFinder,
        cache_groups: Sequence[CacheGroup],
        num_ranks: int,
        config: ConnectorConfig,
        stats: HotKVStats,
        id_prefix: str,
        fence: StoreFence | None = None,
        exactness: Exactness | None = None,
        residencies: ResidentRequests | None = None,
        unfinished_tokens: int = 0,
    ) -> None:
        self._session = session
        self._finder = finder
        self._unfinished_tokens = unfinished_tokens
        self._groups = finder.groups
        self._cache_groups = tuple(cache_groups)
        self._sketches = finder.sketches
        self._residencies = residencies
        self._exactness = exactness or Exactness((), 1)
        # The blocks of an answer wait until there are ANSWER_BLOCKS of them. They can't wait if
        # there is a group of sliding windows or recurrent states, because vLLM frees blocks of such
        # a group while the request decodes.
        keeps_blocks = all(spec.kind in PREFIX_CLOSED for spec in self._groups.specs)
        block_tokens = min(group.block_tokens for group in self._cache_groups)
        self._answer_wait_tokens = (ANSWER_BLOCKS - 1) * block_tokens if keeps_blocks else 0
        self._slot_bytes = (
            *(spec.slot_bytes for spec in self._groups.specs),
            *self._sketches.slot_bytes,
        )
        self._stats = stats
        max_bytes = config.max_inflight_store_mib << 20
        on_end = (lambda store: None) if residencies is None else residencies.stored
        self.in_flight = StoresInFlight(
            num_ranks, max_bytes, fence or StoreFence(), id_prefix, on_end
        )
        interval = config.state_interval_tokens
        self._missing = MissingBlocks(
            session, finder, self._cache_groups, interval, stats, self.in_flight
        )
        self.tails = Tails()
        self.is_held = False
        """True during a reset of the cache: each step then revokes the stores in flight and plans
        no stores."""
        self.is_rekeying = False
        """True while it is not known which key space belongs to the engine's weights: each step
        then revokes the stores in flight and plans no stores."""

    def __repr__(self) -> str:
        return f"StorePlanner({self.in_flight}, {self.tails})"

    # ------------------------------------------------------------------------------------- requests

    def new_state(self) -> StoreState:
        """Returns the `StoreState` of a new request."""
        block_tokens = min(group.block_tokens for group in self._cache_groups)
        return StoreState([0] * len(self._cache_groups), block_tokens)

    def comes(self, state: RequestState) -> None:
        """Records that all blocks of a request must be considered for storing again. Called when
        the request holds no blocks on the device: it is new, or it was preempted (so stores of its
        blocks may have been revoked), or its load has failed. Does nothing for a resident request
        (whose old blocks may be only in the server's memory)."""
        if not self._is_resident(state):
            state.store = replace(self.new_state(), may_store=state.store.may_store)

    def loaded(self, state: RequestState, stored_blocks: Sequence[int]) -> None:
        """Records a successful load, so that the loaded blocks are not stored again.

        stored_blocks: per group, how many leading blocks of the request the server has.
        """
        for index, num_blocks in enumerate(stored_blocks):
            mine = state.store.stored_blocks
            mine[index] = max(mine[index], num_blocks)

    def reset(self, state: RequestState) -> None:
        """Handles a reset of the cache for a request. If the engine has already computed tokens of
        the request, its blocks are not stored any more, because they depend on KV from before the
        reset. Otherwise all its blocks are stored, as for a new request. A request whose load is in
        progress counts as not computed. Its load is cancelled; if the load succeeds nevertheless,
        `Exactness` excludes the loaded KV from storing.

        A resident request (whose old blocks are in the server only) with blocks on the device
        continues to store blocks, but under hashes that no other request can have.
        """
        if self._residencies is not None and self._is_resident(state):
            self._residencies.reset(state.request.request_id)
        elif state.request.num_computed_tokens and not state.is_loading:
            state.store.may_store = False
        else:
            self.comes(state)

    def finish(
        self, state: RequestState, block_ids: Sequence[Sequence[int]], known_tokens: int
    ) -> None:
        """Queues the last blocks of a request that has ended. The hashes of these blocks became
        known after the request's last step. They are stored with the engine's next step, up to the
        first block that this step overwrites.

        block_ids: the request's block ids, per vLLM group.
        known_tokens: number of the request's leading tokens whose KV may be stored.
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
        """Returns the requests with blocks to store after this step, each with its number of
        computed tokens after the step.

        requests: by id, the requests that hotkv follows.
        num_scheduled_tokens: number of tokens that the step computes, by request id.
        held: ids of requests whose blocks must not be stored now (`OtherLoads.held`).
        handoffs: the recurrent states that vLLM offers for storing in this step.
        """
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
        """Returns this step's stores, and the ids of the stores in flight that must end before the
        step writes blocks (because they read these blocks).

        scheduled: the requests with blocks to store, as `due` returns them.
        tables: takes a request id, and returns the request's block ids per vLLM group; None if vLLM
            does not know the request.
        handoffs: the recurrent states that vLLM offers for storing in this step.
        written_blocks: returns the ids of the blocks that the step is about to write. Called only
            if there are stores in flight or tails (last blocks of ended requests), because it costs
            time.
        """
        lost = self.in_flight.step()
        if lost:
            self._stats.add("dropped_blocks", sum(store.num_blocks for store in lost.values()))
        flush = tuple(sorted({*lost, *self._fences(written_blocks)}))
        if self._is_closed:
            return (), tuple(sorted({*flush, *self.take_all_back()}))
        batches: dict[Whose, list[BlockRun]] = {}
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
            owner = request_id if self._is_resident(state) else ""
            private_from = self._private_from(state)
            for run in runs:
                is_private = run.depth >= private_from
                retention = UNSHARED if is_private else state.retention
                batches.setdefault((retention, is_private, owner, state.trace), []).append(run)
        jobs = [self._job(part, by) for by, runs in batches.items() for part in portions(runs)]
        return tuple(job for job in jobs if job is not None), flush

    def reported(self, report: StepReport) -> None:
        """Removes the stores that all ranks have reported as ended, and counts their results."""
        for store in self.in_flight.account(report):
            settle(store, self._stats, self._finder.hidden)

    def plan_broke(self) -> None:
        """Handles a step whose planning raised: drops the tails (last blocks of ended requests) and
        the stores that were not sent to the workers, and revokes all other stores."""
        self.tails.forget()
        self.in_flight.plan_broke()

    def take_all_back(self) -> tuple[int, ...]:
        """Revokes all stores and drops the tails (last blocks of ended requests). Used if it is not
        known which blocks a step reallocates, and while no store may begin. Returns the ids of the
        revoked stores, which the step's message must list."""
        taken_back = self.in_flight.take_all_back()
        self.tails.forget()
        return taken_back

    @property
    def _is_closed(self) -> bool:
        return self.is_held or self.is_rekeying

    def _fences(self, written_blocks: Callable[[], Collection[int]]) -> set[int]:
        """Revokes the stores that read one of the blocks in `written_blocks()`, because these
        blocks are about to be written. Returns the ids of the revoked stores. Also shortens the
        tails (last blocks of ended requests, which are not stored yet) so that they end before
        these blocks.

        written_blocks: returns the ids of the blocks that are about to be written.
        """
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
        """Returns the full blocks of a request that are to be stored now, as runs (consecutive
        blocks of a group). Records in `state.store` which blocks were considered, and when to
        consider the request's next blocks.

        computed_tokens: number of the request's tokens that are computed after this step.
        tables_of: takes a request id, and returns the request's block ids per vLLM group.
        planned: ids of blocks that this step already stores; the method adds the blocks of the
            returned runs.
        last: True if the request has ended, so that blocks left out now are never stored.
        """
        request, store = state.request, state.store
        is_resident = self._is_resident(state)
        exact = EVERYTHING if is_resident else self._exactness.exact_tokens(request.request_id)
        finished = min(computed_tokens, request.num_tokens) - self._unfinished_tokens
        known = min(finished, exact)
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
                    # Too many bytes of stores are in flight. The blocks are considered again in the
                    # next step, when some stores may have ended.
                    if last:
                        self._stats.add("dropped_blocks", end - begin)
                    return runs
                tables = tables_of(request.request_id) if tables is None else tables
                if tables is None:
                    return runs
                table = tables[group.vllm_group]
                cut = max(begin, min(self._private_from(state), end))
                for part in (range(begin, cut), range(cut, end)):
                    if part:
                        ids = np.asarray(table[part.start : part.stop], np.int32)
                        runs += self._missing.runs(state, index, hashes, part.start, ids, planned)
            store.stored_blocks[index] = max(begin, end)
            next_tokens = min(next_tokens, (max(begin, end) + 1) * group.block_tokens)
        # If a computed token is inexact, no later block of the request is ever stored.
        is_exact = known == finished
        # A resident request does not wait for several blocks: it needs each block in the server as
        # soon as the block is full.
        if next_tokens > request.num_prompt_tokens and not is_resident:
            next_tokens += self._answer_wait_tokens
        store.due_tokens = next_tokens + self._unfinished_tokens if is_exact else EVERYTHING
        return runs

    def _is_resident(self, state: RequestState) -> bool:
        """Returns True if the request is resident (its old blocks may be only in the server's
        memory). The server must then hold all blocks of the request, even blocks with inexact
        KV."""
        residencies = self._residencies
        return residencies is not None and residencies.is_resident(state.request.request_id)

    def _private_from(self, state: RequestState) -> int:
        """Returns the index of the request's first block with a private name (a hash made up for
        this request only, by which no other request finds the block). All later blocks have private
        names too. Returns EVERYTHING if no block has a private name."""
        if self._residencies is None or not self._is_resident(state):
            return EVERYTHING
        return self._residencies.private_from(state.request.request_id)

    def _job(self, runs: Sequence[BlockRun], whose: Whose) -> StoreJob | None:
        """Begins a store of these runs (consecutive blocks of a group) and returns the order for
        the workers. Returns None, and counts the blocks as dropped, if the fence (memory with one
        flag per store, by which the scheduler revokes stores) has no free flag: the store could
        then not be revoked.

        runs: the blocks and sketches (compact forms of keys) to store.
        whose: the properties that all blocks of the store share (`Whose`).
        """
        (retention, is_private, request_id, trace), residencies = whose, self._residencies
        residency_id = residencies.residency_of(request_id) if residencies else ""
        num_bytes = sum(len(run.hashes) * self._slot_bytes[run.group_index] for run in runs)
        blocks, sketches = self._sketches.split(runs)
        options = StoreOptions(retention, residency_id, is_private=is_private)
        job = self.in_flight.begin(blocks, sketches, num_bytes, options, request_id, trace)
        if job is None:
            self._stats.add("dropped_blocks", sum(len(run.hashes) for run in runs))
        else:
            self._stats.add("stores")
            if residencies is not None and request_id:
                residencies.stores(request_id, job)
        return job
