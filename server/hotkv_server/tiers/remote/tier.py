"""A tier in a remote store: queues calls, and executes them over a few connections.

Always true: a call ends once, and nothing touches its slots (places in the arena) afterwards. If a
connection may still receive bytes for a slot, the connection is closed before the call ends. While
the store has a known problem, calls end at once as FAILED, and the tier tries to connect again.
Nodes read each other's blocks; if two nodes write the same key, the later write gets PRESENT.
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
"""Splits the blocks of a call into parts, and yields each part as a slice. Argument: the sizes of
the blocks in bytes, int64 [n]."""


CONNECTION_BYTES = 128 << 10
"""Bytes of a connection's buffers. They are small, because the values of blocks move directly
between socket and slot."""


class RemoteTier:
    """A tier in a remote store, such as Valkey or S3; see the module and `SharedTier`.

    A read ends at its deadline at the latest, with one exception: if its thread must connect first,
    the read may end up to `RemoteLimits.connect_timeout_s` later. Its slots (places in the arena)
    are then untouched.

    `workers`: the threads that execute calls.
    `cut_reads`, `cut_writes`: split reads and writes into parts.
    `on_generation`: called with a key space's fingerprint and its generation in the store (a number
        that each flush raises; NO_GENERATION if there is none), if a call has expected another
        generation. It is called before that call ends, from any thread, and must not block.
    `staged`: staging memory for encoded (compressed) blocks; the tier closes it. None if the tier
        does not encode blocks.
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
        # The fingerprints of the key spaces about which `_warn` has warned.
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._workers!r})"

    def facts(self) -> TierFacts:
        """Returns the tier's properties; see `Tier.facts`."""
        return self._facts

    def probe(
        self,
        keys: Sequence[bytes],
        deadline_s: float,
        on_done: OnProbe,
        generations: Generations = NO_GENERATIONS,
    ) -> None:
        """Asks the store which blocks it has; see `SharedTier.probe`."""
        call = self._call(lambda call: on_done(call.codes), len(keys))

        def part(rows: slice) -> Part:
            def do(client: Client, until_s: float) -> None:
                call.refuse(client.probe(keys[rows], generations, call.codes[rows], until_s))

            return Part(call, do, deadline_s, moves_blocks=False)

        parts = [part(rows) for rows in cut_keys(len(keys))]
        self._workers.submit(call, parts)

    def read(self, blocks: Blocks, deadline_s: float, on_done: OnRead) -> None:
        """Reads blocks into their slots; see `Tier.read`."""

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

    def write(self, blocks: Blocks, on_done: OnWrite) -> None:
        """Writes blocks from their slots (places in the arena); see `Tier.write`. Ignores
        `blocks.generations`: the keys contain the generation (number that each flush raises), and
        no read finds a block under the key of an old generation."""

        def end(call: RemoteCall) -> None:
            stored = call.codes == Write.STORED
            self._count(
                written_blocks=int(stored.sum()),
                written_bytes=int(blocks.num_bytes[stored].sum()),
                failed_blocks=int((call.codes == Write.FAILED).sum()),
            )
            on_done(call.codes, np.zeros(len(blocks), np.uint64))

        call = self._call(end, len(blocks), blocks.total_bytes)
        depths = blocks.depths if len(blocks.depths) else np.zeros(len(blocks), np.int64)

        def part(rows: slice) -> Part:
            def do(client: Client, until_s: float) -> None:
                keys, slots = blocks.keys[rows], self._slots(blocks, rows)
                client.write(keys, slots, depths[rows].tolist(), call.codes[rows], until_s)

            return Part(call, do, is_write=True)

        parts = [part(rows) for rows in self._cut_writes(blocks.num_bytes)]
        self._workers.submit(call, parts)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Starts to remove blocks; see `SharedTier.forget`."""
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
        """Asks the store for key spaces' generations (numbers that each flush raises); see
        `SharedTier.generations`."""
        call = self._call(lambda call: on_done(call.shown))

        def do(client: Client, until_s: float) -> None:
            call.shown = client.generations(fingerprints, until_s)
            self._warn({one for one in fingerprints if not call.shown.generations.get(one)})

        self._workers.submit_control(call, Part(call, do, deadline_s))

    def raise_generation(
        self, fingerprint: str, floor: int, on_done: OnGeneration, is_retry: bool = False
    ) -> None:
        """Raises the generation (number that each flush raises) of a key space (a model in a
        configuration), which flushes its blocks in the store; see `SharedTier.raise_generation`."""
        call = self._call(lambda call: on_done(call.generation))

        def do(client: Client, until_s: float) -> None:
            call.generation = client.raise_generation(fingerprint, floor, until_s, is_retry)

        self._workers.submit_control(call, Part(call, do))

    def problem(self) -> str:
        """Returns why the tier is unusable; see `Tier.problem`."""
        return self._workers.problem

    def stalled_s(self, now_s: float) -> float:
        """Returns how long a call has waited for the store; see `Tier.stalled_s`."""
        return self._workers.stalled_s(now_s)

    def is_alive(self) -> bool:
        """Returns False if a thread of the tier has died; see `Tier.is_alive`."""
        return self._workers.is_alive()

    def memory(self) -> TierMemory:
        """Returns the memory of the connections and the staging memory; see `Tier.memory`."""
        own, staged_bytes = self._own_memory(), self._staged.num_bytes if self._staged else 0
        most_bytes = own.most_bytes + staged_bytes if own.most_bytes else 0
        return TierMemory(own.held_bytes + staged_bytes, most_bytes)

    def figures(self) -> TierFigures:
        """Returns the tier's counts since its start; see `Tier.figures`."""
        with self._lock:
            return TierFigures(**self._sums)

    def close(self) -> None:
        """Ends all calls, then frees connections and memory; see `Tier.close`. Waits for calls
        under way, at most for the time limits of the settings."""
        if self._staged is not None:
            self._staged.stop()
        self._workers.close()
        if self._staged is not None:
            self._staged.close()

    def _own_memory(self) -> TierMemory:
        """Returns the memory of the connections' buffers."""
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
        """Warns, once for each key space (a model in a configuration), that its generation in the
        store (a number that each flush raises) is missing or can't be used. Called only by the
        thread of control calls (calls about generations)."""
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
