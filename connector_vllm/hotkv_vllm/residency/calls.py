"""Sends the calls to the server for resident requests (requests whose old blocks may be only in the
server's memory): calls that reserve room (space in the arena) for their blocks, and calls that pin
stored blocks.

A *residency* is the server's record of a resident request: its reserved room and its pinned blocks.
The server's answer to the call that opens a residency, `ResidencyOpened`, identifies the pin.

Always true:
- A request has at most one reservation call and one pin call (`ask`) in flight.
- After a reconnect both calls are repeated for each request. If the server does not pin the
  request's blocks at their old offsets of the arena again, the request has lost its blocks.
- While a running request lacks room for its next block, requests that have no room yet do not ask
  for room.
"""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

import numpy as np

from hotkv_client.session import Session
from hotkv_client.types import Int64s, ResidencyOpened, ResidentBlocks
from hotkv_proto.errors import HotKVError, Reason, SessionLostError
from hotkv_vllm import link
from hotkv_vllm.residency.resident import Resident
from hotkv_vllm.sparse.sequences import StreamCount
from hotkv_vllm.stats import HotKVStats

logger = link.logger
ASK_AGAIN_S = 0.1
"""If the server has refused to reserve room for a request, the call is repeated after this many
seconds."""
GROW_AGAIN_S = 1.0
"""Seconds after which a refused call for more room is retried, if the request still has room for
its next block. Longer than ASK_AGAIN_S, because such a request can continue meanwhile."""
TURN_S = 2.0
"""Once a request has waited this many seconds for room in the server, requests that arrived later
do not ask for room until this request has got its room."""
SILENT_S = 3.0
"""If the server has not answered a call after this many seconds, it counts as away until it answers
one."""
OF_THE_SESSION = (Reason.UNKNOWN_SESSION, Reason.DUPLICATE_ID)
"""Reasons for which the server refuses a call because of the session's present state, for example
during a reconnect. After such a refusal the request does not fail: the call is repeated."""
CLOSED = -1
"""Value of `Resident.stream` (number of the connection on which the residency is open) if the
request's residency (the server's record of it) is not open on any connection."""


class ResidencyCalls:
    """Sends the calls for resident requests (requests whose old blocks may be only in the server's
    memory) to the server. Scheduler thread only, except for callbacks of a call's future.

    streams: counts the session's connections (streams) to the server.
    has_cramped: True while a running request has no room in the server for its next block. The
        caller sets it; requests that have not begun then ask for no room.
    """

    def __init__(self, session: Session, streams: StreamCount, stats: HotKVStats) -> None:
        self._session = session
        self._streams = streams
        self._stats = stats
        self._compared: deque[tuple[str, ResidencyOpened, bool]] = deque()
        # By request that waits for room after a refusal: its priority in vLLM (the least number is
        # served first), and the time since when it has waited.
        self._refused: dict[str, tuple[int, float]] = {}
        self._is_silent = False
        # Residencies (the server's records of requests) to close: the number of the last step that
        # may read the residency's blocks, and its id.
        self._closing: list[tuple[int, str]] = []
        self.has_cramped = False

    def __repr__(self) -> str:
        return f"ResidencyCalls({len(self._refused)} refused)"

    @property
    def is_connected(self) -> bool:
        return self._session.connected

    @property
    def is_away(self) -> bool:
        """Returns True if there is no server, or if it has not answered a call for SILENT_S."""
        return not self.is_connected or self._is_silent

    def note_silence(self, residents: Iterable[Resident], now_s: float) -> None:
        """Finds out whether the server leaves a call for one of these requests unanswered."""
        self._is_silent |= any(one.is_unanswered(now_s - SILENT_S) for one in residents)

    def is_open(self, one: Resident) -> bool:
        """Returns True if the server has reserved room for the request on the scheduler's present
        connection."""
        return one.opened is not None and one.stream == self._streams.number

    def is_served(self, one: Resident) -> bool:
        """Returns True if the session is connected and the server has reserved room for the request
        on this connection (`is_open`)."""
        return self.is_connected and self.is_open(one)

    def open(self, one: Resident, now_s: float) -> None:
        """Asks the server to reserve room (space in its arena) for the request, unless other
        requests must get room first. A request that had room before a reconnect does not wait for
        other requests, because its blocks must be pinned again."""
        if one.opened is None and not self._has_turn(one, now_s):
            return
        self._ask_room(one, one.wanted if one.opened is None else one.room)

    def _has_turn(self, one: Resident, now_s: float) -> bool:
        """Returns True if no other request must get room in the server before this request. Two
        kinds of requests come first: requests of a higher priority in vLLM's scheduler; and
        requests of the same priority that have waited longer."""
        priority = one.state.request.priority
        turn = self._refused.get(one.request_id, (priority, now_s))
        return not self.has_cramped and not any(
            other < turn and other[1] < now_s - TURN_S for other in self._refused.values()
        )

    def _ask_room(self, one: Resident, num_blocks: int) -> None:
        one.asked_room, one.asked_stream = num_blocks, self._streams.number
        one.opening_s = one.seen_s
        one.opening = self._session.open_residency(one.residency_id, {0: num_blocks})

    def close(self, one: Resident, after_step: int, ended_step: int) -> None:
        """Closes the request's residency (the server's record of its reserved room and pinned
        blocks) if it is open, being opened or refused. The call to the server is sent once the
        steps that may read the request's blocks have ended. The server then frees the residency's
        room and unpins its blocks, and no longer counts the request among those that wait for room.

        after_step: number of the last step that may read the request's blocks.
        ended_step: number of the last step that has ended.
        """
        if one.opening is not None or one.opened is not None or one.was_refused:
            # Only a request that has begun and has blocks in host memory may be read by a step.
            may_be_read = one.kept and one.computed
            self._closing.append((after_step if may_be_read else ended_step, one.residency_id))
            self.close_ended(ended_step)
        one.opening, one.opened, one.room = None, None, 0
        one.is_held = one.has_lost_room = False
        self._refused.pop(one.request_id, None)

    def close_ended(self, ended_step: int) -> None:
        """Closes the residencies (the server's records of requests) that no step reads any more.

        ended_step: number of the last step that has ended.
        """
        closing, self._closing = self._closing, []
        for last_step, residency_id in closing:
            if last_step <= ended_step:
                self._session.close_residency(residency_id)
            else:
                self._closing.append((last_step, residency_id))

    def wait(self, one: Resident) -> None:
        """Registers a request that has released its room (reserved space in the server's arena) as
        waiting for room again. Its waiting time counts from its arrival. Once this time exceeds
        TURN_S, requests that arrived later do not ask for room until this request has got room,
        unless they have a higher priority."""
        self._refused[one.request_id] = one.state.request.priority, one.arrived_s

    def is_refused(self, one: Resident) -> bool:
        """Returns True if the request waits for room (space in the server's arena) that the server
        has refused."""
        return one.request_id in self._refused

    def renew(self, one: Resident, now_s: float) -> None:
        """Advances the request's reservation of room: handles the server's answers, retries a
        refused reservation, asks again after a reconnect, and asks for more room if the request
        wants more (`Resident.wanted`)."""
        # Handles the answer to `ask` (a pin call) before the answer that opens the residency. After
        # a reconnect, `_opened` asks the server to pin all kept blocks again; these must include
        # the blocks of the earlier answer.
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
            # Ignores the refusal: the request has asked for more room than its next block needs,
            # and has room for this block, so it can continue.
            return
        if isinstance(why, HotKVError):
            if why.reason is Reason.NO_ROOM_FOR_RESIDENCY and one.opened is None:
                self._refused.setdefault(one.request_id, (one.state.request.priority, now_s))
            elif why.reason is Reason.NO_ROOM_FOR_RESIDENCY:
                one.has_lost_room = not self.is_open(one)
            elif why.reason is Reason.RESIDENCY_TOO_LARGE and one.asks_ahead:
                # The request has asked for room ahead of its need. From now on it asks only for the
                # room that it needs, which may be available.
                one.asks_ahead = False
            elif not why.retryable and why.reason not in OF_THE_SESSION:
                one.refusal = why
        if not one.was_refused:
            one.was_refused = True
            self._stats.add("refused_residencies")
            logger.info("hotkv: request %s waits for room in host memory: %s", one.request_id, why)

    def _opened(self, one: Resident, opened: ResidencyOpened) -> None:
        """Handles the server's answer that it has reserved room for the request. If the server has
        opened the request's residency (its record of the request) anew, for example after a
        reconnect, asks it to pin again the blocks that it had pinned before."""
        self._refused.pop(one.request_id, None)
        one.has_lost_room = False
        has_grown = one.opened == opened and one.stream == one.asked_stream
        one.room, one.stream = one.asked_room, one.asked_stream
        if has_grown:
            return
        is_new = one.opened is None
        one.opened, one.waited_s = opened, 0.0
        # Lets `ResidentRequests.usable_tokens` ask once more to pin the blocks of a hit, because
        # its earlier call may have failed with the earlier connection.
        one.asks_again = False
        if is_new or not one.kept:
            one.pin = opened
            return
        answer = self._session.extend_residency(one.residency_id, 0, 0, one.names[: one.kept])
        request_id, known = one.request_id, one.offsets
        answer.add_done_callback(lambda done: self._compare(request_id, opened, known, done))

    def _compare(
        self,
        request_id: str,
        opened: ResidencyOpened,
        known: Int64s,
        done: "Future[ResidentBlocks]",
    ) -> None:
        """Records, for the next step, whether the server has pinned the request's blocks again at
        the offsets that they had in the arena before the reconnect. Called in a thread of the
        client library when the pin call is answered.

        opened: the server's answer to the call that has opened the residency again.
        known: the offsets of the request's pinned blocks before the reconnect.
        done: the resolved future of the call that pins these blocks again.
        """
        error = done.exception()
        if isinstance(error, SessionLostError):
            # The connection broke before the server answered. After the next connection the blocks
            # are pinned and compared again.
            return
        is_same = error is None and np.array_equal(done.result().offsets, known)
        self._compared.append((request_id, opened, is_same))

    def take_compared(self) -> list[tuple[str, ResidencyOpened, bool]]:
        """Returns the results of the calls that pin requests' blocks again after a reconnect. A
        result is a tuple: id of the request, the server's answer that opened its residency (the
        server's record of it) again, and True if all blocks are pinned at their old offsets in the
        arena. Each result is returned once."""
        return [self._compared.popleft() for _ in range(len(self._compared))]

    # ----------------------------------------------------------------------------------------- pins

    def ask(self, one: Resident, until: int) -> None:
        """Asks the server to pin the request's next blocks, which were stored before. Does nothing
        while such a call is in flight, without a connection, or if the server has no open residency
        (record of the request).

        The call begins with the first block that is not pinned yet. It ends before block `until`,
        before the end of the reserved room, or before the first block without a name (the hash
        under which the server stores the block), whichever comes first.

        until: position of a block in the context.
        """
        blocks = range(one.kept, min(until, len(one.names), one.room))
        if one.asked is None and one.opened is not None and self._session.connected and blocks:
            hashes = one.names[blocks.start : blocks.stop]
            answer = self._session.extend_residency(one.residency_id, 0, blocks.start, hashes)
            one.asked, one.asked_s = (answer, blocks), one.seen_s

    def take_answer(self, one: Resident) -> None:
        """Handles the server's answer to `ask`, if it has come: records at which offsets of the
        arena the server has pinned the blocks."""
        if one.asked is None or not one.asked[0].done():
            return
        (answer, blocks), one.asked = one.asked, None
        self._is_silent = False
        error = answer.exception()
        if isinstance(error, HotKVError) and error.reason is Reason.UNKNOWN_RESIDENCY:
            # The server has closed the residency by itself. `renew` opens it again, and checks
            # whether the kept blocks are still at their old offsets.
            one.stream = CLOSED
        if error is not None or len((found := answer.result()).offsets) != len(blocks):
            return
        # `arena` returns None if the session is closed by now. The server is then asked again to
        # pin the blocks.
        arena = self._session.arena()
        if arena is not None and one.keep(blocks.start, found, arena.file_id):
            one.waited_s = 0.0
