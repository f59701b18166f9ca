"""Answers that both sides name alike; the numbers are those of the wire."""

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class BlockResult(enum.IntEnum):
    """What became of one block of a store; the numbers are those of `hotkv.v1.BlockResult`."""

    STORED = 1
    """Committed by all ranks: the next lookup finds it."""
    PRESENT = 2
    """Ready already; nothing was copied."""
    WRITTEN = 3
    """This rank's shard is written; other ranks are outstanding."""
    RESERVED = 4
    NO_SPACE = 5
    """Refused: no slot could be freed."""
    IN_FLIGHT = 6
    """Refused: another lease is writing it."""
    ABORTED = 7
    """Refused: the copy failed or was cancelled."""


class TransferStatus(enum.IntEnum):
    """How a transfer ended; the numbers are those of `hotkv.v1.TransferStatus`."""

    DONE = 1
    FAILED = 2
    CANCELLED = 3


@dataclass(frozen=True, slots=True)
class TransferResult:
    """How a transfer ended. Nothing is being read or written for it any more.

    `results` (stores): one uint8 array of BlockResult a run, in the order asked; empty for a store
    that was revoked.
    """

    transfer_id: str
    status: TransferStatus
    num_bytes: int = 0
    results: tuple[NDArray[np.uint8], ...] = ()
    message: str = ""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The blocks that a read lease pins: one mask a group, in the order asked. A short grant is a
    value.

    `offsets`, if asked for: int64 a group, bytes from the arena's start to each block's slot, -1 if
    not pinned. They hold while the lease does: what is read under it after its release, its
    end or that of the connection may be any bytes.
    """

    lease_id: str
    pinned: tuple[NDArray[np.bool_], ...]
    ttl_s: float
    offsets: tuple[NDArray[np.int64], ...] = ()
