"""Tests flushes of a real server."""

import json
import threading
from collections.abc import Callable

import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import (
    BlockRun,
    Evicted,
    GroupHashes,
    LoadRun,
    TransferStatus,
)
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine
from tests.server.places import store
from tests.server.support import block_ids, hashes, number_of
from tests.support.waiting import wait_for

Make = Callable[..., PagedEngine]


def ready(engine: PagedEngine, blocks: list[bytes]) -> int:
    """A lookup must find as many as the table."""
    probe = engine.session.probe(0, blocks)
    assert probe is not None
    looked_up = engine.session.lookup([GroupHashes(0, blocks)]).result(60)[0]
    assert probe.tolist() == looked_up.tolist()
    return int(probe.sum())


def test_nothing_before_a_flush_is_loaded_after(engine: Make) -> None:
    """Each generation stores other bytes under the same hashes, as new weights would."""
    writer, late, reader = (
        engine(model="flush-generations", page_bytes=64 << 10) for _ in range(3)
    )
    blocks, late_blocks = hashes(16), hashes(16)
    generation = 0
    stop = threading.Event()
    wrong: list[tuple[int, int]] = []
    num_loaded = 0

    def read() -> None:
        nonlocal num_loaded
        count = 0
        while not stop.is_set():
            count += 1
            least = generation
            name, asked = f"r{count}", [GroupHashes(0, blocks + late_blocks)]
            pinned = reader.session.acquire(name, asked).result(60).pinned[0]
            positions = np.flatnonzero(pinned).astype(np.int32)
            if len(positions):
                runs = [LoadRun(0, positions, block_ids(len(positions)))]
                loaded = reader.session.load(name, name, runs, 20).result(60)
                assert loaded.status is TransferStatus.DONE
                found = np.unique(reader.kv[:, : len(positions)])
                wrong.extend((least, int(value)) for value in found if value < least)
                num_loaded += len(positions)
            reader.session.release(f"r{count}")

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for number in range(1, 60):
            late.kv[:] = generation
            # The store may come before or after the flush.
            name = f"late {number}"
            late.session.reserve(name, [BlockRun(0, late_blocks)]).result(60)
            runs = [BlockRun(0, late_blocks, block_ids(16))]
            slow = late.session.store(name, name, runs, 20)
            writer.session.flush().result(60)
            generation = number
            writer.kv[:] = generation
            store(writer, blocks)
            slow.result(60)
            # On a busy machine, the reader may get less time than the writer.
            wait_for(lambda least=2 * number: num_loaded >= least, "the reader loads")
    finally:
        stop.set()
        thread.join(60)
    assert not wrong, f"generations that were flushed, and what was read of them: {wrong[:5]}"
    assert num_loaded > 100


def test_the_command_line_flushes(server: Server, engine: Make) -> None:
    one = engine(model="flush-cli")
    blocks = hashes(2)
    store(one, blocks)
    one.session.acquire("lease", [GroupHashes(0, blocks[:1])]).result(60)
    with AdminClient(server.target) as admin:
        number = number_of(admin, "flush-cli")
    assert json.loads(server.cli("flush", "--key-space", str(number), "--json")) == {
        "flushed_block_count": 2,
        "pending_tiers": [],
    }
    assert ready(one, blocks) == 0
    # The flushed block keeps its slot while a lease pins it.
    assert "flushed" in server.cli("blocks", "--key-space", str(number))
    one.session.release("lease")
    one.session.ping(10)
    assert "flushed" not in server.cli("blocks", "--key-space", str(number))
    told = list[Evicted]()
    other = engine(model="flush-cli", on_evicted=told.append)
    store(one, blocks)
    assert other.session.flush().result(60) == 2
    other.session.ping(10)
    assert {h for notice in told for group in notice.groups for h in group.hashes} == set(blocks)
    assert server.counter("flushed_blocks_total") >= 4
    with pytest.raises(Exception, match="key_space_id 4000 is unknown"):
        server.cli("flush", "--key-space", "4000")
