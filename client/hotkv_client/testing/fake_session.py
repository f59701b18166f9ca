"""The double of a session: `hotkv_client.Session` over a `FakeServer`. It really copies bytes.

Always true: a store whose session is closed, or has revoked its stores, commits nothing. If a store
over a shared fence is cancelled, it ends at once for the session; the server goes on with it and
finds it revoked.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from hotkv_client.fence import SharedFence
from hotkv_client.testing.fake_calls import FakeCalls, resolve
from hotkv_client.testing.fake_writes import FakeStore, WriteRun
from hotkv_client.types import (
    After,
    BlockRun,
    LinkState,
    LoadRun,
    Role,
    SessionConfig,
    TransferResult,
    TransferStatus,
)
from hotkv_proto.blocks import NO_OPTIONS, StoreOptions
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import Representation
from hotkv_proto.layout import Layout
from hotkv_proto.order import NO_ORDER, DeviceOrder

if TYPE_CHECKING:
    from hotkv_client.testing.fake import FakeServer

RUBBISH = b"\x5a"


class FakeSession(FakeCalls):
    """Stands for `hotkv_client.Session`."""

    def __init__(
        self,
        server: "FakeServer",
        config: SessionConfig,
        layout: Layout | None,
        fds: dict[str, int],
        order: DeviceOrder = NO_ORDER,
        fence: SharedFence | None = None,
    ) -> None:
        super().__init__(server, config, layout, fds)
        self.order, self.order_message = order, ""
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

    def load(
        self,
        transfer_id: str,
        lease_id: str,
        runs: Sequence[LoadRun],
        timeout_s: float,
        after: After | None = None,
        traceparent: str | None = None,
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
            # It reads and commits in one, so that this is as good as after the reading.
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
        # However it ended: what was begun keeps nothing beyond that.
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
            goes_with = shape.group_index if isinstance(shape, Representation) else None
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
        """The answer for the session, which ends earlier if the store is cancelled; the word is
        held until the server's own."""
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
