"""Counters and gauges of a running node, for metrics and the admin service. On the event loop
only."""

import asyncio
from dataclasses import asdict

from hotkv_server.cache import inspect
from hotkv_server.cache.inspect import Census
from hotkv_server.node.event_loop import Breaks
from hotkv_server.node.node import Node

FRESH_PARTS = 8
"""A census of at most so many parts is short: about a million entries, some 20 ms."""


class RecentCensus:
    """A short census is made for each call. Of a long one, a call gets the last and starts the
    next."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._last: Census | None = None
        self._counting: asyncio.Task[Census] | None = None

    def begin(self) -> None:
        """Starts the first long census in the background. On the event loop."""
        if not self._is_short:
            self._count()

    @property
    def _is_short(self) -> bool:
        return inspect.census_parts(self._node.core) <= FRESH_PARTS

    def _count(self) -> None:
        self._counting = asyncio.create_task(census(self._node), name="census")

    async def read(self) -> Census:
        """Waits only for a short census, or the first."""
        if (counting := self._counting) and (counting.done() or self._last is None):
            self._counting = None
            self._last = await counting
        if self._last is None or self._is_short:
            self._last = await census(self._node)
        elif self._counting is None:
            self._count()
        return self._last


async def census(node: Node) -> Census:
    """Counts all entries in parts, between which other tasks run."""
    counting, breaks = inspect.census(node.core), Breaks()
    whole = next(counting)
    for whole in counting:  # noqa: B007 - each part is more of the same count
        await breaks.between()
    return whole


def counters(node: Node) -> dict[str, float]:
    """By metric name without `hotkv_`."""
    values = {f"{name}_total": float(value) for name, value in inspect.counters(node.core).items()}
    values["loaded_bytes_total"] = float(node.transfers.loaded_bytes)
    values["stored_bytes_total"] = float(node.transfers.stored_bytes)
    values["watched_requests_lost_total"] = float(node.reports.watched.lost_items)
    values["copy_busy_seconds_total"] = node.copy_engine.busy_s
    values["verified_blocks_total"] = float(node.verifier.verified_blocks)
    values["scrub_passes_total"] = float(node.verifier.passes)
    values["refused_total"] = float(node.refusals.total())
    values.update(
        (f"reported_{name}_total", float(value))
        for name, value in asdict(node.reports.counters).items()
    )
    for one in node.capabilities:
        values.update(one.counters())
    return values


def gauges(node: Node, counted: Census) -> dict[str, float]:
    """By metric name without `hotkv_`."""
    host, live = inspect.tier(node.core, counted), inspect.counts(node.core)
    pool, lag = host.pool, node.lag.read()
    values = {
        "loop_lag_p50_seconds": lag.p50_s,
        "loop_lag_p99_seconds": lag.p99_s,
        "loop_lag_longest_seconds": lag.longest_s,
        "sessions": float(len(node.sessions)),
        "leases": float(live.num_leases),
        "transfers_in_flight": float(live.num_transfers),
        "copy_pieces_queued": float(node.copy_engine.num_queued),
        "copy_threads": float(node.copy_engine.num_lanes),
        "arena_capacity_bytes": float(host.capacity_bytes),
        "arena_full_capacity_bytes": float(host.full_capacity_bytes),
        "arena_used_bytes": float(host.used_bytes),
        "arena_pinned_bytes": float(host.pinned_bytes),
        "arena_lent_bytes": float(pool.lent_bytes),
        "arena_idle_bytes": float(pool.idle_bytes),
        "arena_tail_bytes": float(pool.tail_bytes),
        "arena_stranded_bytes": float(pool.stranded_bytes),
        "arena_fragmentation_ratio": pool.fragmentation_ratio,
        "arena_imbalance_ratio": pool.imbalance_ratio,
        "sketch_bytes": float(host.sketch_bytes),
        "ready_blocks": float(host.num_blocks),
        "unverified_blocks": float(host.num_unverified),
        "arena_registered_bytes": float(node.devices.pinned_bytes),
        "device_allocations_open": float(node.devices.num_open),
        "arena_huge_page_bytes": float(node.memory.arena.huge_bytes),
        "free_slabs": float(host.num_free_slabs),
        "draining": float(node.core.draining),
        "held_bytes": float(live.held_bytes),
        "held_budget_bytes": float(live.held_budget_bytes),
        "request_watchers": float(len(node.reports.watched)),
        "notices_queued": float(max((s.notices.qsize() for s in node.sessions), default=0)),
        **{f"eviction_{name}": value for name, value in inspect.policy_figures(node.core).items()},
    }
    for one in node.capabilities:
        values.update(one.gauges())
    return values
