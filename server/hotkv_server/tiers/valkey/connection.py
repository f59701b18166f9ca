"""A connection to a server, and the protocol of connections (`Pipe`). Always true: replies come
in the order of the commands. After an exception, close the connection."""

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

# Logs in, and checks that the server is usable. Always true: messages never quote the password
# or replies to HELLO and AUTH, as servers repeat arguments of unknown commands.

MAX_SECRET_BYTES = 4096
DEFAULT_USER = "default"
CHECK_KEY = b"hotkv/1/check"
"""Never exists; its EXISTS shows whether the user may read."""
ROLE_CODES = {b"replica": "READONLY", b"slave": "READONLY"}
"""Unusable roles in HELLO's reply, with an error code that selects the message."""
MODE_CODES = {b"cluster": "MOVED", b"sentinel": "SENTINEL"}
"""Likewise modes, if the settings name a single server."""
MODE_CODES_IN_CLUSTER = {b"standalone": STANDALONE, b"sentinel": "SENTINEL"}
"""Likewise modes, if the settings name a cluster."""

Ask = Callable[[Sequence[bytes], float], list[Reply]]
"""Sends commands in RESP and returns their replies. Blocks until the given time at most."""


@dataclass(frozen=True, slots=True)
class Login:
    user: str
    password: bytes = field(repr=False)


def read_login(settings: ValkeySettings) -> Login | None:
    """None without a password file. Raises UnusableError if it is open to users outside its
    group, unreadable, empty or too long."""
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
    """Logs in, selects the database, and checks that keys can be used. Raises StoreError.

    In a cluster it only logs in, because the server may be a replica: the map of slots shows who
    serves a key.
    """
    words = [b"HELLO", b"3"]
    if login is not None:
        words += [b"AUTH", login.user.encode(), login.password]
    (hello,) = ask([command(*words, b"SETNAME", b"hotkv")], until_s)
    # The server does not know HELLO, or the user may not use it. Before AUTH, unknown commands
    # also get NOAUTH.
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
    """Logs in without HELLO: before version 6, or if the user may not use it. Only a write then
    shows a replica."""
    if login is not None:
        # Servers before version 6 have no users.
        user = [login.user.encode()] if login.user != DEFAULT_USER else []
        (reply,) = ask([command(b"AUTH", *user, login.password)], until_s)
        if isinstance(reply, ErrorReply) and reply.code != "WRONGPASS":
            raise UnusableError("does not accept AUTH: check user and password_file")
        _check(reply)
    # A refusal does no harm: the name is only for the server's list of clients.
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
    """Commands to a server or cluster, and their replies. Not thread-safe. Methods block until
    `until_s` at most, and raise StoreError."""

    keeps_order: bool
    """Commands run in the order of sending; not in a cluster."""
    has_one_clock: bool
    """The store is a single server: INFO has its clock and start."""

    @property
    def moved_s(self) -> float:
        """When bytes last moved. Any thread."""

    def is_fresh(self) -> bool:
        """False if a connection is closed, or has bytes that answer no command."""

    def send(self, commands: Sequence[Command], until_s: float) -> None:
        """All replies to earlier commands must have been read."""

    def next(self, until_s: float) -> Reply: ...

    def value(self, head: memoryview, place: Place, until_s: float) -> bool | ErrorReply | None:
        """See `Replies.value`."""

    def outlives_failover(self, key: bytes, until_s: float) -> bool:
        """False if a failover could lose the key's last write: no replica has it, though there
        is one."""

    def close(self) -> None: ...


class ValkeyConnection:
    """To a single server; see the module and `Pipe`. The constructor connects and logs in; raises
    StoreError.

    `address`: None for the settings' Unix socket.
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
        return self._stream.moved_s

    def is_fresh(self) -> bool:
        return self._replies.is_empty and self._stream.is_quiet()

    def send(self, commands: Sequence[Command], until_s: float) -> None:
        self._stream.send(list(_joined(commands)), until_s)

    def next(self, until_s: float) -> Reply:
        return self._replies.next(until_s)

    def value(self, head: memoryview, place: Place, until_s: float) -> bool | ErrorReply | None:
        return self._replies.value(head, place, until_s)

    def ask(self, commands: Sequence[bytes], until_s: float) -> list[Reply]:
        """Replies to commands in RESP."""
        self._stream.send([b"".join(commands)], until_s)
        return [self._replies.next(until_s) for _ in commands]

    def outlives_failover(self, key: bytes, until_s: float) -> bool:
        """There is no failover from a single server."""
        return True

    def close(self) -> None:
        self._stream.close()


def _joined(commands: Sequence[Command]) -> Iterator[bytes | memoryview]:
    """Joins small pieces, as TLS makes a record of each; slots stay uncopied."""
    pieces = itertools.chain.from_iterable(one.pieces for one in commands)
    for is_slot, run in itertools.groupby(pieces, lambda piece: isinstance(piece, memoryview)):
        if is_slot:
            yield from run
        else:
            yield b"".join(run)
