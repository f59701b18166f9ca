"""Helpers for the modules of `tiers.drive`: they run tasks on the event loop, compare checksums
(checksums) of blocks, and make the keys of blocks."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import numpy as np

from hotkv_proto.table import Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import BoolMask, Entries
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.checksums import sealed
from hotkv_server.integrity.sums import sums_of
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.node.health import Health
from hotkv_server.tiers.book.moves import Move
from hotkv_server.tiers.protocol import NO_GENERATIONS, Blocks, Generations, Seals

T = TypeVar("T")

CLOSE_S = 2.0
"""Longest wait for the tasks to end, after the tiers were closed. If a disk hangs, a task that
waits for the disk never ends; the slots that the disk uses stay reserved until the process ends."""


class TierTasks:
    """Runs the background tasks of all tiers. If a task raises, its exception goes to the event
    loop's exception handler at once.

    `is_closing`: set to True by the owner to end all tasks.
    `health`: watches the tasks that use `turns`.
    """

    def __init__(self) -> None:
        self.is_closing = False
        self.health = Health()
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"TierTasks({len(self._tasks)})"

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Starts `work` as a task and returns the task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def turns(
        self, name: str, pause_s: float, wake: asyncio.Event | None = None
    ) -> AsyncIterator[None]:
        """Runs the caller's `async for` loop in turns: yields again and again, each time after
        `pause_s`, or earlier if `wake` is set (see `Health.turns`). Ends when `is_closing` is True.
        `name`: the task's name in health probes."""
        async for _ in self.health.turns(name, pause_s, wake=wake):
            if self.is_closing:
                return
            yield

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a move between tiers broke", "exception": error}
            )

    async def close(self) -> None:
        """Waits until the tasks have ended, at most CLOSE_S, then cancels the tasks that still
        run."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def future() -> "asyncio.Future[Any]":
    """Returns a new asyncio future of the running event loop."""
    return asyncio.get_running_loop().create_future()


async def elsewhere(call: Callable[..., T], *arguments: object) -> T:
    """Runs `call` on a thread of the event loop's default pool, and returns its result. For calls
    that may hang use `aside`, which can't exhaust the pool."""
    return await asyncio.get_running_loop().run_in_executor(None, call, *arguments)


async def aside(call: Callable[[], object]) -> None:
    """Runs `call` on a new daemon thread, so that a hanging call delays neither other work nor the
    end of the process. `call` must not raise."""
    ended: asyncio.Future[tuple[()]] = future()
    end = on_loop(ended)

    def work() -> None:
        try:
            call()
        finally:
            end()

    threading.Thread(target=work, name=f"hotkv-aside-{call!r}"[:64], daemon=True).start()
    await ended


def on_loop(ended: "asyncio.Future[Any]") -> Callable[..., None]:
    """Returns a callback for a tier (`on_done`) that any thread may call. When it is called, the
    future gets the tuple of the call's arguments as its result, on the future's event loop."""
    loop = ended.get_loop()

    def set_result(answer: object) -> None:
        if not ended.done():
            ended.set_result(answer)

    def call(*answer: object) -> None:
        try:
            loop.call_soon_threadsafe(set_result, answer)
        except RuntimeError:
            # The loop has ended.
            return

    return call


async def agreeing(
    core: CacheCore, verifier: Verifier, entries: Entries, tell: Callable[[], None]
) -> BoolMask:
    """Compares the bytes of n pinned blocks in host memory with their checksums.
    Condemns (drops) the blocks that don't match, and returns a mask [n] of the blocks that match.
    `tell`: called afterwards; sends the core's notices and events about removed blocks to sessions
    and readers, which then drop the condemned blocks."""
    if not core.config.check_stride:
        return np.ones(len(entries), np.bool_)
    cases = verifier.cases(entries)
    bad = verifier.settle(cases, await elsewhere(verifier.judge, cases))
    tell()
    good: BoolMask = ~np.isin(entries, bad)
    return good


def checksums(core: CacheCore, arena: Region, move: Move) -> Seals:
    """Returns the checksums of a move's n blocks, which a tier has just read into
    their slots (places in the arena), uint64 [n]; zeros if the server computes no checksums.
    Callable on any thread, because only the move uses these entries and slots."""
    index, stride = core.space.index, core.config.check_stride
    # Read `move.entries` only once: if the event loop abandons the move (`Arrivals.forsake`), it
    # replaces them by an empty array. The slots of these entries stay reserved.
    entries = move.entries
    checks = np.zeros(len(entries), np.uint64)
    if not stride:
        return checks
    _, groups, _ = index.keys(entries)
    offsets, keys = index.offsets(entries), index.mixed(entries)
    record = core.catalog.record(move.key_space_id)
    for group in np.unique(groups).tolist():
        at = np.flatnonzero(groups == group)
        strides = np.full(len(at), stride, np.int64)
        sums = sums_of(arena, offsets[at], record.shape(group).shard_bytes, strides)
        checks[at] = sealed(sums, keys[at], stride)
    return checks


def tier_keys(prefix: bytes, groups: list[int], hashes: Words) -> list[bytes]:
    """Returns the keys of n blocks in tiers: `hotkv/1/{fingerprint}[/{generation}]/{group}/{hash}`.

    `prefix`: the part of the keys before `/{group}`.
    `groups`: for each block, the number of its KV cache group.
    `hashes`: the blocks' hashes, uint32 words [n, 8].
    """
    return [
        b"%s/%d/%s" % (prefix, group, words.tobytes())
        for group, words in zip(groups, hashes, strict=True)
    ]


def blocks_of(
    core: CacheCore, entries: Entries, prefix: bytes, generations: Generations = NO_GENERATIONS
) -> Blocks:
    """Returns a `Blocks`, the argument of a tier's calls, for these entries of host memory.

    `prefix`: the part of the blocks' keys before the group and the hash (see `tier_keys`).
    `generations`: the generation (number that each flush raises) in the keys, by the key space's
        fingerprint. A read compares it with the store's generation; empty: no comparison.
    """
    index = core.space.index
    _, groups, hashes = index.keys(entries)
    return Blocks(
        tier_keys(prefix, groups.tolist(), hashes),
        index.offsets(entries),
        index.slot_bytes(entries),
        depths=index.depths(entries),
        generations=generations,
    )
