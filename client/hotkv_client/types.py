"""Values that go in and out of the client: frozen, without protobuf.

Those that the server has, too, are defined in `hotkv_proto`.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hotkv_client.fence import SharedFence
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
    """No server; the session tries again with back-off."""
    CONNECTED = "connected"
    DRAINING = "draining"
    """The server takes no new leases or transfers."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ResidentBlocks:
    """Where blocks of a residency lie: bytes from the start of the arena to each block's slot,
    int64 [n], -1 for a block that is not pinned. `representations` likewise, -1 for a block whose
    representation is not pinned."""

    offsets: Int64s
    representations: Int64s


@dataclass(frozen=True, slots=True)
class Evicted:
    """Notice: the server no longer keeps these blocks."""

    groups: tuple[GroupHashes, ...]


@dataclass(frozen=True, slots=True)
class WatchedRequest:
    """A request that an engine has reported. `hashes`: packed, one for each full hash block.
    `unix_time_s`: when it came to its engine."""

    key_space_id: int
    hashes: bytes
    prompt_tokens: int
    device_hit_tokens: int
    hit_tokens: int
    unix_time_s: float


@dataclass(frozen=True, slots=True)
class SelectConfig:
    """Settings with which the server selects for a sequence. It uses those parts of `config` that
    matter to a selection.

    `representation_group`: see `SessionConfig`. A shard's part of a representation holds
    `layer_indices`, the sparse layers, ascending, in order, in each the formats of
    `config.scorers_of(layer)` in order, in each `kv_heads` heads. `hot_blocks`: size of the hot set
    that the server keeps for each layer and shard; 0 for none. `scale` of attention; None for 1 /
    sqrt(head_size). `centres`: those that the representations were made with, of all shards' heads;
    None for none. They must belong to the kind that the session declares: its version is a hash,
    from which the server can't tell, and with another centre the selection is worse than with none.
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
    """A sequence has begun.

    Where the server selects, `lease_id` pins the `covered_blocks` leading blocks of the context
    with their representations; positions of the context are positions in the lease's lists.
    """

    lease_id: str
    covered_blocks: int


@dataclass(frozen=True, slots=True)
class SequenceState:
    """State of a sequence: its complete blocks, and, if the server selects, the lease that replaces
    the one before."""

    num_blocks: int
    lease_id: str
    covered_blocks: int


@dataclass(frozen=True, slots=True)
class SelectedBlocks:
    """An answer of the server's selection. `positions` int32, ascending, always kept ones included;
    `weights` float32, inf for these.

    Of the hot set, if the server keeps one: load `load_positions` into `load_slots` before
    attending; `evict_positions` have lost their slot; `hot_positions` (ascending) in `hot_slots`
    may then be attended.
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

    `fds`: descriptor of each file handle of the layout, kept open by the caller. `order`: how the
    server may learn what the engine's device has done; what it takes of that is
    `Session.order_kind`. `fence`: one whose words the caller gives with each store; None for the
    session's own.
    """

    layout: Layout
    fds: Mapping[str, int]
    order: DeviceOrder = NO_ORDER
    fence: SharedFence | None = None

    @property
    def is_on_devices(self) -> bool:
        """Whether any of the memory is on a device."""
        return any(handle.is_cuda for handle in self.layout.handles)


@dataclass(frozen=True, slots=True)
class After:
    """A transfer begins when the engine's device has passed `mark`, which is made as the session's
    `order_kind` says.

    A mark of one kind means nothing to another: if the session takes another kind by now, the
    transfer fails.
    """

    kind: OrderKind
    mark: DeviceMark


@dataclass(frozen=True, slots=True)
class Credentials:
    """Proofs of the client and of the server over TCP. None is used on a Unix socket.

    Paths of files, read at each new connection, so that renewed ones are taken up; empty for none.
    `tls_ca`: who signs the server's certificate, in PEM. `tls_certificate`, `tls_key`: of the
    client, in PEM. `tls_server_name`: expected in the server's certificate if that is not the
    host of the target. `token_file`: holds a bearer token.
    """

    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_server_name: str = ""
    token_file: str = ""


NO_CREDENTIALS = Credentials()


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """A session's server, engine and key space. `target`: `unix:/path/grpc.sock` or `host:port`.

    `engine_id` is shared by all sessions of an engine; leases are the engine's. `representations`:
    that go with the blocks; everywhere in the session the first has the group index that follows
    the key space's groups (`representation_group`), and so on. A representation is kept if its
    block is ready when it is written, before or by the same store; it is dropped with its block.
    `use_table`: probe the shared block table if the server offers it.
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
    credentials: Credentials = NO_CREDENTIALS
    on_state: Callable[[LinkState, str], None] | None = None
    """Called from a client thread at each change, with one sentence why."""
    on_evicted: Callable[[Evicted], None] | None = None

    def representation_group(self, representation: Representation) -> int:
        """Its group index in this session. Raises ValueError if it is not declared."""
        return len(self.key_space.groups) + self.representations.index(representation)
