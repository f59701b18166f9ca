"""What the tier in an S3 bucket takes."""

from dataclasses import dataclass

from hotkv_server.tiers.remote.workers import Timeouts


@dataclass(frozen=True, slots=True)
class S3Bounds:
    """pack_bytes: of blocks in an object, as far as a write has so many. Each write under way takes
        a copy of so much memory.
    index_blocks: of the bucket that this node knows of, INDEX_ENTRY_BYTES each; a pack counts as
        six blocks more.
    refresh_s: how long a node that asks for blocks waits until it looks again for what other nodes
        have written.
    """

    pack_bytes: int
    index_blocks: int
    refresh_s: float
    timeouts: Timeouts


BOUNDS = S3Bounds(16 << 20, 1 << 20, 10.0, Timeouts(connect_s=3.0, batch_s=15.0))
