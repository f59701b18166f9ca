"""A connection to one Valkey or Redis server, and what a client asks of connections.

Always true: replies come in the order of the commands that were sent. After an exception the
connection must be closed.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

from hotkv_server.settings.tiers import ValkeySettings
from hotkv_server.tiers.valkey.greeting import greet, read_login
from hotkv_server.tiers.valkey.resp import Bulk, Command, ErrorReply, Place, Replies, Reply
from hotkv_server.tiers.valkey.stream import ValkeyStream, connect


class Pipe(Protocol):
    """Carries commands to a store and its replies back. One thread at a time. Methods that wait
    do so until `until_s`, of time.monotonic, and raise StoreError."""

    keeps_order: bool
    """True if the store executes commands in the order in which they were sent."""
    has_one_clock: bool
    """True if the store is one server, whose time and start INFO tells."""

    def is_fresh(self) -> bool:
        """Returns False if the store has closed a connection or has sent too much."""

    def send(self, commands: Sequence[Command], until_s: float) -> None:
        """Sends commands. The replies to earlier ones must have been read."""

    def next(self, until_s: float) -> Reply:
        """Returns the reply to the first command whose reply was not read."""

    def value(self, head: memoryview, place: Place, until_s: float) -> Bulk | ErrorReply | None:
        """Reads a value as `Replies.value` does, instead of `next`."""

    def close(self) -> None:
        """Closes all connections."""


class ValkeyConnection:
    """See the module and `Pipe`. Connects and logs in when it is made. `address`: host and port
    of a server that is reached over TCP."""

    keeps_order = True
    has_one_clock = True

    def __init__(
        self, settings: ValkeySettings, address: tuple[str, int] | None, until_s: float
    ) -> None:
        self.address = address
        login = read_login(settings)
        self._stream: ValkeyStream = connect(settings, address, until_s)
        self._replies = Replies(self._stream)
        try:
            greet(self.ask, login, settings, until_s)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"ValkeyConnection({self._stream!r})"

    def is_fresh(self) -> bool:
        """See `Pipe`."""
        return self._replies.is_empty and self._stream.is_quiet()

    def send(self, commands: Sequence[Command], until_s: float) -> None:
        """See `Pipe`."""
        self._stream.send(list(_joined(commands)), until_s)

    def next(self, until_s: float) -> Reply:
        """See `Pipe`."""
        return self._replies.next(until_s)

    def value(self, head: memoryview, place: Place, until_s: float) -> Bulk | ErrorReply | None:
        """See `Pipe`."""
        return self._replies.value(head, place, until_s)

    def ask(self, commands: Sequence[bytes], until_s: float) -> list[Reply]:
        """Sends the bytes of commands and returns their replies."""
        self._stream.send([b"".join(commands)], until_s)
        return [self._replies.next(until_s) for _ in commands]

    def close(self) -> None:
        """See `Pipe`."""
        self._stream.close()


def _joined(commands: Sequence[Command]) -> Iterator[bytes | memoryview]:
    """Yields the pieces of commands. Neighbours are joined unless they are slots: TLS makes a
    record of each piece."""
    pieces = itertools.chain.from_iterable(one.pieces for one in commands)
    for is_slot, run in itertools.groupby(pieces, lambda piece: isinstance(piece, memoryview)):
        if is_slot:
            yield from run
        else:
            yield b"".join(run)
