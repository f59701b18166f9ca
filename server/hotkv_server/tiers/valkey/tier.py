"""The tier in a Valkey or Redis server."""

from collections.abc import Callable

from hotkv_server.dataplane.plan import Region
from hotkv_server.settings.valkey import ValkeySettings
from hotkv_server.tiers.protocol import Medium, TierFacts
from hotkv_server.tiers.remote.calls import PART_BYTES
from hotkv_server.tiers.remote.client import Client
from hotkv_server.tiers.remote.tier import RemoteTier
from hotkv_server.tiers.remote.workers import Limits, Workers
from hotkv_server.tiers.valkey.resp_client import RespClient

Connect = Callable[[ValkeySettings, float], Client]
"""Makes a client that can be used, until a time of time.monotonic. Raises StoreError. Another one
than RESP's is for clusters, such as glide."""


class ValkeyTier(RemoteTier):
    """See `RemoteTier`."""

    def __init__(
        self,
        arena: Region,
        settings: ValkeySettings,
        *,
        connect: Connect = RespClient,
        on_epoch: Callable[[str, int], None] = lambda fingerprint, epoch: None,
        name: str = "valkey",
    ) -> None:
        batch_bytes = settings.connections * PART_BYTES
        facts = TierFacts(name, Medium.REMOTE, False, 0, True, batch_bytes)
        limits = Limits(settings.connections, settings.connect_timeout_s, settings.timeout_s)
        workers = Workers(
            f"{name} at {settings.address}", limits, lambda until_s: connect(settings, until_s)
        )
        super().__init__(facts, arena, workers, on_epoch=on_epoch)
