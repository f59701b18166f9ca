"""Compares the lane with gRPC's stream: the same calls of two sessions with one server, in turns.
`python -m bench.lane [--rounds N] [--json]`.

For each kind of call and each way: the median time until the answer, the server's processor time,
and the client's. Blocks have 4 KiB, so copies cost little. Figures, each the lane's divided by
gRPC's: `lane_ping`, `lane_store_16`, `lane_hit_256` (lease, load and release of 256 blocks) for the
round trip, the same with `_server_cpu` and `_client_cpu` for processor time.
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from bench.cost import hit, store, thread_times
from bench.report import at_most, bounds_json, median, parser, print_report, say
from bench.servers import MIB, new_hashes, serving
from hotkv_client import Session, streams
from hotkv_client.paged_engine import PagedEngine

CALLS = 100
BOUNDS = {"lane_hit_256": at_most(0.35)}
WAYS = ("gRPC", "lane")


def engine(target: str, way: str) -> PagedEngine:
    name = "none.sock" if way == "gRPC" else streams.SOCKET_NAME
    with mock.patch.object(streams, "SOCKET_NAME", name):
        return PagedEngine(target, layers=1, num_blocks=512, page_bytes=4096).connect()


def ping(session: Session, name: str) -> None:
    session.ping(10)


def store_new(session: Session, ids: NDArray[np.int32], name: str) -> None:
    store(session, name, new_hashes(len(ids)), ids)


def hit_all(session: Session, kept: list[bytes], ids: NDArray[np.int32], name: str) -> None:
    hit(session, name, kept, ids)


def main() -> int:
    options = parser("Compare the lane with gRPC.")
    options.add_argument("--rounds", type=int, default=8)
    chosen = options.parse_args()
    times: dict[tuple[str, str], list[float]] = {}
    spent: dict[tuple[str, str], np.ndarray] = {}
    with serving(256 * MIB) as server, ExitStack() as stack:
        server.wait_filled()
        ids, kept = np.arange(256, dtype=np.int32), new_hashes(256)
        kinds: dict[str, dict[str, Callable[[str], object]]] = {}
        for way in WAYS:
            one = engine(server.target, way)
            stack.callback(one.close)
            session = one.session
            store(session, "kept", kept, ids)
            kinds[way] = {
                "ping": partial(ping, session),
                "store_16": partial(store_new, session, ids[:16]),
                "hit_256": partial(hit_all, session, kept, ids),
            }
        for number in range(chosen.rounds):
            say(f"round {number + 1} of {chosen.rounds}")
            for kind in kinds[WAYS[0]]:
                for way in WAYS if number % 2 else WAYS[::-1]:
                    call = kinds[way][kind]
                    before = sum(thread_times(server.pid).values()), time.process_time()
                    for at in range(CALLS):
                        began_s = time.perf_counter()
                        call(f"{kind} {number} {at}")
                        times.setdefault((way, kind), []).append(time.perf_counter() - began_s)
                    after = sum(thread_times(server.pid).values()), time.process_time()
                    more = np.subtract(after, before) / CALLS / chosen.rounds
                    spent[way, kind] = spent.get((way, kind), np.zeros(2)) + more
    figures, rows = dict[str, object](), []
    for kind in kinds[WAYS[0]]:
        for way in WAYS:
            us = [1e6 * x for x in (median(times[way, kind]), *spent[way, kind])]
            rows.append((kind, way, *(f"{x:.0f}" for x in us)))
        figures[f"lane_{kind}"] = median(times["lane", kind]) / median(times["gRPC", kind])
        server_ratio, client_ratio = spent["lane", kind] / spent["gRPC", kind]
        figures[f"lane_{kind}_server_cpu"] = float(server_ratio)
        figures[f"lane_{kind}_client_cpu"] = float(client_ratio)
    headers = ("call", "way", "median us", "server's processor us", "client's processor us")
    print_report(headers, rows, {}, as_json=False)
    shown = [(name, f"{value:.3f}") for name, value in figures.items()]
    print_report(
        ("figure", "ratio"), shown, {**figures, **bounds_json(BOUNDS)}, as_json=chosen.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
