"""Calls of the double of a session that touch no memory: as in `hotkv_client.calls`, answered by a
`FakeServer`.

Always true: a call is noted in `FakeServer.calls` before anything else. Its future is resolved at
once unless a knob of the server holds it.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from hotkv_client.testing.fake_memory import FakeMemory
from hotkv_client.testing.fake_residencies import FakeArena
from hotkv_client.types import (
    After,
    EndedRequest,
    Flushed,
    GroupHashes,
    Int32s,
    LeaseGrant,
    LoadEnd,
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
from hotkv_proto.errors import HotKVError, Reason, SessionLostError
from hotkv_proto.layout import Layout
from hotkv_proto.order import OrderKind

if TYPE_CHECKING:
    from hotkv_client.testing.fake import FakeServer


def resolve(future: Future[Any], act: Callable[[], Any], cancelled: bool) -> None:
    """Resolves a call with what `act` answers or refuses."""
    try:
        future.set_result(TransferResult("", TransferStatus.CANCELLED) if cancelled else act())
    except HotKVError as error:
        future.set_exception(error)


class FakeCalls:
    """Answers the calls of one session of a `FakeServer`."""

    def __init__(
        self,
        server: "FakeServer",
        config: SessionConfig,
        layout: Layout | None,
        fds: Mapping[str, int],
    ) -> None:
        self.server, self.config, self.layout = server, config, layout
        self.memory = FakeMemory(config, layout, fds)
        self.space = config.key_space.fingerprint
        self.closed = False

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
        """Takes in the sequence; it selects for nobody."""

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
            resolve(future, act, False)
        return future
