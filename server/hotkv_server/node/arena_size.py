"""`ArenaSize` changes the size of a running node's arena, one change at a time.

Growth: the arena's file is mapped beyond the arena from the start, so engines see new blocks there
without a new mapping. A shrink waits for pins, moves or evicts the rest (`cache.resizing`), and
gives the memory back. If pins last longer than its deadline, the arena ends where the last of them
lies.

Always true: memory is given back only once no block lies there. Memory that a device may have
registered is not: who registered it would go on reading the old pages after a later growth.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import limits
from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import Int64s
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.memory.filling import RESERVE_BYTES
from hotkv_server.memory.pinning import ArenaPinner
from hotkv_server.node.event_loop import in_slices

log = logging.getLogger(__name__)

DEFAULT_DEADLINE_S = 30.0
PIN_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Resized:
    """arena_bytes: as the arena is now; more than `wanted_bytes` if pins have outlasted the
        deadline.
    holders: who pinned blocks then: numbers of blocks by a name for people.
    """

    wanted_bytes: int
    arena_bytes: int
    moved_blocks: int = 0
    evicted_blocks: int = 0
    holders: Mapping[str, int] = field(default_factory=dict)


class ArenaSize:
    """wanted_bytes: of the change in progress; 0 without one.
    fill: brings new memory in, on a thread.
    keeps_memory: why the arena can't shrink; empty if it can.
    pinner: None if the arena is not pinned for devices.
    """

    def __init__(
        self, core: CacheCore, memory: NodeMemory, run_effects: Callable[[], None]
    ) -> None:
        self.wanted_bytes = 0
        self.fill: Callable[[], None] = lambda: None
        self.keeps_memory = ""
        self.pinner: ArenaPinner | None = None
        self._core, self._memory = core, memory
        self._run_effects = run_effects
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"ArenaSize({self.num_bytes} B)"

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    @property
    def most_bytes(self) -> int:
        """To which it can grow without a restart."""
        return self._memory.arena.num_bytes

    def check(self, wanted_bytes: int) -> int:
        """Returns the size in whole slabs. Raises INVALID_FIELD, or OVERLOADED if memory is
        short."""
        slab_bytes = self._memory.slab_bytes
        wanted_bytes = wanted_bytes // slab_bytes * slab_bytes
        if wanted_bytes > self.most_bytes:
            raise invalid(
                f"arena.bytes: this server's arena can grow to {self.most_bytes >> 20} MiB "
                "(arena.max_bytes, when it started); set arena.bytes and restart it: its blocks "
                "stay"
            )
        self._core.resizing.check(wanted_bytes)
        if wanted_bytes < self.num_bytes and self.keeps_memory:
            raise invalid(f"arena.bytes: {self.keeps_memory}")
        more_bytes = wanted_bytes - self._memory.filling.filled_bytes
        space = os.statvfs(self._memory.directory)
        free_bytes = min(space.f_bavail * space.f_frsize, limits.available_bytes() - RESERVE_BYTES)
        if wanted_bytes > self.num_bytes and more_bytes > free_bytes:
            raise HotKVError(
                Reason.OVERLOADED,
                f"arena.bytes: {more_bytes >> 20} MiB more are needed, {free_bytes >> 20} MiB are "
                "free",
            )
        return wanted_bytes

    async def resize(self, wanted_bytes: int, deadline_s: float = DEFAULT_DEADLINE_S) -> Resized:
        """Raises as `check`. A growth returns at once; its memory comes in in the background. Runs
        to its end even if the caller is cancelled.

        deadline_s: most time for which a shrink waits for pins.
        """
        wanted_bytes = self.check(wanted_bytes)
        work = asyncio.create_task(self._resize(wanted_bytes, deadline_s), name="a resize")
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        return await asyncio.shield(work)

    async def _resize(self, wanted_bytes: int, deadline_s: float) -> Resized:
        async with self._turn:
            self.wanted_bytes = self.check(wanted_bytes)
            try:
                if wanted_bytes >= self.num_bytes:
                    return await self._grow(wanted_bytes)
                return await self._shrink(wanted_bytes, time.monotonic() + deadline_s)
            finally:
                self.wanted_bytes = 0

    def begin(self, wanted_bytes: int) -> None:
        """Resizes in the background; the log has the outcome."""

        async def work() -> None:
            try:
                await self.resize(wanted_bytes)
            except (HotKVError, OSError) as error:
                log.warning("arena not resized to_bytes=%d: %s", wanted_bytes, error)

        begun = asyncio.create_task(work(), name="the resize of the arena")
        self._running.add(begun)
        begun.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Stops a resize where it is: the next server continues from there."""
        if running := list(self._running):
            for one in running:
                one.cancel()
            await asyncio.wait(running)

    async def _grow(self, wanted_bytes: int) -> Resized:
        memory, began_bytes = self._memory, self.num_bytes
        if wanted_bytes > began_bytes:
            await asyncio.to_thread(memory.grow, wanted_bytes)
            if self.pinner is not None:
                await asyncio.to_thread(self.pinner.grow, wanted_bytes)
            self._core.resizing.grow(wanted_bytes)
            self._core.space.grow(memory.filling.filled_bytes, memory.filling.coming_bytes)
            self.fill()
            log.info("arena grows from_bytes=%d to_bytes=%d", began_bytes, wanted_bytes)
        return Resized(wanted_bytes, wanted_bytes)

    async def _shrink(self, wanted_bytes: int, until_s: float) -> Resized:
        resizing, began_bytes = self._core.resizing, self.num_bytes
        # Nothing may be brought in behind the new end meanwhile.
        await asyncio.to_thread(self._memory.filling.halt)
        while why := resizing.why_not_yet(wanted_bytes):
            if time.monotonic() >= until_s:
                self.fill()
                return Resized(wanted_bytes, began_bytes, holders={why: 1})
            await asyncio.sleep(PIN_POLL_S)
        moved, evicted = resizing.moved_blocks, resizing.evicted_blocks
        resizing.begin_shrink(wanted_bytes)
        try:
            while True:
                passed = resizing.shrink(self._copy, time.monotonic())
                await in_slices(passed, self._run_effects)
                if resizing.is_empty or time.monotonic() >= until_s:
                    break
                await asyncio.sleep(PIN_POLL_S)
        finally:
            # Also if the call is cancelled: what is empty goes, the rest stays.
            holders = resizing.holders()
            reached = resizing.end_shrink()
            self._run_effects()
        kept = reached
        if self.pinner is not None:
            kept = await asyncio.to_thread(self.pinner.shrink, reached)
        await asyncio.to_thread(self._memory.shrink, reached, kept)
        self.fill()
        done = Resized(
            wanted_bytes,
            reached,
            resizing.moved_blocks - moved,
            resizing.evicted_blocks - evicted,
            holders,
        )
        log.info(
            "arena shrunk from_bytes=%d to_bytes=%d wanted_bytes=%d moved=%d evicted=%d held_by=%s",
            began_bytes, reached, wanted_bytes, done.moved_blocks, done.evicted_blocks,
            ", ".join(f"{name}: {count}" for name, count in holders.items()) or "nobody",
        )  # fmt: skip
        return done

    def _copy(self, old: Int64s, new: Int64s, size: int) -> None:
        memory: NDArray[np.uint8] = self._memory.arena.array()
        for source, target in zip(old.tolist(), new.tolist(), strict=True):
            memory[target : target + size] = memory[source : source + size]
