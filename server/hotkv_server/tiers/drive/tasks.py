"""Helpers of `tiers.drive`: tasks on the event loop, checksums, keys."""

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
from hotkv_server.tiers.protocol import Blocks, Generations, Seals, SharedBlocks

T = TypeVar("T")

CLOSE_S = 2.0
"""Longest wait for tasks after the tiers were closed. A task that waits for a hung disk never
ends; its slots stay reserved until the process ends."""


class TierTasks:
    """Background tasks of all tiers. If one raises, the loop's exception handler gets it at
    once. `is_closing`: set by the owner to end all tasks."""

    def __init__(self) -> None:
        self.is_closing = False
        self.health = Health()
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"TierTasks({len(self._tasks)})"

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def turns(
        self, name: str, pause_s: float, wake: asyncio.Event | None = None
    ) -> AsyncIterator[None]:
        """`Health.turns`, until `is_closing`."""
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
        """Waits CLOSE_S, then cancels."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


async def elsewhere(call: Callable[..., T], *arguments: object) -> T:
    """Runs `call` on the default pool. For calls that may hang use `aside`, which can't exhaust
    it."""
    return await asyncio.get_running_loop().run_in_executor(None, call, *arguments)


async def aside(call: Callable[[], object]) -> None:
    """Runs `call`, which must not raise, on a new daemon thread: if it hangs, it delays neither
    other work nor the end of the process."""
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
    """An `on_done` for any thread: the future gets the tuple of its arguments."""
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
    """Mask [n] of the pinned blocks that match their checksums; condemns the others, then calls
    `tell`."""
    if not core.config.check_stride:
        return np.ones(len(entries), np.bool_)
    cases = verifier.cases(entries)
    bad = verifier.settle(cases, await elsewhere(verifier.judge, cases))
    tell()
    good: BoolMask = ~np.isin(entries, bad)
    return good


def checksums(core: CacheCore, arena: Region, move: Move) -> Seals:
    """Checksums of a move's blocks, uint64 [n]; zeros if the server computes none. Any thread:
    only the move uses these entries and slots."""
    index, stride = core.space.index, core.config.check_stride
    # Read once: `Arrivals.forsake` replaces it by an empty array, but its slots stay reserved.
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
    """`hotkv/1/{fingerprint}[/{generation}]/{group}/{hash}`. `prefix`: up to the group.
    `hashes`: uint32 [n, 8].
    """
    return [
        b"%s/%d/%s" % (prefix, group, words.tobytes())
        for group, words in zip(groups, hashes, strict=True)
    ]


def blocks_of(core: CacheCore, entries: Entries, prefix: bytes) -> Blocks:
    index = core.space.index
    _, groups, hashes = index.keys(entries)
    keys = tier_keys(prefix, groups.tolist(), hashes)
    return Blocks(keys, index.offsets(entries), index.slot_bytes(entries))


def shared_blocks(
    core: CacheCore, entries: Entries, prefix: bytes, generations: Generations
) -> SharedBlocks:
    one = blocks_of(core, entries, prefix)
    depths = core.space.index.depths(entries)
    return SharedBlocks(one.keys, one.slots, one.num_bytes, depths, generations)
