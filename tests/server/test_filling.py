"""A server that is ready before its arena has all its memory serves, grows, and loses nothing
however it ends."""

import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import BlockResult, BlockRun, GroupHashes, TransferStatus
from hotkv_client.testing import PagedEngine
from hotkv_proto.words import WORD_BYTES
from hotkv_server.memory.mapping import COLLAPSE_BYTES
from hotkv_server.testing import faults
from tests.server.places import load
from tests.server.support import block_ids, hashes
from tests.support.daemons import ForkedChild
from tests.support.waiting import wait_for

GIB = 1 << 30
ARENA = 2 * GIB
LAYERS, PAGE_BYTES = 4, 1 << 16
BLOCK_BYTES = LAYERS * PAGE_BYTES
FIRST = COLLAPSE_BYTES // BLOCK_BYTES
"""Blocks that fit what a server behind a dam begins with."""
NUM_BLOCKS = 4 * FIRST


class Dammed:
    """Servers after each other in one folder, whose arena fills as far as `let` says, and an
    engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dam = folder / "dam"
        self.dam.write_text("0")
        self.server: Server | None = None
        self.engine: PagedEngine | None = None

    def let(self, what: int | str) -> None:
        scratch = self.dam.with_suffix(".new")
        scratch.write_text(str(what))
        scratch.replace(self.dam)

    def start(self, *flags: str) -> float:
        """Seconds until ready."""
        self.server = made = Server.__new__(Server)
        made.runtime_folder = self.folder / "run"
        made.runtime_folder.mkdir(mode=0o700, exist_ok=True)
        made.target = f"unix:{made.runtime_folder}/grpc.sock"
        made.begin_s = time.monotonic()
        command = [
            *faults.command("dam", self.dam),
            "--runtime-dir",
            str(made.runtime_folder),
        ]
        command += [
            "--arena.dir",
            str(self.folder / "arena"),
            "--arena.bytes",
            str(ARENA),
            "--http.port",
            "0",
            *flags,
        ]
        made._child = ForkedChild("hotkv-server", command, self.folder / "hotkv-server.log", {})
        ready_s = made.wait_ready()
        if self.engine is None:
            self.engine = PagedEngine(
                made.target, layers=LAYERS, num_blocks=NUM_BLOCKS, page_bytes=PAGE_BYTES
            ).connect()
            self.engine.kv[:] = np.random.default_rng(12).integers(
                0, 256, self.engine.kv.shape, np.uint8
            )
        assert self.engine.session.wait_connected(20)
        return ready_s

    def end(self, how: signal.Signals) -> int:
        """Exit status."""
        assert self.server is not None
        os.kill(self.server.pid, how)
        return self.server._child.process.wait(60)

    def store(self, blocks: list[bytes], first: int = 0) -> list[int]:
        """Result of each block; block i of the engine holds what is stored under the i-th hash."""
        assert self.engine is not None
        name = os.urandom(8).hex()
        result = self.engine.session.store(
            name, name, [BlockRun(0, blocks, block_ids(len(blocks), first))], 20
        ).result(60)
        assert result.status is TransferStatus.DONE
        return list(result.results[0].tolist())

    def counter(self, name: str) -> int:
        assert self.server is not None
        return int(self.server.counter(name))

    @property
    def capacity_bytes(self) -> int:
        return self.counter("arena_capacity_bytes")


@pytest.fixture
def place() -> Iterator[Dammed]:
    with runtime_folder(ARENA + (256 << 20)) as folder:
        made = Dammed(folder)
        yield made
        made.let(ARENA)
        if made.engine is not None:
            made.engine.close()
        if made.server is not None:
            made.server.__exit__()


@pytest.mark.long
def test_a_server_serves_while_its_memory_comes_and_loses_nothing_to_a_kill(place: Dammed) -> None:
    place.start()
    assert place.server is not None and place.engine is not None
    assert (
        place.capacity_bytes == COLLAPSE_BYTES
        and place.counter("arena_full_capacity_bytes") == ARENA
    )
    assert place.server.status()["progress"] == "bringing the arena in: 32 of 2048 MiB"
    assert place.server.status()["tiers"][0]["capacity_byte_count"] == COLLAPSE_BYTES
    blocks = hashes(NUM_BLOCKS)
    assert set(place.store(blocks[: FIRST - 10])) == {BlockResult.STORED}
    # More room is on its way: what does not fit is refused, and nothing goes for it.
    results = place.store(blocks[FIRST - 10 : FIRST + 10], FIRST - 10)
    assert results == [BlockResult.STORED] * 10 + [BlockResult.NO_SPACE] * 10
    assert place.counter("evicted_blocks_total") == 0
    place.let(3 * COLLAPSE_BYTES + 1)
    wait_for(lambda: place.capacity_bytes == 3 * COLLAPSE_BYTES)
    assert set(place.store(blocks[FIRST : 2 * FIRST], FIRST)) == {BlockResult.STORED}
    assert place.end(signal.SIGKILL) == -signal.SIGKILL
    place.start()
    # What was there is there at once, and one piece more.
    assert place.capacity_bytes == 4 * COLLAPSE_BYTES
    found = place.engine.session.lookup([GroupHashes(0, blocks)]).result(60)[0]
    assert found.tolist() == [True] * 2 * FIRST + [False] * 2 * FIRST
    assert load(place.engine, blocks[:FIRST], 2 * FIRST) is TransferStatus.DONE
    assert np.array_equal(place.engine.kv[:, :FIRST], place.engine.kv[:, 2 * FIRST : 3 * FIRST])
    place.let(ARENA)
    wait_for(lambda: place.capacity_bytes == ARENA)
    assert set(place.store(blocks[2 * FIRST :], 2 * FIRST)) == {BlockResult.STORED}
    assert place.server.status()["state"] == "ready" and place.counter("evicted_blocks_total") == 0
    assert place.end(signal.SIGTERM) == 0
    place.start()
    assert place.capacity_bytes == ARENA and place.counter("restored_blocks_total") == NUM_BLOCKS
    arena = place.folder / "arena" / "arena"
    assert arena.stat().st_blocks * 512 >= ARENA


@pytest.mark.long
def test_a_server_that_runs_short_of_memory_goes_on_with_what_it_has(place: Dammed) -> None:
    place.start()
    assert place.server is not None and place.engine is not None
    place.let("short")
    wait_for(lambda: "no more is free" in place.server.status()["progress"])  # type: ignore[union-attr]
    status = place.server.status()
    said = status["progress"]
    assert status["state"] == "ready"
    assert said.startswith("the arena has memory up to 32 of 2048 MiB, no more is free (")
    assert "hotkv-server arenas" in said and "lower arena.bytes" in said
    assert place.server.log.read_text().count("no more is free") == 1
    blocks = hashes(2 * FIRST)
    assert set(place.store(blocks[:FIRST])) == {BlockResult.STORED}
    assert set(place.store(blocks[FIRST:], FIRST)) == {BlockResult.STORED}, (
        "no more comes, so what is cold goes"
    )
    assert place.counter("evicted_blocks_total") == FIRST and place.capacity_bytes == COLLAPSE_BYTES
    # What requests may pin before they are admitted is a share of what there is.
    assert load(place.engine, blocks[FIRST : FIRST + FIRST // 4], 2 * FIRST) is TransferStatus.DONE
    assert np.array_equal(
        place.engine.kv[:, FIRST : FIRST + FIRST // 4],
        place.engine.kv[:, 2 * FIRST : 2 * FIRST + FIRST // 4],
    )
    place.server.wait_ready()
    assert (place.folder / "arena" / "arena").stat().st_blocks * 512 == (
        COLLAPSE_BYTES + WORD_BYTES
    )
    assert place.end(signal.SIGTERM) == 0
    place.let(ARENA)
    place.start()
    wait_for(lambda: place.capacity_bytes == ARENA)
    assert place.counter("restored_blocks_total") == FIRST


def test_a_stop_waits_for_no_memory(place: Dammed) -> None:
    place.start()
    assert place.server is not None
    port = place.server.log.read_text().partition("http_port=")[2].split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        metrics = dict(
            line.rsplit(" ", 1)
            for line in answer.read().decode().splitlines()
            if not line.startswith("#")
        )
    assert (
        float(metrics["hotkv_arena_capacity_bytes"]) == COLLAPSE_BYTES
        and float(metrics["hotkv_arena_full_capacity_bytes"]) == ARENA
    )
    assert place.end(signal.SIGTERM) == 0
    assert (place.folder / "arena" / "arena").stat().st_blocks * 512 < 3 * COLLAPSE_BYTES


def test_without_prefault_all_of_the_arena_counts(place: Dammed) -> None:
    """Also of a server that goes on with what one without it has left: blocks may lie anywhere
    then, with holes around them."""
    place.start("--arena.prefault", "false")
    assert place.capacity_bytes == ARENA
    blocks = hashes(FIRST)
    assert set(place.store(blocks)) == {BlockResult.STORED}
    assert place.end(signal.SIGKILL) == -signal.SIGKILL
    place.start()
    assert place.server is not None and place.engine is not None
    assert (
        place.counter("restored_blocks_total") == FIRST
        and place.capacity_bytes <= 2 * COLLAPSE_BYTES
    )
    assert load(place.engine, blocks[: FIRST // 4], FIRST) is TransferStatus.DONE
    assert np.array_equal(
        place.engine.kv[:, : FIRST // 4], place.engine.kv[:, FIRST : FIRST + FIRST // 4]
    )
