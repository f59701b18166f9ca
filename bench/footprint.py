"""What a server and a client cost before they do anything.

Prints a table; `--json` prints one JSON object last: `ready_s` (start of the process to the health service's "serving",
1 GiB arena), `idle_rss_mb` (resident memory in MB, 10^6 bytes, without the arena's pages), `import_s` (import of
`hotkv_client`), `base_dependencies`. One start before the measured ones fills the kernel cache.
"""

import importlib.metadata
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.report import parser, print_report
from demo.processes import Server, ends_cleanly, runtime_folder

GIB = 1 << 30
TARGETS = {"ready_s": 2.0, "idle_rss_mb": 160.0, "import_s": 0.3, "base_dependencies": 3}
IMPORT = "import time; begin = time.perf_counter(); import hotkv_client; print(time.perf_counter() - begin)"
SETTLE_S = 2.0


def rss_beyond_arena_bytes(pid: int) -> int:
    """Resident bytes of a process, from /proc, but for mappings of a file whose name starts with `arena`."""
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


def import_once() -> float:
    """Seconds to import the client in a fresh interpreter."""
    return float(subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True).stdout)


def main() -> int:
    """Command line."""
    flags = parser("What a server and a client cost before they do anything.")
    flags.add_argument("--repeats", type=int, default=5)
    options = flags.parse_args()
    with ends_cleanly():
        start_once()
        starts = [start_once() for _ in range(options.repeats)]
        import_once()
        imports = [import_once() for _ in range(options.repeats)]
    requirements = importlib.metadata.requires("hotkv") or []
    figures = {
        "ready_s": statistics.median(ready_s for ready_s, _ in starts),
        "idle_rss_mb": statistics.median(rss_bytes for _, rss_bytes in starts) / 1e6,
        "import_s": statistics.median(imports),
        "base_dependencies": len([name for name in requirements if "extra ==" not in name]),
    }
    rows = [(name, f"{value:.3g}", f"{TARGETS[name]:g}", "" if value <= TARGETS[name] else "missed") for name, value in figures.items()]
    print_report(("figure", "median", "at most", ""), rows, {**figures}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
