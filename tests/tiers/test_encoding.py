"""A connection that encodes keeps the contract over any other: it stores less, gives nothing back
that it was not given, and touches no memory that is another's."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotkv_server.cache.values import Medium
from hotkv_server.dataplane.plan import Region
from hotkv_server.testing.tier_contract import Bench, Rig, check_tier, key
from hotkv_server.tiers.compression.form import encoded_key
from hotkv_server.tiers.compression.staged import Staged
from hotkv_server.tiers.protocol import (
    Blocks,
    Codes,
    Epochs,
    Read,
    Seals,
    Shown,
    TierFacts,
    Write,
)
from hotkv_server.tiers.remote.client import LostError, UnusableError
from hotkv_server.tiers.remote.encoding import EncodingClient, encoding
from hotkv_server.tiers.remote.tier import RemoteTier
from hotkv_server.tiers.remote.workers import RemoteLimits, Workers
from hotkv_server.tiers.seals import seal
from tests.support.waiting import wait_for
from tests.tiers.encodings import (
    ARENA_BYTES,
    ROOM_BYTES,
    SLOT_BYTES,
    compressible,
    mixed,
    noise,
)


class Store:
    """What all connections of a test share. `before`: called with the name of each call."""

    def __init__(self) -> None:
        self.content: dict[bytes, tuple[bytes, int]] = {}
        self.now = {"f": 7}
        self.depths: dict[bytes, int] = {}
        self.is_away = False
        self.before: Callable[[str], None] = lambda name: None
        self.num_closed = 0
        self.lock = threading.Lock()

    def asked(self, name: str) -> None:
        self.before(name)
        if self.is_away:
            raise LostError("is away")


class StoreClient:
    """A `Client` of a store in memory."""

    def __init__(self, store: Store) -> None:
        if store.is_away:
            raise UnusableError("is away")
        self._store = store

    def is_fresh(self) -> bool:
        return True

    def probe(
        self, keys: Sequence[bytes], expected: Epochs, codes: Codes, until_s: float
    ) -> Epochs:
        self._store.asked("probe")
        if changed := self._changed(expected):
            return changed
        codes[:] = [Read.FOUND if one in self._store.content else Read.ABSENT for one in keys]
        return {}

    def read(self, keys: Sequence[bytes], slots: Sequence[memoryview], expected: Epochs,
             codes: Codes, until_s: float) -> Epochs:  # fmt: skip
        self._store.asked("read")
        found = np.full(len(keys), Read.ABSENT, np.uint8)
        for row, (name, slot) in enumerate(zip(keys, slots, strict=True)):
            with self._store.lock:
                content, sealed = self._store.content.get(name, (None, 0))
            if content is None:
                continue
            is_sound = len(content) == len(slot) and seal(name, content) == sealed
            found[row] = Read.FOUND if is_sound else Read.CORRUPT
            if is_sound:
                slot[:] = content
            else:
                self.forget([name], until_s)
        if changed := self._changed(expected):
            return changed
        codes[:] = found
        return {}

    def write(self, keys: Sequence[bytes], slots: Sequence[memoryview], depths: Sequence[int],
              codes: Codes, seals: Seals, until_s: float) -> None:  # fmt: skip
        self._store.asked("write")
        for row, (name, slot) in enumerate(zip(keys, slots, strict=True)):
            content = bytes(slot)
            with self._store.lock:
                is_new = name not in self._store.content
                self._store.content.setdefault(name, (content, seal(name, content)))
            codes[row] = Write.STORED if is_new else Write.PRESENT
            seals[row] = seal(name, content) if is_new else 0
            self._store.depths[name] = depths[row]

    def forget(self, keys: Sequence[bytes], until_s: float) -> None:
        for name in keys:
            with self._store.lock:
                self._store.content.pop(name, None)

    def epochs(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        return Shown({name: self._store.now[name] for name in fingerprints})

    def raise_epoch(self, fingerprint: str, floor: int, until_s: float) -> int:
        self._store.now[fingerprint] = max(floor, self._store.now[fingerprint]) + 1
        return self._store.now[fingerprint]

    def close(self) -> None:
        self._store.num_closed += 1

    def _changed(self, expected: Epochs) -> Epochs:
        return {name: at for name, at in self._store.now.items() if expected.get(name, at) != at}


class Over:
    """A tier that encodes over a store in memory, or over what `make` makes, and its arena."""

    def __init__(
        self,
        make: Callable[[Region, Staged], Any] | None = None,
        *,
        staging_slots: int = 16,
        connections: int = 3,
        content: Callable[[int], Any] = mixed,
    ) -> None:
        self.memory = np.zeros(ARENA_BYTES, np.uint8)
        self.arena = Region(self.memory.ctypes.data, ARENA_BYTES, "arena")
        self.staged = Staged(self.arena, staging_slots * SLOT_BYTES)
        self.staged.open()
        self.store = Store()
        self.tier = make(self.arena, self.staged) if make else self._over_memory(connections)
        self.content = content
        self.bench = Bench(self.rig())

    def _over_memory(self, connections: int) -> RemoteTier:
        connect = encoding(lambda until_s: StoreClient(self.store), self.staged)
        workers = Workers("memory", RemoteLimits(connections, 5.0, 20.0), connect)
        return RemoteTier(
            TierFacts("memory", Medium.REMOTE, False, 0, True, ARENA_BYTES),
            self.arena,
            workers,
            on_epoch=lambda fingerprint, epoch: None,
            staged=self.staged,
        )

    def rig(self) -> Rig:
        return Rig(self.tier, self.arena, self._damage, self._breaks, self.content, SLOT_BYTES)

    def _damage(self, name: bytes, place: int) -> None:
        stored = encoded_key(name) if encoded_key(name) in self.store.content else name
        content, sealed = self.store.content[stored]
        damaged = bytearray(content)
        damaged[500] ^= 1
        self.store.content[stored] = bytes(damaged), sealed

    @contextlib.contextmanager
    def _breaks(self) -> Iterator[None]:
        self.store.is_away = True
        yield
        self.store.is_away = False


@contextlib.contextmanager
def over(*arguments: Any, **options: Any) -> Iterator[Over]:
    made = Over(*arguments, **options)
    try:
        yield made
        made.staged.check_invariants()
    finally:
        made.tier.close()
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


@pytest.mark.parametrize("staging_slots, connections", [(1, 1), (2, 3)])
def test_contract_with_little_staging(staging_slots: int, connections: int) -> None:
    check_tier(rigs(staging_slots=staging_slots, connections=connections), seed=2)


def test_contract_over_valkey(tmp_path: Path) -> None:
    support = pytest.importorskip("tests.tiers.valkey_support")
    with support.running(tmp_path / "server") as server:
        settings = support.ValkeySettings(address=f"unix:{server.path}")

        def tier(arena: Region, staged: Staged) -> Any:
            return support.ValkeyTier(arena, settings, staged=staged)

        def damage(name: bytes, place: int) -> None:
            stored = encoded_key(name) if server.client.exists(encoded_key(name)) else name
            server.damage(stored)

        @contextlib.contextmanager
        def make() -> Iterator[Rig]:
            server.client.flushall()
            with over(tier) as made:
                yield Rig(made.tier, made.arena, damage, server.killed, mixed, SLOT_BYTES)

        check_tier(make, seed=4)


def test_contract_over_s3(s3_server: Any) -> None:
    from hotkv_server.tiers.s3.packs import folder_of, list_bytes, space_of
    from hotkv_server.tiers.s3.tier import S3Tier
    from tests.tiers import s3_support as support

    with support.proxied(s3_server) as (proxy, over_it):

        @contextlib.contextmanager
        def make() -> Iterator[Rig]:
            prefix = support.new_prefix()
            settings = support.settings_of(s3_server, prefix, **over_it)

            def damage(name: bytes, place: int) -> None:
                # Checks damage a block that is alone in its key space.
                (path,) = s3_server.packs(f"{prefix}/{folder_of(space_of(name))}")
                s3_server.flip(path, list_bytes(path.rpartition("/")[2]) + 30)

            with over(lambda at, staged: S3Tier(at, settings, staged=staged)) as made:
                yield Rig(
                    made.tier,
                    made.arena,
                    damage,
                    lambda: support.broken(proxy),
                    mixed,
                    SLOT_BYTES,
                )

        check_tier(make, seed=5)


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
        assert made.bench.write([1, 3], [1, 3]).tolist() == [Write.PRESENT] * 2
        figures = made.tier.figures()
        assert (figures.written_blocks, figures.written_bytes) == (6, 6 * SLOT_BYTES)


def test_blocks_of_nodes_that_do_not_encode_are_found() -> None:
    with over(content=compressible) as made:
        content = compressible(1).tobytes()
        made.store.content[key(1)] = content, seal(key(1), content)
        assert made.bench.probe([1, 2]).tolist() == [Read.FOUND, Read.ABSENT]
        made.bench.check_read([1], [5])
        made.tier.forget([key(1)])
        wait_for(lambda: made.bench.probe([1]).tolist() == [Read.ABSENT])


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
        assert name not in made.store.content
        assert made.bench.read([1], [3]).tolist() == [Read.ABSENT]


def test_blocks_that_fit_nowhere_are_failed_and_the_others_not() -> None:
    with over(staging_slots=2) as made:
        made.bench.fill([1, 2], [1, 2])
        sizes = np.array([SLOT_BYTES, 3 * SLOT_BYTES, SLOT_BYTES], np.int64)
        slots = np.array([1, 3, 2], np.int64) * SLOT_BYTES
        blocks = Blocks([key(1), key(3), key(2)], slots, sizes)
        codes, _ = call(made.tier.write, blocks)
        assert codes.tolist() == [Write.STORED, Write.FAILED, Write.STORED]
        assert read(made.tier, blocks).tolist() == [Read.FOUND, Read.FAILED, Read.FOUND]


def test_reads_wait_for_staging_until_their_deadline() -> None:
    """Writes that hang hold half of it: a read goes on; reads that hang hold the rest."""
    goes_on = threading.Event()
    with over(staging_slots=4, connections=8, content=compressible) as made:
        made.bench.fill(range(9), range(9))
        assert made.bench.write([8], [8]).tolist() == [Write.STORED]
        hanging: list[str] = []

        def hang(name: str) -> None:
            if name == "write" or len(hanging) >= 2:
                hanging.append(name)
                assert goes_on.wait(60)

        made.store.before = hang
        ended = Ended()
        for number in range(4):
            made.tier.write(made.bench.blocks([number], [number]), ended.of(number))
        wait_for(lambda: hanging == ["write"] * 2)
        made.tier.read(made.bench.blocks([8], [20]), time.monotonic() + 60, ended.of(4))
        made.tier.read(made.bench.blocks([8], [21]), time.monotonic() + 60, ended.of(5))
        wait_for(lambda: len(hanging) == 4)
        before = made.memory.copy()
        made.tier.read(made.bench.blocks([8], [22]), time.monotonic() + 0.2, ended.of(6))
        ended.wait(1)
        assert ended.answers[6][0].tolist() == [Read.FAILED]
        assert np.array_equal(before, made.memory)
        goes_on.set()
        ended.wait(7)
        assert all(ended.answers[number][0].tolist() == [Write.STORED] for number in range(4))
        assert all(ended.answers[number][0].tolist() == [Read.FOUND] for number in (4, 5))


def test_a_connection_is_closed_before_its_memory_is_another_ones() -> None:
    with over(connections=1, content=compressible) as made:
        made.bench.fill([1], [1])
        assert made.bench.write([1], [1]).tolist() == [Write.STORED]
        given: list[int] = []
        give = made.staged.give

        def noting(place: int, num_bytes: int, *, is_write: bool) -> None:
            given.append(made.store.num_closed)
            give(place, num_bytes, is_write=is_write)

        made.staged.give = noting
        made.store.is_away = True
        assert made.bench.read([1], [2]).tolist() == [Read.FAILED]
        assert given == [1]
        made.store.is_away = False
        wait_for(lambda: made.bench.read([1], [2]).tolist() == [Read.FOUND])


def test_a_store_that_goes_away_between_two_questions_fails_what_was_left() -> None:
    with over(connections=1) as made:
        made.bench.fill([1, 3], [1, 3])
        assert (made.bench.write([1, 3], [1, 3]) == Write.STORED).all()
        asked: list[str] = []

        def leave(name: str) -> None:
            asked.append(name)
            made.store.is_away = len(asked) == 2

        made.store.before = leave
        assert made.bench.read([1, 3], [11, 13]).tolist() == [Read.FOUND, Read.FAILED]
        assert len(asked) == 2


def test_closing_ends_what_waits_for_staging() -> None:
    goes_on = threading.Event()
    with over(staging_slots=2, connections=4, content=compressible) as made:
        made.bench.fill(range(4), range(4))
        made.store.before = lambda name: goes_on.wait(60) and None
        ended = Ended()
        for number in range(4):
            made.tier.write(made.bench.blocks([number], [number]), ended.of(number))
        threading.Timer(0.2, goes_on.set).start()
        made.tier.close()
        assert len(ended.answers) == 4


@pytest.mark.parametrize("raised_at", [None, 1, 2, 3, 4])
def test_a_flush_during_a_read_refuses_all_its_blocks(raised_at: int | None) -> None:
    """Two are encoded and two plain, and only one fits the staging memory: six questions."""
    with over(staging_slots=1, connections=1, content=lambda n: mixed(2 + n % 2)) as made:
        made.bench.fill(range(4), range(4))
        assert (made.bench.write(range(4), range(4)) == Write.STORED).all()
        asked: list[str] = []

        def count(name: str) -> None:
            asked.append(name)
            if len(asked) == raised_at:
                made.store.now = {"f": 8}

        made.store.before = count
        blocks = made.bench.blocks(range(4), range(10, 14))
        blocks = Blocks(blocks.keys, blocks.slots, blocks.num_bytes, epochs={"f": 7})
        found = Read.FOUND if raised_at is None else Read.ABSENT
        assert read(made.tier, blocks).tolist() == [found] * 4
        assert made.tier.figures().absent_blocks == (0 if raised_at is None else 4)


def test_epochs_and_depths_reach_the_store() -> None:
    with over() as made:
        answers: list[Any] = []
        made.tier.raise_epoch("f", 7, answers.append)
        made.tier.epochs(["f"], time.monotonic() + 20, answers.append)
        wait_for(lambda: answers == [8, Shown({"f": 8})])
        blocks = made.bench.blocks([1, 3], [1, 3])
        made.bench.fill([1, 3], [1, 3])
        depths = np.array([5, 6], np.int64)
        call(made.tier.write, Blocks(blocks.keys, blocks.slots, blocks.num_bytes, depths=depths))
        assert made.store.depths == {encoded_key(key(1)): 5, key(3): 6}


class Ended:
    """Answers of calls by their number."""

    def __init__(self) -> None:
        self.answers: dict[int, tuple[Any, ...]] = {}
        self._changed = threading.Condition()

    def of(self, number: int) -> Callable[..., None]:
        def on_done(*answer: Any) -> None:
            with self._changed:
                assert number not in self.answers, "a call has ended twice"
                self.answers[number] = answer
                self._changed.notify_all()

        return on_done

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.answers) >= count, 60), "a call hangs"


def call(do: Callable[..., None], *arguments: Any) -> tuple[Any, ...]:
    ended = Ended()
    do(*arguments, ended.of(0))
    ended.wait(1)
    return ended.answers[0]


def read(tier: RemoteTier, blocks: Blocks) -> Codes:
    return call(tier.read, blocks, time.monotonic() + 20)[0]


def test_a_probe_asks_for_both_forms() -> None:
    """What is found in one of them is there; what failed in one of them is not known."""

    class Inner:
        def probe(
            self, keys: list[bytes], expected: Epochs, codes: Codes, until_s: float
        ) -> Epochs:
            assert [*keys[3:]] == [b"a", b"b", b"c"] and len({*keys}) == 6
            codes[:] = [
                *(Read.FAILED, Read.FOUND, Read.ABSENT),
                *(Read.ABSENT, Read.FAILED, Read.ABSENT),
            ]
            return expected

    inner: Any = Inner()
    staged: Any = None
    client, codes = EncodingClient(inner, staged), np.zeros(3, np.uint8)
    assert not client.probe([b"a", b"b", b"c"], {}, codes, 0.0)
    assert codes.tolist() == [Read.FAILED, Read.FOUND, Read.ABSENT]
    assert client.probe([b"a", b"b", b"c"], {"f": 1}, codes, 0.0) == {"f": 1}
