"""Bounds the memory of messages that have not come whole: gRPC buffers each up to the largest
message, and tells nobody how much that is together.

Pressure compares what malloc has given out with what the books explain. If the rest stays beyond a
bound, it ends calls that may hold it: first calls without a session, then sessions of which no
whole message has come for a moment, those without leases and transfers before others. An engine
whose session ends opens another; a client that sends whole messages is silent only for a moment.
Memory that stays although all these have ended is the server's own, and is explained from then on.
"""

import asyncio
import ctypes
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from hotkv.errors import HotKVError, Reason
from hotkv_server.rpc.guests import Guests
from hotkv_server.runtime.node import Node
from hotkv_server.runtime.session import LiveSession

log = logging.getLogger(__name__)

TICK_S = 0.1
UNEXPLAINED_BYTES = 64 << 20
"""Bytes that messages on their way may have together."""
ENTRY_BYTES = 48
"""Added to that bound for each entry of the index: walks over it keep as much for a time."""
FREE_BYTES = 32 << 20
"""The heap is trimmed if more than this is free in it."""
SILENT_S = 0.5
GUESTS_TICK, BARE_TICK, SILENT_TICK = 2, 4, 6
"""After so many ticks beyond the bound end: calls without a session; silent sessions without
leases and transfers; all silent sessions."""
PATIENCE_TICKS = 20
GROWTH_BYTES = 16 << 20
"""After that, growth by so many bytes ends calls again; what stays for PATIENCE_TICKS is no
message."""
SESSION_BYTES = 64 << 10
"""About the memory of a session with its connection."""
STALLED_TICK_S = 60.0
"""Far above what a tick may take that trims a large heap."""
WHY = "the server holds too many bytes of messages that have not come whole; send again"
_FIELDS = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


@dataclass(frozen=True, slots=True)
class Heap:
    """Bytes that malloc has given out, and those that it keeps free."""

    used_bytes: int
    free_bytes: int


def heap_reader() -> Callable[[], Heap] | None:
    """A function that reads the heap's state; None if the C library is not glibc 2.33 or newer."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    mallinfo2.restype = _Mallinfo2

    def read() -> Heap:
        info = mallinfo2()
        return Heap(int(info.uordblks + info.hblkhd), int(info.fordblks))

    return read


class Pressure:
    """See the module. `read_heap`: as `heap_reader` gives it."""

    def __init__(self, node: Node, guests: Guests, read_heap: Callable[[], Heap] | None) -> None:
        self._node = node
        self._guests = guests
        self._read_heap = read_heap
        self._bound_bytes = UNEXPLAINED_BYTES + ENTRY_BYTES * node.core.config.capacity
        # Of the process itself: at the start, and what has stayed since.
        self._first_bytes = self._own_bytes = 0
        # Ticks in a row beyond the bound; the fewest bytes seen since all silent sessions ended.
        self._num_high = 0
        self._least_bytes = 0
        self._ticked_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Pressure({self._own_bytes} bytes of its own, {self._num_high} times high)"

    def start(self) -> None:
        """Begins; takes the process's present memory as explained. Health watches the task."""
        if self._read_heap is not None:
            self._first_bytes = self._own_bytes = (
                self._read_heap().used_bytes - self._explained_bytes()
            )
        self._ticked_s = time.monotonic()
        self._task = asyncio.create_task(self._run(), name="pressure")
        self._node.health.watch_task(
            self._task, lambda now_s: now_s - self._ticked_s, STALLED_TICK_S
        )

    def stop(self) -> None:
        """Ends the task."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._ticked_s = time.monotonic()
            self._guests.end_late(self._ticked_s)
            if self._read_heap is None:
                continue
            heap = self._read_heap()
            self.judge(heap.used_bytes - self._own_bytes - self._explained_bytes())
            if heap.free_bytes > FREE_BYTES and not self._num_high:
                # Freed memory lies between used memory.
                await asyncio.get_running_loop().run_in_executor(
                    None, ctypes.CDLL(None).malloc_trim, 0
                )
                await asyncio.sleep(1.0)

    def judge(self, unexplained_bytes: int) -> None:
        """Judges the unexplained bytes, once a tick; ends calls if they are too many for long."""
        if unexplained_bytes <= self._bound_bytes:
            self._num_high = 0
            # Bytes that were taken for the server's own and have been freed were not its own.
            self._own_bytes = max(self._first_bytes, self._own_bytes + min(0, unexplained_bytes))
            return
        self._num_high += 1
        if self._num_high == GUESTS_TICK:
            self._end(unexplained_bytes, [])
        elif self._num_high == BARE_TICK:
            self._end(
                unexplained_bytes,
                [session for session in self._silent() if not self._has_anything(session)],
            )
        elif self._num_high == SILENT_TICK:
            self._end(unexplained_bytes, self._silent())
            self._least_bytes = unexplained_bytes
        elif self._num_high > SILENT_TICK:
            self._least_bytes = min(self._least_bytes, unexplained_bytes)
            if unexplained_bytes > self._least_bytes + GROWTH_BYTES:
                # Other calls are filling memory.
                self._num_high = 0
            elif self._num_high >= SILENT_TICK + PATIENCE_TICKS:
                self._own_bytes += unexplained_bytes
                self._num_high = 0
                log.warning(
                    "%d MiB more are the server's own: they stay although calls have ended",
                    unexplained_bytes >> 20,
                )

    def _end(self, unexplained_bytes: int, sessions: list[LiveSession]) -> None:
        """Ends all calls without a session, and these sessions."""
        num_guests = self._guests.end_all(WHY)
        for session in sessions:
            session.end(HotKVError(Reason.OVERLOADED, WHY))
        if num_guests or sessions:
            log.warning(
                "%d MiB of messages are not whole: %d calls without a session and %d silent "
                "sessions are ended",
                unexplained_bytes >> 20,
                num_guests,
                len(sessions),
            )

    def _silent(self) -> list[LiveSession]:
        """Sessions of which no message has come for a moment."""
        until_s = time.monotonic() - SILENT_S
        return [session for session in self._node.sessions if session.heard_s < until_s]

    def _has_anything(self, session: LiveSession) -> bool:
        """True if the session would lose more than its connection."""
        return bool(
            session.memory
            or session.jobs
            or session.num_reads
            or self._node.core.leases.of_session(session.record.number)
        )

    def _explained_bytes(self) -> int:
        return self._node.books_bytes() + SESSION_BYTES * len(self._node.sessions)
