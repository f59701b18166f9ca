"""The soak: engines store, cancel, load, release and flush, while others read every HTTP page and
evict.

The server looks at its event loop all the time, as else only under overload, and runs with Python's
debug allocator, which finds writes past an object's end. It must not die (it is started again), and
no loaded byte may be wrong.

`python -m tests.robustness.soak --minutes 30 --clients 9 --busy 2` prints a line a minute;
status 1 if a server died or a byte was wrong.
"""

import argparse
import collections
import contextlib
import math
import multiprocessing
import os
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from demo.processes import Server, runtime_folder
from hotkv_client import BlockRun, GroupHashes, LoadRun, TransferStatus
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine
from tests.doubles import faults
from tests.support.ports import free_port

LAYERS, PAGE_BYTES = 2, 8192
HALF = 48
MAX_KNOWN = 4000
ARENA = "64MiB"
Counts = collections.Counter[str]
IsOver = Callable[[Counts], bool]
PAGES = ("metrics", "api/v1/status", "api/v1/savings?since_s=60", "livez", "readyz")


def content(block: bytes, model: int) -> NDArray[np.uint8]:
    """[LAYERS, PAGE_BYTES] of a block."""
    bits = np.random.PCG64(int.from_bytes(block[:8], "little") + model)
    return np.random.Generator(bits).integers(0, 256, (LAYERS, PAGE_BYTES), dtype=np.uint8)


class Soak:
    """The server at `target` may be another process at each connect.

    is_over: by the counts.
    counts: operations, errors by text, and `wrong` blocks.
    """

    def __init__(self, target: str, port: int, is_over: IsOver, seed: int) -> None:
        self.target, self.port, self.is_over, self.seed = target, port, is_over, seed
        self.counts = Counts()
        self._lock = threading.Lock()

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counts[name] += number

    def run_engine(self, model: int) -> None:
        chance, known = random.Random(self.seed + model), list[bytes]()
        while not self.is_over(self.counts):
            engine = PagedEngine(
                self.target,
                layers=LAYERS,
                model=f"soak{model}",
                page_bytes=PAGE_BYTES,
                num_blocks=2 * HALF,
                engine_id=f"engine{model}",
            )
            # Dead, full, or dropped: the next engine goes on.
            try:
                engine.connect(30)
                self.count("sessions")
                while not self.is_over(self.counts) and chance.random() > 0.02:
                    self._store(engine, model, known, chance)
                    self._load(engine, model, known, chance)
                    if chance.random() < 0.005:
                        engine.session.flush().result(30)
                        self.count("flushes")
                    time.sleep(0.02)
            except Exception as error:
                self.count(f"error {repr(error)[:60]}")
                time.sleep(0.3)
            finally:
                engine.close()

    def _store(
        self, engine: PagedEngine, model: int, known: list[bytes], chance: random.Random
    ) -> None:
        hashes = [chance.randbytes(32) for _ in range(chance.randint(1, HALF - 8))]
        for at, block in enumerate(hashes):
            engine.kv[:, at] = content(block, model)
        name = chance.randbytes(6).hex()
        run = BlockRun(0, hashes, np.arange(len(hashes), dtype=np.int32))
        engine.session.store(name, name, [run], 20).result(30)
        self.count("stored_blocks", len(hashes))
        if chance.random() < 0.1:
            others = [chance.randbytes(32) for _ in range(20)]
            run = BlockRun(0, others, np.arange(20, dtype=np.int32))
            engine.session.store(f"{name}c", f"{name}c", [run], 20)
            engine.session.cancel(f"{name}c")
            self.count("cancelled_stores")
        known += hashes
        del known[:-MAX_KNOWN]

    def _load(
        self, engine: PagedEngine, model: int, known: list[bytes], chance: random.Random
    ) -> None:
        picked = list(dict.fromkeys(chance.choices(known, k=32)))
        name = chance.randbytes(6).hex()
        granted = engine.session.acquire(name, [GroupHashes(0, picked)]).result(30)
        rows = np.flatnonzero(granted.pinned[0]).astype(np.int32)
        self.count("missed_blocks", len(picked) - len(rows))
        if len(rows):
            run = LoadRun(0, rows, rows + np.int32(HALF))
            loaded = engine.session.load(name, name, [run], 20).result(30)
            if loaded.status is TransferStatus.DONE:
                self.count("loaded_blocks", len(rows))
                for row in rows:
                    right = content(picked[row], model)
                    self.count("wrong", not np.array_equal(engine.kv[:, HALF + row], right))
        # Else it ends with its time or session.
        if chance.random() < 0.95:
            engine.session.release(name)

    def run_operator(self) -> None:
        chance = random.Random(self.seed)
        while not self.is_over(self.counts):
            try:
                for page in PAGES:
                    url = f"http://127.0.0.1:{self.port}/{page}"
                    with urllib.request.urlopen(url, timeout=10) as answer:
                        answer.read()
                    self.count("pages")
                with AdminClient(self.target) as client:
                    client.info()
                    if chance.random() < 0.05:
                        client.evict(everything=True)
                        self.count("evictions")
            except Exception as error:
                self.count(f"error {repr(error)[:60]}")
            time.sleep(2)


def footprint(pid: int) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    mib = int(status["RssAnon"].split()[0]) >> 10
    num_fds = len(os.listdir(f"/proc/{pid}/fd"))
    return f"{mib} MiB anonymous, {num_fds} descriptors, {status['Threads'].strip()} threads"


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(count)]
    for one in loops:
        one.start()
    try:
        yield
    finally:
        for one in loops:
            one.kill()
            one.join()


def _spin() -> None:
    while True:
        pass


def outlives(server: Server, threads: Sequence[threading.Thread], done: Soak) -> bool:
    """False, with the log, once the server has died."""
    said_s = -math.inf
    while any(one.is_alive() for one in threads):
        if (status := server._child.process.poll()) is not None:
            print(f"died with status {status}:\n{server.log.read_text()[-20_000:]}", flush=True)
            return False
        if time.monotonic() > said_s + 60:
            said_s = time.monotonic()
            print(footprint(server.pid), dict(done.counts), flush=True)
        time.sleep(0.5)
    print(footprint(server.pid), flush=True)
    return True


def soak(folder: Path, is_over: IsOver, clients: int, seed: int) -> tuple[int, Counts]:
    port = free_port()
    flags = ("--http.port", str(port))
    done = Soak(f"unix:{folder}/run/grpc.sock", port, is_over, seed)
    works = [done.run_operator, *(partial(done.run_engine, model) for model in range(clients))]
    threads = [threading.Thread(target=work) for work in works]
    deaths = 0
    for one in threads:
        one.start()
    while any(one.is_alive() for one in threads):
        with Server(folder, ARENA, *flags, command=faults.command("watch-loop")) as server:
            deaths += not outlives(server, threads, done)
    return deaths, done.counts


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed load for long; checks every byte.")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside the server")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    os.environ["PYTHONMALLOC"] = "debug"
    with runtime_folder(256 << 20) as folder, busy_loops(options.busy):
        end_s = time.monotonic() + 60 * options.minutes
        deaths, counts = soak(
            folder, lambda _: time.monotonic() > end_s, options.clients, options.seed
        )
    for name, value in sorted(counts.items()):
        print(f"{name:72} {value}")
    print(f"{'deaths':72} {deaths}")
    return int(deaths > 0 or counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
