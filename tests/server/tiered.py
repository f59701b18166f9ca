"""Servers with a disk tier, and an engine."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from hotkv_client.admin import AdminClient
from tests.server.places import Place, opened
from tests.server.support import PATIENT
from tests.support.waiting import wait_for

PAGE_BYTES, LAYERS, NUM_BLOCKS = 64 << 10, 2, 160
SLOT_BYTES = PAGE_BYTES * LAYERS
CHAIN = 30
"""Before its load, a lease may pin at most a quarter of the arena."""


class Tiered(Place):
    layers, page_bytes, num_blocks = LAYERS, PAGE_BYTES, NUM_BLOCKS

    def start_tiered(self, *flags: str, disk: str = "64MiB", arena: str = "16MiB") -> None:
        folder = ("--tiers.disk.path", str(self.folder / "disk"))
        self.start(*folder, "--tiers.disk.bytes", disk, *PATIENT, *flags, arena=arena)

    def fill(self, blocks: list[bytes], content: np.ndarray | None = None) -> np.ndarray:
        """Waits until blocks and records are on the disk."""
        before = self.counter("tier_demoted_blocks_total")
        content = self.put(blocks, content)
        wait_for(lambda: self.counter("tier_demoted_blocks_total") == before + len(blocks))
        wait_for(lambda: not self.counter("tier_unsaved_blocks"))
        return content

    def forget(self) -> None:
        assert self.server is not None
        with AdminClient(self.server.target) as admin:
            admin.evict(everything=True)

    def lose_arena(self) -> None:
        """As a reboot does."""
        for path in (self.folder / "arena").iterdir():
            path.unlink()


@contextlib.contextmanager
def tiered() -> Iterator[Tiered]:
    with opened(Tiered, 256 << 20) as made:
        yield made


@pytest.fixture
def place() -> Iterator[Tiered]:
    with tiered() as made:
        yield made
