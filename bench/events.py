"""Measures what KV events cost the server's event loop. `python -m bench.events [--json]`.

Four servers in turn: without events, publishing over ZMQ, read by an engine, and answering.
Each gets the same stores: prompts of 16 and of 256 blocks, and single blocks as decoding stores
them. The figure is the processor time of the server's main thread, which runs the loop, for
a store. `loop_share`: the part of the loop that events take when it is half busy with such stores.
"""

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench.report import median, parser, print_report
from bench.servers import GIB, MIB, new_hashes, serving
from demo.processes import runtime_folder
from hotkv_client import BlockRun
from hotkv_client.testing import PagedEngine

SIZES = {1: 600, 16: 300, 256: 40}
"""Stores in a round, by blocks in a store."""
ROUNDS = 7
HALF = 0.5
READ_S = 0.05
"""Pause between two reads of an engine (`hotkv_vllm.scheduler.events`)."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Stored:
    """A server and an engine that stores in it."""

    def __init__(self, stack: ExitStack, *flags: str) -> None:
        self._server = stack.enter_context(serving(GIB, *flags))
        self._engine = PagedEngine(self._server.target, num_blocks=256, block_tokens=16).connect()
        stack.callback(self._engine.close)
        self._number = 0
        self._read_at_s = 0.0

    def loop_us(self, count: int, stores: int) -> float:
        """Returns the main thread's microseconds for a store of `count` blocks."""
        tokens = np.arange(16 * count, dtype=np.int32)
        block_ids = np.arange(count, dtype=np.int32)
        prompts = [new_hashes(count) for _ in range(stores)]
        before_s = self._cpu_s()
        for hashes in prompts:
            self._number += 1
            name = f"s{self._number}"
            run = BlockRun(0, hashes, block_ids, token_ids=tokens)
            self._engine.session.store(name, name, [run], 30).result(30)
            if self._engine.session.has_events and time.monotonic() >= self._read_at_s:
                self._engine.session.read_events().result(30)
                self._read_at_s = time.monotonic() + READ_S
        return (self._cpu_s() - before_s) / stores * 1e6

    def _cpu_s(self) -> float:
        """Returns the processor time of the server's main thread, to the nanosecond."""
        pid = self._server.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> int:
    """Runs the command."""
    options = parser("Time what events cost.").parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(runtime_folder(MIB))
        endpoint = ("--events.endpoint", f"ipc://{folder}/events")
        replay = ("--events.replay-endpoint", f"ipc://{folder}/replay")
        servers = {
            "none": Stored(stack),
            "node": Stored(stack, *endpoint, *replay),
            "engine": Stored(stack, "--events.identity", "engine"),
            "asked": Stored(stack, "--events.answers", "true"),
        }
        times: dict[tuple[str, int], list[float]] = {}
        for count, stores in SIZES.items():
            for _ in range(ROUNDS):
                for name, one in servers.items():
                    times.setdefault((name, count), []).append(one.loop_us(count, stores))
    shares = {
        (name, count): HALF * (median(found) / median(times["none", count]) - 1)
        for (name, count), found in times.items()
    }
    rows = [
        (name, count, f"{median(found):.0f}", f"{shares[name, count]:.1%}")
        for (name, count), found in times.items()
    ]
    figures = {
        f"{name}_{count}_loop_share": round(share, 4)
        for (name, count), share in shares.items()
        if name != "none"
    }
    headers = ("events", "blocks", "loop us a store", "of a loop that is half busy")
    print_report(headers, rows, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
