"""Engines of several ranks, a device each, on `timed_gpu`. `python -m tests.device.ranks TARGET
ENGINE RANK` runs one rank of eight, which stores and then loads, until it is killed."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotkv_client import BlockRun, GroupHashes, LoadRun
from hotkv_client.types import TransferResult
from tests.server.devices_support import DEADLINE_S, DeviceEngine, done

NUM_RANKS = 8
NUM_BLOCKS = 8
HERE, THERE = np.arange(NUM_BLOCKS, dtype=np.int32), np.arange(8, 8 + NUM_BLOCKS, dtype=np.int32)
"""Blocks of the engine's memory that are stored, and to which they are loaded."""


def rank_of(
    target: str, engine_id: str, rank: int, kind: type[Any] = DeviceEngine, **settings: object
) -> Any:
    """Its pages have bytes that depend on the rank. `kind`: DeviceEngine or a subclass."""
    one = kind(target, device=rank, rank=rank, num_ranks=NUM_RANKS, engine_id=engine_id, **settings)
    one.fill(HERE, rank)
    one.fill(THERE, 100 + rank)
    return one


def store(one: DeviceEngine, lease: str, hashes: list[bytes]) -> "Future[TransferResult]":
    """All ranks store by the same lease."""
    return one.session.store(f"s{one.rank}-{lease}", lease, [BlockRun(0, hashes, HERE)], DEADLINE_S)


def load(one: DeviceEngine, lease: str) -> "Future[TransferResult]":
    runs = [LoadRun(0, np.arange(NUM_BLOCKS, dtype=np.int32), THERE)]
    return one.session.load(os.urandom(8).hex(), lease, runs, DEADLINE_S)


def acquire(one: DeviceEngine, lease: str, hashes: list[bytes]) -> int:
    """Number of blocks that are ready."""
    grant = one.session.acquire(lease, [GroupHashes(0, hashes)]).result(DEADLINE_S)
    return int(grant.pinned[0].sum())


def is_loaded(one: DeviceEngine) -> bool:
    """All that was stored lies where it was to be loaded."""
    return one.content(THERE) == one.content(HERE)


@dataclass(slots=True)
class Ranks:
    """An engine's ranks, all in this process but `apart`."""

    target: str
    engine_id: str = "tp8"
    apart: Sequence[int] = ()
    all: dict[int, DeviceEngine] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank in set(range(NUM_RANKS)) - set(self.apart):
            self.add(rank)
        for one in self.all.values():
            one.connected()

    def add(self, rank: int, kind: type[Any] = DeviceEngine) -> DeviceEngine:
        self.all[rank] = one = rank_of(self.target, self.engine_id, rank, kind)
        return one  # type: ignore[no-any-return]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.all.values())

    def store(self, lease: str, hashes: list[bytes]) -> dict[int, "Future[TransferResult]"]:
        return {rank: store(one, lease, hashes) for rank, one in self.all.items()}

    def load(self, lease: str) -> dict[int, "Future[TransferResult]"]:
        return {rank: load(one, lease) for rank, one in self.all.items()}

    def close(self) -> None:
        """May be called twice."""
        while self.all:
            self.all.popitem()[1].close()


class RankProcess:
    """A rank in a process of its own, which executes a command at a time."""

    def __init__(self, target: str, engine_id: str, rank: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, target, engine_id, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.expect("connected")

    def tell(self, *words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()

    def expect(self, said: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line == said, (line, self._process.poll())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def main() -> None:
    target, engine_id, rank = sys.argv[1:]
    one = rank_of(target, engine_id, int(rank)).connected()
    print("connected", flush=True)
    for line in sys.stdin:
        word, lease, *names = line.split()
        if word == "store":
            done(store(one, lease, [bytes.fromhex(name) for name in names]))
        else:
            load(one, lease).result(DEADLINE_S)
        print(word, flush=True)


if __name__ == "__main__":
    main()
