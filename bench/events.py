"""Measures what KV events cost the server's event loop. `python -m bench.events [--json]`.

Four servers get the same stores, many turns a round: without events, publishing over ZMQ, read
by an engine, and answering routers (`events.answers`). Stores have 16 or 256 blocks, or one, as
in decoding. The figure is processor time of the main thread per store. `loop_share` is the share
of the event loop that events take if stores alone keep it half busy: half of the relative rise,
the median over rounds.
"""

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench.report import Bound, at_most, median, parser, print_report
from bench.servers import GIB, MIB, new_hashes, serving
from demo.processes import runtime_folder
from hotkv_client import BlockRun
from hotkv_client.paged_engine import PagedEngine

SIZES = {1: 50, 16: 25, 256: 4}
"""Stores in a turn, by the number of a store's blocks."""
TURNS = 6
"""Each server's turns in a round."""
ROUNDS = 9
HALF = 0.5
READ_S = 0.05
"""Pause between an engine's reads, as in `hotkv_vllm.scheduler.events`."""
BOUND: Bound = at_most(0.03)


class Stored:
    """A server, and an engine that stores."""

    def __init__(self, stack: ExitStack, *flags: str) -> None:
        self._server = stack.enter_context(serving(GIB, *flags))
        self._engine = PagedEngine(self._server.target, num_blocks=256, block_tokens=16).connect()
        stack.callback(self._engine.close)
        self._number = 0
        self._read_at_s = 0.0

    def loop_us(self, count: int, stores: int) -> float:
        """The main thread's processor time per store, in microseconds."""
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
        pid = self._server.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def round_us(servers: Mapping[str, Stored], count: int, stores: int) -> dict[str, float]:
    """Mean microseconds of the main thread per store, by server."""
    times: dict[str, list[float]] = {name: [] for name in servers}
    names = list(servers)
    for turn in range(TURNS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(servers[name].loop_us(count, stores))
    return {name: sum(found) / TURNS for name, found in times.items()}


def main() -> int:
    flags = parser("Time what events cost.")
    flags.add_argument("--rounds", type=int, default=ROUNDS)
    options = flags.parse_args()
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
        for count, stores in SIZES.items():
            round_us(servers, count, stores)
        rounds = {
            count: [round_us(servers, count, stores) for _ in range(options.rounds)]
            for count, stores in SIZES.items()
        }
    rows, figures = [], {}
    for count, found in rounds.items():
        for name in servers:
            ratios = sorted(one[name] / one["none"] for one in found)
            share = HALF * (median(ratios) - 1)
            low, high = (HALF * (ratios[at] - 1) for at in (0, -1))
            us = median([one[name] for one in found])
            missed = "missed" if not BOUND.is_met(share) else ""
            rows.append(
                (name, count, f"{us:.0f}", f"{share:.1%}", f"{low:.1%}", f"{high:.1%}", missed)
            )
            if name != "none":
                figures[f"{name}_{count}_loop_share"] = round(share, 4)
    headers = (
        *("events", "blocks", "loop us a store", "of a loop that is half busy"),
        *("least", "most", f"bound {BOUND}"),
    )
    print_report(headers, rows, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
