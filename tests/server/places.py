"""A server in a folder that outlives it: store, load, spoil and start again."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import BlockRun, Evicted, GroupHashes, LoadRun, Session, TransferStatus
from hotkv_client.admin import AdminClient
from hotkv_client.testing import PagedEngine
from hotkv_client.types import Int32s
from tests.server.support import block_ids
from tests.support.waiting import wait_for

FLAGS = ("--arena.slab-bytes", "64KiB", "--integrity.scrub-bytes-per-s", "0")
PAGE_BYTES, LAYERS, NUM_BLOCKS = 4096, 2, 128


class Connected(Protocol):
    """An engine of any kind."""

    session: Session


class Place:
    """One folder in which servers follow each other, and an engine that stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: Server | None = None
        self.engine: PagedEngine | None = None

    def start(self, *flags: str, arena: str = "16MiB") -> Server:
        """Returns the next server; the engine, if there is one, has found it by itself."""
        self.server = Server(self.folder, arena, *FLAGS, *flags)
        self.server.wait_ready()
        if self.engine is not None:
            assert self.engine.session.wait_connected(20)
        return self.server

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends the server and waits until it and the engine's link are gone."""
        assert self.server is not None
        os.kill(self.server.pid, how)
        self.server._child.process.wait(60)
        self.server.__exit__()
        if self.engine is not None:
            wait_for(lambda: not self.engine.session.connected)  # type: ignore[union-attr]

    def connect(self, on_evicted: Callable[[Evicted], None] | None = None) -> PagedEngine:
        """Returns an engine with random pages."""
        assert self.server is not None
        settings = {
            "layers": LAYERS,
            "num_blocks": NUM_BLOCKS,
            "page_bytes": PAGE_BYTES,
            "on_evicted": on_evicted,
        }
        self.engine = PagedEngine(self.server.target, **settings).connect()  # type: ignore[arg-type]
        self.engine.kv[:] = np.random.default_rng().integers(0, 256, self.engine.kv.shape, np.uint8)
        return self.engine

    def counter(self, name: str) -> float:
        assert self.server is not None
        with AdminClient(self.server.target) as admin:
            return float(admin.info()["counters"][name])


@pytest.fixture
def place() -> Iterator[Place]:
    with runtime_folder(64 << 20) as folder:
        made = Place(folder)
        yield made
        if made.engine is not None:
            made.engine.close()
        if made.server is not None:
            made.server.__exit__()


def as_ids(blocks: list[bytes], at: int | Int32s) -> Int32s:
    """Returns the block ids from `at` on, or `at` itself."""
    return block_ids(len(blocks), at) if isinstance(at, int) else at


def store(engine: Connected, blocks: list[bytes], at: int | Int32s = 0) -> set[int]:
    """Stores the engine's blocks, from `at` on or those of `at`, under these hashes; results."""
    name = os.urandom(8).hex()
    run = BlockRun(0, blocks, as_ids(blocks, at))
    return set(engine.session.store(name, name, [run], 20).result(60).results[0].tolist())


def found(engine: Connected, blocks: list[bytes]) -> list[bool]:
    masks = engine.session.lookup([GroupHashes(0, blocks)]).result(60)
    found_here: list[bool] = masks[0].tolist()
    return found_here


def load(engine: Connected, blocks: list[bytes], at: int | Int32s) -> TransferStatus:
    """Leases the blocks, of which each must be there, and loads them to `at`."""
    name = os.urandom(8).hex()
    assert engine.session.acquire(name, [GroupHashes(0, blocks)]).result(60).pinned[0].all()
    run = LoadRun(0, block_ids(len(blocks)), as_ids(blocks, at))
    result = engine.session.load(name, name, [run], 20).result(60)
    engine.session.release(name)
    return result.status


def spoil(place: Place, page: np.ndarray) -> None:
    """Changes one byte of the slot whose first page this is, behind the server's back."""
    path = place.folder / "arena" / "arena"
    arena = np.memmap(path, np.uint8, "r+")
    at = arena.tobytes().find(page.tobytes())
    assert at >= 0
    arena[at] ^= 1
    arena.flush()
