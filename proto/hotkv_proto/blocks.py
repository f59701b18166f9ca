"""Blocks in calls: how engines name them, what is asked for them besides, and what becomes of them.

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
    """Block hashes of one group, in chain order."""

    group_index: int
    hashes: Sequence[bytes]


ExtraKey = str | bytes | tuple[str, int]
"""An adapter's name or a cache salt; a digest of prompt embeddings; a multi-modal input and the
place of its first token."""
BlockExtraKeys = Sequence[ExtraKey] | None
KEY_BYTES = 64
"""About the memory of an extra key, besides its characters."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """A chain of consecutive blocks of one group. `block_ids` int32 [n] in engine memory; empty
    when only reserving.

    `parent_hash`: hash before the first, empty at the root. `depth`: position of the first block in
    its chain, in blocks. For events, if the server publishes any: `token_ids` of all
    the blocks; `lora_name`; `extra_keys` besides tokens that are hashed into each block, as vLLM's
    events name them, or nothing if no block has any.
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
    """An engine's description of a run for events, besides its hashes.

    `token_ids` int32 [blocks · block_tokens], empty if it sent none. `extra_keys`: one entry a
    block, or none at all.
    """

    token_ids: NDArray[np.int32]
    lora_name: str = ""
    extra_keys: tuple[tuple[ExtraKey, ...] | None, ...] = ()

    @property
    def num_bytes(self) -> int:
        """About its memory."""
        keys = [key for keys in self.extra_keys if keys for key in keys]
        texts = sum(KEY_BYTES + len(key[0] if isinstance(key, tuple) else key) for key in keys)
        return int(self.token_ids.nbytes) + len(self.lora_name) + texts + 8 * len(self.extra_keys)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Blocks of one group to load: positions in the lease's hash list of that group, int32 [n], and
    block ids int32 [n]."""

    group_index: int
    lease_positions: Int32s
    block_ids: Int32s


# --------------------------------------------------------------------------- what is asked for them

MAX_PRIORITY = 8
MAX_TTL_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Retention:
    """What a request may ask of eviction for the blocks it uses.

    A hint, never a promise about correctness: a cache that can't honour it serves as before.
    Requests give it in `kv_transfer_params` (keys `hotkv.priority`, `hotkv.ttl_s`, `hotkv.pin`); on
    the wire it is `hotkv.v1.Retention`.

    `priority`: a use counts as 2^priority uses, -8 to 8. `ttl_s`: the blocks count as in use for
    that long after the use, at most a day.

    `pin`: they are not evicted at all within `ttl_s`, as far as the server's share for pinned
    blocks goes. Raises ValueError.
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
    """What a store may ask besides its blocks: one value, from the connector's plan to the server's
    books.

    `retention`: of the store that reserves; other ranks join it. `residency_id`: of an open
    residency of this engine, which pins what the store makes ready from that moment on, and what is
    ready from its start on; empty for none. `traceparent`: names the caller's span, as W3C's
    header; empty for none.
    """

    retention: Retention = NO_RETENTION
    residency_id: str = ""
    traceparent: str = ""


NO_OPTIONS = StoreOptions()


# ------------------------------------------------------------------------------ what became of them


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


@dataclass(frozen=True, slots=True)
class ResidencyOpened:
    """A residency holds: room in the arena is reserved for it. The rest says how long what is read
    is what was stored: the session's word behind the arena and its value, and the generation under
    which it was opened (`hotkv_proto.words`)."""

    residency_id: str
    word_index: int
    word_value: int
    generation: int


class Flushed(int):
    """How many blocks a flush has forgotten.

    `pending_tiers`: tiers that the flush is not in yet, because they do not answer; they are told
    as soon as they do. Until then other nodes may load blocks of before from there (`disk`: this
    node, after a power loss).
    """

    pending_tiers: tuple[str, ...]

    def __new__(cls, num_blocks: int, pending_tiers: Iterable[str] = ()) -> "Flushed":
        """A number of blocks."""
        flushed = super().__new__(cls, num_blocks)
        flushed.pending_tiers = tuple(pending_tiers)
        return flushed

    def __repr__(self) -> str:
        return f"Flushed({int(self)}, pending_tiers={self.pending_tiers})"
