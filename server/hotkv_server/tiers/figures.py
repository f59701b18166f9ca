"""Computes the figures (counts, bytes, times) of the tiers below host memory, for metrics and the
admin service. All figures are 0 if there are no tiers."""

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
    """The present state of a tier below host memory.

    `is_shared`: True for a store that other nodes use too, False for the disk.
    `capacity_bytes`: size of the disk tier; 0 for a shared tier.
    `reads`: counts of lookups, and counts and times of reads.
    `moved`: counts of the blocks and bytes that the tier has read and written.
    `is_up`: False if lookups skip the tier, because it is broken or hangs.
    `problem`: the reason why lookups skip the tier; empty if lookups use the tier.
    `lost_blocks`: number of blocks that came back damaged since the start; for the disk also blocks
        that were missing.
    `waiting_blocks`: number of blocks in host memory that wait to be written.
    `budget_bytes`: most bytes to write in 24 hours; 0: no limit.
    `left_bytes`: bytes of this budget that are not spent yet; 0 without a limit.
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
    """Returns the state of each tier, in the order in which lookups ask the tiers."""
    if tiers is None:
        return []
    below = [] if tiers.below is None else [_below(tiers.below)]
    return [*below, *(_shared(one) for one in tiers.shared)]


def activity(state: TierState) -> dict[str, Any]:
    """Returns the figures of a tier for a message of the admin service, as a dictionary from the
    name of a field to its value."""
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
    """Returns two numbers: the budget of disk writes, in bytes per 24 hours, and the bytes of this
    budget that are not spent yet. Returns (0, 0) if there is no limit or no disk."""
    if below is None or not (budget_bytes := below.lower.down.gate.budget_bytes):
        return 0, 0
    return budget_bytes, int(below.lower.down.gate.left_bytes(time.monotonic()))


def counters(tiers: Tiers | None) -> dict[str, float]:
    """Returns the counters of all tiers by metric name, without the `hotkv_` prefix. Names begin
    with `tier_` for the disk and with `shared_` for shared tiers (sums over these tiers)."""
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
    """Returns the gauges of all tiers by metric name, without the `hotkv_` prefix."""
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
