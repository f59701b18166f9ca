"""The stores on which ranks are working."""

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
from hotkv_vllm.scheduler.hidden_keys import HiddenKeys
from hotkv_vllm.stats import HotKVStats
from hotkv_vllm.tracing.request_traces import RequestTrace, end_store

if TYPE_CHECKING:
    from hotkv_proto.traces import Span


# ----------------------------------------------------------------------------------------- revoking


class StoreFence:
    """Before a block that a store reads is written, the store is revoked or has ended. A revoked
    store does not make its blocks ready.

    - By the workers, always: each message lists the stores whose blocks the step reallocates, and
      each worker ends them before the step goes on (`worker.rank_stores`).
    - By the scheduler too, if vLLM's runner writes before it notifies connectors
      (`checks.writes_before_it_tells`): each rank shares a page with a 32-bit word per store. The
      scheduler sets it before any worker gets the step; the server reads it after copying, and
      commits only if it is not set.

    revocations: None if only workers revoke stores.
    """

    def __init__(self, revocations: Revocations | None = None) -> None:
        self.revocations = revocations

    def __repr__(self) -> str:
        return f"StoreFence({self.revocations or 'workers take back'})"

    def take(self) -> int | None:
        """Index of a word for a new store; 0 if stores need none; None if all are in use: the
        store must not be sent."""
        if self.revocations is None:
            return 0
        return self.revocations.take() or None

    def revoke(self, index: int) -> None:
        if self.revocations is not None:
            self.revocations.revoke(index)

    def revoke_all(self) -> None:
        if self.revocations is not None:
            self.revocations.revoke_all()

    def end(self, index: int) -> None:
        """Revokes the store first: a rank may have stopped waiting for one on which the server
        still works."""
        if self.revocations is not None:
            self.revocations.end(index)


# ---------------------------------------------------------------------------------------- in flight


_store_ids = itertools.count(1)
"""For all planners of the process: workers may report an earlier planner's stores."""
UNREPORTED_S = 60.0
"""After steps of so many seconds without a rank's report, a message is lost: the store is
revoked and forgotten."""
MOST_STEP_S = 1.0
"""The time between two plans counts at most this much: idle time carries no reports."""


@dataclass(slots=True)
class StoreInFlight:
    """runs: of blocks, without attachments.
    read: all device blocks, also those of which only the attachment is stored.
    num_bytes: in all ranks together.
    results: by rank, a byte per block: the server's `BlockResult`.
    fence_index: 0 without a word.
    planned_s: on the clock of `StoresInFlight`.
    request_id: as `StoreJob.request_id`.
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
    """A block has at most one store in flight; `num_bytes` is the sum over `stores`. A store is
    removed when all ranks have reported its end, or after UNREPORTED_S.

    reading: by block id, the store that reads it; without revoked stores.
    """

    def __init__(
        self,
        num_ranks: int,
        max_bytes: int,
        fence: StoreFence,
        id_prefix: str,
        on_end: Callable[[StoreInFlight], None] = lambda store: None,
    ) -> None:
        """max_bytes: of all stores together.
        on_end: called with each store that is removed, however it ended.
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
        """The stores of earlier steps were sent by now.

        Removes and returns lost stores: overdue ones, and those that all ranks have reported but
        a fault has left. A worker may still work on them, so the step's message must list them.
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
        """Whether a store must wait for others to end; without others any size may begin."""
        return bool(self.stores) and self.num_bytes + more_bytes >= self._max_bytes

    def begin(
        self,
        blocks: Sequence[BlockRun],
        attached: Sequence[BlockRun],
        num_bytes: int,
        options: StoreOptions = NO_OPTIONS,
        request_id: str = "",
        trace: RequestTrace | None = None,
    ) -> StoreJob | None:
        """None if no word of the fence is free.

        num_bytes: in all ranks together.
        """
        fence_index = self.fence.take()
        if fence_index is None:
            return None
        store_id = self._last_planned = next(_store_ids)
        runs = (*blocks, *attached)
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
            tuple(attached),
            fence_index,
            request_id,
        )

    def account(self, report: StepReport) -> list[StoreInFlight]:
        """Removes and returns the stores that all ranks have ended. Idempotent."""
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
        """Revokes the stores that read these blocks. Their ids, which the step's message must
        list."""
        found = {self.reading[block] for block in blocks if block in self.reading}
        for store_id in found:
            self._take_back(store_id)
        return found

    def take_all_back(self) -> tuple[int, ...]:
        """As `take_back_readers`."""
        for store_id in self.stores:
            self._take_back(store_id)
        return tuple(sorted(self.stores))

    def plan_broke(self) -> None:
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
    """Mask of the blocks of which the server has all shards, and how many of them this store
    added."""
    num_blocks = store.num_blocks
    answers = np.full((max(1, len(store.results)), num_blocks), BlockResult.ABORTED, np.uint8)
    for row, result in enumerate(store.results.values()):
        part = np.frombuffer(result, np.uint8)[:num_blocks]
        answers[row, : len(part)] = part
    is_written = (answers <= BlockResult.WRITTEN).all(axis=0)
    whole = is_written & (answers <= BlockResult.PRESENT).any(axis=0)
    return whole, int((whole & (answers == BlockResult.STORED).any(axis=0)).sum())
