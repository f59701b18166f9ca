"""Figures of a running node, for metrics and the admin service. Read on the event loop only."""

import asyncio
from dataclasses import asdict, dataclass

from hotkv_server.core.census import Census, take
from hotkv_server.core.slabs import SlabClassStats
from hotkv_server.runtime.node import Node


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier, in bytes, blocks and slabs. `capacity_bytes`: as far as it has memory."""

    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    representation_bytes: int
    num_blocks: int
    num_free_slabs: int
    slab_bytes: int
    slab_classes: list[SlabClassStats]


async def census(node: Node) -> Census:
    """All that is there; others are served while it is counted."""
    counting = take(node.core.space)
    whole = next(counting)
    for whole in counting:  # noqa: B007 - each part is more of the same count
        await asyncio.sleep(0)
    return whole


def tier(node: Node, counted: Census) -> TierStats:
    """The host tier."""
    space = node.core.space
    pool = space.pool
    return TierStats(
        pool.capacity_bytes,
        space.used_bytes(),
        counted.pinned_bytes,
        counted.representation_bytes,
        counted.num_blocks,
        pool.num_free_slabs,
        pool.slab_bytes,
        pool.stats(),
    )


def counters(node: Node) -> dict[str, float]:
    """Counters by their metric names, without the `hotkv_` prefix."""
    values = {f"{name}_total": float(value) for name, value in asdict(node.core.counters).items()}
    values["loaded_bytes_total"] = float(node.transfers.loaded_bytes)
    values["stored_bytes_total"] = float(node.transfers.stored_bytes)
    values["events_lost_by_readers_total"] = float(node.events.feeds.lost_items)
    values["watched_requests_lost_total"] = float(node.reports.watched.lost_items)
    values["verified_blocks_total"] = float(node.verifier.verified_blocks)
    values["scrub_passes_total"] = float(node.verifier.passes)
    values["refused_total"] = float(node.refusals.total())
    publisher = node.events.publisher
    values["events_published_total"] = float(publisher.published_events) if publisher else 0.0
    values["events_lost_total"] = float(publisher.lost_events) if publisher else 0.0
    values.update(
        (f"reported_{name}_total", float(value))
        for name, value in asdict(node.reports.counters).items()
    )
    values.update(
        (f"sparse_{name}_total", float(value))
        for name, value in asdict(node.sparse.counters).items()
    )
    values["sparse_served_selects_total"] = float(node.sparse.selections.num_served)
    return values


def gauges(node: Node, counted: Census) -> dict[str, float]:
    """Gauges by their metric names, without the `hotkv_` prefix."""
    host, lag = tier(node, counted), node.lag.read()
    pool = node.core.space.pool.figures()
    return {
        "loop_lag_p50_seconds": lag.p50_s,
        "loop_lag_p99_seconds": lag.p99_s,
        "loop_lag_longest_seconds": lag.longest_s,
        "sessions": float(len(node.sessions)),
        "leases": float(len(node.core.leases)),
        "transfers_in_flight": float(len(node.core.transfers)),
        "copy_pieces_queued": float(node.copy_engine.num_queued),
        "arena_capacity_bytes": float(host.capacity_bytes),
        "arena_full_capacity_bytes": float(node.core.space.pool.num_slabs * host.slab_bytes),
        "arena_used_bytes": float(host.used_bytes),
        "arena_pinned_bytes": float(host.pinned_bytes),
        "arena_lent_bytes": float(pool.lent_bytes),
        "arena_idle_bytes": float(pool.idle_bytes),
        "arena_tail_bytes": float(pool.tail_bytes),
        "arena_stranded_bytes": float(pool.stranded_bytes),
        "arena_fragmentation_ratio": pool.fragmentation_ratio,
        "arena_imbalance_ratio": pool.imbalance_ratio,
        "representation_bytes": float(host.representation_bytes),
        "ready_blocks": float(host.num_blocks),
        "unverified_blocks": float(counted.num_unverified),
        "arena_registered_bytes": float(node.devices.pinned_bytes),
        "device_allocations_open": float(node.devices.num_open),
        "arena_huge_page_bytes": float(node.memory.arena.huge_bytes),
        "free_slabs": float(host.num_free_slabs),
        "draining": float(node.core.draining),
        "held_bytes": float(node.core.retention_pins.held_bytes),
        "held_budget_bytes": float(node.core.retention_pins.budget_bytes),
        "events_queued_bytes": float(
            node.events.publisher.queued_bytes if node.events.publisher else 0
        ),
        "event_readers": float(len(node.events.feeds)),
        "request_watchers": float(len(node.reports.watched)),
        "sparse_sequences": float(len(node.sparse.sequences)),
        "sparse_sequence_blocks": float(node.sparse.sequences.num_blocks),
        "sparse_selects_in_flight": float(len(node.sparse.selections)),
        "sparse_remembered_contexts": float(len(node.sparse.remembered)),
        "sparse_remembered_bytes": float(node.sparse.remembered.num_bytes),
        "notices_queued": float(max((s.notices.qsize() for s in node.sessions), default=0)),
        **{f"eviction_{name}": value for name, value in node.core.space.policy.figures().items()},
    }
