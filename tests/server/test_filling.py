"""Tests a server that is ready before its arena has all memory."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import BlockResult, BlockRun, GroupHashes, TransferStatus
from hotkv_server.memory.mapping import COLLAPSE_BYTES
from tests.doubles import faults
from tests.server.places import Place, load, opened
from tests.server.support import block_ids, hashes
from tests.support.waiting import wait_for

GIB = 1 << 30
ARENA = 2 * GIB
LAYERS, PAGE_BYTES = 4, 1 << 16
BLOCK_BYTES = LAYERS * PAGE_BYTES
FIRST = COLLAPSE_BYTES // BLOCK_BYTES
"""Blocks that fit into the memory that `Dammed` allows at first."""
NUM_BLOCKS = 4 * FIRST


class Dammed(Place):
    """A `Place` whose servers may allocate only as many bytes of the arena as `let` says."""

    layers, page_bytes, num_blocks = LAYERS, PAGE_BYTES, NUM_BLOCKS

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.dam = folder / "dam"
        self.dam.write_text("0")

    def let(self, what: int | str) -> None:
        scratch = self.dam.with_suffix(".new")
        scratch.write_text(str(what))
        scratch.replace(self.dam)

    def begin(self, *flags: str, patience_s: float = 0.1) -> Server:
        """`patience_s`: how long stores wait for memory."""
        command = faults.command("dam", self.dam, str(patience_s))
        self.server = made = Server(self.folder, str(ARENA), *flags, command=command)
        made.wait_ready()
        engine = self.engine or self.connect()
        assert engine.session.wait_connected(20)
        return made

    def store(self, blocks: list[bytes], first: int = 0) -> list[int]:
        """Stores block ids from `first` on; a result for each."""
        assert self.engine is not None
        name, runs = os.urandom(8).hex(), [BlockRun(0, blocks, block_ids(len(blocks), first))]
        result = self.engine.session.store(name, name, runs, 20).result(60)
        assert result.status is TransferStatus.DONE
        return list(result.results[0].tolist())

    def loads_from(self, blocks: list[bytes], first: int = 0) -> bool:
        """True if they load with the bytes of block ids from `first` on."""
        assert self.engine is not None
        kv, count, free = self.engine.kv, len(blocks), 2 * FIRST
        assert load(self.engine, blocks, free) is TransferStatus.DONE
        return np.array_equal(kv[:, first : first + count], kv[:, free : free + count])

    @property
    def capacity_bytes(self) -> float:
        return self.counter("arena_capacity_bytes")


@pytest.fixture
def place() -> Iterator[Dammed]:
    with opened(Dammed, ARENA + (256 << 20)) as made:
        yield made
        made.let(ARENA)


@pytest.mark.long
def test_server_serves_while_filling_survives_a_kill(place: Dammed) -> None:
    status = place.begin().status()
    assert place.server is not None and place.engine is not None
    assert place.capacity_bytes == COLLAPSE_BYTES
    assert place.counter("arena_full_capacity_bytes") == ARENA
    assert status["progress"] == "bringing the arena in: 32 of 2048 MiB (2%)"
    assert status["tiers"][0]["capacity_byte_count"] == COLLAPSE_BYTES
    blocks = hashes(NUM_BLOCKS)
    assert set(place.store(blocks[: FIRST - 10])) == {BlockResult.STORED}
    # These find no room yet, and evict nothing.
    results = place.store(blocks[FIRST - 10 : FIRST + 10], FIRST - 10)
    assert results == [BlockResult.STORED] * 10 + [BlockResult.NO_SPACE] * 10
    assert place.counter("evicted_blocks_total") == 0
    place.let(3 * COLLAPSE_BYTES + 1)
    wait_for(lambda: place.capacity_bytes == 3 * COLLAPSE_BYTES)
    assert set(place.store(blocks[FIRST : 2 * FIRST], FIRST)) == {BlockResult.STORED}
    place.stop(signal.SIGKILL)
    place.begin()
    # The earlier blocks are served at once. One more piece may have memory.
    assert place.capacity_bytes == 4 * COLLAPSE_BYTES
    found = place.engine.session.lookup([GroupHashes(0, blocks)]).result(60)[0]
    assert found.tolist() == [True] * 2 * FIRST + [False] * 2 * FIRST
    assert place.loads_from(blocks[:FIRST])
    place.let(ARENA)
    wait_for(lambda: place.capacity_bytes == ARENA)
    assert set(place.store(blocks[2 * FIRST :], 2 * FIRST)) == {BlockResult.STORED}
    assert place.server.status()["state"] == "ready" and place.counter("evicted_blocks_total") == 0
    assert place.stop(signal.SIGTERM) == 0
    place.begin()
    assert place.capacity_bytes == ARENA and place.counter("restored_blocks_total") == NUM_BLOCKS
    arena = place.folder / "arena" / "arena"
    assert arena.stat().st_blocks * 512 >= ARENA


def test_stores_wait_for_memory_and_evict_nothing(place: Dammed) -> None:
    """Memory comes while stores wait."""
    place.begin(patience_s=60)
    assert place.engine is not None
    blocks, calls = hashes(NUM_BLOCKS), []
    for first in range(0, NUM_BLOCKS, FIRST // 2):
        part = blocks[first : first + FIRST // 2]
        name, run = f"store {first}", BlockRun(0, part, block_ids(len(part), first))
        calls.append(place.engine.session.store(name, name, [run], 60))
    calls[1].result(60)
    assert not calls[2].done()
    place.let(ARENA)
    for call in calls:
        assert set(call.result(60).results[0].tolist()) == {BlockResult.STORED}
    assert place.counter("evicted_blocks_total") == 0


def test_a_stop_waits_for_no_memory(place: Dammed) -> None:
    place.begin()
    assert place.capacity_bytes == COLLAPSE_BYTES
    assert place.stop(signal.SIGTERM) == 0
    assert (place.folder / "arena" / "arena").stat().st_blocks * 512 < 3 * COLLAPSE_BYTES


def test_without_prefault_all_of_the_arena_counts(place: Dammed) -> None:
    """The next server restores blocks although the file has holes between them."""
    place.begin("--arena.prefault", "false")
    assert place.capacity_bytes == ARENA
    blocks = hashes(FIRST)
    assert set(place.store(blocks)) == {BlockResult.STORED}
    place.stop(signal.SIGKILL)
    place.begin()
    assert place.counter("restored_blocks_total") == FIRST
    assert place.capacity_bytes <= 2 * COLLAPSE_BYTES
    assert place.loads_from(blocks[: FIRST // 4])
