"""The server's eviction policy and its rivals, by name, for `bench.simulate` and for tests."""

from collections.abc import Mapping

from bench.policies.arc import ARC
from bench.policies.lru import LRU
from bench.policies.s3fifo import S3FIFO
from hotkv_server.simulate.command import OWN
from hotkv_server.simulate.replay import MakePolicy

POLICIES: Mapping[str, MakePolicy] = {**OWN, "lru": LRU, "arc": ARC, "s3fifo": S3FIFO}
"""By name. The argument is the capacity: the number of entries, numbered from 1."""
