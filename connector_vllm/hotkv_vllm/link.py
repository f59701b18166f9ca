"""The seam between connector and client: the session as the connector uses it, and the function
that opens it.

Nothing here blocks. A change of a session's state is logged once, never per request.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hotkv_client.arena import Arena
from hotkv_client.fence import SharedFence
from hotkv_client.types import (
    After,
    BlockRun,
    EndedRequest,
    EngineMemory,
    EventsRead,
    Flushed,
    GroupHashes,
    Int32s,
    LeaseGrant,
    LinkState,
    LoadEnd,
    LoadRun,
    RequestReport,
    ResidencyOpened,
    ResidentBlocks,
    SequenceCreated,
    SequenceState,
    SessionConfig,
    TransferResult,
)
from hotkv_proto.blocks import NO_OPTIONS, StoreOptions
from hotkv_proto.layout import Layout
from hotkv_proto.order import NO_ORDER, DeviceOrder, OrderKind

logger = logging.getLogger("vllm.hotkv")
"""A child of vLLM's logger, so that vLLM's handlers and level apply."""

BoolMask = NDArray[np.bool_]


class CacheSession(Protocol):
    """The part of `hotkv_client.Session` that the connector uses. That class documents the
    guarantees."""

    @property
    def connected(self) -> bool: ...
    @property
    def epoch(self) -> int: ...
    @property
    def stored_bytes(self) -> int: ...
    @property
    def has_tiers(self) -> bool: ...
    @property
    def wants_token_ids(self) -> bool: ...
    @property
    def has_events(self) -> bool: ...
    @property
    def order_kind(self) -> OrderKind: ...
    @property
    def order_message(self) -> str: ...
    def start(self) -> None: ...
    def wait_connected(self, timeout_s: float) -> bool: ...
    def probe(self, group_index: int, hashes: Sequence[bytes]) -> BoolMask | None: ...
    def lookup(
        self, groups: Sequence[GroupHashes], traceparent: str | None = None
    ) -> "Future[tuple[BoolMask, ...]]": ...
    def acquire(
        self,
        lease_id: str,
        groups: Sequence[GroupHashes],
        ttl_s: float = 0,
        traceparent: str | None = None,
    ) -> "Future[LeaseGrant]": ...
    def release(self, lease_id: str) -> None: ...
    def load(
        self,
        transfer_id: str,
        lease_id: str,
        runs: Sequence[LoadRun],
        timeout_s: float,
        after: After | None = None,
        traceparent: str | None = None,
    ) -> "Future[TransferResult]": ...
    def store(
        self,
        transfer_id: str,
        lease_id: str,
        runs: Sequence[BlockRun],
        timeout_s: float,
        options: StoreOptions = NO_OPTIONS,
        after: After | None = None,
        fence_index: int = 0,
    ) -> "Future[TransferResult]": ...
    def arena(self) -> Arena | None: ...
    def open_residency(
        self, residency_id: str, num_blocks: Mapping[int, int]
    ) -> "Future[ResidencyOpened]": ...
    def extend_residency(
        self, residency_id: str, group_index: int, first_position: int, hashes: Sequence[bytes]
    ) -> "Future[ResidentBlocks]": ...
    def close_residency(self, residency_id: str) -> None: ...
    def read_events(self, most: int = 0) -> "Future[EventsRead]": ...
    def cancel(self, transfer_id: str) -> None: ...
    def revoke_stores(self) -> None: ...
    def report_use(self, groups: Sequence[GroupHashes]) -> None: ...
    def report_requests(
        self,
        reports: Sequence[RequestReport[Sequence[bytes]]],
        prefill_tokens_per_s: float = 0.0,
        ended: Sequence[EndedRequest[Sequence[bytes]]] = (),
        loads: Sequence[LoadEnd] = (),
    ) -> None: ...
    def create_sequence(
        self, sequence_id: str, group_index: int, hashes: Sequence[bytes]
    ) -> "Future[SequenceCreated]": ...
    def append_blocks(
        self, sequence_id: str, first_position: int, hashes: Sequence[bytes]
    ) -> "Future[SequenceState]": ...
    def report_sparse(
        self, positions: Mapping[str, Int32s], counters: Mapping[int, Mapping[str, float]]
    ) -> None: ...
    def delete_sequence(self, sequence_id: str) -> "Future[bool]": ...
    def flush(self) -> "Future[Flushed]": ...
    def close(self) -> None: ...


def open_session(
    config: SessionConfig,
    layout: Layout | None = None,
    fds: dict[str, int] | None = None,
    order: DeviceOrder = NO_ORDER,
    fence: SharedFence | None = None,
) -> CacheSession:
    """Returns a started session.

    layout: memory to register with the server; None for a session without memory.
    fds: file descriptors of that memory, by name.
    order: how transfers wait for the device's own work.
    fence: the page in which the scheduler revokes stores.
    """
    from hotkv_client.session import Session

    memory = (
        None
        if layout is None
        else EngineMemory(layout=layout, fds=fds or {}, order=order, fence=fence)
    )
    session: CacheSession = Session(config, memory)
    session.start()
    return session


def log_state(who: str, level: int) -> "StateLog":
    """Returns a callback for `SessionConfig.on_state` that logs one line per change of state."""
    return StateLog(who, level)


class StateLog:
    """Logs a session's state each time it changes. `why` is the reason that came with the last
    report of the state."""

    def __init__(self, who: str, level: int) -> None:
        self._who = who
        self._level = level
        self._last: LinkState | None = None
        self.why = ""

    def __call__(self, state: LinkState, why: str) -> None:
        self.why = why
        if state is self._last:
            return
        self._last = state
        text = {
            LinkState.CONNECTED: "the KV cache server is there",
            LinkState.ABSENT: "no KV cache server: the engine runs without it and goes on trying",
            LinkState.DRAINING: "the KV cache server drains and takes nothing new",
            LinkState.CLOSED: "session closed",
        }[state]
        logger.log(self._level, "hotkv %s: %s (%s)", self._who, text, why)
