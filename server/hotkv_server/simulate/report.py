"""Formats results as table, JSON or plot. Hit rates are shares of all block accesses."""

import importlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from hotkv_proto import extras
from hotkv_proto.command_line import columns
from hotkv_server.simulate.trace import Trace

# ------------------------------------------------------------------------------------------- Tables

UNBOUNDED, CLAIRVOYANT = "unbounded", "clairvoyant"
BOUNDS = (CLAIRVOYANT, UNBOUNDED)
MIB_PER_GIB = 1024


@dataclass(frozen=True, slots=True)
class LowerFigures:
    """The tier below host memory.

    capacity_percent: of all different blocks.
    hit_rate: of that tier alone.
    num_reads, num_writes: blocks; 0 for an ideal cache.
    """

    name: str
    capacity_percent: float
    hit_rate: float
    num_reads: int = 0
    num_writes: int = 0


@dataclass(frozen=True, slots=True)
class Units:
    """block_mib, tokens_per_s: None if unknown. The speed is of prefill."""

    block_tokens: int
    block_mib: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReportRow:
    """A trace at one capacity with one policy, or one ideal cache of BOUNDS.

    capacity_percent: of the first tier, in percent of all different blocks.
    hit_rate: of the first tier. In each request only the accesses before the first miss count as
        hits.
    seconds: wall time.
    """

    trace: str
    policy: str
    capacity_percent: float
    capacity_blocks: int
    hit_rate: float
    block_accesses: int
    seconds: float
    lower: LowerFigures | None = None

    @property
    def total_hit_rate(self) -> float:
        """Over all tiers."""
        return self.hit_rate + (self.lower.hit_rate if self.lower else 0.0)

    @property
    def missed_blocks(self) -> int:
        """What the engine would compute."""
        return round((1 - self.total_hit_rate) * self.block_accesses)


def as_json(rows: Iterable[ReportRow], units: Units) -> str:
    return json.dumps({"results": [_fields(row, units) for row in rows]})


def _fields(row: ReportRow, units: Units) -> dict[str, object]:
    computed_tokens = row.missed_blocks * units.block_tokens
    fields: dict[str, object] = {
        "trace": row.trace,
        "policy": row.policy,
        "capacity_percent": row.capacity_percent,
        "capacity_blocks": row.capacity_blocks,
        "hit_rate": row.hit_rate,
        "block_accesses": row.block_accesses,
        "computed_tokens": computed_tokens,
        "seconds": row.seconds,
    }
    if units.tokens_per_s is not None:
        fields["computed_s"] = computed_tokens / units.tokens_per_s
    if units.block_mib is not None:
        fields["capacity_gib"] = row.capacity_blocks * units.block_mib / MIB_PER_GIB
    if row.lower is not None:
        fields["tier"] = row.lower.name
        fields["tier_percent"] = row.lower.capacity_percent
        fields["tier_hit_rate"] = row.lower.hit_rate
        fields["tier_read_blocks"] = row.lower.num_reads
        fields["tier_written_blocks"] = row.lower.num_writes
        fields["total_hit_rate"] = row.total_hit_rate
    return fields


def as_table(rows: Sequence[ReportRow], traces: Sequence[Trace], units: Units) -> str:
    """A table per trace; blank lines separate capacities."""
    parts = []
    for trace in traces:
        mine = [row for row in rows if row.trace == trace.name]
        parts.append(
            f"{trace.name}: {trace.num_requests:,} requests over {trace.times_s[-1]:,.0f} s, "
            f"{trace.num_accesses:,} block accesses to {trace.num_unique_blocks:,} blocks"
        )
        lines = [_headers(units, next((row.lower for row in mine if row.lower), None))]
        for _, group in groupby(mine, lambda row: row.capacity_percent):
            lines += [_cells(row, units) for row in group] + [[]]
        parts.append(columns(lines, left=[lines[0].index("policy")]))
    return "\n".join(parts).rstrip()


def _headers(units: Units, lower: LowerFigures | None) -> list[str]:
    memory = ["GiB"] if units.block_mib is not None else []
    unit = " GiB" if memory else ""
    below = [lower.name, "both", f"read{unit}", f"written{unit}"] if lower is not None else []
    seconds = ["prefill s"] if units.tokens_per_s is not None else []
    tokens = ["computed tokens", *seconds] if below or seconds else []
    return ["capacity", "blocks", *memory, "policy", "hit rate", *below, *tokens, "accesses/s"]


def _cells(row: ReportRow, units: Units) -> list[str]:
    memory = [_size(row.capacity_blocks, units)] if units.block_mib is not None else []
    is_bound, lower, below = row.policy in BOUNDS, row.lower, []
    if lower is not None:
        moved = [_size(count, units) for count in (lower.num_reads, lower.num_writes)]
        below = [f"{lower.hit_rate:.1%}", f"{row.total_hit_rate:.1%}"]
        below += ["", ""] if is_bound else moved
    computed_tokens, tokens = row.missed_blocks * units.block_tokens, []
    if below or units.tokens_per_s is not None:
        tokens = [f"{computed_tokens:,}"]
    if units.tokens_per_s is not None:
        tokens.append(f"{computed_tokens / units.tokens_per_s:,.0f}")
    return [
        f"{row.capacity_percent:g} %",
        f"{row.capacity_blocks:,}",
        *memory,
        row.policy,
        f"{row.hit_rate:.1%}",
        *below,
        *tokens,
        "" if is_bound else f"{row.block_accesses / row.seconds:,.0f}",
    ]


def _size(num_blocks: int, units: Units) -> str:
    """In GiB, or in blocks if their size is unknown."""
    if units.block_mib is None:
        return f"{num_blocks:,}"
    return f"{num_blocks * units.block_mib / MIB_PER_GIB:,.1f}"


# ----------------------------------------------------------------------------------------- The plot
# A PNG of hit rate over capacity: a panel per trace, a line per policy. Needs matplotlib (extra
# `simulate`).

PANEL_INCHES = (6.4, 4.6)
DOTS_PER_INCH = 130
MARKERS = "osD^vPX*"
MAX_TICKS = 8
"""Labels on a panel's capacity axis."""


class PlotError(ValueError):
    """The message names the fix."""


def check_plot(path: Path) -> None:
    """Raises PlotError if the plot can't be made; called before the long replays."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise PlotError(
            f"--plot: matplotlib is not installed: {extras.advice('simulate')}"
        ) from error
    if path.is_dir() or not path.parent.is_dir():
        raise PlotError(f"--plot: {path} can't be written; name a file in a folder that exists")


def write_plot(path: Path, rows: Sequence[ReportRow], block_mib: float | None) -> None:
    """Hit rate of all tiers together. Raises OSError.

    block_mib: None: capacities are labelled in blocks, else in GiB.
    """
    figure_module = importlib.import_module("matplotlib.figure")
    traces = list(dict.fromkeys(row.trace for row in rows))
    width, height = PANEL_INCHES
    figure = figure_module.Figure(figsize=(width * len(traces), height), layout="constrained")
    panels = figure.subplots(1, len(traces), squeeze=False)[0]
    for panel, trace in zip(panels, traces, strict=True):
        _draw_panel(panel, trace, [row for row in rows if row.trace == trace], block_mib)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def _draw_panel(panel: Any, trace: str, rows: Sequence[ReportRow], block_mib: float | None) -> None:
    policies = list(dict.fromkeys(row.policy for row in rows))
    for number, policy in enumerate(policies):
        mine = sorted(
            (row for row in rows if row.policy == policy), key=lambda row: row.capacity_percent
        )
        shares, hits = (
            [row.capacity_percent for row in mine],
            [row.total_hit_rate for row in mine],
        )
        if policy in BOUNDS:
            style = ":" if policy == UNBOUNDED else "--"
            panel.plot(shares, hits, style, color="0.35", marker=".", label=policy)
        else:
            panel.plot(
                shares, hits, marker=MARKERS[number % len(MARKERS)], markersize=5, label=policy
            )
    blocks = {row.capacity_percent: row.capacity_blocks for row in rows}
    ticks = _spaced(sorted(blocks), MAX_TICKS)
    panel.set_xscale("log")
    panel.set_xticks(ticks, [_tick(percent, blocks[percent], block_mib) for percent in ticks])
    panel.set_xticks([], minor=True)
    lower = next((row.lower for row in rows if row.lower is not None), None)
    below = f", and {lower.name} of {lower.capacity_percent:g} %" if lower is not None else ""
    what = "GiB" if block_mib is not None else "blocks (GiB with --block-mib)"
    panel.set_xlabel(f"capacity in {what}, and of all different blocks{below}")
    panel.set_ylabel("hit rate (blocks in the prefix that hits)")
    panel.set_title(Path(trace).name, fontsize="medium")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")


def _spaced(percents: Sequence[float], most: int) -> list[float]:
    """Ascending percentages that are far enough apart on a logarithmic axis for a label each."""
    step = math.log(percents[-1] / percents[0]) / most
    chosen = [percents[0]]
    for percent in percents[1:]:
        if math.log(percent / chosen[-1]) >= step:
            chosen.append(percent)
    return chosen


def _tick(percent: float, capacity_blocks: int, block_mib: float | None) -> str:
    if block_mib is None:
        return f"{capacity_blocks:,}\n{percent:g} %"
    return f"{capacity_blocks * block_mib / MIB_PER_GIB:,.3g} GiB\n{percent:g} %"
