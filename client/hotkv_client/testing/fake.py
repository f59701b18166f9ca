"""A double of the cache: one server state, any number of sessions, faults on demand. It really
copies bytes, through the layout.

Knobs of `FakeServer`: `up`; `table` (False: no probe); `hold` (kinds of calls whose answer waits
for `settle`); `late` (kinds of calls that reach the server at `settle`, and not before);
`fail_loads`, `fail_stores`, `fail_flushes`; `spoil_loads` (a load that has begun has written
rubbish to every other of its blocks, and puts it right only if it ends well); `grant_limit` (blocks
a lease pins at most); `ack_cancels` (False: a cancel changes nothing until `settle`);
`wants_token_ids`; `order_kind`, `has_passed` (whether a transfer's mark has passed; those whose
mark has not are held). `settle()` answers what is held and lies behind no mark that has not passed;
an answer held when the server dies becomes SessionLostError. Ranks join a write lease as they do
with the real server (`fake_writes`): a block is ready when every shard is written. A cancelled
store over a shared fence ends at once for the session, while the server goes on with it and finds
it revoked. `refuse_workers`: why sessions with memory are refused. A store whose session is closed,
or has revoked its stores, commits nothing.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from hotkv.errors import HotKVError, Reason, SessionLostError
from hotkv.groups import GroupSpec
from hotkv.keys import Representation
from hotkv.layout import Layout
from hotkv.order import NO_ORDER, DeviceOrder, OrderKind
from hotkv.retention import NO_RETENTION, Retention
from hotkv_client.fence import SharedFence
from hotkv_client.testing.fake_writes import FakeStore, FakeWrites, Key, Shards, WriteRun
from hotkv_client.types import (
    After,
    BlockRun,
    GroupHashes,
    Int32s,
    LayerHotSet,
    LeaseGrant,
    LinkState,
    LoadRun,
    RequestReport,
    Role,
    SelectConfig,
    SequenceCreated,
    SequenceState,
    SessionConfig,
    TransferResult,
    TransferStatus,
)

RUBBISH = b"\x5a"


class FakeServer:
    """What all sessions share. See the module for the knobs."""

    def __init__(self) -> None:
        self.up = True
        self.table = True
        self.epoch = 1
        self.hold: set[str] = set()
        self.late: set[str] = set()
        self.fail_loads = False
        self.spoil_loads = False
        self.fail_stores = False
        self.fail_flushes = False
        self.flushes = 0
        self.grant_limit = 1 << 30
        self.blocks: dict[Key, Shards] = {}
        self.writes = FakeWrites(
            lambda key: key in self.blocks, lambda key, shards: self.blocks.update({key: shards})
        )
        self.leases: dict[str, list[tuple[int, list[bytes]]]] = {}
        self.grants: dict[str, LeaseGrant] = {}
        self.released: list[str] = []
        self.calls: list[tuple[str, Any]] = []
        self.sequences: dict[tuple[int, str], tuple[bytes, int, list[bytes]]] = {}
        self.hot_sets: dict[tuple[bytes, int, tuple[bytes, ...]], tuple[LayerHotSet, ...]] = {}
        self.retentions: list[tuple[Retention, Sequence[BlockRun]]] = []
        self.held: list[tuple[str, str, Future[Any], Callable[[], Any]]] = []
        self.afters: dict[str, After] = {}
        self.order_kind = OrderKind.HOST
        self.has_passed: Callable[[After], bool] = lambda after: True
        self.sessions: list[FakeSession] = []
        self.cancelled: list[str] = []
        self.ack_cancels = True
        self.wants_token_ids = False
        self.why_absent = "start"
        self.refuse_workers = ""

    def open(
        self,
        config: SessionConfig,
        layout: Layout | None = None,
        fds: dict[str, int] | None = None,
        order: DeviceOrder = NO_ORDER,
        fence: SharedFence | None = None,
    ) -> "FakeSession":
        session = FakeSession(self, config, layout, fds or {}, order, fence)
        self.sessions.append(session)
        session.start()
        return session

    def count(self, kind: str) -> int:
        return sum(1 for name, _ in self.calls if name == kind)

    def ready(self, space: bytes, group: int, block_hash: bytes) -> bool:
        return (space, group, block_hash) in self.blocks

    def settle(self, kind: str = "") -> int:
        """Answers held calls (of one kind); returns how many."""
        now = [
            entry
            for entry in self.held
            if (not kind or entry[0] == kind) and not self._is_early(entry[1])
        ]
        self.held = [entry for entry in self.held if entry not in now]
        for _, name, future, act in now:
            _resolve(future, act, name in self.cancelled)
        return len(now)

    def _is_early(self, name: str) -> bool:
        after = self.afters.get(name)
        return after is not None and name not in self.cancelled and not self.has_passed(after)

    def die(self, *, empty: bool = True) -> None:
        self.up = False
        for _, _, future, _ in self.held:
            future.set_exception(SessionLostError("the server died"))
        self.held.clear()
        self.leases.clear()
        self.writes.forget()
        self.sequences.clear()
        for session in self.sessions:
            session.tell(LinkState.ABSENT, "the server died")
        if empty:
            self.blocks.clear()
            self.hot_sets.clear()
            self.epoch += 1

    def come_back(self) -> None:
        self.up = True
        for session in self.sessions:
            session.tell(LinkState.CONNECTED, "it is back")


def _resolve(future: Future[Any], act: Callable[[], Any], cancelled: bool) -> None:
    try:
        future.set_result(TransferResult("", TransferStatus.CANCELLED) if cancelled else act())
    except HotKVError as error:
        future.set_exception(error)


class FakeSession:
    """Stands for `hotkv_client.Session`."""

    def __init__(
        self,
        server: FakeServer,
        config: SessionConfig,
        layout: Layout | None,
        fds: dict[str, int],
        order: DeviceOrder = NO_ORDER,
        fence: SharedFence | None = None,
    ) -> None:
        self.server, self.config, self.layout, self.order = server, config, layout, order
        self.order_message = ""
        self.fence = fence
        self._revocable: dict[str, tuple[int, Future[Any]]] = {}
        self.space = config.key_space.fingerprint
        self.closed = False
        self.num_revocations = 0
        self.maps = {
            name: np.memmap(os.fdopen(os.dup(fd), "r+b"), np.uint8, "r+")
            for name, fd in fds.items()
        }

    @property
    def connected(self) -> bool:
        return self.server.up and not self.closed and not self._refused

    @property
    def _refused(self) -> str:
        return self.server.refuse_workers if self.layout is not None else ""

    @property
    def epoch(self) -> int:
        return self.server.epoch

    @property
    def wants_token_ids(self) -> bool:
        return self.server.wants_token_ids

    @property
    def order_kind(self) -> OrderKind:
        return self.server.order_kind

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

    def probe(self, group_index: int, hashes: Sequence[bytes]) -> Any:
        self.server.calls.append(("probe", len(hashes)))
        if not self.connected or not self.server.table or self.config.role is not Role.SCHEDULER:
            return None
        return self._ready(group_index, hashes)

    def _ready(self, group_index: int, hashes: Sequence[bytes]) -> Any:
        return np.array(
            [self.server.ready(self.space, self._number(group_index), h) for h in hashes], np.bool_
        )

    def lookup(self, groups: Sequence[GroupHashes]) -> Future[Any]:
        def act() -> Any:
            return tuple(self._ready(g.group_index, g.hashes) for g in groups)

        return self._call("lookup", "", groups, act)

    def acquire(
        self, lease_id: str, groups: Sequence[GroupHashes], ttl_s: float = 0
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

    def load(
        self,
        transfer_id: str,
        lease_id: str,
        runs: Sequence[LoadRun],
        timeout_s: float,
        after: After | None = None,
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
                            self._number(run.group_index),
                            leased[run.group_index][position],
                        )
                    ]
                    num_bytes += self._copy(run.group_index, block, data[self._shard()])
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
                        self._copy(
                            run.group_index,
                            block,
                            RUBBISH * self._shape(run.group_index).shard_bytes[self._shard()],
                        )

        return self._call("load", transfer_id, runs, act, after, begin)

    def report_requests(self, reports: Sequence[RequestReport]) -> None:
        self.server.calls.append(("report_requests", list(reports)))

    def create_sequence(
        self,
        sequence_id: str,
        group_index: int,
        hashes: Sequence[bytes],
        select: SelectConfig | None = None,
    ) -> Future[Any]:
        """Hot sets of the longest remembered context that is a prefix of this one, or the same; it
        selects for nobody."""

        def act() -> SequenceCreated:
            self.server.sequences[id(self), sequence_id] = (self.space, group_index, list(hashes))
            for count in range(len(hashes), 0, -1):
                known = self.server.hot_sets.get((self.space, group_index, tuple(hashes[:count])))
                if known is not None:
                    return SequenceCreated("", 0, known, count)
            return SequenceCreated("", 0, (), 0)

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

    def delete_sequence(
        self, sequence_id: str, hot_sets: Sequence[LayerHotSet] = ()
    ) -> Future[Any]:
        def act() -> bool:
            sequence = self.server.sequences.pop((id(self), sequence_id), None)
            if sequence is not None and hot_sets:
                space, group_index, hashes = sequence
                self.server.hot_sets[space, group_index, tuple(hashes)] = tuple(hot_sets)
            return sequence is not None

        return self._call("delete_sequence", sequence_id, list(hot_sets), act)

    def flush(self) -> Future[Any]:
        def act() -> int:
            if self.server.fail_flushes:
                raise HotKVError(Reason.INTERNAL, "told to fail")
            self.server.flushes += 1
            self.server.writes.flush(self.space)
            mine = [key for key in self.server.blocks if key[0] == self.space]
            for key in mine:
                del self.server.blocks[key]
            return sum(key[1] < len(self.config.key_space.groups) for key in mine)

        return self._call("flush", "", None, act)

    def store(
        self,
        transfer_id: str,
        lease_id: str,
        runs: Sequence[BlockRun],
        timeout_s: float,
        retention: Retention = NO_RETENTION,
        after: After | None = None,
        fence_index: int = 0,
    ) -> Future[Any]:
        if self.fence is not None:
            self.fence.hold(fence_index)
        self.server.retentions.append((retention, runs))
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
                else lambda at, position: self._read(
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

    def _begin_store(self, lease_id: str, runs: Sequence[BlockRun]) -> FakeStore:
        if lease_id in self.server.leases:
            raise HotKVError(
                Reason.DUPLICATE_ID, f"lease_id {lease_id!r} is a read lease; choose a new id"
            )
        write_runs = []
        for run in runs:
            shape, number = self._shape(run.group_index), self._number(run.group_index)
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
            self, (self.config.engine_id, lease_id), write_runs, self._shard(), num_shards
        )

    def _until_revoked(
        self, fence: SharedFence, transfer_id: str, fence_index: int, answer: Future[Any]
    ) -> Future[Any]:
        """The answer for the session, which ends earlier where the store is cancelled; the word is
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
                _resolve(entry[2], entry[3], True)

    def revoke_stores(self) -> None:
        self.num_revocations += 1
        if self.fence is not None:
            self.fence.revoke_all()

    def close(self) -> None:
        self.closed = True
        self.server.writes.expire(self)

    def _call(
        self,
        kind: str,
        name: str,
        what: Any,
        act: Callable[[], Any],
        after: After | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> Future[Any]:
        """`begin`: what the server does as soon as the call has come; a refusal there is the
        answer."""
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
            _resolve(future, act, False)
        return future

    def _shape(self, group: int) -> GroupSpec | Representation:
        """The group, or the representation that this session declares after the groups."""
        groups = self.config.key_space.groups
        return (
            groups[group]
            if group < len(groups)
            else self.config.representations[group - len(groups)]
        )

    def _number(self, group: int) -> int:
        """What the server keeps it under: the group's index, and for representations what no other
        version has."""
        shape = self._shape(group)
        return (
            self.config.key_space.representation_salt(shape)
            if isinstance(shape, Representation)
            else group
        )

    def _shard(self) -> int:
        return self.layout.shard_index if self.layout is not None else 0

    def _runs(self, group: int, block: int) -> Any:
        assert self.layout is not None
        spec = self._shape(group)
        shard_start = sum(spec.shard_bytes[: self.layout.shard_index])
        for runs in self.layout.copy_runs(
            group, spec, np.array([block], np.int64), np.array([-shard_start], np.int64)
        ):
            yield from zip(
                [runs.handle_id] * len(runs.num_bytes),
                runs.engine_offsets.tolist(),
                runs.slot_offsets.tolist(),
                runs.num_bytes.tolist(),
                strict=True,
            )

    def _read(self, group: int, block: int) -> bytes:
        data = bytearray(self._shape(group).shard_bytes[self._shard()])
        for handle, engine, slot, size in self._runs(group, block):
            data[slot : slot + size] = self.maps[handle][engine : engine + size].tobytes()
        return bytes(data)

    def _copy(self, group: int, block: int, data: bytes) -> int:
        for handle, engine, slot, size in self._runs(group, block):
            self.maps[handle][engine : engine + size] = np.frombuffer(
                data[slot : slot + size], np.uint8
            )
        return len(data)
