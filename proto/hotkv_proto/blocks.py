"""Blocks in calls: how engines name them, which options a call may carry, and the results of calls.

`LoadRun`, `BlockRun` and `GroupHashes` name blocks by their hashes. Enums have the numbers of the
wire.
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
    """Block hashes of a group, in chain order."""

    group_index: int
    hashes: Sequence[bytes]


ExtraKey = str | bytes | tuple[str, int]
"""An adapter's name or a cache salt (str), a digest of prompt embeddings (bytes), or a multi-modal
input with the position of its first token."""
BlockExtraKeys = Sequence[ExtraKey] | None
KEY_BYTES = 64
"""Approximate memory of an extra key, without its characters."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """A chain of consecutive blocks of a group.

    block_ids: blocks in engine memory, int32 [n]; empty if the call only reserves.
    parent_hash: hash of the block before the first; empty at the root.
    depth: position of the first block in its chain, in blocks.

    Only for events, if the server publishes them:

    token_ids: tokens of all the blocks.
    lora_name: name of the adapter.
    extra_keys: for each block, the keys hashed into it beside its tokens, as in vLLM's events;
        empty if no block has any.
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
    """An engine's description of a run for events, without the hashes.

    token_ids: int32 [blocks · block_tokens]; empty if the engine sent no tokens.
    extra_keys: one entry per block, or empty.
    """

    token_ids: NDArray[np.int32]
    lora_name: str = ""
    extra_keys: tuple[tuple[ExtraKey, ...] | None, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Returns its approximate memory in bytes."""
        keys = [key for keys in self.extra_keys if keys for key in keys]
        texts = sum(KEY_BYTES + len(key[0] if isinstance(key, tuple) else key) for key in keys)
        return int(self.token_ids.nbytes) + len(self.lora_name) + texts + 8 * len(self.extra_keys)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Blocks of a group to load.

    lease_positions: positions in the lease's hash list of that group, int32 [n].
    block_ids: blocks in engine memory that receive them, int32 [n].
    """

    group_index: int
    lease_positions: Int32s
    block_ids: Int32s


# ---------------------------------------------------------------------------- requests about blocks

MAX_PRIORITY = 8
MAX_TTL_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Retention:
    """A request's wish about the eviction of the blocks that it uses.

    It is a hint: a cache that can't honour it serves as before. Requests set it in
    `kv_transfer_params` (keys `hotkv.priority`, `hotkv.ttl_s`, `hotkv.pin`); on the wire it is
    `hotkv.v1.Retention`.

    priority: a use counts as 2^priority uses, -8 to 8.
    ttl_s: the blocks count as in use for that long after the use, at most a day.
    pin: the blocks are not evicted within `ttl_s`, as far as the server's share for pinned blocks
        allows.

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
    """Options of a store, in addition to its blocks. The connector's plan and the server's books
    share this value.

    retention: set by the store that reserves; stores of other ranks join it.
    residency_id: an open residency of this engine, or empty. It pins blocks that are ready
        already when the store starts, and the other blocks as soon as the store makes them ready.
    traceparent: names the caller's span, in the form of W3C's header; empty without a span.
    """

    retention: Retention = NO_RETENTION
    residency_id: str = ""
    traceparent: str = ""


NO_OPTIONS = StoreOptions()


# ------------------------------------------------------------------------------- results for blocks


class BlockResult(enum.IntEnum):
    """The result for a block of a store; numbered as `hotkv.v1.BlockResult`."""

    STORED = 1
    """Committed by all ranks: the next lookup finds it."""
    PRESENT = 2
    """Was ready already; no bytes were copied."""
    WRITTEN = 3
    """This rank's shard is written; shards of other ranks are outstanding."""
    RESERVED = 4
    NO_SPACE = 5
    """Refused: no slot could be freed."""
    IN_FLIGHT = 6
    """Refused: another lease is writing it."""
    ABORTED = 7
    """Refused: the copy failed or was cancelled."""


class TransferStatus(enum.IntEnum):
    """How a transfer ended; numbered as `hotkv.v1.TransferStatus`."""

    DONE = 1
    FAILED = 2
    CANCELLED = 3


@dataclass(frozen=True, slots=True)
class TransferResult:
    """How a transfer ended. The server has stopped reading and writing memory for it.

    results: for stores, one uint8 array of BlockResult per run, in the order asked; empty for a
        store that was revoked.
    """

    transfer_id: str
    status: TransferStatus
    num_bytes: int = 0
    results: tuple[NDArray[np.uint8], ...] = ()
    message: str = ""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The blocks that a read lease pins. A short grant is a value, not an error.

    pinned: one mask per group, in the order asked.
    offsets: if asked for, int64 per group: bytes from the arena's start to each block's slot, -1 if
        the block is not pinned. They hold as long as the lease. Bytes read after its release or
        expiry, or after the connection is lost, may belong to any block.
    """

    lease_id: str
    pinned: tuple[NDArray[np.bool_], ...]
    ttl_s: float
    offsets: tuple[NDArray[np.int64], ...] = ()


@dataclass(frozen=True, slots=True)
class ResidencyOpened:
    """An open residency; room in the arena is reserved for it.

    A reader uses the other fields to check that the bytes it read are the bytes that were stored
    (see `hotkv_proto.words`).

    word_index, word_value: the session's word behind the arena, and its value while the residency
        holds.
    generation: the generation under which the residency was opened.
    """

    residency_id: str
    word_index: int
    word_value: int
    generation: int


class Flushed(int):
    """The number of blocks that a flush has dropped.

    pending_tiers: tiers that do not answer, so the flush has not reached them. It reaches them as
        soon as they answer. Until then other nodes may load older blocks from them (from `disk`:
        this node, after a power loss).
    """

    pending_tiers: tuple[str, ...]

    def __new__(cls, num_blocks: int, pending_tiers: Iterable[str] = ()) -> "Flushed":
        """Makes the number from its blocks and tiers."""
        flushed = super().__new__(cls, num_blocks)
        flushed.pending_tiers = tuple(pending_tiers)
        return flushed

    def __repr__(self) -> str:
        return f"Flushed({int(self)}, pending_tiers={self.pending_tiers})"
