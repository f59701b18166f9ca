"""What an engine asks of the cache: each call is a message, and a future for its answer.

Calls that touch no memory of the engine; `session.Session` adds those that do. Always true: a call
never blocks, but for `ping`. What is wrong with its arguments comes out of its future, not out of
the call itself; calls without an answer raise it.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotkv_client.parts import join_masks, joined, split_groups
from hotkv_client.types import (
    BlockRun,
    BoolMask,
    EndedRequest,
    Flushed,
    GroupHashes,
    Int32s,
    LeaseGrant,
    LoadEnd,
    RequestReport,
    ResidencyOpened,
    ResidentBlocks,
    SelectConfig,
    SequenceCreated,
    SequenceState,
)
from hotkv_client.wire import requests as _wire
from hotkv_client.wire import sparse as _sparse_wire
from hotkv_proto.blocks import NO_RETENTION, Retention


class Calls(ABC):
    """See the module. Sequence ids are the caller's choice, unique in the session. All sequences
    end with the connection."""

    def __init__(self, hash_bytes: int) -> None:
        self._hash_bytes = hash_bytes

    @abstractmethod
    def _call(self, build: Callable[[], _wire.Request], *, lease_id: str = "") -> "Future[Any]":
        """Sends a request. The future gets its answer, or why it was not sent."""

    @abstractmethod
    def _resident(self, build: Callable[[], _wire.Request]) -> "Future[Any]":
        """As `_call`, but fails as VERSION_MISMATCH if the server has no residencies."""

    @abstractmethod
    def _send_only(self, request: _wire.Request) -> None:
        """Sends a request that has no answer; without a connection it is dropped."""

    def lookup(
        self, groups: Sequence[GroupHashes], traceparent: str | None = None
    ) -> "Future[tuple[BoolMask, ...]]":
        """Asks the server which blocks are ready, in several messages if they are too many for one.
        `traceparent`: names the caller's span as W3C
        Trace Context does, to a server that records traces; None for none."""
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
        """Pins those of the blocks that are ready; `ttl_s` 0 for the server's default.

        The same call again gets the same answer; the same id with other blocks fails as
        DUPLICATE_ID. `wants_offsets`: the grant has the blocks' offsets in `arena()`, too. Fails as
        NOT_ALLOWED if there is no arena. Blocks of an earlier server are compared with their check
        values first. `traceparent`: as `lookup`.
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
        """Reserves slots; BlockResult values a run."""
        return self._call(lambda: _wire.reserve(lease_id, runs, ttl_s, retention, self._hash_bytes))

    def release(self, lease_id: str) -> None:
        """Gives a lease back. There is no answer: without a connection the lease has ended."""
        self._send_only(_wire.release(lease_id))

    def open_residency(
        self, residency_id: str, num_blocks: Mapping[int, int]
    ) -> "Future[ResidencyOpened]":
        """Reserves room in the arena for a request: the most blocks that it will ever keep, by
        group index, and their representations of the kinds that this session declares.

        The same call again gets the same answer. The residency belongs to the engine and ends with
        this session. Fails as NO_ROOM_FOR_RESIDENCY if others hold the room; as
        RESIDENCY_TOO_LARGE if there can never be enough; as NOT_ALLOWED if there is no `arena()`.
        """
        return self._resident(lambda: _wire.open_residency(residency_id, num_blocks))

    def extend_residency(
        self, residency_id: str, group_index: int, first_position: int, hashes: Sequence[bytes]
    ) -> "Future[ResidentBlocks]":
        """Pins those of the blocks that are ready, and says where they lie in `arena()`.

        `first_position`: of the first block in the request, counted in blocks. A block that the
        residency has already keeps its offset. Blocks of an earlier server are compared with their
        check values first. Fails as UNKNOWN_RESIDENCY if the residency has ended.
        """
        return self._resident(
            lambda: _wire.extend_residency(
                residency_id, group_index, first_position, hashes, self._hash_bytes
            )
        )

    def close_residency(self, residency_id: str) -> None:
        """Gives a residency back: its blocks may have been read for the last time. There is no
        answer: without a connection it has ended."""
        self._send_only(_wire.close_residency(residency_id))

    def report_use(self, groups: Sequence[GroupHashes]) -> None:
        """Tells the server which blocks the engine used from its own device cache."""
        for part in split_groups(groups, self._hash_bytes):
            self._send_only(_wire.report_use(part, self._hash_bytes))

    def report_requests(
        self,
        reports: Sequence[RequestReport[Sequence[bytes]]],
        prefill_tokens_per_s: float = 0.0,
        ended: Sequence[EndedRequest[Sequence[bytes]]] = (),
        loads: Sequence[LoadEnd] = (),
    ) -> None:
        """Tells the server of scheduled requests: what they used from the device cache, and how
        long to keep their blocks. Nothing to wait for. Raises HotKVError for hashes of another
        length.

        `prefill_tokens_per_s`: what this engine has measured; 0 for nothing. Then lookups leave in
        a slow tier what the engine computes sooner. `ended`: requests that have ended, of those
        that have a session or hints. `loads`: those that have ended since.
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
        """Begins a sequence over the complete blocks `hashes` of its context.

        With `select` the server selects for it (`selects`). Without, nothing is pinned, and reports
        name the sequence.
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
        context. Those that the sequence has already must be the same. If the server selects, it
        leases anew what is ready now, even if `hashes` is empty.
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

    def delete_sequence(self, sequence_id: str) -> "Future[bool]":
        """Ends a sequence. Gives False if there was no such sequence."""
        return self._call(lambda: _sparse_wire.delete_sequence(sequence_id))

    def flush(self) -> "Future[Flushed]":
        """Forgets every block of this session's key space, whoever stored it; gives how many were
        ready.

        Once resolved, no lease has a block from before, and what was being stored is refused as
        ABORTED; nor has one on another node, unless tiers are pending. If nodes share a tier, that
        takes a second and a half.
        """
        return self._call(_wire.flush)

    def ping(self, timeout_s: float) -> float:
        """Seconds of a round trip. Raises HotKVError or TimeoutError."""
        start_s = time.perf_counter()
        self._call(_wire.ping).result(timeout_s)
        return time.perf_counter() - start_s
