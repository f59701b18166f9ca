"""The state of a node for the status page and `/api/v1/status`, as docs/status_page.md describes
it.

Always true: a reading takes a bounded time of the event loop. Figures of all entries come from
the latest survey (`node.survey`), and are None until the first has ended. No text of prompts and
no block hash is shown. Lists are bounded, with their full length beside them.
"""

import time
from dataclasses import dataclass

import numpy as np

from hotkv_server.cache import inspect
from hotkv_server.cache.inspect import ArenaMap, Census
from hotkv_server.cache.values import KEY_SPACE_ROWS
from hotkv_server.monitoring.counts import counters
from hotkv_server.monitoring.topics import (
    MAX_ROWS,
    busiest,
    key_space_row,
    server_figures,
    session_rows,
    tier_rows,
)
from hotkv_server.monitoring.verdicts import MISSES, checks, judged_window, verdicts
from hotkv_server.node.capability import Figures
from hotkv_server.node.node import Node
from hotkv_server.node.survey import Survey

OF_CENSUS = {
    "pinned_byte_count",
    "block_count",
    "sketch_byte_count",
    "sketch_count",
}
"""Fields of host memory and key spaces that are None before the first survey."""
DIGITS = 3
NO_CENSUS = Census(0, 0, 0, 0, *(np.zeros(KEY_SPACE_ROWS, np.int64) for _ in range(2)))


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """Read on the event loop; `as_json_values` converts it on any thread.

    figures: values for JSON. A value that is a function is called when it is converted.
    arena: None before the first survey.
    """

    figures: Figures
    arena: ArenaMap | None


def read_status(node: Node, *, has_names: bool) -> NodeStatus:
    """On the node's event loop. `has_names`: if False, without names of tenants, models and
    engines."""
    now_s = time.monotonic()
    survey = node.survey.latest(now_s)
    figures: Figures = {
        **server_figures(node, now_s),
        "unix_time_ms": int(time.time() * 1000),
        "has_names": has_names,
        "survey_age_s": None if survey is None else max(0.0, now_s - survey.ended_s),
        "counters": counters(node),
        **_live(node),
        "session_count": len(node.sessions),
        "sessions": session_rows(node, busiest(node), now_s) if has_names else [],
        "key_space_count": len(node.core.key_spaces),
        **_surveyed(node, survey, has_names=has_names),
    }
    for one in node.capabilities:
        figures.update(one.status(has_names=has_names))
    return NodeStatus(figures, None if survey is None else survey.arena)


def as_json_values(status: NodeStatus) -> Figures:
    """Adds the verdicts."""
    figures = {name: one() if callable(one) else one for name, one in status.figures.items()}
    figures["verdicts"], figures["checks"] = verdicts(figures), checks(figures)
    figures["miss_texts"], figures["judged_window"] = MISSES, judged_window(figures)
    figures["arena"] = None if status.arena is None else _arena(status.arena)
    return figures


def _live(node: Node) -> Figures:
    live = inspect.counts(node.core)
    return {
        "lease_count": live.num_leases,
        "transfer_count": live.num_transfers,
        "held_byte_count": live.held_bytes,
        "held_budget_byte_count": live.held_budget_bytes,
    }


def _surveyed(node: Node, survey: Survey | None, *, has_names: bool) -> Figures:
    """Tiers, and the key spaces with most blocks by id; none of these without `has_names`."""
    counted = NO_CENSUS if survey is None else survey.census
    found = inspect.key_spaces(node.core, counted, MAX_ROWS) if has_names else []
    rows = {
        "tiers": tier_rows(node, counted),
        "key_spaces": [key_space_row(node, one) for one in found],
    }
    if survey is None:
        for row in (rows["tiers"][0], *rows["key_spaces"]):
            row.update(dict.fromkeys(OF_CENSUS & row.keys()))
    return rows


def _arena(drawn: ArenaMap) -> Figures:
    """Lists with a value for each cell of some adjacent slabs.

    slot_size_indexes: into `slot_byte_counts`; negative without a slot size
        (`ArenaMap.slot_bytes`).
    """
    sizes = np.unique(drawn.slot_bytes[drawn.slot_bytes >= 0])
    at = np.where(drawn.slot_bytes < 0, drawn.slot_bytes, np.searchsorted(sizes, drawn.slot_bytes))
    return {
        "slab_byte_count": drawn.slab_bytes,
        "slab_count": drawn.num_slabs,
        "slabs_per_cell": drawn.slabs_per_cell,
        "slot_byte_counts": sizes.tolist(),
        "slot_size_indexes": at.tolist(),
        "used_ratios": drawn.used_ratios.round(DIGITS).tolist(),
        "idle_s": [
            None if np.isnan(seconds) else round(seconds, 1) for seconds in drawn.idle_s.tolist()
        ],
    }
