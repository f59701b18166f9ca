"""Cost of a server and a client before they do anything.

Prints a table; `--json` prints one JSON object last: `ready_s_1gib` and `ready_s_8gib` (start of
the process to the health service's "serving", an arena of that size that is not there yet;
`ready_s` is the former), `populate_gib_s` (pace at which the 8 GiB get memory after that, as the
admin API says), `idle_rss_mb` (resident memory in MB, 10^6 bytes, without the arena's pages),
`import_s` (import of `hotkv_client`), `base_dependencies`. One start before the measured ones fills
the kernel cache.
"""

import importlib.metadata
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.report import parser, print_report
from demo.processes import Server, ends_cleanly, runtime_folder
from hotkv_client.admin import AdminClient

GIB = 1 << 30
TARGETS = {
    "ready_s_1gib": 2.0,
    "ready_s_8gib": 2.0,
    "idle_rss_mb": 160.0,
    "import_s": 0.3,
    "base_dependencies": 3,
}
IMPORT = (
    "import time; begin = time.perf_counter(); import hotkv_client; "
    "print(time.perf_counter() - begin)"
)
SETTLE_S = 2.0
LARGE_GIB = 8
FILL_DEADLINE_S = 300.0


def rss_beyond_arena_bytes(pid: int) -> int:
    """Resident bytes of a process, from /proc, but for mappings of a file whose name starts with
    `arena`."""
    total_bytes = 0
    counts = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            counts = not (len(words) > 5 and Path(words[5]).name.startswith("arena"))
        elif words[0] == "Rss:" and counts:
            total_bytes += int(words[1]) * 1024
    return total_bytes


def start_once() -> tuple[float, int]:
    """Starts a server with a 1 GiB arena: seconds until ready, resident bytes when idle."""
    with runtime_folder(GIB + (1 << 28)) as folder, Server(folder, "1GiB") as server:
        ready_s = server.wait_ready()
        time.sleep(SETTLE_S)
        return ready_s, rss_beyond_arena_bytes(server.pid)


def start_large() -> tuple[float, float]:
    """Starts a server with an arena of LARGE_GIB: seconds until ready, GiB/s at which the rest of
    it gets memory."""
    arena_bytes = LARGE_GIB * GIB
    with runtime_folder(arena_bytes + GIB) as folder, Server(folder, f"{LARGE_GIB}GiB") as server:
        ready_s = server.wait_ready()
        with AdminClient(server.target) as admin:
            began_s, began_bytes = time.monotonic(), admin.tiers()[0]["capacity_byte_count"]
            while (reached_bytes := admin.tiers()[0]["capacity_byte_count"]) < arena_bytes:
                if time.monotonic() - began_s > FILL_DEADLINE_S:
                    break
                time.sleep(0.2)
            return ready_s, (reached_bytes - began_bytes) / GIB / (time.monotonic() - began_s)


def import_once() -> float:
    """Seconds to import the client in a fresh interpreter."""
    return float(
        subprocess.run(
            [sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True
        ).stdout
    )


def main() -> int:
    """Command line."""
    flags = parser("Cost of a server and a client before they do anything.")
    flags.add_argument("--repeats", type=int, default=5)
    options = flags.parse_args()
    with ends_cleanly():
        start_once()
        starts = [start_once() for _ in range(options.repeats)]
        large = [start_large() for _ in range(max(1, options.repeats // 2))]
        import_once()
        imports = [import_once() for _ in range(options.repeats)]
    requirements = importlib.metadata.requires("hotkv") or []
    figures = {
        "ready_s_1gib": statistics.median(ready_s for ready_s, _ in starts),
        "ready_s_8gib": statistics.median(ready_s for ready_s, _ in large),
        "populate_gib_s": statistics.median(pace for _, pace in large),
        "idle_rss_mb": statistics.median(rss_bytes for _, rss_bytes in starts) / 1e6,
        "import_s": statistics.median(imports),
        "base_dependencies": len([name for name in requirements if "extra ==" not in name]),
    }
    rows = [
        (
            name,
            f"{value:.3g}",
            f"{TARGETS[name]:g}" if name in TARGETS else "",
            "missed" if value > TARGETS.get(name, value) else "",
        )
        for name, value in figures.items()
    ]
    print_report(
        ("figure", "median", "at most", ""),
        rows,
        {**figures, "ready_s": figures["ready_s_1gib"]},
        as_json=options.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
