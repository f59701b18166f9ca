"""Traffic of many sessions from one process: lookups, stores and loads, as fast as they are
answered or at a given rate.

`python -m bench.load.traffic TARGET SESSIONS SECONDS RATE SEED` prints one JSON object: operations
done by kind, errors by reason, and latencies of lookups in ms. RATE: operations a second over all
sessions, open loop (latency counts from the moment an operation was due); 0 for closed loop.
Sessions share a universe of blocks, four times what the arena holds.
"""

import collections
import json
import random
import sys
import threading
import time
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, field

import numpy as np

from hotkv_client import BlockRun, GroupHashes, LoadRun
from hotkv_client.testing import PagedEngine
from hotkv_proto.errors import HotKVError

LAYERS, PAGE_BYTES, NUM_BLOCKS = 2, 8192, 64
BLOCKS_A_CALL = 16
UNIVERSE_BLOCKS = 16_384
LOOKUP_SHARE, STORE_SHARE = 0.6, 0.25
CALL_TIMEOUT_S = 10.0


def universe() -> list[bytes]:
    """Hashes of all blocks; the same in every process."""
    return [random.Random(number).randbytes(32) for number in range(UNIVERSE_BLOCKS)]


@dataclass
class Tally:
    """Counts of one session."""

    done: "collections.Counter[str]" = field(default_factory=collections.Counter)
    errors: "collections.Counter[str]" = field(default_factory=collections.Counter)
    lookups_ms: list[float] = field(default_factory=list)


class Client:
    """One session and its thread."""

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
        """Operations until then; `rate` of this session, 0 for one after the other."""
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


def main() -> int:
    """Command line."""
    target, sessions, seconds, rate, seed = (
        sys.argv[1],
        int(sys.argv[2]),
        float(sys.argv[3]),
        float(sys.argv[4]),
        int(sys.argv[5]),
    )
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
