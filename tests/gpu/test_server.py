"""Tests the real server with simulated engines on a real GPU, or on a simulated device
(HOTKV_MADE_UP_GPU=1).

Needs torch, grpcio and the server's packages, neither vLLM nor hypothesis.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("grpc")
import torch

from bench.gpu.engine import Cuda, Engine, GpuServer, MadeUp, Shape, Side, done, until
from bench.servers import GIB, MIB, new_hashes
from demo.processes import ROOT, runtime_folder
from hotkv_client import TransferStatus
from hotkv_proto.errors import SessionLostError
from tests.doubles.with_constants import copies_by

pytestmark = pytest.mark.gpu

IS_MADE_UP = bool(os.environ.get("HOTKV_MADE_UP_GPU"))
ARENA_BYTES = 256 * MIB
LAYOUTS = ("BLHNC", "LBHNC", "LKBNHC", "LHBNC")
SLACK_BYTES = 64 * MIB
"""By which free device memory may change for other reasons."""


@pytest.fixture(scope="module")
def side() -> Side:
    if IS_MADE_UP:
        return MadeUp()
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return Cuda()


@pytest.fixture
def folder() -> Iterator[Path]:
    with runtime_folder(3 * GIB) as made:
        yield made


@pytest.fixture(scope="module", params=["kernel", "staged", "batch", "memcpy"])
def server(request: pytest.FixtureRequest, side: Side) -> Iterator[GpuServer]:
    with (
        runtime_folder(2 * ARENA_BYTES) as made,
        GpuServer(side, made, ARENA_BYTES, *copies_by(request.param)) as running,
    ):
        running.wait_settled(calibrated=False)
        yield running


def there_and_back(engine: Engine, seed: int) -> None:
    """Stores a third of the engine's blocks and loads them into another; the rest must not
    change."""
    count = engine.shape.num_blocks // 3
    order = np.random.default_rng(seed).permutation(engine.shape.num_blocks).astype(np.int32)
    ids, others, rest = order[:count], order[count : 2 * count], order[2 * count :]
    engine.fill()
    content, untouched, names = engine.content(ids), engine.content(rest), new_hashes(count)
    done(engine.store(names, ids))
    engine.clear(ids)
    lease = engine.lease(names)
    done(engine.load(lease, others))
    engine.session.release(lease)
    assert engine.content(others) == content and engine.content(rest) == untouched
    assert not any(engine.content(ids))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_layouts_there_and_back(side: Side, server: GpuServer, layout: str) -> None:
    """Pages of 8, not 16, bytes' multiples can't be copied 16 bytes at a time."""
    random = np.random.default_rng(LAYOUTS.index(layout))
    for turn in range(3):
        page_bytes = 8 * int(random.integers(1, 3000)) if turn else 65536
        shape = Shape(page_bytes, int(random.integers(1, 9)), int(random.integers(9, 90)), layout)
        engine = Engine(
            side, server.target, shape, order=("auto", "events", "flags")[turn]
        ).connected()
        there_and_back(engine, turn)
        engine.close()


def test_the_method_that_was_asked_for_has_copied(
    server: GpuServer, request: pytest.FixtureRequest
) -> None:
    methods = {copies["method"] for copies in server.devices()["copies"] if copies["byte_count"]}
    assert "pageable" not in methods and request.node.callspec.params["server"] in methods


@pytest.mark.parametrize("order", ["events", "flags"])
def test_transfers_wait_for_the_engines_kernels(side: Side, server: GpuServer, order: str) -> None:
    engine = Engine(side, server.target, Shape(65536, 4, 40, "LBHNC"), order=order).connected()
    assert engine.session.order_kind.name.lower() == order, engine.session.order_message
    ids, names = np.arange(10, dtype=np.int32), new_hashes(10)
    engine.fill()
    if not side.is_made_up:
        torch.cuda._sleep(200_000_000)  # a tenth of a second
    engine.memory.copy_(engine.memory.flip(0))
    mark = engine.marks.make(engine.session.order_kind)
    assert mark.after is not None
    done(engine.store(names, ids, mark.after))
    engine.marks.done(mark)
    kept = torch.empty_like(engine.memory)
    if not side.is_made_up:
        torch.cuda._sleep(200_000_000)
    kept.copy_(engine.memory)
    mark = engine.marks.make(engine.session.order_kind)
    done(engine.load(engine.lease(names), ids + 20, mark.after))
    engine.marks.done(mark)
    assert engine.equal(ids, ids + 20)
    content = engine.content(ids)
    engine.memory.copy_(kept)
    side.synchronize()
    # The load must not have written before `kept` was copied.
    assert engine.content(ids) == content and not engine.equal(ids, ids + 20)
    engine.close()


def test_a_killed_engine_leaves_nothing_on_the_device(side: Side, folder: Path) -> None:
    num_bytes = 256 * MIB if side.is_made_up else 2 * GIB
    with GpuServer(side, folder, num_bytes) as server:
        server.wait_settled(calibrated=not side.is_made_up)
        other = Engine(side, server.target, Shape(65536, 4, 64, "BLHNC"), order="auto").connected()
        there_and_back(other, 1)
        free_bytes, num_open = side.free_bytes(), server.devices()["open_allocation_count"]
        arguments = [server.target, str(num_bytes), *(["made-up"] if side.is_made_up else [])]
        command = [sys.executable, "-m", "bench.gpu.engine", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
            assert child.stdout is not None and child.stdout.readline() == "copying\n"
            assert side.free_bytes() < free_bytes - num_bytes + SLACK_BYTES
            there_and_back(other, 2)
            child.kill()
        until(lambda: side.free_bytes() > free_bytes - SLACK_BYTES, "the dead engine's memory")
        until(lambda: server.devices()["open_allocation_count"] == num_open, "closing")
        there_and_back(other, 3)
        other.close()


def test_a_killed_server_breaks_no_engine(side: Side, folder: Path) -> None:
    engine: Engine | None = None
    with GpuServer(side, folder, ARENA_BYTES) as server:
        server.wait_settled(calibrated=not side.is_made_up)
        engine = Engine(
            side, server.target, Shape(65536, 16, 96, "LBHNC"), order="auto"
        ).connected()
        engine.fill()
        ids, names = np.arange(32, dtype=np.int32), new_hashes(32)
        content = engine.content(np.arange(64, dtype=np.int32))
        done(engine.store(names, ids))
        lease = engine.lease(names)
        flying = []
        for _ in range(20):
            mark = engine.marks.make(engine.session.order_kind)
            flying += [
                engine.load(lease, ids + 64, mark.after),
                engine.store(new_hashes(32), ids, mark.after),
            ]
        server.kill()
        for transfer in flying:
            assert (
                transfer.exception(60) is not None
                or transfer.result().status is TransferStatus.DONE
            )
        assert isinstance(flying[-1].exception(), SessionLostError)
        assert engine.content(np.arange(64, dtype=np.int32)) == content
    with GpuServer(side, folder, ARENA_BYTES) as again:
        again.wait_settled(calibrated=False)
        engine.connected()
        engine.clear(ids + 64)
        done(engine.load(engine.lease(names), ids + 64))
        assert engine.equal(ids, ids + 64)
        there_and_back(engine, 5)
        engine.close()
