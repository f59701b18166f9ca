"""Translates a tier's calls into commands for a Valkey or Redis server, or for a cluster.

Always true, in addition to `Client`: a method that returns has read all replies to its commands, so
the next method does not read them.
"""

import time
from collections.abc import Sequence

from hotkv_server.tiers.protocol import NO_EPOCH, Codes, Epochs, Read, Seals, Shown, Write, raised
from hotkv_server.tiers.remote import values
from hotkv_server.tiers.remote.client import LostError, quoted
from hotkv_server.tiers.valkey import epochs
from hotkv_server.tiers.valkey.connection import Pipe
from hotkv_server.tiers.valkey.errors import FULL_CODES, Errors, unusable
from hotkv_server.tiers.valkey.resp import Command, ErrorReply, Reply

# ------------------------------------------------------------------------------------- Time to live

# The lifetime of a block's value depends on its depth: the number of blocks before it in its
# sequence.

HALFWAY_BLOCKS = 64
"""The depth at which `ttl_ms` has fallen by half of its total fall, to 3/4 of `base_s`."""


def ttl_ms(base_s: float, depth_blocks: int) -> int:
    """Returns the time to live, in milliseconds, of a block with `depth_blocks` blocks before it in
    its sequence. The time to live is `base_s` for the first block, and falls with the depth towards
    half of `base_s`.

    A block is useful only while all blocks before it exist. A server with `maxmemory-policy
    volatile-ttl` evicts the keys that expire first. Since the time falls with depth, the server
    evicts sequences from their ends, and prefixes stay whole: of 124 remaining blocks 109 were
    usable, against 30 under `allkeys-lru`. The time falls steeply at first, because sequences share
    their first blocks. Then it falls slowly, so that the end of a long sequence does not expire
    while memory is free. A later block that was stored after an earlier block still expires first
    if the difference of their ages is less than the difference of their times to live.
    """
    return max(1, int(base_s * 500 * (1 + HALFWAY_BLOCKS / (HALFWAY_BLOCKS + depth_blocks))))


# --------------------------------------------------------------------------------------- The client


class RespClient:
    """A client that sends its commands over a `Pipe`; see the module and `Client`."""

    def __init__(self, pipe: Pipe, ttl_s: float, clock: epochs.StoreClock) -> None:
        """Takes ownership of `pipe`.

        `ttl_s`: time to live of the first block of a sequence.
        `clock`: shared by all connections to the server.
        """
        self._pipe = pipe
        self._clock = clock
        self._says_info = pipe.has_one_clock
        self._ttl_s = ttl_s
        self._head = memoryview(bytearray(values.HEAD_BYTES))

    def __repr__(self) -> str:
        return f"RespClient({self._pipe!r})"

    def is_fresh(self) -> bool:
        """Implements `Client`."""
        return self._pipe.is_fresh()

    def probe(
        self, keys: Sequence[bytes], expected: Epochs, codes: Codes, until_s: float
    ) -> Epochs:
        """Implements `Client`."""
        self._send_before_epochs([Command.of(key, b"EXISTS") for key in keys], expected, until_s)
        errors = Errors()
        settled = codes.copy()
        for at in range(len(keys)):
            reply = self._pipe.next(until_s)
            if isinstance(reply, ErrorReply):
                errors.add(reply.code)
            elif reply in (0, 1):
                settled[at] = Read.FOUND if reply else Read.ABSENT
            else:
                raise LostError(f"answers EXISTS with {_shown(reply)}")
        changed = self._changed(expected, errors, until_s)
        if not changed:
            codes[:] = settled
        return changed

    def read(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        expected: Epochs,
        codes: Codes,
        until_s: float,
    ) -> Epochs:
        """Implements `Client`."""
        self._send_before_epochs([Command.of(key, b"GET") for key in keys], expected, until_s)
        errors = Errors()
        # Set the codes only after the epochs were checked.
        settled = codes.copy() if expected else codes
        for at, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            settled[at] = self._value(key, slot, errors, until_s)
        changed = self._changed(expected, errors, until_s)
        if changed:
            return changed
        codes[:] = settled
        # Delete damaged values now: after this call ends, another call may write the block anew.
        self.forget([keys[at] for at in (settled == Read.CORRUPT).nonzero()[0].tolist()], until_s)
        return changed

    def write(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        depths: Sequence[int],
        codes: Codes,
        seals: Seals,
        until_s: float,
    ) -> None:
        """Implements `Client`."""
        commands, sealed = [], []
        for key, slot, depth in zip(keys, slots, depths, strict=True):
            head, seal = values.head(key, slot)
            sealed.append(seal)
            ttl = b"%d" % ttl_ms(self._ttl_s, depth)
            pieces = (
                b"*6\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b"
                % (len(key), key, len(head) + len(slot), head),
                slot,
                b"\r\n$2\r\nNX\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl),
            )
            commands.append(Command(key, pieces))
        self._pipe.send(commands, until_s)
        errors = Errors()
        for at, seal in enumerate(sealed):
            reply = self._pipe.next(until_s)
            if isinstance(reply, ErrorReply):
                codes[at] = Write.FULL if reply.code in FULL_CODES else Write.FAILED
                errors.add(reply.code)
            elif reply is None:
                codes[at] = Write.PRESENT
            elif reply == b"OK":
                codes[at], seals[at] = Write.STORED, seal
            else:
                raise LostError(f"answers SET with {_shown(reply)}")
        errors.check()

    def forget(self, keys: Sequence[bytes], until_s: float) -> None:
        """Implements `Client`."""
        if not keys:
            return
        for reply in self._ask([Command.of(key, b"UNLINK") for key in keys], until_s):
            if not isinstance(reply, int | ErrorReply):
                raise LostError(f"answers UNLINK with {_shown(reply)}")

    def epochs(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        """Implements `Client`."""
        info = self._info(until_s)
        replies = self._ask([epochs.get(name) for name in fingerprints], until_s)
        # Leave out an epoch that is no number: other key spaces go on.
        found = dict(zip(fingerprints, map(epochs.parsed_or_none, replies), strict=True))
        missing = [name for name, epoch in found.items() if epoch == NO_EPOCH]
        begins = [epochs.begin(name, epochs.now_us(info)) for name in missing]
        gets = [epochs.get(name) for name in missing]
        replies = self._ask(begins + gets, until_s) if missing else []
        for name, begun, reply in zip(
            missing, replies[: len(missing)], replies[len(missing) :], strict=True
        ):
            found[name] = epochs.parsed(reply)
            is_refused = isinstance(begun, ErrorReply) and begun.code not in FULL_CODES
            if is_refused and found[name] == NO_EPOCH:
                assert isinstance(begun, ErrorReply)
                raise unusable(begun.code) or LostError(f"begins no epoch: {begun.code}")
        shown = {name: epoch for name, epoch in found.items() if epoch is not None}
        return Shown(shown, self._clock.restored_below(info, time.monotonic()))

    def raise_epoch(self, fingerprint: str, floor: int, until_s: float) -> int:
        """Implements `Client`."""
        for _ in range(epochs.RAISE_TRIES):
            now_us = epochs.now_us(self._info(until_s))
            _, reply = self._ask(
                [epochs.begin(fingerprint, now_us), epochs.get(fingerprint)], until_s
            )
            before = epochs.parsed(reply)
            wanted = raised(now_us, before, floor)
            (reply,) = self._ask([epochs.raise_(fingerprint, wanted - before)], until_s)
            if isinstance(reply, ErrorReply) and reply.code in FULL_CODES:
                (removed,) = self._ask([epochs.remove(fingerprint)], until_s)
                if isinstance(removed, ErrorReply):
                    raise unusable(removed.code) or LostError(f"keeps an old epoch: {removed.code}")
                if not removed:
                    raise LostError("is full: it has no room for the epoch of a key space")
                self._check_replica(fingerprint, until_s)
                return NO_EPOCH
            # A lower number means that the server lost the epoch after it was read, and INCRBY
            # began at 0.
            if (epoch := epochs.parsed(reply)) >= wanted:
                self._check_replica(fingerprint, until_s)
                return epoch
        raise LostError("loses an epoch again and again")

    def _check_replica(self, fingerprint: str, until_s: float) -> None:
        """Raises LostError if a failover to a replica would now bring an old epoch back."""
        if not self._pipe.outlives_failover(epochs.epoch_key(fingerprint), until_s):
            raise LostError("has no replica that has the epoch of a key space")

    def close(self) -> None:
        """Implements `Client`."""
        self._pipe.close()

    def _info(self, until_s: float) -> Reply:
        """Returns the server's reply to INFO; None for a cluster, or if the server refused an
        earlier INFO of this user."""
        if not self._says_info:
            return None
        (reply,) = self._ask([epochs.INFO_SERVER], until_s)
        self._says_info = not isinstance(reply, ErrorReply)
        return reply

    def _send_before_epochs(
        self, commands: Sequence[Command], expected: Epochs, until_s: float
    ) -> None:
        """Sends commands, and after them the GETs of epochs whose replies `_changed` reads. Sends
        no such GETs to a cluster, where `_changed` sends them. This order makes a flush hold: see
        `epochs`."""
        asked = [epochs.get(name) for name in expected] if self._pipe.keeps_order else []
        self._pipe.send([*commands, *asked], until_s)

    def _ask(self, commands: Sequence[Command], until_s: float) -> list[Reply]:
        self._pipe.send(commands, until_s)
        return [self._pipe.next(until_s) for _ in commands]

    def _value(self, key: bytes, slot: memoryview, errors: Errors, until_s: float) -> Read:
        judged = Read.CORRUPT

        def place(value_bytes: int) -> memoryview | None:
            nonlocal judged
            judged = values.judge_head(self._head, value_bytes, len(slot))
            return slot if judged == Read.FOUND else None

        reply = self._pipe.value(self._head, place, until_s)
        if reply is None:
            return Read.ABSENT
        if isinstance(reply, ErrorReply):
            errors.add(reply.code)
            return Read.CORRUPT if reply.code == "WRONGTYPE" else Read.FAILED
        if reply.is_placed and not values.is_sound(key, self._head, slot):
            return Read.CORRUPT
        return judged

    def _changed(self, expected: Epochs, errors: Errors, until_s: float) -> Epochs:
        if not self._pipe.keeps_order:
            self._pipe.send([epochs.get(name) for name in expected], until_s)
        replies = {name: self._pipe.next(until_s) for name in expected}
        errors.check()
        now = {name: epochs.parsed(reply) for name, reply in replies.items()}
        # NO_EPOCH never matches, even if it was expected.
        return {name: at for name, at in now.items() if at != expected[name] or at == NO_EPOCH}


def _shown(reply: Reply) -> str:
    return quoted(reply) if isinstance(reply, bytes) else repr(reply)[:80]
