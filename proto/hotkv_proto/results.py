"""Answers that both sides name alike; the numbers are those of the wire."""

import enum


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
