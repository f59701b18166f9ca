"""Connections to a cluster of servers, each with some of its hash slots.

A command goes to its key's server. If that has moved the slot it answers MOVED, while moving it
ASK: the command is repeated to the named server, over a separate *detour*.

Always true: each server with slots has a connection. If one can't be reached, the cluster is
unusable, as nearly each batch has keys of all. The map of slots is read from one server, and
again after MOVED.
"""

import binascii
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from hotkv_server.settings.tiers import ValkeySettings
from hotkv_server.tiers.remote.client import LostError, StoreError, UnusableError
from hotkv_server.tiers.valkey.connection import CHECK_KEY, ValkeyConnection
from hotkv_server.tiers.valkey.reply_errors import (
    INCOMPLETE,
    INCOMPLETE_CODES,
    STANDALONE,
    unusable,
)
from hotkv_server.tiers.valkey.resp import Command, ErrorReply, Place, Reply, command

NUM_SLOTS = 1 << 14
MAX_REDIRECTS = 5
ASKING = command(b"ASKING")
CLUSTER_SLOTS = command(b"CLUSTER", b"SLOTS")
REPLICA_WAIT_MS = 500
WAIT_FOR_A_REPLICA = command(b"WAIT", b"1", b"%d" % REPLICA_WAIT_MS)
Address = tuple[str, int]
T = TypeVar("T")


class ClusterPipe:
    """See the module and `Pipe`. The constructor connects; raises StoreError."""

    keeps_order = False
    has_one_clock = False

    def __init__(self, settings: ValkeySettings, until_s: float) -> None:
        self._settings = settings
        self._servers: dict[Address, ValkeyConnection] = {}
        self._detours: dict[Address, ValkeyConnection] = {}
        self._owners: list[Address] = []
        self._num_replicas: dict[Address, int] = {}
        # Per hash slot, its server in `_owners`; -1 without one.
        self._owner_of = np.full(NUM_SLOTS, -1, np.int16)
        self._is_outdated = False
        # A reply to the last commands was a redirect.
        self._is_redirected = False
        # Commands without a read reply, and their connection; None without a server.
        self._sent: deque[tuple[Command, ValkeyConnection | None]] = deque()
        try:
            self._find(until_s)
            self.send([Command.of(CHECK_KEY, b"EXISTS")], until_s)
            reply = self.next(until_s)
            if isinstance(reply, ErrorReply):
                raise unusable(reply.code) or UnusableError(f"refuses: {reply.code}")
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"ClusterPipe({len(self._servers)} servers, {len(self._detours)} detours)"

    @property
    def moved_s(self) -> float:
        connections = [*self._servers.values(), *self._detours.values()]
        return max((one.moved_s for one in connections), default=0.0)

    def is_fresh(self) -> bool:
        return all(one.is_fresh() for one in (*self._servers.values(), *self._detours.values()))

    def send(self, commands: Sequence[Command], until_s: float) -> None:
        assert not self._sent, "replies were not read"
        if self._is_outdated:
            self._learn(next(iter(self._servers.values())), until_s)
        self._is_redirected = False
        by_server: dict[Address, list[Command]] = {}
        for one in commands:
            at = self._owner_of[slot_of(one.key)]
            if at < 0:
                self._sent.append((one, None))
                continue
            owner = self._owners[at]
            by_server.setdefault(owner, []).append(one)
            self._sent.append((one, self._servers[owner]))
        for owner, its in by_server.items():
            self._servers[owner].send(its, until_s)

    def next(self, until_s: float) -> Reply:
        return self._receive(lambda connection: connection.next(until_s), until_s)

    def value(self, head: memoryview, place: Place, until_s: float) -> bool | ErrorReply | None:
        return self._receive(lambda connection: connection.value(head, place, until_s), until_s)

    def outlives_failover(self, key: bytes, until_s: float) -> bool:
        """Raises UnusableError if the user may not use CLUSTER SLOTS or WAIT."""
        slot = slot_of(key)
        owner = self._owners[self._owner_of[slot]]
        # A replica may have joined.
        self._learn(self._servers[owner], until_s)
        if self._is_redirected:
            # WAIT covers only its own connection, not a redirected write.
            return not any(self._num_replicas.values())
        if self._owner_of[slot] < 0 or self._owners[self._owner_of[slot]] != owner:
            return False
        if not self._num_replicas[owner]:
            return True
        (reply,) = self._servers[owner].ask([WAIT_FOR_A_REPLICA], until_s)
        if isinstance(reply, ErrorReply):
            raise unusable(reply.code) or LostError(f"answers WAIT with {reply.code}")
        return isinstance(reply, int) and reply > 0

    def close(self) -> None:
        for one in (*self._servers.values(), *self._detours.values()):
            one.close()

    def _receive(self, read: Callable[[ValkeyConnection], T], until_s: float) -> T | ErrorReply:
        """The oldest outstanding reply, after redirects. ErrorReply INCOMPLETE if the cluster can't
        execute the command.

        `read`: reads a connection's next reply.
        """
        sent, connection = self._sent.popleft()
        if connection is None:
            self._is_outdated = True
            return ErrorReply(INCOMPLETE.encode())
        reply: T | ErrorReply = read(connection)
        for _ in range(MAX_REDIRECTS):
            if not isinstance(reply, ErrorReply) or reply.code not in ("MOVED", "ASK"):
                break
            self._is_redirected = True
            self._is_outdated |= reply.code == "MOVED"
            address = _named(reply, connection)
            if address not in self._detours:
                self._detours[address] = ValkeyConnection(self._settings, address, until_s)
            connection = self._detours[address]
            if reply.code == "ASK":
                (asking,) = connection.ask([ASKING], until_s)
                if isinstance(asking, ErrorReply):
                    return asking
            connection.send([sent], until_s)
            reply = read(connection)
        if isinstance(reply, ErrorReply) and reply.code in INCOMPLETE_CODES:
            return ErrorReply(INCOMPLETE.encode())
        return reply

    def _find(self, until_s: float) -> None:
        """Reads the map from the first server of the settings that answers and names reachable
        servers. (One cut off from the cluster may have an old map.) Each server gets an equal
        share of the time left. Raises an UnusableError, if any, else the last error."""
        failed: StoreError | None = None
        seeds = self._settings.hosts_and_ports
        for at, address in enumerate(seeds):
            now_s = time.monotonic()
            seed_until_s = now_s + (until_s - now_s) / (len(seeds) - at)
            try:
                self._detours[address] = ValkeyConnection(self._settings, address, seed_until_s)
                self._learn(self._detours[address], seed_until_s)
            except StoreError as error:
                failed = failed if isinstance(failed, UnusableError) else error
                if address in self._detours:
                    self._detours.pop(address).close()
            if self._owners:
                return
        if failed is not None:
            raise failed

    def _learn(self, teller: ValkeyConnection, until_s: float) -> None:
        """Reads the map from `teller`, connects to new servers, and closes detours and servers
        without slots."""
        (reply,) = teller.ask([CLUSTER_SLOTS], until_s)
        if isinstance(reply, ErrorReply):
            raise unusable(reply.code) or unusable(STANDALONE) or LostError("is no cluster")
        owner_of = np.full(NUM_SLOTS, -1, np.int16)
        owners: dict[Address, int] = {}
        num_replicas: dict[Address, int] = {}
        for part in _list(reply):
            first, last, address = _range(part, teller)
            owner_of[first : last + 1] = owners.setdefault(address, len(owners))
            num_replicas[address] = len(_list(part)) - 3
        for address in self._servers.keys() - owners.keys():
            self._servers.pop(address).close()
        for address in owners.keys() - self._servers.keys():
            if address in self._detours:
                self._servers[address] = self._detours.pop(address)
            else:
                self._servers[address] = self._connected(address, until_s)
        while self._detours:
            self._detours.popitem()[1].close()
        self._owners, self._owner_of, self._is_outdated = list(owners), owner_of, False
        self._num_replicas = num_replicas

    def _connected(self, address: Address, until_s: float) -> ValkeyConnection:
        """Raises UnusableError if it can't be reached."""
        try:
            return ValkeyConnection(self._settings, address, until_s)
        except LostError as error:
            host, port = address
            raise UnusableError(
                f"is a cluster of which a server is away: {host}:{port} {error}"
            ) from error


def slot_of(key: bytes) -> int:
    """Hashes only what is between a key's first braces, if there is a byte."""
    begin = key.find(b"{")
    end = key.find(b"}", begin + 1)
    tag = key[begin + 1 : end] if begin >= 0 and end > begin + 1 else key
    return binascii.crc_hqx(tag, 0) % NUM_SLOTS


def _named(reply: ErrorReply, asked: ValkeyConnection) -> Address:
    """The server in `MOVED slot host:port` or `ASK slot host:port`."""
    host, _, port = reply.text.rpartition(b" ")[2].rpartition(b":")
    if not port.isdigit() or len(port) > 5:
        raise LostError("redirects to what is no server")
    return _address(host, int(port), asked)


def _range(part: Reply, teller: ValkeyConnection) -> tuple[int, int, Address]:
    """First and last slot, and their server, of a member of CLUSTER SLOTS."""
    first, last, primary, *_ = [*_list(part), None, None, None]
    host, port, *_ = [*_list(primary), None, None]
    numbers = [one for one in (first, last, port) if isinstance(one, int)]
    if len(numbers) < 3 or not 0 <= numbers[0] <= numbers[1] < NUM_SLOTS:
        raise LostError("has a map of slots that can't be")
    return numbers[0], numbers[1], _address(host, numbers[2], teller)


def _address(host: Reply, port: int, teller: ValkeyConnection) -> Address:
    """Without a host: that of `teller`."""
    if isinstance(host, bytes) and host:
        return host.decode("ascii", "replace"), port
    assert teller.address is not None, "a server of a cluster is reached over TCP"
    return teller.address[0], port


def _list(reply: Reply) -> list[Reply]:
    if not isinstance(reply, list):
        raise LostError("has a map of slots that can't be")
    return reply
