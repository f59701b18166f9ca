"""Measures what KV events (messages about stored and evicted blocks) cost the server's event loop.
`python -m bench.events [--json]`.

Compares four servers. The first publishes no events. The second publishes events over ZMQ. The
third lets an engine read its events. The fourth answers routers that ask which blocks of a prompt
are cached (setting `events.answers`). Each server gets the same stores: prompts of 16 and of 256
blocks, and single blocks as decoding stores them. The figure is the processor time per store of the
server's main thread, which runs the event loop.

In each round the servers take turns many times, so that other load on the machine affects all of
them. `loop_share` is the share of the event loop's time that events take, if the stores alone keep
the loop half busy. It is half of the relative rise of the processor time over the server without
events, as the median over the rounds.
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
from hotkv_client.testing import PagedEngine

SIZES = {1: 50, 16: 25, 256: 4}
"""Number of stores that a server gets in a turn, by number of blocks in a store."""
TURNS = 6
"""Number of turns that each server gets in a round."""
ROUNDS = 9
HALF = 0.5
READ_S = 0.05
"""Pause in seconds between two reads of events by an engine, the same as in the connector
(`hotkv_vllm.scheduler.events`)."""
BOUND: Bound = at_most(0.03)


class Stored:
    """A server, and an engine that stores blocks in it."""

    def __init__(self, stack: ExitStack, *flags: str) -> None:
        self._server = stack.enter_context(serving(GIB, *flags))
        self._engine = PagedEngine(self._server.target, num_blocks=256, block_tokens=16).connect()
        stack.callback(self._engine.close)
        self._number = 0
        self._read_at_s = 0.0

    def loop_us(self, count: int, stores: int) -> float:
        """Makes `stores` stores of `count` blocks each. Returns the processor time of the
        server's main thread per store, in microseconds."""
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


def round_us(servers: Mapping[str, Stored], count: int, stores: int) -> dict[str, float]:
    """Runs a round: each server in turn gets `stores` stores of `count` blocks, several times.
    Returns, by server, the mean processor time in microseconds that a store takes on the server's
    main thread."""
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
