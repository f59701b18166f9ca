"""A server with tiers of host memory and disk, and an engine."""

import contextlib
from collections.abc import Iterator

import numpy as np

from demo.processes import runtime_folder
from hotkv_client import BlockResult, GroupHashes, TransferStatus
from hotkv_client.admin import AdminClient
from hotkv_client.testing import PagedEngine
from tests.server.places import Place, load, store
from tests.server.support import PATIENT
from tests.support.waiting import wait_for

PAGE_BYTES, LAYERS, NUM_BLOCKS = 64 << 10, 2, 160
SLOT_BYTES = PAGE_BYTES * LAYERS
CHAIN = 30
"""Fewer than a lease may pin before its load: a quarter of the arena."""


class Tiered(Place):
    """A place whose servers have a disk of 64 MiB."""

    def start_tiered(self, *flags: str, disk: str = "64MiB") -> None:
        folder = self.folder / "disk"
        self.start("--tiers.disk.path", str(folder), "--tiers.disk.bytes", disk, *PATIENT, *flags)

    def connect(self, on_evicted: object = None) -> PagedEngine:
        assert self.server is not None
        self.engine = PagedEngine(
            self.server.target, layers=LAYERS, num_blocks=NUM_BLOCKS, page_bytes=PAGE_BYTES
        ).connect()
        return self.engine

    def fill(self, blocks: list[bytes], content: np.ndarray | None = None) -> np.ndarray:
        """Stores blocks, with random bytes if none are given, and waits until the disk has them and
        their records; returns the bytes [layer, block, byte]."""
        engine, count = self.engine, len(blocks)
        assert engine is not None and count <= NUM_BLOCKS
        if content is None:
            shape = (LAYERS, count, PAGE_BYTES)
            content = np.random.default_rng().integers(0, 256, shape, np.uint8)
        engine.kv[:, :count] = content
        before = self.counter("tier_demoted_blocks_total")
        assert store(engine, blocks) == {BlockResult.STORED}
        wait_for(lambda: self.counter("tier_demoted_blocks_total") == before + count)
        wait_for(lambda: not self.counter("tier_unsaved_blocks"))
        return content

    def forget(self) -> None:
        """Host memory forgets all; the disk does not."""
        assert self.server is not None
        with AdminClient(self.server.target) as admin:
            admin.evict(everything=True)

    def lose_arena(self) -> None:
        """As a reboot does; the server is not there."""
        for path in (self.folder / "arena").iterdir():
            path.unlink()

    def loads(self, blocks: list[bytes], content: np.ndarray) -> bool:
        """Returns whether the blocks are found and loaded with these bytes."""
        engine, count = self.engine, len(blocks)
        assert engine is not None
        engine.kv[:] = 0
        if not engine.session.lookup([GroupHashes(0, blocks)]).result(60)[0].all():
            return False
        assert load(engine, blocks, 0) is TransferStatus.DONE
        return np.array_equal(engine.kv[:, :count], content)


@contextlib.contextmanager
def tiered() -> Iterator[Tiered]:
    """Yields a place of its own, whose engine and server are ended."""
    with runtime_folder(256 << 20) as folder:
        made = Tiered(folder)
        yield made
        if made.engine is not None:
            made.engine.close()
        if made.server is not None:
            made.server.__exit__()
