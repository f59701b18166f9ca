"""`hotkv bench` from its flags to its answer."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hotkv_client.admin import AdminClient
from hotkv_client.command.host_bench import report
from hotkv_client.command.host_bench.measures import BenchEngine, Times, memcpy
from hotkv_client.command.host_bench.own_server import check_tiers, own_server

LEAST_ARENA_MIB = 256


def measure(target: str, seconds: float, say: Callable[[str], None]) -> dict[str, Times]:
    """Every measure of a server, by name. Raises BenchError."""
    num_threads = len(os.sched_getaffinity(0))
    engine = BenchEngine(target)
    measures: dict[str, Callable[[float], Times]] = {
        "memcpy_1": lambda s: memcpy(1, s),
        "memcpy": lambda s: memcpy(num_threads, s),
        "lookup": engine.lookups,
        "call": engine.calls,
        "store": engine.stores,
        "load": engine.loads,
        "small_hit": engine.small_hits,
    }
    found = {}
    try:
        for name, run in measures.items():
            say(name.replace("_", " "))
            found[name] = run(seconds / len(measures))
    finally:
        engine.close()
    return found


def run(
    seconds: float,
    arena_mib: int,
    disk: Path | None,
    config: Path | None,
    say: Callable[[str], None] = lambda what: print(f"hotkv bench: {what} …", file=sys.stderr),
) -> dict[str, Any]:
    """Measures this host for so many seconds; start, stop and tiers come on top. `disk`: a folder
    for a disk tier; `config`: a server's settings, whose tiers are tried. Raises BenchError, and
    ValueError for flags that can't be meant."""
    if not 1 <= seconds <= 3600:
        raise ValueError(f"--seconds {seconds:g}: give 1 to 3600")
    if arena_mib < LEAST_ARENA_MIB:
        raise ValueError(f"--arena-mib {arena_mib}: give {LEAST_ARENA_MIB} at least")
    problems: list[str] = []
    say("starting a server of its own")
    with own_server(arena_mib << 20) as target:
        found = measure(target, seconds, say)
        with AdminClient(target) as admin:
            devices = admin.info()["devices"]
    rows = report.rows_of(found, len(os.sched_getaffinity(0)))
    if flags := tier_flags(disk, config):
        say("tiers")
        timings, problems = check_tiers(flags)
        rows += report.tier_rows(timings)
    return report.answer_of(rows, devices, problems)


def tier_flags(disk: Path | None, config: Path | None) -> Sequence[str]:
    """Flags of `hotkv-server tiers check`; none without tiers."""
    return [
        *(["--config", str(config)] if config is not None else []),
        *(["--tiers.disk.path", str(disk), "--tiers.disk.bytes", "64MiB"] if disk else []),
    ]
