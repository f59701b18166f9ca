"""The hit-rate curve as a PNG: a panel per trace, a line per policy. Needs matplotlib, from the
extra `simulate`.
"""

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotkv_server.simulate.report import BOUNDS, MIB_PER_GIB, UNBOUNDED, Row

PANEL_INCHES = (6.4, 4.6)
DOTS_PER_INCH = 130
MARKERS = "osD^vPX*"
MAX_TICKS = 8
"""Labels that a panel has room for."""


class PlotError(ValueError):
    """The plot can't be made; the message says what to do."""


def check_plot(path: Path) -> None:
    """Raises PlotError if a plot can't be made there, before the work is done."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise PlotError(
            "--plot: matplotlib is not installed; pip install 'hotkv[simulate]'"
        ) from error
    if path.is_dir() or not path.parent.is_dir():
        raise PlotError(f"--plot: {path} can't be written; name a file in a folder that exists")


def write_plot(path: Path, rows: Sequence[Row], block_mib: float | None) -> None:
    """Draws hit rate, of all tiers, over capacity. Raises OSError if the file can't be
    written."""
    figure_module = importlib.import_module("matplotlib.figure")
    traces = list(dict.fromkeys(row.trace for row in rows))
    width, height = PANEL_INCHES
    figure = figure_module.Figure(figsize=(width * len(traces), height), layout="constrained")
    panels = figure.subplots(1, len(traces), squeeze=False)[0]
    for panel, trace in zip(panels, traces, strict=True):
        _draw_panel(panel, trace, [row for row in rows if row.trace == trace], block_mib)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def _draw_panel(panel: Any, trace: str, rows: Sequence[Row], block_mib: float | None) -> None:
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
    """The percents, rising, that are labelled: on a log axis no two so close that more than `most`
    would fit."""
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
