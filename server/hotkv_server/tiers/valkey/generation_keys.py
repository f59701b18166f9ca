"""Generations in Valkey, integers under `hotkv/1/{fingerprint}/generation`. Always true: a raise
exceeds all generations that the raising node knows.

**A read asks for the generation after the blocks.** Proof: a server executes commands one at a
time, those of a connection in order. Suppose the GETs of generation E's blocks precede a GET that
still shows E. Generations don't return, so a flush that ends E came after all of them, its answer
later still. If it was answered before a block was read, the node sees another generation and
refuses. (In the other order, a flush between the two would let an old block through.) Each part of
a call asks; if one sees another, the call is refused. In a cluster the client waits for the blocks
before it sends the GET.

A server that restarts with an old copy of its data shows an earlier generation. Nodes that know
a later one raise it; the others trust no older generation for GRACE_S (`StoreClock`). A missing
key refuses all blocks. Generations come from the server's clock (`protocol.begun`), so a lost
number does not return.
"""

import threading
import time

from hotkv_server.tiers import protocol
from hotkv_server.tiers.protocol import NO_GENERATION
from hotkv_server.tiers.remote.client import LostError
from hotkv_server.tiers.valkey.reply_errors import unusable
from hotkv_server.tiers.valkey.resp import Command, ErrorReply, Reply, command

GRACE_S = 5.0
"""After the first connection to a restarted server. Longer than nodes need to connect again (at
most 2.5 s, `remote.workers`) and raise what it has lost."""
YOUNG_S = 600.0
"""A server that has run longer is not restarted."""
RAISE_TRIES = 8
"""A try fails if the server loses the generation meanwhile."""


class StoreClock:
    """Detects a server's restart from INFO. Common to a tier's connections. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._run_id = b""
        self._seen_s = 0.0
        self._started_us = 0

    def __repr__(self) -> str:
        return f"StoreClock(run_id={self._run_id!r}, started_us={self._started_us})"

    def restored_below(self, reply: Reply, now_s: float, highest: int = 0) -> int:
        """See `Shown.restored_below`: just after a restart, the least generation that can have
        begun since; else 0, also if INFO does not tell.

        `reply`: to INFO_SERVER.
        `highest`: that the server shows. If several raises put it ahead of the clock, it may be
            older than the start, so none is trusted.
        """
        run_id, now_us, up_s = _said(reply)
        if not run_id or not now_us:
            return 0
        # The uptime is rounded down, so the earliest computed start is the best.
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


def now_us(reply: Reply) -> int:
    """Of the server's wall clock; of ours if INFO lacks it."""
    return _said(reply)[1] or time.time_ns() // 1000


def _said(reply: Reply) -> tuple[bytes, int, int]:
    """Run id, wall clock (us) and uptime (s) in INFO's reply; empty or 0 if missing."""
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
    return b"hotkv/1/%b/generation" % fingerprint.encode()


def get(fingerprint: str) -> Command:
    return Command.of(generation_key(fingerprint), b"GET")


def begin(fingerprint: str, now_us: int) -> Command:
    """Changes nothing if there is one."""
    begun = b"%d" % protocol.begun(now_us)
    return Command.of(generation_key(fingerprint), b"SET", begun, b"NX")


def raise_(fingerprint: str, by: int) -> Command:
    return Command.of(generation_key(fingerprint), b"INCRBY", b"%d" % by)


def remove(fingerprint: str) -> Command:
    """A full server refuses INCRBY, but not UNLINK: a flush can end a generation there too."""
    return Command.of(generation_key(fingerprint), b"UNLINK")


def parsed_or_none(reply: Reply) -> int | None:
    """None if the reply is no generation. Raises UnusableError."""
    try:
        return parsed(reply)
    except LostError:
        return None


def parsed(reply: Reply) -> int:
    """NO_GENERATION without a key. Raises UnusableError if the server is unusable, LostError for
    other replies."""
    if reply is None:
        return NO_GENERATION
    if isinstance(reply, ErrorReply):
        raise unusable(reply.code) or LostError(f"gives no generation: {reply.code}")
    if isinstance(reply, bytes) and reply.isdigit() and len(reply) < 20:
        return int(reply)
    if isinstance(reply, int) and reply > 0:
        return reply
    raise LostError("has a generation that is no number: remove the keys hotkv/1/*/generation")
