"""Figures of the tiers besides host memory, for metrics and the admin service; zeros without."""

from hotkv_server.core.moves import MoveCounters
from hotkv_server.runtime.tiers import Tiers
from hotkv_server.tiers.protocol import TierFigures


def counters(tiers: Tiers | None) -> dict[str, float]:
    """Counters by their metric names, without the `hotkv_` prefix: of the tier below."""
    below = tiers.below if tiers is not None else None
    figures = TierFigures() if below is None else below.tier.figures()
    moves = MoveCounters() if below is None else below.lower.counters
    return {
        "tier_demoted_blocks_total": float(moves.demoted),
        "tier_promoted_blocks_total": float(moves.promoted),
        "tier_refused_blocks_total": float(moves.refused),
        "tier_lost_blocks_total": float(moves.lost),
        "tier_read_bytes_total": float(figures.read_bytes),
        "tier_written_bytes_total": float(figures.written_bytes),
        "tier_failed_blocks_total": float(figures.failed_blocks),
        **shared_counters(tiers),
    }


def shared_counters(tiers: Tiers | None) -> dict[str, float]:
    """Counters of all shared tiers together."""
    shared = tiers.shared if tiers is not None else ()
    figures = [one.tier.figures() for one in shared]
    return {
        "shared_copied_blocks_total": float(sum(one.num_copied for one in shared)),
        "shared_refused_blocks_total": float(sum(one.num_refused for one in shared)),
        "shared_fetched_blocks_total": float(sum(one.num_fetched for one in shared)),
        "shared_read_bytes_total": float(sum(one.read_bytes for one in figures)),
        "shared_written_bytes_total": float(sum(one.written_bytes for one in figures)),
        "shared_corrupt_blocks_total": float(sum(one.corrupt_blocks for one in figures)),
        "shared_failed_blocks_total": float(sum(one.failed_blocks for one in figures)),
    }


def gauges(tiers: Tiers | None) -> dict[str, float]:
    """Gauges by their metric names, without the `hotkv_` prefix."""
    below = tiers.below if tiers is not None else None
    shared = tiers.shared if tiers is not None else ()
    space = None if below is None else below.lower.space
    return {
        "tier_used_bytes": float(space.used_bytes() if space else 0),
        "tier_capacity_bytes": float(space.pool.capacity_bytes if space else 0),
        "tier_queued_bytes": float(below.tier.figures().queued_bytes if below else 0),
        "tier_waiting_blocks": float(len(below.lower.down.waiting) if below else 0),
        "tier_up": float(below is not None and not below.breaker.is_open),
        "shared_queued_bytes": float(sum(one.tier.figures().queued_bytes for one in shared)),
        "shared_waiting_blocks": float(sum(one.num_waiting for one in shared)),
        "shared_up": float(bool(shared) and not any(one.breaker.is_open for one in shared)),
    }
