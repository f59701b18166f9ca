"""A connection to a Valkey or Redis server, and the protocol of connections (`Pipe`).

Always true: replies come in the order of the commands that were sent. After an exception the
connection must be closed.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hotkv_server.security.path_checks import UnsafeError, check_secret
from hotkv_server.settings.tiers import ValkeySettings
from hotkv_server.tiers.remote.client import LostError, UnusableError, quoted
from hotkv_server.tiers.valkey.reply_errors import STANDALONE, unusable
from hotkv_server.tiers.valkey.resp import Command, ErrorReply, Place, Replies, Reply, command
from hotkv_server.tiers.valkey.stream import ValkeyStream, connect

# ------------------------------------------------------------------------------------- The greeting

# Sends the first commands on a connection: they log in and check that the server is usable.
#
# Always true: messages never quote the password or the replies to HELLO and AUTH, because servers
# repeat the arguments of unknown commands.

MAX_SECRET_BYTES = 4096
"""Longest password."""
DEFAULT_USER = "default"
CHECK_KEY = b"hotkv/1/check"
"""A key that never exists. The reply to EXISTS of this key shows whether hotkv's user may read."""
ROLE_CODES = {b"replica": "READONLY", b"slave": "READONLY"}
"""The roles of servers that hotkv can't use, as named in the reply to HELLO. The value is the error
code that such a server would answer to commands; it selects the message for the operator."""
MODE_CODES = {b"cluster": "MOVED", b"sentinel": "SENTINEL"}
"""The modes of servers that hotkv can't use if the settings name a single server, as named in the
reply to HELLO. The value is an error code, which selects the message for the operator."""
MODE_CODES_IN_CLUSTER = {b"standalone": STANDALONE, b"sentinel": "SENTINEL"}
"""The modes of servers that hotkv can't use if the settings name a cluster, as named in the reply
to HELLO. The value is an error code, which selects the message for the operator."""

Ask = Callable[[Sequence[bytes], float], list[Reply]]
"""Sends commands, given as RESP bytes, and returns their replies. Blocks at most until the given
time of time.monotonic."""


@dataclass(frozen=True, slots=True)
class Login:
    """The user name and password with which hotkv logs in at the server."""

    user: str
    password: bytes = field(repr=False)


def read_login(settings: ValkeySettings) -> Login | None:
    """Returns the user name and the password with which hotkv logs in. Reads the password from the
    file that the settings name; returns None if the settings name no file. Raises UnusableError if
    users outside the file's group have any access to the file, or if it can't be read, is empty or
    is too long."""
    path = settings.password_file
    if path is None:
        return None
    try:
        check_secret(path)
        with path.open("rb") as file:
            password = file.read(MAX_SECRET_BYTES + 1).rstrip(b"\r\n")
    except (OSError, UnsafeError) as error:
        raise UnusableError(f"can't be asked, because of password_file: {error}") from error
    if not password or len(password) > MAX_SECRET_BYTES:
        raise UnusableError(
            f"can't be asked, because of password_file: {path} must have 1 to {MAX_SECRET_BYTES} "
            "bytes"
        )
    return Login(settings.user or DEFAULT_USER, password)


def greet(ask: Ask, login: Login | None, settings: ValkeySettings, until_s: float) -> None:
    """Logs in, selects the database, and checks that the server executes commands for keys. Raises
    StoreError.

    In a cluster, selects no database, and does not check that the server executes commands for
    keys, because the server may be a replica: only the map of hash slots shows which server
    executes commands for a key.

    `ask`: sends commands over the connection and returns their replies.
    """
    words = [b"HELLO", b"3"]
    if login is not None:
        words += [b"AUTH", login.user.encode(), login.password]
    (hello,) = ask([command(*words, b"SETNAME", b"hotkv")], until_s)
    # These codes mean that the server does not know HELLO, or that the user may not use it. Before
    # AUTH, a server also answers NOAUTH to commands that it does not know.
    codes = ("ERR", "NOPERM", "NOPROTO", "NOAUTH" if login else "ERR")
    if isinstance(hello, ErrorReply) and hello.code in codes:
        if b"max number of clients" in hello.text:
            raise UnusableError("has too many clients: raise its maxclients")
        _greet_version_2(ask, login, until_s)
    elif isinstance(hello, ErrorReply):
        raise unusable(hello.code) or UnusableError(f"does not accept HELLO: {hello.code}")
    elif not isinstance(hello, dict):
        raise LostError("answers HELLO with what is no answer to it")
    else:
        _check_kind(hello, settings)
    if settings.cluster:
        return
    asked = [command(b"SELECT", b"%d" % settings.database)] if settings.database else []
    for reply in ask([*asked, command(b"EXISTS", CHECK_KEY)], until_s):
        _check(reply)


def _greet_version_2(ask: Ask, login: Login | None, until_s: float) -> None:
    """Logs in without HELLO: for servers before version 6, and for users who may not use HELLO.
    Only the reply to a write shows whether such a server is a replica."""
    if login is not None:
        # Send AUTH without the name of the default user, because servers before version 6 have no
        # users.
        user = [login.user.encode()] if login.user != DEFAULT_USER else []
        (reply,) = ask([command(b"AUTH", *user, login.password)], until_s)
        if isinstance(reply, ErrorReply) and reply.code != "WRONGPASS":
            raise UnusableError("does not accept AUTH: check user and password_file")
        _check(reply)
    # Ignore a refusal, because the name only appears in the server's list of clients.
    commands = [command(b"CLIENT", b"SETNAME", b"hotkv"), command(b"UNLINK", CHECK_KEY)]
    _, removed = ask(commands, until_s)
    if isinstance(removed, ErrorReply) and removed.code == "READONLY":
        _check(removed)


def _check(reply: Reply) -> None:
    if isinstance(reply, ErrorReply):
        raise unusable(reply.code) or UnusableError(f"refuses: {quoted(reply.text)}")


def _check_kind(hello: "dict[bytes, Reply]", settings: ValkeySettings) -> None:
    mode, role = hello.get(b"mode"), hello.get(b"role")
    wrong = [(mode, MODE_CODES_IN_CLUSTER if settings.cluster else MODE_CODES)]
    if not settings.cluster:
        wrong.append((role, ROLE_CODES))
    for said, codes in wrong:
        error = unusable(codes.get(said, "")) if isinstance(said, bytes) else None
        if error is not None:
            raise error


# ----------------------------------------------------------------------------------- The connection


class Pipe(Protocol):
    """Sends commands to a store (a server or a cluster) and receives its replies. Not thread-safe.

    Methods with `until_s` block at most until that time of time.monotonic, and raise StoreError.
    """

    keeps_order: bool
    """True if the store executes commands in the order in which they were sent. False for a
    cluster, because its servers execute commands independently."""
    has_one_clock: bool
    """True if the store is a single server, so that the reply to INFO has the store's clock and the
    time of its start."""

    @property
    def moved_s(self) -> float:
        """The time at which bytes last moved over a connection, a time of time.monotonic. Callable
        from any thread."""

    def is_fresh(self) -> bool:
        """Returns False if the store has closed a connection, or has sent bytes that are no reply
        to a command."""

    def send(self, commands: Sequence[Command], until_s: float) -> None:
        """Sends commands. The caller must have read all replies to earlier commands."""

    def next(self, until_s: float) -> Reply:
        """Waits for the next reply and returns it. Replies come in the order of the commands."""

    def value(self, head: memoryview, place: Place, until_s: float) -> bool | ErrorReply | None:
        """Reads the next reply, which must be a string (the value of a key), null or an error.
        Writes a string directly into the caller's memory. Returns True for a string that was
        written, False for a string that was skipped, None for null, and an ErrorReply for an error.

        `head`: gets the first bytes of the string. A shorter string is skipped.
        `place`: called with the length of the string, once `head` is full. Returns the memory for
            the rest of the string, or None to skip the rest.
        """

    def outlives_failover(self, key: bytes, until_s: float) -> bool:
        """Returns False if a failover could lose the last write of `key`. Returns True if a replica
        has received the write, or if the key's server has no replica that could take over."""

    def close(self) -> None:
        """Closes all connections."""


class ValkeyConnection:
    """A connection to a single Valkey or Redis server; see the module and `Pipe`. The constructor
    connects and logs in, and raises StoreError.

    `address`: host and port; None for the Unix socket of the settings.
    """

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

    @property
    def moved_s(self) -> float:
        """The time at which bytes last moved; see `Pipe.moved_s`."""
        return self._stream.moved_s

    def is_fresh(self) -> bool:
        """Returns False if the connection has ended; see `Pipe.is_fresh`."""
        return self._replies.is_empty and self._stream.is_quiet()

    def send(self, commands: Sequence[Command], until_s: float) -> None:
        """Sends commands; see `Pipe.send`."""
        self._stream.send(list(_joined(commands)), until_s)

    def next(self, until_s: float) -> Reply:
        """Returns the next reply; see `Pipe.next`."""
        return self._replies.next(until_s)

    def value(self, head: memoryview, place: Place, until_s: float) -> bool | ErrorReply | None:
        """Reads the next reply as the value of a key; see `Pipe.value`."""
        return self._replies.value(head, place, until_s)

    def ask(self, commands: Sequence[bytes], until_s: float) -> list[Reply]:
        """Sends commands, given as RESP bytes, and returns their replies."""
        self._stream.send([b"".join(commands)], until_s)
        return [self._replies.next(until_s) for _ in commands]

    def outlives_failover(self, key: bytes, until_s: float) -> bool:
        """Returns True always, because hotkv never fails over from a single server; see
        `Pipe.outlives_failover`."""
        return True

    def close(self) -> None:
        """Closes all connections; see `Pipe.close`."""
        self._stream.close()


def _joined(commands: Sequence[Command]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of commands, in order. Joins adjacent small pieces, because TLS makes a
    record of each piece; yields slots of the arena as they are, without a copy."""
    pieces = itertools.chain.from_iterable(one.pieces for one in commands)
    for is_slot, run in itertools.groupby(pieces, lambda piece: isinstance(piece, memoryview)):
        if is_slot:
            yield from run
        else:
            yield b"".join(run)
