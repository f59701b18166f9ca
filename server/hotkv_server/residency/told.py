"""What operators are told of residencies."""

import math
import time

from hotkv_server.cache.core import CacheCore
from hotkv_server.node.capability import Figures, Filters
from hotkv_server.residency.book.register import Residency
from hotkv_server.residency.book.residencies import Residencies

DEFAULT_PAGE, MAX_PAGE = 100, 1000


def residencies(core: CacheCore, residencies: Residencies, filters: Filters) -> Figures:
    """The residencies with the most room, the engines that wait for some, those refused most often
    first, and what all residencies have together.

    `pinned_byte_count`: each block once; it and `promised_byte_count`, at most `bound_byte_count`
    together, count slots with what their slabs lose. `grace_byte_count`: slots that are kept for
    readers of the server before this one, for `grace_s` yet.
    """
    most, now_s = filters.page_size(DEFAULT_PAGE, MAX_PAGE), time.monotonic()
    bound, book, grace = residencies.bound, residencies.book, core.grace
    ordered = sorted(book.all(), key=lambda one: -sum(one.asked.values()))
    grace_s = grace.until_s - now_s if grace.is_on and math.isfinite(grace.until_s) else 0.0
    return {
        "residencies": [_residency(core, residencies, one, now_s) for one in ordered[:most]],
        "refusals": [
            {
                "engine_id": one.engine_id,
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


def _residency(core: CacheCore, residencies: Residencies, one: Residency, now_s: float) -> Figures:
    """`pinned_byte_count`: of its slots, which others may pin, too."""
    index = core.space.index
    return {
        "engine_id": one.engine_id,
        "residency_id": one.residency_id,
        "key_space_id": one.key_space_id,
        "session_number": one.session_number,
        "age_s": now_s - one.opened_s,
        "block_count": one.num_blocks,
        "reserved_block_count": sum(one.asked.values()),
        "pinned_byte_count": sum(int(index.slot_bytes(pinned).sum()) for pinned in one.pinned()),
        "promised_byte_count": residencies.bound.costs(one.left()),
    }
