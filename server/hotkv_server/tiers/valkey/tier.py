"""The tier in a Valkey or Redis server or cluster."""

from collections.abc import Callable

from hotkv_server.dataplane.plan import Region
from hotkv_server.settings.tiers import ValkeySettings
from hotkv_server.tiers.compression.staged import Staged
from hotkv_server.tiers.protocol import TierFacts
from hotkv_server.tiers.remote.calls import PART_BYTES
from hotkv_server.tiers.remote.encoding import encoding
from hotkv_server.tiers.remote.tier import RemoteTier
from hotkv_server.tiers.remote.workers import Timeouts, Workers
from hotkv_server.tiers.valkey.cluster import ClusterPipe
from hotkv_server.tiers.valkey.connection import Pipe, ValkeyConnection
from hotkv_server.tiers.valkey.generation_keys import StoreClock
from hotkv_server.tiers.valkey.resp_client import RespClient

TIMEOUTS = Timeouts(connect_s=1.0, batch_s=5.0)


class ValkeyTier(RemoteTier):
    """See `RemoteTier`. `timeouts`: None: TIMEOUTS."""

    def __init__(
        self,
        arena: Region,
        settings: ValkeySettings,
        *,
        on_generation: Callable[[str, int], None] = lambda fingerprint, generation: None,
        staged: Staged | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        clock, unsafe = StoreClock(), set[str]()

        def connect(until_s: float) -> RespClient:
            pipe: Pipe
            if settings.cluster:
                pipe = ClusterPipe(settings, until_s)
            else:
                address = None if settings.unix_path else settings.host_and_port
                pipe = ValkeyConnection(settings, address, until_s)
            return RespClient(pipe, settings.ttl_s, clock, unsafe)

        batch_bytes = settings.connections * PART_BYTES
        facts = TierFacts("valkey", batch_bytes)
        workers = Workers(
            f"valkey at {settings.address}",
            settings.connections,
            timeouts or TIMEOUTS,
            encoding(connect, staged),
            # One connection never writes: over a slow line, lookups would wait for large blocks.
            num_writers=max(1, settings.connections - 1),
        )
        super().__init__(facts, arena, workers, on_generation=on_generation, staged=staged)
