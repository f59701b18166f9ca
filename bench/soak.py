"""Measures a server under load: many sessions, more requests than it can serve, hostile clients.

64 sessions in four processes look up, store and load 16 blocks of 16 KiB per call: at full speed
(saturation), then at a fixed rate without waiting for answers, half of saturation for `--seconds`
(600), and twice it. At last a quiet session's lookups are measured beside each hostile client, and
beside a busy processor.

Prints a table; `--json` prints a JSON object last:

- Lookups in ms: `idle_p50_ms` (a single session), `half_p50_ms`, `half_p99_ms` (half load),
  `p99_ratio` (p99 at half load / idle p50), `recovered_p50_ms` (a single session after the
  overload).
- `saturation_ops`: operations per second at full speed.
- `bystander_p99_ms`, `bystander_p99_ratio`: lookups of this process at half load; the sessions' own
  include waits for each other in a Python process.
- `bystander_over_alone`: the same p99 / median of such lookups, as far apart, without the load. A
  processor that slept in the pause answers later than `idle_p50_ms`, whose pauses are short.
- `server_p99_ms`, `server_longest_ms`, `server_p99_ratio`: from a message's arrival until the event
  loop serves it, by the server, in the last minute at half load. Needs `--seconds` of 60 or more.
- `errors`, `overload_errors`: by reason, at half load and in the overload.
- `memory_growth_mb`, `descriptor_growth`: the server's, without the arena.
- For each hostile client `<kind>_ratio`: p50 of lookups beside it / p50 beside a busy processor.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from bench.footprint import rss_beyond_arena_bytes
from bench.load.clients import HOSTILE
from bench.report import at_most, parser, percentile, print_figures
from bench.servers import MIB, new_hashes, serving
from hotkv_client import GroupHashes
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine

CLIENT = (sys.executable, "-m", "bench.load.clients")
PROCESSES, SESSIONS_EACH = 4, 16
ARENA_BYTES = 64 * MIB
SATURATION_S, OVERLOAD_S, HOSTILE_S, SETTLE_S = 10.0, 10.0, 8.0, 3.0
IDLE_LOOKUPS = 2000
BYSTANDER_PAUSE_S, ALONE_S = 0.02, 10.0
BOUNDS = {
    "p99_ratio": at_most(20.0),
    "server_p99_ratio": at_most(5.0),
    "bystander_p99_ratio": at_most(10.0),
}
HOSTILE_RATIO = 1.2


@dataclass(slots=True)
class Done:
    """Results of all sessions together."""

    done: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    lookups_ms: list[float] = field(default_factory=list)


def traffic(target: str, seconds: float, rate: float, seed: int) -> Done:
    """rate: operations per second; 0: full speed."""
    words = ["traffic", target, str(SESSIONS_EACH), str(seconds), str(rate / PROCESSES)]
    command = [*CLIENT, *words]
    children = [
        subprocess.Popen(
            [*command, str(seed + at)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for at in range(PROCESSES)
    ]
    total = Done()
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "connected\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        assert child.stdout is not None
        result = json.loads(child.stdout.read())
        child.wait()
        total.done += sum(result["done"].values())
        total.errors.update(result["errors"])
        total.lookups_ms += result["lookups_ms"]
    return total


def quiet_lookups_ms(target: str, seconds: float = 0.0, pause_s: float = 0.001) -> list[float]:
    """Of 16 blocks, one after the other with pauses. seconds: 0: IDLE_LOOKUPS lookups."""
    engine = PagedEngine(target, model="quiet", engine_id="quiet").connect()
    hashes = new_hashes(16)
    found: list[float] = []
    until_s = time.monotonic() + seconds
    while len(found) < IDLE_LOOKUPS if not seconds else time.monotonic() < until_s:
        began_s = time.perf_counter()
        engine.session.lookup([GroupHashes(0, hashes)]).result(10)
        found.append(1e3 * (time.perf_counter() - began_s))
        time.sleep(pause_s)
    engine.close()
    return found


def beside(target: str, kind: str) -> float:
    """Median ms of a quiet session's lookups beside a client of this kind."""
    other = subprocess.Popen([*CLIENT, kind, target], stderr=subprocess.DEVNULL)
    try:
        time.sleep(SETTLE_S)
        return percentile(quiet_lookups_ms(target, HOSTILE_S), 0.5)
    finally:
        other.kill()
        other.wait()
        time.sleep(1.0)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def main() -> int:
    flags = parser("Load: many sessions, overload, hostile clients.")
    flags.add_argument(
        "--seconds", type=float, default=600.0, help="how long at half of the saturation"
    )
    options = flags.parse_args()
    with serving(ARENA_BYTES) as server:
        idle_ms = percentile(quiet_lookups_ms(server.target), 0.5)
        alone_ms = percentile(quiet_lookups_ms(server.target, ALONE_S, BYSTANDER_PAUSE_S), 0.5)
        full = traffic(server.target, SATURATION_S, 0.0, 100)
        saturation = full.done / SATURATION_S
        before = rss_beyond_arena_bytes(server.pid), descriptors(server.pid)
        with ThreadPoolExecutor(1) as thread:
            bystander = thread.submit(
                quiet_lookups_ms, server.target, options.seconds, BYSTANDER_PAUSE_S
            )
            half = traffic(server.target, options.seconds, saturation / 2, 200)
            bystander_ms = bystander.result()
        with AdminClient(server.target) as admin:
            lag = admin.info()["loop"]
        after = rss_beyond_arena_bytes(server.pid), descriptors(server.pid)
        over = traffic(server.target, OVERLOAD_S, saturation * 2, 300)
        time.sleep(SETTLE_S)
        recovered_ms = percentile(quiet_lookups_ms(server.target), 0.5)
        costs = {kind: [beside(server.target, kind)] for kind in HOSTILE}
        for kind in reversed(HOSTILE):
            costs[kind].append(beside(server.target, kind))
    half_ms = half.lookups_ms
    spinning = min(costs.pop("spin"))
    figures: dict[str, object] = {
        "idle_p50_ms": idle_ms,
        "saturation_ops": saturation,
        "half_p50_ms": percentile(half_ms, 0.5),
        "half_p99_ms": percentile(half_ms, 0.99),
        "p99_ratio": percentile(half_ms, 0.99) / idle_ms,
        "bystander_p99_ms": percentile(bystander_ms, 0.99),
        "bystander_p99_ratio": percentile(bystander_ms, 0.99) / idle_ms,
        "bystander_over_alone": percentile(bystander_ms, 0.99) / alone_ms,
        "server_p99_ms": 1e3 * lag["lag_p99_s"],
        "server_longest_ms": 1e3 * lag["lag_longest_s"],
        "server_p99_ratio": 1e3 * lag["lag_p99_s"] / idle_ms,
        "errors": dict(half.errors),
        "memory_growth_mb": (after[0] - before[0]) / 1e6,
        "descriptor_growth": after[1] - before[1],
        "overload_errors": dict(over.errors),
        "recovered_p50_ms": recovered_ms,
        "spin_p50_ms": spinning,
        **{f"{kind}_ratio": min(values) / spinning for kind, values in costs.items()},
    }
    hostile = {f"{kind}_ratio": at_most(HOSTILE_RATIO) for kind in costs}
    print_figures(figures, BOUNDS | hostile, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
