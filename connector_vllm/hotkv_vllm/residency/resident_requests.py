"""Manages resident requests: requests that can become too long for the device, so that their
earlier blocks are only in the server's memory. The server reserves room (space in its arena) before
such a request begins and as it grows, and pins its blocks once they are stored. vLLM may then free
the pinned blocks on the device.

A *residency* is the server's record of a resident request: its reserved room and its pinned blocks.

Always true:
- A resident request begins only after the server has reserved room for all its present blocks. With
  `residency = "auto"`, or if the server is away, it may also begin with all its blocks on the
  device; then it is moved off the device only once the server has reserved that room.
- No request that fits on the device waits for the server longer than `timeout_s`. Then vLLM
  computes it anew, with all its blocks on the device.
- A running request whose next block has no room in the server is held: vLLM leaves it out of steps.
- To make room for other requests, a request can be *parked*: vLLM preempts it, it releases its room
  in the server, and waits for room again. There are three cases:
  - A running request is held, while a waiting request has room. The waiting request is parked.
  - All running requests have been held for `PARK_S`. One request with room is parked.
  - After a reconnect, other requests have got the room of a running request. The running request is
    parked once it has waited long for room.
  In the first two cases vLLM's priorities decide which request is parked (`_last`).
- No block leaves the device while the server may have lost it, for example after a reconnect.
- A block counts as kept (`kept_tokens`), so that vLLM may free it on the device, only after the
  server has answered at which offset of the arena it has pinned the block. Workers receive the
  offset at the latest with the message of the first step in which the block may have been freed.
- Every block of a resident request has a name, which is the hash under which the server stores it.
  Blocks whose KV is not exact, and blocks of requests without shared names (`CachedGroups`), have
  private names, which no other request finds.

Scheduler thread only. Never blocks.
"""

import itertools
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hotkv_vllm.compat.residency import DevicePool
from hotkv_vllm.identity.exactness import Exactness
from hotkv_vllm.link import logger
from hotkv_vllm.metadata import StoreJob
from hotkv_vllm.residency.calls import ResidencyCalls
from hotkv_vllm.residency.moves import to_move
from hotkv_vllm.residency.resident import Resident, ResidentRows
from hotkv_vllm.residency.step import ResidentStep
from hotkv_vllm.scheduler.groups import CachedGroups
from hotkv_vllm.scheduler.request import RequestState
from hotkv_vllm.scheduler.stores_in_flight import StoreInFlight
from hotkv_vllm.sparse.rows import RowNames
from hotkv_vllm.stats import HotKVStats

SLOW_STEP_S = 1.0
"""A step adds at most this many seconds to the time that a request counts as waiting for the server
(limited by `hotkv.residency_timeout_s`), however long the step takes."""
QUANTUM_TOKENS = 512
"""A request reserves room in the server for this many tokens beyond its present tokens. When half
of them are used, it asks for more room."""
MOST_AHEAD = 4
"""Largest number of waiting requests (the first of vLLM's queue) that have room in the server or
ask for it. Otherwise the requests in the queue could reserve all room of the server, and requests
of other engines would wait for it."""
PARK_S = 1.0
MAX_SHOWN_CHARS = 128
MAX_LOSSES = 8
"""A request ends with an error if the server loses its blocks this many times in succession,
without a new token in between."""


class ResidentRequests:
    """Opens, updates and closes the residency of each resident request (a request whose old blocks
    may be only in the server's memory). A residency is the server's record of the request: its
    reserved room and its pinned blocks.

    reservations: sends the calls to the server.
    groups: computes the shared names of a request's blocks: hashes by which other requests find
        the blocks in the server.
    exactness: knows which tokens have exact KV. Only their blocks may have shared names.
    pool: gives access to the device's blocks.
    timeout_s: longest wait of a request for progress of the server (`hotkv.residency_timeout_s`).
    rows: builds the entries of a step's message to the workers, one per request.
    """

    def __init__(
        self,
        reservations: ResidencyCalls,
        groups: CachedGroups,
        exactness: Exactness,
        pool: DevicePool,
        stats: HotKVStats,
        timeout_s: float,
    ) -> None:
        self._reservations = reservations
        self._groups = groups
        self._block_tokens = groups.specs[0].block_tokens
        self._exactness = exactness
        self._pool = pool
        self._stats = stats
        self._timeout_s = timeout_s
        self._prefix, self._salt = uuid.uuid4().hex[:8], os.urandom(16)
        self._numbers = itertools.count()
        self._residents: dict[str, Resident] = {}
        self.rows = ResidentRows(self._residents, pool, self._block_tokens)
        self._stuck_since_s: float | None = None
        self._num_ahead = 0

    def __repr__(self) -> str:
        return f"ResidentRequests({len(self._residents)} requests)"

    # ------------------------------------------------------------------------------------- requests

    def arrived(self, state: RequestState, now_s: float) -> None:
        """Registers a new request. Does nothing for a request that fits on the device at its
        greatest length. Asks the server for room if few requests wait before it; otherwise
        `is_admitted` does so later."""
        request = state.request
        if self._pool.holds_whole(request):
            return
        most = -(-self._pool.longest(request) // self._block_tokens)
        residency_id = self._new_id(request.request_id)
        one = Resident(state, most, residency_id, self._salt, seen_s=now_s, arrived_s=now_s)
        queued = (name for name in reversed(self._residents) if not self._pool.has_blocks(name))
        num_before = len(tuple(itertools.islice(queued, MOST_AHEAD)))
        self._residents[request.request_id] = one
        if num_before < MOST_AHEAD:
            self._reserve(one)
            self._reservations.open(one, now_s)

    def _new_id(self, request_id: str) -> str:
        """Returns a new id for a residency (the server's record of a request), which no residency
        has ever had. Private names (hashes of blocks that no other request may find) are computed
        from this id, so no two residencies have the same private names. The id ends with the
        request's id, shortened and without characters that the server refuses."""
        shown = "".join(filter(str.isprintable, request_id[:MAX_SHOWN_CHARS]))
        return f"{self._prefix}-{next(self._numbers)}-{shown}"

    def ended(self, request_id: str) -> None:
        """Forgets a request that has ended, and closes its residency (the server's record of it).
        The workers are notified of the end by `SparseRows.ended`."""
        one = self._residents.pop(request_id, None)
        self._pool.forget(request_id)
        if one is not None:
            self._close(one)

    def _close(self, one: Resident) -> None:
        """Closes a request's residency (the server's record of its room and pinned blocks) once the
        steps in progress have ended, because they may read its blocks. If the server unpinned the
        blocks before, such a step could compute wrong KV from other bytes and store it."""
        self._reservations.close(one, self._pool.planned_step, self._pool.ended_step)

    def step_ended(self) -> None:
        """Handles the end of a step: closes the residencies (the server's records of requests) that
        no step reads any more."""
        self._reservations.close_ended(self._pool.ended_step)

    def is_resident(self, request_id: str) -> bool:
        return request_id in self._residents

    def residency_of(self, request_id: str) -> str:
        """Returns the id of the request's residency (the server's record of it). The request's
        stores carry this id, so that they use the reserved room. Empty if the server has not opened
        a residency."""
        one = self._residents.get(request_id)
        return "" if one is None or one.opened is None else one.residency_id

    def is_admitted(self, state: RequestState, now_s: float) -> bool:
        """Returns True if the request may begin: the server has reserved room for all its present
        blocks, or all its blocks may stay on the device (`DevicePool.stays_whole`). Retries a
        reservation that the server has refused.

        Also registers a request that this object does not know. Each key space has its own object
        of this class, and the request has arrived before the engine's weights, and so its key
        space, changed.
        """
        request_id = state.request.request_id
        if request_id not in self._residents:
            self.arrived(state, now_s)
        one = self._residents.get(request_id)
        if one is None:
            return True
        self._reserve(one)
        if self._num_ahead < MOST_AHEAD or self._has_asked(one):
            self._reservations.renew(one, now_s)
        self._num_ahead += self._has_asked(one)
        alone = one.must_be_whole or self._reservations.is_away
        self._pool.begin_whole(request_id, alone and self._pool.could_be_whole(state.request))
        return self._fits(one) or self._pool.stays_whole(state.request)

    def has_room(self, request_id: str) -> bool:
        """Returns True if the server has reserved room for all present blocks of the request.
        Called by `ResidentManager`, through `ResidentSide`."""
        one = self._residents.get(request_id)
        return one is not None and self._fits(one)

    def _fits(self, one: Resident) -> bool:
        """Returns True if the server has reserved room for all present blocks of the request."""
        return self._reservations.is_open(one) and one.room >= self._needed(one)

    def usable_tokens(self, request: Any, hit_tokens: int) -> int | None:
        """Returns how many tokens of a hit the request may use. The hit's blocks must either all
        fit on the device now, or be pinned by the server for this request. So this is
        - the whole hit, if the device now has room for all blocks of the request;
        - otherwise the leading part whose blocks the server has pinned for this request;
        - None ("ask again") while the server's answer to the call that pins them is awaited.

        Returns 0 for a request that begins on the device because the server is away. With
        `residency = "auto"`, if the server can't pin all blocks of the hit, returns the whole hit
        for a request that fits into the device's pool when the pool is empty.

        hit_tokens: length of the hit, including the hit in vLLM's own prefix cache.
        """
        one = self._residents.get(request.request_id)
        if one is None:
            return hit_tokens
        if self._pool.begins_alone(request.request_id):
            return 0
        self._reservations.take_answer(one)
        num_blocks = hit_tokens // self._block_tokens
        stays_whole = self._pool.stays_whole(request)
        if stays_whole and not (self._fits(one) and self._reservations.is_connected):
            return hit_tokens
        if self._pool.has_room_for(request):
            return hit_tokens
        if one.kept >= num_blocks:
            one.asks_again = False
            return hit_tokens
        if one.asked is None and one.asks_again:
            # The server has answered, but has not pinned all blocks of the hit. So the whole hit
            # can be used only if all its blocks can stay on the device.
            one.asks_again = False
            del one.names[one.kept :]
            return hit_tokens if stays_whole else one.kept * self._block_tokens
        if one.asked is None:
            one.asks_again = True
            # Names all blocks of the hit by their shared hashes, because the blocks of a hit are
            # exact. (The request may have computed inexact blocks there before a preemption.)
            one.name(self._groups.hashes(request, 0), num_blocks, num_blocks)
            self._reservations.ask(one, num_blocks)
        return None

    # ----------------------------------------------------------------------------------------- room

    def _needed(self, one: Resident) -> int:
        """Returns the number of blocks that the request has now, including the block of its next
        token."""
        request = one.state.request
        tokens = max(request.num_tokens, request.num_computed_tokens + 1)
        return min(one.most_blocks, -(-tokens // self._block_tokens))

    def _reserve(self, one: Resident) -> None:
        """Sets `one.wanted`, the number of blocks for which the request should have room in the
        server. In general, these are its present blocks and QUANTUM_TOKENS more; the number is
        raised when less than half of the additional room is left. For a held request (left out of
        steps for lack of room), and for a request that does not ask ahead (`Resident.asks_ahead`),
        these are only its present blocks."""
        needed = self._needed(one)
        quantum = -(-QUANTUM_TOKENS // self._block_tokens)
        if one.is_held or not one.asks_ahead:
            one.wanted = needed
        elif one.room < needed + quantum // 2:
            one.wanted = min(one.most_blocks, needed + quantum)

    def held(self, now_s: float) -> list[str]:
        """Returns the ids of the requests to leave out of the coming step, because the server has
        no room for their next block. Asks the server for room for these requests. Called before
        each step (`ResidentManager.step_starts`).

        Also parks requests: a parked request releases its room, vLLM preempts it if it runs, and it
        waits for room again. A request is parked for one of three reasons:
        - It has not begun, and a running request needs room (`_park_idle`).
        - All running requests have been left out of steps for `PARK_S` (`_park`).
        - It has waited too long for its own room, which other requests got after a reconnect
          (`_is_outwaited`).
        """
        self._reservations.note_silence(self._residents.values(), now_s)
        self._park_idle(now_s)
        held = []
        for one in self._residents.values():
            if self._is_outwaited(one) and self._pool.is_running(one.request_id):
                self._release_room(one)
            was_held, one.is_held = one.is_held, self._is_cramped(one)
            if one.is_held:
                if not was_held:
                    one.ask_at_s = now_s
                self._reserve(one)
                self._reservations.renew(one, now_s)
                one.is_held = self._is_cramped(one)
            if one.is_held:
                held.append(one.request_id)
        self._reservations.has_cramped = bool(held)
        parked = self._park(now_s)
        self._num_ahead = 0
        return [request_id for request_id in held if request_id != parked]

    def _is_cramped(self, one: Resident) -> bool:
        """Returns True if the request has blocks on the device and the server has reserved no room
        for its next block. Returns False for a request that has lost blocks, because vLLM preempts
        it anyway, and for a request whose blocks may all stay on the device."""
        return (
            one.opened is not None
            and not one.is_lost
            and one.room < self._needed(one)
            and self._pool.has_blocks(one.request_id)
            and not self._pool.stays_whole(one.state.request)
        )

    # ---------------------------------------------------------------------------------------- moves

    def _may_move(self, one: Resident) -> bool:
        """Returns True if the request may be moved off the device, so that its old blocks are only
        in the server: the server has reserved room for all its blocks on the present connection,
        and has lost none of them."""
        return self._fits(one) and self._is_sure(one) and not one.is_lost

    def _is_sure(self, one: Resident) -> bool:
        """Returns True if the server has confirmed, on the present connection, that it pins the
        request's kept blocks."""
        return self._reservations.is_served(one) and one.pin is one.opened

    def make_room(self) -> None:
        """Moves requests off the device if the device's pool has too few free blocks for the coming
        step (`moves.to_move`), and keeps blocks there that the server may have lost. Called before
        each step (`ResidentManager.step_starts`)."""
        residents = self._residents.items()
        self._pool.keep({name for name, one in residents if not self._is_sure(one)})
        demand = self._pool.demand(self.has_room)
        if demand is None or not demand.is_short:
            return
        reliefs = {}
        for request_id in self._pool.running_requests():
            one = self._residents.get(request_id)
            if one is not None and self._may_move(one):
                relief = self._pool.relief(request_id, self.kept_tokens(request_id))
                if relief is not None:
                    reliefs[request_id] = relief
        for request_id in to_move(demand, reliefs):
            self._pool.move(request_id)
            self._stats.add("moved_residencies")

    def _park_idle(self, now_s: float) -> None:
        """Parks a request that has not begun, if the server has refused room for the next block of
        a running request. The parked request releases its room in the server; the running request
        asks for room again at once. Parks the request that vLLM would serve last (`_last`)."""
        refused = [
            one
            for one in self._residents.values()
            if one.is_held and one.opening is None and self._is_cramped(one)
        ]
        idle = self._last(self._is_idle) if refused else None
        if idle is not None:
            self._release_room(idle)
            for one in refused:
                one.ask_at_s = now_s

    def _park(self, now_s: float) -> str | None:
        """Parks one request if all running requests have been held (left out of steps for lack of
        room in the server) for `PARK_S`: of the requests with room, the one that vLLM would serve
        last (`_last`). vLLM preempts it and it releases its room, so that the other requests can
        continue. Returns the id of the parked request; None if no request was parked.

        The blocks of the parked request stay in the arena until the server evicts them, so the
        request may hit them when it begins again."""
        running = [one for name, one in self._residents.items() if self._pool.has_blocks(name)]
        last = self._last(lambda one: one.opened is not None)
        is_stuck = bool(running) and all(one.is_held for one in running)
        if not is_stuck or last is None or not self._reservations.is_served(last):
            self._stuck_since_s = None
            return None
        if self._stuck_since_s is None:
            self._stuck_since_s = now_s
        if now_s - self._stuck_since_s < PARK_S or self._pool.is_in_flight(last.request_id):
            return None
        self._stuck_since_s = None
        self._release_room(last)
        return last.request_id

    def _has_asked(self, one: Resident) -> bool:
        """Returns True if the request has room in the server, or has asked for it and has got no
        answer yet."""
        return one.opening is not None or one.opened is not None

    def _is_idle(self, one: Resident) -> bool:
        """Returns True if the request has room in the server but has not begun."""
        has_begun = one.computed or self._pool.has_blocks(one.request_id)
        return not has_begun and self._reservations.is_served(one)

    def _last(self, is_meant: Callable[[Resident], bool]) -> Resident | None:
        """Returns the request that vLLM's scheduler would serve last among those for which
        `is_meant` returns True: the request with the lowest priority, and of several the one that
        arrived last. Returns None if `is_meant` returns True for no request."""
        meant = filter(is_meant, reversed(self._residents.values()))
        return max(meant, key=lambda one: one.state.request.priority, default=None)

    def _release_room(self, one: Resident) -> None:
        """Parks a request: releases its room in the server and makes vLLM preempt it. The request
        then waits for room again and begins anew."""
        self._stats.add("parked_residencies")
        logger.info(
            "hotkv: request %s gives its room in host memory up to others, and waits until it can "
            "begin anew",
            one.request_id,
        )
        self._pool.lose(one.request_id)
        self._start_over(one)
        self._reservations.wait(one)
        one.waited_s = 0.0

    def _is_outwaited(self, one: Resident) -> bool:
        """Returns True if other requests got this request's room after a reconnect, and this
        request has waited for `timeout_s`. Such a request is parked (preempted, so that it waits
        for room again). Other requests that wait for so long end with an error."""
        is_long = one.waited_s >= self._timeout_s
        return one.has_lost_room and is_long and self._reservations.is_connected

    # ---------------------------------------------------------------------------------------- names

    def names(self, state: RequestState, until: int) -> Sequence[bytes]:
        """Returns the names of a resident request's blocks (the hashes under which the server
        stores them), at least of the first `until` blocks, which must be computed.

        A block that must not be shared at this time, because its KV is not exact, gets a private
        name, which no other request has. The name of a block that the server has pinned never
        changes.
        """
        request, one = state.request, self._residents[state.request.request_id]
        exact = self._exactness.exact_tokens(request.request_id) // self._block_tokens
        shared = self._groups.hashes(request, 0)
        if shared:
            return one.name(shared, until, exact)
        return one.name(self._groups.own_hashes(request, 0), until, 0)

    def private_from(self, request_id: str) -> int:
        """Returns the position of the first block of a resident request that has a private name, by
        which no other request finds the block; ENDLESS without such a block."""
        return self._residents[request_id].private_from

    def reset(self, request_id: str) -> None:
        """Handles a reset of the cache for a request: its KV from before the reset must not be
        found by other requests.
        - A request with blocks on the device continues with these blocks. Blocks that the server
          has not pinned yet get private names, by which no other request finds them
          (`_make_private`).
        - A request without blocks on the device, or whose blocks are being loaded, is computed anew
          if the server may have pinned any of its blocks."""
        one = self._residents[request_id]
        if self._pool.has_blocks(request_id) and not one.state.is_loading:
            self._make_private(one)
        elif one.named:
            self._start_over(one)

    def _make_private(self, one: Resident) -> None:
        """Makes all blocks of the request that the server has not pinned yet private: they get
        names (the hashes under which the server stores them) by which no other request finds them.

        If such a block had a name already, the server may have pinned it under that name. Then the
        request starts over: all its blocks are stored anew, or, if the device may not have all of
        them, the request is computed anew.
        """
        if one.named > one.kept:
            if not self._pool.stays_whole(one.state.request):
                self._pool.lose(one.request_id)
            self._start_over(one)
        del one.names[one.kept :]
        one.private_from = min(one.private_from, one.kept)
        one.store_from(one.kept)

    def distrust(self) -> None:
        """Handles that the KV on the device has become inexact. Blocks that the server has not
        pinned yet get private names (hashes that no other request has), so that no other request
        finds them in the server."""
        for request_id, one in self._residents.items():
            if self._pool.has_blocks(request_id):
                self._make_private(one)

    # --------------------------------------------------------------------------------------- stores

    def stores(self, request_id: str, job: StoreJob) -> None:
        """Records that `job` stores blocks of the request. The server is asked to pin these blocks
        after the store has ended."""
        one = self._residents.get(request_id)
        runs = (*job.runs, *job.representations)
        if one is not None and runs:
            one.storing[job.store_id] = min(run.depth for run in runs)

    def stored(self, store: StoreInFlight) -> None:
        """Records that a store has ended, whatever its result. Called for the stores of all
        requests."""
        one = self._residents.get(store.request_id)
        if one is not None:
            one.storing.pop(store.store_id, None)

    def kept_tokens(self, request_id: str) -> int:
        """Returns how many leading tokens of the request are in blocks that the server has pinned,
        so that vLLM may free these blocks on the device. Called by `ResidentManager`, through
        `ResidentSide`."""
        one = self._residents.get(request_id)
        if one is None or one.is_lost:
            return 0
        self._reservations.take_answer(one)
        return one.kept * self._block_tokens

    def is_freeing(self, now_s: float) -> bool:
        """Returns True if resident requests (requests whose old blocks may be only in the server's
        memory) will soon free device blocks, so that vLLM can wait for these blocks instead of
        preempting a request."""
        if self._pool.has_lost or any(one.is_lost for one in self._residents.values()):
            return False
        return any(
            (one.storing or one.asked is not None)
            and one.waited_s < self._timeout_s
            and self._would_free(one)
            for one in self._residents.values()
        )

    def _would_free(self, one: Resident) -> bool:
        """Returns True if the request will free device blocks once the server has pinned more of
        its blocks. A request that may stay wholly on the device frees blocks only by a move off the
        device, so this move must be possible and free blocks."""
        if not self._pool.stays_whole(one.state.request):
            return self._pool.has_blocks(one.request_id)
        relief = self._pool.relief(one.request_id, one.state.request.num_tokens)
        return relief is not None and relief.freed > 0 and self._may_move(one)

    # ---------------------------------------------------------------------------------------- steps

    def step(self, scheduler_output: Any, rows: RowNames, now_s: float) -> ResidentStep:
        """Processes a planned step: handles the server's answers for all resident requests
        (requests whose old blocks may be only in the server's memory), sends due calls, and returns
        the step's message to the workers about these requests. Must be called before vLLM adds the
        step's tokens to the requests' `num_computed_tokens`.

        rows: holds vLLM's `Request` of each running request.
        """
        preempted = tuple(scheduler_output.preempted_req_ids or ())
        for request_id in preempted:
            if request_id in self._residents:
                one = self._residents[request_id]
                if one.is_lost or one.private_from < len(one.names):
                    # Starts over: the blocks in the server were lost, or some are inexact (private)
                    # although the request's new computation makes exact ones.
                    self._start_over(one)
                else:
                    one.begin_anew(one.kept)
        for one in self._residents.values():
            self._advance(one, now_s)
        self._take_compared()
        lost = [name for name, one in self._residents.items() if one.is_lost]
        return ResidentStep(self.rows.of_step(scheduler_output, rows), preempted, tuple(lost))

    def _take_compared(self) -> None:
        """Handles the server's answers to the calls that pin requests' blocks again after a
        reconnect. If a request's blocks are pinned at their old offsets in the arena, workers may
        read them under the new pin. Otherwise the server has lost the blocks, and the request must
        be computed anew unless the device still has all its blocks."""
        for request_id, pin, is_same in self._reservations.take_compared():
            one = self._residents.get(request_id)
            if one is None or pin is not one.opened:
                # Ignores an answer about a residency that has been closed or opened again since.
                continue
            if is_same:
                one.pin = pin
            elif self._pool.stays_whole(one.state.request):
                # The server has lost blocks, but the device still has all blocks of the request, so
                # they are stored again.
                self._start_over(one)
            else:
                one.is_lost = True
                if not self._pool.has_blocks(request_id):
                    # A request without device blocks is in no step, so no worker will report that
                    # it has lost blocks.
                    self.lost([request_id])

    def _advance(self, one: Resident, now_s: float) -> None:
        """Advances a request by a step: asks the server to pin newly stored blocks, handles its
        answers, and ends the request with an error if it has waited too long."""
        calls = self._reservations
        self._reserve(one)
        has_begun = self._pool.has_blocks(one.request_id)
        if has_begun or self._has_asked(one) or calls.is_refused(one):
            calls.renew(one, now_s)
        # Considers only blocks whose stores have ended, successfully or not. After a long wait,
        # stores in flight are ignored, because their reports may have been lost.
        stores = one.storing.values() if one.waited_s <= self._timeout_s / 2 else ()
        until = min([one.state.store.stored_blocks[0], *stores])
        if until > one.kept:
            calls.ask(one, until)
        one.computed = max(
            one.computed, one.state.request.num_computed_tokens // self._block_tokens
        )
        is_waiting = not calls.is_open(one) or one.computed > one.kept
        if one.is_held:
            # vLLM leaves a held request out of steps, and its last blocks are stored with its next
            # step. So don't count the time until these stores as a wait.
            is_waiting = not calls.is_served(one)
        # The time in which a request is queued does not count as a wait: it then waits for vLLM, or
        # for room in the server.
        needs_server = not self._pool.could_be_whole(one.state.request)
        is_queued = not (has_begun or (needs_server and calls.is_away))
        passed_s, one.seen_s = min(now_s - one.seen_s, SLOW_STEP_S), now_s
        if not is_waiting:
            one.waited_s = 0.0
        elif not is_queued:
            one.waited_s += passed_s
        if self._pool.stays_whole(one.state.request):
            # The request needs no room in the server yet.
            one.was_whole = True
            return
        if one.was_whole:
            one.was_whole, one.waited_s = False, 0.0
        if one.refusal is not None:
            self._fail(one, f"the KV cache server has no room for it: {one.refusal.message}")
        elif one.waited_s >= self._timeout_s and not self._is_outwaited(one):
            self._give_server_up(one)

    def _give_server_up(self, one: Resident) -> None:
        """Makes vLLM compute the request anew on the device, if it fits there; otherwise makes vLLM
        end it with an error."""
        if one.must_be_whole or not self._pool.could_be_whole(one.state.request):
            why = "the KV cache server has not taken its blocks for hotkv.residency_timeout_s"
            self._fail(one, f"{why} = {self._timeout_s:.0f} s")
            return
        logger.info(
            "hotkv: request %s is computed anew on the device, because the KV cache server has not "
            "taken its blocks for hotkv.residency_timeout_s = %.0f s",
            one.request_id,
            self._timeout_s,
        )
        one.must_be_whole, one.waited_s = True, 0.0
        self._pool.lose(one.request_id)
        self._start_over(one)

    def _fail(self, one: Resident, why: str) -> None:
        """Makes vLLM end a request with an error, because the request can't continue."""
        if not one.has_failed:
            one.has_failed = True
            self._stats.add("failed_residencies")
            self._pool.fail(one.request_id, why)

    def lost(self, request_ids: Iterable[str]) -> None:
        """Handles requests that have lost blocks in the server and that vLLM computes anew: closes
        their residencies (the server's records of them), and forgets all blocks that the server
        holds for them. Makes vLLM end a request with an error at its MAX_LOSSES-th loss without a
        new token in between."""
        for request_id in request_ids:
            one = self._residents.get(request_id)
            if one is not None:
                self._stats.add("lost_residencies")
                self._start_over(one)
                num_tokens = one.state.request.num_tokens
                one.num_losses = one.num_losses + 1 if num_tokens == one.tokens_at_loss else 1
                one.tokens_at_loss = num_tokens
                if one.num_losses == MAX_LOSSES:
                    self._fail(one, f"its bytes in host memory were lost {MAX_LOSSES} times")

    def _start_over(self, one: Resident) -> None:
        """Closes the request's residency (the server's record of its room and pinned blocks) and
        forgets all blocks that the server holds for the request. Gives the request a new residency
        id, under which a residency is opened later."""
        self._close(one)
        one.residency_id, one.is_lost = self._new_id(one.request_id), False
        one.begin_anew(0)
        one.named = 0
