"""A session with the server: one stream, reopened with back-off whenever it breaks.

Each call sends a message and returns a future for its answer. Calls never block, except `ping`. If
a call's arguments are wrong, its future fails; calls without an answer raise the error. Always
true: every future is resolved. A load or store resolves only when the server can no longer touch
the engine's memory for it, because it answered or because it is dead. Knowledge from one epoch is
never used in another.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotkv_client.arena import Arena
from hotkv_client.connection import Connection, Pending
from hotkv_client.fence import SharedFence
from hotkv_client.life import SessionLife
from hotkv_client.parts import join_masks, joined, split_groups
from hotkv_client.selects import Selects
from hotkv_client.types import (
    After,
    BlockRun,
    BoolMask,
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
    SelectConfig,
    SequenceCreated,
    SequenceState,
    SessionConfig,
    TransferResult,
)
from hotkv_client.wire import requests as _wire
from hotkv_client.wire import sparse as _sparse_wire
from hotkv_proto.blocks import NO_OPTIONS, NO_RETENTION, Retention, StoreOptions
from hotkv_proto.errors import HotKVError, Reason, SessionLostError
from hotkv_proto.messages.cache import pack_quickly
from hotkv_proto.order import OrderKind


class Session:
    """A session with the server. Thread-safe.

    The caller chooses sequence ids, which are unique in the session. All sequences end with the
    connection.
    """

    def __init__(self, config: SessionConfig, memory: EngineMemory | None = None) -> None:
        self.config = config
        self._hash_bytes = config.key_space.hash_bytes
        self._life = SessionLife(config, memory)

    def __repr__(self) -> str:
        connection = self._connection
        return (
            f"Session({self.config.target}, {self.config.role.name}, {self.state.value}, "
            f"epoch={self.epoch:#x}, {connection.num_pending if connection else 0} pending)"
        )

    @property
    def _connection(self) -> Connection | None:
        return self._life.connection

    def start(self) -> None:
        """Starts to connect in the background."""
        self._life.start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Blocks until the session is connected or the time is up. Returns whether it connected."""
        return self._life.wait_connected(timeout_s)

    def wait_opened(self, timeout_s: float) -> bool:
        """Blocks while a server that has answered opens the session, at most `timeout_s`. Returns
        whether the session is connected."""
        return self._life.wait_opened(timeout_s)

    def close(self) -> None:
        """Ends the session and closes the session's own fence.

        The server settles the session's transfers and releases its leases. Blocks until the server
        is done, for at most 5 seconds.
        """
        self._life.close()

    @property
    def state(self) -> LinkState:
        return self._life.state

    @property
    def connected(self) -> bool:
        return self.state is LinkState.CONNECTED

    @property
    def epoch(self) -> int:
        """Returns the epoch of the cache last connected to; 0 before. It changes when the cache's
        contents are lost."""
        return self._life.opened.epoch

    @property
    def protocol_version(self) -> int:
        """Returns the protocol version of the session; 0 without a connection."""
        connection = self._connection
        return connection.opened.protocol_version if connection is not None else 0

    @property
    def wants_token_ids(self) -> bool:
        """Returns True if the server last connected to publishes events, which need
        `BlockRun.token_ids`.

        False before the first connection.
        """
        return self._life.opened.wants_token_ids

    @property
    def stored_bytes(self) -> int:
        """Returns the bytes of this key space that the server had in host memory when the last
        connection was opened."""
        return self._life.opened.stored_bytes

    @property
    def has_residency(self) -> bool:
        """Returns True if the server last connected to has residencies; False before."""
        return self._life.opened.has_residency

    @property
    def grows_residencies(self) -> bool:
        """Returns True if the server last connected to grows open residencies; False before."""
        return self._life.opened.grows_residencies

    @property
    def has_tiers(self) -> bool:
        """Returns True if the server last connected to has tiers; False before.

        With tiers `lookup` finds more blocks than `probe`.
        """
        return self._life.opened.has_tiers

    @property
    def has_events(self) -> bool:
        """Returns True if engines publish the events of the server last connected to."""
        return self._life.opened.has_events

    @property
    def order_kind(self) -> OrderKind:
        """Returns the kind of mark that transfers use (`After`). The server chose it from the
        memory's order.

        HOST without a connection or an order.
        """
        connection = self._connection
        return connection.order_kind if connection is not None else OrderKind.HOST

    @property
    def order_message(self) -> str:
        """Returns why the server accepted less of the memory's order than was offered; empty
        otherwise."""
        connection = self._connection
        return connection.order_message if connection is not None else ""

    def probe(self, group_index: int, hashes: Sequence[bytes]) -> BoolMask | None:
        """Returns which blocks are ready, as a hint from the shared block table; None without a
        table.

        Needs no call to the server and takes microseconds.
        """
        connection = self._connection
        if connection is None or connection.table is None:
            return None
        packed = pack_quickly(hashes, self._hash_bytes)
        salt = connection.opened.salts[group_index]
        return connection.table.ready(packed, self._hash_bytes, salt)

    def arena(self) -> Arena | None:
        """Returns the server's arena; None without a connection, or if this session may not map it.

        The first call maps it; the connection then returns the same object. `LeaseGrant.offsets`
        and `extend_residency` say where blocks lie in it. Raises OSError if the system refuses.
        """
        link = None if self._connection is None else self._connection.link
        return None if link is None else link.arena()

    # ------------------------------------------------------------------- calls that touch no memory

    def lookup(
        self, groups: Sequence[GroupHashes], traceparent: str | None = None
    ) -> "Future[tuple[BoolMask, ...]]":
        """Asks the server which blocks are ready. Resolves to a mask for each group.

        Sends several messages if the hashes are too many for a single message.

        traceparent: the caller's span in the form of W3C Trace Context, for a server that records
            traces; None: no span.
        """
        parts = split_groups(groups, self._hash_bytes)
        if len(parts) == 1:
            return self._call(lambda: _wire.lookup(groups, self._hash_bytes, traceparent))
        asked = [
            self._call(partial(_wire.lookup, part, self._hash_bytes, traceparent)) for part in parts
        ]
        return joined(asked, lambda answers: join_masks(groups, answers))

    def acquire(
        self,
        lease_id: str,
        groups: Sequence[GroupHashes],
        ttl_s: float = 0,
        traceparent: str | None = None,
        *,
        wants_offsets: bool = False,
    ) -> "Future[LeaseGrant]":
        """Pins the ready blocks among those named.

        The same call again gets the same answer. The same id with other blocks fails as
        DUPLICATE_ID. Blocks of an earlier server are compared with their check values first.

        ttl_s: time until the lease expires; 0: the server's default.
        traceparent: as for `lookup`.
        wants_offsets: the grant also has the blocks' offsets in `arena()`. Fails as NOT_ALLOWED if
            there is no arena.
        """
        return self._call(
            lambda: _wire.acquire(
                lease_id,
                groups,
                ttl_s,
                self._hash_bytes,
                wants_offsets=wants_offsets,
                traceparent=traceparent,
            ),
            lease_id=lease_id,
        )

    def reserve(
        self,
        lease_id: str,
        runs: Sequence[BlockRun],
        ttl_s: float = 0,
        retention: Retention = NO_RETENTION,
    ) -> "Future[tuple[NDArray[np.uint8], ...]]":
        """Reserves slots for blocks. Gives an array of BlockResult values for each run."""
        return self._call(lambda: _wire.reserve(lease_id, runs, ttl_s, retention, self._hash_bytes))

    def release(self, lease_id: str) -> None:
        """Releases a lease. There is no answer: without a connection the lease has already
        ended."""
        self._send_only(_wire.release(lease_id))

    def open_residency(
        self, residency_id: str, num_blocks: Mapping[int, int]
    ) -> "Future[ResidencyOpened]":
        """Reserves room in the arena for a request.

        num_blocks: the most blocks that the request will need, by group index. The room includes
            their representations of the kinds that this session declares.

        The same call again gets the same answer. If the server `grows_residencies`, the call may be
        repeated with more blocks; if that fails, the residency stays as it was. The residency
        belongs to the engine and ends with this session. Fails as NO_ROOM_FOR_RESIDENCY if the room
        is in use, as RESIDENCY_TOO_LARGE if there can never be enough room, and as NOT_ALLOWED if
        there is no `arena()`.
        """
        return self._resident(lambda: _wire.open_residency(residency_id, num_blocks))

    def extend_residency(
        self, residency_id: str, group_index: int, first_position: int, hashes: Sequence[bytes]
    ) -> "Future[ResidentBlocks]":
        """Pins the ready blocks among those named. Gives their offsets in `arena()`.

        A block that the residency has already pinned keeps its offset. Blocks of an earlier server
        are compared with their check values first. Fails as UNKNOWN_RESIDENCY if the residency has
        ended.

        first_position: position of the first block in the request, counted in blocks.
        """
        return self._resident(
            lambda: _wire.extend_residency(
                residency_id, group_index, first_position, hashes, self._hash_bytes
            )
        )

    def close_residency(self, residency_id: str) -> None:
        """Closes a residency: its blocks must not be read after this call.

        There is no answer: without a connection the residency has ended already.
        """
        self._send_only(_wire.close_residency(residency_id))

    def report_use(self, groups: Sequence[GroupHashes]) -> None:
        """Reports to the server which blocks the engine used from its own device cache."""
        for part in split_groups(groups, self._hash_bytes):
            self._send_only(_wire.report_use(part, self._hash_bytes))

    def report_requests(
        self,
        reports: Sequence[RequestReport[Sequence[bytes]]],
        prefill_tokens_per_s: float = 0.0,
        ended: Sequence[EndedRequest[Sequence[bytes]]] = (),
        loads: Sequence[LoadEnd] = (),
    ) -> None:
        """Reports scheduled requests to the server. There is no answer.

        Raises HotKVError for hashes of another length.

        reports: what the requests used from the device cache, and how long to retain their blocks.
        prefill_tokens_per_s: speed that this engine has measured; 0: unknown. With it, lookups skip
            blocks in a slow tier that the engine computes sooner than it could load them.
        ended: requests that have ended and that have a session or hints.
        loads: loads that have ended since the previous report.
        """
        for request in _wire.report_requests(
            reports, self._hash_bytes, prefill_tokens_per_s, ended, loads
        ):
            self._send_only(request)

    def create_sequence(
        self,
        sequence_id: str,
        group_index: int,
        hashes: Sequence[bytes],
        select: SelectConfig | None = None,
    ) -> "Future[SequenceCreated]":
        """Creates a sequence over the complete blocks `hashes` of its context.

        With `select` the server selects for the sequence (`selects`). Without it nothing is pinned;
        the sequence exists so that reports can name it.
        """
        return self._call(
            lambda: _sparse_wire.create_sequence(
                sequence_id, group_index, hashes, select, self._hash_bytes
            )
        )

    def append_blocks(
        self, sequence_id: str, first_position: int, hashes: Sequence[bytes]
    ) -> "Future[SequenceState]":
        """Appends blocks that have become complete to a sequence.

        first_position: position of the first of them in the context. Blocks that the sequence
            already has must be the same.

        If the server selects, it renews its lease to include all blocks that are ready, even if
        `hashes` is empty.
        """
        return self._call(
            lambda: _sparse_wire.append_blocks(
                sequence_id, first_position, hashes, self._hash_bytes
            )
        )

    def report_sparse(
        self, positions: Mapping[str, Int32s], counters: Mapping[int, Mapping[str, float]]
    ) -> None:
        """Reports to the server what sparse decode did since the previous report. There is no
        answer.

        positions: by sequence id, int32 positions of blocks that were selected or joined a hot set
            in any layer. They count as used.
        counters: by layer, growth of counters, named as in `SPARSE_COUNTERS`. Raises HotKVError for
            other names.
        """
        self._send_only(_sparse_wire.report_sparse(positions, counters))

    def delete_sequence(self, sequence_id: str) -> "Future[bool]":
        """Ends a sequence. Gives False if it does not exist."""
        return self._call(lambda: _sparse_wire.delete_sequence(sequence_id))

    def read_events(self, most: int = 0) -> "Future[EventsRead]":
        """Reads the next events of the key space: first the present state, then each event.

        Fails as NOT_ALLOWED unless `has_events`.

        most: most events in the answer; 0: the server's limit.
        """
        return self._call(lambda: _wire.read_events(most))

    def flush(self) -> "Future[Flushed]":
        """Drops every block of this session's key space, from all engines. Gives how many were
        ready.

        Once resolved, no lease holds a block from before the flush, and stores under way are
        refused as ABORTED. The same holds on other nodes, unless tiers are pending. If nodes share
        a tier, the flush takes a second and a half.
        """
        return self._call(_wire.flush)

    def ping(self, timeout_s: float) -> float:
        """Returns the seconds of a round trip. Raises HotKVError or TimeoutError."""
        start_s = time.perf_counter()
        self._call(_wire.ping).result(timeout_s)
        return time.perf_counter() - start_s

    # ------------------------------------------------------------------------------------ transfers

    def load(
        self,
        transfer_id: str,
        lease_id: str,
        runs: Sequence[LoadRun],
        timeout_s: float,
        after: After | None = None,
        traceparent: str | None = None,
    ) -> "Future[TransferResult]":
        """Copies leased blocks into the registered memory.

        after: nothing is written before this mark; `timeout_s` counts from there.
        traceparent: as for `lookup`.
        """
        return self._call(
            lambda: _wire.load(transfer_id, lease_id, runs, timeout_s, after, traceparent),
            transfer_id=transfer_id,
            after=after,
            is_load=True,
        )

    def store(
        self,
        transfer_id: str,
        lease_id: str,
        runs: Sequence[BlockRun],
        timeout_s: float,
        options: StoreOptions = NO_OPTIONS,
        after: After | None = None,
        fence_index: int = 0,
    ) -> "Future[TransferResult]":
        """Copies blocks out of the registered memory and commits them.

        The first store under a lease id reserves; other ranks join it.

        after: nothing is read before this mark; `timeout_s` counts from there.
        fence_index: the word that revokes this store, if the memory has a shared fence; ignored
            otherwise. Raises ValueError if it is missing.
        """
        connection, fence = self._connection, self._life.fence
        if isinstance(fence, SharedFence):
            fence.hold(fence_index)
        else:
            has_link = connection is not None and connection.link is not None
            fence_index = fence.take() if fence is not None and has_link else 0
        return self._call(
            lambda: _wire.store(
                transfer_id,
                lease_id,
                runs,
                timeout_s,
                options,
                fence_index,
                self._hash_bytes,
                after,
            ),
            transfer_id=transfer_id,
            fence_index=fence_index,
            after=after,
        )

    def cancel(self, transfer_id: str) -> None:
        """Asks for a transfer to end early. It has ended when its future resolves.

        A store with a word of the fence is revoked and resolves at once, as CANCELLED and without
        results, whatever the server is doing. Its blocks were committed before, or never will be. A
        load resolves when the server has stopped writing.
        """
        if (connection := self._connection) is not None:
            connection.cancel(transfer_id)

    def revoke_stores(self) -> None:
        """Revokes all stores under way. When this returns, their blocks may be overwritten.

        Their futures resolve with the server's answers. Raises SessionLostError if a store can't be
        revoked; then only `close` ends it.
        """
        if self._life.fence is not None:
            self._life.fence.revoke_all()
        connection = self._connection
        if connection is not None and connection.has_unrevocable_store():
            raise SessionLostError("a store is under way that has no word of the fence")

    def selects(self) -> Selects:
        """Opens a stream of selections by the server. The caller closes it.

        Raises SessionLostError without a connection.
        """
        if (connection := self._connection) is None:
            raise self._no_server()
        return Selects(connection.selecting, connection.session_id)

    def _call(
        self,
        build: Callable[[], _wire.Request],
        *,
        lease_id: str = "",
        transfer_id: str = "",
        fence_index: int = 0,
        after: After | None = None,
        is_load: bool = False,
    ) -> "Future[Any]":
        future: Future[Any] = Future()
        connection = self._connection
        why_not: HotKVError | None
        try:
            request = build()
            pending = Pending(future, lease_id, transfer_id, fence_index, is_load)
            why_not = (
                connection.submit(request, pending, after)
                if connection is not None and self.connected
                else self._no_server()
            )
        except HotKVError as error:
            why_not = error
        except Exception as error:  # noqa: BLE001 The edge of calls: arguments that make no message.
            why_not = HotKVError(Reason.INVALID_FIELD, f"{type(error).__name__}: {error}")
        if why_not is not None:
            if self._life.fence is not None:
                self._life.fence.give_back(fence_index)
            future.set_exception(why_not)
        return future

    def _resident(self, build: Callable[[], _wire.Request]) -> "Future[Any]":
        connection = self._connection
        if connection is None or not self.connected or connection.opened.has_residency:
            return self._call(build)
        future: Future[Any] = Future()
        future.set_exception(
            HotKVError(
                Reason.VERSION_MISMATCH,
                f"the server at {self.config.target} has no residencies; upgrade it",
            )
        )
        return future

    def _no_server(self) -> SessionLostError:
        return SessionLostError(f"no server at {self.config.target} ({self.state.value})")

    def _send_only(self, request: _wire.Request) -> None:
        connection = self._connection
        if connection is not None and self.state in (LinkState.CONNECTED, LinkState.DRAINING):
            connection.send_only(request)
