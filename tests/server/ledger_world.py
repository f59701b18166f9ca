"""A core with a session, and a ledger."""

from pathlib import Path

import numpy as np

from bench.policies import POLICIES
from hotkv_proto.blocks import NO_RETENTION
from hotkv_proto.keys import KeySpace
from hotkv_proto.reports import Miss, RequestReport
from hotkv_proto.table import BlockTable, TableGeometry
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import CoreConfig
from hotkv_server.ledger.drive import LiveLedger
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.names import DisplayNames
from tests.server.support import FULL

ARENA_BYTES, SLAB_BYTES, CAPACITY = 1 << 20, 1 << 16, 64


def key_space(model: str) -> KeySpace:
    return KeySpace(model, "w", "bfloat16", (FULL,), 16)


SMALL = key_space("small")


class World:
    """`report` tells the ledger of a request."""

    def __init__(self, directory: Path | None = None) -> None:
        geometry = TableGeometry.for_capacity(CAPACITY, 1, ARENA_BYTES)
        table = BlockTable(np.zeros(geometry.file_bytes, np.uint8), geometry)
        config = CoreConfig(ARENA_BYTES, SLAB_BYTES, CAPACITY)
        self.core = CacheCore(config, table, POLICIES["lru"](CAPACITY))
        self.session = self.open("engine")
        self.ledger = LiveLedger(self.core, directory=directory, make_policy=POLICIES["lru"])
        self._rng = np.random.default_rng(1)

    def open(self, engine_id: str, of: KeySpace = SMALL) -> LiveSession:
        record = self.core.open_session(engine_id, "scheduler", of, 0.0)
        return LiveSession(record, engine_id, of, "test", DisplayNames())

    def report(self, num_blocks: int = 2, hit_tokens: int = 0, report_id: int = 0) -> None:
        hashes = self._rng.integers(1, 1 << 32, (num_blocks, 8), np.uint32)
        tokens = 16 * num_blocks + 1
        said = RequestReport(
            hashes, tokens, 0, hit_tokens, 0.0, NO_RETENTION, miss=Miss.ABSENT, saved_s=1.0,
            report_id=report_id,
        )  # fmt: skip
        self.ledger.report(self.session, said)

    @property
    def followed_tokens(self) -> int:
        for _ in self.ledger.follow():
            pass
        return self.ledger.outlook(0).prompt_tokens
