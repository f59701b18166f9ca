"""Times what a server and the host's memory do. All times in seconds; each measure takes about as
long as it is given."""

import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_client.command.host_bench.own_server import BenchError
from hotkv_client.testing.paged import PagedEngine
from hotkv_client.types import BlockRun, GroupHashes, LoadRun
from hotkv_proto.blocks import TransferStatus

LAYERS, PAGE_BYTES = 32, 64 << 10
BLOCK_BYTES = LAYERS * PAGE_BYTES
"""2 MiB: 16 tokens of an 8B model with 8 KV heads of 128 in bfloat16, 128 KiB a token."""
OPERATION_BLOCKS = 32
LOOKED_UP = 1000
MEMCPY_BYTES = 256 << 20
LEAST_ROUNDS = 5
HASH_BYTES = 32
CALL_S = 30.0


@dataclass(frozen=True, slots=True)
class Times:
    """Of one operation of `num_bytes`: a value for each time that it was done."""

    seconds: tuple[float, ...]
    num_bytes: int = 0

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p99_s(self) -> float:
        return float(np.percentile(self.seconds, 99))

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.median_s


def timed(work: Callable[[], float | None], seconds: float, num_bytes: int = 0) -> Times:
    """Does it for about so long, LEAST_ROUNDS times at least; once before, which is not counted.
    `work` may return its own seconds."""
    work()
    found: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(found) < LEAST_ROUNDS:
        began_s = time.perf_counter()
        own_s = work()
        found.append(time.perf_counter() - began_s if own_s is None else own_s)
    return Times(tuple(found), num_bytes)


def memcpy(num_threads: int, seconds: float) -> Times:
    """Copies of MEMCPY_BYTES within memory, cut over threads."""
    source, target = (np.ones(MEMCPY_BYTES, np.uint8) for _ in range(2))
    bounds = np.linspace(0, MEMCPY_BYTES, num_threads + 1).astype(int).tolist()

    def part(at: int) -> None:
        # numpy lets other threads run while it copies.
        np.copyto(target[bounds[at] : bounds[at + 1]], source[bounds[at] : bounds[at + 1]])

    def copy() -> None:
        threads = [threading.Thread(target=part, args=(at,)) for at in range(1, num_threads)]
        for thread in threads:
            thread.start()
        part(0)
        for thread in threads:
            thread.join()

    return timed(copy, seconds, MEMCPY_BYTES)


def hashes(count: int) -> list[bytes]:
    """Hashes that nobody else has."""
    data = os.urandom(count * HASH_BYTES)
    return [data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES)]


class BenchEngine:
    """An engine's worker, with blocks of BLOCK_BYTES. Close it."""

    def __init__(self, target: str) -> None:
        """Raises BenchError if it can't connect."""
        self._engine = PagedEngine(
            target,
            layers=LAYERS,
            num_blocks=2 * OPERATION_BLOCKS,
            page_bytes=PAGE_BYTES,
            model="hotkv-bench",
        )
        try:
            self._engine.connect()
        except TimeoutError as error:
            self._engine.close()
            raise BenchError(str(error)) from error
        self._engine.kv[:] = 7
        self._session = self._engine.session
        order = np.random.default_rng(1).permutation(2 * OPERATION_BLOCKS).astype(np.int32)
        self._sources, self._targets = order[:OPERATION_BLOCKS], order[OPERATION_BLOCKS:]
        self._number = 0

    def close(self) -> None:
        self._engine.close()

    def _name(self) -> str:
        self._number += 1
        return f"bench-{self._number}"

    def _stored(self, names: list[bytes]) -> float:
        """Seconds of a store of these blocks. Raises BenchError."""
        name, began_s = self._name(), time.perf_counter()
        run = BlockRun(0, names, self._sources[: len(names)])
        result = self._session.store(name, name, [run], CALL_S).result(CALL_S)
        if result.status is not TransferStatus.DONE:
            raise BenchError(f"a store ended as {result.status.name.lower()}")
        return time.perf_counter() - began_s

    def _loaded(self, names: list[bytes], *, with_lease: bool) -> float:
        """Seconds of a load of these blocks, which are there. Raises BenchError."""
        name, began_s = self._name(), time.perf_counter()
        grant = self._session.acquire(name, [GroupHashes(0, names)]).result(CALL_S)
        if not grant.pinned[0].all():
            raise BenchError("stored blocks are not there any more: give a larger --arena-mib")
        leased_s = time.perf_counter()
        positions: NDArray[np.int32] = np.arange(len(names), dtype=np.int32)
        run = LoadRun(0, positions, self._targets[: len(names)])
        result = self._session.load(name, name, [run], CALL_S).result(CALL_S)
        ended_s = time.perf_counter()
        self._session.release(name)
        if result.status is not TransferStatus.DONE:
            raise BenchError(f"a load ended as {result.status.name.lower()}")
        return ended_s - (began_s if with_lease else leased_s)

    def lookups(self, seconds: float) -> Times:
        """Of LOOKED_UP blocks, half of them there, in the table that engines share."""
        known = hashes(OPERATION_BLOCKS)
        self._stored(known)
        asked = [*known, *hashes(LOOKED_UP - len(known))]

        def look_up() -> None:
            if self._session.probe(0, asked) is None:
                raise BenchError("the server shares no block table with this user")

        return timed(look_up, seconds)

    def calls(self, seconds: float) -> Times:
        """Of the smallest call there is: a question and its answer."""
        return timed(lambda: self._session.ping(CALL_S), seconds)

    def stores(self, seconds: float) -> Times:
        """Of new blocks."""
        num_bytes = OPERATION_BLOCKS * BLOCK_BYTES
        return timed(lambda: self._stored(hashes(OPERATION_BLOCKS)), seconds, num_bytes)

    def loads(self, seconds: float) -> Times:
        """Of blocks that were stored before; the lease apart."""
        known = hashes(OPERATION_BLOCKS)
        self._stored(known)
        num_bytes = OPERATION_BLOCKS * BLOCK_BYTES
        return timed(lambda: self._loaded(known, with_lease=False), seconds, num_bytes)

    def small_hits(self, seconds: float) -> Times:
        """Lease and load of one block: what a hit takes at least."""
        known = hashes(1)
        self._stored(known)
        return timed(lambda: self._loaded(known, with_lease=True), seconds, BLOCK_BYTES)
