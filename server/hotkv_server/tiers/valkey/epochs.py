"""Epochs in Valkey: an integer under `hotkv/1/{fingerprint}/epoch`, which a flush raises.

Always true: the epoch of a key space never returns to a value that it has had. Keys of blocks have
the epoch in them, so blocks of an old epoch are only found by a node that has not heard of the
flush. Such a node is stopped by the order in a read's pipeline: **the epoch is read after the
blocks**.

Proof. The server executes commands one at a time, and those of a connection in the order in which
they were sent. Let a read GET blocks b1 ... bn and then the epoch, and let the reply be E, the
epoch that the keys were made with. Epochs do not come back, so a flush that ended E was executed
after the GET of the epoch, hence after each GET of a block, and was answered later still. So if a
flush has been answered before a block is read, the epoch differs and the block is refused. With the
epoch first, the flush could be executed and answered between the two, and the old block would be
served. Each part of a call reads the epoch for itself; a call is refused whole if one of its parts
saw another epoch.

The proof needs one server. In a cluster blocks and epoch lie on different ones, so there the epoch
is asked for when all blocks have come: the GET of the epoch is sent after each GET of a block was
executed, and the rest holds as above. A replica that takes over without the last INCR would bring
an old epoch back.

An epoch that is not there equals none: nothing passes. It begins at the clock's time and not at 0
(`epoch_numbers`), so a server that has lost it (restart, FLUSHALL, eviction under an allkeys
policy) does not begin again with numbers that were used before.
"""

from hotkv_server.tiers import epoch_numbers
from hotkv_server.tiers.protocol import NO_EPOCH
from hotkv_server.tiers.remote.errors import LostError
from hotkv_server.tiers.valkey.errors import unusable
from hotkv_server.tiers.valkey.resp import ErrorReply, Reply, command


def epoch_key(fingerprint: str) -> bytes:
    """Where a key space's epoch is."""
    return b"hotkv/1/%b/epoch" % fingerprint.encode()


def get(fingerprint: str) -> bytes:
    """The command that reads an epoch."""
    return command(b"GET", epoch_key(fingerprint))


def begin(fingerprint: str, now_us: int) -> bytes:
    """The command that begins an epoch where none is. `now_us`: microseconds of the wall clock."""
    return command(b"SET", epoch_key(fingerprint), b"%d" % epoch_numbers.begun(now_us), b"NX")


def raise_(fingerprint: str) -> bytes:
    """The command that raises an epoch."""
    return command(b"INCR", epoch_key(fingerprint))


def remove(fingerprint: str) -> bytes:
    """The command that takes an epoch away. A server that is full refuses INCR but not this, and a
    flush must count there too."""
    return command(b"UNLINK", epoch_key(fingerprint))


def parsed(reply: Reply) -> int:
    """The epoch that a reply gives, or NO_EPOCH. Raises LostError or UnusableError if it gives
    none."""
    if reply is None:
        return NO_EPOCH
    if isinstance(reply, ErrorReply):
        raise unusable(reply.code) or LostError(f"gives no epoch: {reply.code}")
    if isinstance(reply, bytes) and reply.isdigit() and len(reply) < 20:
        return int(reply)
    if isinstance(reply, int) and reply > 0:
        return reply
    raise LostError("has an epoch that is no number: remove the keys hotkv/1/*/epoch")
