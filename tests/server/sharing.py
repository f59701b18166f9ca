"""Servers of one shared tier, each with its engine."""

import contextlib
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import numpy as np

from demo.processes import Server, runtime_folder
from hotkv_client import BlockResult, GroupHashes, TransferStatus
from hotkv_client.testing import PagedEngine
from hotkv_server.testing import faults
from tests.server.places import Place, load, store
from tests.server.support import hashes, http_port
from tests.support.waiting import wait_for

PAGE_BYTES, LAYERS, NUM_BLOCKS = 16 << 10, 2, 64
CHAIN = 12


class SharingNode(Place):
    """A place whose servers share a Valkey."""

    def start_sharing(self, *flags: str) -> "SharingNode":
        self.start(*flags)
        if self.engine is None:
            self.start_engine()
        return self

    def start_engine(self) -> None:
        """Makes an engine come to the server that runs."""
        assert self.server is not None
        self.engine = PagedEngine(
            self.server.target, layers=LAYERS, num_blocks=NUM_BLOCKS, page_bytes=PAGE_BYTES
        ).connect()

    def fill(self, blocks: list[bytes]) -> np.ndarray:
        """Stores blocks with random bytes, and waits until the Valkey has them."""
        engine, count = self.engine, len(blocks)
        assert engine is not None
        content = np.random.default_rng().integers(0, 256, (LAYERS, count, PAGE_BYTES), np.uint8)
        engine.kv[:, :count] = content
        before = self.num_copied()
        assert store(engine, blocks) == {BlockResult.STORED}
        wait_for(lambda: self.num_copied() >= before + count)
        return content

    def num_copied(self) -> float:
        return self.counter("shared_copied_blocks_total")

    def until_copying(self) -> None:
        """Waits until blocks that are stored come to the Valkey. Until a flush has been told, and
        what it met was flushed here too, they may be forgotten instead."""
        engine = self.engine
        assert engine is not None

        def copies() -> bool:
            before, until_s = self.num_copied(), time.monotonic() + 2.0
            store(engine, hashes(1))
            while self.num_copied() == before and time.monotonic() < until_s:
                time.sleep(0.05)
            return self.num_copied() > before

        wait_for(copies)

    def finds(self, blocks: list[bytes]) -> bool:
        assert self.engine is not None
        found = self.engine.session.lookup([GroupHashes(0, blocks)]).result(60)
        return bool(found[0].all())

    def leases_some(self, blocks: list[bytes]) -> bool:
        """Returns whether a lease gets any of the blocks."""
        assert self.engine is not None
        name = os.urandom(8).hex()
        lease = self.engine.session.acquire(name, [GroupHashes(0, blocks)]).result(60)
        self.engine.session.release(name)
        return bool(lease.pinned[0].any())

    def loads(self, blocks: list[bytes], content: np.ndarray) -> bool:
        """Returns whether the blocks are found and loaded with these bytes."""
        engine, count = self.engine, len(blocks)
        assert engine is not None
        engine.kv[:] = 0
        if not self.finds(blocks):
            return False
        assert load(engine, blocks, 0) is TransferStatus.DONE
        return np.array_equal(engine.kv[:, :count], content)


@contextlib.contextmanager
def node(kind: type[SharingNode] = SharingNode) -> Iterator[SharingNode]:
    with runtime_folder(128 << 20) as folder:
        made = kind(folder)
        try:
            yield made
        finally:
            if made.engine is not None:
                made.engine.close()
            if made.server is not None:
                made.server.__exit__()


def check_sharing(a: SharingNode, b: SharingNode) -> None:
    """Checks that what one node stores the other one loads, and a flush on one counts on both."""
    chain, kept = hashes(CHAIN), hashes(CHAIN)
    content = a.fill(chain)
    # Until it has connected it knows of nothing.
    wait_for(lambda: b.finds(chain))
    assert b.loads(chain, content)
    assert b.counter("shared_fetched_blocks_total") == CHAIN
    # The other node does not look them up, which would fetch them.
    a.fill(kept)
    assert a.engine is not None
    a.engine.session.flush().result(60)
    assert not a.finds(chain) and not b.leases_some(kept)
    wait_for(lambda: not b.finds(chain))
    again = a.fill(chain)
    wait_for(lambda: b.loads(chain, again))


HELD_S = 2.0 * faults.STALLED_S
"""Longer than any part may hang before Health names it."""


class Probed:
    """Asks /livez again and again; `answers`: every answer that was no 200, in words."""

    def __init__(self, server: Server) -> None:
        self.answers: list[str] = []
        self.num_asked = 0
        self._url = f"http://127.0.0.1:{http_port(server)}/livez"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._over.wait(0.1):
            try:
                urllib.request.urlopen(self._url, timeout=30).read()
            except urllib.error.HTTPError as error:
                self.answers.append(f"{error.code} {error.read().decode()}")
            except OSError as error:
                self.answers.append(str(error))
            self.num_asked += 1

    def close(self) -> list[str]:
        self._over.set()
        self._thread.join()
        return self.answers


@contextlib.contextmanager
def probed(server: Server) -> Iterator[Probed]:
    """Every /livez within the block was a 200, and at its end for HELD_S."""
    probe = Probed(server)
    try:
        yield probe
        until_s, before = time.monotonic() + HELD_S, probe.num_asked
        while time.monotonic() < until_s or probe.num_asked < before + 5:
            time.sleep(0.05)
    finally:
        answers = probe.close()
    assert not answers, answers
