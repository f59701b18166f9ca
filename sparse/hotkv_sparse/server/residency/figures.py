"""Figures about residencies for operators."""

import math
import time

from hotkv_server.node.capability import Figures, Filters
from hotkv_server.node.node import Node
from hotkv_sparse.server.residency.book.register import Residency
from hotkv_sparse.server.residency.book.residencies import Residencies

DEFAULT_PAGE, MAX_PAGE = 100, 1000


def residencies(node: Node, residencies: Residencies, filters: Filters) -> Figures:
    """The largest residencies, up to the filters' page size; the latest refusals, most attempts
    first; totals in bytes of the arena:

    `pinned_byte_count`: a block that several pin counts once.
    `promised_byte_count`: reserved, not yet pinned.
    `bound_byte_count`: of both together.
    `grace_byte_count`: kept for `grace_s` more for clients that read before the server's
        restart.
    """
    most, now_s = filters.page_size(DEFAULT_PAGE, MAX_PAGE), time.monotonic()
    bound, book, grace = residencies.bound, residencies.book, node.core.grace
    ordered = sorted(book.all(), key=lambda one: -sum(one.asked.values()))
    grace_s = grace.until_s - now_s if grace.is_on and math.isfinite(grace.until_s) else 0.0
    return {
        "residencies": [_residency(node, residencies, one, now_s) for one in ordered[:most]],
        "refusals": [
            {
                "engine_id": one.engine_id,
                "engine_name": node.names.engine(one.engine_id),
                "residency_id": one.residency_id,
                "age_s": now_s - one.at_s,
                "asked_byte_count": one.asked_bytes,
                "available_byte_count": one.available_bytes,
                "attempt_count": one.num_attempts,
                "message": one.message,
            }
            for one in sorted(book.refusals(), key=lambda one: -one.num_attempts)
        ],
        "residency_count": len(book),
        "pinned_byte_count": bound.pinned_bytes,
        "promised_byte_count": bound.promised_bytes,
        "bound_byte_count": bound.bound_bytes,
        "grace_byte_count": grace.num_bytes,
        "grace_s": max(0.0, grace_s),
    }


def _residency(node: Node, residencies: Residencies, one: Residency, now_s: float) -> Figures:
    """Its `pinned_byte_count` includes slots that others pin too."""
    index = node.core.space.index
    return {
        "engine_id": one.engine_id,
        "engine_name": node.names.engine(one.engine_id),
        "residency_id": one.residency_id,
        "key_space_id": one.key_space_id,
        "model_name": node.names.model_of(node.core.key_space(one.key_space_id), one.engine_id),
        "session_number": one.session_number,
        "age_s": now_s - one.opened_s,
        "block_count": one.num_blocks,
        "reserved_block_count": sum(one.asked.values()),
        "pinned_byte_count": sum(int(index.slot_bytes(pinned).sum()) for pinned in one.pinned()),
        "promised_byte_count": residencies.bound.costs(one.left()),
    }
