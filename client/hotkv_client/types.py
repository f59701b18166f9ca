"""Values that go in and out of the client: frozen, without protobuf."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv.keys import KeySpace, Representation
from hotkv.layout import Layout
from hotkv.results import BlockResult as BlockResult
from hotkv.results import TransferStatus as TransferStatus
from hotkv.retention import NO_RETENTION
from hotkv.retention import Retention as Retention

Int32s = NDArray[np.int32]
BoolMask = NDArray[np.bool_]


class Role(enum.IntEnum):
    """What a session does in its engine; the numbers are those of `hotkv.v1.SessionRole`."""

    SCHEDULER = 1
    WORKER = 2
    TOOL = 3


class LinkState(enum.Enum):
    """Where a session stands."""

    ABSENT = "absent"
    """No server; the session tries again with back-off."""
    CONNECTED = "connected"
    DRAINING = "draining"
    """The server takes no new leases or transfers."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class GroupHashes:
    """Block hashes of one group, in chain order."""

    group_index: int
    hashes: Sequence[bytes]


ExtraKey = str | bytes | tuple[str, int]
"""An adapter's name or a cache salt; a digest of prompt embeddings; a multi-modal input and the place of its first token."""
BlockExtraKeys = Sequence[ExtraKey] | None


@dataclass(frozen=True, slots=True)
class BlockRun:
    """A chain of consecutive blocks of one group. `block_ids` int32 [n] in engine memory; empty when only reserving.

    `parent_hash`: hash before the first, empty at the root. `depth`: position of the first block in its chain, in blocks.
    For events, where `Session.wants_token_ids`: `token_ids` of all the blocks; `lora_name`; `extra_keys` besides tokens that are hashed
    into each block, as vLLM's events name them, or nothing where no block has any.
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
class LoadRun:
    """Blocks of one group to load: positions in the lease's hash list of that group, int32 [n], and block ids int32 [n]."""

    group_index: int
    lease_positions: Int32s
    block_ids: Int32s


@dataclass(frozen=True, slots=True)
class RequestReport:
    """A request that the engine has scheduled. `hashes`: of its prompt, one for each full hash block, in chain order.

    `device_hit_tokens` hit in the engine's own device cache, `hit_tokens` there or in hotkv. `age_s`: since it came to the engine.
    """

    hashes: Sequence[bytes]
    prompt_tokens: int
    device_hit_tokens: int
    hit_tokens: int
    age_s: float
    retention: Retention = NO_RETENTION


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """What a read lease pins: one mask a group, in the order asked. A short grant is a value."""

    lease_id: str
    pinned: tuple[BoolMask, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True)
class TransferResult:
    """How a transfer ended. Nothing is being read or written for it any more.

    `results` (stores): one uint8 array of BlockResult a run, in the order asked; empty for a store that was revoked.
    """

    transfer_id: str
    status: TransferStatus
    num_bytes: int = 0
    results: tuple[NDArray[np.uint8], ...] = ()
    message: str = ""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Notice: the server no longer keeps these blocks."""

    groups: tuple[GroupHashes, ...]


@dataclass(frozen=True, slots=True)
class WatchedRequest:
    """A request that an engine has reported. `hashes`: packed, one for each full hash block. `unix_time_s`: when it came to its engine."""

    key_space_id: int
    hashes: bytes
    prompt_tokens: int
    device_hit_tokens: int
    hit_tokens: int
    unix_time_s: float


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory that the server may read and write during transfers.

    `fds`: descriptor of each file handle of the layout, kept open by the caller.
    """

    layout: Layout
    fds: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """How to reach a server and as whom. `target`: `unix:/path/grpc.sock` or `host:port`.

    `engine_id` is shared by all sessions of an engine; leases are the engine's. `representations`: that go with the blocks; everywhere in
    the session the first has the group index that follows the key space's groups (`representation_group`), and so on. A representation is
    kept where its block is ready when it is written, before or by the same store; it goes with its block. `use_table`: probe the shared
    block table where the server offers it.
    """

    target: str
    engine_id: str
    role: Role
    key_space: KeySpace
    representations: tuple[Representation, ...] = ()
    client_name: str = "hotkv-client"
    use_table: bool = True
    connect_timeout_s: float = 5.0
    reconnect_initial_s: float = 0.1
    reconnect_max_s: float = 5.0
    on_state: Callable[[LinkState, str], None] | None = None
    """Called from a client thread at each change, with one sentence why."""
    on_evicted: Callable[[Evicted], None] | None = None

    def representation_group(self, representation: Representation) -> int:
        """Its group index in this session. Raises ValueError where it is not declared."""
        return len(self.key_space.groups) + self.representations.index(representation)
