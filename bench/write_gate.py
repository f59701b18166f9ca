"""The write gate on traces: what hits and writes remain under a budget, beside no gate at all.

For each trace and size of the disk the budget is searched for under which the writes come closest
to WRITES of the ungated ones from below; all run through the simulator, which is the core itself.
Prints a table; `--json` prints one JSON object last: `gate_hits_TRACE_SIZE` and
`gate_writes_TRACE_SIZE` (over those without a gate), `gate_hits` and `gate_writes` (the lowest, the
highest), and `gate_over_chains`: how far the writes of 24 hours are beyond a budget that binds, in
chains of the longest request.
"""

import sys
from pathlib import Path

from bench.report import parser, print_report
from hotkv_server.core.policies import POLICIES
from hotkv_server.core.write_gate import SPENDING_S
from hotkv_server.simulate.replay import Replayed, replay_two_tiers
from hotkv_server.simulate.trace import Trace, load_trace

TRACES = {"conversation": 512, "synthetic": 512, "agents": 64}
"""And the tokens of their blocks."""
HOST_PERCENT = 2.0
DISK_PERCENTS = (10, 30)
WRITES = 0.8
TRIALS = 6
BINDING = 0.05


def replayed(name: str, trace: Trace, percent: int, writes_per_day: float | None) -> Replayed:
    return replay_two_tiers(
        trace,
        trace.capacity_blocks(HOST_PERCENT),
        trace.capacity_blocks(percent),
        POLICIES["hotness"],
        block_tokens=TRACES[name],
        writes_per_day=writes_per_day,
    )


def measured(name: str, trace: Trace, percent: int) -> tuple[float, float, float]:
    """Hits and writes over those without a gate, and chains beyond a small budget."""
    free = replayed(name, trace, percent, None)
    hits, writes = trace.hit_blocks(free.prefix), free.num_second_tier_writes
    # What is left lasts SPENDING_S: so much of a day's budget is spent until the trace ends.
    spent = trace.times_s[-1] / SPENDING_S
    low, high = 0.5, 1.0
    gated = replayed(name, trace, percent, low * writes / spent)
    for _ in range(TRIALS):
        budget = (low + high) / 2
        found = replayed(name, trace, percent, budget * writes / spent)
        if found.num_second_tier_writes <= WRITES * writes:
            low, gated = budget, found
        else:
            high = budget
    small = BINDING * writes
    bound = replayed(name, trace, percent, small)
    over = max(0.0, bound.num_second_tier_writes - small) / int(trace.lengths.max())
    return trace.hit_blocks(gated.prefix) / hits, gated.num_second_tier_writes / writes, over


def main() -> int:
    """Command line."""
    flags = parser("The write gate on traces.")
    flags.add_argument(
        "--traces", type=Path, default=Path("../shared/traces"), help="the folder of the traces"
    )
    options = flags.parse_args()
    figures: dict[str, object] = {}
    hits: list[float] = []
    writes: list[float] = []
    over: list[float] = []
    rows = []
    for name in TRACES:
        trace = load_trace(options.traces / f"{name}_trace.jsonl")
        for percent in DISK_PERCENTS:
            found = measured(name, trace, percent)
            figures[f"gate_hits_{name}_{percent}"] = found[0]
            figures[f"gate_writes_{name}_{percent}"] = found[1]
            for sums, value in zip((hits, writes, over), found, strict=True):
                sums.append(value)
            rows.append((name, f"{percent} %", *(f"{value:.3f}" for value in found)))
    figures |= {"gate_hits": min(hits), "gate_writes": max(writes), "gate_over_chains": max(over)}
    rows.append(("worst", "", *(f"{value:.3f}" for value in (min(hits), max(writes), max(over)))))
    rows.append(("target", "", "at least .9", f"at most {WRITES:g}", "at most 1"))
    headers = ("trace", "disk", "hits", "writes", "chains beyond the budget")
    print_report(headers, rows, figures, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
