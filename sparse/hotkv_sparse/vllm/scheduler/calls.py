"""Sends the calls that reserve room for resident requests and pin their stored blocks.

Always true:
- A request has at most one reservation call and one pin call (`ask`) in flight.
- After a reconnect both are repeated. A request whose blocks are not at their old offsets again has
  lost them.
- While a running request lacks room for its next block, requests without room do not ask for
  any.
"""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

import numpy as np

from hotkv_client.session import Session
from hotkv_client.types import Int64s, ResidencyOpened, ResidentBlocks
from hotkv_proto.errors import HotKVError, Reason, SessionLostError
from hotkv_sparse.vllm.scheduler.resident import Resident
from hotkv_vllm import link
from hotkv_vllm.link import StreamCount
from hotkv_vllm.stats import HotKVStats

logger = link.logger
ASK_AGAIN_S = 0.1
"""After a refused reservation."""
GROW_AGAIN_S = 1.0
"""The same if the next block has room: the request continues meanwhile."""
TURN_S = 2.0
"""A request that has waited so long for room goes before those that arrived later."""
SILENT_S = 3.0
"""A server that leaves a call unanswered for so long counts as away."""
OF_THE_SESSION = (Reason.UNKNOWN_SESSION, Reason.DUPLICATE_ID)
"""Refusals because of the session's state: the call is repeated."""
CLOSED = -1
"""`Resident.stream` of a residency that is open on no connection."""


class ResidencyCalls:
    """Scheduler thread only, except for callbacks of futures.

    streams: counts the session's connections.
    group: of the session.
    has_cramped: set by the caller while a running request lacks room for its next block.
    """

    def __init__(
        self, session: Session, streams: StreamCount, stats: HotKVStats, group: int = 0
    ) -> None:
        self._session = session
        self._group = group
        self._streams = streams
        self._stats = stats
        self._compared: deque[tuple[str, ResidencyOpened, bool]] = deque()
        # By request that waits after a refusal: vLLM's priority (the least is served first),
        # waiting since.
        self._refused: dict[str, tuple[int, float]] = {}
        self._is_silent = False
        # To close: the last step that may read the blocks, residency id.
        self._closing: list[tuple[int, str]] = []
        self.has_cramped = False

    def __repr__(self) -> str:
        return f"ResidencyCalls({len(self._refused)} refused)"

    @property
    def is_connected(self) -> bool:
        return self._session.connected

    @property
    def is_away(self) -> bool:
        return not self.is_connected or self._is_silent

    def note_silence(self, residents: Iterable[Resident], now_s: float) -> None:
        self._is_silent |= any(one.is_unanswered(now_s - SILENT_S) for one in residents)

    def is_open(self, one: Resident) -> bool:
        """The server has reserved room on the present connection."""
        return one.opened is not None and one.stream == self._streams.number

    def is_served(self, one: Resident) -> bool:
        return self.is_connected and self.is_open(one)

    def open(self, one: Resident, now_s: float) -> None:
        """Asks for room when it is the request's turn. After a reconnect at once: its blocks
        must be pinned again."""
        if one.opened is None and not self._has_turn(one, now_s):
            return
        self._ask_room(one, one.wanted if one.opened is None else one.room)

    def _has_turn(self, one: Resident, now_s: float) -> bool:
        """No request of higher priority, or of the same and longer waiting, waits for room."""
        priority = one.state.request.priority
        turn = self._refused.get(one.request_id, (priority, now_s))
        return not self.has_cramped and not any(
            other < turn and other[1] < now_s - TURN_S for other in self._refused.values()
        )

    def _ask_room(self, one: Resident, num_blocks: int) -> None:
        one.asked_room, one.asked_stream = num_blocks, self._streams.number
        one.opening_s = one.seen_s
        one.opening = self._session.open_residency(one.residency_id, {self._group: num_blocks})

    def close(self, one: Resident, after_step: int, ended_step: int) -> None:
        """Closes a residency that is open, being opened or refused, after the last step that may
        read its blocks."""
        if one.opening is not None or one.opened is not None or one.was_refused:
            # A step may read only a request that has begun and has blocks in host memory.
            may_be_read = one.kept and one.computed
            self._closing.append((after_step if may_be_read else ended_step, one.residency_id))
            self.close_ended(ended_step)
        one.opening, one.opened, one.room = None, None, 0
        one.is_held = one.has_lost_room = False
        self._refused.pop(one.request_id, None)

    def close_ended(self, ended_step: int) -> None:
        closing, self._closing = self._closing, []
        for last_step, residency_id in closing:
            if last_step <= ended_step:
                self._session.close_residency(residency_id)
            else:
                self._closing.append((last_step, residency_id))

    def wait(self, one: Resident) -> None:
        """Queues a request that has released its room; it counts as waiting since its arrival."""
        self._refused[one.request_id] = one.state.request.priority, one.arrived_s

    def is_refused(self, one: Resident) -> bool:
        return one.request_id in self._refused

    def renew(self, one: Resident, now_s: float) -> None:
        """Handles answers, and repeats calls when they are due."""
        # The pin call's answer comes first: after a reconnect `_opened` pins all kept blocks
        # again, and these must include that answer's blocks.
        self.take_answer(one)
        if one.opening is not None and one.opening.done():
            opening, one.opening = one.opening, None
            self._is_silent = False
            error = opening.exception()
            if error is None:
                self._opened(one, opening.result())
            else:
                asks_ahead = self.is_open(one) and not one.is_held
                one.ask_at_s = now_s + (GROW_AGAIN_S if asks_ahead else ASK_AGAIN_S)
                self._was_refused(one, error, now_s)
        may_ask = one.opening is None and self._session.connected and now_s >= one.ask_at_s
        if may_ask and not self.is_open(one):
            self.open(one, now_s)
        elif may_ask and one.wanted > one.room:
            self._ask_room(one, one.wanted)

    def _was_refused(self, one: Resident, why: BaseException, now_s: float) -> None:
        if self.is_open(one) and (not one.is_held or one.asked_room > one.wanted):
            # Asked ahead: its next block has room.
            return
        if isinstance(why, HotKVError):
            if why.reason is Reason.NO_ROOM_FOR_RESIDENCY and one.opened is None:
                self._refused.setdefault(one.request_id, (one.state.request.priority, now_s))
            elif why.reason is Reason.NO_ROOM_FOR_RESIDENCY:
                one.has_lost_room = not self.is_open(one)
            elif why.reason is Reason.RESIDENCY_TOO_LARGE and one.asks_ahead:
                # Asked ahead of its need. What it needs now may still fit.
                one.asks_ahead = False
            elif not why.retryable and why.reason not in OF_THE_SESSION:
                one.refusal = why
        if not one.was_refused:
            one.was_refused = True
            self._stats.add("refused_residencies")
            logger.info("hotkv: request %s waits for room in host memory: %s", one.request_id, why)

    def _opened(self, one: Resident, opened: ResidencyOpened) -> None:
        """A residency that was opened anew must pin its blocks again."""
        self._refused.pop(one.request_id, None)
        one.has_lost_room = False
        has_grown = one.opened == opened and one.stream == one.asked_stream
        one.room, one.stream = one.asked_room, one.asked_stream
        if has_grown:
            return
        is_new = one.opened is None
        one.opened, one.waited_s = opened, 0.0
        # `ResidentRequests.usable_tokens` asks once more to pin a hit: its call may have failed
        # with the earlier connection.
        one.asks_again = False
        if is_new or not one.kept:
            one.pin = opened
            return
        answer = self._session.extend_residency(
            one.residency_id, self._group, 0, one.names[: one.kept]
        )
        request_id, known = one.request_id, one.offsets
        answer.add_done_callback(lambda done: self._compare(request_id, opened, known, done))

    def _compare(
        self,
        request_id: str,
        opened: ResidencyOpened,
        known: Int64s,
        done: "Future[ResidentBlocks]",
    ) -> None:
        """Compares offsets before and after a reconnect. Runs in a thread of the client library."""
        error = done.exception()
        if isinstance(error, SessionLostError):
            # The next connection pins and compares again.
            return
        is_same = error is None and np.array_equal(done.result().offsets, known)
        self._compared.append((request_id, opened, is_same))

    def take_compared(self) -> list[tuple[str, ResidencyOpened, bool]]:
        """Request id, the answer that opened the residency again, and whether all offsets are
        the old ones."""
        return [self._compared.popleft() for _ in range(len(self._compared))]

    # ----------------------------------------------------------------------------------------- pins

    def ask(self, one: Resident, until: int) -> None:
        """Pins the next blocks before `until`, the end of the room and the first block without a
        name, unless such a call is in flight."""
        blocks = range(one.kept, min(until, len(one.names), one.room))
        if one.asked is None and one.opened is not None and self._session.connected and blocks:
            hashes = one.names[blocks.start : blocks.stop]
            answer = self._session.extend_residency(
                one.residency_id, self._group, blocks.start, hashes
            )
            one.asked, one.asked_s = (answer, blocks), one.seen_s

    def take_answer(self, one: Resident) -> None:
        """Records the blocks pinned by `ask`, if the answer has come."""
        if one.asked is None or not one.asked[0].done():
            return
        (answer, blocks), one.asked = one.asked, None
        self._is_silent = False
        error = answer.exception()
        if isinstance(error, HotKVError) and error.reason is Reason.UNKNOWN_RESIDENCY:
            # The server has closed the residency. `renew` opens it again and compares the
            # offsets.
            one.stream = CLOSED
        if error is not None or len((found := answer.result()).offsets) != len(blocks):
            return
        # None if the session is closed by now: the server is then asked again.
        arena = self._session.arena()
        if arena is not None and one.keep(blocks.start, found, arena.file_id):
            one.waited_s = 0.0
