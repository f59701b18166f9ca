"""Blocks in calls: how engines name blocks, the options of a call, and the results of calls.

`BlockRun` and `GroupHashes` name blocks by their hashes; `LoadRun` names blocks by their positions
in a read lease. Enums have the numbers of the wire.
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
    """Block hashes of a group, in the order of the blocks in their context."""

    group_index: int
    hashes: Sequence[bytes]


ExtraKey = str | bytes | tuple[str, int]
"""An input of a block's hash in addition to the tokens, as in vLLM: an adapter's name or a cache
salt (str), a digest of prompt embeddings (bytes), or the identifier of a multi-modal input with the
position of its first token."""
BlockExtraKeys = Sequence[ExtraKey] | None
KEY_BYTES = 64
"""Approximate memory that a Python object of type `ExtraKey` takes, without its characters, in
bytes."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of a context in a group, to store or to reserve.

    hashes: hash of each block.
    block_ids: ids of the blocks in engine memory, int32 [blocks]; empty if the call only reserves.
    parent_hash: hash of the block before the first block; empty if the first block begins the
        context.
    depth: position of the first block in the context, in blocks.

    The server uses the following fields only for events. They may be empty:

    token_ids: tokens of all the blocks, in order.
    lora_name: name of the LoRA adapter.
    extra_keys: for each block the further inputs of its hash (`ExtraKey`); empty if no block has
        any.
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
    """The fields of a `BlockRun` that the server uses only for events.

    token_ids: int32 [blocks · block_tokens]; empty if the engine sent no tokens.
    lora_name: name of the LoRA adapter; empty without an adapter.
    extra_keys: for each block the further inputs of its hash (`ExtraKey`); empty if no block has
        any.
    """

    token_ids: NDArray[np.int32]
    lora_name: str = ""
    extra_keys: tuple[tuple[ExtraKey, ...] | None, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Returns the approximate size of this value in memory, in bytes."""
        keys = [key for keys in self.extra_keys if keys for key in keys]
        texts = sum(KEY_BYTES + len(key[0] if isinstance(key, tuple) else key) for key in keys)
        return int(self.token_ids.nbytes) + len(self.lora_name) + texts + 8 * len(self.extra_keys)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Blocks of a group to load under a read lease.

    lease_positions: position of each block in the list of this group's hashes with which the lease
        was acquired, int32 [blocks].
    block_ids: for each block, the id of the block in engine memory that receives its bytes, int32
        [blocks].
    """

    group_index: int
    lease_positions: Int32s
    block_ids: Int32s


# ---------------------------------------------------------------------------- requests about blocks

MAX_PRIORITY = 8
MAX_TTL_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Retention:
    """A request's wish for how long the server should retain the blocks that the request uses.

    The server may ignore the wish; it serves the request in any case. Requests set it in
    `kv_transfer_params` (keys `hotkv.priority`, `hotkv.ttl_s`, `hotkv.pin`); on the wire it is
    `hotkv.v1.Retention`.

    priority: the eviction policy counts a use of the blocks as 2^priority uses, -8 to 8.
    ttl_s: time after a use for which the blocks still count as in use, at most a day.
    pin: True: do not evict the blocks for `ttl_s`, up to the server's limit for pinned memory.

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
    """Options of a store. The connector and the server both use this class.

    retention: how long to retain the blocks. All ranks store a block under the same write lease;
        the server reads only the `retention` of the first store under the lease, which reserves the
        slots.
    residency_id: an open residency of this engine (room reserved for a request whose context is in
        host memory), or empty. The residency pins each block of the store: at once if the block is
        already ready, otherwise when the store makes it ready.
    traceparent: the caller's span as a W3C traceparent header; empty without a span.
    is_private: True: no other request can find the blocks, so the server copies them to no tier.
    """

    retention: Retention = NO_RETENTION
    residency_id: str = ""
    traceparent: str = ""
    is_private: bool = False


NO_OPTIONS = StoreOptions()


# ------------------------------------------------------------------------------- results for blocks


class BlockResult(enum.IntEnum):
    """The result of a store for one of its blocks; numbered as `hotkv.v1.BlockResult`."""

    STORED = 1
    """The shards of all ranks are written and the block is ready: the next lookup finds it."""
    PRESENT = 2
    """The block was already ready; no bytes were copied."""
    WRITTEN = 3
    """This rank's shard is written; shards of other ranks are still missing."""
    RESERVED = 4
    """The lease holds a slot for the block; this rank's shard is not written yet."""
    NO_SPACE = 5
    """Refused: the server could not free a slot."""
    IN_FLIGHT = 6
    """Refused: another lease is writing the block."""
    ABORTED = 7
    """Refused: the copy failed or was cancelled, or the block was removed before the answer."""


class TransferStatus(enum.IntEnum):
    """The result of a transfer; numbered as `hotkv.v1.TransferStatus`.

    done: all bytes were copied.
    failed: the transfer failed; its message gives the reason.
    cancelled: the transfer was cancelled before its end.
    """

    DONE = 1
    FAILED = 2
    CANCELLED = 3


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The end of a transfer. After its end the server does not access engine memory for the
    transfer. Exception: after the end of a store that the engine has revoked, the server may still
    read engine memory.

    num_bytes: bytes that were copied.
    results: for a store, a uint8 array of `BlockResult` values for each run (consecutive blocks of
        a group), in the order of the call; empty for a load, or if the engine revoked the store.
    message: why the transfer failed; empty for DONE.
    """

    transfer_id: str
    status: TransferStatus
    num_bytes: int = 0
    results: tuple[NDArray[np.uint8], ...] = ()
    message: str = ""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The blocks that a read lease pins. If some blocks are not ready, the lease pins the others;
    that is not an error.

    pinned: for each group of the call, a mask of the blocks that are pinned.
    ttl_s: time until the lease expires.
    offsets: for each group of the call, int64 offsets of the blocks' slots from the arena's start,
        in bytes; -1 if a block is not pinned. Empty unless the call asked for offsets. Valid until
        the lease is released or expires, or the connection is lost; after that the slot may hold
        another block.
    """

    lease_id: str
    pinned: tuple[NDArray[np.bool_], ...]
    ttl_s: float
    offsets: tuple[NDArray[np.int64], ...] = ()


@dataclass(frozen=True, slots=True)
class ResidencyOpened:
    """An open residency: room in the arena that is reserved for a request's blocks.

    A process that has read blocks in the arena must check that they were still pinned. For this, it
    compares validity words, which are numbers that the server writes behind the arena's bytes
    (`hotkv_proto.words`), with these fields:

    word_index: index of the validity word of the session that opened the residency.
    word_value: value of this word as long as the session's residencies are valid.
    start_number: number of the server's start. Each later start of a server with this arena has a
        higher number. The residency is invalid once the validity word `OLDEST_START` is higher than
        this number.
    """

    residency_id: str
    word_index: int
    word_value: int
    start_number: int


class Flushed(int):
    """The result of a flush (the deletion of all blocks of a key space): an int, which is the
    number of deleted blocks.

    pending_tiers: names of the tiers that have not answered the flush. The server flushes such a
        tier as soon as it answers. Until then other nodes may load from this tier blocks that were
        stored before the flush. For the tier `disk`, this node may load such blocks after a power
        loss.
    """

    pending_tiers: tuple[str, ...]

    def __new__(cls, num_blocks: int, pending_tiers: Iterable[str] = ()) -> "Flushed":
        """Makes the result of a flush from the number of deleted blocks and the names of the tiers
        that have not answered."""
        flushed = super().__new__(cls, num_blocks)
        flushed.pending_tiers = tuple(pending_tiers)
        return flushed

    def __repr__(self) -> str:
        return f"Flushed({int(self)}, pending_tiers={self.pending_tiers})"
