"""The copy engine for host memory: worker threads, without the GIL. Any thread takes the next
piece of a job. Owners (tenants or engines) take turns, a piece each. A cancelled job's other
pieces are not copied."""

import threading
import time
from collections import deque
from typing import Generic, TypeVar

from hotkv_proto import native
from hotkv_server.dataplane.engines import CopyJob
from hotkv_server.dataplane.plan import BlockCopies, num_shares

# ----------------------------------------------------------------------------------- Owners in turn

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Serves owners in turn, an item each; an owner's items first in, first out. Thread-safe."""

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._items: dict[str, deque[T]] = {}
        # Owners that have items, the next first.
        self._turns: deque[str] = deque()
        self._size = 0
        self._is_closed = False

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"FairQueue({self._size} items of {len(self._turns)} owners)"

    def put(self, owner: str, items: list[T]) -> None:
        """Does not block."""
        if not items:
            return
        with self._ready:
            waiting = self._items.get(owner)
            if waiting is None:
                self._items[owner] = deque(items)
                self._turns.append(owner)
            else:
                waiting.extend(items)
            self._size += len(items)
            self._ready.notify(len(items))

    def close(self) -> None:
        """Once the queue is empty, `get` returns None."""
        with self._ready:
            self._is_closed = True
            self._ready.notify_all()

    def get(self) -> T | None:
        """Waits. None once the queue is closed and empty."""
        with self._ready:
            while not self._turns:
                if self._is_closed:
                    return None
                self._ready.wait()
            owner = self._turns.popleft()
            waiting = self._items[owner]
            item = waiting.popleft()
            self._size -= 1
            if waiting:
                self._turns.append(owner)
            else:
                del self._items[owner]
            return item


# --------------------------------------------------------------------------------------- The engine

MIN_PIECE_BYTES, MAX_PIECE_BYTES = 4 << 20, 16 << 20
"""A piece is so large that its overhead is negligible, and so small that a cancel takes effect
within 1 or 2 ms."""
PROMPT_JOB_BYTES = 256 << 10
"""Up to this size a prompt job is copied by who submits it, in some 30 us: waking a thread, and
being woken by it, takes longer."""
STREAMED_JOB_BYTES = 8 << 20
"""From this size on, stores bypass the processor's caches: the job would not fit, and plain
stores read every line that they overwrite."""


class HostCopyEngine:
    """`num_threads` workers share one queue, which is bounded because the core bounds transfers."""

    def __init__(self, num_threads: int) -> None:
        self._kernels = native.require("hotkv_proto.table_reading")
        self._queue: FairQueue[tuple[CopyJob, BlockCopies, int, int]] = FairQueue()
        # When each thread began its present piece; 0 while idle.
        self._begun_s = [0.0] * num_threads
        self._busy_s = [0.0] * num_threads
        self._prompt_s = 0.0
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"hotkv-copy-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"HostCopyEngine({len(self._threads)} threads, {len(self._queue)} pieces queued)"

    def submit(self, job: CopyJob) -> None:
        if job.is_prompt and job.total_bytes <= PROMPT_JOB_BYTES:
            self._copy_now(job)
            return
        piece_bytes = min(
            max(job.total_bytes // len(self._threads), MIN_PIECE_BYTES), MAX_PIECE_BYTES
        )
        pieces: list[tuple[CopyJob, BlockCopies, int, int]] = [
            (job, plan, at, whole)
            for plan in job.plans
            for whole in [num_shares(plan, piece_bytes)]
            for at in range(whole)
        ]
        job.expect(len(pieces))
        self._queue.put(job.owner, pieces)

    def _copy_now(self, job: CopyJob) -> None:
        begun_s, error = time.monotonic(), ""
        job.expect(1)
        if not job.cancelled and job.plans:
            job.piece_begun()
            try:
                for plan in job.plans:
                    self._copy(plan, 0, 1, streaming=False)
            except Exception as failure:  # noqa: BLE001 If a copy fails, only its job fails.
                error = f"{type(failure).__name__}: {failure}"
        self._prompt_s += time.monotonic() - begun_s
        job.piece_done(error)

    def close(self) -> None:
        self._queue.close()
        for thread in self._threads:
            thread.join()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_lanes(self) -> int:
        return len(self._threads)

    @property
    def busy_s(self) -> float:
        return sum(self._busy_s) + self._prompt_s

    def is_alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def stalled_s(self, now_s: float) -> float:
        return now_s - min(filter(None, self._begun_s), default=now_s)

    def _work(self, number: int) -> None:
        while (piece := self._queue.get()) is not None:
            self._begun_s[number] = begun_s = time.monotonic()
            job, plan, at, whole = piece
            error = ""
            if not job.cancelled:
                job.piece_begun()
                try:
                    self._copy(plan, at, whole, streaming=job.total_bytes >= STREAMED_JOB_BYTES)
                except Exception as failure:  # noqa: BLE001 If a copy fails, only its job fails; the thread goes on.
                    error = f"{type(failure).__name__}: {failure}"
            # Before `piece_done`: what it notifies may read the sum.
            self._busy_s[number] += time.monotonic() - begun_s
            job.piece_done(error)
            self._begun_s[number] = 0.0
            del piece, job, plan

    def _copy(self, plan: BlockCopies, at: int, whole: int, *, streaming: bool) -> None:
        """Copies share `at` of `whole` equal ones. `streaming`: bypasses the processor's caches."""
        recipe, part = plan.recipe, plan.part(at, at + 1, whole)
        self._kernels.copy_blocks(
            plan.engine.address,
            plan.arena.address,
            plan.block_ids[part],
            plan.slot_offsets[part],
            recipe.bases,
            recipe.strides,
            recipe.slot_offsets,
            recipe.num_bytes,
            plan.to_engine,
            streaming,
        )
