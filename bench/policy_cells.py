"""What the policy hits, cell by cell: traces, sizes of the cache. `python -m bench.policy_cells
TRACE... [--json] [--against FILE]`.

Cells are each TRACE (in Mooncake's format) and each kind of made-up traffic of the tests, at
SHARES of their unique blocks. Nothing depends on the machine. To compare two versions of hotkv, run
this file over the older one's modules (PYTHONPATH), keep its JSON, and give it as `--against`.

Prints a table; `--json` prints one JSON object last: `cells` (hit share of all accesses, by trace
and share of blocks), and with `--against` `worst_points` (the smallest difference to it, in points)
and `worst_cell`.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.report import parser, print_report
from hotkv_server.cache.room.policies import POLICIES
from hotkv_server.simulate.replay import replay
from hotkv_server.simulate.trace import Trace, load_trace
from tests.simulate.traces import MAKERS, write_trace

SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
SEEDS = (1, 2)
REQUESTS = 3000
LIMIT_POINTS = -1.0


def traces(paths: list[Path]) -> Iterator[tuple[str, Trace]]:
    """Each by its name."""
    for path in paths:
        yield path.stem.removesuffix("_trace"), load_trace(path)
    with tempfile.TemporaryDirectory(prefix="hotkv-bench-") as folder:
        for name, make in MAKERS.items():
            for seed in SEEDS:
                made = write_trace(Path(folder) / "made.jsonl", make(seed, REQUESTS))
                yield f"{name}-{seed}", load_trace(made)


def measure(paths: list[Path], policy: str) -> dict[str, float]:
    """The hit share of each cell."""
    cells = {}
    for name, trace in traces(paths):
        for share in SHARES:
            capacity = max(8, int(share * trace.num_unique_blocks))
            found = replay(trace, capacity, POLICIES[policy])
            cells[f"{name} {share:g}"] = float(found.prefix.sum() / trace.num_accesses)
            print(f"{name} {share:g}: {cells[f'{name} {share:g}']:.4f}", file=sys.stderr)
    return cells


def main() -> int:
    """Command line."""
    flags = parser("What the policy hits, cell by cell.")
    flags.add_argument("traces", nargs="*", type=Path)
    flags.add_argument("--policy", default="hotness", choices=sorted(POLICIES))
    flags.add_argument("--against", type=Path, help="JSON of another run")
    options = flags.parse_args()
    cells = measure(options.traces, options.policy)
    figures: dict[str, object] = {"cells": cells}
    rows: list[tuple[str, ...]] = [(name, f"{hit:.4f}", "") for name, hit in cells.items()]
    if options.against is not None:
        last = options.against.read_text().strip().splitlines()[-1]
        other = json.loads(last)["cells"]
        points = {name: 100 * (cells[name] - other[name]) for name in cells if name in other}
        rows = [(name, f"{cells[name]:.4f}", f"{points.get(name, 0):+.2f}") for name in cells]
        worst = min(points, key=lambda name: points[name])
        figures |= {"worst_points": points[worst], "worst_cell": worst}
        missed = "missed" if points[worst] < LIMIT_POINTS else ""
        rows.append((f"worst: {worst}", f"{points[worst]:+.2f} points", missed))
    print_report(("cell", "hit share", "points"), rows, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
