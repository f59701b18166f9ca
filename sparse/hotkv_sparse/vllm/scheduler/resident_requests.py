"""Decides which resident requests may run: reserves their room, and pins their stored blocks, so
that vLLM may free these on the device.

Always true:
- A resident request begins only with room for all its present blocks. With `residency = "auto"`, or
  if the server is away, it may begin wholly on the device, and moves off it once it has that room.
- No request that fits on the device waits longer than `timeout_s`: then vLLM computes it anew
  there.
- A running request without room for its next block is *held*: left out of steps.
- A *parked* request is preempted, releases its room and queues for it again. The last by vLLM's
  order is parked if a running request is held while a waiting one has room, or if all have been
  held for `PARK_S`; also one whose room others got after a reconnect.
- No block leaves the device while the server may have lost it, for example after a reconnect.
- A block counts as kept (`kept_tokens`) only once its pinned offset is known. Workers get it before
  a step in which the block may have been freed.
- Blocks without exact KV, or of requests without shared names (`CachedGroups`), have private names.

Scheduler thread only. Never blocks.
"""

import itertools
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hotkv_sparse.vllm.device_pool import DevicePool
from hotkv_sparse.vllm.scheduler.calls import ResidencyCalls
from hotkv_sparse.vllm.scheduler.moves import Relief, to_move
from hotkv_sparse.vllm.scheduler.resident import Resident, ResidentRows
from hotkv_sparse.vllm.scheduler.rows import RowNames
from hotkv_sparse.vllm.step import ResidentStep
from hotkv_vllm.identity.exactness import Exactness
from hotkv_vllm.link import logger
from hotkv_vllm.metadata import StoreJob
from hotkv_vllm.scheduler.groups import CachedGroups
from hotkv_vllm.scheduler.request import RequestState
from hotkv_vllm.scheduler.store.stores_in_flight import StoreInFlight
from hotkv_vllm.stats import HotKVStats

SLOW_STEP_S = 1.0
"""The most that one step adds to a request's wait."""
QUANTUM_TOKENS = 512
"""Room reserved beyond the present tokens; more is asked for when half is used."""
MAX_WAITING_WITH_ROOM = 4
"""Waiting requests, first in vLLM's queue, that may hold room. More could take the whole server
from other engines."""
PARK_S = 1.0
MAX_SHOWN_CHARS = 128
MAX_LOSSES = 8
"""That end a request with an error, without a new token in between."""


class ResidentRequests:
    """Owns the residencies of all resident requests.

    exactness: only exact blocks may have shared names.
    timeout_s: `hotkv.residency_timeout_s`.
    group: of the session.
    tells_whole: see `ResidentRows`.
    """

    def __init__(
        self,
        reservations: ResidencyCalls,
        groups: CachedGroups,
        exactness: Exactness,
        pool: DevicePool,
        stats: HotKVStats,
        timeout_s: float,
        group: int = 0,
        *,
        tells_whole: bool = True,
    ) -> None:
        self._reservations = reservations
        self._groups = groups
        self.group = group
        self._block_tokens = groups.specs[group].block_tokens
        self._exactness = exactness
        self._pool = pool
        self._stats = stats
        self._timeout_s = timeout_s
        self._prefix, self._salt = uuid.uuid4().hex[:8], os.urandom(16)
        self._numbers = itertools.count()
        self._residents: dict[str, Resident] = {}
        self.rows = ResidentRows(self._residents, pool, self._block_tokens, tells_whole)
        self._stuck_since_s: float | None = None
        self._num_ahead = 0

    def __repr__(self) -> str:
        return f"ResidentRequests({len(self._residents)} requests)"

    # ------------------------------------------------------------------------------------- requests

    def arrived(self, state: RequestState, now_s: float) -> None:
        """Ignores requests that always fit on the device. Asks for room if few wait before it;
        otherwise `is_admitted` does."""
        request = state.request
        if self._pool.holds_whole(request):
            return
        most = -(-self._pool.longest(request) // self._block_tokens)
        residency_id = self._new_id(request.request_id)
        salt, group = self._salt, self.group
        one = Resident(state, most, residency_id, salt, group, seen_s=now_s, arrived_s=now_s)
        queued = (name for name in reversed(self._residents) if not self._pool.has_blocks(name))
        num_before = len(tuple(itertools.islice(queued, MAX_WAITING_WITH_ROOM)))
        self._residents[request.request_id] = one
        if num_before < MAX_WAITING_WITH_ROOM:
            self._reserve(one)
            self._reservations.open(one, now_s)

    def _new_id(self, request_id: str) -> str:
        """Never used before, because private names are computed from it. Shows the request's id,
        printable."""
        shown = "".join(filter(str.isprintable, request_id[:MAX_SHOWN_CHARS]))
        return f"{self._prefix}-{next(self._numbers)}-{shown}"

    def ended(self, request_id: str) -> None:
        """`SparseRows.ended` notifies the workers."""
        one = self._residents.pop(request_id, None)
        self._pool.forget(request_id)
        if one is not None:
            self._close(one)

    def _close(self, one: Resident) -> None:
        """Closes the residency after the steps in progress: these could read other bytes, and
        store wrong KV."""
        self._reservations.close(one, self._pool.planned_step, self._pool.ended_step)

    def step_ended(self) -> None:
        self._reservations.close_ended(self._pool.ended_step)

    def keeps(self, request_id: str) -> bool:
        return request_id in self._residents

    def kept_as(self, request_id: str) -> str:
        """The id that the request's stores carry; empty without a residency."""
        one = self._residents.get(request_id)
        return "" if one is None or one.opened is None else one.residency_id

    def is_admitted(self, state: RequestState, now_s: float) -> bool:
        """Whether the request may begin. Retries a refused reservation. Registers requests of an
        earlier key space, which had another object of this class."""
        request_id = state.request.request_id
        if request_id not in self._residents:
            self.arrived(state, now_s)
        one = self._residents.get(request_id)
        if one is None:
            return True
        self._reserve(one)
        if self._num_ahead < MAX_WAITING_WITH_ROOM or self._has_asked(one):
            self._reservations.renew(one, now_s)
        self._num_ahead += self._has_asked(one)
        alone = one.must_be_whole or self._reservations.is_away
        self._pool.begin_whole(request_id, alone and self._pool.could_be_whole(state.request))
        return self._fits(one) or self._pool.stays_whole(state.request)

    def has_room(self, request_id: str) -> bool:
        """`ResidentManager` asks, through `SparseScheduler`."""
        one = self._residents.get(request_id)
        return one is not None and self._fits(one)

    def _fits(self, one: Resident) -> bool:
        return self._reservations.is_open(one) and one.room >= self._needed(one)

    def usable_tokens(self, request: Any, device_tokens: int, hit_tokens: int) -> int | None:
        """How much of a hit the request may use. Its blocks must fit on the device or be pinned:
        - the whole hit, if the device has room for the whole request;
        - otherwise what is pinned for this request, None ("ask again") until that is known;
        - 0 if the request begins on the device because the server is away.

        A request that fits into an empty pool gets the whole hit if the server can't pin it
        (`"auto"`).

        device_tokens: of the hit in vLLM's own prefix cache, which `hit_tokens` includes.
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
        if self._pool.has_room_for(request, device_tokens):
            return hit_tokens
        if one.kept >= num_blocks:
            one.asks_again = False
            return hit_tokens
        if one.asked is None and one.asks_again:
            # Not all of the hit is pinned: it is usable as a whole only wholly on the device.
            one.asks_again = False
            del one.names[one.kept :]
            return hit_tokens if stays_whole else one.kept * self._block_tokens
        if one.asked is None:
            one.asks_again = True
            # Blocks of a hit are exact, even where the request computed inexact ones before a
            # preemption.
            one.name(self._groups.hashes(request, self.group), num_blocks, num_blocks)
            self._reservations.ask(one, num_blocks)
        return None

    # ----------------------------------------------------------------------------------------- room

    def _needed(self, one: Resident) -> int:
        """Includes the block of the next token."""
        request = one.state.request
        tokens = max(request.num_tokens, request.num_computed_tokens + 1)
        return min(one.most_blocks, -(-tokens // self._block_tokens))

    def _reserve(self, one: Resident) -> None:
        """Wants QUANTUM_TOKENS beyond the present blocks, more when half is used; none beyond if
        the request is held or does not ask ahead."""
        needed = self._needed(one)
        quantum = -(-QUANTUM_TOKENS // self._block_tokens)
        if one.is_held or not one.asks_ahead:
            one.wanted = needed
        elif one.room < needed + quantum // 2:
            one.wanted = min(one.most_blocks, needed + quantum)

    def held(self, now_s: float) -> list[str]:
        """Ids to leave out of the coming step. Asks for room for them, and parks requests.
        Called before each step (`ResidentManager.step_starts`)."""
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
        """The request is on the device and lacks room for its next block. False if lost: vLLM
        preempts it anyway."""
        return (
            one.opened is not None
            and not one.is_lost
            and one.room < self._needed(one)
            and self._pool.has_blocks(one.request_id)
            and not self._pool.stays_whole(one.state.request)
        )

    # ---------------------------------------------------------------------------------------- moves

    def _may_move(self, one: Resident) -> bool:
        return self._fits(one) and self._is_sure(one) and not one.is_lost

    def _is_sure(self, one: Resident) -> bool:
        """The server has confirmed, on the present connection, that it pins the kept blocks."""
        return self._reservations.is_served(one) and one.pin is one.opened

    def make_room(self) -> None:
        """Moves requests off the device if its pool is short, and keeps blocks there that the
        server may have lost. Called as `held`."""
        residents = self._residents.items()
        self._pool.keep({name for name, one in residents if not self._is_sure(one)})
        # Blocks that requests share are freed only by the last move.
        while (demand := self._pool.demand(self.has_room)) is not None and demand.is_short:
            chosen = to_move(demand, self._reliefs())
            for request_id in chosen:
                self._pool.move(request_id)
                self._residents[request_id].must_be_whole = False
                self._stats.add("moved_residencies")
            if not chosen:
                return

    def _reliefs(self) -> dict[str, Relief]:
        """Of the requests that can move, in the order of their admission."""
        reliefs = {}
        for request_id in self._pool.running_requests():
            one = self._residents.get(request_id)
            if one is not None and self._may_move(one):
                relief = self._pool.relief(request_id, self.kept_tokens(request_id))
                if relief is not None:
                    reliefs[request_id] = relief
        return reliefs

    def _park_idle(self, now_s: float) -> None:
        """Parks the last request that has not begun, if a running one was refused room, which
        asks again at once."""
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
        """Parks the last request with room, if all have been held for `PARK_S`. Its blocks stay
        until they are evicted, so it may hit them later."""
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
        return one.opening is not None or one.opened is not None

    def _is_idle(self, one: Resident) -> bool:
        has_begun = one.computed or self._pool.has_blocks(one.request_id)
        return not has_begun and self._reservations.is_served(one)

    def _last(self, is_meant: Callable[[Resident], bool]) -> Resident | None:
        """The request of lowest priority, and of several the latest."""
        meant = filter(is_meant, reversed(self._residents.values()))
        return max(meant, key=lambda one: one.state.request.priority, default=None)

    def _release_room(self, one: Resident) -> None:
        """Parks a request."""
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
        """Others got its room after a reconnect. Other requests that wait for so long end with
        an error."""
        is_long = one.waited_s >= self._timeout_s
        return one.has_lost_room and is_long and self._reservations.is_connected

    # ---------------------------------------------------------------------------------------- names

    def names(self, state: RequestState, until: int) -> Sequence[bytes]:
        """Returns at least the first `until` names, whose blocks must be computed."""
        request, one = state.request, self._residents[state.request.request_id]
        exact = self._exactness.exact_tokens(request.request_id) // self._block_tokens
        shared = self._groups.hashes(request, self.group)
        if shared:
            return one.name(shared, until, exact)
        return one.name(self._groups.own_hashes(request, self.group), until, 0)

    def private_from(self, request_id: str) -> int:
        """ENDLESS without a private name."""
        return self._residents[request_id].private_from

    def reset(self, request_id: str) -> None:
        """No other request may find KV from before. On the device the request continues, with
        private names for unpinned blocks; elsewhere, or while loading, it is computed anew if
        any block may be pinned."""
        one = self._residents[request_id]
        if self._pool.has_blocks(request_id) and not one.state.is_loading:
            self._make_private(one)
        elif one.named:
            self._start_over(one)

    def _make_private(self, one: Resident) -> None:
        """Renames the unpinned blocks. If one had a name, the server may have pinned it under
        that: all are stored anew, or the request is computed anew if the device may lack some.
        """
        if one.named > one.kept:
            if not self._pool.stays_whole(one.state.request):
                self._pool.lose(one.request_id)
            self._start_over(one)
        del one.names[one.kept :]
        one.private_from = min(one.private_from, one.kept)
        one.store_from(one.kept)
        one.store_beside(is_wanted=False)

    def distrust(self) -> None:
        """Renames the unpinned blocks: the device's KV has become inexact."""
        for request_id, one in self._residents.items():
            if self._pool.has_blocks(request_id):
                self._make_private(one)

    # --------------------------------------------------------------------------------------- stores

    def storing(self, request_id: str, job: StoreJob) -> None:
        """The server is asked to pin the store's blocks when it has ended."""
        one = self._residents.get(request_id)
        runs = (*job.runs, *job.attached)
        if one is not None and runs:
            one.storing[job.store_id] = min(run.depth for run in runs)

    def stored(self, store: StoreInFlight) -> None:
        """A store has ended, whatever its result. Called for the stores of all requests."""
        one = self._residents.get(store.request_id)
        if one is not None:
            one.storing.pop(store.store_id, None)

    def kept_tokens(self, request_id: str) -> int:
        """Tokens in pinned blocks, which vLLM may free. `ResidentManager` asks, through
        `SparseScheduler`."""
        one = self._residents.get(request_id)
        if one is None or one.is_lost:
            return 0
        self._reservations.take_answer(one)
        return one.kept * self._block_tokens

    def is_freeing(self, now_s: float) -> bool:
        """Device blocks will soon be free, so that vLLM can wait instead of preempting."""
        if self._pool.has_lost or any(one.is_lost for one in self._residents.values()):
            return False
        return any(
            (one.storing or one.asked is not None)
            and one.waited_s < self._timeout_s
            and self._would_free(one)
            for one in self._residents.values()
        )

    def _would_free(self, one: Resident) -> bool:
        """More pins would free device blocks. A request that may stay on the device frees them
        only by a move."""
        if not self._pool.stays_whole(one.state.request):
            return self._pool.has_blocks(one.request_id)
        relief = self._pool.relief(one.request_id, one.state.request.num_tokens)
        return relief is not None and relief.freed > 0 and self._may_move(one)

    # ---------------------------------------------------------------------------------------- steps

    def step(self, scheduler_output: Any, rows: RowNames, now_s: float) -> ResidentStep:
        """The step's message to the workers. Must be called before vLLM adds the step's tokens
        to `num_computed_tokens`."""
        preempted = tuple(scheduler_output.preempted_req_ids or ())
        for request_id in preempted:
            if request_id in self._residents:
                one = self._residents[request_id]
                if one.is_lost or one.private_from < len(one.names):
                    # Blocks were lost, or some are inexact although the new computation makes
                    # exact ones.
                    self._start_over(one)
                else:
                    one.begin_anew(one.kept)
        for one in self._residents.values():
            self._advance(one, now_s)
        self._take_compared()
        lost = [name for name, one in self._residents.items() if one.is_lost]
        return ResidentStep(self.rows.of_step(scheduler_output, rows), preempted, tuple(lost))

    def _take_compared(self) -> None:
        """Blocks at their old offsets may be read under the new pin. Others are lost, unless the
        device has the whole request."""
        for request_id, pin, is_same in self._reservations.take_compared():
            one = self._residents.get(request_id)
            if one is None or pin is not one.opened:
                # Of a residency that was closed or opened again since.
                continue
            if is_same:
                one.pin = pin
            elif self._pool.stays_whole(one.state.request):
                # The device still has all blocks: they are stored again.
                self._start_over(one)
            else:
                one.is_lost = True
                if not self._pool.has_blocks(request_id):
                    # In no step, so no worker will report the loss.
                    self.lost([request_id])

    def _advance(self, one: Resident, now_s: float) -> None:
        """Pins stored blocks, handles answers, and gives up after too long a wait."""
        calls = self._reservations
        self._reserve(one)
        has_begun = self._pool.has_blocks(one.request_id)
        if has_begun or self._has_asked(one) or calls.is_refused(one):
            calls.renew(one, now_s)
        if one.waited_s > self._timeout_s / 2:
            # The stores' reports may be lost.
            one.storing.clear()
        # Stores must have ended, successfully or not.
        until = min([one.stored_blocks, *one.storing.values()])
        if until > one.kept:
            calls.ask(one, until)
        done = one.state.request.num_computed_tokens // self._block_tokens
        one.computed = max(one.computed, done)
        is_waiting = not calls.is_open(one) or one.computed > one.kept
        # Blocks computed anew can't leave the device without the server, even kept ones.
        is_waiting |= done < one.computed and not calls.is_served(one)
        if one.is_held:
            # A held request's last blocks are stored with its next step: until then it does not
            # wait.
            is_waiting = not calls.is_served(one)
        # A queued request waits for vLLM, or for room: this time does not count.
        needs_server = not self._pool.could_be_whole(one.state.request)
        is_queued = not (has_begun or (needs_server and calls.is_away))
        passed_s, one.seen_s = min(now_s - one.seen_s, SLOW_STEP_S), now_s
        if not is_waiting:
            one.waited_s = 0.0
        elif not is_queued:
            one.waited_s += passed_s
        if self._pool.stays_whole(one.state.request):
            # It needs no room in the server yet.
            one.was_whole = True
            return
        if one.was_whole:
            one.was_whole, one.waited_s = False, 0.0
        if one.refusal is not None:
            self._fail(one, f"the KV cache server has no room for it: {one.refusal.message}")
        elif one.waited_s >= self._timeout_s and not self._is_outwaited(one):
            self._give_server_up(one)

    def _give_server_up(self, one: Resident) -> None:
        """Computes the request anew on the device, or fails it if it does not fit there."""
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
        if not one.has_failed:
            one.has_failed = True
            self._stats.add("failed_residencies")
            self._pool.fail(one.request_id, why)

    def lost(self, request_ids: Iterable[str]) -> None:
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
        """Forgets what the server holds for the request, and changes its residency id."""
        self._close(one)
        one.residency_id, one.is_lost = self._new_id(one.request_id), False
        one.begin_anew(0)
        one.named = 0
