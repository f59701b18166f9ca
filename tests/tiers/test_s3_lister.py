"""Tests the lister of a bucket's packs: only a key space's first request waits, and listings
cost few requests."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest

from hotkv_server.tiers.remote.client import LostError, StoreError, UnusableError
from hotkv_server.tiers.s3 import lister as lister_module
from hotkv_server.tiers.s3.bucket import DeniedError
from hotkv_server.tiers.s3.index import PACK_ROWS, PackIndex
from hotkv_server.tiers.s3.lister import LISTS_AT_ONCE, OVERLAP_S, Lister
from hotkv_server.tiers.s3.packs import Space, list_bytes, new_name, packed, path_of
from tests.support.waiting import wait_for

SPACE = Space("0a/7")
WAIT_S = 60.0
FREE = 1000


def key(number: int) -> bytes:
    return b"hotkv/1/0a/7/0/%064x" % number


class Listed:
    """A bucket of packs of one block; a pack's head lists its blocks.

    looks: names returned, per listing.
    fronts: packs whose heads were read, in order.
    num_begun: heads whose reads have begun.
    error: raised by listings.
    lost: packs whose reads fail.
    denied: packs that the store forbids.
    refused: packs for which it refuses the access key.
    turns: acquired by each read of a head.
    """

    PAGE = 4

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.looks: list[int] = []
        self.fronts: list[str] = []
        self.num_begun = 0
        self.error: Exception | None = None
        self.lost: set[str] = set()
        self.refused: set[str] = set()
        self.denied: set[str] = set()
        self.turns = threading.Semaphore(FREE)

    def add(self, number: int, now_us: int) -> str:
        name = new_name(now_us, "node", number, 1)
        pack, body = packed(SPACE, name, [key(number)], [memoryview(b"x")])
        self.objects[pack.path] = bytes(body)
        return name

    def names(
        self, folder: str, most: int, is_enough: Callable[[str], bool], page_s: float
    ) -> list[str]:
        found: list[str] = []
        if self.error is not None:
            raise self.error
        listed = sorted(path.rpartition("/")[2] for path in self.objects if folder in path)
        while listed and len(found) < most and not (found and is_enough(found[-1])):
            found += listed[: self.PAGE]
            del listed[: self.PAGE]
        self.looks.append(len(found))
        return found[:most]

    def ranges(
        self, wanted: Sequence[tuple[str, list[int], list[int]]], until_s: float
    ) -> list[list[memoryview] | StoreError | None]:
        self.num_begun += 1
        assert self.turns.acquire(timeout=WAIT_S)
        self.fronts += [path.rpartition("/")[2] for path, *_ in wanted]
        assert all(begins == [0] for _, begins, _ in wanted)
        return [self._front(path, lengths[0]) for path, _, lengths in wanted]

    def _front(self, path: str, num_bytes: int) -> list[memoryview] | StoreError | None:
        name = path.rpartition("/")[2]
        if name in self.lost:
            return LostError("answers 503")
        if name in self.refused:
            return UnusableError("rejects the access key")
        if name in self.denied:
            return DeniedError("forbids it")
        body = self.objects.get(path)
        return None if body is None else [memoryview(body)[:num_bytes]]


@pytest.fixture
def bucket() -> Listed:
    return Listed()


@pytest.fixture
def index() -> PackIndex:
    return PackIndex(1 << 16)


@pytest.fixture
def lister(bucket: Listed, index: PackIndex) -> Iterator[Lister]:
    one = Lister(index, lambda: bucket, refresh_s=0.0, timeout_s=9.0)
    yield one
    bucket.turns.release(FREE)
    one.close()


def ask(lister: Lister, within_s: float = WAIT_S) -> None:
    lister.ask(SPACE, time.monotonic() + within_s)


def now_us() -> int:
    return time.time_ns() // 1000


def test_only_the_first_asker_waits(bucket: Listed, index: PackIndex, lister: Lister) -> None:
    for number in range(3):
        bucket.add(number, now_us())
    ask(lister)
    assert [place is not None for place in index.find([key(0), key(2), key(9)])] == [1, 1, 0]
    bucket.turns = threading.Semaphore(0)
    # As if its write had taken long. Listings for a request look only at newer names; one in the
    # background finds it.
    bucket.add(9, now_us() - int(OVERLAP_S / 2 * 1e6))
    ask(lister)
    ask(lister)
    assert index.find([key(9)]) == [None]
    bucket.turns.release(FREE)
    wait_for(lambda: index.find([key(9)]) != [None])
    assert sorted(bucket.fronts) == sorted(path.rpartition("/")[2] for path in bucket.objects)


def test_look_ends_where_the_last_was(bucket: Listed, lister: Lister) -> None:
    long_ago_us = now_us() - 3600 * 10**6
    for number in range(40):
        name = bucket.add(number, long_ago_us + number)
    # A damaged pack must not be read again at each listing.
    bucket.objects[path_of(SPACE, name)] = b"x" * list_bytes(name)
    ask(lister)
    assert bucket.looks == [40] and len(bucket.fronts) == 40
    names = [bucket.add(number, now_us()) for number in (98, 99)]
    bucket.objects[path_of(SPACE, names[0])] = b"x" * list_bytes(name)
    wait_for(lambda: ask(lister) or (len(bucket.looks) > 3 and bucket.fronts[40:]))
    # Names come by pages of 4; only the new packs are read.
    assert bucket.looks[1] == Listed.PAGE
    assert bucket.fronts[40:] == sorted(names)


@pytest.mark.parametrize("wrong_at_start", [True, False])
def test_corrected_clock_hides_no_packs(
    bucket: Listed,
    index: PackIndex,
    lister: Lister,
    monkeypatch: pytest.MonkeyPatch,
    wrong_at_start: bool,
) -> None:
    """A clock a day ahead, before or after the first listing, then right: NTP without a clock
    battery."""
    ahead_s = 0.0
    clock = SimpleNamespace(time=lambda: time.time() + ahead_s, monotonic=time.monotonic)
    monkeypatch.setattr(lister_module, "time", clock)
    if not wrong_at_start:
        ask(lister)
    ahead_s = 86_400.0
    looks = len(bucket.looks)
    wait_for(lambda: ask(lister) or len(bucket.looks) > looks + 1)
    bucket.add(1, now_us() - 600 * 10**6)
    bucket.add(2, now_us())
    ahead_s = 0.0
    wait_for(lambda: ask(lister) or None not in index.find([key(1), key(2)]))
    # Listings stop again at packs that the last has seen.
    bucket.add(3, now_us())
    wait_for(lambda: ask(lister) or None not in index.find([key(3)]))
    assert len(bucket.fronts) == 3


def test_newest_packs_are_learned_and_known_first(
    bucket: Listed, index: PackIndex, lister: Lister, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lister_module, "FIRST_PACKS", LISTS_AT_ONCE)
    count = 4 * LISTS_AT_ONCE
    for number in range(count):
        bucket.add(number, 10**15 + number)
    bucket.turns = threading.Semaphore(0)
    with pytest.raises(LostError, match="has not listed"):
        ask(lister, within_s=0.02)
    bucket.turns.release()
    ask(lister)
    assert len(index) == LISTS_AT_ONCE and index.find([key(count - 1)]) != [None]
    # Waits for one list of the other key space only.
    other = Space("0b/7")
    with pytest.raises(LostError, match="has not listed"):
        lister.ask(other, time.monotonic() + 0.02)
    bucket.turns.release()
    lister.ask(other, time.monotonic() + WAIT_S)
    assert len(index) == 2 * LISTS_AT_ONCE
    bucket.turns.release(2)
    wait_for(lambda: len(index) == count)
    assert bucket.fronts == sorted(bucket.fronts) and len(bucket.looks) == 3


def test_a_listing_ends_with_its_generation(
    bucket: Listed, index: PackIndex, lister: Lister, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lister_module, "FIRST_PACKS", LISTS_AT_ONCE)
    for number in range(4 * LISTS_AT_ONCE):
        bucket.add(number, 10**15 + number)
    bucket.turns = threading.Semaphore(1)
    ask(lister)
    lister.forget_others("0b", None)
    bucket.turns.release()
    wait_for(lambda: len(index) == 2 * LISTS_AT_ONCE)
    lister.forget_others("0a", Space("0a/8"))
    bucket.turns.release(FREE)
    # Otherwise it would go on before these two.
    for other in ("0b/7", "0c/7"):
        lister.ask(Space(other), time.monotonic() + WAIT_S)
    assert len(bucket.fronts) <= 3 * LISTS_AT_ONCE


def test_no_more_is_read_than_fits(bucket: Listed) -> None:
    index = PackIndex(20 * (1 + PACK_ROWS))
    for number in range(10 * LISTS_AT_ONCE):
        bucket.add(number, 10**15 + number)
    lister = Lister(index, lambda: bucket, refresh_s=3600.0, timeout_s=9.0)
    ask(lister)
    lister.close()
    assert len(index) == 20 and len(bucket.fronts) == 2 * LISTS_AT_ONCE


def test_waiters_learn_what_ails_the_store(
    bucket: Listed, index: PackIndex, lister: Lister
) -> None:
    name = bucket.add(1, now_us())
    bucket.error = UnusableError("forbids it")
    for _ in range(3):
        with pytest.raises(UnusableError, match="forbids it"):
            ask(lister)
    bucket.error = ValueError("odd")
    with pytest.raises(LostError, match="can't be listed: ValueError"):
        ask(lister)
    bucket.error = None
    bucket.refused.add(name)
    with pytest.raises(UnusableError, match="rejects the access key"):
        ask(lister)
    bucket.refused.clear()
    ask(lister)
    # What is known stays.
    bucket.error = LostError("is away")
    for _ in range(3):
        ask(lister)
    assert index.find([key(1)]) != [None]


def test_store_failing_all_reads_isnt_empty(
    bucket: Listed, index: PackIndex, lister: Lister
) -> None:
    """All reads of packs get 503."""
    names = [bucket.add(number, 10**15 + number) for number in range(4 * LISTS_AT_ONCE)]
    bucket.lost = set(names)
    for looks in (1, 2):
        with pytest.raises(LostError, match="answers 503"):
            ask(lister)
        assert len(bucket.fronts) == looks * LISTS_AT_ONCE
    # First some lists, then failures.
    bucket.lost = set(names[: 2 * LISTS_AT_ONCE])
    with pytest.raises(LostError, match="answers 503"):
        ask(lister)
    assert len(bucket.fronts) == 6 * LISTS_AT_ONCE
    bucket.lost.clear()
    ask(lister)
    wait_for(lambda: ask(lister) or len(index) == len(names))


def test_unreadable_pack_hides_no_other(
    bucket: Listed, index: PackIndex, lister: Lister, caplog: pytest.LogCaptureFixture
) -> None:
    """Lost or forbidden packs may become readable, so they are tried again; other known ones are
    not."""
    long_ago_us = now_us() - 3600 * 10**6
    names = [bucket.add(number, long_ago_us + number) for number in range(40)]
    bucket.lost, bucket.denied = {names[1], names[38]}, {names[2], names[39]}
    ask(lister)
    assert bucket.looks[0] == 40 and len(index) == 36
    bucket.lost.add(bucket.add(50, now_us()))
    bucket.add(51, now_us())
    wait_for(lambda: ask(lister) or index.find([key(51)]) != [None])
    looks = len(bucket.looks)
    wait_for(lambda: ask(lister) or len(bucket.looks) > looks + 3)
    assert len(index) == 37 and set(bucket.looks[1:]) == {Listed.PAGE}
    assert bucket.fronts.count(names[1]) > 3 and bucket.fronts.count(names[3]) == 1
    said = [record for record in caplog.records if record.name == lister_module.log.name]
    assert [record.levelname for record in said] == ["WARNING"]
    del bucket.objects[path_of(SPACE, names[1])]
    bucket.lost.clear()
    bucket.denied.clear()
    wait_for(lambda: ask(lister) or None not in index.find([key(2), key(39), key(50)]))
    bucket.fronts.clear()
    looks = len(bucket.looks)
    wait_for(lambda: ask(lister) or len(bucket.looks) > looks + 3)
    assert not bucket.fronts and len(index) == 41


def test_unreadable_new_packs_harm_no_known_ones(
    bucket: Listed, index: PackIndex, lister: Lister
) -> None:
    bucket.add(0, now_us() - 3600 * 10**6)
    ask(lister)
    bucket.lost.add(bucket.add(1, now_us()))
    wait_for(lambda: ask(lister) or len(bucket.fronts) > 4)
    ask(lister)
    assert index.find([key(0)]) != [None] and index.find([key(1)]) == [None]
    # An unreadable pack does not fail the listing.
    assert lister._folders[SPACE].error is None
    bucket.lost.clear()
    wait_for(lambda: ask(lister) or index.find([key(1)]) != [None])


def test_forbidden_packs_are_read_again_in_turn(
    bucket: Listed, index: PackIndex, lister: Lister, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each listing tries a few again; at most MAX_UNREAD are remembered."""
    count = 3 * LISTS_AT_ONCE
    monkeypatch.setattr(lister_module, "MAX_UNREAD", count - 2)
    names = [bucket.add(number, 10**15 + number) for number in range(count)]
    bucket.denied = set(names)
    ask(lister)
    assert len(bucket.fronts) == count and not len(index)
    looks = len(bucket.looks)
    wait_for(lambda: ask(lister) or len(bucket.looks) > looks + 4)
    assert len(bucket.fronts) <= count + LISTS_AT_ONCE * len(bucket.looks)
    # Now only the newest; two were forgotten.
    bucket.denied = set(names[-LISTS_AT_ONCE:])
    wait_for(lambda: ask(lister) or len(index) == count - LISTS_AT_ONCE - 2)
    assert index.find([key(0), key(1)]) == [None] * 2 and index.find([key(2)]) != [None]


def test_waiting_ends_when_it_is_stopped(bucket: Listed, lister: Lister) -> None:
    for number in range(3 * LISTS_AT_ONCE):
        bucket.add(number, now_us())
    bucket.turns = threading.Semaphore(0)
    problems: list[str] = []

    def work() -> None:
        try:
            ask(lister)
        except LostError as error:
            problems.append(str(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    wait_for(lambda: bucket.num_begun, "nothing is read")
    lister.stop()
    thread.join(WAIT_S)
    assert problems == ["is not asked any more"]
    bucket.turns.release(FREE)
    lister.close()
    assert len(bucket.fronts) == LISTS_AT_ONCE
    with pytest.raises(LostError):
        ask(lister)
