"""A session with the server: one gRPC stream, reopened with back-off whenever it breaks.

Most calls return a future; wrong arguments fail it. Calls without an answer return none; wrong
arguments raise. Only `ping` blocks until the server answers.

Always true: every future resolves.
- Of a load, only when the server can no longer touch the engine's memory for it: it has answered or
  is dead.
- Of a store, when the server answers, at `cancel`, or when the connection breaks: the session
  then revokes the store (module `fence`), which can't commit any more.
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
from hotkv_client.ends import TransferFuture
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
    """Thread-safe. Belongs to the process that made it: in one that is forked later it is closed.

    The caller chooses the ids of leases, transfers, sequences and residencies. A *sequence* is a
    context that the session decodes sparsely; it ends with the connection.
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
        # None in a forked process: the thread that sends the calls exists only in its parent.
        return self._life.connection if os.getpid() == self._pid else None

    def start(self) -> None:
        """Connects in the background."""
        self._life.start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Blocks until the session is connected or closed, at most `timeout_s`. Returns whether
        it is connected."""
        return self._life.wait_connected(timeout_s)

    def wait_opened(self, timeout_s: float) -> bool:
        """Waits for a server that has accepted the connection but not opened the session, at
        most `timeout_s`. Returns whether the session is connected."""
        return self._life.wait_opened(timeout_s)

    def close(self) -> None:
        """The server then ends the session's transfers and releases its leases. Blocks until the
        session's thread has ended, at most 5 seconds; not in a callback of the session."""
        self._life.close()

    @property
    def state(self) -> LinkState:
        return self._life.state if os.getpid() == self._pid else LinkState.CLOSED

    @property
    def connected(self) -> bool:
        return self._life.state is LinkState.CONNECTED and os.getpid() == self._pid

    @property
    def epoch(self) -> int:
        """Changes when the server loses the cache's contents; 0 before the first connection."""
        return self._life.opened.epoch

    @property
    def wants_token_ids(self) -> bool:
        """The server connected last publishes events, so stores need `BlockRun.token_ids`. False
        before."""
        return self._life.opened.wants_token_ids

    @property
    def stored_bytes(self) -> int:
        """Bytes of this key space in host memory when the last connection was opened; 0 before."""
        return self._life.opened.stored_bytes

    @property
    def has_residency(self) -> bool:
        """The server connected last supports residencies; False before."""
        return self._life.opened.has_residency

    @property
    def has_tiers(self) -> bool:
        """The server connected last has tiers; False before. `lookup` also finds blocks in
        these, `probe` only in host memory."""
        return self._life.opened.has_tiers

    @property
    def has_events(self) -> bool:
        """The server connected last offers `read_events`; False before."""
        return self._life.opened.has_events

    @property
    def order_kind(self) -> OrderKind:
        """The server's choice from `EngineMemory.order`, which `After` must have. HOST without a
        connection or an offer."""
        connection = self._connection
        return connection.order_kind if connection is not None else OrderKind.HOST

    @property
    def order_message(self) -> str:
        """Why the server rejected a kind of `EngineMemory.order`, or empty."""
        connection = self._connection
        return connection.order_message if connection is not None else ""

    def probe(self, group_index: int, hashes: Sequence[bytes]) -> BoolMask | None:
        """Mask of the ready blocks in the mapped block table; None without a connection or a
        table. Makes no call, and takes microseconds. A hint, until a lease pins a block."""
        connection = self._connection
        if connection is None or connection.table is None:
            return None
        packed = pack_quickly(hashes, self._hash_bytes)
        salt = connection.opened.salts[group_index]
        return connection.table.ready(packed, self._hash_bytes, salt)

    def arena(self) -> Arena | None:
        """None without a connection, or if this session may not map it.

        The first call on a connection maps it. Offsets in it come from `LeaseGrant.offsets` and
        `extend_residency`. Raises OSError if it can't be mapped.
        """
        link = None if self._connection is None else self._connection.link
        return None if link is None else link.arena()

    # ------------------------------------------------------------------- calls that touch no memory

    def lookup(
        self, groups: Sequence[GroupHashes], traceparent: str | None = None
    ) -> "Future[tuple[BoolMask, ...]]":
        """Asks which blocks are ready: a mask per entry of `groups`. Sends several messages for
        many hashes.

        traceparent: the caller's span in W3C Trace Context.
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
        """Acquires a read lease on those blocks of `groups` that are ready.

        Blocks in lower tiers are promoted before the answer, within the server's
        `tiers.lookup_wait_ms`. Blocks from before a restart are first compared with their
        checksums. A repeated call with the same `lease_id` and blocks gets the same answer; with
        others it fails as DUPLICATE_ID.

        ttl_s: 0: the server's default.
        traceparent: the caller's span in W3C Trace Context.
        wants_offsets: in `arena()`. Fails as NOT_ALLOWED without one.
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
        """Acquires a write lease. Resolves to an array of `BlockResult` values per run.

        ttl_s: 0: the server's default.
        """
        return self._call(lambda: _wire.reserve(lease_id, runs, ttl_s, retention, self._hash_bytes))

    def release(self, lease_id: str) -> None:
        """Releases a lease.

        Does nothing without a connection: the server has ended the lease.
        """
        self._send_only(_wire.release(lease_id))

    def open_residency(
        self, residency_id: str, num_blocks: Mapping[int, int]
    ) -> "Future[ResidencyOpened]":
        """Reserves room in the arena for a request, also for sketches of the kinds that this
        session declares.

        num_blocks: that the request will need, by group index.

        A repeated call gets the same answer, or may ask for more blocks; if that fails, the
        residency stays as it was. All sessions of the engine can store under the residency. It ends
        with this session.

        Fails as:
        - NO_ROOM_FOR_RESIDENCY: other residencies, leases or pins use the room now.
        - RESIDENCY_TOO_LARGE: the room can never be large enough.
        - NOT_ALLOWED: there is no `arena()`.
        """
        return self._resident(lambda: _wire.open_residency(residency_id, num_blocks))

    def extend_residency(
        self, residency_id: str, group_index: int, first_position: int, hashes: Sequence[bytes]
    ) -> "Future[ResidentBlocks]":
        """Pins those blocks of `hashes` that are ready. Resolves to their offsets in `arena()`, -1
        if not pinned.

        Pinned blocks keep their offset. Blocks from before a restart are first compared with their
        checksums. Fails as UNKNOWN_RESIDENCY if the residency has ended.

        first_position: of the first block among the request's.
        hashes: of consecutive blocks.
        """
        return self._resident(
            lambda: _wire.extend_residency(
                residency_id, group_index, first_position, hashes, self._hash_bytes
            )
        )

    def close_residency(self, residency_id: str) -> None:
        """The caller must not read its blocks in the arena afterwards. Does nothing without a
        connection: the server has ended the residency.
        """
        self._send_only(_wire.close_residency(residency_id))

    def report_use(self, groups: Sequence[GroupHashes]) -> None:
        """Blocks used from the engine's own device cache count as used."""
        for part in split_groups(groups, self._hash_bytes):
            self._send_only(_wire.report_use(part, self._hash_bytes))

    def report_requests(
        self,
        reports: Sequence[RequestReport[Sequence[bytes]]],
        prefill_tokens_per_s: float = 0.0,
        ended: Sequence[EndedRequest[Sequence[bytes]]] = (),
        loads: Sequence[LoadEnd] = (),
    ) -> None:
        """Reports scheduled requests, ended requests and loads that ended since the last report.
        Raises HotKVError for a hash of another length.

        prefill_tokens_per_s: measured by this engine; 0: unknown. Lookups then skip blocks in a
            slow tier that are computed faster than loaded.
        ended: those that named a user session or had hints.
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
        """Creates a sequence.

        hashes: of the context's complete blocks.
        select: how the server selects blocks (`selects`). None: it makes no selections and pins
            nothing; the session only reports (`report_sparse`).
        """
        return self._call(
            lambda: _sparse_wire.create_sequence(
                sequence_id, group_index, hashes, select, self._hash_bytes
            )
        )

    def append_blocks(
        self, sequence_id: str, first_position: int, hashes: Sequence[bytes]
    ) -> "Future[SequenceState]":
        """Appends complete blocks to a sequence.

        first_position: in the context, of the first hash. Hashes at known positions must be equal.

        If the server makes selections, even a call without hashes renews the sequence's lease,
        which pins all blocks that are ready now.
        """
        return self._call(
            lambda: _sparse_wire.append_blocks(
                sequence_id, first_position, hashes, self._hash_bytes
            )
        )

    def report_sparse(
        self, positions: Mapping[str, Int32s], counters: Mapping[int, Mapping[str, float]]
    ) -> None:
        """Reports the sparse decode steps since the last report.

        positions: by sequence id, blocks that a layer selected or added to its hot set, int32; they
            count as used.
        counters: growth by layer and name. Raises HotKVError for a name that is not in
            `SPARSE_COUNTERS`.
        """
        for request in _sparse_wire.report_sparse(positions, counters):
            self._send_only(request)

    def delete_sequence(self, sequence_id: str) -> "Future[bool]":
        """False if it does not exist."""
        return self._call(lambda: _sparse_wire.delete_sequence(sequence_id))

    def read_events(self, most: int = 0, *, begins_state: bool = False) -> "Future[EventsRead]":
        """The next events of the key space; the first list the blocks that are cached now. Fails as
        NOT_ALLOWED unless `has_events`.

        most: 0: the server's limit.
        begins_state: list the cached blocks again. A server that does not know this continues.
        """
        return self._call(lambda: _wire.read_events(most, begins_state=begins_state))

    def flush(self) -> "Future[Flushed]":
        """Resolves to the number of ready blocks that were dropped, of all engines of the key
        space.

        Afterwards no new lease can pin a block from before, and stores in flight get ABORTED;
        also on other nodes that share a tier, but for `Flushed.pending_tiers`. With a shared
        tier a flush takes a second and a half.
        """
        return self._call(_wire.flush)

    def ping(self, timeout_s: float) -> float:
        """Round-trip time of an empty call, in seconds. Blocks at most `timeout_s`. Raises
        HotKVError if the call fails, TimeoutError without an answer."""
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
        *,
        polls: bool = False,
    ) -> "Future[TransferResult]":
        """Copies blocks that the read lease pins into the registered engine memory.

        polls: the caller asks `done`, which then knows a good end before the answer comes, perhaps
            some milliseconds later.
        after: writes only after this mark, from which `timeout_s` counts. None: at once.
        traceparent: the caller's span in W3C Trace Context.
        """
        return self._call(
            lambda: _wire.load(transfer_id, lease_id, runs, timeout_s, after, traceparent),
            transfer_id=transfer_id,
            after=after,
            is_load=True,
            polls=polls,
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
        *,
        polls: bool = False,
    ) -> "Future[TransferResult]":
        """Copies blocks from the registered engine memory into the arena and commits them. A block
        is ready when all ranks' shards are committed.

        The first store under a `lease_id` reserves the slots; other ranks store under the same id.
        Fails as OVERLOADED if all words of the session's own fence are in use. A message that would
        be too large goes without the runs' tokens and extra keys, which their events then lack.

        after: reads only after this mark, from which `timeout_s` counts. None: at once.
        fence_index: the store's word on `EngineMemory.fence`; ignored without it. Raises
            ValueError for a word that stores can't have.
        polls: as of `load`.
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
            run_lengths=tuple(len(run.hashes) for run in runs),
            polls=polls,
        )

    def cancel(self, transfer_id: str) -> None:
        """The transfer has ended when its future resolves. A load's resolves when the server has
        answered. A store is revoked at once, even if the server hangs, and resolves as
        CANCELLED: its blocks were committed before this call, or never are.
        """
        if (connection := self._connection) is not None:
            connection.cancel(transfer_id)

    def revoke_stores(self) -> None:
        """Stores in flight can't commit any more: the engine may overwrite the memory that they
        read. Their futures resolve when the server answers."""
        if (fence := self._life.fence) is not None:
            fence.revoke_all()

    def selects(self) -> Selects:
        """Opens a stream of selections, which the caller must close. Raises SessionLostError
        without a connection."""
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
        run_lengths: tuple[int, ...] = (),
        polls: bool = False,
    ) -> "Future[Any]":
        future: Future[Any] = TransferFuture() if polls else Future()
        connection = self._connection
        why_not: HotKVError | None
        try:
            request = build()
            pending = Pending(
                future, lease_id, transfer_id, fence_index, is_load, run_lengths=run_lengths
            )
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
