"""Eviction policies, by the names that settings and the simulator use."""

from collections.abc import Callable

from hotkv_server.cache.room.policies.arc import ARC
from hotkv_server.cache.room.policies.hotness import Hotness
from hotkv_server.cache.room.policies.lru import LRU
from hotkv_server.cache.room.policies.protocol import Policy
from hotkv_server.cache.room.policies.s3fifo import S3FIFO

POLICIES: dict[str, Callable[[int], Policy]] = {
    "hotness": Hotness,
    "lru": LRU,
    "arc": ARC,
    "s3fifo": S3FIFO,
}
"""By name. The argument is the capacity: the number of entries, numbered from 1."""

__all__ = ["ARC", "LRU", "POLICIES", "S3FIFO", "Hotness", "Policy"]
