"""Loads and stores of a node: admitted, begun in the core, and ended there.

Always true: a store's blocks are kept only if the engine has not revoked the store before it ends;
one session's transfers are bounded in number and bytes, so that others always find room. On the
event loop; `transfer` says how one goes.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import RunContent
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.order import DeviceMark
from hotkv_proto.store_options import NO_OPTIONS, StoreOptions
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.bounds import Account
from hotkv_server.cache.values import LoadPositions, Run, SlotRun
from hotkv_server.dataplane.engine import CopyEngine, Outcome
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.check_values import Sums
from hotkv_server.integrity.sums import SumThreads
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.node.capability import Capability
from hotkv_server.node.deadline import Deadline
from hotkv_server.node.health import Health
from hotkv_server.node.session import LiveSession
from hotkv_server.node.session_memory import SessionMemory
from hotkv_server.node.slices import in_slices
from hotkv_server.node.timings import Timings
from hotkv_server.node.transfer import BlockIds, Call, Means, Transfer, TransferEnd

MAX_TRANSFERS_OF_SESSION = 2048
"""In flight at a time. A session also begins no transfer while its transfers have as many bytes as
the arena, or, if the arena is smaller, MIN_INFLIGHT_BYTES."""
MIN_INFLIGHT_BYTES = 1 << 30
TRANSFER_BYTES, RUN_BYTES, BLOCK_BYTES = 2048, 1024, 40
"""About what is kept of a transfer until it ends, besides its message: for itself, for each run,
for each block."""


class Transfers:
    """See the module. `run_effects`: carries out what the core's decisions call for. `timings`:
    counts their ends."""

    def __init__(
        self,
        core: CacheCore,
        arena: Region,
        copy_engine: CopyEngine,
        verifier: Verifier,
        capabilities: Sequence[Capability],
        health: Health,
        run_effects: Callable[[], None],
        timings: Timings | None = None,
    ) -> None:
        self._core = core
        self.kept_bytes = Account(core.client_memory)
        self.loaded_bytes = 0
        self.stored_bytes = 0
        self._arena = arena
        self._capabilities = capabilities
        self._run_effects = run_effects
        self._means = Means(
            core,
            arena,
            copy_engine,
            verifier,
            health,
            self.kept_bytes,
            run_effects,
            timings or Timings(),
        )
        self._sums = SumThreads()

    def __repr__(self) -> str:
        return (
            f"Transfers({len(self._core.transfers)} under way, {self.loaded_bytes} bytes "
            f"loaded, {self.stored_bytes} stored)"
        )

    def close(self) -> None:
        """Stops its threads."""
        self._sums.close()

    def cancel(self, session: LiveSession, transfer_id: str) -> bool:
        """Asks a transfer to end early; False if it has ended."""
        job = session.jobs.get(transfer_id)
        if job is None:
            return False
        job.cancel()
        return True

    def load(
        self,
        session: LiveSession,
        transfer_id: str,
        lease_id: str,
        runs: list[LoadPositions],
        block_ids: BlockIds,
        timeout_s: float,
        after: DeviceMark | None = None,
        message_bytes: int = 0,
    ) -> "asyncio.Future[TransferEnd]":
        """Starts a load. The future is done when nothing is written any more.

        `after`: nothing is written before this mark has passed. `message_bytes`: of the request.
        """
        groups = [run.group_index for run in runs]
        call = self._admit(session, transfer_id, groups, block_ids, timeout_s, after, message_bytes)
        slots = self._core.begin_load(session.record.number, transfer_id, lease_id, runs)

        def finish(outcome: Outcome, num_bytes: int) -> list[NDArray[np.uint8]]:
            self._core.end_load(session.record.number, transfer_id, outcome is Outcome.DONE)
            session.loaded_bytes += num_bytes
            self.loaded_bytes += num_bytes
            for one in self._capabilities:
                one.bytes_moved(session, num_bytes, 0)
            return []

        return Transfer(self._means, call, finish, to_engine=True).start(slots)

    async def store(
        self,
        session: LiveSession,
        transfer_id: str,
        lease_id: str,
        runs: list[Run],
        block_ids: BlockIds,
        timeout_s: float,
        options: StoreOptions = NO_OPTIONS,
        fence_index: int = 0,
        contents: Sequence[RunContent] = (),
        after: DeviceMark | None = None,
        message_bytes: int = 0,
    ) -> "asyncio.Future[TransferEnd]":
        """Makes room for a store, then starts it. The future is done when the blocks are committed
        or refused and nothing is read any more.

        `contents`: one a run, for events; or none. `after`: nothing is read before this mark has
        passed. `message_bytes`: of the request.
        """
        groups = [run.group_index for run in runs]
        call = self._admit(session, transfer_id, groups, block_ids, timeout_s, after, message_bytes)
        session.check_fence(fence_index)
        _check_lengths(runs, block_ids)
        ttl_s, shard_index = max(timeout_s, 0.0) * 2, call.memory.layout.shard_index
        number, sums = session.record.number, list[Sums]()
        beginning = self._core.begin_store(
            number,
            transfer_id,
            lease_id,
            runs,
            shard_index,
            ttl_s,
            time.monotonic(),
            options,
        )
        slots = await in_slices(beginning, self._run_effects)

        def finish(outcome: Outcome, num_bytes: int) -> list[NDArray[np.uint8]]:
            kept = outcome is Outcome.DONE and not session.is_revoked(fence_index)
            results = self._core.end_store(number, transfer_id, kept, time.monotonic(), sums)
            session.stored_bytes += num_bytes
            self.stored_bytes += num_bytes
            for one in self._capabilities:
                one.bytes_moved(session, 0, num_bytes)
                one.blocks_stored(session, runs, contents, results)
            return results

        take_sums = partial(self._take_sums, session.record.key_space_id, shard_index, slots, sums)
        try:
            # Others were served while room was made.
            self._check_room(session, call.kept_bytes)
            _usable_memory(session, block_ids, groups)
        except HotKVError:
            finish(Outcome.FAILED, 0)
            raise
        return Transfer(self._means, call, finish, take_sums, to_engine=False).start(slots)

    def _admit(
        self,
        session: LiveSession,
        transfer_id: str,
        groups: Sequence[int],
        block_ids: BlockIds,
        timeout_s: float,
        after: DeviceMark | None,
        message_bytes: int,
    ) -> Call:
        """Checks a call and its bounds; its deadline and gate are made, and nothing is taken yet.
        Raises HotKVError."""
        kept_bytes = message_bytes + _plan_bytes(block_ids)
        self._check_room(session, kept_bytes)
        memory = _usable_memory(session, block_ids, groups)
        deadline = Deadline(timeout_s)
        gate = None if after is None else memory.order.gate(after, deadline.mark_passed)
        return Call(session, transfer_id, memory, block_ids, deadline, gate, kept_bytes)

    def _check_room(self, session: LiveSession, kept_bytes: int) -> None:
        """Raises OVERLOADED if the session has as much under way as one alone may have."""
        owner = self._core.sessions.owner(session.record)
        if kept_bytes > self.kept_bytes.room(owner):
            raise HotKVError(
                Reason.OVERLOADED,
                f"transfer_id: {self.kept_bytes.refusal(owner, 'bytes of transfers')}; wait for "
                "some",
            )
        if len(session.jobs) >= MAX_TRANSFERS_OF_SESSION or session.inflight_bytes >= max(
            self._arena.num_bytes, MIN_INFLIGHT_BYTES
        ):
            raise HotKVError(
                Reason.OVERLOADED,
                f"transfer_id: the session has {len(session.jobs)} transfers of "
                f"{session.inflight_bytes} bytes in flight; wait for some",
            )

    def _take_sums(
        self, key_space_id: int, shard_index: int, slots: Sequence[SlotRun], sums: list[Sums]
    ) -> None:
        """Takes the sums of what a store has written, for check values. In the copy thread that
        wrote last."""
        stride, record = self._core.config.check_stride, self._core.catalog.record(key_space_id)
        for run in slots if stride else ():
            shard_bytes = record.shape(run.group_index).shard_bytes
            found = np.zeros(len(run.offsets), np.uint64)
            self._sums.add_sums(
                self._arena,
                run.offsets + sum(shard_bytes[:shard_index]),
                shard_bytes[shard_index],
                shard_index,
                np.full(len(found), stride),
                found,
            )
            sums.append(found)


def _check_lengths(runs: Sequence[Run], block_ids: BlockIds) -> None:
    for run, ids in zip(runs, block_ids, strict=True):
        if len(ids) != len(run.hashes):
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"runs.block_ids has {len(ids)} ids for {len(run.hashes)} hashes; give one id a "
                "hash",
            )


def _plan_bytes(block_ids: BlockIds) -> int:
    """About what is kept of a transfer besides its message."""
    return (
        TRANSFER_BYTES
        + RUN_BYTES * len(block_ids)
        + BLOCK_BYTES * sum(len(ids) for ids in block_ids)
    )


def _usable_memory(
    session: LiveSession, block_ids: BlockIds, groups: Sequence[int]
) -> SessionMemory:
    """The session's memory, checked against the block ids and groups of a transfer."""
    if session.closing:
        raise HotKVError(Reason.UNKNOWN_SESSION, "session_id is closing")
    if session.memory is None:
        raise HotKVError(
            Reason.NO_MEMORY_REGISTERED,
            "the session has registered no memory; send register_memory first",
        )
    session.memory.check_use(
        block_ids,
        [session.named(group_index) for group_index in groups if group_index >= MAX_GROUPS],
    )
    return session.memory
