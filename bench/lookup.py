"""Measures a lookup in three ways, in turns: in the shared block table, by a message on the
session's stream, and as a unary call. `python -m bench.lookup [--json]`.

A server holds a million ready blocks of 4 KiB. The table is read cold: other data first fills
the processor's caches, then lookups of unknown hashes bring back the code. Every time includes
converting the hashes from `list[bytes]`. "again" repeats a lookup at once, in warm caches.
"""

import sys
import time
from collections.abc import Callable

import grpc
import numpy as np

from bench.report import median, parser, percentile, print_report
from bench.servers import GIB, new_hashes, serving, session_over
from hotkv_client import GroupHashes
from hotkv_proto.v1 import cache_pb2, cache_pb2_grpc
from tests.doubles.with_constants import COMMAND, constant

COUNTS = (64, 1024, 8192, 65536)
BLOCKS = 1_000_000
CODE_WARMERS = 8
"""Lookups of 32 unknown hashes before each measured one: the code is as warm as in a busy
server."""
ROUNDS = {64: 200, 1024: 200, 8192: 60, 65536: 15}


class ColdPicks:
    """Each draw evicts the block table from the processor's caches."""

    def __init__(self, pool: list[bytes], seed: int) -> None:
        self._pool = pool
        self._random = np.random.default_rng(seed)
        self._litter = np.zeros(96 << 20, np.uint8)

    def take(self, count: int) -> list[bytes]:
        """The hashes themselves are warm, as when vLLM has just hashed the prompt."""
        chosen = [self._pool[i] for i in self._random.integers(0, len(self._pool), count)]
        self._litter += 1
        b"".join(chosen)
        return chosen


def main() -> int:
    options = parser("Time lookups.").parse_args()
    times: dict[tuple[str, int], list[float]] = {}
    many = constant("settings.storage.MIN_ENTRIES", BLOCKS + 1)
    with serving(4 * GIB, *many, command=COMMAND) as server:
        server.wait_filled()
        pool = new_hashes(BLOCKS)
        session = session_over(server.target, pool)
        hits, misses = ColdPicks(pool, 1), ColdPicks(new_hashes(200_000), 2)
        stub = cache_pb2_grpc.CacheServiceStub(grpc.insecure_channel(server.target))

        def by_table(hashes: list[bytes]) -> None:
            assert session.probe(0, hashes) is not None, "no table"

        def by_stream(hashes: list[bytes]) -> None:
            session.lookup([GroupHashes(0, hashes)]).result(10)

        def by_unary(hashes: list[bytes]) -> None:
            groups = [cache_pb2.GroupHashes(group_index=0, hashes=b"".join(hashes))]
            np.frombuffer(
                stub.Lookup(cache_pb2.LookupRequest(key_space_id=1, groups=groups)).groups[0].flags,
                np.bool_,
            )

        variants: dict[str, tuple[ColdPicks, Callable[[list[bytes]], None]]] = {
            "table": (hits, by_table),
            "table, all miss": (misses, by_table),
            "grpc stream": (hits, by_stream),
            "grpc unary": (hits, by_unary),
        }
        code_warmer = new_hashes(32)
        for count in COUNTS:
            for _ in range(ROUNDS[count]):
                for name, (picks, call) in variants.items():
                    chosen = picks.take(count)
                    for _ in range(CODE_WARMERS):
                        call(code_warmer)
                    start_s = time.perf_counter()
                    call(chosen)
                    asked_s = time.perf_counter()
                    times.setdefault((name, count), []).append((asked_s - start_s) * 1e6)
                    if name == "table":
                        call(chosen)
                        again_us = (time.perf_counter() - asked_s) * 1e6
                        times.setdefault(("table, again", count), []).append(again_us)
                times.setdefault(("grpc ping", 0), []).append(session.ping(10) * 1e6)
        session.close()
    rows = [
        (name, count or "-", round(median(values), 1), round(percentile(values, 0.9), 1))
        for (name, count), values in times.items()
    ]
    figures: dict[str, object] = {
        "table_us_p50": median(times["table", 1024]),
        "table_again_us_p50": median(times["table, again", 1024]),
        "grpc_us_p50": median(times["grpc stream", 1024]),
        "grpc_unary_us_p50": median(times["grpc unary", 1024]),
        "grpc_ping_us_p50": median(times["grpc ping", 0]),
        "by_count": {
            name: {count: median(times[name, count]) for count in COUNTS} for name in variants
        },
        "blocks": BLOCKS,
    }
    print_report(("variant", "hashes", "p50 us", "p90 us"), rows, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
