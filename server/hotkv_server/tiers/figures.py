"""Figures of the tiers for metrics and the admin service; all 0 without tiers."""

import time
from dataclasses import dataclass
from typing import Any

from hotkv_server.cache.values import DISK_TIER
from hotkv_server.tiers.book.moves import MoveCounters
from hotkv_server.tiers.drive.below import TierBelow
from hotkv_server.tiers.drive.reads import TierReads
from hotkv_server.tiers.drive.shared import TierShared
from hotkv_server.tiers.drive.tiers import Tiers
from hotkv_server.tiers.protocol import TierFigures


@dataclass(frozen=True, slots=True)
class TierState:
    """`is_shared`: False for the disk.
    `capacity_bytes`: 0 for a shared tier.
    `is_up`: lookups use the tier.
    `problem`: why not, or "".
    `lost_blocks`: came back damaged since the start; from the disk also missing.
    `waiting_blocks`: that wait to be written.
    `budget_bytes`: of writes in 24 hours; 0: no limit.
    `left_bytes`: of the budget; 0 without a limit.
    """

    name: str
    is_shared: bool
    capacity_bytes: int
    reads: TierReads
    moved: TierFigures
    is_up: bool
    problem: str
    lost_blocks: int
    waiting_blocks: int
    budget_bytes: int = 0
    left_bytes: int = 0


def states(tiers: Tiers | None) -> list[TierState]:
    """In the order of lookups."""
    if tiers is None:
        return []
    below = [] if tiers.below is None else [_below(tiers.below)]
    return [*below, *(_shared(one) for one in tiers.shared)]


def activity(state: TierState) -> dict[str, Any]:
    """Fields of the admin service's message."""
    reads, moved = state.reads, state.moved
    return {
        "is_shared": state.is_shared,
        "is_up": state.is_up,
        "problem": state.problem,
        "asked_block_count": reads.asked_blocks,
        "hit_block_count": reads.hit_blocks,
        "written_byte_count": moved.written_bytes,
        "read_byte_count": moved.read_bytes,
        "read_count": reads.num_reads,
        "read_p50_s": reads.quantile_s(0.5),
        "read_p99_s": reads.quantile_s(0.99),
        "read_bytes_per_s": reads.bytes_per_s(),
        "queued_byte_count": moved.queued_bytes,
        "waiting_block_count": state.waiting_blocks,
        "lost_block_count": state.lost_blocks,
        "failed_block_count": moved.failed_blocks,
        "budget_byte_count": state.budget_bytes,
        "budget_left_byte_count": state.left_bytes,
    }


def _below(one: TierBelow) -> TierState:
    budget_bytes, left_bytes = budget(one)
    return TierState(
        DISK_TIER,
        False,
        one.lower.space.pool.capacity_bytes,
        one.reads,
        one.tier.figures(),
        not one.breaker.is_open,
        one.breaker.problem,
        one.lower.counters.lost,
        len(one.lower.down.waiting),
        budget_bytes,
        left_bytes,
    )


def _shared(one: TierShared) -> TierState:
    figures = one.tier.figures()
    return TierState(
        one.name,
        True,
        0,
        one.reads,
        figures,
        not one.breaker.is_open,
        one.breaker.problem,
        figures.corrupt_blocks,
        one.out.num_waiting,
    )


def budget(below: TierBelow | None) -> tuple[int, int]:
    """Bytes per 24 hours, and those left; (0, 0) without a limit or a disk."""
    if below is None or not (budget_bytes := below.lower.down.gate.budget_bytes):
        return 0, 0
    return budget_bytes, int(below.lower.down.gate.left_bytes(time.monotonic()))


def counters(tiers: Tiers | None) -> dict[str, float]:
    """By metric name without `hotkv_`: `tier_` is the disk, `shared_` the sum of shared tiers."""
    below = tiers.below if tiers is not None else None
    figures = TierFigures() if below is None else below.tier.figures()
    moves = MoveCounters() if below is None else below.lower.counters
    shared = tiers.shared if tiers is not None else ()
    of_shared = [one.tier.figures() for one in shared]
    return {
        "tier_demoted_blocks_total": float(moves.demoted),
        "tier_encoded_blocks_total": float(moves.encoded),
        "tier_promoted_blocks_total": float(moves.promoted),
        "tier_refused_blocks_total": float(moves.refused),
        "tier_lost_blocks_total": float(moves.lost),
        "tier_read_bytes_total": float(figures.read_bytes),
        "tier_written_bytes_total": float(figures.written_bytes),
        "tier_failed_blocks_total": float(figures.failed_blocks),
        "tier_asked_blocks_total": float(below.reads.asked_blocks if below else 0),
        "tier_hit_blocks_total": float(below.reads.hit_blocks if below else 0),
        "tier_left_blocks_total": float(below.reads.left_blocks if below else 0),
        "shared_copied_blocks_total": float(sum(one.out.num_copied for one in shared)),
        "shared_refused_blocks_total": float(sum(one.out.num_refused for one in shared)),
        "shared_fetched_blocks_total": float(sum(one.num_fetched for one in shared)),
        "shared_read_bytes_total": float(sum(one.read_bytes for one in of_shared)),
        "shared_written_bytes_total": float(sum(one.written_bytes for one in of_shared)),
        "shared_corrupt_blocks_total": float(sum(one.corrupt_blocks for one in of_shared)),
        "shared_failed_blocks_total": float(sum(one.failed_blocks for one in of_shared)),
        "shared_asked_blocks_total": float(sum(one.reads.asked_blocks for one in shared)),
        "shared_hit_blocks_total": float(sum(one.reads.hit_blocks for one in shared)),
        "shared_left_blocks_total": float(sum(one.reads.left_blocks for one in shared)),
    }


def gauges(tiers: Tiers | None) -> dict[str, float]:
    """By metric name without `hotkv_`."""
    below = tiers.below if tiers is not None else None
    shared = tiers.shared if tiers is not None else ()
    space = None if below is None else below.lower.space
    memory = None if below is None else below.memory
    budget_bytes, left_bytes = budget(below)
    disk, stores = below and below.tier.memory(), [one.tier.memory() for one in shared]
    records_bytes = memory.table.geometry.file_bytes if memory else 0
    return {
        "tier_used_bytes": float(space.used_bytes() if space else 0),
        "tier_capacity_bytes": float(space.pool.capacity_bytes if space else 0),
        "tier_queued_bytes": float(below.tier.figures().queued_bytes if below else 0),
        "tier_waiting_blocks": float(len(below.lower.down.waiting) if below else 0),
        "tier_unsaved_blocks": float(memory.num_changed - memory.num_saved if memory else 0),
        "tier_memory_bytes": float(disk.held_bytes + records_bytes if disk else 0),
        "tier_memory_limit_bytes": float(disk.most_bytes + records_bytes if disk else 0),
        "tier_budget_bytes": float(budget_bytes),
        "tier_budget_left_bytes": float(left_bytes),
        "tier_up": float(below is not None and not below.breaker.is_open),
        "shared_queued_bytes": float(sum(one.tier.figures().queued_bytes for one in shared)),
        "shared_memory_bytes": float(sum(one.held_bytes for one in stores)),
        "shared_memory_limit_bytes": float(
            sum(one.most_bytes for one in stores) if all(one.most_bytes for one in stores) else 0
        ),
        "shared_waiting_blocks": float(sum(one.out.num_waiting for one in shared)),
        "shared_up": float(bool(shared) and not any(one.breaker.is_open for one in shared)),
    }
