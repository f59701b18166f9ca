"""A session with the server: one gRPC stream, reopened with back-off whenever it breaks.

Most calls send a message and return a future for the answer; if the arguments are wrong, the future
fails. Calls that have no answer return no future; if the arguments are wrong, they raise. Only
`ping` blocks until the server answers.

Always true: every future resolves.
- The future of a load resolves only when the server can no longer touch the engine's memory for
  this load, because the server has answered or is dead.
- The future of a store resolves when the server answers. It also resolves at `cancel` and when the
  connection breaks, because the session then revokes the store: it sets the store's word on the
  fence, a page that the session shares with the server (module `fence`). A revoked store can't
  commit.
"""

import os
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
from hotkv_client.wire import call_messages as _wire
from hotkv_client.wire import sparse as _sparse_wire
from hotkv_proto.blocks import NO_OPTIONS, NO_RETENTION, Retention, StoreOptions
from hotkv_proto.errors import HotKVError, Reason, SessionLostError
from hotkv_proto.messages.cache import pack_quickly
from hotkv_proto.order import OrderKind


class Session:
    """A session with the server. Thread-safe. It belongs to the process that made it: in a process
    that is forked later, the session is closed.

    The caller chooses the ids of leases, transfers (loads and stores), sequences and residencies. A
    sequence is a context that the session decodes sparsely; its id must be unique in the session.
    All sequences end when the connection ends. A residency reserves room in host memory for a
    request.
    """

    def __init__(self, config: SessionConfig, memory: EngineMemory | None = None) -> None:
        self.config = config
        self._hash_bytes = config.key_space.hash_bytes
        self._life = SessionLife(config, memory)
        self._pid = os.getpid()

    def __repr__(self) -> str:
        connection = self._connection
        return (
            f"Session({self.config.target}, {self.config.role.name}, {self.state.value}, "
            f"epoch={self.epoch:#x}, {connection.num_pending if connection else 0} pending)"
        )

    @property
    def _connection(self) -> Connection | None:
        # None in a forked process, because the session's thread, which sends the calls, exists only
        # in the process that started it.
        return self._life.connection if os.getpid() == self._pid else None

    def start(self) -> None:
        """Starts the session's thread, which connects in the background."""
        self._life.start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Blocks until the session is connected or closed, at most `timeout_s`. Returns whether it
        is connected."""
        return self._life.wait_connected(timeout_s)

    def wait_opened(self, timeout_s: float) -> bool:
        """If a server has accepted the connection but has not opened the session yet, waits until
        the opening has succeeded or failed, for at most `timeout_s`. Otherwise returns at once.
        Returns whether the session is connected."""
        return self._life.wait_opened(timeout_s)

    def close(self) -> None:
        """Closes the connection, stops the session's thread, and drops the session's own fence (the
        page, shared with the server, through which stores are revoked).

        The server then ends the session's transfers and releases its leases. Blocks until the
        thread has ended, for at most 5 seconds. If a callback of the session calls this method, it
        does not block.
        """
        self._life.close()

    @property
    def state(self) -> LinkState:
        return self._life.state if os.getpid() == self._pid else LinkState.CLOSED

    @property
    def connected(self) -> bool:
        return self._life.state is LinkState.CONNECTED and os.getpid() == self._pid

    @property
    def epoch(self) -> int:
        """Returns the epoch of the server to which the session connected last; 0 before the first
        connection. The epoch is a number that changes when the server loses the cache's
        contents."""
        return self._life.opened.epoch

    @property
    def wants_token_ids(self) -> bool:
        """Returns True if the server to which the session connected last publishes events. Events
        contain tokens, so stores then need `BlockRun.token_ids`.

        False before the first connection.
        """
        return self._life.opened.wants_token_ids

    @property
    def stored_bytes(self) -> int:
        """Returns the total bytes of this key space's blocks (the blocks that this session may use)
        in the server's host memory. The server reported the number when it opened the last
        connection; 0 before the first connection."""
        return self._life.opened.stored_bytes

    @property
    def has_residency(self) -> bool:
        """Returns True if the server to which the session connected last supports residencies;
        False before the first connection. A residency reserves room in host memory for a request
        and pins the request's blocks there."""
        return self._life.opened.has_residency

    @property
    def has_tiers(self) -> bool:
        """Returns True if the server to which the session connected last has tiers below host
        memory; False before the first connection.

        `lookup` also finds blocks in these tiers, `probe` finds only blocks in host memory.
        """
        return self._life.opened.has_tiers

    @property
    def has_events(self) -> bool:
        """Returns True if the server to which the session connected last offers `read_events`;
        False before the first connection. The events say which blocks were stored and removed;
        engines publish them to routers."""
        return self._life.opened.has_events

    @property
    def order_kind(self) -> OrderKind:
        """Returns the kind of mark that `After` must contain. A mark is a point in the queue of the
        engine's device; a transfer waits until the device has passed it. The server chose the kind
        from the kinds that `EngineMemory.order` offers.

        Returns HOST without a connection, or if the memory offers no kind.
        """
        connection = self._connection
        return connection.order_kind if connection is not None else OrderKind.HOST

    @property
    def order_message(self) -> str:
        """Returns the reason why the server rejected a kind of mark (a point in the device's queue)
        that `EngineMemory.order` offers. Empty if the server rejected no kind, or without a
        connection."""
        connection = self._connection
        return connection.order_message if connection is not None else ""

    def probe(self, group_index: int, hashes: Sequence[bytes]) -> BoolMask | None:
        """Looks up blocks in the server's block table, which this process has mapped. Returns a
        mask of the blocks that are ready; None without a connection, or if no table is mapped.

        Makes no call to the server and takes microseconds. The result is a hint: the server may
        evict a block at any time, until a lease pins it.
        """
        connection = self._connection
        if connection is None or connection.table is None:
            return None
        packed = pack_quickly(hashes, self._hash_bytes)
        salt = connection.opened.salts[group_index]
        return connection.table.ready(packed, self._hash_bytes, salt)

    def arena(self) -> Arena | None:
        """Returns the server's arena; None without a connection, or if this session may not map it.

        The first call on a connection maps the arena; later calls return the same object.
        `LeaseGrant.offsets` and `extend_residency` give the offsets of blocks in the arena. Raises
        OSError if the arena can't be mapped.
        """
        link = None if self._connection is None else self._connection.link
        return None if link is None else link.arena()

    # ------------------------------------------------------------------- calls that touch no memory

    def lookup(
        self, groups: Sequence[GroupHashes], traceparent: str | None = None
    ) -> "Future[tuple[BoolMask, ...]]":
        """Asks the server which blocks are ready. The future resolves to a mask for each entry of
        `groups`.

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
        """Acquires a read lease, which pins those blocks of `groups` that are ready.

        If blocks are in lower tiers, the server promotes them before it answers, but waits no
        longer than its setting `tiers.lookup_wait_ms`. If a block was stored before the server
        restarted, the server first compares the block's bytes with the block's checksum
        (checksum). A repeated call with the same `lease_id` and blocks gets the same answer; with
        other blocks it fails as DUPLICATE_ID.

        ttl_s: time until the lease expires; 0: the server's default.
        traceparent: the caller's span in the form of W3C Trace Context; None: no span.
        wants_offsets: True: the grant also has the blocks' offsets in `arena()`. Fails as
            NOT_ALLOWED if there is no arena.
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
        """Acquires a write lease, which reserves slots for blocks that a store will write.

        The future resolves to an array of `BlockResult` values for each run.

        runs: each run is a list of consecutive blocks of a group.
        ttl_s: time until the lease expires; 0: the server's default.
        """
        return self._call(lambda: _wire.reserve(lease_id, runs, ttl_s, retention, self._hash_bytes))

    def release(self, lease_id: str) -> None:
        """Releases a lease. The call has no answer. Without a connection it does nothing, because
        the server has already ended the lease."""
        self._send_only(_wire.release(lease_id))

    def open_residency(
        self, residency_id: str, num_blocks: Mapping[int, int]
    ) -> "Future[ResidencyOpened]":
        """Opens a residency: reserves room in the arena for the blocks of a request.

        num_blocks: largest number of blocks that the request will need, by group index. The server
            also reserves room for the blocks' sketches (compact forms of keys, for sparse
            attention), of the kinds that this session declares.

        A repeated call with the same arguments gets the same answer. A repeated call may ask for
        more blocks; if that fails, the residency stays as it was. All sessions of the engine can
        store blocks under the residency. It ends with this session.

        The future fails for three reasons:
        - NO_ROOM_FOR_RESIDENCY: there is not enough room now, because other residencies, leases or
          pins use it.
        - RESIDENCY_TOO_LARGE: the room can never be large enough.
        - NOT_ALLOWED: there is no `arena()`.
        """
        return self._resident(lambda: _wire.open_residency(residency_id, num_blocks))

    def extend_residency(
        self, residency_id: str, group_index: int, first_position: int, hashes: Sequence[bytes]
    ) -> "Future[ResidentBlocks]":
        """Pins those blocks of `hashes` that are ready, for the request of an open residency
        (`open_residency`). The future resolves to the offset of each block in `arena()`; -1 if the
        block is not pinned.

        A block that the residency has already pinned keeps its offset. If a block was stored before
        the server restarted, the server first compares the block's bytes with the block's checksum.
        Fails as UNKNOWN_RESIDENCY if the residency has ended.

        first_position: index of the first block among the request's blocks.
        hashes: hashes of consecutive blocks from `first_position` on.
        """
        return self._resident(
            lambda: _wire.extend_residency(
                residency_id, group_index, first_position, hashes, self._hash_bytes
            )
        )

    def close_residency(self, residency_id: str) -> None:
        """Closes a residency: the server frees the room that it reserved for the request, and
        unpins the request's blocks. After this call the caller must not read these blocks in the
        arena.

        The call has no answer. Without a connection it does nothing, because the server has already
        ended the residency.
        """
        self._send_only(_wire.close_residency(residency_id))

    def report_use(self, groups: Sequence[GroupHashes]) -> None:
        """Reports to the server which blocks the engine used from its own device cache. The
        server's eviction policy counts these blocks as used. The call has no answer."""
        for part in split_groups(groups, self._hash_bytes):
            self._send_only(_wire.report_use(part, self._hash_bytes))

    def report_requests(
        self,
        reports: Sequence[RequestReport[Sequence[bytes]]],
        prefill_tokens_per_s: float = 0.0,
        ended: Sequence[EndedRequest[Sequence[bytes]]] = (),
        loads: Sequence[LoadEnd] = (),
    ) -> None:
        """Reports scheduled requests, ended requests and ended loads to the server. The call has no
        answer.

        Raises HotKVError if the length of a hash differs from the key space's `hash_bytes`.

        reports: for each scheduled request, the blocks that it used from the device cache, and how
            long the server should retain its blocks.
        prefill_tokens_per_s: prefill speed that this engine has measured; 0: unknown. With a known
            speed, lookups skip blocks in a slow tier that the engine computes faster than it could
            load them.
        ended: ended requests that named a user's session or had hints.
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
        """Creates a sequence: a context that this session decodes sparsely.

        hashes: hashes of the complete blocks of the context.
        select: settings with which the server selects blocks for the sequence (`selects`). None:
            the server makes no selections and pins no blocks; the session only reports about the
            sequence (`report_sparse`).
        """
        return self._call(
            lambda: _sparse_wire.create_sequence(
                sequence_id, group_index, hashes, select, self._hash_bytes
            )
        )

    def append_blocks(
        self, sequence_id: str, first_position: int, hashes: Sequence[bytes]
    ) -> "Future[SequenceState]":
        """Appends complete blocks to a sequence (a context that this session decodes sparsely).

        first_position: index, in the context, of the first block of `hashes`. If the sequence
            already has a block at one of the positions, both hashes must be equal.

        If the server makes selections for the sequence, it also renews the sequence's lease, even
        if `hashes` is empty. The new lease pins all blocks of the sequence that are ready now.
        """
        return self._call(
            lambda: _sparse_wire.append_blocks(
                sequence_id, first_position, hashes, self._hash_bytes
            )
        )

    def report_sparse(
        self, positions: Mapping[str, Int32s], counters: Mapping[int, Mapping[str, float]]
    ) -> None:
        """Reports the sparse decode steps since the previous report. The call has no answer.

        positions: by the id of the sequence (a context that is decoded sparsely), indices of blocks
            in the context, int32: the blocks that a layer selected, or that it added to its hot set
            (the blocks that the layer keeps on the device). The server's eviction policy counts
            these blocks as used.
        counters: by layer and by name, the growth of a counter since the previous report. Raises
            HotKVError for a name that is not in `SPARSE_COUNTERS`.
        """
        for request in _sparse_wire.report_sparse(positions, counters):
            self._send_only(request)

    def delete_sequence(self, sequence_id: str) -> "Future[bool]":
        """Ends a sequence (a context that is decoded sparsely). Resolves to False if the sequence
        does not exist."""
        return self._call(lambda: _sparse_wire.delete_sequence(sequence_id))

    def read_events(self, most: int = 0, *, begins_state: bool = False) -> "Future[EventsRead]":
        """Reads the next events of the key space (a model in a configuration). The first events
        list the blocks that are cached now; the later events report each change.

        Fails as NOT_ALLOWED unless `has_events`.

        most: largest number of events in the answer; 0: the server's limit.
        begins_state: True asks for the list of the cached blocks again. A server that does not know
            this field continues with the next events.
        """
        return self._call(lambda: _wire.read_events(most, begins_state=begins_state))

    def flush(self) -> "Future[Flushed]":
        """Drops every block of this session's key space: all blocks that this session may use, also
        blocks that other engines stored. Resolves to the number of ready blocks that were dropped.

        After the answer no new lease can pin a block from before the flush, and the blocks of
        stores in flight get the result ABORTED. The same is true on other nodes that share a tier
        with this server, except for the tiers in `Flushed.pending_tiers`. If nodes share a tier,
        the flush takes a second and a half.
        """
        return self._call(_wire.flush)

    def ping(self, timeout_s: float) -> float:
        """Makes an empty call and returns its round-trip time in seconds. Blocks at most
        `timeout_s`. Raises HotKVError if the call fails, TimeoutError if there is no answer in
        time."""
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
        """Copies blocks into the registered engine memory. The read lease `lease_id` must pin the
        blocks.

        after: the server writes only after the engine's device has passed this mark (a point in the
            device's queue); `timeout_s` begins at that time. None: the server may write at once.
        traceparent: the caller's span in the form of W3C Trace Context; None: no span.
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
        """Copies blocks from the registered engine memory into the arena and commits them. A block
        becomes ready when the shards of all ranks are committed.

        The first store under a `lease_id` reserves the slots. Other ranks store their shards of the
        same blocks under the same `lease_id`, into these slots. Fails as OVERLOADED if stores in
        flight use all words of the session's own fence (the page by which stores are revoked).

        If the message would be too large for the server, leaves out the tokens and extra keys of
        the runs (consecutive blocks of a group). The events of these blocks then have no tokens.

        after: the server reads only after the engine's device has passed this mark (a point in the
            device's queue); `timeout_s` begins at that time. None: the server may read at once.
        fence_index: index of this store's word on the page `EngineMemory.fence`, by which the store
            can be revoked. Raises ValueError if that page has no word for stores with this index.
            Ignored without `EngineMemory.fence`.
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
        """Asks the server to end a transfer early. The transfer has ended when its future resolves.

        A store is revoked at once, even if the server hangs: its future resolves as CANCELLED,
        without results. The server either committed the store's blocks before this call, or never
        commits them. The future of a load resolves when the server has answered.
        """
        if (connection := self._connection) is not None:
            connection.cancel(transfer_id)

    def revoke_stores(self) -> None:
        """Revokes all stores in flight, so that they can't commit any more. After this call the
        engine may overwrite the memory that they read.

        The futures of these stores resolve when the server answers.
        """
        if (fence := self._life.fence) is not None:
            fence.revoke_all()

    def selects(self) -> Selects:
        """Opens a stream in which the server selects blocks for sequences (contexts that are
        decoded sparsely) of this session. The caller must close the stream.

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
            if (fence := self._life.fence) is not None:
                fence.give_back(fence_index)
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
        if (connection := self._connection) is not None:
            connection.send_only(request)
