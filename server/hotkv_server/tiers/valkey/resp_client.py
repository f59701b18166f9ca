"""Translates a tier's calls into commands for a Valkey or Redis server, or for a cluster.

Always true, in addition to the rules of `remote.client`: when a method returns, it has read all
replies to its commands. So the next method reads only replies to its own commands.
"""

import time
from collections.abc import Sequence

from hotkv_server.tiers.protocol import (
    NO_GENERATION,
    Codes,
    Generations,
    Read,
    Shown,
    Write,
    raised,
)
from hotkv_server.tiers.remote import values
from hotkv_server.tiers.remote.client import LostError, quoted
from hotkv_server.tiers.valkey import generation_keys
from hotkv_server.tiers.valkey.connection import Pipe
from hotkv_server.tiers.valkey.reply_errors import FULL_CODES, NO_WRITE_CODES, Errors, unusable
from hotkv_server.tiers.valkey.resp import Command, ErrorReply, Reply

# ------------------------------------------------------------------------------------- Time to live

# The time to live of a block's value depends on the block's depth: the number of blocks before it
# in its sequence.

HALFWAY_BLOCKS = 64
"""The depth (number of blocks before a block in its sequence) at which a block's time to live is
3/4 of that of the sequence's first block. The limit for great depths is 1/2."""


def ttl_ms(base_s: float, depth_blocks: int) -> int:
    """Returns the time to live of a block, in milliseconds. It is `base_s` for the first block of a
    sequence, and falls with the depth towards half of `base_s`.

    A block is useful only while all blocks before it exist. A server with `maxmemory-policy
    volatile-ttl` evicts the keys that expire first. Since the time to live falls with the depth,
    the server evicts a sequence from its end, and its prefix stays whole. In a measurement, 124
    blocks remained in a full server, and 109 of them were usable; under the policy `allkeys-lru`,
    30 were usable.

    The time to live falls steeply at first, because sequences share their first blocks. Then it
    falls slowly, so that the end of a long sequence does not expire while memory is free. A block
    may be stored later than the preceding blocks of its sequence. It still expires first, as long
    as this delay is less than the difference of the times to live.

    `base_s`: time to live of the first block of a sequence, in seconds.
    `depth_blocks`: number of blocks before the block in its sequence.
    """
    return max(1, int(base_s * 500 * (1 + HALFWAY_BLOCKS / (HALFWAY_BLOCKS + depth_blocks))))


# --------------------------------------------------------------------------------------- The client


class RespClient:
    """A `Client` (connection of a tier to its store) for a Valkey or Redis server. Translates calls
    into commands, and sends the commands over a `Pipe`; see the module."""

    def __init__(
        self, pipe: Pipe, ttl_s: float, clock: generation_keys.StoreClock, unsafe: set[str]
    ) -> None:
        """Takes ownership of the connection `pipe`: `close` closes `pipe`.

        `ttl_s`: time to live of the first block of a sequence, in seconds.
        `clock`: detects restarts of the server; shared by all clients of the tier.
        `unsafe`: the key spaces whose raised generation (number that each flush raises) no replica
            had received; shared by all clients of the tier.
        """
        self._pipe = pipe
        self._clock = clock
        self._unsafe = unsafe
        self._says_info = pipe.has_one_clock
        self._ttl_s = ttl_s
        self._head = memoryview(bytearray(values.HEAD_BYTES))

    def __repr__(self) -> str:
        return f"RespClient({self._pipe!r})"

    @property
    def moved_s(self) -> float:
        """The time at which bytes last moved; see `Client.moved_s`."""
        return self._pipe.moved_s

    def is_fresh(self) -> bool:
        """Returns False if the connection has ended; see `Client.is_fresh`."""
        return self._pipe.is_fresh()

    def probe(
        self, keys: Sequence[bytes], expected: Generations, codes: Codes, until_s: float
    ) -> Generations:
        """Asks the store which keys exist; see `Client.probe`."""
        self._send_before_generations(
            [Command.of(key, b"EXISTS") for key in keys], expected, until_s
        )
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
        expected: Generations,
        codes: Codes,
        until_s: float,
    ) -> Generations:
        """Reads blocks into their slots; see `Client.read`."""
        self._send_before_generations([Command.of(key, b"GET") for key in keys], expected, until_s)
        errors = Errors()
        # Collect the codes in a copy. The caller's codes are set only after the generations
        # (numbers that each flush raises) were checked.
        settled = codes.copy()
        for at, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            settled[at] = self._value(key, slot, errors, until_s)
        changed = self._changed(expected, errors, until_s)
        if changed:
            return changed
        codes[:] = settled
        # Delete damaged values before this call ends: afterwards another call may write the block
        # again, and the new value must not be deleted.
        self.forget([keys[at] for at in (settled == Read.CORRUPT).nonzero()[0].tolist()], until_s)
        return changed

    def write(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        depths: Sequence[int],
        codes: Codes,
        until_s: float,
    ) -> None:
        """Writes blocks under their keys; see `Client.write`."""
        commands = []
        for key, slot, depth in zip(keys, slots, depths, strict=True):
            head = values.head(key, slot)
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
        for at in range(len(keys)):
            reply = self._pipe.next(until_s)
            if isinstance(reply, ErrorReply):
                codes[at] = Write.FULL if reply.code in FULL_CODES else Write.FAILED
                errors.add(reply.code)
            elif reply is None:
                codes[at] = Write.PRESENT
            elif reply == b"OK":
                codes[at] = Write.STORED
            else:
                raise LostError(f"answers SET with {_shown(reply)}")
        errors.check(is_write=True)

    def forget(self, keys: Sequence[bytes], until_s: float) -> None:
        """Deletes the values of the keys; see `Client.forget`."""
        if not keys:
            return
        for reply in self._ask([Command.of(key, b"UNLINK") for key in keys], until_s):
            if not isinstance(reply, int | ErrorReply):
                raise LostError(f"answers UNLINK with {_shown(reply)}")

    def generations(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        """Returns the generations of key spaces; see `Client.generations`."""
        info = self._info(until_s)
        replies = self._ask([generation_keys.get(name) for name in fingerprints], until_s)
        # Leave out a key space whose value for the generation (number that each flush raises) is
        # not a number, so that the other key spaces stay usable.
        found = dict(zip(fingerprints, map(generation_keys.parsed_or_none, replies), strict=True))
        missing = [name for name, generation in found.items() if generation == NO_GENERATION]
        begins = [generation_keys.begin(name, generation_keys.now_us(info)) for name in missing]
        gets = [generation_keys.get(name) for name in missing]
        replies = self._ask(begins + gets, until_s) if missing else []
        for name, begun, reply in zip(
            missing, replies[: len(missing)], replies[len(missing) :], strict=True
        ):
            found[name] = generation_keys.parsed(reply)
            if isinstance(begun, ErrorReply) and not (found[name] or begun.code in NO_WRITE_CODES):
                raise unusable(begun.code) or LostError(f"begins no generation: {begun.code}")
        shown = {name: generation for name, generation in found.items() if generation is not None}
        below = self._clock.restored_below(info, time.monotonic(), max(shown.values(), default=0))
        return Shown(shown, below)

    def raise_generation(
        self, fingerprint: str, floor: int, until_s: float, is_retry: bool = False
    ) -> int:
        """Raises the generation (number that each flush raises) of a key space (a model in a
        configuration), which flushes its blocks in the store; see `Client.raise_generation`."""
        if is_retry and fingerprint in self._unsafe:
            # Each raise of the generation (the number that each flush raises) makes all nodes flush
            # the key space. So do not raise it again before a replica has received the last raise.
            # Adding 0 is a write for which WAIT can wait.
            now_us = generation_keys.now_us(self._info(until_s))
            commands = [
                generation_keys.begin(fingerprint, now_us),
                generation_keys.raise_(fingerprint, 0),
            ]
            self._ask(commands, until_s)
            self._check_replica(fingerprint, until_s)
        for _ in range(generation_keys.RAISE_TRIES):
            now_us = generation_keys.now_us(self._info(until_s))
            _, reply = self._ask(
                [generation_keys.begin(fingerprint, now_us), generation_keys.get(fingerprint)],
                until_s,
            )
            before = generation_keys.parsed(reply)
            wanted = raised(now_us, before, floor)
            (reply,) = self._ask([generation_keys.raise_(fingerprint, wanted - before)], until_s)
            if isinstance(reply, ErrorReply) and reply.code in FULL_CODES:
                (removed,) = self._ask([generation_keys.remove(fingerprint)], until_s)
                if isinstance(removed, ErrorReply):
                    error = unusable(removed.code, is_write=True)
                    raise error or LostError(f"keeps an old generation: {removed.code}")
                if not removed:
                    raise LostError("is full: it has no room for the generation of a key space")
                self._check_replica(fingerprint, until_s)
                return NO_GENERATION
            if isinstance(reply, ErrorReply) and (error := unusable(reply.code, is_write=True)):
                raise error
            # A lower number means that the server has lost the generation (number that each flush
            # raises) after the GET, so that INCRBY began at 0. Then try again.
            if (generation := generation_keys.parsed(reply)) >= wanted:
                self._check_replica(fingerprint, until_s)
                return generation
        raise LostError("loses a generation again and again")

    def _check_replica(self, fingerprint: str, until_s: float) -> None:
        """Raises LostError unless a replica has received the key space's new generation (a number
        that each flush raises). Otherwise a failover to the replica could bring back the old
        generation."""
        self._unsafe.add(fingerprint)
        if not self._pipe.outlives_failover(generation_keys.generation_key(fingerprint), until_s):
            raise LostError("has no replica that has the generation of a key space")
        self._unsafe.discard(fingerprint)

    def close(self) -> None:
        """Closes the connection; see `Client.close`."""
        self._pipe.close()

    def _info(self, until_s: float) -> Reply:
        """Returns the server's reply to INFO. Returns None for a cluster, and if the server has
        refused an earlier INFO."""
        if not self._says_info:
            return None
        (reply,) = self._ask([generation_keys.INFO_SERVER], until_s)
        self._says_info = not isinstance(reply, ErrorReply)
        return reply

    def _send_before_generations(
        self, commands: Sequence[Command], expected: Generations, until_s: float
    ) -> None:
        """Sends commands for blocks, and after them a GET for each expected generation (number that
        each flush raises). `_changed` reads the replies to these GETs. The module
        `valkey.generations` explains the order.

        In a cluster, sends only the commands for blocks; `_changed` then sends the GETs.
        """
        asked = [generation_keys.get(name) for name in expected] if self._pipe.keeps_order else []
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
        if reply and not values.is_sound(key, self._head, slot):
            return Read.CORRUPT
        return judged

    def _changed(self, expected: Generations, errors: Errors, until_s: float) -> Generations:
        if not self._pipe.keeps_order:
            self._pipe.send([generation_keys.get(name) for name in expected], until_s)
        replies = {name: self._pipe.next(until_s) for name in expected}
        errors.check()
        now = {name: generation_keys.parsed(reply) for name, reply in replies.items()}
        # NO_GENERATION (the store has no generation, the number that each flush raises) counts as
        # changed even if it was expected: without a generation no block may be used.
        return {name: at for name, at in now.items() if at != expected[name] or at == NO_GENERATION}


def _shown(reply: Reply) -> str:
    return quoted(reply) if isinstance(reply, bytes) else repr(reply)[:80]
