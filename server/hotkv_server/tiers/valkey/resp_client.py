"""A tier's calls as commands for a server or cluster. Always true, beside `remote.client`: when
a method returns, it has read all replies to its commands."""

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


HALFWAY_BLOCKS = 64
"""Depth with 3/4 of the first block's time to live; the limit is 1/2."""


def ttl_ms(base_s: float, depth_blocks: int) -> int:
    """A block's time to live: `base_s` for a prompt's first, falling with depth to half.

    With `maxmemory-policy volatile-ttl` the server evicts what expires first, so a prompt from
    its end, as blocks are useful only after all before. Measured: of a full server's 124 blocks
    109 were usable, with `allkeys-lru` 30. It falls steeply first, as prompts share their
    beginnings, then slowly, so that long ends don't expire while memory is free. A block stored
    later than its parent still expires first, if the delay is below the difference.
    """
    return max(1, int(base_s * 500 * (1 + HALFWAY_BLOCKS / (HALFWAY_BLOCKS + depth_blocks))))


# --------------------------------------------------------------------------------------- The client


class RespClient:
    """A `Client` over a `Pipe`; see the module."""

    def __init__(
        self, pipe: Pipe, ttl_s: float, clock: generation_keys.StoreClock, unsafe: set[str]
    ) -> None:
        """Owns `pipe`. `ttl_s`: of a prompt's first block. The tier's clients share `clock` and
        `unsafe`: key spaces whose raised generation no replica had.
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
        return self._pipe.moved_s

    def is_fresh(self) -> bool:
        return self._pipe.is_fresh()

    def probe(
        self, keys: Sequence[bytes], expected: Generations, codes: Codes, until_s: float
    ) -> Generations:
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
        self._send_before_generations([Command.of(key, b"GET") for key in keys], expected, until_s)
        errors = Errors()
        # A copy, until the generations were checked.
        settled = codes.copy()
        for at, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            settled[at] = self._value(key, slot, errors, until_s)
        changed = self._changed(expected, errors, until_s)
        if changed:
            return changed
        codes[:] = settled
        # Before this call ends: another may then write the block again.
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
        if not keys:
            return
        for reply in self._ask([Command.of(key, b"UNLINK") for key in keys], until_s):
            if not isinstance(reply, int | ErrorReply):
                raise LostError(f"answers UNLINK with {_shown(reply)}")

    def generations(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        info = self._info(until_s)
        replies = self._ask([generation_keys.get(name) for name in fingerprints], until_s)
        # Omit what is no number, so that other key spaces stay usable.
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
        if is_retry and fingerprint in self._unsafe:
            # A raise makes all nodes flush: no new one before a replica has the last. Adding 0
            # is a write for which WAIT can wait.
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
            # Lower: the server lost the generation after the GET. Try again.
            if (generation := generation_keys.parsed(reply)) >= wanted:
                self._check_replica(fingerprint, until_s)
                return generation
        raise LostError("loses a generation again and again")

    def _check_replica(self, fingerprint: str, until_s: float) -> None:
        """Raises LostError without a replica that has the new generation: a failover could bring
        back the old one."""
        self._unsafe.add(fingerprint)
        if not self._pipe.outlives_failover(generation_keys.generation_key(fingerprint), until_s):
            raise LostError("has no replica that has the generation of a key space")
        self._unsafe.discard(fingerprint)

    def close(self) -> None:
        self._pipe.close()

    def _info(self, until_s: float) -> Reply:
        """INFO's reply; None for a cluster, or if refused before."""
        if not self._says_info:
            return None
        (reply,) = self._ask([generation_keys.INFO_SERVER], until_s)
        self._says_info = not isinstance(reply, ErrorReply)
        return reply

    def _send_before_generations(
        self, commands: Sequence[Command], expected: Generations, until_s: float
    ) -> None:
        """Sends block commands, then GETs of generations, which `_changed` reads; in a cluster
        `_changed` sends them. Why: `valkey.generation_keys`."""
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
        # NO_GENERATION counts as changed even if expected: no block may then be used.
        return {name: at for name, at in now.items() if at != expected[name] or at == NO_GENERATION}


def _shown(reply: Reply) -> str:
    return quoted(reply) if isinstance(reply, bytes) else repr(reply)[:80]
