"""Measures how long each operation on a large cache blocks the server's event loop.

`operations` works on a full core of `bench.core`: calls of the largest allowed size, and
background work. Operations in parts are measured part by part, as `node.event_loop` runs them.
Figures are processor time: the wall clock includes the machine's other work.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hotkv_proto.blocks import Retention
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.messages.cache import MAX_LOADED_BLOCKS, MAX_STORED_BLOCKS
from hotkv_proto.table import SLOT_ALIGN, Words
from hotkv_server.cache import inspect
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.removal import finished
from hotkv_server.cache.values import MAX_BLOCKS_PER_CALL, HashList, LoadPositions, Run
from hotkv_server.dataplane.plan import Region
from hotkv_server.events.drive import removed_events
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.node.persistence import USE_PARTS, UseNotes
from hotkv_server.startup.process import SWITCH_INTERVAL_S

FLUSHED_BLOCKS = 1 << 18
MAX_TENSORS = 4096
"""About what fits into the message that describes an engine's memory."""
LEASES = 16
SMALL_STORE_BLOCKS = 64
KEPT = Retention(pin=True, ttl_s=50.0)


@dataclass(frozen=True, slots=True)
class Hold:
    """longest_cpu_s, longest_s: processor and wall time of the longest part.
    total_s: wall time of all parts.
    """

    name: str
    longest_cpu_s: float
    longest_s: float
    total_s: float
    num_parts: int


class Holds:
    def __init__(
        self, core: CacheCore, session: int, now_s: float, new_hashes: Callable[[int], Words]
    ) -> None:
        self.core = core
        self.session = session
        self.now_s = now_s
        self.new_hashes = new_hashes
        self.rows: list[Hold] = []
        self._num_stores = 0

    def once(self, name: str, call: Callable[[], object]) -> None:
        """Measures an operation that has one part."""

        def one() -> Iterator[None]:
            call()
            yield

        self.parts(name, one())

    def parts(self, name: str, steps: Iterator[object]) -> None:
        times_s = [(time.thread_time(), time.perf_counter())]
        for _ in steps:
            times_s.append((time.thread_time(), time.perf_counter()))
        times_s.append((time.thread_time(), time.perf_counter()))
        lengths_s = np.diff(times_s, axis=0)
        longest_cpu_s, longest_s = lengths_s.max(axis=0).tolist()
        self.rows.append(
            Hold(
                name,
                longest_cpu_s,
                longest_s,
                float(lengths_s[:, 1].sum()),
                max(1, len(lengths_s) - 1),
            )
        )

    def open(self, name: str, slot_bytes: int) -> tuple[int, int]:
        """A session with a new key space: the numbers of both."""
        groups = (GroupSpec(GroupKind.FULL_ATTENTION, 16, (slot_bytes,)),)
        record = self.core.open_session(
            name, "tool", KeySpace("bench", name, "bfloat16", groups, 16), self.now_s
        )
        return record.number, record.key_space_id

    def store(self, name: str, session: int, hashes: Words, *, succeeds: bool = True) -> None:
        """Three operations: begin (in parts), end, and the events about evicted blocks."""
        runs, lease_id = [Run(0, hashes)], f"store {self._num_stores}"
        self._num_stores += 1
        self.now_s += 0.2
        self.parts(
            f"{name}: begin",
            self.core.begin_store(session, lease_id, lease_id, runs, 0, 0.0, self.now_s),
        )
        self.once(
            f"{name}: end", lambda: self.core.end_store(session, lease_id, succeeds, self.now_s)
        )
        self.once(f"{name}: events", lambda: removed_events(self.core.take_effects(), 0))

    def fill(self, session: int, num_blocks: int) -> Words:
        """Stores blocks unmeasured; returns their hashes."""
        kept, hashes = len(self.rows), self.new_hashes(num_blocks)
        for start in range(0, num_blocks, MAX_STORED_BLOCKS):
            self.store("", session, np.ascontiguousarray(hashes[start : start + MAX_STORED_BLOCKS]))
        del self.rows[kept:]
        return hashes

    def fill_up(self) -> None:
        """Stores until no slab is free."""
        while self.core.space.pool.num_free_slabs:
            self.fill(self.session, MAX_STORED_BLOCKS)


def operations(
    core: CacheCore, session: int, now_s: float, new_hashes: Callable[[int], Words]
) -> list[Hold]:
    """On a core whose slots of SLOT_ALIGN bytes are all in use; it is empty afterwards."""
    holds = Holds(core, session, now_s, new_hashes)
    hashes = holds.fill(session, MAX_BLOCKS_PER_CALL)
    _reads(holds, hashes)
    _background(holds)
    _stores(holds)
    _flushes(holds)
    _layouts(holds)
    return holds.rows


def _reads(holds: Holds, hashes: Words) -> None:
    core, session, lists = holds.core, holds.session, [HashList(0, hashes)]
    holds.once("lookup", lambda: core.lookup(1, lists))
    holds.once("touch", lambda: core.touch(session, lists, holds.now_s))
    holds.once("lease", lambda: core.acquire(session, "lease", lists, 0.0, holds.now_s))
    positions = [LoadPositions(0, np.arange(MAX_LOADED_BLOCKS))]
    holds.once("load: begin", lambda: core.begin_load(session, "load", "lease", positions))
    holds.once("load: end", lambda: core.end_load(session, "load", True))
    holds.once("release", lambda: core.release(session, "lease"))
    holds.parts("report that keeps blocks", core.use(session, lists[0], holds.now_s, KEPT))
    holds.now_s += 2 * KEPT.ttl_s
    holds.parts("end of holds", core.expire(holds.now_s))
    for number in range(LEASES):
        core.acquire(session, f"lease {number}", lists, 0.0, holds.now_s)
    holds.parts("end of a session with leases", core.end_leases(session))
    for number in range(LEASES):
        core.acquire(session, f"lease {number}", lists, 1.0, holds.now_s)
    holds.now_s += 10.0
    holds.parts("leases expire", core.expire(holds.now_s))


def _background(holds: Holds) -> None:
    core = holds.core
    holds.parts("metrics, status (census)", inspect.census(core))
    holds.once("figures of the pool", core.space.pool.figures)
    notes, verifier = (
        UseNotes(core.space),
        Verifier(core, Region(0, core.config.arena_bytes, "no memory")),
    )
    holds.parts("times of last use", (notes.take(USE_PARTS) for _ in range(USE_PARTS)))

    def scrub() -> Iterator[None]:
        for _ in range(LEASES):
            batch = verifier.next_batch()
            if batch is not None:
                cases = verifier.cases(batch)
                verifier.settle(cases, [np.ones(len(case.reuses), np.bool_) for case in cases])
            yield

    holds.parts("verifier, next batches", scrub())


def _stores(holds: Holds) -> None:
    core, session = holds.core, holds.session
    holds.store("store into a full cache", session, holds.new_hashes(MAX_STORED_BLOCKS))
    holds.store("store that fails", session, holds.new_hashes(MAX_STORED_BLOCKS), succeeds=False)
    holds.fill_up()
    other, other_id = holds.open("other slot size", 2 * SLOT_ALIGN)
    holds.store("first store of another slot size", other, holds.new_hashes(SMALL_STORE_BLOCKS))
    holds.store("large store of another slot size", other, holds.new_hashes(MAX_STORED_BLOCKS))
    large, large_id = holds.open("slots of slabs", core.config.slab_bytes + SLOT_ALIGN)
    holds.store("store of slots larger than a slab", large, holds.new_hashes(SMALL_STORE_BLOCKS))
    rare, _ = holds.open("rare slot size", 3 * SLOT_ALIGN)
    holds.fill(rare, SMALL_STORE_BLOCKS)
    holds.fill_up()
    holds.store("store of a rare slot size", rare, holds.new_hashes(MAX_STORED_BLOCKS // 8))
    named = holds.fill(other, MAX_STORED_BLOCKS)
    holds.parts("evict by hashes", core.evict(other_id, 0, named))
    holds.parts("evict a key space", core.evict_all(large_id))
    core.take_effects()


def _flushes(holds: Holds) -> None:
    core, session = holds.core, holds.session
    other, other_id = holds.open("flushed", SLOT_ALIGN)
    # Slabs have blocks of both key spaces, so the flush empties none.
    for _ in range(0, FLUSHED_BLOCKS, MAX_STORED_BLOCKS // 8):
        holds.fill(other, MAX_STORED_BLOCKS // 8)
        holds.fill(session, MAX_STORED_BLOCKS // 8)
    holds.parts(f"flush of {FLUSHED_BLOCKS:,} blocks", core.flush(other_id))
    core.take_effects()
    holds.store("store into the gaps", session, holds.new_hashes(MAX_STORED_BLOCKS))
    lists = [HashList(0, holds.fill(other, MAX_BLOCKS_PER_CALL))]
    core.acquire(other, "pinned", lists, 0.0, holds.now_s)
    holds.parts("flush of leased blocks", core.flush(other_id))
    holds.parts("end of a session with flushed blocks", core.end_leases(other))
    reserved = [Run(0, holds.new_hashes(MAX_STORED_BLOCKS))]
    finished(core.begin_store(other, "dies", "dies", reserved, 0, 0.0, holds.now_s))
    holds.once(
        "death of a session that stores: copy",
        lambda: core.end_store(other, "dies", False, holds.now_s),
    )
    holds.parts("death of a session that stores: leases", core.end_leases(other))
    holds.parts("flush of all blocks", core.flush(1))
    core.take_effects()


def _layouts(holds: Holds) -> None:
    """The check runs in a thread and delays the loop only by the GIL. Shortest of three: a
    preempted holder of the GIL makes it too long."""
    tensors = tuple(
        PageTensor(0, "kv", at * SLOT_ALIGN, MAX_TENSORS * SLOT_ALIGN, 64, at * 64)
        for at in range(MAX_TENSORS)
    )
    groups = (GroupSpec(GroupKind.FULL_ATTENTION, 16, (64 * MAX_TENSORS,)),)

    async def lengths_s() -> list[float]:
        layout = Layout(0, 4, (MemoryHandle("kv", 4 * MAX_TENSORS * SLOT_ALIGN),), tensors)
        preparing = asyncio.create_task(asyncio.to_thread(layout.prepare, groups, {}))
        times_s = [time.perf_counter()]
        while not preparing.done():
            await asyncio.sleep(0)
            times_s.append(time.perf_counter())
        await preparing
        return [float(length_s) for length_s in np.diff(times_s)]

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    best = min((asyncio.run(lengths_s()) for _ in range(3)), key=max)
    # The loop's wait for the GIL is no processor time.
    holds.rows.append(
        Hold(f"layout of {MAX_TENSORS:,} tensors", max(best), max(best), sum(best), len(best))
    )
