"""Figures of the tier below host memory, for metrics and the admin service; zeros without one."""

from hotkv_server.runtime.tiers import Tiers
from hotkv_server.tiers.protocol import TierFigures


def counters(tiers: Tiers | None) -> dict[str, float]:
    """Counters by their metric names, without the `hotkv_` prefix."""
    figures = TierFigures() if tiers is None else tiers.tier.figures()
    moves = None if tiers is None else tiers.moved
    return {
        "tier_demoted_blocks_total": float(moves.demoted if moves else 0),
        "tier_promoted_blocks_total": float(moves.promoted if moves else 0),
        "tier_refused_blocks_total": float(moves.refused if moves else 0),
        "tier_lost_blocks_total": float(moves.lost if moves else 0),
        "tier_read_bytes_total": float(figures.read_bytes),
        "tier_written_bytes_total": float(figures.written_bytes),
        "tier_failed_blocks_total": float(figures.failed_blocks),
    }


def gauges(tiers: Tiers | None) -> dict[str, float]:
    """Gauges by their metric names, without the `hotkv_` prefix."""
    return {
        "tier_used_bytes": float(tiers.used_bytes if tiers else 0),
        "tier_capacity_bytes": float(tiers.capacity_bytes if tiers else 0),
        "tier_queued_bytes": float(tiers.tier.figures().queued_bytes if tiers else 0),
        "tier_waiting_blocks": float(tiers.num_waiting if tiers else 0),
        "tier_up": float(tiers is not None and not tiers.breaker.is_open),
    }
