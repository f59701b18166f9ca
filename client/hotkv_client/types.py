"""Values that the client's calls accept and return: frozen dataclasses and enums, no protobuf
messages.

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
    """State of a session's connection."""

    ABSENT = "absent"
    """No server is connected. The session retries with back-off."""
    CONNECTED = "connected"
    DRAINING = "draining"
    """The server accepts no new leases or transfers."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ResidentBlocks:
    """Byte offsets, in the arena, of the blocks that a call of `extend_residency` named. Both
    arrays have one entry for each of these blocks, int64.

    offsets: start of the block's slot; -1 if the block is not pinned.
    sketches: start of the block's sketch (a compact form of its keys, for sparse
        attention); -1 if the server has not pinned a sketch with the block.
    """

    offsets: Int64s
    sketches: Int64s


@dataclass(frozen=True, slots=True)
class Evicted:
    """A notice: the server has dropped these blocks."""

    groups: tuple[GroupHashes, ...]


@dataclass(frozen=True, slots=True)
class WatchedRequest:
    """A request that an engine has reported.

    key_space_id: the server's number of the request's key space (a model in a configuration).
    hashes: packed block hashes of the prompt; the tokens after the last full hash block have no
        hash.
    prompt_tokens: length of the prompt.
    device_hit_tokens: tokens that hit in the engine's own device cache.
    hit_tokens: tokens that hit in the device cache or in hotkv.
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
    """Settings of the selections that the server makes for a sequence (a context that the session
    decodes sparsely). A selection chooses the blocks to which a layer attends.

    config: the settings of sparse attention. The server uses only the fields that affect a
        selection.
    sketch_group: group index of the sketches (compact forms of blocks' keys) in this
        session, as `SessionConfig.sketch_group` returns it.
    layer_indices: the sparse layers, ascending. They define the order of a sketch's data:
        first by layer, within a layer by format in the order of `config.scorers_of(layer)`, within
        a format by KV head.
    kv_heads: KV heads per shard (part of a rank).
    head_size: channels of a head.
    hot_blocks: size of the hot set: the blocks that the caller keeps in device memory, per layer
        and shard. The server records them. 0: the server records no hot set.
    scale: factor by which attention multiplies its scores; None: 1 / sqrt(head_size).
    centres: the centres (mean key of each layer and head) with which the sketches were
        built, for the heads of all shards; None: they were built without centres. The server can't
        check the centres, and with wrong centres a selection is worse than without centres.
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
    """The answer to the creation of a sequence (a context that the session decodes sparsely).

    lease_id: the lease that pins the first `covered_blocks` blocks of the context and their
        sketches (compact forms of keys), if the server makes selections for the sequence.
        Block i of the context is then also entry i in the lease's list of blocks.
    """

    lease_id: str
    covered_blocks: int


@dataclass(frozen=True, slots=True)
class SequenceState:
    """The state of a sequence (a context that is decoded sparsely) after blocks were appended.

    num_blocks: complete blocks of the sequence.
    lease_id: the lease that pins the first `covered_blocks` blocks of the context and their
        sketches (compact forms of keys), if the server makes selections for the sequence. It
        replaces the lease of the previous answer.
    """

    num_blocks: int
    lease_id: str
    covered_blocks: int


@dataclass(frozen=True, slots=True)
class SelectedBlocks:
    """The result of a selection by the server: the blocks to which a layer should attend.

    positions: int32, indices of the selected blocks in the context, ascending. They include the
        blocks that are always selected.
    weights: float32, for each position the estimated share of the attention that the block
        receives; inf for blocks that are always selected.
    estimated_mass: estimated share of the attention that all selected blocks together receive, 0 to
        1.

    The other arrays (int32) describe the hot set, the blocks that the caller keeps in slots of its
    device memory. `*_positions` are indices of blocks in the context. The arrays are empty if the
    server maintains no hot set:
    load_positions, load_slots: blocks that the caller must load before it attends, and the slot for
        each of them.
    evict_positions: blocks that have lost their slot.
    hot_positions, hot_slots: blocks to which the caller may attend after the loads (ascending), and
        the slot of each of them.
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

    layout: where the engine's blocks are in this memory.
    fds: file descriptor of each file handle of the layout. The caller keeps the descriptors open.
    order: kinds of marks that the engine offers, for example CUDA events. A mark is a point in the
        queue of work of the engine's device; before a transfer, the server waits until the device
        has passed it. `Session.order_kind` returns the kind that the server chose.
    fence: a page through which another process can revoke stores (`SharedFence`); the caller then
        passes `fence_index` to each store. None: the session uses its own page.
    """

    layout: Layout
    fds: Mapping[str, int]
    order: DeviceOrder = NO_ORDER
    fence: SharedFence | None = None

    @property
    def is_on_devices(self) -> bool:
        """Returns True if any part of the memory is on a device."""
        return any(handle.is_cuda for handle in self.layout.handles)


@dataclass(frozen=True, slots=True)
class After:
    """Delays a transfer until the engine's device has passed `mark`, a point in its queue of work.

    kind: the session's `order_kind` when the mark was made. A mark can't be converted to another
        kind, so the transfer fails if the session's `order_kind` has changed when it is sent.
    mark: the point in the queue.
    """

    kind: OrderKind
    mark: DeviceMark


@dataclass(frozen=True, slots=True)
class Credentials:
    """The TLS files and the token with which client and server identify themselves over TCP. On a
    Unix socket these settings are ignored.

    Each field is a path except `tls_server_name`; empty: not used. The files are read again for
    each new connection, so a renewed file takes effect at the next connection.

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
    """An event: consecutive blocks of a context became ready.

    hashes: hashes of the blocks, from the first to the last.
    parent_hash: hash of the block before the first block; empty if the first block begins the
        context, or if the server does not know the hash.
    token_ids: int32, token ids of all blocks in order; empty if the server does not know them.
    lora_name: name of the LoRA adapter; empty without an adapter.
    extra_keys: the further inputs of each block's hash, such as images; empty if no block has any.
    medium: "CPU", "DISK" or "REMOTE".
    tier: name of the tier that holds the blocks; empty for host memory.
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
    """An event: blocks were removed from a tier.

    medium: "CPU", "DISK" or "REMOTE".
    tier: name of the tier; empty for host memory.
    """

    group_index: int
    hashes: tuple[bytes, ...]
    medium: str
    tier: str


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """An event: all blocks of the key space (a model in a configuration) were removed from
    every tier."""


@dataclass(frozen=True, slots=True)
class EventsRead:
    """The next events of a session's key space (a model in a configuration), in order.

    begins_state: True if the events begin a list of the blocks that are cached now. The reader must
        first discard all blocks that it knows from earlier events. The first answer begins such a
        list. So does the next answer after the reader was too slow and missed events.
    has_more_state: True if the next answer continues the list of cached blocks.
    """

    events: tuple[BlocksStored | BlocksRemoved | BlocksCleared, ...]
    begins_state: bool
    has_more_state: bool


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Settings of a session: its server, its engine and its key space.

    target: address of the server, `unix:/path/grpc.sock` or `host:port`.
    engine_id: id of the engine, the same for all of its sessions. Leases belong to the engine.
    role: whether the session belongs to the engine's scheduler or to a worker.
    key_space: the model and configuration whose blocks the session may use.
    sketches: kinds of sketches (compact forms of keys, for sparse attention) that are
        stored with the blocks. In calls, the group index of kind i is `len(key_space.groups) + i`
        (`sketch_group`). The server accepts a sketch only if its block is ready,
        from an earlier store or from the same store. It drops the sketch together with the
        block.
    engine_name: name of the engine in reports and pages, such as its pod; empty: `engine_id`.
    model_names: at most 16 names by which requests address the model, shown in events and reports.
    use_table: map the server's shared block table if the server offers it. `probe` needs the table.
    connect_timeout_s: longest time to wait for a server to answer, and then again for the server to
        open the session. The second wait is 4 s longer for each GiB of the engine's files, because
        the server must map these files.
    reconnect_initial_s, reconnect_max_s: shortest and longest back-off between connections.
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
    connect_timeout_s: float = 5.0
    reconnect_initial_s: float = 0.1
    reconnect_max_s: float = 5.0
    credentials: Credentials = NO_CREDENTIALS
    on_state: Callable[[LinkState, str], None] | None = None
    """Called at each change of state, and after each failed attempt to connect, with the reason as
    a sentence. Called on the session's thread; for the state CLOSED, on the thread that calls
    `close`."""
    on_evicted: Callable[[Evicted], None] | None = None
    """Called from a client thread each time the server reports that it has dropped blocks."""

    def sketch_group(self, sketch: Sketch) -> int:
        """Returns the group index of a kind of sketch (compact form of keys) in this
        session. Raises ValueError if the session does not declare the kind."""
        return len(self.key_space.groups) + self.sketches.index(sketch)
