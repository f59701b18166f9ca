"""The client library of hotkv: sessions for engines, admin calls for operators, the command
`hotkv`.

The library depends on grpcio, protobuf and numpy only.
"""

from hotkv_client.arena import Arena
from hotkv_client.session import Session
from hotkv_client.types import (
    After,
    BlockResult,
    BlockRun,
    Credentials,
    DeviceMark,
    EngineMemory,
    Evicted,
    Flushed,
    GroupHashes,
    LeaseGrant,
    LinkState,
    LoadEnd,
    LoadRun,
    OrderKind,
    RequestReport,
    ResidencyOpened,
    Retention,
    Role,
    SelectConfig,
    SelectedBlocks,
    SequenceCreated,
    SequenceState,
    SessionConfig,
    StoreOptions,
    TransferResult,
    TransferStatus,
)
from hotkv_proto.errors import HotKVError, NoAnswerError, Reason, SessionLostError

__all__ = [
    "After",
    "Arena",
    "BlockResult",
    "BlockRun",
    "Credentials",
    "DeviceMark",
    "EngineMemory",
    "Evicted",
    "Flushed",
    "GroupHashes",
    "HotKVError",
    "LeaseGrant",
    "LinkState",
    "LoadEnd",
    "LoadRun",
    "NoAnswerError",
    "OrderKind",
    "Reason",
    "RequestReport",
    "ResidencyOpened",
    "Retention",
    "Role",
    "SelectConfig",
    "SelectedBlocks",
    "SequenceCreated",
    "SequenceState",
    "Session",
    "SessionConfig",
    "SessionLostError",
    "StoreOptions",
    "TransferResult",
    "TransferStatus",
]
