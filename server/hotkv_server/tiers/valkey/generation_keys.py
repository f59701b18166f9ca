"""Generations in Valkey. The generation of a key space (a model in a configuration) is an integer
under the key `hotkv/1/{fingerprint}/generation`. Each flush, which deletes all blocks of the key
space, raises it.

Always true: a raise gives a greater generation than all generations that the raising node knows.

The keys of blocks contain the generation. So only a node that does not know of a flush yet asks for
blocks of an old generation. The order of the commands in a read prevents this node from using these
blocks: **the node reads the generation after the blocks**.

Proof. The server executes commands one at a time, and the commands of a connection in their order.
Suppose a node sends GETs for blocks whose keys contain the generation E, then a GET for the
generation, and the reply to the last GET is still E. A generation that has ended does not return.
So a flush that ends E is executed after the GET of the generation, hence after the GET of each
block, and is answered later still. Conversely, if a flush was answered before a block is read, the
node sees another generation than E, and refuses the block. If the generation were read first, a
flush could be executed and answered between the two reads, and the old block would be served. Each
part of a call reads the generation; if any part sees another generation, the whole call is refused.

The proof assumes a single server. In a cluster, blocks and generation are on different servers.
There the client sends the GET of the generation only after it has the replies to all GETs of
blocks, so the order is the same.

A server that restarts with an old copy of its data (a snapshot, or a replica without the last
commands) shows an earlier generation. Nodes that know a later generation raise the server's
generation above it; other nodes can't see the error. So in the first GRACE_S after a restart
(`StoreClock`), generations that began before the restart are not trusted. In this time the nodes
that know later generations reconnect.

If the generation's key is absent, every block is refused. A new generation is computed from the
server's clock (`protocol.begun`), and not counted from 0. So if a server has lost a generation (by
a restart, FLUSHALL, or eviction under an allkeys policy), no later generation has the number of the
lost generation.
"""

import threading
import time

from hotkv_server.tiers import protocol
from hotkv_server.tiers.protocol import NO_GENERATION
from hotkv_server.tiers.remote.client import LostError
from hotkv_server.tiers.valkey.reply_errors import unusable
from hotkv_server.tiers.valkey.resp import Command, ErrorReply, Reply, command

GRACE_S = 5.0
"""A server that has just restarted may have an old copy of its data, which lacks flushes. So for
this time after its first connection to such a server, this node does not trust generations (numbers
that each flush raises) from before the server's start. Meanwhile nodes that know later generations
connect again and raise the server's generations. They need at most 2.5 s to connect
(`remote.workers`)."""
YOUNG_S = 600.0
"""A server that has run for longer than this counts as not restarted, even if this node connects to
it for the first time."""
RAISE_TRIES = 8
"""Most tries to raise a generation (a number that each flush raises). A try fails if the server
loses the generation between the commands of the try."""


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
        """Returns the value for `Shown.restored_below`: generations below this value are not
        trusted. If the server has just restarted, the value is the least generation that can have
        begun after the server's start. Otherwise, or if the reply does not show when the server
        started, the value is 0.

        `reply`: the reply to INFO_SERVER.
        `now_s`: a time of time.monotonic.
        `highest`: the highest generation that the server shows. Usually a generation is a time of
            the server's clock. But several raises at the same moment can make a generation greater
            than the clock. Such a generation may have begun before the server's start, so then no
            generation is trusted.
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


def generation_key(fingerprint: str) -> bytes:
    """Returns the key under which a key space's generation (a number that each flush raises) is
    stored."""
    return b"hotkv/1/%b/generation" % fingerprint.encode()


def get(fingerprint: str) -> Command:
    """Returns the command that reads a key space's generation (a number that each flush raises)."""
    return Command.of(generation_key(fingerprint), b"GET")


def begin(fingerprint: str, now_us: int) -> Command:
    """Returns the command that begins a generation (a number that each flush raises) for a key
    space (a model in a configuration). The command changes nothing if the server already has a
    generation for it. `now_us`: the time of the wall clock in microseconds."""
    begun = b"%d" % protocol.begun(now_us)
    return Command.of(generation_key(fingerprint), b"SET", begun, b"NX")


def raise_(fingerprint: str, by: int) -> Command:
    """Returns the command that adds `by` to the generation of a key space (a model in a
    configuration): a number in the keys of its blocks. This flushes the key space (deletes all its
    blocks)."""
    return Command.of(generation_key(fingerprint), b"INCRBY", b"%d" % by)


def remove(fingerprint: str) -> Command:
    """Returns the command that removes the generation of a key space (a model in a configuration).
    Even a full server, which refuses INCRBY, executes this command (UNLINK), so a flush can end an
    generation there too."""
    return Command.of(generation_key(fingerprint), b"UNLINK")


def parsed_or_none(reply: Reply) -> int | None:
    """Returns the generation (a number that each flush raises) in a reply to GET; NO_GENERATION if
    the key is absent; None if the reply is not a generation. Raises UnusableError if the reply
    means that the whole server is unusable."""
    try:
        return parsed(reply)
    except LostError:
        return None


def parsed(reply: Reply) -> int:
    """Returns the generation (a number that each flush raises) in a reply to GET or INCRBY;
    NO_GENERATION if the key is absent. Raises UnusableError if the reply means that the whole
    server is unusable, and LostError for any other reply that is not a generation."""
    if reply is None:
        return NO_GENERATION
    if isinstance(reply, ErrorReply):
        raise unusable(reply.code) or LostError(f"gives no generation: {reply.code}")
    if isinstance(reply, bytes) and reply.isdigit() and len(reply) < 20:
        return int(reply)
    if isinstance(reply, int) and reply > 0:
        return reply
    raise LostError("has a generation that is no number: remove the keys hotkv/1/*/generation")
