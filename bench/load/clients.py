"""Clients of a server under load, one kind a process: `python -m bench.load.clients KIND TARGET
...`.

`traffic SESSIONS SECONDS RATE SEED`: sessions that look up, store and load. Prints JSON: operations
by kind, errors by reason, latencies of lookups in ms. RATE: operations per second of all sessions;
latency counts from when one is due. 0: each begins when the last has ended. All draw from the same
blocks, four times the arena.

Hostile clients run until they are killed:

- `flood`: calls without waiting for answers.
- `garbage`: random bytes for messages, in calls and streams.
- `deaf`: a session that never reads an answer.
- `spin`: no client; keeps a processor busy, to compare with.
"""

import collections
import contextlib
import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, field

import grpc
import numpy as np

from hotkv_client import BlockRun, GroupHashes, LoadRun
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.errors import HotKVError

# ------------------------------------------------------------------------------------------ Traffic

LAYERS, PAGE_BYTES, NUM_BLOCKS = 2, 8192, 64
BLOCKS_A_CALL = 16
UNIVERSE_BLOCKS = 16_384
LOOKUP_SHARE, STORE_SHARE = 0.6, 0.25
CALL_TIMEOUT_S = 10.0


def universe() -> list[bytes]:
    """Hashes of all blocks, the same in every process."""
    return [random.Random(number).randbytes(32) for number in range(UNIVERSE_BLOCKS)]


@dataclass
class Tally:
    done: "collections.Counter[str]" = field(default_factory=collections.Counter)
    errors: "collections.Counter[str]" = field(default_factory=collections.Counter)
    lookups_ms: list[float] = field(default_factory=list)


class Client:
    """A session that runs random operations on a thread."""

    def __init__(self, target: str, number: int, hashes: list[bytes], seed: int) -> None:
        self.tally = Tally()
        self.hashes = hashes
        self.random = random.Random(seed * 1000 + number)
        self.engine = PagedEngine(
            target,
            layers=LAYERS,
            num_blocks=NUM_BLOCKS,
            page_bytes=PAGE_BYTES,
            model="soak",
            engine_id=f"soak-{seed}-{number}",
        ).connect(60.0)
        self.count = 0

    def run(self, until_s: float, rate: float) -> None:
        """rate: of this session; 0: each operation begins when the last has ended."""
        due_s = time.monotonic()
        while due_s < until_s:
            if rate:
                due_s += self.random.expovariate(rate)
                time.sleep(max(0.0, due_s - time.monotonic()))
            else:
                due_s = time.monotonic()
            if due_s >= until_s:
                return
            kind = self.kind()
            try:
                getattr(self, kind)()
                self.tally.done[kind] += 1
                if kind == "lookup":
                    self.tally.lookups_ms.append(1e3 * (time.monotonic() - due_s))
            except HotKVError as error:
                self.tally.errors[error.reason.name] += 1
            except (LateError, TimeoutError):
                self.tally.errors["late"] += 1

    def kind(self) -> str:
        chance = self.random.random()
        return (
            "lookup"
            if chance < LOOKUP_SHARE
            else "store"
            if chance < LOOKUP_SHARE + STORE_SHARE
            else "load"
        )

    def chain(self) -> list[bytes]:
        start = self.random.randrange(0, UNIVERSE_BLOCKS - BLOCKS_A_CALL, BLOCKS_A_CALL)
        return self.hashes[start : start + BLOCKS_A_CALL]

    def lookup(self) -> None:
        self.engine.session.lookup([GroupHashes(0, self.chain())]).result(CALL_TIMEOUT_S)

    def store(self) -> None:
        self.count += 1
        run = BlockRun(0, self.chain(), np.arange(BLOCKS_A_CALL, dtype=np.int32))
        self.engine.session.store(f"s{self.count}", f"s{self.count}", [run], CALL_TIMEOUT_S).result(
            CALL_TIMEOUT_S
        )

    def load(self) -> None:
        self.count += 1
        name = f"l{self.count}"
        pinned = (
            self.engine.session.acquire(name, [GroupHashes(0, self.chain())])
            .result(CALL_TIMEOUT_S)
            .pinned[0]
        )
        positions = np.flatnonzero(pinned).astype(np.int32)
        if len(positions):
            ids = np.arange(32, 32 + len(positions), dtype=np.int32)
            self.engine.session.load(
                name, name, [LoadRun(0, positions, ids)], CALL_TIMEOUT_S
            ).result(CALL_TIMEOUT_S)
        self.engine.session.release(name)


def traffic(target: str, *options: str) -> None:
    """Prints `connected` and waits for a line on standard input before it begins."""
    sessions, seed = int(options[0]), int(options[3])
    seconds, rate = float(options[1]), float(options[2])
    hashes = universe()
    clients = [Client(target, number, hashes, seed) for number in range(sessions)]
    print("connected", flush=True)
    sys.stdin.readline()
    until_s = time.monotonic() + seconds
    threads = [
        threading.Thread(target=client.run, args=(until_s, rate / sessions)) for client in clients
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = Tally()
    for client in clients:
        total.done += client.tally.done
        total.errors += client.tally.errors
        total.lookups_ms += client.tally.lookups_ms
        client.engine.close()
    print(
        json.dumps({"done": total.done, "errors": total.errors, "lookups_ms": total.lookups_ms}),
        flush=True,
    )


# ---------------------------------------------------------------------------------- Hostile clients

CONNECT = "/hotkv.v1.SessionService/Connect"
LOOKUP = "/hotkv.v1.CacheService/Lookup"


def _as_is(message: bytes) -> bytes:
    return message


def flood(target: str) -> None:
    engine = PagedEngine(target, model="hostile", engine_id=f"hostile-{os.getpid()}").connect(60.0)
    hashes = universe()
    while True:
        try:
            engine.session.lookup([GroupHashes(0, hashes)])
            engine.session.acquire(os.urandom(8).hex(), [GroupHashes(0, hashes)])
        except HotKVError:
            time.sleep(0.001)
        if not engine.session.connected:
            engine.session.wait_connected(1.0)


def garbage(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        unary = channel.unary_unary(LOOKUP, request_serializer=_as_is, response_deserializer=_as_is)
        stream = channel.stream_stream(
            CONNECT, request_serializer=_as_is, response_deserializer=_as_is
        )
        while True:
            with contextlib.suppress(grpc.RpcError):
                unary(os.urandom(2000), timeout=1)
            with contextlib.suppress(grpc.RpcError):
                list(stream(iter([os.urandom(500)] * 5), timeout=1))


def deaf(target: str) -> None:
    from hotkv_client import channels
    from hotkv_client.wire import call_messages as _wire

    engine = PagedEngine(target, model="hostile", engine_id=f"hostile-{os.getpid()}")
    hashes = universe()

    def requests() -> Iterator[_wire.Request]:
        yield _wire.open_session(engine.session.config)
        for number in itertools.count(1):
            request = _wire.lookup([GroupHashes(0, hashes)], 32)
            request.request_id = number
            yield request

    while True:
        with grpc.insecure_channel(target, channels.OPTIONS) as channel:
            call = _wire.connect(_wire.Stub(channel), requests())
            while call.is_active():
                time.sleep(0.1)


def spin(target: str) -> None:
    while True:
        sum(range(100_000))


HOSTILE: dict[str, Callable[[str], None]] = {
    "flood": flood,
    "garbage": garbage,
    "deaf": deaf,
    "spin": spin,
}


def main() -> None:
    kind, target, *options = sys.argv[1:]
    if kind == "traffic":
        traffic(target, *options)
    else:
        HOSTILE[kind](target)


if __name__ == "__main__":
    main()
