"""hotkv's client library: sessions for engines, admin calls for operators, the command `hotkv`.

Depends on grpcio, protobuf and numpy only. Its names are imported when they are first used: a
command of `hotkv` needs few of them, and numpy and gRPC take longer to import than it runs.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotkv_client.arena import Arena
    from hotkv_client.session import Session
    from hotkv_client.targets import Credentials
    from hotkv_client.types import (
        After,
        BlockResult,
        BlockRun,
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
_HOMES = {
    "Arena": "hotkv_client.arena",
    "Credentials": "hotkv_client.targets",
    "Session": "hotkv_client.session",
    **dict.fromkeys(
        ("HotKVError", "NoAnswerError", "Reason", "SessionLostError"), "hotkv_proto.errors"
    ),
}
"""Modules of the names that are not in `types`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES.get(name, "hotkv_client.types")), name)
    globals()[name] = found
    return found
