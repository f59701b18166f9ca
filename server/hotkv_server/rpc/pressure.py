"""Memory of messages on their way: gRPC takes what is sent to any stream, up to the largest message
each, and says to nobody how much that is together.

So what malloc has given out is compared with what the books explain. Where the rest grows beyond a
bound, calls end that may hold it: first those that are nobody's, then sessions of which nothing
whole has come for a moment, those first that have nothing here. An engine whose session ends opens
another; a client that sends its messages whole is not in the way for long. What stays although all
these have ended is the server's own, and from then on explained.
"""

import asyncio
import ctypes
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from hotkv.errors import HotKVError, Reason
from hotkv_server.core import inspect
from hotkv_server.rpc.guests import Guests
from hotkv_server.runtime.node import Node
from hotkv_server.runtime.session import LiveSession

log = logging.getLogger(__name__)

TICK_S = 0.1
UNEXPLAINED_BYTES = 64 << 20
"""So much may be in messages on their way."""
ENTRY_BYTES = 48
"""And so much for each entry of the index in what its walks keep for a time."""
FREE_BYTES = 32 << 20
"""So much that is free within the heap is given back."""
SILENT_S = 0.5
GUESTS_TICK, BARE_TICK, SILENT_TICK = 2, 4, 6
"""When, after so many ticks beyond the bound, calls without a session end; silent sessions that
have nothing here; all silent ones."""
PATIENCE_TICKS = 20
GROWTH_BYTES = 16 << 20
"""After that, what grows by so much is ended like before; what stays for so many ticks more is no
message."""
SESSION_BYTES = 64 << 10
"""About what a session takes, with its connection."""
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
    """Reads the heap's state; None where the C library is no glibc of 2.33 or newer."""
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
    """Of one process. `read_heap`: as `heap_reader` gives it."""

    def __init__(self, node: Node, guests: Guests, read_heap: Callable[[], Heap] | None) -> None:
        self._node = node
        self._guests = guests
        self._read_heap = read_heap
        self._bound_bytes = UNEXPLAINED_BYTES + ENTRY_BYTES * inspect.limits(node.core).max_entries
        # Of the process itself: at the start, and what has stayed since.
        self._first_bytes = self._own_bytes = 0
        # Ticks in a row beyond the bound; the least that was seen since all had been ended that
        # could be.
        self._num_high = 0
        self._least_bytes = 0
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Pressure({self._own_bytes} bytes of its own, {self._num_high} times high)"

    def start(self) -> None:
        """From here on what the process takes more must be explained."""
        if self._read_heap is not None:
            self._first_bytes = self._own_bytes = (
                self._read_heap().used_bytes - self._explained_bytes()
            )
        self._task = asyncio.create_task(self._run(), name="pressure")

    def stop(self) -> None:
        """Looks no more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._guests.end_late(time.monotonic())
            if self._read_heap is None:
                continue
            heap = self._read_heap()
            self.judge(heap.used_bytes - self._own_bytes - self._explained_bytes())
            if heap.free_bytes > FREE_BYTES and not self._num_high:
                # What was freed lies between what is in use.
                await asyncio.get_running_loop().run_in_executor(
                    None, ctypes.CDLL(None).malloc_trim, 0
                )
                await asyncio.sleep(1.0)

    def judge(self, unexplained_bytes: int) -> None:
        """Looks at so many bytes, once a tick, and ends calls where they are too many for long."""
        if unexplained_bytes <= self._bound_bytes:
            self._num_high = 0
            # What was taken for the server's own and has gone again, was not.
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
                # Others go on with it.
                self._num_high = 0
            elif self._num_high >= SILENT_TICK + PATIENCE_TICKS:
                self._own_bytes += unexplained_bytes
                self._num_high = 0
                log.warning(
                    "%d MiB more are the server's own: they stay although calls have ended",
                    unexplained_bytes >> 20,
                )

    def _end(self, unexplained_bytes: int, sessions: list[LiveSession]) -> None:
        """Ends all guests, and these sessions."""
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
        """Sessions of which nothing has come for a moment."""
        until_s = time.monotonic() - SILENT_S
        return [session for session in self._node.sessions.values() if session.heard_s < until_s]

    def _has_anything(self, session: LiveSession) -> bool:
        """Whether it would lose more than its connection."""
        return bool(
            session.memory
            or session.jobs
            or session.num_reads
            or inspect.has_leases(self._node.core, session.record.number)
        )

    def _explained_bytes(self) -> int:
        return self._node.books_bytes() + SESSION_BYTES * len(self._node.sessions)
