"""A tier in a remote store: queues calls and executes them over a few connections.

Always true: a call ends once, and nothing touches its slots afterwards: a connection that may
still receive bytes for them is closed before. While the store has a known problem, calls end as
FAILED. Nodes read each other's blocks; of two writes of a key, the later gets PRESENT.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hotkv_server.dataplane.plan import Region
from hotkv_server.tiers.compression.staged import Staged
from hotkv_server.tiers.protocol import (
    NO_GENERATIONS,
    Blocks,
    Generations,
    Int64s,
    OnGeneration,
    OnGenerations,
    OnProbe,
    OnRead,
    OnWrite,
    Read,
    SharedBlocks,
    TierFacts,
    TierFigures,
    TierMemory,
    Write,
)
from hotkv_server.tiers.remote.calls import Part, RemoteCall, cut, cut_keys
from hotkv_server.tiers.remote.client import Client
from hotkv_server.tiers.remote.workers import Workers

log = logging.getLogger(__name__)

Cut = Callable[[Int64s], Iterator[slice]]
"""Sizes of a call's blocks, int64 [n], to the slices of its parts."""


CONNECTION_BYTES = 128 << 10
"""A connection's buffers: small, as blocks move between socket and slot."""


class RemoteTier:
    """See the module and `SharedTier`. A read that must first connect may end
    `Timeouts.connect_s` after its deadline, with its slots untouched.

    `on_generation`: called with fingerprint and the store's generation if a call expected another,
        before that call ends; any thread; must not block.
    `staged`: the tier closes it. None: blocks are not encoded.
    """

    def __init__(
        self,
        facts: TierFacts,
        arena: Region,
        workers: Workers,
        *,
        cut_reads: Cut = cut,
        cut_writes: Cut = cut,
        on_generation: Callable[[str, int], None],
        staged: Staged | None = None,
    ) -> None:
        self._staged = staged
        self._facts = facts
        self._arena = arena.array().data
        self._workers = workers
        self._cut_reads = cut_reads
        self._cut_writes = cut_writes
        self._on_generation = on_generation
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        # Key spaces that `_warn` has named.
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._workers!r})"

    def facts(self) -> TierFacts:
        return self._facts

    def probe(
        self,
        keys: Sequence[bytes],
        deadline_s: float,
        on_done: OnProbe,
        generations: Generations = NO_GENERATIONS,
    ) -> None:
        call = self._call(lambda call: on_done(call.codes), len(keys))

        def part(rows: slice) -> Part:
            def do(client: Client, until_s: float) -> None:
                call.refuse(client.probe(keys[rows], generations, call.codes[rows], until_s))

            return Part(call, do, deadline_s, moves_blocks=False)

        parts = [part(rows) for rows in cut_keys(len(keys))]
        self._workers.submit(call, parts)

    def read(self, blocks: SharedBlocks, deadline_s: float, on_done: OnRead) -> None:
        def end(call: RemoteCall) -> None:
            self._count_read(call, blocks)
            on_done(call.codes)

        call = self._call(end, len(blocks), blocks.total_bytes)

        def part(rows: slice) -> Part:
            def do(client: Client, until_s: float) -> None:
                keys, codes = blocks.keys[rows], call.codes[rows]
                slots = self._slots(blocks, rows)
                call.refuse(client.read(keys, slots, blocks.generations, codes, until_s))

            return Part(call, do, deadline_s)

        parts = [part(rows) for rows in self._cut_reads(blocks.num_bytes)]
        self._workers.submit(call, parts)

    def write(self, blocks: SharedBlocks, on_done: OnWrite) -> None:
        """Ignores the generations: no read finds a key with an old one."""

        def end(call: RemoteCall) -> None:
            stored = call.codes == Write.STORED
            self._count(
                written_blocks=int(stored.sum()),
                written_bytes=int(blocks.num_bytes[stored].sum()),
                failed_blocks=int((call.codes == Write.FAILED).sum()),
            )
            on_done(call.codes, np.zeros(len(blocks), np.uint64))

        call = self._call(end, len(blocks), blocks.total_bytes)

        def part(rows: slice) -> Part:
            def do(client: Client, until_s: float) -> None:
                keys, slots = blocks.keys[rows], self._slots(blocks, rows)
                client.write(keys, slots, blocks.depths[rows].tolist(), call.codes[rows], until_s)

            return Part(call, do, is_write=True)

        parts = [part(rows) for rows in self._cut_writes(blocks.num_bytes)]
        self._workers.submit(call, parts)

    def forget(self, keys: Sequence[bytes]) -> None:
        call = self._call(lambda call: None)

        def part(rows: slice) -> Part:
            return Part(
                call, lambda client, until_s: client.forget(keys[rows], until_s), is_write=True
            )

        parts = [part(rows) for rows in cut_keys(len(keys))]
        self._workers.submit(call, parts)

    def generations(
        self, fingerprints: Sequence[str], deadline_s: float, on_done: OnGenerations
    ) -> None:
        call = self._call(lambda call: on_done(call.shown))

        def do(client: Client, until_s: float) -> None:
            call.shown = client.generations(fingerprints, until_s)
            self._warn({one for one in fingerprints if not call.shown.generations.get(one)})

        self._workers.submit_control(call, Part(call, do, deadline_s))

    def raise_generation(
        self, fingerprint: str, floor: int, on_done: OnGeneration, is_retry: bool = False
    ) -> None:
        call = self._call(lambda call: on_done(call.generation))

        def do(client: Client, until_s: float) -> None:
            call.generation = client.raise_generation(fingerprint, floor, until_s, is_retry)

        self._workers.submit_control(call, Part(call, do))

    def problem(self) -> str:
        return self._workers.problem

    def stalled_s(self, now_s: float) -> float:
        return self._workers.stalled_s(now_s)

    def is_alive(self) -> bool:
        return self._workers.is_alive()

    def memory(self) -> TierMemory:
        own, staged_bytes = self._own_memory(), self._staged.num_bytes if self._staged else 0
        most_bytes = own.most_bytes + staged_bytes if own.most_bytes else 0
        return TierMemory(own.held_bytes + staged_bytes, most_bytes)

    def figures(self) -> TierFigures:
        with self._lock:
            return TierFigures(**self._sums)

    def close(self) -> None:
        """Waits for calls under way, within the settings' time limits."""
        if self._staged is not None:
            self._staged.stop()
        self._workers.close()
        if self._staged is not None:
            self._staged.close()

    def _own_memory(self) -> TierMemory:
        num_bytes = self._workers.num_connections * CONNECTION_BYTES
        return TierMemory(num_bytes, num_bytes)

    def _call(
        self, on_end: Callable[[RemoteCall], None], num_blocks: int = 0, num_bytes: int = 0
    ) -> RemoteCall:
        def end(call: RemoteCall) -> None:
            self._count(queued_bytes=-num_bytes)
            for fingerprint, generation in call.changed.items():
                self._on_generation(fingerprint, generation)
            if call.changed:
                call.codes[:] = Read.ABSENT
            on_end(call)

        self._count(queued_bytes=num_bytes)
        return RemoteCall(num_blocks, end)

    def _warn(self, unusable: set[str]) -> None:
        """Warns once per key space of a missing or unusable generation. Only on the thread of
        control calls."""
        for fingerprint in sorted(unusable - self._warned):
            log.warning(
                "tier=%s has no usable generation of fingerprint=%s, so it serves no block of "
                "this key space. If it lasts, let hotkv read and write it, make room, or remove it",
                self._facts.name,
                fingerprint,
            )
        self._warned |= unusable

    def _slots(self, blocks: Blocks, rows: slice) -> list[memoryview]:
        begins, sizes = blocks.slots[rows].tolist(), blocks.num_bytes[rows].tolist()
        return [
            self._arena[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)
        ]

    def _count_read(self, call: RemoteCall, blocks: Blocks) -> None:
        found = call.codes == Read.FOUND
        self._count(
            read_blocks=int(found.sum()),
            read_bytes=int(blocks.num_bytes[found].sum()),
            corrupt_blocks=int((call.codes == Read.CORRUPT).sum()),
            failed_blocks=int((call.codes == Read.FAILED).sum()),
        )

    def _count(self, **changes: int) -> None:
        with self._lock:
            self._sums.update(changes)
