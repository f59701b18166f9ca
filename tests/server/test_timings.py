"""What a real server exports of its calls, transfers, health and ledger, as Prometheus reads it."""

import contextlib
import os
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import BlockRun, GroupHashes, LoadEnd, LoadRun, RequestReport, TransferStatus
from hotkv_client.testing import PagedEngine
from hotkv_proto import __version__
from tests.server.faulty import FaultyServer
from tests.server.support import block_ids, hashes
from tests.support.ports import free_port
from tests.support.waiting import wait_for

LAYERS, PAGE_BYTES = 2, 64 << 10
SLOT_BYTES = LAYERS * PAGE_BYTES


def read(port: int) -> dict[str, float]:
    """All samples, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("hotkv_"))
    return {name: float(value) for name, value in pairs}


@pytest.fixture
def folder() -> Iterator[Path]:
    with runtime_folder(64 << 20) as made:
        yield made


@pytest.fixture
def started(folder: Path) -> Iterator[Callable[[], tuple[Server, int]]]:
    """Starts servers that follow each other in a folder; gives each and its port for HTTP."""
    made: list[Server] = []

    def start() -> tuple[Server, int]:
        port = free_port()
        flags = ("--arena.slab-bytes", "64KiB", "--http.port", str(port))
        made.append(Server(folder, "16MiB", *flags))
        made[-1].wait_ready()
        return made[-1], port

    yield start
    for server in made:
        server.__exit__()


def connected(server: Server) -> PagedEngine:
    return PagedEngine(server.target, layers=LAYERS, num_blocks=64, page_bytes=PAGE_BYTES).connect()


def store(engine: PagedEngine, blocks: list[bytes]) -> TransferStatus:
    name = os.urandom(8).hex()
    runs = [BlockRun(0, blocks, block_ids(len(blocks)))]
    return engine.session.store(name, name, runs, 20).result(60).status


def test_calls_and_transfers_are_timed(started: Callable[[], tuple[Server, int]]) -> None:
    server, port = started()
    engine, blocks = connected(server), hashes(5)
    before = read(port)
    assert all(before[f"hotkv_{name}_seconds_count"] == 0 for name in ("load", "store", "lookup"))
    assert store(engine, blocks) is TransferStatus.DONE
    groups = [GroupHashes(0, blocks)]
    assert engine.session.lookup(groups).result(60)[0].all()
    assert engine.session.acquire("l", groups).result(60).pinned[0].all()
    run = LoadRun(0, np.arange(3), block_ids(3, 10))
    assert engine.session.load("l", "l", [run], 20).result(60).status is TransferStatus.DONE
    after = read(port)
    for name in ("lookup", "lease", "load", "store"):
        assert after[f"hotkv_{name}_seconds_count"] == 1, name
        assert 0 < after[f"hotkv_{name}_seconds_sum"] < 20, name
        assert after[f'hotkv_{name}_seconds_bucket{{le="+Inf"}}'] == 1
    assert after["hotkv_copy_wait_seconds_count"] == 2
    assert after["hotkv_store_bytes_sum"] == 5 * SLOT_BYTES
    assert after["hotkv_load_bytes_sum"] == 3 * SLOT_BYTES
    assert after['hotkv_load_bytes_bucket{le="262144.0"}'] == 0
    assert after['hotkv_load_bytes_bucket{le="1048576.0"}'] == 1
    assert after["hotkv_copy_busy_seconds_total"] > 0 and after["hotkv_copy_threads"] >= 1
    ended = {name: value for name, value in after.items() if "transfers_total" in name and value}
    assert ended == {
        'hotkv_transfers_total{direction="load",outcome="done"}': 1,
        'hotkv_transfers_total{direction="store",outcome="done"}': 1,
    }
    engine.close()


def test_transfers_that_fail_are_counted_and_not_timed(folder: Path) -> None:
    with FaultyServer(folder, "copy", "assert") as server:
        server.wait_ready()
        with contextlib.closing(connected(server)) as engine:
            assert store(engine, hashes(2)) is TransferStatus.DONE
            server.break_it()
            assert store(engine, hashes(2)) is TransferStatus.FAILED
            figures = read(server.port)
    assert figures['hotkv_transfers_total{direction="store",outcome="failed"}'] == 1
    assert figures['hotkv_transfers_total{direction="store",outcome="done"}'] == 1
    assert figures["hotkv_store_seconds_count"] == figures["hotkv_store_bytes_count"] == 1
    assert figures["hotkv_copy_wait_seconds_count"] == 2


def test_blocks_that_are_evicted_have_an_age(started: Callable[[], tuple[Server, int]]) -> None:
    server, port = started()
    engine = connected(server)
    for _ in range(8):
        assert store(engine, hashes(60)) is TransferStatus.DONE
    figures = read(port)
    assert figures["hotkv_eviction_age_seconds_count"] == figures["hotkv_evicted_blocks_total"] > 0
    assert figures['hotkv_eviction_age_seconds_bucket{le="60.0"}'] > 0
    engine.close()


def test_counters_of_the_ledger_begin_anew_and_never_fall(
    started: Callable[[], tuple[Server, int]],
) -> None:
    """Prometheus takes one that is lower than before for one that began at 0."""
    server, port = started()
    engine = connected(server)
    report = RequestReport(hashes(4), 70, 0, 48, 0.0, saved_s=2.0, report_id=1)
    engine.session.report_requests([report], 0.0)
    engine.session.ping(10)
    before = read(port)
    engine.session.report_requests([], 0.0, loads=[LoadEnd(1, 0.5, failed=True)])
    engine.session.ping(10)
    after = read(port)
    assert all(
        after[name] >= value
        for name, value in before.items()
        if name.partition("{")[0].endswith("_total")
    )
    assert after["hotkv_ledger_saved_seconds_total"] == 2.0
    assert after["hotkv_ledger_taken_back_seconds_total"] == 2.0
    assert after['hotkv_ledger_hit_tokens_total{tier="host"}'] == 48
    assert after['hotkv_ledger_missed_tokens_total{reason="failed_load"}'] == 48
    engine.close()
    server.__exit__()
    _, port = started()
    anew = read(port)
    assert anew["hotkv_ledger_rows"] == 1, "the ledger itself goes on"
    assert not any(
        value for name, value in anew.items() if re.match(r"hotkv_ledger_.*_total", name)
    )


def test_a_part_that_has_died_is_named_and_the_server_is_not_ready(folder: Path) -> None:
    with FaultyServer(
        folder,
        "hotkv_server.wire.guard.limits:Guests.end_late",
        "die",
        "--arena.slab-bytes",
        "64KiB",
    ) as server:
        server.wait_ready()
        figures = read(server.port)
        parts = {name for name in figures if name.startswith("hotkv_problem{")}
        for part in ("copy thread", "devices", "timer", "HTTP thread", "socket grpc.sock"):
            assert f'hotkv_problem{{component="{part}"}}' in parts
        assert figures["hotkv_ready"] == 1 and not any(figures[part] for part in parts)
        built = next(name for name in figures if name.startswith("hotkv_build_info"))
        assert f'version="{__version__}"' in built and figures[built] == 1
        server.break_it()
        wait_for(lambda: read(server.port)["hotkv_ready"] == 0)
        figures = read(server.port)
        assert [part for part in sorted(parts) if figures[part]] == [
            'hotkv_problem{component="end of guests"}'
        ]
