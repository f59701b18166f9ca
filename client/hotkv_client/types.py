"""Values that the client's calls accept and return: frozen, without protobuf.

Values that the server uses too are defined in `hotkv_proto`.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hotkv_client.fence import SharedFence
from hotkv_proto.blocks import BlockExtraKeys
from hotkv_proto.blocks import BlockResult as BlockResult
from hotkv_proto.blocks import BlockRun as BlockRun
from hotkv_proto.blocks import Flushed as Flushed
from hotkv_proto.blocks import GroupHashes as GroupHashes
from hotkv_proto.blocks import LeaseGrant as LeaseGrant
from hotkv_proto.blocks import LoadRun as LoadRun
from hotkv_proto.blocks import ResidencyOpened as ResidencyOpened
from hotkv_proto.blocks import Retention as Retention
from hotkv_proto.blocks import StoreOptions as StoreOptions
from hotkv_proto.blocks import TransferResult as TransferResult
from hotkv_proto.blocks import TransferStatus as TransferStatus
from hotkv_proto.keys import KeySpace, Representation
from hotkv_proto.layout import Layout
from hotkv_proto.order import NO_ORDER, DeviceOrder
from hotkv_proto.order import DeviceMark as DeviceMark
from hotkv_proto.order import OrderKind as OrderKind
from hotkv_proto.reports import EndedRequest as EndedRequest
from hotkv_proto.reports import LoadEnd as LoadEnd
from hotkv_proto.reports import RequestReport as RequestReport
from hotkv_proto.versions import Role as Role

if TYPE_CHECKING:
    from hotkv_sparse.centre import Centres
    from hotkv_sparse.config import SparseConfig

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
BoolMask = NDArray[np.bool_]


class LinkState(enum.Enum):
    """State of a session's connection."""

    ABSENT = "absent"
    """No server is connected. The session retries with back-off."""
    CONNECTED = "connected"
    DRAINING = "draining"
    """The server accepts no new leases or transfers."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ResidentBlocks:
    """Offsets of a residency's blocks in the arena, in bytes.

    offsets: int64 [n], start of each block's slot; -1 if the block is not pinned.
    representations: int64 [n], start of each representation; -1 if it is not pinned.
    """

    offsets: Int64s
    representations: Int64s


@dataclass(frozen=True, slots=True)
class Evicted:
    """A notice: the server has dropped these blocks."""

    groups: tuple[GroupHashes, ...]


@dataclass(frozen=True, slots=True)
class WatchedRequest:
    """A request that an engine has reported.

    hashes: packed hashes of the prompt's full hash blocks.
    unix_time_s: time at which the request reached its engine.
    """

    key_space_id: int
    hashes: bytes
    prompt_tokens: int
    device_hit_tokens: int
    hit_tokens: int
    unix_time_s: float


@dataclass(frozen=True, slots=True)
class SelectConfig:
    """Settings of the selections that the server makes for a sequence.

    config: the server uses only the parts that affect a selection.
    representation_group: group index of the representations; see `SessionConfig`.
    layer_indices: the sparse layers, ascending. A shard's part of a representation holds these
        layers in order. Each layer holds the formats of `config.scorers_of(layer)` in order. Each
        format holds `kv_heads` heads.
    hot_blocks: size of the hot set that the server maintains per layer and shard; 0: no hot set.
    scale: scale of attention; None: 1 / sqrt(head_size).
    centres: centres that the representations were made with, for the heads of all shards; None: the
        representations have none. They must belong to the kind that the session declares. The
        server can't check this, because the kind's version is only a hash. With other centres the
        selection is worse than without any.
    """

    config: "SparseConfig"
    representation_group: int
    layer_indices: Sequence[int]
    kv_heads: int
    head_size: int
    hot_blocks: int = 0
    scale: float | None = None
    centres: "Centres | None" = None


@dataclass(frozen=True, slots=True)
class SequenceCreated:
    """The answer to the creation of a sequence.

    If the server selects, `lease_id` pins the `covered_blocks` leading blocks of the context and
    their representations. Positions in the context are then positions in the lease's lists.
    """

    lease_id: str
    covered_blocks: int


@dataclass(frozen=True, slots=True)
class SequenceState:
    """The state of a sequence after blocks were appended.

    num_blocks: complete blocks of the sequence.
    lease_id, covered_blocks: as in `SequenceCreated`, if the server selects. This lease replaces
        the lease of the previous answer.
    """

    num_blocks: int
    lease_id: str
    covered_blocks: int


@dataclass(frozen=True, slots=True)
class SelectedBlocks:
    """The result of a selection by the server.

    positions: int32, ascending; includes the blocks that are always kept.
    weights: float32, a weight for each position; inf for blocks that are always kept.

    The remaining arrays describe the hot set, if the server maintains it:
    load_positions, load_slots: load these blocks into these slots before attending.
    evict_positions: blocks that have lost their slot.
    hot_positions, hot_slots: blocks (ascending) that may be attended to after the loads, and their
        slots.
    """

    positions: Int32s
    weights: Float32s
    estimated_mass: float
    load_positions: Int32s
    load_slots: Int32s
    evict_positions: Int32s
    hot_positions: Int32s
    hot_slots: Int32s


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory that the server may read and write during transfers.

    fds: descriptor of each file handle of the layout. The caller keeps them open.
    order: ways in which the server may follow the work of the engine's device.
        `Session.order_kind` says which way the server chose.
    fence: a fence whose words the caller chooses for each store; None: the session uses its own
        fence.
    """

    layout: Layout
    fds: Mapping[str, int]
    order: DeviceOrder = NO_ORDER
    fence: SharedFence | None = None

    @property
    def is_on_devices(self) -> bool:
        """Returns True if any of the memory is on a device."""
        return any(handle.is_cuda for handle in self.layout.handles)


@dataclass(frozen=True, slots=True)
class After:
    """Delays a transfer until the engine's device has passed `mark`.

    kind: the session's `order_kind` when the mark was made. The transfer fails if the session uses
        another kind when it is sent, because a mark has a meaning only for its own kind.
    """

    kind: OrderKind
    mark: DeviceMark


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files with the proofs of identity of client and server over TCP. A Unix socket uses none of
    them.

    Each field is a path except `tls_server_name`; empty: not used. Files are read at each new
    connection, so a renewed file is used from then on.

    tls_ca: certificate of the authority that signs the server's certificate, PEM.
    tls_certificate, tls_key: the client's own certificate and key, PEM.
    tls_server_name: name expected in the server's certificate, if it is not the target's host.
    token_file: file that holds a bearer token.
    """

    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_server_name: str = ""
    token_file: str = ""


NO_CREDENTIALS = Credentials()


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """An unbroken run of blocks became ready.

    hashes: in chain order.
    parent_hash: hash of the block before the first; empty at the root, and if it is not known.
    token_ids: int32, of all blocks; empty if they are not known.
    extra_keys: of each block; empty if no block has any.
    medium: "CPU", "DISK" or "REMOTE".
    tier: its name; empty for host memory.
    """

    group_index: int
    hashes: tuple[bytes, ...]
    parent_hash: bytes
    token_ids: Int32s
    lora_name: str
    extra_keys: tuple[BlockExtraKeys, ...]
    medium: str
    tier: str


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks were removed. Fields as in BlocksStored."""

    group_index: int
    hashes: tuple[bytes, ...]
    medium: str
    tier: str


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """All blocks of the key space were removed, in every medium."""


@dataclass(frozen=True, slots=True)
class EventsRead:
    """The next events of a session's key space, in order.

    begins_state: the events begin with the present state. Blocks that it does not name are gone.
    has_more_state: the next answer has more of the state.
    """

    events: tuple[BlocksStored | BlocksRemoved | BlocksCleared, ...]
    begins_state: bool
    has_more_state: bool


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Settings of a session: its server, its engine and its key space.

    target: `unix:/path/grpc.sock` or `host:port`.
    engine_id: the same for all sessions of an engine. Leases belong to the engine.
    representations: kinds of representation that are stored with the blocks. The first kind has the
        group index after the last group of the key space, and so on (`representation_group`). A
        representation is kept if its block is ready when it is written, by an earlier store or by
        the same store. It is dropped with its block.
    engine_name: name of the engine for people, such as its pod; empty: its id is shown.
    model_names: names by which requests address the model, for events and for people.
    use_table: probe the shared block table if the server offers it.
    """

    target: str
    engine_id: str
    role: Role
    key_space: KeySpace
    representations: tuple[Representation, ...] = ()
    engine_name: str = ""
    model_names: tuple[str, ...] = ()
    client_name: str = "hotkv-client"
    use_table: bool = True
    connect_timeout_s: float = 5.0
    reconnect_initial_s: float = 0.1
    reconnect_max_s: float = 5.0
    credentials: Credentials = NO_CREDENTIALS
    on_state: Callable[[LinkState, str], None] | None = None
    """Called from a client thread at each change of state, with a sentence that explains it."""
    on_evicted: Callable[[Evicted], None] | None = None

    def representation_group(self, representation: Representation) -> int:
        """Returns the representation's group index in this session. Raises ValueError if it is not
        declared."""
        return len(self.key_space.groups) + self.representations.index(representation)
