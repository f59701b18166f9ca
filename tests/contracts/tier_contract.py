"""The checks that every `tiers.protocol.Tier` must pass. A check gets a `TierRig` and computes a
block's bytes from its number."""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.dataplane.plan import Region
from hotkv_server.tiers.protocol import (
    MAX_KEY_BYTES,
    NO_GENERATIONS,
    Blocks,
    Codes,
    Generations,
    PlacedBlocks,
    Read,
    Seals,
    SharedBlocks,
    SharedTier,
    Tier,
    Write,
)

T = TypeVar("T")
SLOT_BYTES = 4 * SLOT_ALIGN
SLOTS = 64
ARENA_BYTES = SLOTS * SLOT_BYTES
WAIT_S = 60.0
"""For the end of a call; then the check fails."""


def key(number: int) -> bytes:
    """Its last 32 bytes are the hash."""
    return b"hotkv/1/%032x/0/3/" % (number % 3) + hash_of(number)


def hash_of(number: int) -> bytes:
    """32 bytes. Zero, line end and slash break code that takes a hash for text or a file name."""
    return b"\0/\r\n \xff" + hashlib.sha256(b"%d" % number).digest()[6:]


def content(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, SLOT_BYTES, np.uint8)


@dataclass(frozen=True)
class TierRig:
    """A tier under test.

    arena: SLOTS slots of `slot_bytes`.
    damage: changes a block's stored bytes, by key and offset; None if that is impossible.
    breaks: context in which the store can't be used; None if that is impossible.
    content: bytes by block number.
    encoded_bytes: what to reserve for an encoded block of this size, if the core chooses places.
    """

    tier: Tier[Any]
    arena: Region
    damage: Callable[[bytes, int], None] | None = None
    breaks: "Callable[[], contextlib.AbstractContextManager[None]] | None" = None
    content: Callable[[int], NDArray[np.uint8]] = content
    slot_bytes: int = SLOT_BYTES
    encoded_bytes: Callable[[int], int] = int

    @property
    def is_shared(self) -> bool:
        return hasattr(self.tier, "raise_generation")


def only(blocks: PlacedBlocks, rows: NDArray[np.int64]) -> PlacedBlocks:
    """The given rows, to write them again."""
    columns = (
        blocks.slots,
        blocks.num_bytes,
        blocks.places,
        blocks.stored_bytes,
        blocks.seals,
    )
    return PlacedBlocks(
        [blocks.keys[row] for row in rows.tolist()], *(one[rows] for one in columns)
    )


def shared_blocks(
    keys: Sequence[bytes],
    slots: NDArray[np.int64],
    num_bytes: NDArray[np.int64],
    generations: Generations = NO_GENERATIONS,
) -> SharedBlocks:
    return SharedBlocks(keys, slots, num_bytes, np.zeros(len(keys), np.int64), generations)


def stored_bytes(blocks: Blocks) -> NDArray[np.int64]:
    return blocks.stored_bytes if isinstance(blocks, PlacedBlocks) else blocks.num_bytes


MakeRig = Callable[[], "contextlib.AbstractContextManager[TierRig]"]
"""Makes a context with an empty tier with room for SLOTS blocks, closed at its end, even if the
check already has."""


@dataclass
class Bench:
    """Calls the tier as the node does and waits for answers. Blocks go by number, slots by index. A
    block that can't be encoded (UNFIT) is written again as it is.

    seals, stored_bytes: as the tier answered, by block, if the core chooses places.
    found_bytes: stored bytes of all blocks that reads found.
    """

    rig: TierRig
    seals: dict[int, int] = field(default_factory=dict)
    stored_bytes: dict[int, int] = field(default_factory=dict)
    found_bytes: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def tier(self) -> Tier[Any]:
        return self.rig.tier

    @property
    def arena(self) -> NDArray[np.uint8]:
        return self.rig.arena.array()

    def blocks(
        self, numbers: Sequence[int], slots: Sequence[int], sizes: Sequence[int] = ()
    ) -> Blocks:
        """`sizes`: empty: whole slots."""
        num_bytes = np.array(sizes or [self.rig.slot_bytes] * len(numbers), np.int64)
        at = np.array(slots, np.int64) * self.rig.slot_bytes
        keys = [key(number) for number in numbers]
        if self.rig.is_shared:
            return shared_blocks(keys, at, num_bytes)
        stored = [
            self.stored_bytes.get(number, min(size, self.rig.encoded_bytes(size)))
            for number, size in zip(numbers, num_bytes.tolist(), strict=True)
        ]
        places = [number % SLOTS * self.rig.slot_bytes for number in numbers]
        return PlacedBlocks(
            keys,
            at,
            num_bytes,
            np.array(places, np.int64),
            np.array(stored, np.int64),
            np.array([self.seals.get(number, 0) for number in numbers], np.uint64),
        )

    def fill(self, numbers: Sequence[int], slots: Sequence[int]) -> None:
        for number, slot in zip(numbers, slots, strict=True):
            self.slot(slot)[:] = self.rig.content(number)

    def slot(self, slot: int) -> NDArray[np.uint8]:
        return self.arena[slot * self.rig.slot_bytes : (slot + 1) * self.rig.slot_bytes]

    def write(
        self, numbers: Sequence[int], slots: Sequence[int], sizes: Sequence[int] = ()
    ) -> Codes:
        """Values of `Write`."""
        blocks = self.blocks(numbers, slots, sizes)
        codes, seals = self.answer(blocks)
        is_unfit, stored = codes == Write.UNFIT, stored_bytes(blocks).copy()
        if is_unfit.any():
            assert isinstance(blocks, PlacedBlocks)
            assert (stored < blocks.num_bytes)[is_unfit].all(), "a plain block was to be encoded"
            stored[is_unfit] = blocks.num_bytes[is_unfit]
            again, rows = replace(blocks, stored_bytes=stored), np.flatnonzero(is_unfit)
            codes[rows], seals[rows] = self.answer(only(again, rows))
        for number, code, sealed, size in zip(
            numbers, codes.tolist(), seals.tolist(), stored.tolist(), strict=True
        ):
            if code == Write.STORED:
                self.seals[number], self.stored_bytes[number] = sealed, size
        return codes

    def answer(self, blocks: Blocks) -> tuple[Codes, Seals]:
        """One call of `Tier.write`: values of `Write`, seals."""
        ended: list[tuple[Codes, Seals]] = []
        self.tier.write(blocks, lambda *answer: self._end(ended, answer))
        return self._wait(ended)[0]

    def read(
        self,
        numbers: Sequence[int],
        slots: Sequence[int],
        sizes: Sequence[int] = (),
        within_s: float = WAIT_S,
    ) -> Codes:
        """Values of `Read`. `sizes`: empty: whole slots; `within_s`: to the deadline."""
        ended: list[Codes] = []
        deadline_s, blocks = time.monotonic() + within_s, self.blocks(numbers, slots, sizes)
        self.tier.read(blocks, deadline_s, lambda codes: self._end(ended, codes))
        (codes,) = self._wait(ended)
        with self._changed:
            self.found_bytes += int(stored_bytes(blocks)[codes == Read.FOUND].sum())
        return codes

    def probe(self, numbers: Sequence[int]) -> Codes:
        """FOUND, ABSENT or FAILED."""
        ended: list[Codes] = []
        keys = [key(number) for number in numbers]
        tier, until_s = cast(SharedTier, self.tier), time.monotonic() + WAIT_S
        tier.probe(keys, until_s, lambda codes: self._end(ended, codes))
        return self._wait(ended)[0]

    def check_read(self, numbers: Sequence[int], slots: Sequence[int]) -> None:
        """All are found with the right bytes, and no other slot changes."""
        before = self.arena.copy()
        codes = self.read(numbers, slots)
        assert (codes == Read.FOUND).all(), f"not all found: {codes.tolist()}"
        for number, slot in zip(numbers, slots, strict=True):
            assert np.array_equal(self.slot(slot), self.rig.content(number)), (
                f"block {number} differs"
            )
            before[slot * self.rig.slot_bytes : (slot + 1) * self.rig.slot_bytes] = self.slot(slot)
        assert np.array_equal(before, self.arena), "a read wrote outside its slots"

    def _end(self, ended: list[T], answer: T) -> None:
        with self._changed:
            ended.append(answer)
            self._changed.notify_all()

    def _wait(self, ended: list[T]) -> list[T]:
        with self._changed:
            assert self._changed.wait_for(lambda: ended, WAIT_S), "a call did not end"
        return ended


def check_round_trip(make_rig: MakeRig, *, seed: int) -> None:
    """What is written from random slots is read into others, in batches; bytes are counted."""
    rng = np.random.default_rng(seed)
    with make_rig() as rig:
        bench, stored = Bench(rig), list[int]()
        while len(stored) < SLOTS // 2:
            numbers = list(
                range(len(stored), min(SLOTS // 2, len(stored) + int(rng.integers(1, 9))))
            )
            slots = rng.permutation(SLOTS)[: len(numbers)].tolist()
            bench.fill(numbers, slots)
            assert (bench.write(numbers, slots) == Write.STORED).all()
            # Written: their slots may change now.
            bench.arena[:] = 0
            stored += numbers
            some = rng.permutation(stored)[: int(rng.integers(1, 9))].tolist()
            bench.check_read(some, rng.permutation(SLOTS)[: len(some)].tolist())
        figures = rig.tier.figures()
        assert figures.written_blocks == len(stored)
        placed_bytes = sum(bench.stored_bytes.get(number, rig.slot_bytes) for number in stored)
        assert figures.written_bytes == placed_bytes
        assert figures.read_bytes == bench.found_bytes
        assert not figures.queued_bytes and not figures.corrupt_blocks


def check_sizes(make_rig: MakeRig) -> None:
    """Exactly a block's bytes are copied, at each multiple of SLOT_ALIGN. Calls without blocks
    end."""
    with make_rig() as rig:
        bench = Bench(rig)
        numbers = list(range(1, rig.slot_bytes // SLOT_ALIGN + 1))
        sizes, others = [SLOT_ALIGN * count for count in numbers], [20 - n for n in numbers]
        bench.fill(numbers, numbers)
        assert (bench.write(numbers, numbers, sizes) == Write.STORED).all()
        bench.arena[:] = 0
        assert (bench.read(numbers, others, sizes) == Read.FOUND).all()
        for number, slot, size in zip(numbers, others, sizes, strict=True):
            assert np.array_equal(bench.slot(slot)[:size], rig.content(number)[:size])
            assert not bench.slot(slot)[size:].any(), "more was read than the block has"
        assert not len(bench.read([], [])) and not len(bench.write([], []))


def check_keys(make_rig: MakeRig) -> None:
    """A key is ABSENT, STORED once, PRESENT, found, and gone after `forget`. Only tiers that
    find by key."""
    with make_rig() as rig:
        bench = Bench(rig)
        if not rig.is_shared:
            return
        assert bench.read([1, 2], [0, 1]).tolist() == [Read.ABSENT] * 2
        assert bench.probe([1, 2]).tolist() == [Read.ABSENT] * 2
        bench.fill([1], [0])
        assert bench.write([1], [0]).tolist() == [Write.STORED]
        assert bench.write([1], [0]).tolist() == [Write.PRESENT]
        assert bench.probe([2, 1]).tolist() == [Read.ABSENT, Read.FOUND]
        bench.check_read([1], [5])
        cast(SharedTier, rig.tier).forget([key(1)])
        until_s = time.monotonic() + WAIT_S
        while bench.probe([1]).tolist() != [Read.ABSENT]:
            assert time.monotonic() < until_s, "a forgotten block is there"
            time.sleep(1e-3)
        assert len(key(1)) <= MAX_KEY_BYTES


def check_places(make_rig: MakeRig) -> None:
    """A block whose place was reused is CORRUPT. Only tiers whose places the core chooses."""
    with make_rig() as rig:
        bench = Bench(rig)
        if rig.is_shared:
            return
        bench.fill([1, 1 + SLOTS], [0, 1])
        assert (bench.write([1], [0]) == Write.STORED).all()
        assert (bench.write([1 + SLOTS], [1]) == Write.STORED).all()
        bench.check_read([1 + SLOTS], [2])
        assert bench.read([1], [3]).tolist() == [Read.CORRUPT]
        # Written under another key: not valid for this block, even with their own seal.
        bench.seals[1] = bench.seals[1 + SLOTS]
        assert bench.read([1], [3]).tolist() == [Read.CORRUPT]


def check_damage(make_rig: MakeRig) -> None:
    """A damaged block is CORRUPT; its neighbours are found."""
    with make_rig() as rig:
        if rig.damage is None:
            return
        bench = Bench(rig)
        bench.fill([1, 2, 3], [0, 1, 2])
        assert (bench.write([1, 2, 3], [0, 1, 2]) == Write.STORED).all()
        rig.damage(key(2), 2 * rig.slot_bytes)
        codes = bench.read([1, 2, 3], [4, 5, 6]).tolist()
        assert codes == [Read.FOUND, Read.CORRUPT, Read.FOUND]
        assert np.array_equal(bench.slot(6), rig.content(3))
        assert rig.tier.figures().corrupt_blocks == 1


def check_deadline(make_rig: MakeRig) -> None:
    """A read past its deadline is FAILED; later ones succeed."""
    with make_rig() as rig:
        bench = Bench(rig)
        bench.fill([1], [0])
        bench.write([1], [0])
        assert bench.read([1], [1], within_s=-1.0).tolist() == [Read.FAILED]
        bench.check_read([1], [1])


def check_breaks(make_rig: MakeRig) -> None:
    """Calls are FAILED while the store can't be used, and succeed afterwards."""
    with make_rig() as rig:
        if rig.breaks is None:
            return
        bench = Bench(rig)
        bench.fill([1, 2], [0, 1])
        assert bench.write([1], [0]).tolist() == [Write.STORED]
        with rig.breaks():
            assert bench.read([1], [2]).tolist() == [Read.FAILED]
            assert bench.write([2], [1]).tolist() == [Write.FAILED]
        until_s = time.monotonic() + WAIT_S
        while bench.write([2], [1]).tolist() != [Write.STORED]:
            assert time.monotonic() < until_s, "the tier did not come back"
            time.sleep(1e-2)
        bench.check_read([2], [3])


def check_many(make_rig: MakeRig, *, seed: int) -> None:
    """Reads from several threads get the right bytes."""
    rng = np.random.default_rng(seed)
    with make_rig() as rig:
        bench = Bench(rig)
        half = SLOTS // 2
        bench.fill(range(half), range(half))
        assert (bench.write(range(half), range(half)) == Write.STORED).all()
        problems: list[str] = []

        def work(worker: int) -> None:
            mine = list(range(half + 8 * worker, half + 8 * worker + 8))
            for _ in range(20):
                numbers = choices[worker].permutation(half)[:8].tolist()
                codes = bench.read(numbers, mine)
                good = (codes == Read.FOUND).all() and all(
                    np.array_equal(bench.slot(slot), rig.content(number))
                    for number, slot in zip(numbers, mine, strict=True)
                )
                if not good:
                    problems.append(f"{numbers}: {codes.tolist()}")

        choices = rng.spawn(4)
        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems, problems[0]


def check_close(make_rig: MakeRig) -> None:
    """All calls have ended when `close` returns; later ones are FAILED."""
    with make_rig() as rig:
        bench = Bench(rig)
        bench.fill(range(8), range(8))
        ended: list[Codes] = []
        for number in range(8):
            rig.tier.write(
                bench.blocks([number], [number]), lambda codes, seals: ended.append(codes)
            )
        rig.tier.close()
        assert len(ended) == 8 and rig.tier.is_alive()
        assert bench.write([9], [9]).tolist() == [Write.FAILED]
        assert bench.read([1], [10]).tolist() == [Read.FAILED]
        rig.tier.close()


def check_idle(make_rig: MakeRig) -> None:
    """Without work a tier is alive, without problem, not stalled. `TierFacts`: a batch holds a
    slot; places are the core's unless nodes share the tier."""
    with make_rig() as rig:
        bench = Bench(rig)
        bench.fill([1], [0])
        bench.write([1], [0])
        until_s = time.monotonic() + WAIT_S
        while rig.tier.stalled_s(time.monotonic()) > 0:
            assert time.monotonic() < until_s, "a tier without work counts as stalled"
            time.sleep(1e-3)
        assert not rig.tier.problem() and rig.tier.is_alive()
        assert rig.tier.facts().batch_bytes >= rig.slot_bytes


def check_tier(make_rig: MakeRig, *, seed: int) -> None:
    check_round_trip(make_rig, seed=seed)
    check_sizes(make_rig)
    check_keys(make_rig)
    check_places(make_rig)
    check_damage(make_rig)
    check_deadline(make_rig)
    check_breaks(make_rig)
    check_many(make_rig, seed=seed)
    check_close(make_rig)
    check_idle(make_rig)
