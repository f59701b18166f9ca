"""The results of a simulation: rows, as a table for people and as JSON for programs. Rates are
shares of all block accesses.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from hotkv_server.simulate.trace import Trace

UNBOUNDED, CLAIRVOYANT = "unbounded", "clairvoyant"
BOUNDS = (CLAIRVOYANT, UNBOUNDED)
MIB_PER_GIB = 1024


@dataclass(frozen=True, slots=True)
class SecondTier:
    """The modelled second tier: its size, the share of accesses it served, blocks written to it."""

    capacity_percent: float
    hit_rate: float
    num_writes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One policy, or bound, over one trace at one capacity. `hit_rate`: share of accesses in the
    contiguous prefix, first tier only."""

    trace: str
    policy: str
    capacity_percent: float
    capacity_blocks: int
    hit_rate: float
    block_accesses: int
    seconds: float
    second_tier: SecondTier | None = None

    @property
    def total_hit_rate(self) -> float:
        """Over all tiers."""
        return self.hit_rate + (self.second_tier.hit_rate if self.second_tier else 0.0)


def as_json(rows: Iterable[Row], block_mib: float | None) -> str:
    """One object with a list `results`, an object per row."""
    return json.dumps({"results": [_fields(row, block_mib) for row in rows]})


def _fields(row: Row, block_mib: float | None) -> dict[str, object]:
    fields: dict[str, object] = {
        "trace": row.trace,
        "policy": row.policy,
        "capacity_percent": row.capacity_percent,
        "capacity_blocks": row.capacity_blocks,
        "hit_rate": row.hit_rate,
        "block_accesses": row.block_accesses,
        "seconds": row.seconds,
    }
    if block_mib is not None:
        fields["capacity_gib"] = row.capacity_blocks * block_mib / MIB_PER_GIB
    if row.second_tier is not None:
        fields["second_tier_percent"] = row.second_tier.capacity_percent
        fields["second_tier_hit_rate"] = row.second_tier.hit_rate
        fields["second_tier_written_blocks"] = row.second_tier.num_writes
        fields["total_hit_rate"] = row.total_hit_rate
    return fields


def as_table(rows: Sequence[Row], traces: Sequence[Trace], block_mib: float | None) -> str:
    """A table per trace, under a line that describes it; capacities are set apart."""
    parts = []
    for trace in traces:
        mine = [row for row in rows if row.trace == trace.name]
        parts.append(
            f"{trace.name}: {trace.num_requests:,} requests over {trace.times_s[-1]:,.0f} s, "
            f"{trace.num_accesses:,} block accesses to {trace.num_unique_blocks:,} blocks"
        )
        two_tiers = any(row.second_tier is not None for row in mine)
        lines = [_headers(block_mib, two_tiers=two_tiers)]
        for _, group in groupby(mine, lambda row: row.capacity_percent):
            lines += [_cells(row, block_mib) for row in group] + [[]]
        parts.append(_aligned(lines))
    return "\n".join(parts).rstrip()


def _headers(block_mib: float | None, *, two_tiers: bool) -> list[str]:
    memory = ["GiB"] if block_mib is not None else []
    lower = ["second tier", "both", "written"] if two_tiers else []
    return ["capacity", "blocks", *memory, "policy", "hit rate", *lower, "accesses/s"]


def _cells(row: Row, block_mib: float | None) -> list[str]:
    memory = (
        [f"{row.capacity_blocks * block_mib / MIB_PER_GIB:,.1f}"] if block_mib is not None else []
    )
    is_bound = row.policy in BOUNDS
    lower = []
    if row.second_tier is not None:
        written = "" if is_bound else f"{row.second_tier.num_writes:,}"
        lower = [f"{row.second_tier.hit_rate:.1%}", f"{row.total_hit_rate:.1%}", written]
    speed = "" if is_bound else f"{row.block_accesses / row.seconds:,.0f}"
    return [
        f"{row.capacity_percent:g} %",
        f"{row.capacity_blocks:,}",
        *memory,
        row.policy,
        f"{row.hit_rate:.1%}",
        *lower,
        speed,
    ]


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be, aligned right but for the policy's name."""
    widths = [max(len(line[i]) for line in lines if line) for i in range(len(lines[0]))]
    place = [str.ljust if header == "policy" else str.rjust for header in lines[0]]
    shown = [
        [put(cell, width) for put, cell, width in zip(place, line, widths, strict=False)]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in shown)
