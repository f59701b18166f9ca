"""Blocks in calls: how engines name them, the options of a call, and its results.

`BlockRun` and `GroupHashes` name blocks by hash, `LoadRun` by position in a read lease. Enums
have the numbers of the wire.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

# ------------------------------------------------------------------------------------ naming blocks

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class GroupHashes:
    """In the order of the blocks in their context."""

    group_index: int
    hashes: Sequence[bytes]


ExtraKey = str | bytes | tuple[str, int]
"""An input of a block's hash beside the tokens, as in vLLM: adapter's name or cache salt (str),
digest of prompt embeddings (bytes), or multi-modal input with the position of its first token."""
BlockExtraKeys = Sequence[ExtraKey] | None
KEY_BYTES = 64
"""About what a Python object of type `ExtraKey` takes, without its characters."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of a context in a group, to store or to reserve.

    block_ids: in engine memory, int32 [blocks]; empty to reserve.
    parent_hash: empty at the context's start.
    depth: of the first block.
    token_ids, lora_name, extra_keys: for events; may be empty.
    """

    group_index: int
    hashes: Sequence[bytes]
    block_ids: Int32s = field(default_factory=lambda: np.empty(0, np.int32))
    parent_hash: bytes = b""
    depth: int = 0
    token_ids: Sequence[int] | Int32s = ()
    lora_name: str = ""
    extra_keys: Sequence[BlockExtraKeys] = ()


@dataclass(frozen=True, slots=True)
class RunContent:
    """The fields of a `BlockRun` for events; each may be empty.

    token_ids: int32 [blocks · block_tokens].
    extra_keys: per block.
    """

    token_ids: NDArray[np.int32]
    lora_name: str = ""
    extra_keys: tuple[tuple[ExtraKey, ...] | None, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""
        keys = [key for keys in self.extra_keys if keys for key in keys]
        texts = sum(KEY_BYTES + len(key[0] if isinstance(key, tuple) else key) for key in keys)
        return int(self.token_ids.nbytes) + len(self.lora_name) + texts + 8 * len(self.extra_keys)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Blocks of a group to load under a read lease.

    lease_positions: in the group's hashes with which the lease was acquired, int32 [blocks].
    block_ids: in engine memory, int32 [blocks].
    """

    group_index: int
    lease_positions: Int32s
    block_ids: Int32s


# ---------------------------------------------------------------------------- requests about blocks

MAX_PRIORITY = 8
MAX_TTL_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Retention:
    """A request's wish for its blocks, which the server may ignore; on the wire
    `hotkv.v1.Retention`.

    priority: a use counts as 2^priority uses, -8 to 8.
    ttl_s: after a use the blocks count as in use so long, at most a day.
    pin: not evicted for `ttl_s`, up to the server's limit for pinned memory.

    Raises ValueError for a value out of range, or a pin without `ttl_s`.
    """

    priority: int = 0
    ttl_s: float = 0.0
    pin: bool = False

    def __post_init__(self) -> None:
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise ValueError(
                f"retention.priority is {self.priority}; allowed are {-MAX_PRIORITY} to "
                f"{MAX_PRIORITY}"
            )
        if not 0.0 <= self.ttl_s <= MAX_TTL_S:
            raise ValueError(f"retention.ttl_s is {self.ttl_s}; allowed are 0 to {MAX_TTL_S:.0f}")
        if self.pin and not self.ttl_s:
            raise ValueError("retention.pin needs retention.ttl_s: how long to keep the blocks")


NO_RETENTION = Retention()


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of a store.

    retention: only that of a lease's first store, which reserves the slots, counts.
    residency_id: a residency of this engine, which pins each block of the store once it is ready;
        empty: none.
    traceparent: the caller's span as a W3C header, or empty.
    is_private: no other request can find the blocks, so they go to no tier.
    """

    retention: Retention = NO_RETENTION
    residency_id: str = ""
    traceparent: str = ""
    is_private: bool = False


NO_OPTIONS = StoreOptions()


# ------------------------------------------------------------------------------- results for blocks


class BlockResult(enum.IntEnum):
    """Of a store; numbered as `hotkv.v1.BlockResult`."""

    STORED = 1
    """All ranks' shards are written: the next lookup finds the block."""
    PRESENT = 2
    """Was ready already."""
    WRITTEN = 3
    """This rank's shard is written, but other ranks' are still missing."""
    RESERVED = 4
    """This rank's shard is not written yet."""
    NO_SPACE = 5
    """Refused: the server could not free a slot."""
    IN_FLIGHT = 6
    """Refused: another lease is writing the block."""
    ABORTED = 7
    """The copy failed or was cancelled, or the block was removed before the answer."""


class TransferStatus(enum.IntEnum):
    """Numbered as `hotkv.v1.TransferStatus`."""

    DONE = 1
    FAILED = 2
    CANCELLED = 3


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The end of a transfer. The server no longer accesses engine memory for it, with one
    exception: it may still read for a revoked store.

    results: of a store, `BlockResult` values, uint8, per run; empty if it was revoked.
    message: why it failed.
    """

    transfer_id: str
    status: TransferStatus
    num_bytes: int = 0
    results: tuple[NDArray[np.uint8], ...] = ()
    message: str = ""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The blocks that a read lease pins. Blocks that are not ready are no error.

    pinned: a mask per group.
    offsets: of slots in the arena, per group, int64; -1 if not pinned. Empty unless asked for.
        Valid until the lease ends or the connection is lost.
    """

    lease_id: str
    pinned: tuple[NDArray[np.bool_], ...]
    ttl_s: float
    offsets: tuple[NDArray[np.int64], ...] = ()


@dataclass(frozen=True, slots=True)
class ResidencyOpened:
    """Reserved room in the arena, and how readers check that its blocks are still pinned
    (`hotkv_proto.words`):

    word_index: of the session's validity word.
    word_value: of this word as long as the session's residencies are valid.
    start_number: the residency is invalid once `OLDEST_START` is higher.
    """

    residency_id: str
    word_index: int
    word_value: int
    start_number: int


class Flushed(int):
    """Number of deleted blocks.

    pending_tiers: have not answered and are flushed when they do. Until then other nodes may
        load old blocks from them; from the tier `disk` this node may, after a power loss.
    """

    pending_tiers: tuple[str, ...]

    def __new__(cls, num_blocks: int, pending_tiers: Iterable[str] = ()) -> "Flushed":
        flushed = super().__new__(cls, num_blocks)
        flushed.pending_tiers = tuple(pending_tiers)
        return flushed

    def __repr__(self) -> str:
        return f"Flushed({int(self)}, pending_tiers={self.pending_tiers})"
