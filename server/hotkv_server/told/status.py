"""The state of a node as plain figures, for /api/v1/status. Field names are those of the wire.

Always true: reading takes a bounded time of the event loop, however many blocks there are; what
only a walk over all entries can tell is that of the latest survey, None before the first. Nothing
here is content of prompts or a hash of a block. Lists are bounded; a count beside each says how
many there are. docs/status_page.md has each field.
"""

import heapq
import socket
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hotkv_proto
from hotkv_proto.counters import SPARSE_COUNTERS, sparse_figures
from hotkv_server.cache import inspect
from hotkv_server.cache.room.arena_map import ArenaMap
from hotkv_server.cache.table.census import Census
from hotkv_server.cache.values import DISK_TIER, KEY_SPACE_ROWS
from hotkv_server.ledger.book.columns import HIT, HOST_TIER
from hotkv_server.ledger.drive import FINGERPRINT_DIGITS
from hotkv_server.ledger.live_history import EVICTED, LAG, STEP_S
from hotkv_server.ledger.told import RECENT_S, savings_figures
from hotkv_server.node.node import Node
from hotkv_server.node.session import LiveSession
from hotkv_server.node.survey import Survey
from hotkv_server.tiers import told as tier_figures
from hotkv_server.told.stats import counters

MAX_ROWS = 256
"""Most sessions, and most key spaces, that are listed."""
OF_CENSUS = ("pinned_byte_count", "block_count", "representation_byte_count")
DIGITS = 3
NO_CENSUS = Census(0, 0, 0, 0, *(np.zeros(KEY_SPACE_ROWS, np.int64) for _ in range(2)))
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Status:
    """What was read of a node, to be written as JSON by `as_json_values` on any thread: `figures`
    that are plain, and arrays."""

    figures: Figures
    samples: dict[str, NDArray[np.float64]]
    minutes: dict[str, NDArray[np.float64]]
    arena: ArenaMap | None


def read_status(node: Node, *, has_names: bool) -> Status:
    """Reads all of it. `has_names`: False leaves out what names tenants, models or engines."""
    now_s, now_unix_s = time.monotonic(), time.time()
    survey = node.survey.latest(now_s)
    samples, sample_age_s = node.history.samples(now_s)
    hour = node.ledger.savings(RECENT_S, has_rows=has_names)
    figures: Figures = {
        **_server(node, now_s),
        "unix_time_ms": int(now_unix_s * 1000),
        "has_names": has_names,
        "survey_age_s": None if survey is None else max(0.0, now_s - survey.ended_s),
        "counters": counters(node),
        "loop": _loop(node),
        "history_end_unix_time_ms": int((now_unix_s - sample_age_s) * 1000),
        "savings": {
            "hour": savings_figures(hour),
            "all": savings_figures(node.ledger.savings(has_rows=False)),
        },
        "tiers": _tiers(node, survey),
        **_live(node),
        "session_count": len(node.sessions),
        "sessions": _sessions(node, now_s) if has_names else [],
        "key_space_count": len(node.core.key_spaces),
        "key_spaces": _key_spaces(node, survey) if has_names else [],
        "sparse_layers": _sparse_layers(node),
    }
    return Status(
        figures, samples, node.history.minutes(), None if survey is None else survey.arena
    )


def as_json_values(status: Status) -> Figures:
    """The whole answer as values for `json`."""
    figures = dict(status.figures)
    figures["history"] = {
        "step_s": STEP_S,
        "end_unix_time_ms": figures.pop("history_end_unix_time_ms"),
        **_series(status.samples),
    }
    figures["minutes"] = {
        "step_s": 60.0,
        "end_unix_time_ms": -(-figures["unix_time_ms"] // 60_000) * 60_000,
        **_series(status.minutes),
    }
    figures["arena"] = None if status.arena is None else _arena(status.arena)
    return figures


def _server(node: Node, now_s: float) -> Figures:
    problems = node.health.problems(now_s)
    state = "unhealthy" if problems else "draining" if node.core.draining else "ready"
    return {
        "version": hotkv_proto.__version__,
        "host": socket.gethostname(),
        "state": state,
        "problems": list(problems),
        "progress": node.memory.filling.progress(),
        "uptime_s": now_s - node.started_s,
    }


def _loop(node: Node) -> Figures:
    lag = node.lag.read()
    return {
        "lag_p50_s": lag.p50_s,
        "lag_p99_s": lag.p99_s,
        "lag_longest_s": lag.longest_s,
        "held_by": lag.held_by,
    }


def _live(node: Node) -> Figures:
    live = inspect.counts(node.core)
    return {
        "lease_count": live.num_leases,
        "transfer_count": live.num_transfers,
        "held_byte_count": live.held_bytes,
        "held_budget_byte_count": live.held_budget_bytes,
    }


def _tiers(node: Node, survey: Survey | None) -> list[Figures]:
    counted = NO_CENSUS if survey is None else survey.census
    host = tier_figures.places(HOST_TIER, inspect.tier(node.core, counted))
    if survey is None:
        host.update(dict.fromkeys(OF_CENSUS))
    rows = [host]
    if (lower := inspect.lower_tier(node.core)) is not None:
        rows.append(tier_figures.places(DISK_TIER, lower))
    by_name = {row["name"]: row for row in rows}
    for state in tier_figures.states(node.tiers):
        if state.is_shared:
            row = {"name": state.name, "capacity_byte_count": state.capacity_bytes}
            rows.append(row)
        else:
            row = by_name[state.name]
        row["activity"] = tier_figures.activity(state)
    return rows


def _sessions(node: Node, now_s: float) -> list[Figures]:
    """Those that have moved most bytes, in the order of their numbers."""

    def moved(one: LiveSession) -> int:
        return one.loaded_bytes + one.stored_bytes

    chosen = heapq.nlargest(MAX_ROWS, node.sessions, key=moved)
    return [
        {
            "session_number": one.record.number,
            "engine_id": one.record.engine_id,
            "role": one.record.role,
            "tenant": one.key_space.tenant,
            "model": one.key_space.model,
            "key_space_id": one.record.key_space_id,
            "client_name": one.client_name,
            "age_s": now_s - one.record.opened_s,
            "transfer_count": len(one.jobs),
            "memory_byte_count": one.memory.num_bytes if one.memory else 0,
            "loaded_byte_count": one.loaded_bytes,
            "stored_byte_count": one.stored_bytes,
            "prefill_tokens_per_s": one.prefill_tokens_per_s,
        }
        for one in sorted(chosen, key=lambda one: one.record.number)
    ]


def _key_spaces(node: Node, survey: Survey | None) -> list[Figures]:
    """Those with most blocks, in the order of their numbers."""
    counted = NO_CENSUS if survey is None else survey.census
    return [
        {
            "key_space_id": one.number,
            "tenant": one.key_space.tenant,
            "model": one.key_space.model,
            "dtype": one.key_space.dtype,
            "key_space": one.key_space.fingerprint.hex()[:FINGERPRINT_DIGITS],
            "group_count": len(one.key_space.groups),
            "block_count": None if survey is None else one.num_blocks,
            "representation_count": None if survey is None else one.num_representations,
        }
        for one in inspect.key_spaces(node.core, counted, MAX_ROWS)
    ]


def _sparse_layers(node: Node) -> list[Figures]:
    """Over all engines since the start."""
    rows = []
    for growth in node.sparse.figures.totals():
        counted = dict(zip(SPARSE_COUNTERS, growth.values.tolist(), strict=True))
        rows.append({"layer_index": growth.layer_index, **counted, **sparse_figures(counted)})
    return rows


def _series(samples: dict[str, NDArray[np.float64]]) -> Figures:
    """Samples under the wire's names."""
    whole = {name: values.astype(np.int64).tolist() for name, values in samples.items()}
    figures: Figures = {
        "prompt_token_counts": whole["prompt_tokens"],
        "hit_token_counts": {
            "device": whole["device_hit_tokens"],
            **{
                name.removeprefix(HIT): values
                for name, values in whole.items()
                if name.startswith(HIT)
            },
        },
        "loaded_byte_counts": whole["loaded_bytes"],
        "stored_byte_counts": whole["stored_bytes"],
    }
    if LAG in samples:
        figures["evicted_block_counts"] = whole[EVICTED]
        figures["loop_lag_s"] = samples[LAG].round(6).tolist()
    return figures


def _arena(drawn: ArenaMap) -> Figures:
    """`slot_size_indexes`: of each cell in `slot_byte_counts`, or its negative word."""
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
