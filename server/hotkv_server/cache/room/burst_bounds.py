"""Brings tenants back within burst bounds that were lowered: by new shares, or by a restart with
others.

Always true: a tenant's coldest blocks go first, none that is in use, and no more than its excess
asks for. Between two parts anything else may be called: the excess is counted anew.
"""

import numpy as np

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.room.books import EVICTED_PER_PART, Books, Parts
from hotkv_server.cache.room.removal import Removal
from hotkv_server.cache.values import BoolMask, Entries


def keep_bounds(books: Books, removal: Removal) -> Parts[None]:
    """Evicts what tenants have beyond their bounds, as far as it may go."""
    for tenant, _ in books.tenants.over_bound():
        while (excess_bytes := books.tenants.excess_bytes(tenant)) > 0:
            if not (yield from _evict_excess(books, removal, tenant, excess_bytes)):
                break
            yield


def _evict_excess(books: Books, removal: Removal, tenant: int, excess_bytes: int) -> Parts[int]:
    """Evicts the coldest blocks of a tenant, EVICTED_PER_PART at most; returns how many."""
    count = min(EVICTED_PER_PART, -(-excess_bytes // SLOT_ALIGN))

    def may_go(entries: Entries) -> BoolMask:
        mask: BoolMask = books.index.evictable(entries) & (books.owners(entries) == tenant)
        return mask

    yield from books.policy.sweep(0, count, may_go)
    victims = books.policy.victims(0, count, may_go)
    freed = np.cumsum(books.representations.bytes_with(victims))
    return removal.evict_blocks(victims[: int(np.searchsorted(freed, excess_bytes)) + 1])
