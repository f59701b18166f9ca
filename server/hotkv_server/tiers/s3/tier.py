"""The tier in an S3 bucket."""

from collections.abc import Callable, Iterator

from hotkv_server.dataplane.plan import Region
from hotkv_server.settings.tiers import S3Settings
from hotkv_server.tiers.compression.staged import Staged
from hotkv_server.tiers.protocol import Int64s, TierFacts, TierMemory
from hotkv_server.tiers.remote.calls import cut
from hotkv_server.tiers.remote.encoding import encoding
from hotkv_server.tiers.remote.tier import RemoteTier
from hotkv_server.tiers.remote.workers import Workers
from hotkv_server.tiers.s3.bounds import BOUNDS, S3Bounds
from hotkv_server.tiers.s3.bucket import check_installed
from hotkv_server.tiers.s3.client import Shared
from hotkv_server.tiers.s3.index import INDEX_ENTRY_BYTES
from hotkv_server.tiers.s3.packs import cut_packs

LINGER_S = 5.0
"""How long blocks wait to fill a pack. Stores charge for requests, so few large packs are
cheaper."""
MAX_STALL_S = 5.0
"""Over a slow line, READ_BYTES takes more than a second."""
READ_BYTES, READ_BLOCKS = 8 << 20, 256
"""Most bytes and blocks in a part of a read."""


class S3Tier(RemoteTier):
    """A tier in an S3 bucket; see `RemoteTier`. The constructor raises MissingError without
    obstore.

    A write of less than `TierFacts.batch_bytes` costs as much as a full one. Other nodes find
    the blocks when they list the bucket, after `S3Bounds.refresh_s`. Forgotten blocks leave only
    this node's index, until its next start. `bounds`: None: BOUNDS.
    """

    def __init__(
        self,
        arena: Region,
        settings: S3Settings,
        *,
        on_generation: Callable[[str, int], None] = lambda fingerprint, generation: None,
        staged: Staged | None = None,
        bounds: S3Bounds | None = None,
    ) -> None:
        check_installed()
        bounds = bounds or BOUNDS

        def cut_reads(num_bytes: Int64s) -> Iterator[slice]:
            return cut(num_bytes, READ_BYTES, READ_BLOCKS)

        def cut_writes(num_bytes: Int64s) -> Iterator[slice]:
            return cut_packs(num_bytes, bounds.pack_bytes)

        facts = TierFacts("s3", bounds.pack_bytes, LINGER_S, MAX_STALL_S)
        self._shared = Shared(settings, bounds)
        # A pack takes long, so half of the threads are left to reads.
        self._num_writers = (settings.connections + 1) // 2
        workers = Workers(
            f"s3 at {settings.place}",
            settings.connections,
            bounds.timeouts,
            encoding(self._shared.connect, staged),
            num_writers=self._num_writers,
        )
        super().__init__(
            facts,
            arena,
            workers,
            cut_reads=cut_reads,
            cut_writes=cut_writes,
            on_generation=on_generation,
            staged=staged,
        )

    def is_alive(self) -> bool:
        return super().is_alive() and self._shared.is_alive()

    def _own_memory(self) -> TierMemory:
        """Index and requests. Written packs count twice, as they are copied; read blocks too, as
        half of a merged range may be gaps."""
        shared = self._shared
        bounds, index = shared.bounds, shared.index
        moving_bytes = 2 * (
            self._num_writers * bounds.pack_bytes + shared.settings.connections * READ_BYTES
        )
        queued_bytes = 2 * self.figures().queued_bytes
        return TierMemory(
            index.num_bytes + min(queued_bytes, moving_bytes),
            bounds.index_blocks * INDEX_ENTRY_BYTES + moving_bytes,
        )

    def close(self) -> None:
        """Waits for calls under way, within its time limits."""
        self._shared.lister.stop()
        super().close()
        self._shared.close()
