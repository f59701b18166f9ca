"""What all parts that move blocks share: tasks of the event loop, check values, keys."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import numpy as np

from hotkv_proto.table import Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import BoolMask, Entries
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.check_values import sealed
from hotkv_server.integrity.sums import sums_of
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.node.health import Health
from hotkv_server.tiers.book.moves import Move
from hotkv_server.tiers.protocol import NO_EPOCHS, Blocks, Epochs, Seals

T = TypeVar("T")

CLOSE_S = 2.0
"""Longest wait for what a closed tier has answered to be taken in. A disk that hangs answers no
more; its slots are nobody's then, as the process ends."""


class TierTasks:
    """Tasks under way; `is_closing` once they shall end. One that breaks is told to the loop's
    exception handler at once. `health` watches those that loop."""

    def __init__(self) -> None:
        self.is_closing = False
        self.health = Health()
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"TierTasks({len(self._tasks)})"

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Runs it in the background."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def turns(self, name: str, pause_s: float) -> AsyncIterator[None]:
        """As `Health.turns`, until the tasks shall end."""
        async for _ in self.health.turns(name, pause_s):
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
        """Waits for them for a while, and cancels what is left."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def future() -> "asyncio.Future[Any]":
    """Returns a future of the running loop."""
    return asyncio.get_running_loop().create_future()


async def elsewhere(call: Callable[..., T], *arguments: object) -> T:
    """Calls it on a thread of the pool that all share. Not for what may hang: `aside`."""
    return await asyncio.get_running_loop().run_in_executor(None, call, *arguments)


async def aside(call: Callable[[], object]) -> None:
    """Calls it on a thread of its own that keeps neither other work nor the end of the process
    waiting, however long it takes. It raises nothing."""
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
    """Sets the future's result to the tuple that a thread passes."""
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
    """Which pinned blocks [n] have the bytes of their check values; others are condemned."""
    if not core.config.check_stride:
        return np.ones(len(entries), np.bool_)
    cases = verifier.cases(entries)
    bad = verifier.settle(cases, await elsewhere(verifier.judge, cases))
    tell()
    good: BoolMask = ~np.isin(entries, bad)
    return good


def check_values(core: CacheCore, arena: Region, move: Move) -> Seals:
    """Check values of the slots of a move up. From any thread: its entries and slots are the
    move's alone."""
    index, stride = core.space.index, core.config.check_stride
    checks = np.zeros(len(move), np.uint64)
    if not stride:
        return checks
    _, groups, _ = index.keys(move.entries)
    offsets, keys = index.offsets(move.entries), index.mixed(move.entries)
    record = core.catalog.record(move.key_space_id)
    for group in np.unique(groups).tolist():
        at = np.flatnonzero(groups == group)
        strides = np.full(len(at), stride, np.int64)
        sums = sums_of(arena, offsets[at], record.shape(group).shard_bytes, strides)
        checks[at] = sealed(sums, keys[at], stride)
    return checks


def tier_keys(prefix: bytes, groups: list[int], hashes: Words) -> list[bytes]:
    """Keys of blocks in tiers: `hotkv/1/{fingerprint}[/{epoch}]/{group}/{hash}`."""
    return [
        b"%s/%d/%s" % (prefix, group, words.tobytes())
        for group, words in zip(groups, hashes, strict=True)
    ]


def blocks_of(
    core: CacheCore, entries: Entries, prefix: bytes, epochs: Epochs = NO_EPOCHS
) -> Blocks:
    """Blocks of host memory as a tier that places by itself takes them."""
    index = core.space.index
    _, groups, hashes = index.keys(entries)
    return Blocks(
        tier_keys(prefix, groups.tolist(), hashes),
        index.offsets(entries),
        index.slot_bytes(entries),
        depths=index.depths(entries),
        epochs=epochs,
    )
