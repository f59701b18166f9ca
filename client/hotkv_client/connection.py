"""A connection of a session: one gRPC stream, from its opening to the end of its last transfer.

It owns the channel, the link, the mapped block table, and every call that waits for its answer.
Each call is resolved once, by the answer with its `request_id`. An answer that can't be read fails
only its own call.

If the stream breaks, waiting calls fail:
- Calls that touch no engine memory at once.
- A store at once, after it was revoked through its word of the fence.
- A load only when the server can no longer touch the engine's memory.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import numpy as np

from hotkv_client import channels, streams
from hotkv_client.ends import Ends, TransferFuture
from hotkv_client.fence import Fence, SharedFence
from hotkv_client.link import Link, pass_backings
from hotkv_client.targets import descriptor_socket
from hotkv_client.types import (
    After,
    EngineMemory,
    SessionConfig,
    TransferResult,
    TransferStatus,
)
from hotkv_client.wire import answers as _answers
from hotkv_client.wire import call_messages as _wire
from hotkv_client.wire import sparse as _sparse_wire
from hotkv_proto.blocks import BlockResult
from hotkv_proto.errors import HotKVError, Reason, SessionLostError
from hotkv_proto.layout import ENDS_HANDLE, FENCE_HANDLE
from hotkv_proto.order import OrderKind
from hotkv_proto.table import BlockTable
from hotkv_proto.versions import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

MAX_PENDING = 1 << 16
MAX_UNSENT = 1 << 14
"""Requests in the outbox that were not sent. Beyond, the server must be hanging, even if its
system answers gRPC's pings: `send_only` ends the stream, so that the outbox does not fill the
engine's memory. Calls with an answer don't count; MAX_PENDING limits them."""
REQUEST_ID_BYTES = 16
"""Upper bound of what `request_id` adds to a message."""
REGISTERED_BYTES_PER_S = 256 << 20
"""Lowest speed at which a server maps an engine's files. The time limit for opening a session
grows accordingly."""
BACKING_S = 0.01
"""Longest time in which a server maps a backing of a range; likewise."""
DEVICE_GRACE_S = 1.0
"""Wait after a server's death before loads into device memory fail.

The kernel closes a dead process's sockets and devices in any order, so its copies on the device
may still run. They take tens of milliseconds: a server has at most `copy.depth` pieces in flight
on a device.
"""


@dataclass(slots=True)
class Pending:
    """A call that waits for its answer.

    lease_id: of an `acquire`.
    transfer_id: of a load or store.
    fence_index: of a store's word on the fence; 0 without a link and for other calls.
    end_index: of a transfer's word on the page of ends; 0 for none.
    run_lengths: blocks of each run of a store.
    call: a field of `ConnectRequest.body`, set when the call is sent.
    """

    future: "Future[Any]"
    lease_id: str = ""
    transfer_id: str = ""
    fence_index: int = 0
    is_load: bool = False
    end_index: int = 0
    run_lengths: tuple[int, ...] = ()
    call: str = ""


class Connection:
    """Thread-safe once `open` has returned.

    link: None for a TCP target or if it is not needed.
    table: None without a link, or if the session does not use it.
    order_kind: the server's choice of marks for this connection.
    order_message: why it rejected a kind that the memory's `order` offers, or empty.
    """

    def __init__(
        self,
        config: SessionConfig,
        memory: EngineMemory | None,
        fence: Fence | SharedFence | None,
    ) -> None:
        """Opens the channel. Raises HotKVError for credentials that can't be used.

        memory, fence: None for a session without memory.
        """
        self._config = config
        self._memory = memory
        self._fence = fence
        self.stream = streams.open_stream(config)
        self._channel: grpc.Channel | None = None
        self._lock = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._request_ids = itertools.count(1)
        self._has_ended = False
        self._is_given_up = False
        self.link: Link | None = None
        self.table: BlockTable | None = None
        self._ends: Ends | None = None
        self.responses: Iterator[_answers.Response] = iter(())
        self.opened = _answers.NOT_OPENED
        self.order_kind = OrderKind.HOST
        self.order_message = ""

    @property
    def session_id(self) -> str:
        return self.opened.session_id

    @property
    def selecting(self) -> _sparse_wire.Stub:
        """Of selections, on a gRPC channel that the first use opens."""
        with self._lock:
            if self._channel is None:
                self._channel = channels.open_channel(self._config.target, self._config.credentials)
            return _sparse_wire.Stub(self._channel)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def open(self, ticket: bytes) -> None:
        """Opens the session and the link, and registers the memory. Blocks.

        Raises HotKVError if the server refuses, the stream breaks or all takes longer than
        `_opening_timeout_s`; OSError if the link fails; ValueError if the block table has another
        format.
        """
        self.stream.begin(_wire.open_session(self._config, ticket))
        watchdog = threading.Timer(self._opening_timeout_s(), self.stream.cancel)
        watchdog.daemon = True
        watchdog.start()
        try:
            self.responses = iter(self.stream)
            self.opened = _answers.opened(next(self.responses, None))
            self._link()
            self._register()
        finally:
            watchdog.cancel()

    def _opening_timeout_s(self) -> float:
        """Includes the time that the server may need to map the engine's memory."""
        handles = () if self._memory is None else self._memory.layout.handles
        num_bytes = sum(one.base_offset_bytes + one.num_bytes for one in handles if not one.is_cuda)
        mapping_s = BACKING_S * sum(len(one.backings) for one in handles)
        return self._config.connect_timeout_s + mapping_s + num_bytes / REGISTERED_BYTES_PER_S

    def _link(self) -> None:
        config, memory = self._config, self._memory
        path = descriptor_socket(config.target) if self.opened.has_descriptor_socket else None
        if path is None:
            if memory is not None and memory.is_on_devices:
                raise SessionLostError(
                    "memory of devices needs a unix: target: without the link nothing tells when a "
                    "dead server has let go of it"
                )
            return
        if not config.use_table and memory is None:
            return
        fds: dict[str, int] = {}
        if memory is not None and self._fence is not None:
            named = frozenset(memory.layout.backing_ids)
            backings = {one: fd for one, fd in memory.fds.items() if one in named}
            if backings and not self.opened.has_ranges:
                raise SessionLostError(
                    "this server is too old to map CUDA's virtual memory (expandable segments, "
                    "cumem); upgrade it"
                )
            pass_backings(path, self.session_id, backings, config.connect_timeout_s)
            files = {one: fd for one, fd in memory.fds.items() if one not in backings}
            fds = {**files, FENCE_HANDLE: self._fence.fd}
        if memory is not None and self.opened.has_end_words:
            self._ends = Ends()
            fds[ENDS_HANDLE] = self._ends.fd
        self.link = Link(path, self.session_id, fds, config.connect_timeout_s)
        self.table = self.link.table if config.use_table else None

    def _register(self) -> None:
        if self._memory is None:
            return
        request = _wire.register_memory(self._memory.layout, self._memory.order)
        request.request_id = next(self._request_ids)
        self.stream.put(request)
        notices: list[_answers.Response] = []
        for response in self.responses:
            if response.request_id == request.request_id:
                self.order_kind, self.order_message = _answers.result(
                    response, "register_memory", self._config.key_space.hash_bytes
                )
                break
            notices.append(response)
        else:
            raise SessionLostError(
                "the server ended the session before it had registered the memory"
            )
        self.responses = itertools.chain(notices, self.responses)

    def submit(
        self, request: _wire.Request, pending: Pending, after: After | None
    ) -> HotKVError | None:
        """Sends a request. Returns None, or the error without changing `pending`.

        OVERLOADED if MAX_PENDING calls are unanswered, or if a store has no word on the fence and
        so could not be revoked. SessionLostError if the mark `after` is not of this connection's
        `order_kind`.

        after: None: the transfer may begin at once.
        """
        if (too_large := _too_large(request)) is not None:
            return too_large
        with self._lock:
            if self._has_ended:
                return SessionLostError("the link to the server broke")
            if (after is not None and self.order_kind is not after.kind) or (
                pending.fence_index and self.link is None
            ):
                return SessionLostError(
                    "the link has changed, and does not take this mark or fence; mark anew"
                )
            is_store = pending.transfer_id and not pending.is_load
            if is_store and self._fence is not None and self.link and not pending.fence_index:
                return HotKVError(
                    Reason.OVERLOADED,
                    "the store has no word of the fence that could revoke it; wait for some stores",
                )
            if len(self._pending) >= MAX_PENDING:
                return HotKVError(
                    Reason.OVERLOADED, f"{MAX_PENDING} calls are unanswered; wait for some"
                )
            request.request_id = next(self._request_ids)
            pending.call = request.WhichOneof("body") or ""
            # A running future can't be cancelled: resolving a cancelled one raises.
            pending.future.set_running_or_notify_cancel()
            if self._ends is not None and isinstance(pending.future, TransferFuture):
                pending.end_index = self._ends.take()
                transfer = request.load if pending.is_load else request.store
                transfer.end_index = pending.end_index
                if pending.end_index:
                    pending.future.look = partial(self._look, request.request_id, pending)
            self._pending[request.request_id] = pending
            self.stream.put(request)
            return None

    def _look(self, request_id: int, pending: Pending) -> None:
        """Resolves a transfer whose word says that it is done. Its answer is still to come."""
        with self._lock:
            if self._ends is None or self._pending.get(request_id) is not pending:
                return
            num_bytes = self._ends.done_bytes(pending.end_index)
            if num_bytes is None:
                return
            told, pending.future = pending.future, Future()
        _resolve_done(told, pending, num_bytes)

    def send_only(self, request: _wire.Request) -> None:
        """Sends a request that has no answer. One that is too large is dropped with a warning.
        Beyond MAX_UNSENT ends the stream."""
        if (too_large := _too_large(request)) is not None:
            log.warning("not sent: %s", too_large.message)
        elif self.stream.num_unsent - len(self._pending) < MAX_UNSENT:
            self.stream.put(request)
        elif not self._is_given_up:
            self._is_given_up = True
            log.warning("the server has left %d requests unread; the session ends", MAX_UNSENT)
            self.stream.cancel()

    def serve(self, on_notice: Callable[[_answers.Response], None]) -> None:
        """Resolves calls until the server ends the stream. Blocks. Raises HotKVError if it
        breaks.

        on_notice: gets each message that answers no call.
        """
        for response in self.responses:
            if response.request_id:
                self._answered(response)
            else:
                on_notice(response)

    def _answered(self, response: _answers.Response) -> None:
        with self._lock:
            waiting = self._pending.pop(response.request_id, None)
            if waiting is not None and self._ends is not None:
                self._ends.give_back(waiting.end_index)
        if waiting is None:
            return
        self._give_back(waiting.fence_index)
        try:
            value = _answers.result(
                response, waiting.call, self._config.key_space.hash_bytes, waiting.lease_id
            )
        except HotKVError as error:
            waiting.future.set_exception(error)
        except Exception as error:  # noqa: BLE001 The edge of the client's stream: every answer ends its call.
            why = f"the answer to {waiting.call} can't be read: {type(error).__name__}: {error}"
            waiting.future.set_exception(HotKVError(Reason.INTERNAL, why))
        else:
            waiting.future.set_result(value)

    def cancel(self, transfer_id: str) -> None:
        """Asks the server to end a transfer, which has ended when the server has answered. A
        store with a word on the fence is revoked, and resolves as CANCELLED, at once."""
        revoked: list[Future[TransferResult]] = []
        with self._lock:
            for item in self._pending.values():
                if item.transfer_id == transfer_id and item.fence_index and self._fence is not None:
                    self._fence.revoke(item.fence_index)
                    revoked.append(item.future)
                    item.future = Future()
        self.stream.put(_wire.cancel(transfer_id))
        for future in revoked:
            future.set_result(
                TransferResult(
                    transfer_id, TransferStatus.CANCELLED, message="revoked by the engine"
                )
            )

    def end(self) -> None:
        """Closes the stream and fails the waiting calls: at once those that touch no engine
        memory and stores that can be revoked; others when the server has closed the link or is
        dead, for which a thread waits, or at once without a link."""
        with self._lock:
            self._has_ended = True
            waiting = list(self._pending.values())
            self._pending.clear()
            done = self._take_done(waiting)
        for future, item, num_bytes in done:
            _resolve_done(future, item, num_bytes)
        self.stream.close()
        if self._channel is not None:
            self._channel.close()
        lost = SessionLostError("the link to the server broke")
        for item in waiting:
            if item.fence_index and self._fence is not None:
                # The server may not know that the stream broke, and could still commit. This is
                # the last chance to revoke the store.
                self._fence.revoke(item.fence_index)
                told, item.future = item.future, Future()
                told.set_exception(lost)
            elif not item.transfer_id:
                item.future.set_exception(lost)
        transfers = [item for item in waiting if item.transfer_id]
        if self.link is None:
            self._fail(transfers, lost)
        elif transfers:
            arguments = (self.link, transfers, lost)
            thread = threading.Thread(
                target=self._settle, args=arguments, name="hotkv-settle", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                # Waits in this thread, before the next connection.
                self._settle(*arguments)
        else:
            self.link.close()

    def _take_done(
        self, waiting: list[Pending]
    ) -> "list[tuple[Future[TransferResult], Pending, int]]":
        """Transfers that were done before the link broke, and closes the page. Call with the lock
        held."""
        ends, self._ends = self._ends, None
        found = list[tuple[Future[TransferResult], Pending, int]]()
        if ends is None:
            return found
        for item in waiting:
            num_bytes = ends.done_bytes(item.end_index) if item.end_index else None
            if num_bytes is not None:
                found.append((item.future, item, num_bytes))
                item.future = Future()
        ends.close()
        return found

    def _settle(self, link: Link, transfers: list[Pending], lost: SessionLostError) -> None:
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

    def _fail(self, transfers: list[Pending], lost: SessionLostError) -> None:
        for item in transfers:
            self._give_back(item.fence_index)
            item.future.set_exception(lost)

    def _give_back(self, fence_index: int) -> None:
        if self._fence is not None:
            self._fence.give_back(fence_index)


def _too_large(request: _wire.Request) -> HotKVError | None:
    """gRPC would end the whole stream at a message that is too large."""
    num_bytes = request.ByteSize() + REQUEST_ID_BYTES
    if num_bytes <= MAX_MESSAGE_BYTES:
        return None
    return HotKVError(
        Reason.TOO_LARGE,
        f"{request.WhichOneof('body')} has {num_bytes} bytes; a message has at most "
        f"{MAX_MESSAGE_BYTES}: ask for fewer blocks in a call",
    )


def _resolve_done(future: "Future[TransferResult]", item: Pending, num_bytes: int) -> None:
    results = tuple(np.full(n, BlockResult.STORED, np.uint8) for n in item.run_lengths)
    future.set_result(TransferResult(item.transfer_id, TransferStatus.DONE, num_bytes, results))


def _await_devices() -> None:
    time.sleep(DEVICE_GRACE_S)
