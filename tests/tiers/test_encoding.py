"""A connection that encodes keeps the contract over any other connection: it stores less, returns
only stored blocks, and touches only its own memory."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotkv_server.cache.values import Medium
from hotkv_server.dataplane.plan import Region
from hotkv_server.testing.flush_contract import answer
from hotkv_server.testing.tier_contract import Bench, Rig, check_tier, key
from hotkv_server.tiers.compression.form import encoded_key
from hotkv_server.tiers.compression.staged import Staged
from hotkv_server.tiers.protocol import (
    Blocks,
    Codes,
    Epochs,
    Read,
    Shown,
    TierFacts,
    TierMemory,
    Write,
)
from hotkv_server.tiers.remote.client import LostError, UnusableError
from hotkv_server.tiers.remote.encoding import EncodingClient, encoding
from hotkv_server.tiers.remote.tier import CONNECTION_BYTES, RemoteTier
from hotkv_server.tiers.remote.workers import RemoteLimits, Workers
from hotkv_server.tiers.seals import seal
from tests.support.waiting import wait_for
from tests.tiers.encodings import (
    ARENA_BYTES,
    ROOM_BYTES,
    SLOT_BYTES,
    check_larger_blocks,
    compressible,
    encoding_rig,
    mixed,
    noise,
)
from tests.tiers.support import Asked


class Store:
    """The state that all connections of a test share.

    before: called with the name of each call.
    until_s: the time limit of the last probe or read.
    """

    def __init__(self) -> None:
        self.content: dict[bytes, tuple[bytes, int]] = {}
        self.now = {"f": 7}
        self.depths: dict[bytes, int] = {}
        self.is_away = False
        self.before: Callable[[str], None] = lambda name: None
        self.num_closed = 0
        self.until_s = 0.0
        self.lock = threading.Lock()

    def asked(self, name: str) -> None:
        self.before(name)
        if self.is_away:
            raise LostError("is away")


class StoreClient:
    """A `Client` of a store in memory. If the store is away, a read sets its codes before it
    raises: the blocks have arrived, but not the last reply."""

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
        self._store.until_s = until_s
        if changed := self._changed(expected):
            return changed
        codes[:] = [Read.FOUND if one in self._store.content else Read.ABSENT for one in keys]
        return {}

    def read(self, keys: Sequence[bytes], slots: Sequence[memoryview], expected: Epochs,
             codes: Codes, until_s: float) -> Epochs:  # fmt: skip
        self._store.before("read")
        self._store.until_s = until_s
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
        if self._store.is_away:
            raise LostError("is away")
        return {}

    def write(self, keys: Sequence[bytes], slots: Sequence[memoryview], depths: Sequence[int],
              codes: Codes, until_s: float) -> None:  # fmt: skip
        self._store.asked("write")
        for row, (name, slot) in enumerate(zip(keys, slots, strict=True)):
            content = bytes(slot)
            with self._store.lock:
                is_new = name not in self._store.content
                self._store.content.setdefault(name, (content, seal(name, content)))
            codes[row] = Write.STORED if is_new else Write.PRESENT
            self._store.depths[name] = depths[row]

    def forget(self, keys: Sequence[bytes], until_s: float) -> None:
        for name in keys:
            with self._store.lock:
                self._store.content.pop(name, None)

    def epochs(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        return Shown({name: self._store.now[name] for name in fingerprints})

    def raise_epoch(
        self, fingerprint: str, floor: int, until_s: float, is_retry: bool = False
    ) -> int:
        self._store.now[fingerprint] = max(floor, self._store.now[fingerprint]) + 1
        return self._store.now[fingerprint]

    def close(self) -> None:
        self._store.num_closed += 1

    def _changed(self, expected: Epochs) -> Epochs:
        return {name: at for name, at in self._store.now.items() if expected.get(name, at) != at}


class Over:
    """A tier that encodes over a store in memory, with a bench."""

    def __init__(self, rig: Rig, store: Store) -> None:
        self.store, self.tier, self.bench = store, rig.tier, Bench(rig)


@contextlib.contextmanager
def over(connections: int = 3, **options: Any) -> Iterator[Over]:
    """Yields a tier. `options`: of `encoding_rig`."""
    store = Store()

    def make(arena: Region, staged: Staged) -> RemoteTier:
        workers = Workers(
            "memory",
            RemoteLimits(connections, 5.0, 20.0),
            encoding(lambda until_s: StoreClient(store), staged),
        )
        facts = TierFacts("memory", Medium.REMOTE, False, 0, True, ARENA_BYTES)
        return RemoteTier(facts, arena, workers, on_epoch=lambda *flush: None, staged=staged)

    def damage(name: bytes, place: int) -> None:
        stored = encoded_key(name) if encoded_key(name) in store.content else name
        content, sealed = store.content[stored]
        store.content[stored] = content[:500] + bytes([content[500] ^ 1]) + content[501:], sealed

    @contextlib.contextmanager
    def breaks() -> Iterator[None]:
        store.is_away = True
        yield
        store.is_away = False

    with encoding_rig(make, damage, breaks, **options) as rig:
        yield Over(rig, store)


@pytest.mark.parametrize(
    "options",
    [
        {"content": noise},
        {"content": mixed, "staging_slots": 1, "connections": 1},
        {"content": mixed, "staging_slots": 2, "connections": 3},
    ],
)
def test_contract_over_memory(options: dict[str, Any]) -> None:
    @contextlib.contextmanager
    def make() -> Iterator[Rig]:
        with over(**options) as made:
            yield made.bench.rig

    check_tier(make, seed=1)


def test_contract_over_valkey(tmp_path: Path) -> None:
    support = pytest.importorskip("tests.tiers.valkey_support")
    with support.running(tmp_path / "server") as server:
        settings = support.ValkeySettings(address=f"unix:{server.path}")

        def damage(name: bytes, place: int) -> None:
            is_encoded = server.client.exists(encoded_key(name))
            server.damage(encoded_key(name) if is_encoded else name)

        def make() -> contextlib.AbstractContextManager[Rig]:
            server.client.flushall()
            return encoding_rig(
                lambda arena, staged: support.ValkeyTier(arena, settings, staged=staged),
                damage,
                server.killed,
            )

        check_tier(make, seed=4)


def test_contract_over_s3(s3_server: Any) -> None:
    from hotkv_server.tiers.s3.tier import S3Tier
    from tests.tiers import s3_support as support

    with support.proxied(s3_server) as (proxy, over_it):

        def make() -> contextlib.AbstractContextManager[Rig]:
            prefix = support.new_prefix()
            settings = support.settings_of(s3_server, prefix, **over_it)
            return encoding_rig(
                lambda arena, staged: S3Tier(arena, settings, staged=staged),
                support.damage_in(s3_server, prefix),
                lambda: support.broken(proxy),
            )

        check_tier(make, seed=5)


def read(tier: RemoteTier, blocks: Blocks) -> Codes:
    return answer(lambda done: tier.read(blocks, time.monotonic() + 20, done))


def test_blocks_are_stored_in_the_form_that_their_keys_say() -> None:
    with over() as made:
        made.bench.fill(range(6), range(6))
        assert (made.bench.write(range(6), range(6)) == Write.STORED).all()
        sizes = {name: len(content) for name, (content, _) in made.store.content.items()}
        assert sizes == {key(0): SLOT_BYTES, key(3): SLOT_BYTES} | {
            encoded_key(key(number)): ROOM_BYTES for number in (1, 2, 4, 5)
        }
        assert made.store.content[key(3)][0] == noise(3).tobytes()
        assert made.bench.write([1, 3], [1, 3]).tolist() == [Write.PRESENT] * 2
        figures = made.tier.figures()
        assert (figures.written_blocks, figures.written_bytes) == (6, 6 * SLOT_BYTES)
        # The tier's memory: three connections, and staging memory for 16 blocks.
        num_bytes = 3 * CONNECTION_BYTES + 16 * SLOT_BYTES
        assert made.tier.memory() == TierMemory(num_bytes, num_bytes)


def test_blocks_of_nodes_that_do_not_encode_are_found() -> None:
    with over(content=compressible) as made:
        content = compressible(1).tobytes()
        made.store.content[key(1)] = content, seal(key(1), content)
        assert made.bench.probe([1, 2]).tolist() == [Read.FOUND, Read.ABSENT]
        made.bench.check_read([1], [5])
        made.tier.forget([key(1)])
        wait_for(lambda: made.bench.probe([1]).tolist() == [Read.ABSENT])


def test_a_deadline_ends_a_read_but_no_probe() -> None:
    """Checks that the deadline limits a read in the store, but not a probe: a late probe holds no
    slots, and ending it would close the connection."""
    with over() as made:
        deadline_s = time.monotonic() + 15
        blocks = made.bench.blocks([1], [1])
        answer(lambda done: made.tier.read(blocks, deadline_s, done))
        assert made.store.until_s == deadline_s
        answer(lambda done: made.tier.probe(blocks.keys, deadline_s, done))
        assert made.store.until_s > deadline_s


def test_keys_without_room_for_the_suffix_are_plain() -> None:
    with over(content=compressible) as made:
        blocks = made.bench.blocks([1, 2], [0, 1])
        long = [b"k" * 248, b"k" * 249]
        made.bench.fill([1, 2], [0, 1])
        codes, _ = made.bench.answer(Blocks(long, blocks.slots, blocks.num_bytes))
        assert codes.tolist() == [Write.STORED] * 2
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


def test_blocks_that_are_larger_than_the_staging_memory_are_stored_plain() -> None:
    with over(staging_slots=2) as made:
        check_larger_blocks(made.bench, 2)
        large = made.bench.blocks([92], [1], [3 * SLOT_BYTES])
        assert read(made.tier, replace(large, epochs={"f": 6})).tolist() == [Read.ABSENT]
        assert encoded_key(key(91)) in made.store.content and key(92) in made.store.content


def test_reads_wait_for_staging_until_their_deadline() -> None:
    """Hangs writes, which may hold only half of the staging memory, so a read goes on. Once reads
    hang too, further reads must wait until their deadline."""
    goes_on, hanging = threading.Event(), list[str]()

    def hang(name: str) -> None:
        if name == "write" or hanging:
            hanging.append(name)
            assert goes_on.wait(60)

    with over(staging_slots=4, connections=8, content=compressible) as made:
        bench = made.bench
        bench.fill(range(9), range(9))
        assert bench.write([8], [8]).tolist() == [Write.STORED]
        made.store.before = hang
        asked = Asked(bench)
        asked.write(0, [0, 1, 2])
        asked.write(3, [3])
        wait_for(lambda: hanging)
        asked.read(4, [8], [20])
        asked.read(5, [8], [21])
        wait_for(lambda: len(hanging) >= 3)
        assert hanging == ["write", "read", "read"]
        before = bench.arena.copy()
        assert bench.read([8], [22], within_s=0.2).tolist() == [Read.FAILED]
        assert np.array_equal(before, bench.arena) and not asked.codes
        goes_on.set()
        assert asked.wait(0) == [Write.STORED] * 3 and asked.wait(3) == [Write.STORED]
        assert asked.wait(4) == asked.wait(5) == [Read.FOUND]


def test_a_connection_is_closed_before_its_memory_is_another_ones() -> None:
    with over(connections=1, content=compressible) as made:
        made.bench.fill([1], [1])
        assert made.bench.write([1], [1]).tolist() == [Write.STORED]
        given: list[int] = []
        give = made.tier._staged.give

        def noting(place: int, num_bytes: int, *, is_write: bool) -> None:
            given.append(made.store.num_closed)
            give(place, num_bytes, is_write=is_write)

        made.tier._staged.give = noting
        made.store.is_away = True
        assert made.bench.read([1], [2]).tolist() == [Read.FAILED]
        assert given == [1]
        made.store.is_away = False
        wait_for(lambda: made.bench.read([1], [2]).tolist() == [Read.FOUND])


@pytest.mark.parametrize("raised_at", [None, 1, 2, 3, 4])
def test_a_flush_during_a_read_refuses_all_its_blocks(raised_at: int | None) -> None:
    """Reads two encoded and two plain blocks; staging memory has room for one, so that takes six
    requests. A flush during any of them must refuse all four blocks."""
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
        blocks = replace(blocks, epochs={"f": 7})
        found = Read.FOUND if raised_at is None else Read.ABSENT
        assert read(made.tier, blocks).tolist() == [found] * 4


def test_epochs_and_depths_reach_the_store() -> None:
    with over() as made:
        answers: list[Any] = []
        made.tier.raise_epoch("f", 7, answers.append)
        made.tier.epochs(["f"], time.monotonic() + 20, answers.append)
        wait_for(lambda: answers == [8, Shown({"f": 8})])
        blocks = made.bench.blocks([1, 3], [1, 3])
        made.bench.fill([1, 3], [1, 3])
        depths = np.array([5, 6], np.int64)
        made.bench.answer(replace(blocks, depths=depths))
        assert made.store.depths == {encoded_key(key(1)): 5, key(3): 6}


def test_a_probe_asks_for_both_forms() -> None:
    """Answers a probe for both forms of three blocks. A block found in either form is found; if one
    form failed and the other is not found, the block is unknown (FAILED)."""

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
