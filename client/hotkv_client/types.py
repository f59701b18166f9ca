"""Values that the client's calls accept and return, no protobuf messages. Those that the server
uses too are defined in `hotkv_proto`."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hotkv_client.fence import SharedFence
from hotkv_client.targets import NO_CREDENTIALS
from hotkv_client.targets import Credentials as Credentials
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
from hotkv_proto.keys import KeySpace, Sketch
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
    ABSENT = "absent"
    """The session retries with back-off."""
    CONNECTED = "connected"
    DRAINING = "draining"
    """No new leases or transfers."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ResidentBlocks:
    """Offsets in the arena of the blocks that `extend_residency` named, int64.

    offsets: of slots; -1 if not pinned.
    sketches: of the sketches' slots; -1 if not pinned.
    """

    offsets: Int64s
    sketches: Int64s


@dataclass(frozen=True, slots=True)
class Evicted:
    """Notice that these blocks were dropped."""

    groups: tuple[GroupHashes, ...]


@dataclass(frozen=True, slots=True)
class SelectConfig:
    """How the server selects blocks for a sequence.

    config: only the fields that affect a selection count.
    sketch_group: as of `SessionConfig.sketch_group`.
    layer_indices: sparse layers, ascending. A sketch's data are ordered by layer, then by format as
        in `config.scorers_of(layer)`, then by KV head.
    kv_heads: per shard.
    head_size: channels of a head.
    hot_blocks: size of the hot set per layer and shard, recorded by the server; 0: none.
    scale: of attention scores; None: 1 / sqrt(head_size).
    centres: with which the sketches were built, for the heads of all shards. The server can't
        check them; wrong ones are worse than none.
    """

    config: "SparseConfig"
    sketch_group: int
    layer_indices: Sequence[int]
    kv_heads: int
    head_size: int
    hot_blocks: int = 0
    scale: float | None = None
    centres: "Centres | None" = None


@dataclass(frozen=True, slots=True)
class SequenceCreated:
    """A sequence was created.

    lease_id: pins the first `covered_blocks` blocks and their sketches, if the server makes
        selections. Block i of the context is entry i of the lease.
    """

    lease_id: str
    covered_blocks: int


@dataclass(frozen=True, slots=True)
class SequenceState:
    """After blocks were appended.

    num_blocks: complete ones.
    lease_id: as in `SequenceCreated`; replaces the previous answer's.
    """

    num_blocks: int
    lease_id: str
    covered_blocks: int


@dataclass(frozen=True, slots=True)
class SelectedBlocks:
    """The result of a selection.

    positions: ascending, int32, with the always selected blocks.
    weights: estimated mass of each, float32; inf for always selected ones.
    estimated_mass: of all, 0 to 1.

    Changes of the hot set, int32; empty if the server maintains none:
    load_positions, load_slots: to load before attending.
    evict_positions: without a slot now.
    hot_positions, hot_slots: to attend to after the loads, ascending.
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

    fds: of the layout's file handles and backings, by id; the caller keeps them open.
    order: offered marks; `Session.order_kind` is the server's choice.
    fence: through which another process revokes stores; each store then needs a `fence_index`.
        None: the session uses its own.
    """

    layout: Layout
    fds: Mapping[str, int]
    order: DeviceOrder = NO_ORDER
    fence: SharedFence | None = None

    @property
    def is_on_devices(self) -> bool:
        return any(handle.is_cuda for handle in self.layout.handles)


@dataclass(frozen=True, slots=True)
class After:
    """Delays a transfer until the device has passed `mark`.

    kind: the session's `order_kind` when the mark was made. If it has changed when the transfer
        is sent, the transfer fails.
    """

    kind: OrderKind
    mark: DeviceMark


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Event: consecutive blocks of a context became ready.

    parent_hash: empty if the first block begins the context, or if unknown.
    token_ids: of all blocks, int32; empty if unknown.
    lora_name: empty without an adapter.
    extra_keys: per block; empty if no block has any.
    medium: "CPU", "DISK" or "REMOTE".
    tier: empty for host memory.
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
    """Event: blocks were removed from a tier.

    medium: "CPU", "DISK" or "REMOTE".
    tier: empty for host memory.
    """

    group_index: int
    hashes: tuple[bytes, ...]
    medium: str
    tier: str


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """Event: all blocks of the key space were removed from every tier."""


@dataclass(frozen=True, slots=True)
class EventsRead:
    """The next events, in order.

    begins_state: these events begin a list of the blocks that are cached now: the reader must
        discard all that it knows. True in the first answer, and after the reader has missed events.
    has_more_state: the next answer continues the list.
    """

    events: tuple[BlocksStored | BlocksRemoved | BlocksCleared, ...]
    begins_state: bool
    has_more_state: bool


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Settings of a session.

    target: `unix:/path/grpc.sock` or `host:port`.
    engine_id: the same for all sessions of the engine, which owns their leases.
    sketches: kinds that are stored with the blocks. Calls name kind i as group
        `len(key_space.groups) + i` (`sketch_group`). A sketch is accepted only with a ready block,
        also of the same store, and dropped with it.
    engine_name: in reports and pages, such as a pod; empty: `engine_id`.
    model_names: at most 16 names by which requests address the model, for events and reports.
    use_table: map the block table, which `probe` needs.
    use_lane: use `lane.sock` beside a Unix target if there is one, else gRPC.
    connect_timeout_s: wait for a server's answer, and then again for the opening, which may take 4
        s more per GiB of the engine's files, because the server maps these.
    reconnect_initial_s, reconnect_max_s: back-off between connections.
    """

    target: str
    engine_id: str
    role: Role
    key_space: KeySpace
    sketches: tuple[Sketch, ...] = ()
    engine_name: str = ""
    model_names: tuple[str, ...] = ()
    client_name: str = "hotkv-client"
    use_table: bool = True
    use_lane: bool = True
    connect_timeout_s: float = 5.0
    reconnect_initial_s: float = 0.1
    reconnect_max_s: float = 5.0
    credentials: Credentials = NO_CREDENTIALS
    on_state: Callable[[LinkState, str], None] | None = None
    """Called at each change of state and after each failed attempt to connect, with the reason.
    On the session's thread; for CLOSED on the thread that calls `close`."""
    on_evicted: Callable[[Evicted], None] | None = None
    """Called from a client thread when the server has dropped blocks."""

    def sketch_group(self, sketch: Sketch) -> int:
        """Group index in this session. Raises ValueError if the kind is not declared."""
        return len(self.key_space.groups) + self.sketches.index(sketch)
