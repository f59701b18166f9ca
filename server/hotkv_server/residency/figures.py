"""Figures about residencies for operators. A residency pins the blocks of a running request in host
memory."""

import math
import time

from hotkv_server.node.capability import Figures, Filters
from hotkv_server.node.node import Node
from hotkv_server.residency.book.register import Residency
from hotkv_server.residency.book.residencies import Residencies

DEFAULT_PAGE, MAX_PAGE = 100, 1000


def residencies(node: Node, residencies: Residencies, filters: Filters) -> Figures:
    """Returns figures of the residencies (each pins the blocks of a running request): the largest
    residencies, the latest refusal of each engine that waits for room (most attempts first), and
    totals.

    The totals are bytes of the arena. A slot's bytes include its share of the unused end of a slab:
    `pinned_byte_count`: pinned by residencies; a block that several residencies pin counts once.
    `promised_byte_count`: reserved by residencies, but not yet pinned.
    `bound_byte_count`: limit for the sum of pinned and promised bytes.
    `grace_byte_count`: kept for another `grace_s` seconds, because clients that began to read these
        slots before the server's restart may still be reading them.

    filters: its page size limits the number of residencies.
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
    """Returns the figures of one residency. Its `pinned_byte_count` counts all slots that the
    residency pins, including slots that other residencies pin too."""
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
