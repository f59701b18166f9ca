"""Epochs in Valkey: an integer under `hotkv/1/{fingerprint}/epoch`, which a flush raises.

Always true: the epoch of a key space never returns to an earlier value that its raiser knows. Keys
of blocks contain the epoch: only a node that has not heard of the flush finds blocks of an old
epoch. The order in a read's pipeline stops such a node: **the epoch is read after the blocks**.

Proof. The server executes commands one at a time, and the commands of a connection in their order.
Let a read GET blocks b1 ... bn, then the epoch, and let the reply be E, the epoch in its keys.
Epochs do not come back, so a flush that ended E was executed after the GET of the epoch, hence
after each GET of a block, and answered later still. If a flush was answered before a block is read,
the epoch differs and the block is refused. With the epoch first, the flush could be executed and
answered between the two, and the old block would be served. Each part of a call reads the epoch;
the whole call is refused if any part saw another epoch.

The proof needs one server. In a cluster, blocks and epoch lie on different servers. There the GET
of the epoch is sent after each GET of a block was executed, and the rest holds as above.

A server that returns with an old copy of its data (a snapshot, a replica without the last commands)
shows an earlier epoch. Nodes that know a later epoch raise it above that; other nodes can't tell.
So an epoch older than the server is trusted only after the server has been seen for GRACE_S
(`StoreClock`), in which the nodes that know more come back.

An absent epoch equals no epoch: no block passes. An epoch begins at the server's time, not at 0
(`epoch_numbers`), so a server that lost its epoch (restart, FLUSHALL, eviction under an allkeys
policy) does not reuse earlier numbers.
"""

import threading
import time

from hotkv_server.tiers import protocol
from hotkv_server.tiers.protocol import NO_EPOCH
from hotkv_server.tiers.remote.client import LostError
from hotkv_server.tiers.valkey.errors import unusable
from hotkv_server.tiers.valkey.resp import Command, ErrorReply, Reply, command

GRACE_S = 5.0
"""How long a server that has just started is not trusted with epochs older than it. Nodes that have
lost it try to connect every 2.5 s at least (`remote.health`)."""
YOUNG_S = 600.0
"""A server that is up for longer has not just started, whoever sees it for the first time."""
RAISE_TRIES = 8
"""How often an epoch may be lost between two commands that raise it."""


class StoreClock:
    """What a server says of its time and its start, for all connections to it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._run_id = b""
        self._seen_s = 0.0
        self._started_us = 0

    def __repr__(self) -> str:
        return f"StoreClock(run_id={self._run_id!r}, started_us={self._started_us})"

    def restored_below(self, reply: Reply, now_s: float) -> int:
        """As of `Shown`, given the reply to INFO_SERVER and a time of time.monotonic. 0 for a reply
        that does not say it."""
        run_id, now_us, up_s = _said(reply)
        if not run_id or not now_us:
            return 0
        # Its start is known to a second, which the next reply may narrow.
        started_us = now_us - up_s * 1_000_000
        with self._lock:
            if run_id != self._run_id:
                self._run_id, self._seen_s, self._started_us = run_id, now_s, started_us
            self._started_us = min(self._started_us, started_us)
            is_young = up_s < YOUNG_S and now_s < self._seen_s + GRACE_S
            return protocol.begun(self._started_us) if is_young else 0


INFO_SERVER = Command(b"", (command(b"INFO", b"server"),))


def now_us(reply: Reply) -> int:
    """Returns the server's wall clock in microseconds, from the reply to INFO_SERVER; ours if it
    does not say it."""
    return _said(reply)[1] or time.time_ns() // 1000


def _said(reply: Reply) -> tuple[bytes, int, int]:
    """Run id, microseconds of the wall clock, seconds since the start; empty and 0 if unsaid."""
    if not isinstance(reply, bytes):
        return b"", 0, 0
    said = dict(line.partition(b":")[::2] for line in reply.splitlines())

    def number(name: bytes) -> int:
        text = said.get(name, b"").strip()
        return int(text) if text.isdigit() and len(text) < 20 else 0

    return (
        said.get(b"run_id", b"").strip(),
        number(b"server_time_usec"),
        number(b"uptime_in_seconds"),
    )


def epoch_key(fingerprint: str) -> bytes:
    """Where a key space's epoch is."""
    return b"hotkv/1/%b/epoch" % fingerprint.encode()


def get(fingerprint: str) -> Command:
    """Returns the command that reads an epoch."""
    return Command.of(epoch_key(fingerprint), b"GET")


def begin(fingerprint: str, now_us: int) -> Command:
    """Returns the command that begins an epoch where none is. `now_us`: microseconds of the wall
    clock."""
    begun = b"%d" % protocol.begun(now_us)
    return Command.of(epoch_key(fingerprint), b"SET", begun, b"NX")


def raise_(fingerprint: str, by: int) -> Command:
    """Returns the command that raises an epoch."""
    return Command.of(epoch_key(fingerprint), b"INCRBY", b"%d" % by)


def remove(fingerprint: str) -> Command:
    """Returns the command that takes an epoch away. A server that is full refuses INCR but not
    this, and a flush must count there too."""
    return Command.of(epoch_key(fingerprint), b"UNLINK")


def parsed_or_none(reply: Reply) -> int | None:
    """As `parsed`; None for what is no epoch."""
    try:
        return parsed(reply)
    except LostError:
        return None


def parsed(reply: Reply) -> int:
    """Returns the epoch that a reply gives, or NO_EPOCH. Raises LostError or UnusableError if it
    gives none."""
    if reply is None:
        return NO_EPOCH
    if isinstance(reply, ErrorReply):
        raise unusable(reply.code) or LostError(f"gives no epoch: {reply.code}")
    if isinstance(reply, bytes) and reply.isdigit() and len(reply) < 20:
        return int(reply)
    if isinstance(reply, int) and reply > 0:
        return reply
    raise LostError("has an epoch that is no number: remove the keys hotkv/1/*/epoch")
