"""Tracks the stores on which the engine's ranks are working (stores in flight). `StoreFence`
revokes stores, `StoresInFlight` records which blocks each store reads, and `settle` counts the
results of a store. Scheduler thread only."""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hotkv_client.fence import Revocations
from hotkv_client.types import BlockResult, BlockRun
from hotkv_proto.blocks import NO_OPTIONS, StoreOptions
from hotkv_vllm.metadata import StepReport, StoreJob
from hotkv_vllm.scheduler.hits import HiddenKeys
from hotkv_vllm.stats import HotKVStats
from hotkv_vllm.tracing.request_traces import RequestTrace, end_store

if TYPE_CHECKING:
    from hotkv_proto.traces import Span


# ----------------------------------------------------------------------------------------- revoking


class StoreFence:
    """Revokes stores whose blocks a step is about to write. A revoked store does not make its
    blocks ready in the server.

    Always true: before a block that a store reads is written, that store is revoked or has ended.
    There are two ways to revoke a store. The first is always used. The second is used in addition
    if the first would be too late.

    - By the workers: the message of each step lists the stores whose blocks the step reallocates.
      Each worker ends these stores before the step continues (`worker.rank_stores`).
    - By the scheduler: used if vLLM's runner writes blocks before it notifies connectors
      (`checks.writes_before_it_tells`). Each rank then shares a memory page (fence) with the
      scheduler. Each store has a word (32-bit flag) on this page. The scheduler sets the word
      before any worker gets the step. The server reads the word after it has copied the store's
      bytes, and commits the store only if the word is not set.

    revocations: the ranks' fences; None if only the workers revoke stores.
    """

    def __init__(self, revocations: Revocations | None = None) -> None:
        self.revocations = revocations

    def __repr__(self) -> str:
        return f"StoreFence({self.revocations or 'workers take back'})"

    def take(self) -> int | None:
        """Allocates a word for a new store (a flag on the ranks' pages, by which the store is
        revoked). Returns the word's index; 0 if stores need no word. Returns None if all words are
        in use: the store could then not be revoked, so it must not be sent."""
        if self.revocations is None:
            return 0
        return self.revocations.take() or None

    def revoke(self, index: int) -> None:
        """Revokes a store: sets its word on the pages of all ranks, so that the server does not
        commit the store any more. Does nothing if the engine has no such pages.

        index: index of the store's word.
        """
        if self.revocations is not None:
            self.revocations.revoke(index)

    def revoke_all(self) -> None:
        """Revokes all stores in flight: sets their words on the pages of all ranks, so that the
        server commits none of these stores."""
        if self.revocations is not None:
            self.revocations.revoke_all()

    def end(self, index: int) -> None:
        """Frees the word with this index for another store. First revokes the store that had the
        word: a rank may have stopped waiting for this store although the server is still working on
        it."""
        if self.revocations is not None:
            self.revocations.end(index)


# ---------------------------------------------------------------------------------------- in flight


_store_ids = itertools.count(1)
"""Generates the ids of stores. All planners of this process share it, because workers may still
report stores of an earlier planner."""
UNREPORTED_S = 60.0
"""If a rank has not reported the end of a store after steps that took this many seconds in all, a
message to or from the rank must have been lost. The store is then revoked and forgotten. A store
may stay unreported for longer in an idle engine, because only steps carry reports."""
MOST_STEP_S = 1.0
"""The time between the plans of two steps counts as this many seconds at most. So the clock of
`StoresInFlight` almost stops while the engine is idle."""


@dataclass(slots=True)
class StoreInFlight:
    """A store that ranks are working on.

    runs: the stored blocks, as runs (consecutive blocks of a group). Does not include the runs of
        sketches (compact forms of keys).
    read: ids of all device blocks that the store reads, including blocks of which only the
        sketch is stored.
    num_bytes: size of the store in all ranks together.
    num_ranks: number of ranks that report the store's end.
    results: by rank that has reported the store's end, a byte per block: the server's
        `BlockResult`.
    fence_index: index of the store's word (flag by which the scheduler revokes the store, on a page
        shared with the ranks); 0 if the store has no word.
    planned_s: time at which the store was planned, on the clock of `StoresInFlight`. This clock
        counts at most MOST_STEP_S between two steps, so that it almost stops while the engine is
        idle.
    request_id: id of the resident request (its old blocks may be only in the server's memory) to
        which the store belongs, or empty.
    span: the store's trace span; None if the store is not traced.
    """

    store_id: int
    runs: tuple[BlockRun, ...]
    read: tuple[int, ...]
    num_bytes: int
    num_ranks: int
    results: dict[int, bytes]
    fence_index: int = 0
    planned_s: float = 0.0
    request_id: str = ""
    span: "Span | None" = None

    @property
    def num_blocks(self) -> int:
        return sum(len(run.hashes) for run in self.runs)


class StoresInFlight:
    """Holds the stores on which ranks are working, and the blocks that these stores read.

    Always true:
    - A block has at most one store in flight.
    - `num_bytes` is the sum of the sizes of `stores`.
    - A store is removed when all ranks have reported its end, or UNREPORTED_S after it was planned
      (without the time in which the engine is idle).

    stores: the stores in flight, by store id.
    reading: by block id, the id of the store that reads the block. Revoked stores are left out.
    """

    def __init__(
        self,
        num_ranks: int,
        max_bytes: int,
        fence: StoreFence,
        id_prefix: str,
        on_end: Callable[[StoreInFlight], None] = lambda store: None,
    ) -> None:
        """Begins without stores in flight.

        max_bytes: limit of `num_bytes`, the size of all stores in flight together (`is_full`).
        id_prefix: the ids of write leases begin with it.
        on_end: called with each store that is removed, however the store has ended.
        """
        self.fence = fence
        self._on_end = on_end
        self.reading: dict[int, int] = {}
        self.num_bytes = 0
        self.stores: dict[int, StoreInFlight] = {}
        self._num_ranks = num_ranks
        self._max_bytes = max_bytes
        self._prefix = id_prefix
        self._last_planned = self._last_sent = 0
        self._last_step_s = time.monotonic()
        self._steps_s = 0.0

    def __len__(self) -> int:
        return len(self.stores)

    def __repr__(self) -> str:
        return (
            f"StoresInFlight({len(self.stores)}, {self.num_bytes} bytes, "
            f"{len(self.reading)} blocks read)"
        )

    def step(self) -> dict[int, StoreInFlight]:
        """Records that vLLM plans a new step. The stores of all earlier steps were sent to the
        workers by now.

        Also removes and returns two kinds of lost stores: stores whose end was not reported within
        UNREPORTED_S, and stores that all ranks have reported but that a fault has left in `stores`.
        A worker may still be working on such a store, so the step's message must list it.
        """
        self._last_sent = self._last_planned
        now_s = time.monotonic()
        self._steps_s += min(now_s - self._last_step_s, MOST_STEP_S)
        self._last_step_s = now_s
        until_s = self._steps_s - UNREPORTED_S
        lost = {
            store_id: store
            for store_id, store in self.stores.items()
            if len(store.results) >= store.num_ranks or store.planned_s <= until_s
        }
        for store_id in lost:
            self._drop(store_id)
        return lost

    def is_full(self, more_bytes: int) -> bool:
        """Returns True if a store of `more_bytes` must wait until other stores have ended. Without
        stores in flight a store may have any size."""
        return bool(self.stores) and self.num_bytes + more_bytes >= self._max_bytes

    def begin(
        self,
        blocks: Sequence[BlockRun],
        sketches: Sequence[BlockRun],
        num_bytes: int,
        options: StoreOptions = NO_OPTIONS,
        request_id: str = "",
        trace: RequestTrace | None = None,
    ) -> StoreJob | None:
        """Begins a store and returns its order for the workers. Returns None if the store could not
        be revoked, because all words of the fence are in use (a word is a flag on the ranks' pages,
        by which a store is revoked).

        blocks: the blocks to store, as runs (consecutive blocks of a group).
        sketches: runs of the sketches (compact forms of keys) to store.
        num_bytes: size of the store in all ranks together.
        options: how long the server should retain the blocks, and other options of the store.
        request_id: id of the resident request (its old blocks may be only in the server's memory)
            to which the store belongs, or empty.
        trace: the trace of the request that owns the blocks; None if the request is not traced.
        """
        fence_index = self.fence.take()
        if fence_index is None:
            return None
        store_id = self._last_planned = next(_store_ids)
        runs = (*blocks, *sketches)
        read = tuple(dict.fromkeys(block for run in runs for block in run.block_ids.tolist()))
        span = trace and trace.store(sum(len(run.hashes) for run in blocks), num_bytes)
        self.stores[store_id] = StoreInFlight(
            store_id,
            tuple(blocks),
            read,
            num_bytes,
            self._num_ranks,
            {},
            fence_index,
            self._steps_s,
            request_id,
            span,
        )
        self.num_bytes += num_bytes
        self.reading.update(dict.fromkeys(read, store_id))
        lease_id = f"{self._prefix}-w{store_id}"
        return StoreJob(
            store_id,
            lease_id,
            tuple(blocks),
            options if span is None else replace(options, traceparent=span.traceparent),
            tuple(sketches),
            fence_index,
            request_id,
        )

    def account(self, report: StepReport) -> list[StoreInFlight]:
        """Adds the results in the ranks' report to the stores in flight. Removes and returns the
        stores that all ranks have ended. A second call with the same report has no effect, and
        returns an empty list."""
        new: list[StoreInFlight] = []
        for store_id, results in report.stores.items():
            store = self.stores.get(store_id)
            if store is not None and results.keys() - store.results.keys():
                store.results.update(results)
                new.append(store)
        ended = [store for store in new if len(store.results) >= store.num_ranks]
        for store in ended:
            self._drop(store.store_id)
        return ended

    def _drop(self, store_id: int) -> None:
        """Removes a store: frees its word on the ranks' pages (`StoreFence`) and calls `on_end`."""
        self._stop_reading(store_id)
        store = self.stores.pop(store_id)
        self.num_bytes -= store.num_bytes
        self._end(store)

    def _end(self, store: StoreInFlight) -> None:
        self.fence.end(store.fence_index)
        self._on_end(store)
        if store.span is not None:
            end_store(store.span, store.results.values())

    # ------------------------------------------------------------------------------- taking back

    def take_back_readers(self, blocks: Iterable[int]) -> set[int]:
        """Revokes the stores that read any of these blocks. Returns the ids of the revoked stores,
        which the step's message must list."""
        found = {self.reading[block] for block in blocks if block in self.reading}
        for store_id in found:
            self._take_back(store_id)
        return found

    def take_all_back(self) -> tuple[int, ...]:
        """Revokes all stores in flight. Returns their ids, which the step's message must list."""
        for store_id in self.stores:
            self._take_back(store_id)
        return tuple(sorted(self.stores))

    def plan_broke(self) -> None:
        """Handles a step whose planning raised: removes the stores that were not sent to the
        workers, and revokes all other stores by their words on the ranks' pages (`StoreFence`)."""
        sent = {store_id: s for store_id, s in self.stores.items() if store_id <= self._last_sent}
        unsent = [store for store_id, store in self.stores.items() if store_id not in sent]
        self.stores = sent
        self.reading = {block: store_id for store_id, store in sent.items() for block in store.read}
        self.num_bytes = sum(store.num_bytes for store in sent.values())
        self.fence.revoke_all()
        for store in unsent:
            self._end(store)

    def _take_back(self, store_id: int) -> None:
        self.fence.revoke(self.stores[store_id].fence_index)
        self._stop_reading(store_id)

    def _stop_reading(self, store_id: int) -> None:
        for block in self.stores[store_id].read:
            if self.reading.get(block) == store_id:
                del self.reading[block]


# ------------------------------------------------------------------------------------------ results


def settle(store: StoreInFlight, stats: HotKVStats, hidden: HiddenKeys) -> None:
    """Counts the results of an ended store in `stats`. Also removes the keys of its stored blocks
    from `hidden` (the blocks that are not offered as hits because their load failed)."""
    whole, num_stored = stored_whole(store)
    num_whole = int(whole.sum())
    for name, count in (
        ("stored_blocks", num_stored),
        ("present_blocks", num_whole - num_stored),
        ("refused_blocks", store.num_blocks - num_whole),
    ):
        if count:
            stats.add(name, count)
    if len(hidden):
        keys = [(run.group_index, one) for run in store.runs for one in run.hashes]
        for (group, block_hash), good in zip(keys, whole.tolist(), strict=True):
            if good:
                hidden.clear(group, block_hash)


def stored_whole(store: StoreInFlight) -> tuple[Any, int]:
    """Returns a mask of the store's blocks: True if the server has the shards (parts) of the block
    of all ranks. Also returns how many of these blocks this store has added to the server; the
    server had the others before."""
    num_blocks = store.num_blocks
    answers = np.full((max(1, len(store.results)), num_blocks), BlockResult.ABORTED, np.uint8)
    for row, result in enumerate(store.results.values()):
        part = np.frombuffer(result, np.uint8)[:num_blocks]
        answers[row, : len(part)] = part
    is_written = (answers <= BlockResult.WRITTEN).all(axis=0)
    whole = is_written & (answers <= BlockResult.PRESENT).any(axis=0)
    return whole, int((whole & (answers == BlockResult.STORED).any(axis=0)).sum())
