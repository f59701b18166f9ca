"""Requests whose old blocks the server keeps for the engine: room is reserved when they come,
blocks are pinned as they are stored, and what is pinned may be given back to vLLM's pool.

What is always true: a request that outgrows the device is not admitted before the server has
reserved room for all it may ever store; a block counts as kept (`kept_tokens`) only once the server
has said where it lies, and workers hear that with the step in which it may be given back; blocks
whose KV is not exact have names of their own, which no other request finds. Scheduler thread only;
never blocks.
"""

import hashlib
import time
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotkv_client.types import Int64s, ResidencyOpened, ResidentBlocks
from hotkv_vllm import link
from hotkv_vllm.compat.residency import DevicePool
from hotkv_vllm.metadata import StoreJob
from hotkv_vllm.scheduler.exactness import Exactness
from hotkv_vllm.scheduler.groups import CachedGroups
from hotkv_vllm.scheduler.request import RequestState
from hotkv_vllm.scheduler.stores_in_flight import StoreInFlight
from hotkv_vllm.sparse.memory import Streams
from hotkv_vllm.sparse.resident_step import KeptBlocks, ResidentRow, ResidentStep
from hotkv_vllm.sparse.rows import RowNames
from hotkv_vllm.stats import HotKVStats

logger = link.logger
ASK_AGAIN_S = 0.1
"""A reservation that was refused is asked for again after this long."""


@dataclass(slots=True, eq=False)
class Resident:
    """One request. `num_blocks`: most blocks that it may ever have.

    `kept`: leading blocks that the server has said it keeps; `places` say where, in order. `told`:
    how many of these the workers know. `asked`: the call that will say more, and of which blocks.
    `storing`: by store, the first block of it. `names`: of its blocks, as far as they were needed.
    `private_from`: blocks from here on have names of their own.
    """

    state: RequestState
    num_blocks: int
    residency_id: str
    opening: "Future[ResidencyOpened] | None" = None
    opened: ResidencyOpened | None = None
    stream: int = 0
    ask_at_s: float = 0.0
    was_refused: bool = False
    kept: int = 0
    places: list[KeptBlocks] = field(default_factory=list)
    told: int = 0
    told_pin: ResidencyOpened | None = None
    told_hot: tuple[int, ...] = ()
    asked: "tuple[Future[ResidentBlocks], range] | None" = None
    asks_again: bool = False
    storing: dict[int, int] = field(default_factory=dict)
    names: list[bytes] = field(default_factory=list)
    private_from: int = 1 << 40
    moved_s: float = 0.0
    is_lost: bool = False
    has_failed: bool = False


class Residencies:
    """See the module."""

    def __init__(
        self,
        session: link.CacheSession,
        streams: Streams,
        groups: CachedGroups,
        exactness: Exactness,
        pool: DevicePool,
        stats: HotKVStats,
        timeout_s: float,
    ) -> None:
        self._session = session
        self._streams = streams
        self._groups = groups
        self._block_tokens = groups.specs[0].block_tokens
        self._exactness = exactness
        self._pool = pool
        self._stats = stats
        self._timeout_s = timeout_s
        self._prefix = uuid.uuid4().hex[:8]
        self._residents: dict[str, Resident] = {}
        self._ended: list[str] = []
        self._lost: list[str] = []

    def __repr__(self) -> str:
        return f"Residencies({len(self._residents)} requests)"

    # ------------------------------------------------------------------------------------- requests

    def arrived(self, state: RequestState) -> None:
        """Asks the server for room, if the request may outgrow what stays on the device."""
        request = state.request
        num_tokens = self._pool.longest(request)
        if self._pool.holds_whole(num_tokens):
            return
        num_blocks = -(-num_tokens // self._block_tokens)
        residency_id = f"{self._prefix}-{request.request_id}"
        one = Resident(state, num_blocks, residency_id)
        self._residents[request.request_id] = one
        self._open(one)

    def ended(self, request_id: str) -> None:
        """The request is no more: the server may forget what it keeps for it."""
        one = self._residents.pop(request_id, None)
        self._ended.append(request_id)
        if one is not None and (one.opening is not None or one.opened is not None):
            self._session.close_residency(one.residency_id)

    def is_resident(self, request_id: str) -> bool:
        return request_id in self._residents

    def residency_of(self, request_id: str) -> str:
        """The name under which stores of the request are pinned; empty for none."""
        one = self._residents.get(request_id)
        return "" if one is None or one.opened is None else one.residency_id

    def is_admitted(self, request: Any, now_s: float) -> bool:
        """Whether the request may begin. One that outgrows the device waits for its reservation."""
        one = self._residents.get(request.request_id)
        if one is None:
            num_tokens = self._pool.longest(request)
            return self._pool.holds_whole(num_tokens)
        self._renew(one, now_s)
        return one.opened is not None and one.stream == self._streams.number

    def keeps_hit(self, request: Any, hit_tokens: int) -> bool | None:
        """Whether the server keeps all blocks of a hit for this request; None: it is being
        asked."""
        one = self._residents.get(request.request_id)
        if one is None:
            return True
        self._take_answer(one)
        num_blocks = hit_tokens // self._block_tokens
        if one.kept >= num_blocks:
            one.asks_again = False
            return True
        if one.asked is None and one.asks_again:
            # They were asked for, and did not all come.
            one.asks_again = False
            return False
        if one.asked is None:
            one.asks_again = True
            # What is hit is exact, whatever was computed of this request before.
            self._named(one, num_blocks, num_blocks)
            self._ask(one, num_blocks)
        return None

    # ---------------------------------------------------------------------------------------- names

    def names(self, state: RequestState, until: int) -> Sequence[bytes]:
        """Names of a resident request's first `until` blocks, whose tokens are known and computed.
        They stay while it keeps them."""
        request_id = state.request.request_id
        exact = self._exactness.exact_tokens(request_id) // self._block_tokens
        return self._named(self._residents[request_id], until, exact)

    def _named(self, one: Resident, until: int, exact: int) -> Sequence[bytes]:
        """The same, the first `exact` of them by the names that all requests give them."""
        hashes = self._groups.hashes(one.state.request, 0)
        shared = min(exact, one.private_from)
        for place in range(len(one.names), min(until, len(hashes))):
            name = bytes(hashes[place])
            if place >= shared:
                one.private_from = min(one.private_from, place)
                secret = one.residency_id.encode() + name
                name = hashlib.sha256(b"hotkv-private;" + secret).digest()[: len(name)]
            one.names.append(name)
        return one.names

    # --------------------------------------------------------------------------------------- stores

    def stores(self, request_id: str, job: StoreJob) -> None:
        """A store of the request's blocks was planned."""
        one = self._residents.get(request_id)
        runs = (*job.runs, *job.representations)
        if one is not None and runs:
            one.storing[job.store_id] = min(run.depth for run in runs)

    def stored(self, store: StoreInFlight) -> None:
        """A store has ended, whatever came of it."""
        one = self._residents.get(store.request_id)
        if one is not None:
            one.storing.pop(store.store_id, None)

    def kept_tokens(self, request_id: str) -> int:
        """Leading tokens of the request that need not stay on the device. vLLM's manager asks."""
        one = self._residents.get(request_id)
        if one is None or one.is_lost:
            return 0
        self._take_answer(one)
        return one.kept * self._block_tokens

    def is_freeing(self, now_s: float) -> bool:
        """Whether blocks will be given back soon, so that a request need not be preempted."""
        if any(one.is_lost for one in self._residents.values()):
            return False
        return any(
            (one.storing or one.asked is not None) and now_s < one.moved_s + self._timeout_s
            for one in self._residents.values()
        )

    # ---------------------------------------------------------------------------------------- steps

    def fresh_hot_blocks(self, request_ids: Iterable[str]) -> list[int]:
        """Hot slots of these requests that the workers have not heard of: they are about to be
        written."""
        fresh: list[int] = []
        for request_id in request_ids:
            one = self._residents.get(request_id)
            if one is not None and not one.told_hot:
                fresh += self._pool.hot_blocks(request_id)
        return fresh

    def step(self, scheduler_output: Any, rows: RowNames, now_s: float) -> ResidentStep:
        """What the workers are to hear with the step that is planned. Before vLLM advances its
        requests, which `rows` knows."""
        for request_id in scheduler_output.preempted_req_ids or ():
            self._preempted(request_id)
        for one in self._residents.values():
            self._advance(one, now_s)
        block_state = scheduler_output.kv_connector_block_state
        told = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            tables = None if block_state is None else block_state.get_block_ids(request_id)
            request = rows.request(request_id)
            if tables is not None and request is not None:
                context_tokens = request.num_computed_tokens + num_tokens
                told.append(self._row(request_id, tables[0], context_tokens, num_tokens))
        ended, self._ended = tuple(self._ended), []
        lost, self._lost = tuple(self._lost), []
        return ResidentStep(tuple(told), ended, lost)

    def _row(
        self, request_id: str, table: Sequence[int], context_tokens: int, new_tokens: int
    ) -> ResidentRow:
        written = int(table[(context_tokens - 1) // self._block_tokens])
        one = self._residents.get(request_id)
        if one is None:
            return ResidentRow(request_id, written, int(table[0]), False, 0)
        hot = self._pool.hot_blocks(request_id)
        row = ResidentRow(
            request_id,
            written,
            int(table[0]),
            True,
            self._pool.num_freed(request_id),
            hot if hot != one.told_hot else (),
            tuple(one.places[one.told :]),
            one.opened if one.opened is not one.told_pin else None,
            context_tokens,
            new_tokens,
        )
        one.told_hot, one.told, one.told_pin = hot, len(one.places), one.opened
        return row

    def _advance(self, one: Resident, now_s: float) -> None:
        """Asks where the blocks lie that were stored since the last time."""
        self._renew(one, now_s)
        self._take_answer(one)
        considered = one.state.store.stored_blocks[0]
        until = min([considered, *one.storing.values()])
        if one.asked is None and until > one.kept and one.opened is not None:
            self._ask(one, until)
        is_waiting = one.opened is None or one.asked is not None or bool(one.storing)
        if not is_waiting or (one.opened is None and self._session.connected):
            one.moved_s = now_s
        elif now_s >= one.moved_s + self._timeout_s and not one.has_failed:
            one.has_failed = True
            self._fail(one)

    def _fail(self, one: Resident) -> None:
        """Ends a request that can't go on: vLLM answers it with an error."""
        self._stats.add("failed_residencies")
        logger.error(
            "hotkv: request %s ends with an error: the KV cache server has not taken its blocks "
            "for %.0f s (hotkv.residency_timeout_s)",
            one.state.request.request_id,
            self._timeout_s,
        )
        self._pool.fail(one.state.request.request_id)

    def _ask(self, one: Resident, until: int) -> None:
        """Asks the server to pin blocks up to this one, all of which have names."""
        if not self._session.connected or one.opened is None:
            return
        blocks = range(one.kept, min(until, len(one.names)))
        hashes = one.names[blocks.start : blocks.stop]
        if not hashes:
            return
        answer = self._session.extend_residency(one.residency_id, 0, blocks.start, hashes)
        one.asked = answer, blocks

    def _take_answer(self, one: Resident) -> None:
        """Takes in where blocks lie, if the server has said so."""
        if one.asked is None or not one.asked[0].done():
            return
        (answer, blocks), one.asked = one.asked, None
        if answer.cancelled() or answer.exception() is not None:
            return
        # A session that is gone by now has no arena; then they are asked for again.
        arena, found = self._session.arena(), answer.result()
        if arena is None or blocks.start != one.kept:
            return
        offsets, rows = found.offsets, found.representations
        missing = np.flatnonzero(offsets < 0)
        count = int(missing[0]) if len(missing) else len(offsets)
        if count:
            more = KeptBlocks(one.kept, offsets[:count], rows[:count], arena.file_id)
            one.places.append(more)
            one.kept += count
            one.moved_s = time.monotonic()
        if len(missing):
            # What the server lacks is stored, or stored anew.
            mine = one.state.store
            mine.stored_blocks[0] = min(mine.stored_blocks[0], blocks.start + count)
            mine.next_check_tokens = 0

    # ----------------------------------------------------------------------------------- residency

    def _open(self, one: Resident) -> None:
        one.stream = self._streams.number
        one.moved_s = time.monotonic()
        one.opening = self._session.open_residency(one.residency_id, {0: one.num_blocks})

    def _renew(self, one: Resident, now_s: float) -> None:
        """Takes in the answer to a reservation, asks for one that was refused, and again after the
        server was away."""
        if one.opening is not None and one.opening.done():
            opening, one.opening = one.opening, None
            error = None if opening.cancelled() else opening.exception()
            if not opening.cancelled() and error is None:
                self._opened(one, opening.result())
            else:
                one.ask_at_s = now_s + ASK_AGAIN_S
                if error is not None and not one.was_refused:
                    one.was_refused = True
                    self._stats.add("refused_residencies")
                    logger.info(
                        "hotkv: request %s waits for room in host memory: %s",
                        one.state.request.request_id,
                        error,
                    )
        is_stale = one.stream != self._streams.number
        if (
            one.opening is None
            and (one.opened is None or is_stale)
            and self._session.connected
            and now_s >= one.ask_at_s
        ):
            self._open(one)

    def _opened(self, one: Resident, opened: ResidencyOpened) -> None:
        """The server has room. If it has been away, it has to pin anew what it kept."""
        had_kept = one.kept if one.opened is not None else 0
        one.opened = opened
        if not had_kept:
            return
        names = one.names[:had_kept]
        answer = self._session.extend_residency(one.residency_id, 0, 0, names)
        known = np.concatenate([place.offsets for place in one.places])
        answer.add_done_callback(lambda done: self._compare(one, known, done))

    def _compare(self, one: Resident, known: Int64s, done: "Future[ResidentBlocks]") -> None:
        """Called by the client's thread: only marks what the next step looks at."""
        is_same = (
            not done.cancelled()
            and done.exception() is None
            and np.array_equal(done.result().offsets, known)
        )
        if not is_same:
            one.is_lost = True
            self._lost.append(one.state.request.request_id)

    def lost(self, request_ids: Sequence[str]) -> None:
        """Workers have said that bytes of these requests are gone: they are computed anew."""
        for request_id in request_ids:
            one = self._residents.get(request_id)
            if one is None:
                continue
            self._stats.add("lost_residencies")
            if one.opened is not None:
                self._session.close_residency(one.residency_id)
            one.opened, one.opening, one.is_lost, one.kept = None, None, False, 0
            one.residency_id = f"{self._prefix}-{uuid.uuid4().hex[:8]}-{request_id}"
            self._begin_anew(one)

    def _preempted(self, request_id: str) -> None:
        """vLLM has taken the request's blocks: it comes again, and is told of anew."""
        self._ended.append(request_id)
        one = self._residents.get(request_id)
        if one is not None:
            one.kept = min(one.kept, one.private_from)
            self._begin_anew(one)

    def _begin_anew(self, one: Resident) -> None:
        """What is inexact of the request is void, and workers know nothing of it."""
        one.told, one.told_pin, one.told_hot = 0, None, ()
        one.places = [place.up_to(one.kept) for place in one.places if place.first < one.kept]
        one.asked, one.asks_again, one.storing = None, False, {}
        del one.names[min(one.kept, one.private_from) :]
        one.private_from = 1 << 40
        mine = one.state.store
        mine.stored_blocks[0] = min(mine.stored_blocks[0], one.kept)
        mine.next_check_tokens = 0
