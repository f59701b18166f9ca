"""What a session's client has yet to read.

Always true: the outbox is bounded, by messages and by bytes. A client that lets it fill up, or
leaves much in it and reads none of that for some seconds, is told to go.
"""

import asyncio
from collections.abc import Awaitable, Callable

from hotkv_proto.errors import HotKVError
from hotkv_proto.v1 import session_pb2
from hotkv_server.node.session import OUTBOX_MESSAGES, unread

UNREAD_ANSWERS, UNREAD_BYTES = 256, 4 << 20
"""A client that has so many to read, or so much, is asked for nothing more until it has read
some."""
KEPT_BYTES, SLOW_READER_S = 64 << 10, 5.0
"""A client that leaves more than this unread, and reads none of it for so long, is closed."""
OUTBOX_BYTES = 32 << 20


class SessionOutbox:
    """See the module. `write`: sends a message, and waits while the client reads too slowly.
    `on_end`: ends the session, given why."""

    def __init__(
        self,
        write: Callable[[session_pb2.ConnectResponse], Awaitable[None]],
        on_end: Callable[[HotKVError], None],
    ) -> None:
        self._write = write
        self._on_end = on_end
        self._queue: asyncio.Queue[session_pb2.ConnectResponse] = asyncio.Queue(OUTBOX_MESSAGES)
        self._unread_bytes = 0
        self._num_written = 0
        self._watch: asyncio.TimerHandle | None = None
        self._was_read = asyncio.Event()

    def __repr__(self) -> str:
        return f"SessionOutbox({self._queue.qsize()} messages, {self._unread_bytes} bytes)"

    def put(self, message: session_pb2.ConnectResponse) -> None:
        """Adds a message; ends the session if it is one too many."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self._on_end(unread())
            return
        self._unread_bytes += message.ByteSize()
        if self._unread_bytes > OUTBOX_BYTES:
            self._on_end(unread())
        elif self._watch is None and (self._unread_bytes > KEPT_BYTES or self._has_much()):
            self._look_later()

    async def room(self) -> None:
        """Waits until the client has so little to read that it may ask for more."""
        while self._has_much():
            self._was_read.clear()
            await self._was_read.wait()

    async def send_all(self) -> None:
        """Writes messages for ever, in order."""
        while True:
            message = await self._queue.get()
            await self._write(message)
            self._unread_bytes -= message.ByteSize()
            self._num_written += 1
            self._queue.task_done()
            self._was_read.set()
            # The next one may be long in coming.
            del message

    async def drained(self, timeout_s: float) -> None:
        """Waits until all is written, or the time is up."""
        await asyncio.wait({asyncio.create_task(self._queue.join())}, timeout=timeout_s)

    def close(self) -> None:
        """Stops watching the client."""
        if self._watch is not None:
            self._watch.cancel()

    def _has_much(self) -> bool:
        return self._queue.qsize() >= UNREAD_ANSWERS or self._unread_bytes >= UNREAD_BYTES

    def _look_later(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(
            SLOW_READER_S, self._judge, self._num_written
        )

    def _judge(self, num_written: int) -> None:
        """Ends the session if its client has read nothing since so much was written, and much
        waits."""
        self._watch = None
        if self._unread_bytes > KEPT_BYTES or self._has_much():
            if self._num_written == num_written:
                self._on_end(unread())
            else:
                self._look_later()
