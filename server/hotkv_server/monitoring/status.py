"""Reads the state of a node for the status page and `/api/v1/status`.

Always true: a reading takes a bounded time of the event loop, however many blocks there are.
Figures that need a walk over all entries (records in the block table) come from the latest survey,
a count in the background (`node.survey`); they are None until the first survey has ended. The
status contains no text of prompts and no block hashes. Lists are bounded; a count beside each list
gives its full length. docs/status_page.md describes each field.
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
from hotkv_server.monitoring.verdicts import MISSES, checks, verdicts
from hotkv_server.node.capability import Figures
from hotkv_server.node.node import Node
from hotkv_server.node.survey import Survey

OF_CENSUS = {
    "pinned_byte_count",
    "block_count",
    "sketch_byte_count",
    "sketch_count",
}
"""Fields of host memory and of key spaces that come from a census (count of all entries). They are
None before the first survey."""
DIGITS = 3
NO_CENSUS = Census(0, 0, 0, 0, *(np.zeros(KEY_SPACE_ROWS, np.int64) for _ in range(2)))


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The state of a node, read on its event loop. `as_json_values` converts it to JSON on any
    thread.

    figures: values for JSON. If a value is a function, `as_json_values` calls it and uses the
        result.
    arena: the map of the arena; None before the first survey (count of all entries).
    """

    figures: Figures
    arena: ArenaMap | None


def read_status(node: Node, *, has_names: bool) -> NodeStatus:
    """Reads the state of a node for the status page. Call this function on the node's event loop.

    has_names: False leaves out the names of tenants, models and engines.
    """
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
    """Converts the state of a node to values that can be written as JSON. Adds the verdicts:
    sentences that judge the state."""
    figures = {name: one() if callable(one) else one for name, one in status.figures.items()}
    figures["verdicts"], figures["checks"] = verdicts(figures), checks(figures)
    figures["miss_texts"] = MISSES
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
    """Returns figures of the tiers, and of the key spaces that have the most blocks, sorted by key
    space id. Without `has_names`, the list of key spaces is empty."""
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
    """Returns the map of the arena as JSON values: lists with a value for each cell (some adjacent
    slabs).

    slot_size_indexes: for each cell, the index of its slot size in `slot_byte_counts`. For a cell
        without a slot size, a negative value, which is copied from `ArenaMap.slot_bytes`.
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
