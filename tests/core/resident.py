"""Residencies of a core that a test has made."""

from hotkv_server.cache.core import CacheCore
from hotkv_server.residency.book.residencies import Residencies


def residencies(core: CacheCore) -> Residencies:
    """Returns the residencies of this core, which has some from the first call on."""
    for pinner in core.pinners:
        if isinstance(pinner, Residencies):
            return pinner
    return Residencies(core)
