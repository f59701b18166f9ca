"""An engine process of the kill campaign: random stores, loads, cancels and reads in the arena,
every byte checked.

Reports lines, each a single write: `stored HASH...` (acknowledged), `missing HASH...` (evicted),
`loaded COUNT`, `read COUNT`, `void COUNT` (the lease ended during the read, so any bytes are
right), `wrong HASH`.
"""

import hashlib
import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from hotkv_client import (
    Arena,
    BlockResult,
    BlockRun,
    Evicted,
    GroupHashes,
    LeaseGrant,
    LoadRun,
    TransferResult,
    TransferStatus,
)
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.errors import HotKVError

NUM_BLOCKS = 96
MOST_BLOCKS = 24
IN_FLIGHT = 4
REGION = NUM_BLOCKS // IN_FLIGHT
SIGNS_AND_MANTISSAS, EXPONENTS = np.uint64(0x807F807F807F807F), np.uint64(0x3D803E003E803F00)


@dataclass(frozen=True, slots=True)
class Shape:
    model: str
    layers: int
    page_bytes: int
    num_hashes: int


def hash_of(shape: Shape, number: int) -> bytes:
    return hashlib.sha256(f"{shape.model}/{number}".encode()).digest()


def content(shape: Shape, block_hash: bytes) -> np.ndarray:
    """uint8 [layers, page bytes]. Half of the blocks look like bfloat16 with few exponents, so
    that the disk tier may encode them."""
    words = np.arange(shape.layers * shape.page_bytes // 8, dtype=np.uint64)
    mixed = (words + np.uint64(1)) * (np.frombuffer(block_hash[:8], np.uint64)[0] | np.uint64(1))
    mixed ^= mixed >> np.uint64(29)
    if block_hash[8] % 2:
        mixed = mixed & SIGNS_AND_MANTISSAS | EXPONENTS
    return mixed.view(np.uint8).reshape(shape.layers, shape.page_bytes)


@dataclass(slots=True)
class Work:
    future: "Future[TransferResult] | None" = None
    hashes: Sequence[bytes] = ()
    lease_id: str = ""
    is_load: bool = False


def status_of(future: "Future[TransferResult] | None") -> TransferStatus | None:
    """None while the transfer runs, or if it raised."""
    if future is None or not future.done() or future.exception() is not None:
        return None
    return future.result().status


class CampaignEngine:
    """A region of the block ids has one transfer at a time."""

    def __init__(self, target: str, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.random = random.Random(seed)
        self.engine = PagedEngine(
            target,
            layers=shape.layers,
            num_blocks=NUM_BLOCKS,
            page_bytes=shape.page_bytes,
            model=shape.model,
            engine_id=os.urandom(8).hex(),
            on_evicted=self.evicted,
            reconnect_max_s=0.02,
        )
        self.engine.session.start()
        self.work = [Work() for _ in range(IN_FLIGHT)]
        self.count = 0

    @staticmethod
    def say(*words: str) -> None:
        os.write(1, (" ".join(words) + "\n").encode())

    def evicted(self, notice: Evicted) -> None:
        for group in notice.groups:
            for start in range(0, len(group.hashes), MOST_BLOCKS):
                self.say("missing", *map(bytes.hex, group.hashes[start : start + MOST_BLOCKS]))

    def run(self) -> None:
        while True:
            if not self.engine.session.connected:
                self.engine.session.wait_connected(1.0)
            for region in range(IN_FLIGHT):
                self.turn(region)
            time.sleep(self.random.choice((0.0, 0.0005, 0.002)))

    def turn(self, region: int) -> None:
        work, chance = self.work[region], self.random
        if work.future is not None:
            if not work.future.done():
                if not work.is_load and chance.random() < 0.02:
                    self.withdraw(region)
                return
            self.ended(region)
        self.work[region] = Work()
        count = chance.randint(1, MOST_BLOCKS)
        numbers = sorted(chance.sample(range(self.shape.num_hashes), count))
        hashes = [hash_of(self.shape, number) for number in numbers]
        try:
            what = chance.random()
            if what < 0.5:
                self.store(region, hashes)
            elif what < 0.85:
                self.load(region, hashes)
            else:
                self.read(hashes)
        except (HotKVError, TimeoutError):
            time.sleep(0.005)

    def name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}-{os.getpid()}"

    def ids(self, region: int, count: int) -> np.ndarray:
        return np.arange(region * REGION, region * REGION + count, dtype=np.int32)

    def store(self, region: int, hashes: list[bytes]) -> None:
        ids, name = self.ids(region, len(hashes)), self.name("s")
        for block_id, block_hash in zip(ids.tolist(), hashes, strict=True):
            self.engine.kv[:, block_id] = content(self.shape, block_hash)
        run, polls = BlockRun(0, hashes, ids), self.random.random() < 0.5
        future = self.engine.session.store(name, name, [run], 10, polls=polls)
        self.work[region] = Work(future, hashes, name)

    def withdraw(self, region: int) -> None:
        """After a cancel the blocks are overwritten at once: nobody may ever load that."""
        work = self.work[region]
        self.engine.session.cancel(work.lease_id)
        if status_of(work.future) is TransferStatus.CANCELLED:
            self.engine.kv[:, region * REGION : (region + 1) * REGION] = 0xAA
            self.work[region] = Work()

    def load(self, region: int, hashes: list[bytes]) -> None:
        name, session = self.name("l"), self.engine.session
        pinned = session.acquire(name, [GroupHashes(0, hashes)]).result(60).pinned[0]
        positions = np.flatnonzero(pinned).astype(np.int32)
        wanted = [hashes[position] for position in positions.tolist()]
        if not wanted:
            session.release(name)
            return
        ids = self.ids(region, len(wanted))
        self.engine.kv[:, ids] = 0x55
        run, polls = LoadRun(0, positions, ids), self.random.random() < 0.5
        future = session.load(name, name, [run], 10, polls=polls)
        self.work[region] = Work(future, wanted, name, is_load=True)

    def read(self, hashes: list[bytes]) -> None:
        """A wrong byte counts only if the lease was still valid after the read."""
        session, groups = self.engine.session, [GroupHashes(0, hashes)]
        arena = session.arena()
        if arena is None:
            return
        name, began_s = self.name("r"), time.monotonic()
        grant = session.acquire(name, groups, wants_offsets=True).result(60)
        time.sleep(self.random.choice((0.0, 0.001, 0.01)))
        positions = np.flatnonzero(grant.pinned[0])
        num_bytes = self.shape.layers * self.shape.page_bytes
        offsets = grant.offsets[0][positions].tolist()
        pages = [arena.memory[at : at + num_bytes].copy() for at in offsets]
        if not self.outlasts(arena, name, groups, grant, began_s):
            self.say("void", str(len(pages)))
            return
        session.release(name)
        for position, page in zip(positions.tolist(), pages, strict=True):
            if not np.array_equal(page, content(self.shape, hashes[position]).reshape(-1)):
                self.say("wrong", hashes[position].hex(), "in", "place")
        self.say("read", str(len(pages)))

    def outlasts(
        self, arena: Arena, name: str, groups: list[GroupHashes], grant: LeaseGrant, began_s: float
    ) -> bool:
        """Acquired again, a lease that was valid since `began_s` has the same connection and
        offsets."""
        try:
            again = self.engine.session.acquire(name, groups, wants_offsets=True).result(60)
        except (HotKVError, TimeoutError):
            return False
        # Each connection has its own arena object, and leases end with it.
        is_same = self.engine.session.arena() is arena and time.monotonic() < began_s + grant.ttl_s
        return is_same and np.array_equal(again.offsets[0], grant.offsets[0])

    def ended(self, region: int) -> None:
        work = self.work[region]
        is_good = status_of(work.future) is TransferStatus.DONE
        if work.is_load:
            self.engine.session.release(work.lease_id)
        if is_good and work.is_load:
            self.check(region, work.hashes)
        elif is_good and work.future is not None:
            kept = work.future.result().results[0] <= int(BlockResult.PRESENT)
            stored = zip(work.hashes, kept.tolist(), strict=True)
            if names := [block.hex() for block, is_kept in stored if is_kept]:
                self.say("stored", *names)

    def check(self, region: int, hashes: Sequence[bytes]) -> None:
        for block_id, block_hash in zip(self.ids(region, len(hashes)), hashes, strict=True):
            if not np.array_equal(self.engine.kv[:, block_id], content(self.shape, block_hash)):
                self.say("wrong", block_hash.hex())
        self.say("loaded", str(len(hashes)))


def main() -> None:
    target, model, *numbers = sys.argv[1:]
    layers, page_bytes, num_hashes, seed = map(int, numbers)
    CampaignEngine(target, Shape(model, layers, page_bytes, num_hashes), seed).run()


if __name__ == "__main__":
    main()
