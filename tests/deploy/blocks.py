"""`blocks.py store|check TARGET` stores blocks, or loads and compares all of them (status 1 if
any is missing). Imports nothing from the tests: it runs wherever hotkv's client is installed."""

import sys

import numpy as np

from hotkv_client import BlockResult, BlockRun, GroupHashes, LoadRun, TransferStatus
from hotkv_client.paged_engine import PagedEngine

NUM_BLOCKS = 200
PAGE_BYTES = 64 << 10
WAIT_S = 240.0


def main() -> int:
    action, target = sys.argv[1:]
    random = np.random.default_rng(7)
    hashes = [random.bytes(32) for _ in range(NUM_BLOCKS)]
    ids = np.arange(NUM_BLOCKS, dtype=np.int32)
    engine = PagedEngine(target, layers=1, num_blocks=NUM_BLOCKS, page_bytes=PAGE_BYTES)
    expected = random.integers(0, 256, engine.kv.shape, np.uint8)
    session = engine.connect(WAIT_S).session
    try:
        if action == "store":
            engine.kv[:] = expected
            done = session.store("s", "s", [BlockRun(0, hashes, ids)], WAIT_S).result(WAIT_S)
            kept = np.isin(done.results[0], (BlockResult.STORED, BlockResult.PRESENT))
            print(f"{int(kept.sum())} of {NUM_BLOCKS} blocks stored")
            return 0 if kept.all() else 1
        pinned = session.acquire("l", [GroupHashes(0, hashes)]).result(WAIT_S).pinned[0]
        print(f"{int(pinned.sum())} of {NUM_BLOCKS} blocks found", end=", ")
        if not pinned.all():
            return 1
        status = session.load("l", "l", [LoadRun(0, ids, ids)], WAIT_S).result(WAIT_S).status
        is_equal = status is TransferStatus.DONE and np.array_equal(engine.kv, expected)
        print("bytes equal" if is_equal else f"bytes differ ({status.name})")
        return 0 if is_equal else 1
    finally:
        engine.close()


if __name__ == "__main__":
    sys.exit(main())
