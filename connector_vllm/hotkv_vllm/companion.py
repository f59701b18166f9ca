"""The seam for a companion: a package beside the connector, which serves some requests in its own
way.

The connector asks a companion what these protocols say, and knows nothing else of it. It looks for
one only if the engine's settings ask for it; without, a question costs a comparison with None.
This module alone names the package.
"""

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from hotkv_proto.keys import Sketch

if TYPE_CHECKING:
    from hotkv_client.arena import Arena
    from hotkv_client.session import Session
    from hotkv_client.types import BlockRun, Int32s
    from hotkv_proto.keys import KeySpace
    from hotkv_vllm.callbacks import CallbackEdge
    from hotkv_vllm.compat.kv_groups import CacheGroup
    from hotkv_vllm.identity.exactness import Exactness
    from hotkv_vllm.link import StreamCount
    from hotkv_vllm.metadata import HotKVMetadata, StepReport, StoreJob
    from hotkv_vllm.scheduler.groups import CachedGroups
    from hotkv_vllm.scheduler.request import RequestState
    from hotkv_vllm.scheduler.store.stores_in_flight import StoreInFlight
    from hotkv_vllm.stats import HotKVStats
    from hotkv_vllm.worker.layout import ExportedMemory

Attachment = Sketch
"""Kind of the bytes that go along with a group's blocks: stored, leased and loaded under the same
hashes, as a further group of the session."""

# ---------------------------------------------------------------------------------- finding it

PACKAGE = "hotkv_sparse.vllm"
SETTINGS = (
    "sparse",
    "sparse_centre",
    "residency_timeout_s",
    "sketch_tokens",
    "allow_sparse_cuda",
)
"""The companion's; the first asks for it."""
NOT_INSTALLED = "hotkv_sparse is not installed: pip install '.[sparse]' in a clone of hotkv"


def part(name: str) -> ModuleType | None:
    """A module of the package; None if it is not installed."""
    try:
        return importlib.import_module(f"{PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        if error.name not in (PACKAGE, PACKAGE.partition(".")[0]):
            raise
        return None


def register() -> None:
    """Lets the companion prepare vLLM, in each of its processes, before it builds a model."""
    found = part("plugin")
    if found is not None:
        found.register()


# ------------------------------------------------------------------------------------ the seam


class CompanionSettings(Protocol):
    """What `settings.read` of the package returns. Its methods raise ConfigError if it can't work
    in the engine."""

    @property
    def needs_delivery(self) -> bool:
        """When vLLM preempts a request, it must drop the output of steps in flight."""

    @property
    def cuda_layout(self) -> str:
        """Of the KV cache on CUDA; empty: the connector's own."""

    def scheduler(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        stats: "HotKVStats",
        exactness: "Exactness",
        edge: "CallbackEdge",
    ) -> "SchedulerCompanion": ...

    def worker(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        arena_of: "Callable[[], Arena | None]",
        edge: "CallbackEdge",
    ) -> "RankCompanion": ...


class SchedulerCompanion(Protocol):
    """Lives as long as the engine; scheduler thread only. An exception is the callback's.

    frees_blocks: it takes blocks of running requests off the device; hits are always loaded.
    shares_loads: a loaded block gets into vLLM's own prefix cache, where others find it.
    """

    frees_blocks: bool
    shares_loads: bool

    def bind(self, kv_cache_manager: Any) -> None:
        """Call while the constructor of vLLM's scheduler binds its block manager."""

    def join(
        self,
        session: "Session",
        streams: "StreamCount",
        groups: "CachedGroups",
        cache_groups: "Sequence[CacheGroup]",
        notes: Sequence[Any],
    ) -> "Keeper | None":
        """A session over a key space begins. notes: of the ranks (`RankCompanion.note`)."""

    def leave(self) -> None:
        """The session has ended."""

    def arrived(self, request: Any, state: "RequestState | None", now_s: float) -> None:
        """state: None if hotkv does not follow the request."""

    def may_begin(self, request: Any, state: "RequestState | None", now_s: float) -> bool:
        """False: vLLM asks again in the next step."""

    def usable_tokens(self, request: Any, device_tokens: int, hit_tokens: int) -> int | None:
        """How much of a hit the request may use; None: ask again. `device_tokens`: of the hit in
        vLLM's own prefix cache, which `hit_tokens` includes."""

    def left_out(self, hit_tokens: int) -> range:
        """Blocks of a hit in the group of the `Keeper` that are neither leased nor loaded."""

    def ended(self, request: Any, now_s: float) -> bool:
        """Whether the request's last blocks may be stored."""

    def broke(self, request_id: str) -> None:
        """A callback has raised, and hotkv has forgotten the request."""

    def begin_step(self, scheduler_output: Any) -> Collection[int]:
        """Blocks that the step writes beyond those that vLLM names."""

    def step(
        self, scheduler_output: Any, states: "Mapping[str, RequestState]", now_s: float
    ) -> Any:
        """What goes with the step's message (`HotKVMetadata.companion`)."""

    def reported(self, report: Any | None) -> None:
        """After each step: what the ranks' companions report together (`StepReport.companion`)."""

    def lost(self, first_blocks: Set[int]) -> None:
        """vLLM computes the requests that hold one of these blocks anew."""

    def lost_broke(self, first_blocks: Set[int]) -> None:
        """`lost`, after an exception; shares no code with it."""

    def is_freeing(self) -> bool:
        """Blocks will soon be free, so that vLLM can wait instead of preempting."""

    def distrust(self) -> None:
        """The KV on the device has become inexact."""


class Keeper(Protocol):
    """Which requests' blocks the server keeps for them alone to read back. All of these are stored
    at once, inexact ones under private names. Lives as long as a session.

    group: of the session, whose blocks are kept.
    """

    group: int

    def keeps(self, request_id: str) -> bool: ...

    def names(self, state: "RequestState", until: int) -> Sequence[bytes]:
        """Hashes of at least the first `until` blocks."""

    def private_from(self, request_id: str) -> int:
        """Index of the first block with a private name."""

    def kept_as(self, request_id: str) -> str:
        """The id that stores carry; empty for none."""

    def storing(self, request_id: str, job: "StoreJob") -> None:
        """A store of its blocks begins."""

    def stored(self, store: "StoreInFlight") -> None:
        """Any request's store has ended, whatever its result."""

    def reset(self, request_id: str) -> None:
        """No other request may find its KV from before."""


class RankCompanion(Protocol):
    """A rank's part."""

    @property
    def note(self) -> Any:
        """For the scheduler's companion, with the handshake."""

    def register(self, kv_caches: Mapping[str, Any]) -> str:
        """vLLM's KV memory is there. Returns why hotkv must be off in this rank; mostly empty."""

    def attach(
        self,
        memory: "ExportedMemory",
        space: "KeySpace",
        groups: "Sequence[CacheGroup]",
        num_shards: int,
    ) -> "tuple[ExportedMemory, tuple[Attachment, ...]] | None":
        """The memory with that of the attachments, and their kinds; None if none are shared. Takes
        over the descriptors of `memory`."""

    def opened(self) -> None:
        """The session is open."""

    def will_write(self, blocks: "Int32s") -> None:
        """Loads or the discard of all memory are about to change these blocks."""

    def begin_step(self, meta: "HotKVMetadata") -> None:
        """Before the step writes blocks."""

    def distrust(self) -> bool:
        """It is not known which blocks the step overwrites. False: attachments are invalid from
        here on."""

    def find_lost(self, request_ids: Iterable[str]) -> set[str]:
        """After a step: those whose new KV is wrong."""

    def build(self, runs: "Sequence[BlockRun]") -> bool:
        """Makes the attachments of blocks about to be stored; False if that fails."""

    def loaded(self, group_index: int, block_ids: "Int32s") -> None:
        """Attachments of the session's group have been loaded."""

    def take_lost(self) -> set[int]:
        """First blocks of the requests that vLLM must compute anew, since the last call."""

    def lost_broke(self) -> set[int]:
        """`take_lost`, after an exception."""

    def add_report(self, report: "StepReport") -> None:
        """Adds counters, and `StepReport.companion`."""
