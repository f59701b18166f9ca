"""The child process with Mooncake's native client: `python -m hotkv_server.tiers.mooncake.child
SOCKET MEMORY BYTES ...`, with the descriptors of a socket to the server and of memories with slots
(the arena; staging memory), each with its size. Slots are offsets, as if the memories followed each
other.

Always true: the child ends with the server. It writes to the memories only for a `read`, in its
slots. Blocks move between memory and network without a copy.
"""

import contextlib
import ctypes
import importlib
import itertools
import mmap
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from hotkv_server.tiers.mooncake.words import Line, generation_key
from hotkv_server.tiers.protocol import NO_GENERATION, RAISES, Read, Write, raised
from hotkv_server.tiers.remote import values
from hotkv_server.tiers.remote.calls import PART_BLOCKS

LOCAL_BYTES = 16 << 20
"""The native client's memory for generations."""
ROW_BYTES = 64
"""Distance of the heads (`tiers.remote.values`) of a request's blocks."""
HEADS_BYTES = PART_BLOCKS * ROW_BYTES
ABSENT_CODE, FULL_CODE = -704, -200
"""OBJECT_NOT_FOUND and NO_AVAILABLE_HANDLE of Mooncake's types.h."""
LOST_CODES = frozenset((-900, -901))
"""RPC_FAIL, and a request that timed out: the master did not answer."""
MAX_DIGITS = 19
"""Of a generation."""
_PR_SET_PDEATHSIG = 1


class MasterLostError(Exception):
    """Mooncake's master does not answer, or unusably."""


class SpoiledError(MasterLostError):
    """A generation is no number."""


class AwayError(Exception):
    """A generation can't be read: it was in the memory of a process that has ended. The master
    lists it for some seconds more."""


class Child:
    """Executes requests with the native client, which is set up, one at a time. `native`:
    Mooncake's module."""

    def __init__(self, store: Any, native: Any, *memories: mmap.mmap) -> None:
        self._store, self._native = store, native
        self._heads = mmap.mmap(-1, HEADS_BYTES)
        self._head_bytes = memoryview(self._heads)
        self._heads_at = _address(self._heads)
        self._memories = [(memoryview(one), _address(one)) for one in memories]
        for content, address in (*self._memories, (self._head_bytes, self._heads_at)):
            num_bytes = len(content)
            if code := store.register_buffer(address, num_bytes):
                raise MasterLostError(f"can't register {num_bytes} bytes: {code}")
        self.requests: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "probe": self._probe,
            "read": self._read,
            "write": self._write,
            "forget": self._forget,
            "generations": self._begun_generations,
            "raise": self._raise,
        }

    def _probe(self, asked: dict[str, Any]) -> dict[str, Any]:
        codes = [_probed(code) for code in self._exist(asked["names"])]
        return {"codes": codes, "generations": self._generations(asked)}

    def _read(self, asked: dict[str, Any]) -> dict[str, Any]:
        names, slots, sizes = asked["names"], asked["slots"], asked["sizes"]
        got = self._store.batch_get_into_multi_buffers(names, *self._buffers(slots, sizes))
        codes = [
            self._judged(row, name, bytes.fromhex(key), slot, size, code)
            for row, (name, key, slot, size, code) in enumerate(
                zip(names, asked["keys"], slots, sizes, got, strict=True)
            )
        ]
        # After the blocks: proof in `valkey.generation_keys`.
        generations = self._generations(asked)
        if corrupt := [
            name for name, code in zip(names, codes, strict=True) if code == Read.CORRUPT
        ]:
            self._store.batch_remove(corrupt, True)
        return {"codes": codes, "generations": generations}

    def _judged(self, row: int, name: str, key: bytes, slot: int, size: int, code: int) -> Read:
        if code == ABSENT_CODE:
            return Read.ABSENT
        if code < 0:
            _check(code)
            # The value may have another size than the buffers.
            value_bytes = _check(self._store.get_size(name))
            is_other = 0 <= value_bytes != size + values.HEAD_BYTES
            return Read.CORRUPT if is_other else Read.FAILED
        head = self._head_bytes[row * ROW_BYTES :][: values.HEAD_BYTES]
        judged = values.judge_head(head, code, size)
        if judged == Read.FOUND and not values.is_sound(key, head, self._slot(slot, size)):
            return Read.CORRUPT
        return judged

    def _write(self, asked: dict[str, Any]) -> dict[str, Any]:
        names, slots, sizes = asked["names"], asked["slots"], asked["sizes"]
        codes = [int(Write.PRESENT)] * len(names)
        # Look first, because a put under an existing key counts as success.
        rows = [row for row, code in enumerate(self._exist(names)) if code != 1]
        for at, row in enumerate(rows):
            content = self._slot(slots[row], sizes[row])
            head = values.head(bytes.fromhex(asked["keys"][row]), content)
            self._head_bytes[at * ROW_BYTES :][: len(head)] = head
        new = [names[row] for row in rows]
        if not rows:
            return {"codes": codes}
        buffers = self._buffers([slots[row] for row in rows], [sizes[row] for row in rows])
        put = self._store.batch_put_from_multi_buffers(new, *buffers)
        # Look again, because a full store may report success and evict at once.
        for row, code, there in zip(rows, put, self._exist(new), strict=True):
            if _check(code) == 0:
                codes[row] = Write.STORED if there == 1 else Write.FULL
            else:
                codes[row] = Write.FULL if code == FULL_CODE else Write.FAILED
        return {"codes": codes}

    def _forget(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._store.batch_remove(asked["names"], True)
        return {}

    def _begun_generations(self, asked: dict[str, Any]) -> dict[str, Any]:
        generations: dict[str, int] = {}
        for name in asked["fingerprints"]:
            # Omit it, so that other key spaces stay usable.
            with contextlib.suppress(SpoiledError):
                generations[name] = self._begun(generation_key(name))
        return {"generations": generations}

    def _raise(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = generation_key(asked["fingerprint"])
        try:
            before = self._number(name)
        except (MasterLostError, AwayError):
            # Unreadable, but it must go.
            before = NO_GENERATION
        code = _check(self._store.remove(name, True))
        if code not in (0, ABSENT_CODE):
            raise MasterLostError(f"keeps an old generation: {code}")
        generation = self._begun(name, asked["floor"], before)
        if generation == before == NO_GENERATION:
            # There was none and is none: other nodes would not notice the flush.
            raise MasterLostError("has no room for a generation")
        if NO_GENERATION < generation <= max(asked["floor"], before):
            # Another node began one first, without knowing `floor` or `before`.
            raise MasterLostError("was given an old generation meanwhile")
        return {"generation": generation}

    def _begun(self, name: str, *known: int) -> int:
        """The generation under `name`, or a new one above `known`; NO_GENERATION if there is no
        room. A put under an existing key changes nothing, so two nodes get the same."""
        generation = raised(time.time_ns() // 1000, 0, *known) + secrets.randbelow(RAISES // 2)
        pinned = self._native.ReplicateConfig()
        pinned.with_hard_pin = True
        _check(self._store.put(name, b"%d" % generation, pinned))
        return self._number(name)

    def _generations(self, asked: dict[str, Any]) -> dict[str, int]:
        return {name: self._number(generation_key(name)) for name in asked["generations"]}

    def _number(self, name: str) -> int:
        """The generation under `name`; NO_GENERATION without the key. SpoiledError or AwayError
        otherwise: NO_GENERATION could hide a flush.
        """
        found = bytes(self._store.get(name))
        if not found:
            # Empty may also mean that the master did not answer.
            code = _check(self._store.get_size(name))
            if code == ABSENT_CODE:
                return NO_GENERATION
            raise AwayError(f"has a generation that can't be read: {code}")
        if not (found.isdigit() and len(found) <= MAX_DIGITS and int(found) > NO_GENERATION):
            raise SpoiledError("has a generation that is no number")
        return int(found)

    def _exist(self, names: list[str]) -> list[int]:
        return [_check(code) for code in self._store.batch_is_exist(names)]

    def _slot(self, slot: int, size: int) -> memoryview:
        return self._placed(slot, size)[0]

    def _placed(self, slot: int, size: int) -> tuple[memoryview, int]:
        """A slot's bytes and address. Raises ValueError if it is outside the memories."""
        for content, address in self._memories:
            if 0 <= slot < len(content) and 0 < size <= len(content) - slot:
                return content[slot : slot + size], address + slot
            slot -= len(content)
        raise ValueError("a slot lies outside the memories")

    def _buffers(
        self, slots: list[int], sizes: list[int]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """For each block, addresses and sizes of its head and slot. Raises ValueError if a slot
        is outside the memories."""
        places = [self._placed(*one)[1] for one in zip(slots, sizes, strict=True)]
        heads = [self._heads_at + row * ROW_BYTES for row in range(len(slots))]
        return (
            [[*one] for one in zip(heads, places, strict=True)],
            [[values.HEAD_BYTES, size] for size in sizes],
        )


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _check(code: int) -> int:
    if code in LOST_CODES:
        raise MasterLostError(f"the master does not answer: {code}")
    return code


def _probed(code: int) -> int:
    return {1: Read.FOUND, 0: Read.ABSENT}.get(code, Read.FAILED)


def _set_up(line: Line, memories: list[mmap.mmap]) -> Child | None:
    """Sets up the client with the server's first message. If that fails, sends the error and
    returns None."""
    native = importlib.import_module("mooncake.store")
    wanted = line.receive()
    store = native.MooncakeDistributedStore()
    code = store.setup(
        wanted["local_hostname"],
        wanted["metadata_server"],
        0,
        LOCAL_BYTES,
        wanted["protocol"],
        wanted["devices"],
        wanted["master"],
    )
    if code:
        line.send({"error": f"can't be set up: {code}"})
        return None
    return Child(store, native, *memories)


def main() -> int:
    """Executes requests until the server has ended or one fails; the server starts a new child
    when it needs one."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    socket_fd, *named = map(int, sys.argv[1:])
    line = Line(socket.socket(fileno=socket_fd))
    memories = list(itertools.starmap(mmap.mmap, zip(named[::2], named[1::2], strict=True)))
    try:
        child = _set_up(line, memories)
        if child is not None:
            line.send({})
            while True:
                asked = line.receive()
                line.send(child.requests[asked["do"]](asked))
    except MasterLostError as error:
        line.send({"error": str(error)})
    except AwayError as error:
        line.send({"error": str(error), "is_away": True})
    except (EOFError, OSError):
        pass
    finally:
        # The native client's threads would delay a normal exit for seconds.
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
