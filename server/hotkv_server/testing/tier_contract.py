"""The checks that every tier below host memory (`tiers.protocol.Tier`) must pass.

Each check calls `make_rig`, which returns a `TierRig`: the tier under test, and an arena of SLOTS
slots. The check computes the expected bytes of each block from the block's number.
"""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.dataplane.plan import Region
from hotkv_server.tiers.protocol import (
    MAX_KEY_BYTES,
    Blocks,
    Codes,
    Read,
    Seals,
    SharedTier,
    Tier,
    Write,
)

T = TypeVar("T")
SLOT_BYTES = 4 * SLOT_ALIGN
SLOTS = 64
ARENA_BYTES = SLOTS * SLOT_BYTES
WAIT_S = 60.0
"""Longest wait for the end of a call, in seconds. After it the check fails."""


def key(number: int) -> bytes:
    """Returns the key of the block with this number. Its last 32 bytes are the block's hash, which
    may contain any bytes."""
    return b"hotkv/1/%032x/0/3/" % (number % 3) + hash_of(number)


def hash_of(number: int) -> bytes:
    """Returns the hash of the block with this number, 32 bytes. It contains a zero, a line end and
    a slash, because these bytes break code that treats a hash as text or as a file name."""
    return b"\0/\r\n \xff" + hashlib.sha256(b"%d" % number).digest()[6:]


def content(number: int) -> NDArray[np.uint8]:
    """Returns the content of the block with this number, SLOT_BYTES bytes."""
    return np.random.default_rng(number).integers(0, 256, SLOT_BYTES, np.uint8)


@dataclass(frozen=True)
class TierRig:
    """A tier under test, with an arena.

    arena: memory with SLOTS slots of `slot_bytes`.
    damage: changes stored bytes of a block, given its key and its offset in the tier; None if the
        tier's stored bytes can't be changed.
    breaks: returns a context manager during which the tier's store can't be used; None if that is
        impossible.
    content: returns the bytes of a block, given its number.
    encoded_bytes: returns how many bytes to reserve in the tier for an encoded block, given the
        block's size. Used only for a tier whose storage offsets (places) the cache core chooses.
    """

    tier: Tier
    arena: Region
    damage: Callable[[bytes, int], None] | None = None
    breaks: "Callable[[], contextlib.AbstractContextManager[None]] | None" = None
    content: Callable[[int], NDArray[np.uint8]] = content
    slot_bytes: int = SLOT_BYTES
    encoded_bytes: Callable[[int], int] = int


def only(blocks: Blocks, rows: NDArray[np.int64]) -> Blocks:
    """Returns the argument of a tier's call for some of its blocks: the blocks with the indices
    `rows` in `blocks`. Used to write blocks again, in a tier whose storage offsets (places) the
    cache core chooses."""
    return Blocks(
        [blocks.keys[row] for row in rows.tolist()],
        blocks.slots[rows],
        blocks.num_bytes[rows],
        blocks.places[rows],
        blocks.seals[rows],
        stored_bytes=blocks.place_bytes[rows],
    )


MakeRig = Callable[[], "contextlib.AbstractContextManager[TierRig]"]
"""A function that returns a context manager. The context manager makes a `TierRig` whose tier is
empty and has room for SLOTS blocks. At the end it closes the tier, even if the check has already
closed it."""


@dataclass
class Bench:
    """Calls the tier under test (of a `TierRig`) as the node does, and waits for the answers.
    Blocks are named by their number, and slots of the arena by their index. If the tier can't
    encode a block (result UNFIT), the bench writes the block again without encoding.

    seals: by block, the checksum that the tier returned for it. Used only for a tier whose
        storage offsets the cache core chooses.
    stored_bytes: by block, its size in the tier, in bytes. Used only for such a tier.
    found_bytes: sum of the stored bytes of all blocks that reads found.
    """

    rig: TierRig
    seals: dict[int, int] = field(default_factory=dict)
    stored_bytes: dict[int, int] = field(default_factory=dict)
    found_bytes: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def tier(self) -> Tier:
        """Returns the tier under test."""
        return self.rig.tier

    @property
    def arena(self) -> NDArray[np.uint8]:
        """Returns the memory of the arena."""
        return self.rig.arena.array()

    def blocks(
        self, numbers: Sequence[int], slots: Sequence[int], sizes: Sequence[int] = ()
    ) -> Blocks:
        """Makes the `Blocks` argument of a tier's call, for the blocks with these numbers, in these
        slots of the arena.

        sizes: sizes of the blocks in bytes; empty: whole slots.
        """
        num_bytes = np.array(sizes or [self.rig.slot_bytes] * len(numbers), np.int64)
        at = np.array(slots, np.int64) * self.rig.slot_bytes
        blocks = Blocks([key(number) for number in numbers], at, num_bytes)
        if not self.tier.facts().places:
            return blocks
        stored = [
            self.stored_bytes.get(number, min(size, self.rig.encoded_bytes(size)))
            for number, size in zip(numbers, num_bytes.tolist(), strict=True)
        ]
        places = [number % SLOTS * self.rig.slot_bytes for number in numbers]
        return replace(
            blocks,
            places=np.array(places, np.int64),
            seals=np.array([self.seals.get(number, 0) for number in numbers], np.uint64),
            stored_bytes=np.array(stored, np.int64),
        )

    def fill(self, numbers: Sequence[int], slots: Sequence[int]) -> None:
        """Copies the bytes of the blocks with these numbers into these slots of the arena."""
        for number, slot in zip(numbers, slots, strict=True):
            self.slot(slot)[:] = self.rig.content(number)

    def slot(self, slot: int) -> NDArray[np.uint8]:
        """Returns the memory of a slot in the arena."""
        return self.arena[slot * self.rig.slot_bytes : (slot + 1) * self.rig.slot_bytes]

    def write(
        self, numbers: Sequence[int], slots: Sequence[int], sizes: Sequence[int] = ()
    ) -> Codes:
        """Writes blocks from slots of the arena to the tier. Returns the result of each block, a
        value of `Write`."""
        blocks = self.blocks(numbers, slots, sizes)
        codes, seals = self.answer(blocks)
        is_unfit, stored = codes == Write.UNFIT, blocks.place_bytes.copy()
        if is_unfit.any():
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
        """Calls `Tier.write` once and waits for the answer. Returns the result (a value of `Write`)
        and the seal (checksum) of each block."""
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
        """Reads blocks from the tier into slots of the arena. Returns the result of each block, a
        value of `Read`.

        sizes: sizes of the blocks in bytes; empty: whole slots.
        within_s: time until the deadline of the read.
        """
        ended: list[Codes] = []
        deadline_s, blocks = time.monotonic() + within_s, self.blocks(numbers, slots, sizes)
        self.tier.read(blocks, deadline_s, lambda codes: self._end(ended, codes))
        (codes,) = self._wait(ended)
        with self._changed:
            self.found_bytes += int(blocks.place_bytes[codes == Read.FOUND].sum())
        return codes

    def probe(self, numbers: Sequence[int]) -> Codes:
        """Asks a shared tier whether it has these blocks. Returns the answer for each block: FOUND,
        ABSENT or FAILED (values of `Read`)."""
        ended: list[Codes] = []
        keys = [key(number) for number in numbers]
        tier, until_s = cast(SharedTier, self.tier), time.monotonic() + WAIT_S
        tier.probe(keys, until_s, lambda codes: self._end(ended, codes))
        return self._wait(ended)[0]

    def check_read(self, numbers: Sequence[int], slots: Sequence[int]) -> None:
        """Reads blocks into slots (places in the arena). Raises AssertionError unless all blocks
        are found with the right bytes, and all other slots are unchanged."""
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
    """Writes blocks to the tier and reads them back, from and into random slots (places in the
    arena), in batches of random size. Checks that the bytes are the same, and that the tier counts
    the written and the read bytes."""
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
            # The blocks are written, so the memory of their slots may change now.
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
    """Writes and reads a block of each size (multiples of SLOT_ALIGN up to a slot). Checks that
    exactly the bytes of this size are copied. Also checks that a read or write of no blocks
    ends."""
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
    """Reads a block that the tier lacks, writes it twice, reads it, and removes it (`forget`).
    Checks that the block is ABSENT at first, PRESENT for the second write, found with its bytes,
    and not found after the removal. Skips a tier whose storage offsets the cache core chooses,
    because it does not find blocks by key."""
    with make_rig() as rig:
        bench = Bench(rig)
        if rig.tier.facts().places:
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
    """Reuses the storage offset (place) of a block for another block. Checks that a read of the
    first block then returns CORRUPT. Skips a tier that chooses its storage offsets itself."""
    with make_rig() as rig:
        bench = Bench(rig)
        if not rig.tier.facts().places:
            return
        bench.fill([1, 1 + SLOTS], [0, 1])
        assert (bench.write([1], [0]) == Write.STORED).all()
        assert (bench.write([1 + SLOTS], [1]) == Write.STORED).all()
        bench.check_read([1 + SLOTS], [2])
        assert bench.read([1], [3]).tolist() == [Read.CORRUPT]
        # The bytes were written under another key. So they must not be valid for this block, even
        # together with their own seal (checksum).
        bench.seals[1] = bench.seals[1 + SLOTS]
        assert bench.read([1], [3]).tolist() == [Read.CORRUPT]


def check_damage(make_rig: MakeRig) -> None:
    """Damages a stored block. Checks that a read of this block returns CORRUPT, and that the
    neighbouring blocks are still found."""
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
    """Checks that a read whose deadline has passed ends as FAILED, and that later reads succeed."""
    with make_rig() as rig:
        bench = Bench(rig)
        bench.fill([1], [0])
        bench.write([1], [0])
        assert bench.read([1], [1], within_s=-1.0).tolist() == [Read.FAILED]
        bench.check_read([1], [1])


def check_breaks(make_rig: MakeRig) -> None:
    """Makes the store unusable for a while (`TierRig.breaks`). Checks that calls end as FAILED
    meanwhile, and succeed once the store is usable again."""
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
    """Reads blocks from several threads at the same time. Checks that all reads get the right
    bytes."""
    rng = np.random.default_rng(seed)
    with make_rig() as rig:
        bench = Bench(rig)
        half = SLOTS // 2
        bench.fill(range(half), range(half))
        assert (bench.write(range(half), range(half)) == Write.STORED).all()
        problems: list[str] = []

        def work(worker: int) -> None:
            # Each thread has eight slots.
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
    """Closes the tier while calls are under way. Checks that all these calls have ended when
    `close` returns, and that later calls end as FAILED."""
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
    """Checks that a tier without work is alive, has no problem and does not count as stalled. Also
    checks two of the tier's properties (`TierFacts`): `batch_bytes` is at least the size of a slot,
    and `places` is True unless nodes can share the tier (`SharedTier`)."""
    with make_rig() as rig:
        bench = Bench(rig)
        bench.fill([1], [0])
        bench.write([1], [0])
        until_s = time.monotonic() + WAIT_S
        while rig.tier.stalled_s(time.monotonic()) > 0:
            assert time.monotonic() < until_s, "a tier without work counts as stalled"
            time.sleep(1e-3)
        assert not rig.tier.problem() and rig.tier.is_alive()
        facts = rig.tier.facts()
        assert facts.batch_bytes >= rig.slot_bytes
        assert facts.places != hasattr(rig.tier, "raise_generation")


def check_tier(make_rig: MakeRig, *, seed: int) -> None:
    """Runs all checks that a tier must pass. Raises AssertionError if the tier breaks a rule."""
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
