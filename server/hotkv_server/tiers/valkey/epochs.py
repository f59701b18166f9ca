"""Epochs in Valkey. The epoch of a key space (a model in a configuration) is an integer under
the key `hotkv/1/{fingerprint}/epoch`. Each flush, which deletes all blocks of the key space, raises
it.

Always true: a raise gives a greater epoch than all epochs that the raising node knows.

The keys of blocks contain the epoch. So only a node that does not know of a flush yet asks for
blocks of an old epoch. The order of the commands in a read prevents this node from using these
blocks: **the node reads the epoch after the blocks**.

Proof. The server executes commands one at a time, and the commands of a connection in their order.
Suppose a node sends GETs for blocks whose keys contain the epoch E, then a GET for the epoch, and
the reply to the last GET is still E. An epoch that has ended does not return. So a flush that ends
E is executed after the GET of the epoch, hence after the GET of each block, and is answered later
still. Conversely, if a flush was answered before a block is read, the node sees another epoch than
E, and refuses the block. If the epoch were read first, a flush could be executed and answered
between the two reads, and the old block would be served. Each part of a call reads the epoch; if
any part sees another epoch, the whole call is refused.

The proof assumes a single server. In a cluster, blocks and epoch are on different servers. There
the client sends the GET of the epoch only after it has the replies to all GETs of blocks, so the
order is the same.

A server that restarts with an old copy of its data (a snapshot, or a replica without the last
commands) shows an earlier epoch. Nodes that know a later epoch raise the server's epoch above it;
other nodes can't see the error. So in the first GRACE_S after a restart (`StoreClock`), epochs that
began before the restart are not trusted. In this time the nodes that know later epochs reconnect.

If the epoch's key is absent, every block is refused. A new epoch is computed from the server's
clock (`protocol.begun`), and not counted from 0. So if a server has lost an epoch (by a restart,
FLUSHALL, or eviction under an allkeys policy), no later epoch has the number of the lost epoch.
"""

import threading
import time

from hotkv_server.tiers import protocol
from hotkv_server.tiers.protocol import NO_EPOCH
from hotkv_server.tiers.remote.client import LostError
from hotkv_server.tiers.valkey.errors import unusable
from hotkv_server.tiers.valkey.resp import Command, ErrorReply, Reply, command

GRACE_S = 5.0
"""A server that has just restarted may have an old copy of its data, which lacks flushes. So for
this time after its first connection to such a server, this node does not trust epochs (numbers that
each flush raises) from before the server's start. Meanwhile nodes that know later epochs connect
again and raise the server's epochs. They need at most 2.5 s to connect (`remote.workers`)."""
YOUNG_S = 600.0
"""A server that has run for longer than this counts as not restarted, even if this node connects to
it for the first time."""
RAISE_TRIES = 8
"""Most tries to raise an epoch (a number that each flush raises). A try fails if the server loses
the epoch between the commands of the try."""


class StoreClock:
    """Detects, from replies to INFO, that a server has just restarted. All connections of the tier
    share this object. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._run_id = b""
        self._seen_s = 0.0
        self._started_us = 0

    def __repr__(self) -> str:
        return f"StoreClock(run_id={self._run_id!r}, started_us={self._started_us})"

    def restored_below(self, reply: Reply, now_s: float, highest: int = 0) -> int:
        """Returns the value for `Shown.restored_below`: epochs below this value are not trusted. If
        the server has just restarted, the value is the least epoch that can have begun after the
        server's start. Otherwise, or if the reply does not show when the server started, the value
        is 0.

        `reply`: the reply to INFO_SERVER.
        `now_s`: a time of time.monotonic.
        `highest`: the highest epoch that the server shows. Usually an epoch is a time of the
            server's clock. But several raises at the same moment can make an epoch greater than the
            clock. Such an epoch may have begun before the server's start, so then no epoch is
            trusted.
        """
        run_id, now_us, up_s = _said(reply)
        if not run_id or not now_us:
            return 0
        # The uptime is rounded down to seconds, so a computed start is up to a second too late. The
        # earliest of several computed starts is the most exact.
        started_us = now_us - up_s * 1_000_000
        with self._lock:
            if run_id != self._run_id:
                self._run_id, self._seen_s, self._started_us = run_id, now_s, started_us
            self._started_us = min(self._started_us, started_us)
            if up_s >= YOUNG_S or now_s >= self._seen_s + GRACE_S:
                return 0
            is_ahead = highest > protocol.begun(now_us)
            return highest + 1 if is_ahead else protocol.begun(self._started_us)


INFO_SERVER = Command(b"", (command(b"INFO", b"server"),))
"""The command whose reply has the server's clock and the time of its start."""


def now_us(reply: Reply) -> int:
    """Returns the time of the server's wall clock in microseconds; the time of this machine's clock
    if the reply lacks it. `reply`: the reply to INFO_SERVER."""
    return _said(reply)[1] or time.time_ns() // 1000


def _said(reply: Reply) -> tuple[bytes, int, int]:
    """Parses the reply to INFO_SERVER. Returns the server's run id, the time of its wall clock in
    microseconds, and the seconds since its start. A value that the reply lacks is empty or 0."""
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
    """Returns the key under which a key space's epoch (a number that each flush raises) is
    stored."""
    return b"hotkv/1/%b/epoch" % fingerprint.encode()


def get(fingerprint: str) -> Command:
    """Returns the command that reads a key space's epoch (a number that each flush raises)."""
    return Command.of(epoch_key(fingerprint), b"GET")


def begin(fingerprint: str, now_us: int) -> Command:
    """Returns the command that begins an epoch (a number that each flush raises) for a key space
    (a model in a configuration). The command changes nothing if the server already has an epoch
    for it. `now_us`: the time of the wall clock in microseconds."""
    begun = b"%d" % protocol.begun(now_us)
    return Command.of(epoch_key(fingerprint), b"SET", begun, b"NX")


def raise_(fingerprint: str, by: int) -> Command:
    """Returns the command that adds `by` to the epoch of a key space (a model in a configuration):
    a number in the keys of its blocks. This flushes the key space (deletes all its blocks)."""
    return Command.of(epoch_key(fingerprint), b"INCRBY", b"%d" % by)


def remove(fingerprint: str) -> Command:
    """Returns the command that removes the epoch of a key space (a model in a configuration).
    Even a full server, which refuses INCRBY, executes this command (UNLINK), so a flush can end an
    epoch there too."""
    return Command.of(epoch_key(fingerprint), b"UNLINK")


def parsed_or_none(reply: Reply) -> int | None:
    """Returns the epoch (a number that each flush raises) in a reply to GET; NO_EPOCH if the key is
    absent; None if the reply is not an epoch. Raises UnusableError if the reply means that the
    whole server is unusable."""
    try:
        return parsed(reply)
    except LostError:
        return None


def parsed(reply: Reply) -> int:
    """Returns the epoch (a number that each flush raises) in a reply to GET or INCRBY; NO_EPOCH if
    the key is absent. Raises UnusableError if the reply means that the whole server is unusable,
    and LostError for any other reply that is not an epoch."""
    if reply is None:
        return NO_EPOCH
    if isinstance(reply, ErrorReply):
        raise unusable(reply.code) or LostError(f"gives no epoch: {reply.code}")
    if isinstance(reply, bytes) and reply.isdigit() and len(reply) < 20:
        return int(reply)
    if isinstance(reply, int) and reply > 0:
        return reply
    raise LostError("has an epoch that is no number: remove the keys hotkv/1/*/epoch")
