"""Servers that run one after the other in one folder, and an engine that outlives them."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import (
    BlockResult,
    BlockRun,
    Evicted,
    GroupHashes,
    LoadRun,
    Session,
    TransferStatus,
)
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine
from hotkv_client.types import Int32s
from tests.server.support import block_ids
from tests.support.waiting import wait_for

FLAGS = ("--integrity.scrub-bytes-per-s", "0")
PAGE_BYTES, LAYERS, NUM_BLOCKS = 4096, 2, 128


class Connected(Protocol):
    session: Session


class Place:
    """`command` starts each server, as in `demo.processes.Server`."""

    command: Sequence[str] = ()
    layers, page_bytes, num_blocks = LAYERS, PAGE_BYTES, NUM_BLOCKS

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: Server | None = None
        self.engine: PagedEngine | None = None

    def start(self, *flags: str, arena: str = "16MiB") -> Server:
        """Waits until the engine, if there is one, has reconnected."""
        self.server = Server(self.folder, arena, *FLAGS, *flags, command=self.command)
        self.server.wait_ready()
        if self.engine is not None:
            assert self.engine.session.wait_connected(20)
        return self.server

    def stop(self, how: signal.Signals = signal.SIGKILL) -> int:
        """Waits until the engine is disconnected. Exit status of the server."""
        assert self.server is not None
        os.kill(self.server.pid, how)
        status: int = self.server._child.process.wait(60)
        self.server.__exit__()
        if self.engine is not None:
            wait_for(lambda: not self.engine.session.connected)  # type: ignore[union-attr]
        return status

    def connect(self, on_evicted: Callable[[Evicted], None] | None = None) -> PagedEngine:
        """An engine whose pages have random contents."""
        assert self.server is not None
        shape = {"layers": self.layers, "page_bytes": self.page_bytes}
        self.engine = made = PagedEngine(
            self.server.target, num_blocks=self.num_blocks, on_evicted=on_evicted, **shape
        ).connect()
        made.kv[:] = np.random.default_rng().integers(0, 256, made.kv.shape, np.uint8)
        return made

    def counter(self, name: str) -> float:
        assert self.server is not None
        with AdminClient(self.server.target) as admin:
            return float(admin.info()["counters"][name])

    def loads(self, blocks: list[bytes], content: np.ndarray) -> bool:
        """True if all are ready and load with the bytes `content` [layer, block, byte]."""
        engine = self.engine
        assert engine is not None
        engine.kv[:] = 0
        if not all(found(engine, blocks)):
            return False
        assert load(engine, blocks, 0) is TransferStatus.DONE
        return np.array_equal(engine.kv[:, : len(blocks)], content)

    def put(self, blocks: list[bytes], content: np.ndarray | None = None) -> np.ndarray:
        """Stores `content` [layer, block, byte], by default random bytes."""
        engine = self.engine
        assert engine is not None and len(blocks) <= self.num_blocks
        if content is None:
            shape = (self.layers, len(blocks), self.page_bytes)
            content = np.random.default_rng().integers(0, 256, shape, np.uint8)
        engine.kv[:, : len(blocks)] = content
        assert store(engine, blocks) == {BlockResult.STORED}
        return content

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        if self.server is not None:
            self.server.__exit__()


P = TypeVar("P", bound=Place)


@contextlib.contextmanager
def opened(kind: type[P], num_bytes: int) -> Iterator[P]:
    """A folder in shared memory with room for `num_bytes`, closed afterwards."""
    with runtime_folder(num_bytes) as folder, contextlib.closing(kind(folder)) as made:
        yield made


@pytest.fixture
def place() -> Iterator[Place]:
    with opened(Place, 64 << 20) as made:
        yield made


def as_ids(blocks: list[bytes], at: int | Int32s) -> Int32s:
    """Consecutive ids from `at` on; an array stays as it is."""
    return block_ids(len(blocks), at) if isinstance(at, int) else at


def store(engine: Connected, blocks: list[bytes], at: int | Int32s = 0) -> set[int]:
    """The set of the blocks' results. `at`: the first block id, or an array of all."""
    name = os.urandom(8).hex()
    run = BlockRun(0, blocks, as_ids(blocks, at))
    return set(engine.session.store(name, name, [run], 20).result(60).results[0].tolist())


def found(engine: Connected, blocks: list[bytes]) -> list[bool]:
    masks = engine.session.lookup([GroupHashes(0, blocks)]).result(60)
    found_here: list[bool] = masks[0].tolist()
    return found_here


def load(engine: Connected, blocks: list[bytes], at: int | Int32s) -> TransferStatus:
    name = os.urandom(8).hex()
    assert engine.session.acquire(name, [GroupHashes(0, blocks)]).result(60).pinned[0].all()
    run = LoadRun(0, block_ids(len(blocks)), as_ids(blocks, at))
    result = engine.session.load(name, name, [run], 20).result(60)
    engine.session.release(name)
    return result.status


def spoil(place: Place, page: np.ndarray) -> None:
    """Changes a byte in the arena's file, of the block whose slot begins with `page`."""
    path = place.folder / "arena" / "arena"
    arena = np.memmap(path, np.uint8, "r+")
    at = arena.tobytes().find(page.tobytes())
    assert at >= 0
    arena[at] ^= 1
    arena.flush()
