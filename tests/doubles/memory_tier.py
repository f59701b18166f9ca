"""A tier in the test's memory, with faults on demand. Its blocks are in a `MemoryStore`, which
outlives the tier as a disk outlives a server; tiers with one store act as nodes that share it."""

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotkv_server.dataplane.plan import Region
from hotkv_server.tiers.protocol import (
    NO_GENERATION,
    NO_GENERATIONS,
    RAISES,
    Blocks,
    Codes,
    Generations,
    Int64s,
    OnGeneration,
    OnGenerations,
    OnProbe,
    OnRead,
    OnWrite,
    Read,
    SharedBlocks,
    Shown,
    TierFacts,
    TierFigures,
    TierMemory,
    Write,
    begun,
)
from hotkv_server.tiers.seals import seal

# --------------------------------------------------------------------------------- A tier in memory


@dataclass
class Faults:
    """May be changed at any time.

    problem: what `Tier.problem` returns.
    is_hung: calls are accepted but don't end.
    is_full: writes are refused.
    fails: keys whose reads and writes fail.
    """

    problem: str = ""
    is_hung: bool = False
    is_full: bool = False
    fails_writes: bool = False
    fails: Callable[[bytes], bool] = lambda key: False


@dataclass
class MemoryStore:
    """Stored blocks and generations.

    places: the core chooses each block's place, as for the disk tier.
    content: (bytes, seal) by key, or by place.
    generations: by fingerprint.
    restored_below: after a restart of the store, lower generations may be from before a flush;
        0: no restart.
    """

    places: bool
    capacity_bytes: int = 1 << 40
    content: dict[bytes | int, tuple[bytes, int]] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)
    restored_below: int = 0

    @property
    def used_bytes(self) -> int:
        return sum(len(content) for content, _ in self.content.values())

    def damage(self, name: bytes | int, at: int = 0) -> None:
        """Flips a bit of a block. `name`: key or place; `at`: offset of the byte."""
        content, value = self.content[name]
        changed = bytearray(content)
        changed[at] ^= 1
        self.content[name] = bytes(changed), value


class MemoryTier:
    """A thread executes calls in order; with `is_manual` the test does, by `step`."""

    def __init__(
        self,
        arena: Region,
        store: MemoryStore,
        *,
        is_manual: bool = False,
        name: str = "memory",
    ) -> None:
        self.faults = Faults()
        self._arena = arena.array()
        self._store = store
        self._facts = TierFacts(name, 1 << 20)
        self._calls: deque[tuple[Callable[[], None], Callable[[], None], int]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._begun_s = 0.0
        self._sums: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        if not is_manual:
            self._thread = threading.Thread(target=self._work, name=f"tier-{name}", daemon=True)
            self._thread.start()

    def __repr__(self) -> str:
        return f"MemoryTier({self._facts.name!r}, {len(self._calls)} calls)"

    def facts(self) -> TierFacts:
        return self._facts

    def read(self, blocks: Blocks, deadline_s: float, on_done: OnRead) -> None:
        def do() -> None:
            codes = _all(Read.FAILED, len(blocks))
            if time.monotonic() <= deadline_s:
                for at in range(len(blocks)):
                    codes[at] = self._read(blocks, at)
            self._count_read(codes, blocks.num_bytes)
            on_done(codes)

        self._add(do, lambda: on_done(_all(Read.FAILED, len(blocks))), blocks.total_bytes)

    def write(self, blocks: Blocks, on_done: OnWrite) -> None:
        def do() -> None:
            codes, seals = _all(Write.FAILED, len(blocks)), np.zeros(len(blocks), np.uint64)
            for at in range(len(blocks)):
                codes[at], seals[at] = self._write(blocks, at)
            stored = codes == Write.STORED
            with self._changed:
                self._sums["written_blocks"] += int(stored.sum())
                self._sums["written_bytes"] += int(blocks.num_bytes[stored].sum())
                self._sums["failed_blocks"] += int((codes == Write.FAILED).sum())
            on_done(codes, seals)

        failed = _all(Write.FAILED, len(blocks)), np.zeros(len(blocks), np.uint64)
        self._add(do, lambda: on_done(*failed), blocks.total_bytes)

    def problem(self) -> str:
        return self.faults.problem

    def stalled_s(self, now_s: float) -> float:
        begun_s = self._begun_s
        return max(0.0, now_s - begun_s) if begun_s else 0.0

    def is_alive(self) -> bool:
        return self._is_closed or self._thread is None or self._thread.is_alive()

    def memory(self) -> TierMemory:
        held_bytes = sum(len(content) for content, _ in self._store.content.values())
        return TierMemory(held_bytes, self._store.capacity_bytes)

    def figures(self) -> TierFigures:
        with self._changed:
            return TierFigures(**self._sums, queued_bytes=sum(size for *_, size in self._calls))

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        while self._calls:
            self._calls.popleft()[1]()

    def step(self) -> bool:
        """Executes the next call. False if none waits or the tier is hung."""
        with self._changed:
            if not self._calls or self.faults.is_hung:
                return False
            do = self._calls[0][0]
            self._begun_s = time.monotonic()
        do()
        with self._changed:
            self._calls.popleft()
            self._begun_s = 0.0
        return True

    def _add(self, do: Callable[[], None], drop: Callable[[], None], num_bytes: int) -> None:
        with self._changed:
            if not self._is_closed:
                self._calls.append((do, drop, num_bytes))
                self._changed.notify_all()
                return
        drop()

    def _work(self) -> None:
        while True:
            with self._changed:
                # A hung tier polls: nobody notifies it when the fault ends.
                while not self._is_closed and (not self._calls or self.faults.is_hung):
                    self._changed.wait(0.01 if self._calls else None)
                if self._is_closed and (not self._calls or self.faults.is_hung):
                    return
            self.step()

    def _name(self, blocks: Any, at: int) -> bytes | int:
        return int(blocks.places[at]) if self._store.places else blocks.keys[at]

    def _slot(self, blocks: Blocks, at: int) -> Codes:
        begin = int(blocks.slots[at])
        return self._arena[begin : begin + int(blocks.num_bytes[at])]

    def _read(self, blocks: Any, at: int) -> Read:
        key = blocks.keys[at]
        if self.faults.problem or self.faults.fails(key):
            return Read.FAILED
        found = self._store.content.get(self._name(blocks, at))
        if found is None:
            # The core chose the place, so it knows that a block is there: a missing one is
            # damaged.
            return Read.CORRUPT if self._store.places else Read.ABSENT
        content, sealed = found
        expected = int(blocks.seals[at]) if self._store.places else sealed
        if len(content) != blocks.num_bytes[at] or seal(key, content) != expected:
            if not self._store.places:
                del self._store.content[key]
            return Read.CORRUPT
        self._slot(blocks, at)[:] = np.frombuffer(content, np.uint8)
        return Read.FOUND

    def _write(self, blocks: Blocks, at: int) -> tuple[Write, int]:
        key, name = blocks.keys[at], self._name(blocks, at)
        if self.faults.problem or self.faults.fails_writes or self.faults.fails(key):
            return Write.FAILED, 0
        if not self._store.places and name in self._store.content:
            return Write.PRESENT, 0
        num_bytes = int(blocks.num_bytes[at])
        if self.faults.is_full or (
            not self._store.places
            and self._store.used_bytes + num_bytes > self._store.capacity_bytes
        ):
            return Write.FULL, 0
        content = self._slot(blocks, at).tobytes()
        sealed = seal(key, content)
        self._store.content[name] = content, sealed
        return Write.STORED, sealed

    def _count_read(self, codes: Codes, num_bytes: Int64s) -> None:
        with self._changed:
            found = codes == Read.FOUND
            self._sums["read_blocks"] += int(found.sum())
            self._sums["read_bytes"] += int(num_bytes[found].sum())
            for code, name in ((Read.CORRUPT, "corrupt_blocks"), (Read.FAILED, "failed_blocks")):
                self._sums[name] += int((codes == code).sum())


def _all(code: int, count: int) -> Codes:
    return np.full(count, code, np.uint8)


# ----------------------------------------------------------------------------- One that nodes share

_fresh = itertools.count(begun(1 << 51), RAISES)


class SharedMemoryTier(MemoryTier):
    """Implements `SharedTier`.

    on_generation: called with (fingerprint, generation) if the store has another than expected,
        as in `RemoteTier`.
    """

    def __init__(
        self,
        arena: Region,
        store: MemoryStore,
        *,
        on_generation: Callable[[str, int], None] = lambda fingerprint, generation: None,
        is_manual: bool = False,
        name: str = "shared",
    ) -> None:
        assert not store.places, "a shared tier places by itself"
        self._on_generation = on_generation
        super().__init__(arena, store, is_manual=is_manual, name=name)

    def probe(
        self,
        keys: Sequence[bytes],
        deadline_s: float,
        on_done: OnProbe,
        generations: Generations = NO_GENERATIONS,
    ) -> None:
        done = self._checked(generations, on_done)

        def do() -> None:
            is_late = time.monotonic() > deadline_s
            found = [self._probe(key) if not is_late else Read.FAILED for key in keys]
            done(np.array(found, np.uint8))

        self._add(do, lambda: done(_all(Read.FAILED, len(keys))), 0)

    def forget(self, keys: Sequence[bytes]) -> None:
        def do() -> None:
            for key in keys:
                self._store.content.pop(key, None)

        self._add(do, lambda: None, 0)

    def read(self, blocks: SharedBlocks, deadline_s: float, on_done: OnRead) -> None:
        super().read(blocks, deadline_s, self._checked(blocks.generations, on_done))

    def generations(
        self, fingerprints: Sequence[str], deadline_s: float, on_done: OnGenerations
    ) -> None:
        def do() -> None:
            if self.faults.problem:
                on_done(None)
                return
            generations = self._store.generations
            for name in fingerprints:
                generations.setdefault(name, next(_fresh))
            shown = {name: generations[name] for name in fingerprints}
            on_done(Shown(shown, self._store.restored_below))

        self._add(do, lambda: on_done(None), 0)

    def raise_generation(
        self, fingerprint: str, floor: int, on_done: OnGeneration, is_retry: bool = False
    ) -> None:
        def do() -> None:
            if self.faults.problem:
                on_done(None)
                return
            generation = max(
                self._store.generations.get(fingerprint, 0) + 1, floor + 1, next(_fresh)
            )
            self._store.generations[fingerprint] = generation
            on_done(generation)

        self._add(do, lambda: on_done(None), 0)

    def _probe(self, key: bytes) -> Read:
        if self.faults.problem or self.faults.fails(key):
            return Read.FAILED
        return Read.FOUND if key in self._store.content else Read.ABSENT

    def _checked(self, generations: Generations, on_done: OnRead) -> OnRead:
        """Checks generations after all blocks are read: if one differs, all become ABSENT, and
        `on_generation` is called."""

        def done(codes: Codes) -> None:
            stored = self._store.generations
            changed = {name for name, known in generations.items() if stored.get(name) != known}
            if changed and not np.all(codes == Read.FAILED):
                for name in changed:
                    self._on_generation(name, stored.get(name, NO_GENERATION))
                codes[:] = Read.ABSENT
            on_done(codes)

        return done
