"""Answers the two most important questions about a GPU in half a minute: how fast stores and loads
are beside plain pinned copies, and how much they slow the engine down.

`python -m bench.gpu.first [--json]`, on a machine with a GPU, 2 GiB of device and of host
memory. One server, 256 MiB per operation, layout LBHNC, pages of 64 and 16 KiB, each direction
and both, in turns with plain copies; also submission to first byte, and the slow-down of matrix
products. `bench.gpu.transfer`, `latency` and `methods` measure the rest.
"""

import sys

from bench.gpu.engine import PlainCopies, Shape, Side, about, find_side, operation_bytes, settled
from bench.gpu.figures import Figure, gpu_parser, print_figures
from bench.gpu.latency import FIRST_BYTE_TARGET_US, HEADLINE, first_byte_us
from bench.gpu.methods import LOSS_PAGE, LOSS_TARGET, Products, loss_beside_loads
from bench.gpu.transfer import ARENA_OPERATIONS, BOTH_TARGET, TARGETS, layers_of, measure
from bench.servers import MIB

RUNS = (64 << 10, 16 << 10)
WINDOWS = 6
LEAST_ARENA_BYTES = 256 * MIB


def shape_of(run_bytes: int, op_bytes: int) -> Shape:
    """As many blocks as two operations need; a page of `run_bytes` is contiguous."""
    layers = layers_of(run_bytes, op_bytes)
    return Shape(run_bytes, layers, 2 * op_bytes // layers // run_bytes, "LBHNC")


def copies(side: Side, target: str, op_bytes: int, rounds: int) -> list[Figure]:
    """Rates through the server, as shares of plain copies'."""
    plain, figures = PlainCopies(side, op_bytes), []
    for run_bytes in RUNS:
        times = measure(side, target, plain, shape_of(run_bytes, op_bytes), rounds)
        name, ratios = f"runs of {run_bytes >> 10} KiB", times.ratios()
        figures += [
            Figure(f"first: {what}, {name}, of plain copy", ratios[what], TARGETS[run_bytes])
            for what in ("store", "load")
        ]
        both = times.of_the_sum()
        target_of_both = BOTH_TARGET if run_bytes == RUNS[0] else None
        figures.append(
            Figure(f"first: both at once, {name}, of the sum of plain", both, target_of_both)
        )
    return figures


def main() -> int:
    options = gpu_parser("Rates beside plain copies, first bytes, lost products.").parse_args()
    side, short = find_side(options.made_up), options.quick or options.made_up
    op_bytes = operation_bytes((16 if options.made_up else 256) * MIB, ARENA_OPERATIONS)
    arena_bytes, figures = max(ARENA_OPERATIONS * op_bytes, LEAST_ARENA_BYTES), list[Figure]()
    with settled(side, arena_bytes) as server:
        try:
            figures += copies(side, server.target, op_bytes, 2 if short else 4)
            first_us = first_byte_us(side, server.target, 8 if short else 40)
            figures.append(
                Figure(
                    f"first: submission to first byte, {HEADLINE}, us",
                    first_us,
                    FIRST_BYTE_TARGET_US,
                    True,
                )
            )
            lost = loss_beside_loads(
                side,
                server.target,
                Products(side),
                shape_of(LOSS_PAGE, op_bytes),
                2 if short else WINDOWS,
            )
            figures.append(
                Figure(
                    "first: matrix products lose while loads run", lost.share(), LOSS_TARGET, True
                )
            )
        finally:
            print_figures(figures, about(side), as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
