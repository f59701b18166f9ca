"""The tier in a Valkey or Redis server, or in a cluster of them."""

from collections.abc import Callable

from hotkv_server.dataplane.plan import Region
from hotkv_server.settings.valkey import ValkeySettings
from hotkv_server.tiers.protocol import Medium, TierFacts
from hotkv_server.tiers.remote.calls import PART_BYTES
from hotkv_server.tiers.remote.client import Client
from hotkv_server.tiers.remote.tier import RemoteTier
from hotkv_server.tiers.remote.workers import Limits, Workers
from hotkv_server.tiers.valkey.epochs import StoreClock
from hotkv_server.tiers.valkey.resp_client import RespClient

Connect = Callable[[ValkeySettings, float], Client]
"""Makes a client that can be used, until a time of time.monotonic. Raises StoreError."""


class ValkeyTier(RemoteTier):
    """See `RemoteTier`. Raises MissingError if the settings need a library that is not
    installed."""

    def __init__(
        self,
        arena: Region,
        settings: ValkeySettings,
        *,
        on_epoch: Callable[[str, int], None] = lambda fingerprint, epoch: None,
        name: str = "valkey",
    ) -> None:
        clock = StoreClock()
        connect: Connect = lambda settings, until_s: RespClient(settings, until_s, clock)  # noqa: E731
        if settings.cluster:
            # Its library brings a runtime of its own: only who has a cluster loads it.
            from hotkv_server.tiers.valkey import cluster_client

            cluster_client.check_installed()
            connect = cluster_client.ClusterClient
        batch_bytes = settings.connections * PART_BYTES
        facts = TierFacts(name, Medium.REMOTE, False, 0, True, batch_bytes)
        limits = Limits(settings.connections, settings.connect_timeout_s, settings.timeout_s)
        workers = Workers(
            f"{name} at {settings.address}", limits, lambda until_s: connect(settings, until_s)
        )
        super().__init__(facts, arena, workers, on_epoch=on_epoch)
