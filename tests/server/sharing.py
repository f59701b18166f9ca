"""Servers that share a Valkey as a tier, each with an engine."""

import contextlib
import os
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from demo.processes import Server
from hotkv_client import GroupHashes
from hotkv_client.admin import AdminClient
from tests.doubles import faults
from tests.doubles.with_constants import constant
from tests.server.places import Place, found, opened, store
from tests.server.support import hashes, http_port
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from tests.tiers import s3_support

PAGE_BYTES, LAYERS, NUM_BLOCKS = 16 << 10, 2, 64
CHAIN = 12


class SharingNode(Place):
    layers, page_bytes, num_blocks = LAYERS, PAGE_BYTES, NUM_BLOCKS

    def start_sharing(self, *flags: str) -> "SharingNode":
        self.start(*flags)
        if self.engine is None:
            self.start_engine()
        return self

    def start_engine(self) -> None:
        self.connect()

    def fill(self, blocks: list[bytes]) -> np.ndarray:
        """Waits until all are copied to the Valkey. A busy node may drop some copies, so it
        tries again."""
        content: np.ndarray | None = None
        while True:
            before, refused = self.num_copied(), self.counter("shared_refused_blocks_total")
            content = self.put(blocks, content)
            wait_for(
                lambda before=before, refused=refused: (
                    self.num_copied() + self.counter("shared_refused_blocks_total")
                    >= before + refused + len(blocks)
                )
            )
            if self.num_copied() >= before + len(blocks):
                return content
            assert self.server is not None
            with AdminClient(self.server.target) as admin:
                admin.evict(everything=True)

    def num_copied(self) -> float:
        return self.counter("shared_copied_blocks_total")

    def until_copying(self) -> None:
        """Until one block is copied: the node may drop copies while it still sends an earlier
        flush."""
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
        return all(found(self.engine, blocks))

    def leases(self, blocks: list[bytes]) -> np.ndarray:
        assert self.engine is not None
        name = os.urandom(8).hex()
        lease = self.engine.session.acquire(name, [GroupHashes(0, blocks)]).result(60)
        self.engine.session.release(name)
        return lease.pinned[0]


@contextlib.contextmanager
def node(kind: type[SharingNode] = SharingNode) -> Iterator[SharingNode]:
    with opened(kind, 128 << 20) as made:
        yield made


def bucket_flags(s3: "s3_support.Server", port: int) -> tuple[str, ...]:
    from tests.tiers import s3_support

    return (
        *("--tiers.s3.bucket", s3_support.BUCKET),
        *("--tiers.s3.endpoint", f"http://127.0.0.1:{port}"),
        *("--tiers.s3.credentials-file", str(s3.keys["hotkv"])),
        *constant("tiers.s3.tier.BOUNDS", "S3Bounds(1 << 24, 1 << 20, 0.1, BOUNDS.timeouts)"),
    )


def check_sharing(a: SharingNode, b: SharingNode) -> None:
    chain, kept = hashes(CHAIN), hashes(CHAIN)
    content = a.fill(chain)
    # Until `b` is connected to the Valkey, it finds no block.
    wait_for(lambda: b.finds(chain))
    assert b.loads(chain, content)
    assert b.counter("shared_fetched_blocks_total") == CHAIN
    # A lookup on `b` would fetch these blocks.
    a.fill(kept)
    assert a.engine is not None
    a.engine.session.flush().result(60)
    assert not a.finds(chain) and not b.leases(kept).any()
    wait_for(lambda: not b.finds(chain))
    again = a.fill(chain)
    wait_for(lambda: b.loads(chain, again))


HELD_S = 2.0 * faults.STALLED_S
"""Longer than a part of the server may hang before its health probe says so."""


class Probed:
    """Requests /livez all the time. `answers`: all but 200."""

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
            except OSError as error:
                self.answers.append(str(error))
            self.num_asked += 1

    def close(self) -> list[str]:
        self._over.set()
        self._thread.join()
        return self.answers


@contextlib.contextmanager
def probed(server: Server) -> Iterator[Probed]:
    """/livez must answer 200 in the `with` block, and for HELD_S after it."""
    probe = Probed(server)
    try:
        yield probe
        until_s, before = time.monotonic() + HELD_S, probe.num_asked
        while time.monotonic() < until_s or probe.num_asked < before + 5:
            time.sleep(0.05)
    finally:
        answers = probe.close()
    assert not answers, answers
