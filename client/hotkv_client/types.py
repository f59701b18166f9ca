"""Values that go in and out of the client: frozen, without protobuf."""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hotkv_client.fence import SharedFence
from hotkv_proto.hints import NO_HINTS, Hints
from hotkv_proto.keys import KeySpace, Representation
from hotkv_proto.layout import Layout
from hotkv_proto.misses import Miss
from hotkv_proto.order import NO_ORDER, DeviceOrder
from hotkv_proto.order import DeviceMark as DeviceMark
from hotkv_proto.order import OrderKind as OrderKind
from hotkv_proto.results import BlockResult as BlockResult
from hotkv_proto.results import TransferStatus as TransferStatus
from hotkv_proto.retention import NO_RETENTION
from hotkv_proto.retention import Retention as Retention
from hotkv_proto.store_options import StoreOptions as StoreOptions

if TYPE_CHECKING:
    from hotkv_sparse.centre import Centres
    from hotkv_sparse.config import SparseConfig

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
BoolMask = NDArray[np.bool_]


class Role(enum.IntEnum):
    """What a session does in its engine; the numbers are those of `hotkv.v1.SessionRole`."""

    SCHEDULER = 1
    WORKER = 2
    TOOL = 3


class LinkState(enum.Enum):
    """State of a session's connection."""

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
"""An adapter's name or a cache salt; a digest of prompt embeddings; a multi-modal input and the
place of its first token."""
BlockExtraKeys = Sequence[ExtraKey] | None


@dataclass(frozen=True, slots=True)
class BlockRun:
    """A chain of consecutive blocks of one group. `block_ids` int32 [n] in engine memory; empty
    when only reserving.

    `parent_hash`: hash before the first, empty at the root. `depth`: position of the first block in
    its chain, in blocks. For events, if `Session.wants_token_ids`: `token_ids` of all the
    blocks; `lora_name`; `extra_keys` besides tokens that are hashed into each block, as vLLM's
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
class LoadRun:
    """Blocks of one group to load: positions in the lease's hash list of that group, int32 [n], and
    block ids int32 [n]."""

    group_index: int
    lease_positions: Int32s
    block_ids: Int32s


@dataclass(frozen=True, slots=True)
class RequestReport:
    """A request that the engine has scheduled. `hashes`: of its prompt, one for each full hash
    block, in chain order.

    `device_hit_tokens` hit in the engine's own device cache, `hit_tokens` there or in hotkv.
    `age_s`: since it came to the engine. `session_id`: as its router has named it. `hints`: all
    that it brought; `retention` says the same of its own blocks, for those that it stores. `miss`:
    why the tokens beyond the hit missed, one of `hotkv_proto.misses.SAID_BY_ENGINES`. `saved_s`: of
    prefill, by what hit in hotkv. `wait_s`: for lookups and leases. `report_id`: names the request
    in `LoadEnd`, 0 for none.
    """

    hashes: Sequence[bytes]
    prompt_tokens: int
    device_hit_tokens: int
    hit_tokens: int
    age_s: float
    retention: Retention = NO_RETENTION
    session_id: str = ""
    hints: Hints = NO_HINTS
    miss: Miss = Miss.UNKNOWN
    saved_s: float = 0.0
    wait_s: float = 0.0
    report_id: int = 0


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended, and has a session or hints. `hashes`: of prompt and answer, one for
    each full hash block, in chain order. `hints`: as they were reported, but for rejections."""

    hashes: Sequence[bytes]
    session_id: str = ""
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """The end of a load whose request was reported before, under `report_id`. `wait_s`: from the
    beginning of the load to its end."""

    report_id: int
    wait_s: float
    failed: bool = False


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


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The blocks that a read lease pins: one mask a group, in the order asked. A short grant is a
    value.

    `offsets`, if asked for: int64 a group, bytes from the arena's start to each block's slot, -1 if
    not pinned. They hold while the lease does: what is read under it after its release, its
    end or that of the connection may be any bytes.
    """

    lease_id: str
    pinned: tuple[BoolMask, ...]
    ttl_s: float
    offsets: tuple[Int64s, ...] = ()


@dataclass(frozen=True, slots=True)
class ResidentBlocks:
    """Where blocks of a residency lie: bytes from the start of the arena to each block's slot,
    int64 [n], -1 for a block that is not pinned. `representations` likewise, -1 for a block whose
    representation is not pinned."""

    offsets: Int64s
    representations: Int64s


@dataclass(frozen=True, slots=True)
class ResidencyOpened:
    """A residency holds: room in the arena is reserved for it. The rest is for `Arena.holds`: the
    session's word and its value, and the generation under which it was opened."""

    residency_id: str
    word_index: int
    word_value: int
    generation: int


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
