"""Figures of a running node, for metrics and the admin service. Read on the event loop only."""

from dataclasses import asdict, dataclass

from hotkv import table
from hotkv_server.core.slabs import SlabClassStats
from hotkv_server.runtime.node import Node


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier, in bytes, blocks and slabs."""

    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    num_blocks: int
    num_free_slabs: int
    slab_bytes: int
    slab_classes: list[SlabClassStats]


def tier(node: Node) -> TierStats:
    """The host tier."""
    space = node.core.space
    ready = int((space.index.states() == table.STATE_READY).sum())
    pool = space.pool
    return TierStats(
        pool.num_slabs * pool.slab_bytes,
        space.used_bytes(),
        space.pinned_bytes(),
        ready,
        pool.num_free_slabs,
        pool.slab_bytes,
        pool.stats(),
    )


def counters(node: Node) -> dict[str, float]:
    """Counters by their metric names, without the `hotkv_` prefix."""
    values = {f"{name}_total": float(value) for name, value in asdict(node.core.counters).items()}
    values["loaded_bytes_total"] = float(node.loaded_bytes)
    values["stored_bytes_total"] = float(node.stored_bytes)
    return values


def gauges(node: Node) -> dict[str, float]:
    """Gauges by their metric names, without the `hotkv_` prefix."""
    host = tier(node)
    return {
        "sessions": float(len(node.sessions)),
        "leases": float(len(node.core.leases)),
        "transfers_in_flight": float(len(node.core.transfers)),
        "copy_pieces_queued": float(node.copy_engine.num_queued),
        "arena_capacity_bytes": float(host.capacity_bytes),
        "arena_used_bytes": float(host.used_bytes),
        "arena_pinned_bytes": float(host.pinned_bytes),
        "ready_blocks": float(host.num_blocks),
        "arena_huge_page_bytes": float(node.memory.arena.huge_bytes),
        "free_slabs": float(host.num_free_slabs),
        "draining": float(node.core.draining),
        "notices_queued": float(max((s.notices.qsize() for s in node.sessions.values()), default=0)),
    }
