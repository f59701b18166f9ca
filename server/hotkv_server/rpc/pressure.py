"""Memory of messages on their way: gRPC takes what is sent to any stream, up to the largest message each, and says to nobody how much
that is together.

So what malloc has given out is compared with what the books explain. Where the rest grows beyond a bound, calls end that may hold it: first
those that are nobody's, then sessions of which nothing whole has come for a moment, those first that have nothing here. An engine whose
session ends opens another; a client that sends its messages whole is not in the way for long. What stays although nothing is left to be
ended is the server's own, and from then on explained.
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
"""So much may be in messages on their way."""
ENTRY_BYTES = 48
"""And so much for each entry of the index in what its walks keep for a time."""
FREE_BYTES = 32 << 20
"""So much that is free within the heap is given back."""
SILENT_S = 0.5
PATIENCE_TICKS = 20
SESSION_BYTES = 64 << 10
"""About what a session takes, with its connection."""
ENDED_AT_ONCE = 64
WHY = "the server holds too many bytes of messages that have not come whole; send again"
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


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
        self._bound_bytes = UNEXPLAINED_BYTES + ENTRY_BYTES * node.core.config.capacity
        self._own_bytes = 0
        # Ticks in a row: beyond the bound; of these, the last ones with nothing left to be ended.
        self._num_high = 0
        self._num_idle = 0
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Pressure({self._own_bytes} bytes of its own, {self._num_high} times high)"

    def start(self) -> None:
        """From here on what the process takes more must be explained."""
        if self._read_heap is not None:
            self._own_bytes = self._read_heap().used_bytes - self._explained_bytes()
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
                await asyncio.get_running_loop().run_in_executor(None, ctypes.CDLL(None).malloc_trim, 0)
                await asyncio.sleep(1.0)

    def judge(self, unexplained_bytes: int) -> None:
        """Ends calls where so many bytes, time and again, are too many: guests, and if there are none sessions."""
        self._num_high = self._num_high + 1 if unexplained_bytes > self._bound_bytes else 0
        if self._num_high < 2:
            return
        num_guests = self._guests.end_all(WHY)
        sessions = [] if num_guests else self._silent()[:ENDED_AT_ONCE]
        for session in sessions:
            session.end(HotKVError(Reason.OVERLOADED, WHY))
        if num_guests or sessions:
            self._num_idle = 0
            log.warning(
                "%d MiB of messages are not whole: %d calls without a session and %d silent sessions are ended",
                unexplained_bytes >> 20, num_guests, len(sessions),
            )  # fmt: skip
            return
        self._num_idle += 1
        if self._num_idle >= PATIENCE_TICKS:
            self._own_bytes += unexplained_bytes
            log.warning("%d MiB more are the server's own", unexplained_bytes >> 20)

    def _silent(self) -> list[LiveSession]:
        """Sessions of which nothing has come for a moment: those first that have least here, and among them those silent longest."""
        until_s = time.monotonic() - SILENT_S
        leases = {lease.session_number for lease in self._node.core.leases.all()}

        def stakes(session: LiveSession) -> tuple[int, float]:
            held = (session.record.number in leases, session.memory is not None, bool(session.jobs or session.num_reads))
            return sum(held), session.heard_s

        return sorted((session for session in self._node.sessions.values() if session.heard_s < until_s), key=stakes)

    def _explained_bytes(self) -> int:
        return self._node.books_bytes() + SESSION_BYTES * len(self._node.sessions)
