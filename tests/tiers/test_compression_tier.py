"""The compressed tier keeps the contract over tiers that place by themselves, stores less, and
answers once whatever the tier below does."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.dataplane.plan import Region
from hotkv_server.testing.memory_tier import MemoryStore, MemoryTier
from hotkv_server.testing.tier_contract import SLOTS, Bench, Rig, check_tier, key
from hotkv_server.tiers.compressed import CompressedTier
from hotkv_server.tiers.compression import pieces
from hotkv_server.tiers.compression.form import room_bytes
from hotkv_server.tiers.compression.stager import encoded_key
from hotkv_server.tiers.protocol import Blocks, Codes, Read, Shown, Write
from hotkv_server.tiers.seals import seal
from tests.tiers.support import quickest_s
from tests.tiers.test_compression import keys_and_values

SLOT_BYTES = 8 * SLOT_ALIGN
ROOM_BYTES = room_bytes(SLOT_BYTES)
ARENA_BYTES = SLOTS * SLOT_BYTES


def compressible(number: int) -> Any:
    return keys_and_values(SLOT_BYTES, number)


def noise(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, SLOT_BYTES, np.uint8)


def mixed(number: int) -> Any:
    return noise(number) if number % 3 == 0 else compressible(number)


class Over:
    """A compressed tier over one in memory, or over what `factory` makes, and its arena."""

    def __init__(
        self,
        factory: Callable[[Region], Any] | None = None,
        *,
        staging_slots: int = 16,
        is_manual: bool = False,
        content: Callable[[int], Any] = mixed,
        **options: Any,
    ) -> None:
        self.memory = np.zeros(ARENA_BYTES, np.uint8)
        self.arena = Region(self.memory.ctypes.data, ARENA_BYTES, "arena")
        self.store = MemoryStore(False, 2 * ARENA_BYTES)
        self.inner: Any = None
        self.calls: list[Blocks] = []

        def make(staging: Region, fd: int) -> Any:
            assert os.fstat(fd).st_size == staging.num_bytes
            self.inner = (
                factory(staging)
                if factory
                else MemoryTier(staging, self.store, is_manual=is_manual)
            )
            return self.inner

        self.tier = CompressedTier(make, self.arena, staging_slots * SLOT_BYTES, **options)
        self.content = content
        self.bench = Bench(self.rig())

    def rig(self) -> Rig:
        return Rig(self.tier, self.arena, self._damage, self._breaks, self.content, SLOT_BYTES)

    def _damage(self, name: bytes, place: int) -> None:
        stored = encoded_key(name) if encoded_key(name) in self.store.content else name
        self.store.damage(stored, 500)

    @contextlib.contextmanager
    def _breaks(self) -> Iterator[None]:
        self.inner.faults.problem = "broken"
        yield
        self.inner.faults.problem = ""


@contextlib.contextmanager
def over(*arguments: Any, **options: Any) -> Iterator[Over]:
    made = Over(*arguments, **options)
    try:
        yield made
    finally:
        made.tier.close()
        made.tier._queue.check_invariants()
        assert not made.tier.figures().queued_bytes


def rigs(**options: Any) -> Callable[[], Any]:
    @contextlib.contextmanager
    def make() -> Iterator[Rig]:
        with over(**options) as made:
            yield made.rig()

    return make


@pytest.mark.parametrize("content", [compressible, noise, mixed])
def test_contract_over_memory(content: Callable[[int], Any]) -> None:
    check_tier(rigs(content=content), seed=1)


@pytest.mark.parametrize("staging_slots, threads", [(1, 1), (2, 3)])
def test_contract_with_little_staging(staging_slots: int, threads: int) -> None:
    check_tier(rigs(staging_slots=staging_slots, threads=threads), seed=2)


@pytest.mark.parametrize("content", [compressible, mixed])
def test_contract_over_valkey(tmp_path: Path, content: Callable[[int], Any]) -> None:
    support = pytest.importorskip("tests.tiers.valkey_support")
    with support.running(tmp_path / "server") as server:

        def damage(name: bytes, place: int) -> None:
            stored = encoded_key(name) if server.client.exists(encoded_key(name)) else name
            server.damage(stored)

        @contextlib.contextmanager
        def make() -> Iterator[Rig]:
            server.client.flushall()
            settings = support.ValkeySettings(address=f"unix:{server.path}")
            with over(lambda at: support.ValkeyTier(at, settings), content=content) as made:
                yield Rig(made.tier, made.arena, damage, server.killed, content, SLOT_BYTES)

        check_tier(make, seed=4)


def test_blocks_are_stored_in_the_form_that_their_keys_say() -> None:
    with over() as made:
        made.bench.fill(range(6), range(6))
        assert (made.bench.write(range(6), range(6)) == Write.STORED).all()
        sizes = {name: len(content) for name, (content, _) in made.store.content.items()}
        assert sizes == {key(0): SLOT_BYTES, key(3): SLOT_BYTES} | {
            encoded_key(key(number)): ROOM_BYTES for number in (1, 2, 4, 5)
        }
        assert made.store.content[key(3)][0] == noise(3).tobytes()
        assert made.bench.seals[3] == made.store.content[key(3)][1]
        assert made.bench.seals[4] == made.store.content[encoded_key(key(4))][1]
        stored = made.tier.stored()
        assert (stored.encoded_blocks, stored.plain_blocks) == (4, 2)
        assert stored.slot_bytes == 6 * SLOT_BYTES
        assert stored.stored_bytes == 4 * ROOM_BYTES + 2 * SLOT_BYTES
        assert made.bench.write([1, 3], [1, 3]).tolist() == [Write.PRESENT] * 2
        assert made.tier.stored() == stored


def test_blocks_of_nodes_without_compression_are_found() -> None:
    with over(content=compressible) as made:
        plain = MemoryTier(made.arena, made.store)
        made.bench.fill([1], [0])
        ended = threading.Event()
        plain.write(made.bench.blocks([1], [0]), lambda codes, seals: ended.set())
        assert ended.wait(60)
        plain.close()
        assert made.bench.probe([1, 2]).tolist() == [Read.FOUND, Read.ABSENT]
        made.bench.check_read([1], [5])
        made.tier.forget([key(1)])
        while made.bench.probe([1]).tolist() != [Read.ABSENT]:
            time.sleep(1e-3)


def test_keys_without_room_for_the_suffix_are_plain() -> None:
    with over(content=compressible) as made:
        blocks = made.bench.blocks([1, 2], [0, 1])
        long = [b"k" * 248, b"k" * 249]
        made.bench.fill([1, 2], [0, 1])
        answers = call(made.tier.write, Blocks(long, blocks.slots, blocks.num_bytes))
        assert answers[0].tolist() == [Write.STORED] * 2
        assert set(made.store.content) == {long[0] + b"~1", long[1]}
        found = Blocks(long, blocks.slots + 8 * SLOT_BYTES, blocks.num_bytes)
        assert read(made.tier, found).tolist() == [Read.FOUND] * 2
        assert np.array_equal(made.bench.slot(9), compressible(2))


def test_what_is_no_encoded_form_is_corrupt_and_forgotten() -> None:
    with over() as made:
        content = bytes(ROOM_BYTES)
        name = encoded_key(key(1))
        made.store.content[name] = content, seal(name, content)
        made.bench.fill([2], [1])
        made.bench.write([2], [1])
        assert made.bench.read([1, 2], [3, 4]).tolist() == [Read.CORRUPT, Read.FOUND]
        assert made.tier.figures().corrupt_blocks == 1
        while name in made.store.content:
            time.sleep(1e-3)
        assert made.bench.read([1], [3]).tolist() == [Read.ABSENT]


def test_blocks_that_fit_nowhere_are_failed_and_the_others_not() -> None:
    with over(staging_slots=2) as made:
        made.bench.fill([1, 2], [1, 2])
        sizes = [SLOT_BYTES, 3 * SLOT_BYTES, SLOT_BYTES, SLOT_BYTES]
        slots = np.array([1, 3, 2, SLOTS], np.int64) * SLOT_BYTES
        blocks = Blocks([key(1), key(3), key(2), key(4)], slots, np.array(sizes, np.int64))
        codes, _ = call(made.tier.write, blocks)
        assert codes.tolist() == [Write.STORED, Write.FAILED, Write.STORED, Write.FAILED]
        assert read(made.tier, blocks).tolist() == [Read.FOUND, Read.FAILED] * 2
        alone = Blocks([key(3)], slots[:1], np.array([3 * SLOT_BYTES], np.int64))
        assert call(made.tier.write, alone)[0].tolist() == [Write.FAILED]


def test_a_full_store_is_full() -> None:
    with over() as made:
        made.inner.faults.is_full = True
        made.bench.fill([1], [1])
        assert made.bench.write([1], [1]).tolist() == [Write.FULL]
        assert made.tier.stored().encoded_blocks == 0


def test_a_tier_in_which_the_core_chooses_places_is_refused() -> None:
    inner: list[MemoryTier] = []

    def make(staging: Region, fd: int) -> Any:
        inner.append(MemoryTier(staging, MemoryStore(True)))
        return inner[0]

    with pytest.raises(ValueError, match="places by itself"):
        CompressedTier(make, Region(0, SLOT_BYTES, "arena"), SLOT_BYTES)
    assert inner[0]._is_closed


def test_reads_wait_for_staging_until_their_deadline() -> None:
    with over(staging_slots=4, content=compressible) as made:
        made.bench.fill(range(8), range(8))
        assert (made.bench.write(range(8), range(8)) == Write.STORED).all()
        made.inner.faults.is_hung = True
        begun_s, ended = time.monotonic(), Ended()
        before = made.memory.copy()
        numbers = iter(range(8))

        def read() -> None:
            number = next(numbers)
            deadline_s = begun_s + (0.3 if number >= 4 else 60)
            made.tier.read(made.bench.blocks([number], [20 + number]), deadline_s, ended.of(number))

        for _ in range(4):
            read()
        assert quickest_s(read, 4) < 0.2, "a read blocked its caller"
        ended.wait(4)
        assert time.monotonic() - begun_s >= 0.3
        assert {number: codes[0] for number, (codes, *_) in ended.answers.items()} == dict.fromkeys(
            range(4, 8), Read.FAILED
        )
        assert np.array_equal(before, made.memory)
        assert made.tier.figures().queued_bytes == 4 * SLOT_BYTES
        made.inner.faults.is_hung = False
        ended.wait(8)
        for number in range(4):
            assert ended.answers[number][0].tolist() == [Read.FOUND]
            assert np.array_equal(made.bench.slot(20 + number), compressible(number))


def test_writes_wait_for_staging_and_leave_half_to_reads() -> None:
    with over(staging_slots=4, content=compressible) as made:
        made.bench.fill(range(9), range(9))
        assert made.bench.write([8], [8]).tolist() == [Write.STORED]
        made.inner.faults.is_hung = True
        ended = Ended()
        for number in range(8):
            made.tier.write(made.bench.blocks([number], [number]), ended.of(number))
        wait_until(lambda: made.tier._queue._writing_bytes == 2 * SLOT_BYTES)
        made.tier.read(made.bench.blocks([8], [20]), time.monotonic() + 60, ended.of(8))
        wait_until(lambda: len(made.inner._calls) == 3)
        time.sleep(0.05)
        assert len(made.inner._calls) == 3 and not ended.answers
        made.inner.faults.is_hung = False
        ended.wait(9)
        assert all(ended.answers[n][0].tolist() == [Write.STORED] for n in range(8))
        assert ended.answers[8][0].tolist() == [Read.FOUND]


def test_reads_go_before_writes() -> None:
    with over(staging_slots=1, is_manual=True, threads=1) as made:
        made.bench.fill(range(3), range(3))
        ended = Ended()
        made.tier.write(made.bench.blocks([0], [0]), ended.of(0))
        wait_until(lambda: len(made.inner._calls) == 1)
        made.tier.write(made.bench.blocks([1], [1]), ended.of(1))
        made.tier.read(made.bench.blocks([2], [2]), time.monotonic() + 60, ended.of(2))
        until_s = time.monotonic() + 60
        while len(ended.answers) < 3 and time.monotonic() < until_s:
            made.inner.step()
        assert list(ended.answers) == [0, 2, 1]


def test_closing_ends_what_waits_and_what_hangs() -> None:
    with over(staging_slots=2, content=compressible) as made:
        made.bench.fill(range(6), range(6))
        made.inner.faults.is_hung = True
        ended = Ended()
        for number in range(6):
            made.tier.write(made.bench.blocks([number], [number]), ended.of(number))
        made.tier.read(made.bench.blocks([1], [9]), time.monotonic() + 60, ended.of(6))
        made.tier.close()
        assert len(ended.answers) == 7 and not made.tier._queue.num_open
        assert all(codes.tolist() == [Read.FAILED] for codes, *_ in ended.answers.values())


def test_staging_stays_while_the_tier_below_may_touch_it() -> None:
    class Forgetful(MemoryTier):
        """Ends no call."""

        def write(self, blocks: Blocks, on_done: Any) -> None:
            self.left = on_done

    made = Over(lambda at: Forgetful(at, MemoryStore(False)), close_wait_s=0.05)
    ended = Ended()
    made.tier.write(made.bench.blocks([1], [1]), ended.of(1))
    wait_until(lambda: hasattr(made.inner, "left"))
    made.tier.close()
    assert made.tier._memory._open and not ended.answers
    made.inner.left(np.array([Write.FAILED], np.uint8), np.zeros(1, np.uint64))
    ended.wait(1)
    made.tier.close()
    assert not made.tier._memory._open


def test_each_call_ends_once_whatever_fails() -> None:
    rng = np.random.default_rng(5)
    with over(staging_slots=5, threads=3) as made:
        made.inner.faults.fails = lambda name: hash(name) % 5 == 0
        made.bench.fill(range(30), range(30))
        ended, num_calls = Ended(), 0
        for _ in range(40):
            numbers = rng.permutation(30)[: int(rng.integers(1, 9))].tolist()
            if rng.random() < 0.5:
                made.tier.write(made.bench.blocks(numbers, numbers), ended.of(num_calls))
            else:
                # Calls share slots here; what comes back is the contract's matter.
                deadline_s = time.monotonic() + float(rng.choice([-1.0, 0.001, 60.0]))
                slots = [30 + n % 30 for n in numbers]
                made.tier.read(made.bench.blocks(numbers, slots), deadline_s, ended.of(num_calls))
            num_calls += 1
            if rng.random() < 0.2:
                made.inner.faults.is_hung = not made.inner.faults.is_hung
        made.inner.faults.is_hung = False
        ended.wait(num_calls)
        time.sleep(0.05)
        assert ended.num_ended == num_calls
        for number in range(30):
            assert np.array_equal(made.bench.slot(number), mixed(number)), "a write changed a slot"


def test_a_caller_that_raises_costs_no_thread() -> None:
    def on_done(*answer: Any) -> None:
        raise RuntimeError("by the test")

    with over(threads=1) as made:
        made.bench.fill([1], [1])
        made.tier.write(made.bench.blocks([1], [1]), on_done)
        made.bench.fill([2], [2])
        assert made.bench.write([2], [2]).tolist() == [Write.STORED]


def test_a_piece_that_breaks_is_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with over(threads=1) as made:
        made.bench.fill([1, 2], [1, 2])
        with monkeypatch.context() as patch:
            patch.setattr(made.tier._stager, "next_question", lambda piece, place: 1 // 0)
            assert made.bench.write([1], [1]).tolist() == [Write.FAILED]
        assert made.bench.write([2], [2]).tolist() == [Write.STORED]


def test_too_many_pieces_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_WAITING_PIECES", 3)
    with over(staging_slots=1, is_manual=True, content=compressible) as made:
        made.bench.fill(range(6), range(6))
        ended = Ended()
        made.tier.write(made.bench.blocks([0], [0]), ended.of(0))
        wait_until(lambda: len(made.inner._calls) == 1)
        made.tier.write(made.bench.blocks([1, 2], [1, 2]), ended.of(1))
        made.tier.write(made.bench.blocks([3, 4], [3, 4]), ended.of(2))
        assert ended.answers[2][0].tolist() == [Write.FAILED] * 2
        until_s = time.monotonic() + 60
        while len(ended.answers) < 3 and time.monotonic() < until_s:
            made.inner.step()
        assert ended.answers[1][0].tolist() == [Write.STORED] * 2


class EpochTier(MemoryTier):
    """With epochs: `now` by fingerprint, which `on_read` may raise before a read."""

    def __init__(self, staging: Region, store: MemoryStore) -> None:
        super().__init__(staging, store)
        self.now, self.num_reads, self.num_probes = {"f": 7}, 0, 0
        self.on_read: Callable[[int], None] = lambda number: None

    def probe(self, keys: Sequence[bytes], deadline_s: float, on_done: Any,
              epochs: Any = None) -> None:  # fmt: skip
        self.num_probes += 1
        is_changed = bool(epochs) and epochs != self.now
        absent = np.full(len(keys), Read.ABSENT, np.uint8)
        super().probe(keys, deadline_s, lambda codes: on_done(absent if is_changed else codes))

    def read(self, blocks: Blocks, deadline_s: float, on_done: Any) -> None:
        self.on_read(self.num_reads)
        self.num_reads += 1
        is_changed = bool(blocks.epochs) and blocks.epochs != self.now
        absent = np.full(len(blocks), Read.ABSENT, np.uint8)
        super().read(blocks, deadline_s, lambda codes: on_done(absent if is_changed else codes))


@pytest.mark.parametrize("raised_at", [None, 0, 2, 3])
def test_a_flush_during_a_read_refuses_all_its_blocks(raised_at: int | None) -> None:
    store = MemoryStore(False)
    with over(
        lambda at: EpochTier(at, store), staging_slots=1, threads=1, content=compressible
    ) as made:

        def on_read(number: int) -> None:
            if number == raised_at:
                made.inner.now = {"f": 8}

        made.bench.fill(range(4), range(4))
        assert (made.bench.write(range(4), range(4)) == Write.STORED).all()
        made.inner.on_read = on_read
        blocks = made.bench.blocks(range(4), range(10, 14))
        blocks = Blocks(blocks.keys, blocks.slots, blocks.num_bytes, epochs={"f": 7})
        found = Read.FOUND if raised_at is None else Read.ABSENT
        assert read(made.tier, blocks).tolist() == [found] * 4
        assert made.inner.num_probes == (raised_at != 0)
        assert made.tier.figures().absent_blocks == (0 if raised_at is None else 4)


def test_a_read_of_one_question_asks_for_no_epoch() -> None:
    store = MemoryStore(False)
    with over(lambda at: EpochTier(at, store), content=compressible) as made:
        made.bench.fill([1], [1])
        made.bench.write([1], [1])
        blocks = made.bench.blocks([1], [2])
        blocks = Blocks(blocks.keys, blocks.slots, blocks.num_bytes, epochs={"f": 7})
        assert read(made.tier, blocks).tolist() == [Read.FOUND]
        assert made.inner.num_reads == 1 and not made.inner.num_probes


def test_epochs_that_are_not_answered_fail_the_read() -> None:
    store = MemoryStore(False)
    with over(
        lambda at: EpochTier(at, store), staging_slots=1, threads=1, content=compressible
    ) as made:
        made.bench.fill(range(3), range(3))
        made.bench.write(range(2), range(2))

        def probe(keys: Any, deadline_s: float, on_done: Any, epochs: Any) -> None:
            on_done(np.full(len(keys), Read.FAILED, np.uint8))

        made.inner.probe = probe
        blocks = made.bench.blocks(range(3), range(10, 13))
        blocks = Blocks(blocks.keys, blocks.slots, blocks.num_bytes, epochs={"f": 7})
        assert read(made.tier, blocks).tolist() == [Read.FAILED, Read.FAILED, Read.ABSENT]


def test_epochs_and_depths_reach_the_tier_below() -> None:
    class Noting(EpochTier):
        def epochs(self, fingerprints: list[str], deadline_s: float, on_done: Any) -> None:
            on_done(Shown({name: self.now[name] for name in fingerprints}))

        def raise_epoch(self, fingerprint: str, floor: int, on_done: Any) -> None:
            self.now[fingerprint] = floor + 1
            on_done(self.now[fingerprint])

        def write(self, blocks: Blocks, on_done: Any) -> None:
            self.written = blocks
            super().write(blocks, on_done)

    with over(lambda at: Noting(at, MemoryStore(False))) as made:
        answers: list[Any] = []
        made.tier.raise_epoch("f", 7, answers.append)
        made.tier.epochs(["f"], time.monotonic() + 1, answers.append)
        assert answers == [8, Shown({"f": 8})]
        blocks = made.bench.blocks([1, 2], [1, 2])
        depths, epochs = np.array([5, 6], np.int64), {"f": 8}
        call(made.tier.write, Blocks(blocks.keys, blocks.slots, blocks.num_bytes, depths=depths,
                                     epochs=epochs))  # fmt: skip
        assert made.inner.written.depths.tolist() == [5, 6]
        assert made.inner.written.epochs == epochs


def test_a_flush_counts_over_valkey(tmp_path: Path) -> None:
    support = pytest.importorskip("tests.tiers.valkey_support")
    with support.running(tmp_path / "server") as server:
        settings = support.ValkeySettings(address=f"unix:{server.path}")
        with over(lambda at: support.ValkeyTier(at, settings), staging_slots=2) as made:
            epochs: list[Any] = []
            made.tier.epochs(["f"], time.monotonic() + 20, epochs.append)
            wait_until(lambda: epochs)
            made.bench.fill(range(4), range(4))
            assert (made.bench.write(range(4), range(4)) == Write.STORED).all()
            blocks = made.bench.blocks(range(4), range(10, 14))
            blocks = Blocks(blocks.keys, blocks.slots, blocks.num_bytes, epochs=epochs[0].epochs)
            assert read(made.tier, blocks).tolist() == [Read.FOUND] * 4
            made.tier.raise_epoch("f", 0, epochs.append)
            wait_until(lambda: len(epochs) == 2)
            assert read(made.tier, blocks).tolist() == [Read.ABSENT] * 4


class Ended:
    """Answers of calls by their number, in the order in which they came."""

    def __init__(self) -> None:
        self.answers: dict[int, tuple[Any, ...]] = {}
        self.num_ended = 0
        self._changed = threading.Condition()

    def of(self, number: int) -> Callable[..., None]:
        def on_done(*answer: Any) -> None:
            with self._changed:
                self.answers[number] = answer
                self.num_ended += 1
                self._changed.notify_all()

        return on_done

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_ended >= count, 20), "a call hangs"


def call(do: Callable[..., None], *arguments: Any) -> tuple[Any, ...]:
    ended = Ended()
    do(*arguments, ended.of(0))
    ended.wait(1)
    return ended.answers[0]


def read(tier: CompressedTier, blocks: Blocks) -> Codes:
    return call(tier.read, blocks, time.monotonic() + 20)[0]


def wait_until(is_so: Callable[[], object]) -> None:
    until_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until_s, "it did not come"
        time.sleep(1e-3)
