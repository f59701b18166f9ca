"""A test double of `hotkv_client.Session` over a `FakeServer` in the same process. A future
resolves at once, unless an attribute of the server (such as `hold`) delays it.

Always true: a call is recorded in `FakeServer.calls` before its future resolves. A store commits
nothing if its session is closed or has called `revoke_stores`.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from hotkv_client.fence import SharedFence
from hotkv_client.types import (
    After,
    BlockRun,
    EndedRequest,
    Flushed,
    GroupHashes,
    Int32s,
    LeaseGrant,
    LinkState,
    LoadEnd,
    LoadRun,
    RequestReport,
    ResidentBlocks,
    Role,
    SelectConfig,
    SequenceCreated,
    SequenceState,
    SessionConfig,
    TransferResult,
    TransferStatus,
)
from hotkv_proto.blocks import NO_OPTIONS, StoreOptions
from hotkv_proto.errors import HotKVError, Reason, SessionLostError
from hotkv_proto.keys import Sketch
from hotkv_proto.layout import Layout
from hotkv_proto.order import NO_ORDER, DeviceOrder, OrderKind
from tests.doubles.fake_books import FakeArena, FakeMemory, FakeStore, WriteRun

if TYPE_CHECKING:
    from tests.doubles.fake import FakeServer


def resolve(future: Future[Any], act: Callable[[], Any], cancelled: bool) -> None:
    """Sets the result or error of `act`, or CANCELLED without calling it."""
    try:
        future.set_result(TransferResult("", TransferStatus.CANCELLED) if cancelled else act())
    except HotKVError as error:
        future.set_exception(error)


RUBBISH = b"\x5a"


class FakeSession:
    """layout: None: a session without memory."""

    def __init__(
        self,
        server: "FakeServer",
        config: SessionConfig,
        layout: Layout | None,
        fds: dict[str, int],
        order: DeviceOrder = NO_ORDER,
        fence: SharedFence | None = None,
    ) -> None:
        self.server = server
        self.config = config
        self.layout = layout
        self.memory = FakeMemory(config, layout, fds)
        self.space = config.key_space.fingerprint
        self.closed = False
        self.order = order
        self.order_message = ""
        self.fence = fence
        self._revocable: dict[str, tuple[int, Future[Any]]] = {}
        self.num_revocations = 0

    @property
    def epoch(self) -> int:
        return self.server.epoch

    @property
    def has_tiers(self) -> bool:
        return self.server.has_tiers

    @property
    def wants_token_ids(self) -> bool:
        return self.server.wants_token_ids

    @property
    def stored_bytes(self) -> int:
        """Not counted."""
        return 0

    @property
    def has_events(self) -> bool:
        return False

    def start(self) -> None:
        self.tell(
            LinkState.CONNECTED if self.connected else LinkState.ABSENT,
            self._refused or self.server.why_absent,
        )

    def tell(self, state: LinkState, why: str) -> None:
        if self.config.on_state is not None and not self.closed:
            self.config.on_state(state, why)

    def wait_connected(self, timeout_s: float) -> bool:
        return self.connected

    def wait_opened(self, timeout_s: float) -> bool:
        return self.connected

    @property
    def connected(self) -> bool:
        return self.server.up and not self.closed and not self._refused

    @property
    def _refused(self) -> str:
        return self.server.refuse_workers if self.layout is not None else ""

    @property
    def order_kind(self) -> OrderKind:
        return self.server.order_kind

    def probe(self, group_index: int, hashes: Sequence[bytes]) -> Any:
        self.server.calls.append(("probe", len(hashes)))
        if not self.connected or not self.server.table or self.config.role is not Role.SCHEDULER:
            return None
        return self._ready(group_index, hashes)

    def _ready(self, group_index: int, hashes: Sequence[bytes]) -> Any:
        return np.array(
            [self.server.ready(self.space, self.memory.number(group_index), h) for h in hashes],
            np.bool_,
        )

    def lookup(self, groups: Sequence[GroupHashes], traceparent: str | None = None) -> Future[Any]:
        def act() -> Any:
            return tuple(self._ready(g.group_index, g.hashes) for g in groups)

        return self._call("lookup", "", groups, act)

    def acquire(
        self,
        lease_id: str,
        groups: Sequence[GroupHashes],
        ttl_s: float = 0,
        traceparent: str | None = None,
    ) -> Future[Any]:
        def act() -> Any:
            asked = [(g.group_index, list(g.hashes)) for g in groups]
            if (
                lease_id in self.server.leases
                or (self.config.engine_id, lease_id) in self.server.writes.leases
            ):
                if self.server.leases.get(lease_id) != asked:
                    raise HotKVError(
                        Reason.DUPLICATE_ID,
                        f"lease_id {lease_id!r} is in use for another call; choose a new id",
                    )
                return self.server.grants[lease_id]
            left = self.server.grant_limit
            pinned = []
            for group in groups:
                mask = self._ready(group.group_index, group.hashes)
                mask[max(0, left) :] = False
                left -= len(mask)
                pinned.append(mask)
            self.server.leases[lease_id] = asked
            self.server.grants[lease_id] = LeaseGrant(lease_id, tuple(pinned), ttl_s or 30.0)
            return self.server.grants[lease_id]

        return self._call("acquire", lease_id, groups, act)

    def release(self, lease_id: str) -> None:
        self.server.released.append(lease_id)
        self.server.leases.pop(lease_id, None)

    def report_requests(
        self,
        reports: Sequence[RequestReport[Sequence[bytes]]],
        prefill_tokens_per_s: float = 0.0,
        ended: Sequence[EndedRequest[Sequence[bytes]]] = (),
        loads: Sequence[LoadEnd] = (),
    ) -> None:
        self.server.calls.append(("report_requests", list(reports)))
        if ended:
            self.server.calls.append(("ended", list(ended)))
        self.server.load_ends.extend(loads)
        self.server.prefill_tokens_per_s = prefill_tokens_per_s

    def open_residency(self, residency_id: str, num_blocks: Mapping[int, int]) -> Future[Any]:
        def act() -> Any:
            name = (self.config.engine_id, residency_id)
            return self.server.residencies.add(name, dict(num_blocks))

        return self._call("open_residency", residency_id, dict(num_blocks), act)

    def extend_residency(
        self, residency_id: str, group_index: int, first_position: int, hashes: Sequence[bytes]
    ) -> Future[Any]:
        def act() -> Any:
            number = self.memory.number(group_index)
            blocks = [self.server.blocks.get((self.space, number, h)) for h in hashes]
            name = (self.config.engine_id, residency_id)
            found = self.server.residencies.extend(
                name, group_index, first_position, hashes, blocks
            )
            return ResidentBlocks(found, np.full(len(found), -1, np.int64))

        return self._call("extend_residency", residency_id, (first_position, list(hashes)), act)

    def close_residency(self, residency_id: str) -> None:
        self.server.calls.append(("close_residency", residency_id))
        if self.connected:
            self.server.residencies.close((self.config.engine_id, residency_id))

    def arena(self) -> FakeArena | None:
        return self.server.residencies.arena if self.connected else None

    def create_sequence(
        self,
        sequence_id: str,
        group_index: int,
        hashes: Sequence[bytes],
        select: SelectConfig | None = None,
    ) -> Future[Any]:
        """Makes no selections."""

        def act() -> SequenceCreated:
            self.server.sequences[id(self), sequence_id] = (self.space, group_index, list(hashes))
            return SequenceCreated("", 0)

        return self._call("create_sequence", sequence_id, (group_index, list(hashes)), act)

    def append_blocks(
        self, sequence_id: str, first_position: int, hashes: Sequence[bytes]
    ) -> Future[Any]:
        def act() -> SequenceState:
            if (id(self), sequence_id) not in self.server.sequences:
                raise HotKVError(
                    Reason.INVALID_FIELD,
                    f"sequence_id {sequence_id!r} is unknown in this session; create it first",
                )
            blocks = self.server.sequences[id(self), sequence_id][2]
            blocks[first_position:] = [*hashes, *blocks[first_position + len(hashes) :]]
            return SequenceState(len(blocks), "", 0)

        return self._call("append_blocks", sequence_id, (first_position, list(hashes)), act)

    def report_sparse(
        self, positions: Mapping[str, Int32s], counters: Mapping[int, Mapping[str, float]]
    ) -> None:
        self.server.calls.append(("report_sparse", (dict(positions), dict(counters))))

    def delete_sequence(self, sequence_id: str) -> Future[Any]:
        def act() -> bool:
            return self.server.sequences.pop((id(self), sequence_id), None) is not None

        return self._call("delete_sequence", sequence_id, None, act)

    def flush(self) -> Future[Any]:
        def act() -> Flushed:
            if self.server.fail_flushes:
                raise HotKVError(Reason.INTERNAL, "told to fail")
            self.server.flushes += 1
            self.server.writes.flush(self.space)
            mine = [key for key in self.server.blocks if key[0] == self.space]
            for key in mine:
                del self.server.blocks[key]
            count = sum(key[1] < len(self.config.key_space.groups) for key in mine)
            return Flushed(count, self.server.pending_tiers)

        return self._call("flush", "", None, act)

    def _call(
        self,
        kind: str,
        name: str,
        what: Any,
        act: Callable[[], Any],
        after: After | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> Future[Any]:
        """Records a call, and resolves its future at once or at `FakeServer.settle`. Fails with
        SessionLostError without a connection, or if `after` is not of the session's `order_kind`.

        name: id of the lease, transfer, residency or sequence; or empty.
        what: recorded arguments.
        act: computes the answer.
        begin: runs when the call reaches the server; its HotKVError is the answer.
        """
        self.server.calls.append((kind, what))
        future: Future[Any] = Future()
        if after is not None:
            self.server.afters[name] = after
        if not self.connected or (after is not None and after.kind is not self.order_kind):
            future.set_exception(SessionLostError("no server"))
            return future
        if kind in self.server.late:

            def arrive() -> Any:
                begin()
                return act()

            self.server.held.append((kind, name, future, arrive))
            return future
        try:
            begin()
        except HotKVError as error:
            future.set_exception(error)
            return future
        if kind in self.server.hold or (after is not None and not self.server.has_passed(after)):
            self.server.held.append((kind, name, future, act))
        else:
            resolve(future, act, False)
        return future

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
    ) -> Future[Any]:
        leased = dict(self.server.leases.get(lease_id, []))
        asked = (
            [
                (run.group_index, leased[run.group_index][p])
                for run in runs
                for p in run.lease_positions.tolist()
            ]
            if leased
            else []
        )

        def act() -> Any:
            gone = any(not self._ready(group, [block_hash])[0] for group, block_hash in asked)
            if self.server.fail_loads or not leased or gone:
                return TransferResult(transfer_id, TransferStatus.FAILED, message="told to fail")
            num_bytes = 0
            for run in runs:
                for position, block in zip(
                    run.lease_positions.tolist(), run.block_ids.tolist(), strict=True
                ):
                    data = self.server.blocks[
                        (
                            self.space,
                            self.memory.number(run.group_index),
                            leased[run.group_index][position],
                        )
                    ]
                    num_bytes += self.memory.copy(run.group_index, block, data[self.memory.shard()])
            return TransferResult(transfer_id, TransferStatus.DONE, num_bytes)

        def begin() -> None:
            if len(set(asked)) < len(asked):
                raise HotKVError(
                    Reason.INVALID_FIELD,
                    "runs.lease_positions name a block twice; a load copies each block once",
                )
            if self.server.spoil_loads and (after is None or self.server.has_passed(after)):
                for run in runs:
                    for block in run.block_ids[::2].tolist():
                        self.memory.copy(
                            run.group_index,
                            block,
                            RUBBISH
                            * self.memory.shape(run.group_index).shard_bytes[self.memory.shard()],
                        )

        return self._call("load", transfer_id, runs, act, after, begin)

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
    ) -> Future[Any]:
        if self.fence is not None:
            self.fence.hold(fence_index)
        self.server.residencies.stored_into.append(options.residency_id)
        self.server.retentions.append((options.retention, runs))
        begun: list[FakeStore] = []

        def begin() -> None:
            begun.append(self._begin_store(lease_id, runs))

        revocations = self.num_revocations

        def act() -> Any:
            if self.server.fail_stores:
                raise HotKVError(Reason.INTERNAL, "told to fail")
            # Reads and commits in one step, so revocation is checked once; the server checks in
            # between.
            gone = self.closed or self.num_revocations != revocations
            is_revoked = gone or (self.fence is not None and self.fence.is_revoked(fence_index))
            read = (
                None
                if is_revoked
                else lambda at, position: self.memory.read(
                    runs[at].group_index, int(runs[at].block_ids[position])
                )
            )
            num_bytes = self.server.writes.end(begun[0], read)
            return TransferResult(
                transfer_id,
                TransferStatus.DONE,
                num_bytes,
                tuple(np.array(row, np.uint8) for row in begun[0].results),
            )

        answer = self._call("store", transfer_id, runs, act, after, begin)
        # However the future resolves, the store can't commit after that.
        answer.add_done_callback(lambda _: [self.server.writes.end(store, None) for store in begun])
        return (
            answer
            if self.fence is None
            else self._until_revoked(self.fence, transfer_id, fence_index, answer)
        )

    def cancel(self, transfer_id: str) -> None:
        self.server.calls.append(("cancel", transfer_id))
        if self.fence is not None and transfer_id in self._revocable:
            fence_index, shown = self._revocable[transfer_id]
            self.fence.revoke(fence_index)
            if not shown.done():
                shown.set_result(TransferResult(transfer_id, TransferStatus.CANCELLED))
            return
        self.server.cancelled.append(transfer_id)
        if self.server.ack_cancels:
            for entry in [e for e in self.server.held if e[1] == transfer_id]:
                self.server.held.remove(entry)
                resolve(entry[2], entry[3], True)

    def revoke_stores(self) -> None:
        self.num_revocations += 1
        if self.fence is not None:
            self.fence.revoke_all()

    def close(self) -> None:
        self.closed = True
        self.server.writes.expire(self)
        if self.config.role is Role.SCHEDULER:
            self.server.residencies.revoke(self.config.engine_id)

    def _begin_store(self, lease_id: str, runs: Sequence[BlockRun]) -> FakeStore:
        if lease_id in self.server.leases:
            raise HotKVError(
                Reason.DUPLICATE_ID, f"lease_id {lease_id!r} is a read lease; choose a new id"
            )
        write_runs = []
        for run in runs:
            shape, number = self.memory.shape(run.group_index), self.memory.number(run.group_index)
            keys = [(self.space, number, block_hash) for block_hash in run.hashes]
            goes_with = shape.group_index if isinstance(shape, Sketch) else None
            blocks = (
                None
                if goes_with is None
                else [(self.space, goes_with, block_hash) for block_hash in run.hashes]
            )
            write_runs.append(WriteRun(keys, blocks))
        num_shards = self.config.key_space.num_shards
        return self.server.writes.begin(
            self, (self.config.engine_id, lease_id), write_runs, self.memory.shard(), num_shards
        )

    def _until_revoked(
        self, fence: SharedFence, transfer_id: str, fence_index: int, answer: Future[Any]
    ) -> Future[Any]:
        """Resolves with `answer`, or at once if the store is cancelled. Its word stays in use
        until `answer`."""
        shown: Future[Any] = Future()
        self._revocable[transfer_id] = fence_index, shown

        def ended(answer: Future[Any]) -> None:
            fence.give_back(fence_index)
            del self._revocable[transfer_id]
            if shown.done():
                return
            error = answer.exception()
            if error is None:
                shown.set_result(answer.result())
            else:
                shown.set_exception(error)

        answer.add_done_callback(ended)
        return shown
