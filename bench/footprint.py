"""Measures the time and memory that a server and a client take before any work.

Prints a table; `--json` prints a JSON object last:

- `ready_s_1gib`, `ready_s_8gib`: from start to the health service's "serving", with a new arena of
  that size. `ready_s` is `ready_s_1gib`.
- `populate_gib_s`: rate at which the 8 GiB are prefaulted afterwards, by the admin API.
- `idle_rss_mb`: resident MB (10^6 bytes) without the arena.
- `import_s`: to import `hotkv_client`.
- `base_dependencies`: packages that `pip install hotkv` requires.

An unmeasured start comes first, for the kernel's caches.
"""

import importlib.metadata
import subprocess
import sys
import time
from pathlib import Path

from bench.report import at_most, median, parser, print_figures
from bench.servers import GIB, serving
from hotkv_client.admin import AdminClient

BOUNDS = {
    "ready_s_1gib": at_most(2.0),
    "ready_s_8gib": at_most(2.0),
    "idle_rss_mb": at_most(160.0),
    "import_s": at_most(0.3),
    "base_dependencies": at_most(3),
}
IMPORT = (
    "import time; begin = time.perf_counter(); import hotkv_client; "
    "print(time.perf_counter() - begin)"
)
SETTLE_S = 2.0
LARGE_GIB = 8
FILL_DEADLINE_S = 300.0


def rss_beyond_arena_bytes(pid: int) -> int:
    """Resident bytes without files named `arena…`."""
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
    """(seconds until ready, resident bytes when idle), with 1 GiB."""
    with serving(GIB) as server:
        time.sleep(SETTLE_S)
        return server.ready_s, rss_beyond_arena_bytes(server.pid)


def start_large() -> tuple[float, float]:
    """(seconds until ready, GiB/s of prefaulting the rest), with LARGE_GIB."""
    arena_bytes = LARGE_GIB * GIB
    with serving(arena_bytes) as server, AdminClient(server.target) as admin:
        began_s, began_bytes = time.monotonic(), admin.tiers()[0]["capacity_byte_count"]
        while (reached_bytes := admin.tiers()[0]["capacity_byte_count"]) < arena_bytes:
            if time.monotonic() - began_s > FILL_DEADLINE_S:
                break
            time.sleep(0.2)
        return server.ready_s, (reached_bytes - began_bytes) / GIB / (time.monotonic() - began_s)


def import_once() -> float:
    """Seconds, in a fresh interpreter."""
    return float(
        subprocess.run(
            [sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True
        ).stdout
    )


def main() -> int:
    flags = parser("Cost of a server and a client before they do anything.")
    flags.add_argument("--repeats", type=int, default=5)
    options = flags.parse_args()
    start_once()
    starts = [start_once() for _ in range(options.repeats)]
    large = [start_large() for _ in range(max(1, options.repeats // 2))]
    import_once()
    imports = [import_once() for _ in range(options.repeats)]
    requirements = importlib.metadata.requires("hotkv") or []
    figures = {
        "ready_s_1gib": median([ready_s for ready_s, _ in starts]),
        "ready_s_8gib": median([ready_s for ready_s, _ in large]),
        "populate_gib_s": median([pace for _, pace in large]),
        "idle_rss_mb": median([rss_bytes for _, rss_bytes in starts]) / 1e6,
        "import_s": median(imports),
        "base_dependencies": len([name for name in requirements if "extra ==" not in name]),
    }
    beside = {"ready_s": figures["ready_s_1gib"]}
    print_figures(figures, BOUNDS, as_json=options.json, beside=beside)
    return 0


if __name__ == "__main__":
    sys.exit(main())
