"""Client of hotkv-server: sessions for engines, admin calls for people. Light: grpcio, protobuf and numpy."""

from hotkv.errors import HotKVError, Reason, SessionLostError
from hotkv_client.session import Session
from hotkv_client.types import (
    BlockResult,
    BlockRun,
    EngineMemory,
    Evicted,
    GroupHashes,
    LeaseGrant,
    LinkState,
    LoadRun,
    RequestReport,
    Retention,
    Role,
    SessionConfig,
    TransferResult,
    TransferStatus,
)

__all__ = [
    "BlockResult",
    "BlockRun",
    "EngineMemory",
    "Evicted",
    "GroupHashes",
    "HotKVError",
    "LeaseGrant",
    "LinkState",
    "LoadRun",
    "Reason",
    "RequestReport",
    "Retention",
    "Role",
    "Session",
    "SessionConfig",
    "SessionLostError",
    "TransferResult",
    "TransferStatus",
]
