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
"""For so long after a server's start, epochs older than the start are not trusted. Nodes that lost
the server try to connect at least every 2.5 s (`remote.health`)."""
YOUNG_S = 600.0
"""A server that has run for longer has not just started, even when it is seen for the first
time."""
RAISE_TRIES = 8
"""Most tries of a raise whose epoch is lost between its two commands."""


class StoreClock:
    """The time and the start of a server, shared by all connections to it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._run_id = b""
        self._seen_s = 0.0
        self._started_us = 0

    def __repr__(self) -> str:
        return f"StoreClock(run_id={self._run_id!r}, started_us={self._started_us})"

    def restored_below(self, reply: Reply, now_s: float) -> int:
        """Returns `restored_below` of `Shown`, from the reply to INFO_SERVER and a time of
        time.monotonic. 0 if the reply does not tell."""
        run_id, now_us, up_s = _said(reply)
        if not run_id or not now_us:
            return 0
        # The start is known to a second. Later replies may narrow it.
        started_us = now_us - up_s * 1_000_000
        with self._lock:
            if run_id != self._run_id:
                self._run_id, self._seen_s, self._started_us = run_id, now_s, started_us
            self._started_us = min(self._started_us, started_us)
            is_young = up_s < YOUNG_S and now_s < self._seen_s + GRACE_S
            return protocol.begun(self._started_us) if is_young else 0


INFO_SERVER = Command(b"", (command(b"INFO", b"server"),))


def now_us(reply: Reply) -> int:
    """Returns the server's wall clock in microseconds, from the reply to INFO_SERVER; this
    machine's clock if the reply does not tell."""
    return _said(reply)[1] or time.time_ns() // 1000


def _said(reply: Reply) -> tuple[bytes, int, int]:
    """Returns the run id, microseconds of the wall clock, and seconds since the start; empty and 0
    if the reply does not tell."""
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
    """Returns the key of a key space's epoch."""
    return b"hotkv/1/%b/epoch" % fingerprint.encode()


def get(fingerprint: str) -> Command:
    """Returns the command that reads an epoch."""
    return Command.of(epoch_key(fingerprint), b"GET")


def begin(fingerprint: str, now_us: int) -> Command:
    """Returns the command that begins an epoch if the key space has none. `now_us`: microseconds of
    the wall clock."""
    begun = b"%d" % protocol.begun(now_us)
    return Command.of(epoch_key(fingerprint), b"SET", begun, b"NX")


def raise_(fingerprint: str, by: int) -> Command:
    """Returns the command that raises an epoch."""
    return Command.of(epoch_key(fingerprint), b"INCRBY", b"%d" % by)


def remove(fingerprint: str) -> Command:
    """Returns the command that removes an epoch. A full server refuses INCR but not this, so a
    flush works there too."""
    return Command.of(epoch_key(fingerprint), b"UNLINK")


def parsed_or_none(reply: Reply) -> int | None:
    """Returns the epoch as `parsed` does; None if the reply is no epoch."""
    try:
        return parsed(reply)
    except LostError:
        return None


def parsed(reply: Reply) -> int:
    """Returns the epoch in a reply, or NO_EPOCH. Raises LostError or UnusableError if the reply is
    no epoch."""
    if reply is None:
        return NO_EPOCH
    if isinstance(reply, ErrorReply):
        raise unusable(reply.code) or LostError(f"gives no epoch: {reply.code}")
    if isinstance(reply, bytes) and reply.isdigit() and len(reply) < 20:
        return int(reply)
    if isinstance(reply, int) and reply > 0:
        return reply
    raise LostError("has an epoch that is no number: remove the keys hotkv/1/*/epoch")
