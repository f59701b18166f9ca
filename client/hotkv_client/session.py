"""A session with the server: one stream, reopened with back-off whenever it breaks.

Calls return futures and never block. Always true: every future is resolved; a load or store
resolves only when the server can no longer touch the engine's memory for it, be it because it
answered or because it is dead; nothing learnt from one epoch survives into another.
"""

import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from hotkv.errors import HotKVError, Reason, SessionLostError
from hotkv.layout import FENCE_HANDLE
from hotkv.order import OrderKind
from hotkv.retention import NO_RETENTION, Retention
from hotkv.table import BlockTable
from hotkv_client import _sparse_wire, _wire, channels
from hotkv_client.arena import Arena
from hotkv_client.fence import Fence, SharedFence
from hotkv_client.link import Link, descriptor_socket, fetch_ticket
from hotkv_client.selects import Selects
from hotkv_client.types import (
    After,
    BlockRun,
    BoolMask,
    EngineMemory,
    GroupHashes,
    Int32s,
    LayerHotSet,
    LeaseGrant,
    LinkState,
    LoadRun,
    RequestReport,
    SelectConfig,
    SequenceCreated,
    SequenceState,
    SessionConfig,
    TransferResult,
    TransferStatus,
)

log = logging.getLogger(__name__)

MAX_PENDING = 1 << 16
DEVICE_GRACE_S = 1.0
"""How long a device may go on with what a dead server had given it. The kernel closes a dead
process's sockets and devices in no promised order; a server gives a device a few pieces at a time
(`copy.depth`), which take tens of milliseconds.
"""


@dataclass(slots=True)
class _Pending:
    future: "Future[Any]"
    lease_id: str = ""
    transfer_id: str = ""
    """Set for transfers."""
    fence_index: int = 0
    """Set for stores that can be revoked."""
    is_load: bool = False


@dataclass(slots=True)
class _Connection:
    """One life of the stream."""

    channel: grpc.Channel
    outbox: "queue.SimpleQueue[_wire.Request | None]"
    pending: dict[int, _Pending]
    link: Link | None = None
    table: BlockTable | None = None
    call: Any = None
    session_id: str = ""
    protocol_version: int = 0
    salts: tuple[int, ...] = ()
    order_kind: OrderKind = OrderKind.HOST
    order_message: str = ""


class Session:
    """See the module. Thread-safe."""

    def __init__(self, config: SessionConfig, memory: EngineMemory | None = None) -> None:
        self.config = config
        self._memory = memory
        self._fence: Fence | SharedFence | None = (
            None if memory is None else memory.fence or Fence()
        )
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._connection: _Connection | None = None
        self._awaited: grpc.Future[None] | None = None
        self._state = LinkState.ABSENT
        self._epoch = 0
        self._wants_token_ids = False
        self._request_ids = itertools.count(1)
        self._hash_bytes = config.key_space.hash_bytes
        groups = range(len(config.key_space.groups))
        self._salts = (
            *map(config.key_space.group_salt, groups),
            *map(config.key_space.representation_salt, config.representations),
        )
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"hotkv-session-{config.role.name.lower()}", daemon=True
        )

    def __repr__(self) -> str:
        connection = self._connection
        pending = len(connection.pending) if connection else 0
        return (
            f"Session({self.config.target}, {self.config.role.name}, {self._state.value}, "
            f"epoch={self._epoch:#x}, {pending} pending)"
        )

    # Life

    def start(self) -> None:
        """Begins to connect, in the background."""
        self._thread.start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Blocks until connected or the time is up; says which."""
        with self._changed:
            return self._changed.wait_for(lambda: self._state is LinkState.CONNECTED, timeout_s)

    @property
    def state(self) -> LinkState:
        return self._state

    @property
    def connected(self) -> bool:
        return self._state is LinkState.CONNECTED

    @property
    def epoch(self) -> int:
        """Epoch of the cache last connected to; 0 before. It changes whenever the cache was
        lost."""
        return self._epoch

    @property
    def protocol_version(self) -> int:
        """Protocol version of the session; 0 without a connection."""
        connection = self._connection
        return connection.protocol_version if connection is not None else 0

    @property
    def wants_token_ids(self) -> bool:
        """True where the server last connected to publishes events, for which it needs
        `BlockRun.token_ids`; False before."""
        return self._wants_token_ids

    @property
    def order_kind(self) -> OrderKind:
        """How marks of transfers are made (`After`): what the server took of the memory's order.
        HOST without a connection or an order."""
        connection = self._connection
        return connection.order_kind if connection is not None else OrderKind.HOST

    @property
    def order_message(self) -> str:
        """Where the server took less of the memory's order than was offered: why."""
        connection = self._connection
        return connection.order_message if connection is not None else ""

    def close(self) -> None:
        """Ends the session; the server settles its transfers and drops its leases. Blocks until the
        server is done, 5 seconds at most. A fence of the session's own goes with it.
        """
        self._closed.set()
        with self._lock:
            connection, awaited = self._connection, self._awaited
        if connection is not None:
            connection.outbox.put(None)
        if awaited is not None:
            # Without a server the thread would wait for one until its time is up.
            awaited.cancel()
        if self._thread.is_alive():
            self._thread.join(5.0)
        if isinstance(self._fence, Fence) and not self._thread.is_alive():
            # Nobody links or revokes any more: the thread has revoked what was under way.
            self._fence = None
        self._set_state(LinkState.CLOSED, "closed")

    # Calls

    def probe(self, group_index: int, hashes: Sequence[bytes]) -> BoolMask | None:
        """Which blocks are ready, as a hint out of the shared table; None where no table is mapped.
        Microseconds; no call."""
        connection = self._connection
        if connection is None or connection.table is None:
            return None
        packed = b"".join(hashes)
        if len(packed) != len(hashes) * self._hash_bytes:
            raise HotKVError(
                Reason.INVALID_HASH,
                f"hashes do not all have the {self._hash_bytes} bytes of this key space",
            )
        return connection.table.ready(packed, self._hash_bytes, connection.salts[group_index])

    def lookup(self, groups: Sequence[GroupHashes]) -> "Future[tuple[BoolMask, ...]]":
        """Which blocks are ready, by a call."""
        return self._call(lambda: _wire.lookup(groups, self._hash_bytes))

    def arena(self) -> Arena | None:
        """The server's arena, mapped when first asked for, and the same as long as the connection
        lasts; None without a connection, and where this session may not map it.
        `LeaseGrant.offsets` says where leased blocks lie in it. Raises OSError where the system
        refuses.
        """
        connection = self._connection
        return (
            connection.link.arena()
            if connection is not None and connection.link is not None
            else None
        )

    def acquire(
        self,
        lease_id: str,
        groups: Sequence[GroupHashes],
        ttl_s: float = 0,
        *,
        wants_offsets: bool = False,
    ) -> "Future[LeaseGrant]":
        """Pins the ready ones among the blocks; `ttl_s` 0 for the server's default. The same call
        again gets the same answer; the same id with other blocks fails as DUPLICATE_ID.
        `wants_offsets`: also says where they lie in `arena()`, and fails as NOT_ALLOWED if there is
        none; blocks that came back from an earlier server are compared with their check values
        first.
        """
        return self._call(
            lambda: _wire.acquire(
                lease_id, groups, ttl_s, self._hash_bytes, wants_offsets=wants_offsets
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
        """Reserves slots; BlockResult values a run."""
        return self._call(lambda: _wire.reserve(lease_id, runs, ttl_s, retention, self._hash_bytes))

    def release(self, lease_id: str) -> None:
        """Gives a lease back. Nothing to wait for; without a connection the lease is gone
        anyhow."""
        self._send_only(_wire.release(lease_id))

    def load(
        self,
        transfer_id: str,
        lease_id: str,
        runs: Sequence[LoadRun],
        timeout_s: float,
        after: After | None = None,
    ) -> "Future[TransferResult]":
        """Copies leased blocks into the registered memory. `after`: nothing is written before;
        `timeout_s` counts from there."""
        return self._call(
            lambda: _wire.load(transfer_id, lease_id, runs, timeout_s, after),
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
        retention: Retention = NO_RETENTION,
        after: After | None = None,
        fence_index: int = 0,
    ) -> "Future[TransferResult]":
        """Copies blocks out of the registered memory and commits them. The first store under a
        lease id reserves, and its `retention` counts; other ranks join. `after`: nothing is read
        before; `timeout_s` counts from there. `fence_index`: where the memory came with a fence,
        the word that revokes this store, and ValueError without one; else not looked at.
        """
        connection, fence = self._connection, self._fence
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
                retention,
                fence_index,
                self._hash_bytes,
                after,
            ),
            transfer_id=transfer_id,
            fence_index=fence_index,
            after=after,
        )

    def cancel(self, transfer_id: str) -> None:
        """Ends a transfer early; its future's resolving is the acknowledgement.

        A store is revoked and resolves at once, as CANCELLED and without results, whatever the
        server is doing: its blocks were committed before, or never will be. A load resolves when
        the server has stopped writing.
        """
        revoked: Future[TransferResult] | None = None
        with self._lock:
            pending = self._connection.pending if self._connection is not None else {}
            for item in pending.values():
                if item.transfer_id == transfer_id and item.fence_index and self._fence is not None:
                    self._fence.revoke(item.fence_index)
                    revoked, item.future = item.future, Future()
        self._send_only(_wire.cancel(transfer_id))
        if revoked is not None:
            revoked.set_result(
                TransferResult(
                    transfer_id, TransferStatus.CANCELLED, message="revoked by the engine"
                )
            )

    def revoke_stores(self) -> None:
        """Revokes all stores under way at once: when this returns, their blocks may be overwritten.
        Their futures end with the server's answers. Raises SessionLostError if there is one that
        can't be revoked; only `close` ends that.
        """
        fence = self._fence
        if fence is not None:
            fence.revoke_all()
        with self._lock:
            pending = (
                list(self._connection.pending.values()) if self._connection is not None else []
            )
        if any(item.transfer_id and not item.is_load and not item.fence_index for item in pending):
            raise SessionLostError("a store is under way that has no word of the fence")

    def report_use(self, groups: Sequence[GroupHashes]) -> None:
        """Tells the server which blocks the engine used from its own device cache."""
        self._send_only(_wire.report_use(groups, self._hash_bytes))

    def report_requests(self, reports: Sequence[RequestReport]) -> None:
        """Tells the server of scheduled requests: what they used from the device cache, and how
        long to keep their blocks. Nothing to wait for. Raises HotKVError for hashes of another
        length.
        """
        self._send_only(_wire.report_requests(reports, self._hash_bytes))

    # Sparse decode. Sequence ids are the caller's choice, unique in the session; all sequences are
    # gone when the link breaks.

    def create_sequence(
        self,
        sequence_id: str,
        group_index: int,
        hashes: Sequence[bytes],
        select: SelectConfig | None = None,
    ) -> "Future[SequenceCreated]":
        """Begins a sequence over the complete blocks `hashes` of its context; with `select` the
        server selects for it (`selects`).

        Without, nothing is pinned: reports name the sequence, and remembered hot sets are handed
        out.
        """
        return self._call(
            lambda: _sparse_wire.create_sequence(
                sequence_id, group_index, hashes, select, self._hash_bytes
            )
        )

    def append_blocks(
        self, sequence_id: str, first_position: int, hashes: Sequence[bytes]
    ) -> "Future[SequenceState]":
        """Adds blocks that have become complete, the first of them at `first_position` of the
        context; those that the sequence has already must be the same. Where the server selects, it
        leases anew what is ready now, also where `hashes` is empty.
        """
        return self._call(
            lambda: _sparse_wire.append_blocks(
                sequence_id, first_position, hashes, self._hash_bytes
            )
        )

    def report_sparse(
        self, positions: Mapping[str, Int32s], counters: Mapping[int, Mapping[str, float]]
    ) -> None:
        """Tells the server what sparse decode did since the report before; nothing to wait for.

        `positions`: by sequence id, int32 positions of blocks that were selected or joined a hot
        set in any layer; they count as used. `counters`: by layer, growth of counters by the names
        of `SPARSE_COUNTERS`; raises HotKVError for others.
        """
        self._send_only(_sparse_wire.report_sparse(positions, counters))

    def delete_sequence(
        self, sequence_id: str, hot_sets: Sequence[LayerHotSet] = ()
    ) -> "Future[bool]":
        """Ends a sequence; its hot sets are remembered for the next one over the same prefix. False
        where there was none."""
        return self._call(lambda: _sparse_wire.delete_sequence(sequence_id, hot_sets))

    def selects(self) -> Selects:
        """Opens a stream of selections by the server; close it. Raises SessionLostError without a
        connection."""
        connection = self._connection
        if connection is None or not connection.session_id:
            raise SessionLostError(f"no server at {self.config.target} ({self._state.value})")
        return Selects(connection.channel, connection.session_id)

    def flush(self) -> "Future[int]":
        """Forgets every block of this session's key space, whoever stored it; gives how many were
        ready.

        Once resolved, no lookup finds a block from before, and what was being stored is refused as
        ABORTED.
        """
        return self._call(_wire.flush)

    def ping(self, timeout_s: float) -> float:
        """Seconds of a round trip. Raises HotKVError or TimeoutError."""
        start_s = time.perf_counter()
        self._call(_wire.ping).result(timeout_s)
        return time.perf_counter() - start_s

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
        try:
            request = build()
        except HotKVError as error:
            self._give_back(fence_index)
            future.set_exception(error)
            return future
        request_id = next(self._request_ids)
        request.request_id = request_id
        with self._lock:
            connection = self._connection
            fits = connection is not None and (after is None or connection.order_kind is after.kind)
            fits &= not fence_index or (connection is not None and connection.link is not None)
            if (
                connection is not None
                and self._state is LinkState.CONNECTED
                and len(connection.pending) < MAX_PENDING
                and fits
            ):
                connection.pending[request_id] = _Pending(
                    future, lease_id, transfer_id, fence_index, is_load
                )
                connection.outbox.put(request)
                return future
        self._give_back(fence_index)
        if connection is not None and self._state is LinkState.CONNECTED and not fits:
            future.set_exception(
                SessionLostError(
                    "the link has changed, and does not take this mark or fence; mark anew"
                )
            )
        elif connection is not None and self._state is LinkState.CONNECTED:
            future.set_exception(
                HotKVError(Reason.OVERLOADED, f"{MAX_PENDING} calls are unanswered; wait for some")
            )
        else:
            future.set_exception(
                SessionLostError(f"no server at {self.config.target} ({self._state.value})")
            )
        return future

    def _give_back(self, fence_index: int) -> None:
        fence = self._fence
        if fence is not None:
            fence.give_back(fence_index)

    def _send_only(self, request: _wire.Request) -> None:
        connection = self._connection
        if connection is not None and self._state in (LinkState.CONNECTED, LinkState.DRAINING):
            connection.outbox.put(request)

    # The session's thread

    def _run(self) -> None:
        delay_s = self.config.reconnect_initial_s
        while not self._closed.is_set():
            started_s = time.monotonic()
            try:
                reason = self._connect_and_serve()
            except (HotKVError, OSError, ValueError) as error:
                reason = str(error)
            if self._closed.is_set():
                return
            self._set_state(LinkState.ABSENT, reason)
            if time.monotonic() - started_s > 2 * self.config.reconnect_max_s:
                delay_s = self.config.reconnect_initial_s
            self._closed.wait(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, self.config.reconnect_max_s)

    def _connect_and_serve(self) -> str:
        """One life of the stream; returns why it ended."""
        outbox: queue.SimpleQueue[_wire.Request | None] = queue.SimpleQueue()
        metadata = channels.metadata(self.config.target, self.config.credentials)
        connection = _Connection(
            channels.open_channel(self.config.target, self.config.credentials), outbox, {}
        )
        why_no_ticket = ""
        try:
            try:
                self._await_server(connection.channel)
            except grpc.FutureCancelledError:
                return "closed"
            except grpc.FutureTimeoutError:
                return (
                    f"no server answers at {self.config.target}, or it and this client do not "
                    "accept each other's TLS certificates"
                )
            ticket, why_no_ticket = self._ticket()
            outbox.put(_wire.open_session(self.config, ticket))
            connection.call = _wire.connect(connection.channel, iter(outbox.get, None), metadata)
            watchdog = threading.Timer(self.config.connect_timeout_s, connection.call.cancel)
            watchdog.daemon = True
            watchdog.start()
            try:
                self._handshake(connection)
            finally:
                watchdog.cancel()
            with self._lock:
                self._connection = connection
            self._set_state(LinkState.CONNECTED, f"connected to {self.config.target}")
            if self._closed.is_set():
                outbox.put(None)
            for response in connection.call:
                self._receive(connection, response)
            return "the server closed the session"
        except grpc.RpcError as error:
            refusal = _wire.as_error(error)
            if refusal.reason is Reason.UNAUTHENTICATED and why_no_ticket:
                return f"{refusal} (no ticket: {why_no_ticket})"
            return str(refusal)
        finally:
            self._lose(connection)

    def _await_server(self, channel: grpc.Channel) -> None:
        """Blocks until a server answers. Raises grpc.FutureTimeoutError when the time is up,
        grpc.FutureCancelledError after `close`."""
        ready = grpc.channel_ready_future(channel)
        with self._lock:
            self._awaited = ready
        # `close` sets the event before it looks for what to cancel.
        if self._closed.is_set():
            ready.cancel()
        try:
            ready.result(self.config.connect_timeout_s)
        finally:
            with self._lock:
                self._awaited = None

    def _ticket(self) -> tuple[bytes, str]:
        """The proof of this process's user, and why there is none. A server without tenants needs
        none, so that is no failure yet."""
        path = descriptor_socket(self.config.target)
        if path is None:
            return b"", ""
        try:
            return fetch_ticket(path, self.config.connect_timeout_s), ""
        except (HotKVError, OSError) as error:
            return b"", str(error)

    def _handshake(self, connection: _Connection) -> None:
        """Opens the session, links, and registers memory."""
        opened = _wire.opened(next(connection.call, None))
        connection.session_id = opened.session_id
        connection.protocol_version = opened.protocol_version
        connection.salts = opened.salts or self._salts
        path = descriptor_socket(self.config.target) if opened.has_descriptor_socket else None
        if path is None and self._memory is not None and self._memory.is_on_devices:
            raise SessionLostError(
                "memory of devices needs a unix: target: without the link nothing tells when a "
                "dead server has let go of it"
            )
        if path is not None and (self.config.use_table or self._memory is not None):
            fds = (
                {}
                if self._memory is None or self._fence is None
                else {**self._memory.fds, FENCE_HANDLE: self._fence.fd}
            )
            connection.link = Link(path, opened.session_id, fds, self.config.connect_timeout_s)
            connection.table = connection.link.table if self.config.use_table else None
        if self._memory is not None:
            request = _wire.register_memory(self._memory.layout, self._memory.order)
            request.request_id = next(self._request_ids)
            connection.outbox.put(request)
            for response in connection.call:
                if response.request_id == request.request_id:
                    connection.order_kind, connection.order_message = _wire.result(response)
                    break
        self._epoch = opened.epoch
        self._wants_token_ids = opened.wants_token_ids

    def _receive(self, connection: _Connection, response: _wire.Response) -> None:
        if response.request_id == 0:
            self._notice(response)
            return
        with self._lock:
            waiting = connection.pending.pop(response.request_id, None)
        if waiting is None:
            return
        self._give_back(waiting.fence_index)
        try:
            value = _wire.result(response, waiting.lease_id)
        except HotKVError as error:
            waiting.future.set_exception(error)
        else:
            waiting.future.set_result(value)

    def _notice(self, response: _wire.Response) -> None:
        match response.WhichOneof("body"):
            case "eviction_notice":
                if self.config.on_evicted is not None:
                    self.config.on_evicted(_wire.evicted(response, self._hash_bytes))
            case "drain_notice":
                self._set_state(LinkState.DRAINING, "the server is draining")

    def _lose(self, connection: _Connection) -> None:
        """The stream has ended: fail what waits; loads, and stores that can't be revoked, only when
        the server can't touch our memory."""
        with self._lock:
            if self._connection is connection:
                self._connection = None
            if self._state in (LinkState.CONNECTED, LinkState.DRAINING):
                self._state = LinkState.ABSENT
            waiting = list(connection.pending.values())
            connection.pending.clear()
        connection.outbox.put(None)
        connection.channel.close()
        lost = SessionLostError("the link to the server broke")
        for item in waiting:
            if item.fence_index and self._fence is not None:
                # The server may live, and not know yet: nobody here could take these blocks back
                # any more.
                self._fence.revoke(item.fence_index)
                told, item.future = item.future, Future()
                told.set_exception(lost)
            elif not item.transfer_id:
                item.future.set_exception(lost)
        transfers = [item for item in waiting if item.transfer_id]
        if connection.link is None:
            self._fail(transfers, lost)
        elif transfers:
            threading.Thread(
                target=self._settle,
                args=(connection.link, transfers, lost),
                name="hotkv-settle",
                daemon=True,
            ).start()
        else:
            connection.link.close()

    def _settle(self, link: Link, transfers: list[_Pending], lost: SessionLostError) -> None:
        link.wait_closed()
        loads = (
            [item for item in transfers if item.is_load]
            if self._memory is not None and self._memory.is_on_devices
            else []
        )
        self._fail([item for item in transfers if item not in loads], lost)
        if loads:
            _await_devices()
            self._fail(loads, lost)

    def _fail(self, transfers: list[_Pending], lost: SessionLostError) -> None:
        for item in transfers:
            self._give_back(item.fence_index)
            item.future.set_exception(lost)

    def _set_state(self, state: LinkState, reason: str) -> None:
        with self._changed:
            if self._state is LinkState.CLOSED or (
                self._state is state and state is not LinkState.ABSENT
            ):
                return
            self._state = state
            self._changed.notify_all()
        if self.config.on_state is not None:
            self.config.on_state(state, reason)


def _await_devices() -> None:
    """Returns when no device works any more for a server that is dead."""
    time.sleep(DEVICE_GRACE_S)
