"""Measures stores and loads through the server on a GPU, 1 GiB each, in turns with plain pinned
copies of as many contiguous bytes.

`python -m bench.gpu.transfer [--json]`, on a machine with a GPU; a minute, 6 GiB of device and 8
GiB of host memory. Times are from call to answer, without leases. Rates are divided by the plain
copy's in the same direction; both at once by the sum of the two, and by plain copies both ways.
Every load is compared on the device.
"""

import sys
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from bench.gpu.engine import (
    PlainCopies,
    Shape,
    Side,
    about,
    done,
    find_side,
    half_leased,
    operation_bytes,
    settled,
)
from bench.gpu.figures import Figure, gpu_parser, print_figures
from bench.report import median
from bench.servers import GIB, MIB, new_hashes
from hotkv_client.command.tables import table

PAGES = (64 << 10, 16 << 10, 4 << 10, 256 << 10, 2 << 20)
"""Page sizes in bytes, the most informative first."""
LAYOUTS = ("LBHNC", "BLHNC")
TARGETS = {4 << 10: None, 16 << 10: 0.7, 64 << 10: 0.9, 256 << 10: 0.9, 2 << 20: 0.9}
BOTH_TARGET = 0.8
ARENA_OPERATIONS = 5
"""The arena, in operations: the leased blocks, and stores, which then evict as much as they
write."""


def layers_of(page_bytes: int, operation_bytes: int) -> int:
    """32, or fewer if an operation would have less than 16 blocks."""
    return max(1, min(32, operation_bytes // 16 // page_bytes))


@dataclass(slots=True)
class Times:
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, what: str, seconds: float) -> None:
        self.seconds.setdefault(what, []).append(seconds)

    def median(self, what: str) -> float:
        return median(self.seconds[what])

    def ratios(self) -> dict[str, float]:
        """Speed of each direction, as a share of plain copies'."""
        return {
            what: self.median(f"plain {what}") / self.median(what)
            for what in ("store", "load", "both")
            if what in self.seconds
        }

    def of_the_sum(self) -> float:
        """Both at once, divided by the sum of plain copies' single rates."""
        alone = 1 / self.median("plain store") + 1 / self.median("plain load")
        return 2 / self.median("both") / alone


def measure(
    side: Side,
    target: str,
    plain: PlainCopies,
    shape: Shape,
    rounds: int,
    *,
    with_both: bool = True,
) -> Times:
    """`with_both`: also a store and a load at once."""
    times = Times()
    with half_leased(side, target, shape, is_scattered=True) as (engine, sources, others, lease):
        for number in range(rounds + 1):
            turn = Times() if number == 0 else times
            for what in ("store", "load", "both") if with_both else ("store", "load"):
                loads, stores = what != "store", what != "load"
                turn.add(f"plain {what}", plain.seconds(load=loads, store=stores))
                if loads:
                    engine.clear(others)
                fresh = new_hashes(len(sources))
                start_s = perf_counter()
                flying = [engine.load(lease, others)] if loads else []
                flying += [engine.store(fresh, sources)] if stores else []
                for transfer in flying:
                    done(transfer)
                turn.add(what, perf_counter() - start_s)
                if loads and not engine.equal(sources, others):
                    raise AssertionError(f"wrong bytes after {what} of {shape}")
    return times


def figures_of(found: dict[tuple[str, int], Times]) -> list[Figure]:
    """Each page size's figure is that of the worse layout."""
    figures = []
    for page_bytes, target in TARGETS.items():
        ratios = [times.ratios() for (_, size), times in found.items() if size == page_bytes]
        if ratios:
            for what in ("store", "load"):
                worst = min(ratio[what] for ratio in ratios)
                figures.append(
                    Figure(f"{what}, pages of {page_bytes >> 10} KiB, of plain copy", worst, target)
                )
    both = [times for (_, size), times in found.items() if (TARGETS[size] or 0) >= BOTH_TARGET]
    if both:
        name = "store and load at once, pages from 64 KiB up, of"
        figures += [
            Figure(f"{name} the sum of plain", min(t.of_the_sum() for t in both), BOTH_TARGET),
            Figure(f"{name} plain copies both ways", min(t.ratios()["both"] for t in both)),
        ]
    return figures


def report(
    side: Side,
    op_bytes: int,
    found: dict[tuple[str, int], Times],
    devices: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Also prints the server's own measurements."""
    speeds = {
        (s["direction"], s["page_byte_count"], s["method"]): s["gb_per_s"]
        for s in devices.get("speeds", ())
    }
    methods = list(dict.fromkeys(method for _, _, method in speeds))
    rows = [
        (way, size >> 10, *(f"{speeds.get((way, size, method), 0.0):.1f}" for method in methods))
        for way, size in sorted({key[:2] for key in speeds})
    ]
    print("\nthe server's own measurement at its start, GB/s")
    print(table(("direction", "page KiB", *methods), rows))
    details: dict[str, object] = {
        **about(side),
        "operation_bytes": op_bytes,
        "seconds": {f"{layout} {size}": times.seconds for (layout, size), times in found.items()},
        "ratios": {f"{layout} {size}": times.ratios() for (layout, size), times in found.items()},
        "server": devices,
    }
    print_figures(figures_of(found), details, as_json=as_json)


def main() -> int:
    options = gpu_parser("Time stores and loads of a GPU's memory.").parse_args()
    side = find_side(options.made_up)
    op_bytes = operation_bytes(16 * MIB if options.made_up else GIB, ARENA_OPERATIONS)
    rounds, arena_bytes = 2 if options.quick or options.made_up else 6, ARENA_OPERATIONS * op_bytes
    found: dict[tuple[str, int], Times] = {}
    with settled(side, arena_bytes) as server:
        devices = server.devices()
        try:
            print(f"{side.name}: arena pinned in {devices['registering_s']:.1f} s", flush=True)
            plain = PlainCopies(side, op_bytes)
            for page_bytes in PAGES:
                for layout in LAYOUTS:
                    layers = layers_of(page_bytes, op_bytes)
                    shape = Shape(page_bytes, layers, 2 * op_bytes // layers // page_bytes, layout)
                    times = measure(side, server.target, plain, shape, rounds)
                    found[layout, page_bytes] = times
                    rates = ", ".join(
                        f"{name} {op_bytes / times.median(name) / 1e9:.1f}"
                        for name in times.seconds
                    )
                    print(
                        f"{layout} pages of {page_bytes >> 10} KiB, GB/s each way: {rates}",
                        flush=True,
                    )
            devices = server.devices()
        finally:
            report(side, op_bytes, found, devices, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
