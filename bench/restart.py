"""Measures a restart: kills a server with an arena of 8 GiB and 100,000 ready blocks, and starts
another over it.

A row per restart; `--json` prints a JSON object last, with medians:

- `ready_s`: from start to the health service's "serving".
- `served_ratio`: share of acknowledged blocks that lookups find again.
- `verified_ratio`: share of blocks whose checksums are compared when it becomes ready.
- `empty_ready_s`: `ready_s` with an empty arena.
"""

import os
import signal
import sys

import numpy as np

from bench.report import at_least, at_most, bounds_json, median, parser, print_report
from bench.servers import new_hashes
from demo.processes import Server, ends_cleanly, runtime_folder
from hotkv_client import BlockRun, GroupHashes
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine

NUM_BLOCKS = 100_000
PAGE_BYTES = 80 << 10
ARENA = "8GiB"
ARENA_BYTES = 8 << 30
ENGINE_BLOCKS = 1000
BOUNDS = {"ready_s": at_most(1.5), "served_ratio": at_least(0.999)}


def connected(server: Server) -> PagedEngine:
    """With as much memory as it stores in one call."""
    return PagedEngine(
        server.target, layers=1, num_blocks=ENGINE_BLOCKS, page_bytes=PAGE_BYTES
    ).connect()


def fill(server: Server) -> list[bytes]:
    """Returns the blocks' hashes."""
    engine = connected(server)
    engine.kv[:] = np.random.default_rng(0).integers(0, 256, engine.kv.shape, np.uint8)
    stored: list[bytes] = []
    block_ids = np.arange(ENGINE_BLOCKS, dtype=np.int32)
    for number in range(NUM_BLOCKS // ENGINE_BLOCKS):
        engine.kv[0, :, :8] = np.frombuffer(os.urandom(8), np.uint8)
        hashes = new_hashes(ENGINE_BLOCKS)
        engine.session.store(
            f"s{number}", f"s{number}", [BlockRun(0, hashes, block_ids)], 60
        ).result(60)
        stored += hashes
    engine.close()
    return stored


def found(server: Server, stored: list[bytes]) -> int:
    engine = connected(server)
    masks = [
        engine.session.lookup([GroupHashes(0, stored[start : start + ENGINE_BLOCKS])]).result(10)[0]
        for start in range(0, len(stored), ENGINE_BLOCKS)
    ]
    engine.close()
    return int(np.concatenate(masks).sum())


def main() -> int:
    flags = parser("Cost of a restart.")
    flags.add_argument("--repeats", type=int, default=5)
    options = flags.parse_args()
    rows: list[tuple[float, float, float]] = []
    with ends_cleanly(), runtime_folder(ARENA_BYTES + (1 << 30)) as folder:
        with Server(folder, ARENA) as server:
            empty_ready_s = server.wait_ready()
            # Earlier, blocks would be refused or evicted.
            server.wait_filled()
            stored = fill(server)
            os.kill(server.pid, signal.SIGKILL)
        for _ in range(options.repeats):
            with Server(folder, ARENA) as server:
                ready_s = server.wait_ready()
                with AdminClient(server.target) as admin:
                    counters = admin.info()["counters"]
                rows.append(
                    (
                        ready_s,
                        found(server, stored) / NUM_BLOCKS,
                        1 - counters["unverified_blocks"] / NUM_BLOCKS,
                    )
                )
                os.kill(server.pid, signal.SIGKILL)
    ready_s, served, verified = (median([row[at] for row in rows]) for at in range(3))
    figures: dict[str, object] = {
        "ready_s": ready_s,
        "served_ratio": served,
        "verified_ratio": verified,
        "empty_ready_s": empty_ready_s,
        **bounds_json(BOUNDS),
    }
    shown = [
        (number, f"{a:.2f}", f"{b:.5f}", f"{c:.3f}") for number, (a, b, c) in enumerate(rows, 1)
    ]
    print_report(
        ("restart", "ready s", "served", "verified at ready"), shown, figures, as_json=options.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
