"""A flush that one node has answered counts on every other, whenever it happens during a read."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("obstore", reason="obstore speaks S3")

from hotkv_server.testing.fault_proxy import nothing
from hotkv_server.testing.tier_contract import SLOT_BYTES, Bench, content
from hotkv_server.tiers.protocol import NO_EPOCH, Blocks, Epochs, Read, Shown, Write, begun
from hotkv_server.tiers.remote.client import LostError, UnusableError
from hotkv_server.tiers.s3 import epochs as epoch_objects
from hotkv_server.tiers.s3.bucket import Bucket, FullError
from hotkv_server.tiers.s3.tier import S3Tier
from tests.support.waiting import wait_for
from tests.tiers.s3_support import Gate, Server, answer, bench_over, new_prefix, proxied, tier_over

NAME = "00ff" * 8
PATH = f"epochs/1/{NAME}"


@pytest.fixture
def prefix() -> str:
    return new_prefix()


@pytest.fixture
def node_a(s3_server: Server, prefix: str) -> Iterator[S3Tier]:
    with tier_over(s3_server, prefix) as (tier, _):
        yield tier


def epoch(tier: S3Tier) -> int | None:
    def call(on_done: Callable[[int | None], None]) -> None:
        def done(shown: Shown | None) -> None:
            on_done(None if shown is None else shown.epochs.get(NAME))

        tier.epochs([NAME], time.monotonic() + 9, done)

    return answer(call)


def flush(tier: S3Tier) -> int | None:
    return answer(lambda on_done: tier.raise_epoch(NAME, 0, on_done))


def keys_of(at: int, count: int) -> list[bytes]:
    return [b"hotkv/1/%b/%d/0/%064x" % (NAME.encode(), at, number) for number in range(count)]


def blocks_of(keys: list[bytes], first_slot: int, epochs: Epochs) -> Blocks:
    slots = np.arange(first_slot, first_slot + len(keys), dtype=np.int64) * SLOT_BYTES
    return Blocks(keys, slots, np.full(len(keys), SLOT_BYTES, np.int64), epochs=epochs)


def write(bench: Bench, keys: list[bytes]) -> None:
    bench.fill(range(len(keys)), range(len(keys)))
    blocks = blocks_of(keys, 0, {})
    codes = answer(lambda done: bench.tier.write(blocks, lambda codes, seals: done(codes)))
    assert (codes == Write.STORED).all()


def read(tier: S3Tier, keys: list[bytes], epochs: Epochs) -> list[int]:
    blocks = blocks_of(keys, 8, epochs)
    return answer(lambda done: tier.read(blocks, time.monotonic() + 20, done)).tolist()


def probe(tier: S3Tier, keys: list[bytes], epochs: Epochs) -> list[int]:
    return answer(lambda done: tier.probe(keys, time.monotonic() + 20, done, epochs)).tolist()


def test_an_epoch_begins_once_and_rises(s3_server: Server, prefix: str, node_a: S3Tier) -> None:
    before = begun(time.time_ns() // 1000)
    first = epoch(node_a)
    assert before <= first <= begun(time.time_ns() // 1000)
    with tier_over(s3_server, prefix) as (node_b, _):
        assert epoch(node_b) == epoch(node_a) == first
        second, third = flush(node_b), flush(node_a)
        assert second and third and first < second < third
        assert epoch(node_b) == third


def test_a_flush_begins_an_epoch_where_none_is(node_a: S3Tier) -> None:
    before = begun(time.time_ns() // 1000)
    raised = flush(node_a)
    assert before < raised and epoch(node_a) == raised


def test_flushes_at_a_time_all_count(s3_server: Server, prefix: str, node_a: S3Tier) -> None:
    first = epoch(node_a)
    with tier_over(s3_server, prefix) as (node_b, _):
        raised: list[int | None] = []
        for tier in [node_a, node_b] * 4:
            tier.raise_epoch(NAME, 0, raised.append)
        wait_for(lambda: len(raised) == 8, "a flush did not end")
        # Each made an epoch of its own, so none takes another's for its own.
        assert len({first, *raised}) == 9
        assert epoch(node_a) == epoch(node_b) == max(raised)


def test_epochs_that_begin_at_a_time_are_one(s3_server: Server, prefix: str) -> None:
    with tier_over(s3_server, prefix) as (node_a, _), tier_over(s3_server, prefix) as (node_b, _):
        begun: list[Shown | None] = []
        for tier in [node_a, node_b] * 3:
            tier.epochs([NAME], time.monotonic() + 20, begun.append)
        wait_for(lambda: len(begun) == 6, "a call did not end")
        assert len({one.epochs[NAME] for one in begun}) == 1 and begun[0].epochs[NAME]


@pytest.mark.parametrize("ask", [read, probe])
@pytest.mark.parametrize("held", ["/blocks/1/", "/epochs/1/"])
def test_no_old_block_after_a_flush_was_answered(
    s3_server: Server, prefix: str, node_a: S3Tier, held: str, ask: Callable[..., list[int]]
) -> None:
    # Node B's requests up to the held one reach the server before the flush, the others after it.
    now, told = epoch(node_a), []
    keys = keys_of(now, 4)
    on_epoch = lambda name, at: told.append((name, at))  # noqa: E731
    with proxied(s3_server) as (proxy, over_it):
        options = {"refresh_s": 3600, "on_epoch": on_epoch, **over_it}
        with bench_over(s3_server, prefix, **options) as node_b:
            write(node_b, keys)
            assert ask(node_b.tier, keys, {NAME: now}) == [Read.FOUND] * 4
            gate = Gate(b"GET", held)
            proxy.on_command = gate
            done: list[list[int]] = []
            thread = threading.Thread(
                target=lambda: done.append(ask(node_b.tier, keys, {NAME: now}))
            )
            thread.start()
            if ask is read or held == "/epochs/1/":
                assert gate.is_held.wait(60)
                raised = flush(node_a)
            gate.opened.set()
            thread.join()
            if ask is probe and held == "/blocks/1/":
                # It asks for no block.
                assert done == [[Read.FOUND] * 4] and not gate.is_held.is_set()
                return
            assert done == [[Read.ABSENT] * 4]
            assert told == [(NAME, raised)]
            # Blocks of the new epoch are there as ever.
            keys = keys_of(raised, 2)
            write(node_b, keys)
            assert ask(node_b.tier, keys, {NAME: raised}) == [Read.FOUND] * 2


def test_a_flush_is_found_without_a_request_for_blocks(
    s3_server: Server, prefix: str, node_a: S3Tier
) -> None:
    now = epoch(node_a)
    with bench_over(s3_server, prefix) as node_b:
        raised = flush(node_a)
        told = []
        node_b.tier._on_epoch = lambda name, at: told.append((name, at))
        assert read(node_b.tier, keys_of(now, 2), {NAME: now}) == [Read.ABSENT] * 2
        assert told == [(NAME, raised)]


def test_a_flush_between_two_parts_refuses_the_whole_call(
    s3_server: Server, prefix: str, node_a: S3Tier
) -> None:
    now = epoch(node_a)
    keys = keys_of(now, 4)
    with proxied(s3_server) as (proxy, over_it):
        options = {"refresh_s": 3600, "connections": 1, **over_it}
        with bench_over(s3_server, prefix, **options) as node_b:
            node_b.tier._cut_reads = lambda num_bytes: iter([slice(0, 2), slice(2, 4)])
            write(node_b, keys)
            assert read(node_b.tier, keys, {NAME: now}) == [Read.FOUND] * 4
            # The first part has been found, in the right epoch.
            gate = Gate(b"GET", "/blocks/1/", skipped=1)
            proxy.on_command = gate
            done: list[list[int]] = []
            thread = threading.Thread(
                target=lambda: done.append(read(node_b.tier, keys, {NAME: now}))
            )
            thread.start()
            assert gate.is_held.wait(60)
            flush(node_a)
            gate.opened.set()
            thread.join()
            assert done == [[Read.ABSENT] * 4]


def test_a_flush_that_is_late_does_nothing(s3_server: Server, prefix: str, node_a: S3Tier) -> None:
    # B's write is on its way while A flushes twice; then it comes, and must bring nothing back.
    first = epoch(node_a)
    with proxied(s3_server) as (proxy, over_it):
        gate = Gate(b"PUT", "/epochs/1/")
        with tier_over(s3_server, prefix, **over_it) as (node_b, _):
            assert epoch(node_b) == first
            proxy.on_command = gate
            raised: list[int | None] = []
            node_b.raise_epoch(NAME, 0, raised.append)
            assert gate.is_held.wait(60)
            flushed = [flush(node_a), flush(node_a)]
            gate.opened.set()
            wait_for(lambda: raised, "the flush did not end")
            assert raised[0] > max(first, *flushed) and epoch(node_a) == raised[0]


def test_epochs_of_other_key_spaces_do_not_count(
    s3_server: Server, prefix: str, node_a: S3Tier
) -> None:
    now = epoch(node_a)
    keys = keys_of(now, 2)
    with bench_over(s3_server, prefix) as bench:
        write(bench, keys)
        assert answer(lambda on_done: node_a.raise_epoch("other", 0, on_done))
        assert read(bench.tier, keys, {NAME: now}) == [Read.FOUND] * 2
        assert read(bench.tier, keys, {NAME: now, "other": now}) == [Read.ABSENT] * 2


def test_an_epoch_that_was_lost_lets_nothing_pass(
    s3_server: Server, prefix: str, node_a: S3Tier
) -> None:
    now = epoch(node_a)
    keys = keys_of(now, 2)
    told = []
    on_epoch = lambda name, at: told.append((name, at))  # noqa: E731
    with bench_over(s3_server, prefix, on_epoch=on_epoch) as bench:
        write(bench, keys)
        s3_server.store.delete(f"{prefix}/{PATH}")
        assert read(bench.tier, keys, {NAME: now}) == [Read.ABSENT] * 2
        assert read(bench.tier, keys, {NAME: NO_EPOCH}) == [Read.ABSENT] * 2
        assert told == [(NAME, NO_EPOCH)] * 2
        assert epoch(node_a) > now


@pytest.mark.parametrize("value", [b"", b"x", b"-4", b"1.5", b"9" * 30, b"0"])
def test_an_epoch_that_is_no_number_lets_nothing_pass(
    s3_server: Server, prefix: str, node_a: S3Tier, value: bytes
) -> None:
    now = epoch(node_a)
    keys = keys_of(now, 2)
    with bench_over(s3_server, prefix) as bench:
        write(bench, keys)
        s3_server.store.put(f"{prefix}/{PATH}", value)
        assert read(bench.tier, keys, {NAME: now}) == [Read.FAILED] * 2
        assert epoch(node_a) is None and flush(node_a) is None
        # Other key spaces go on.
        assert read(bench.tier, keys, {}) == [Read.FOUND] * 2


def test_a_read_that_loses_its_epoch_finds_nothing(
    s3_server: Server, prefix: str, node_a: S3Tier
) -> None:
    # All blocks have come whole; the answer with the epoch never does.
    now = epoch(node_a)
    keys = keys_of(now, 2)

    def lost(piece: bytes) -> Iterator[bytes]:
        if b"/epochs/1/" in piece[:500]:
            raise ConnectionAbortedError
        yield piece

    with proxied(s3_server) as (proxy, over_it), bench_over(s3_server, prefix, **over_it) as bench:
        write(bench, keys)
        for ask in (read, probe):
            proxy.on_command = lost
            assert ask(bench.tier, keys, {NAME: now}) == [Read.FAILED] * 2
            proxy.on_command = nothing
            assert ask(bench.tier, keys, {NAME: now}) == [Read.FOUND] * 2


def test_nobody_answers_for_a_dead_store(s3_server: Server) -> None:
    with tier_over(s3_server, new_prefix(), endpoint="http://127.0.0.1:1") as (tier, _):
        assert epoch(tier) is None and flush(tier) is None
        tier.close()
        assert epoch(tier) is None and flush(tier) is None


class Objects:
    """A store that has room for nothing, or does not know conditions."""

    def __init__(self, *, is_full: bool = False, ignores: str = "") -> None:
        self.objects: dict[str, bytes] = {}
        self.is_full = is_full
        self._ignores = ignores

    def get(self, path: str, until_s: float) -> tuple[bytes, str] | None:
        found = self.objects.get(path)
        return None if found is None else (found, f'"{found!r}"')

    def put(self, path: str, body: bytes, until_s: float, version: str = "") -> bool:
        known = self.get(path, until_s)
        if version and self._ignores != "If-Match" and (known is None or known[1] != version):
            return False
        if not version and known is not None and self._ignores != "If-None-Match":
            return False
        if self.is_full:
            raise FullError("has no room")
        self.objects[path] = body
        return True

    def delete(self, path: str, until_s: float) -> None:
        self.objects.pop(path, None)


def test_a_flush_of_a_full_store_counts() -> None:
    store, first = Objects(), begun(5000)
    assert epoch_objects.begin_epoch(store, NAME, 5000, 0.0) == first
    assert epoch_objects.raise_epoch(store, NAME, 0, 6000, 0.0) == begun(6000) > first
    assert epoch_objects.raise_epoch(store, NAME, 0, 6000, 0.0) == begun(6000) + 1
    known = begun(6500)
    assert epoch_objects.raise_epoch(store, NAME, known, 6400, 0.0) == known + 1
    store.is_full = True
    assert epoch_objects.raise_epoch(store, NAME, 0, 7000, 0.0) == NO_EPOCH
    with pytest.raises(LostError, match="full"):
        epoch_objects.raise_epoch(store, NAME, 0, 7000, 0.0)
    assert epoch_objects.read_epoch(store, NAME, 0.0) == NO_EPOCH
    assert epoch_objects.begin_epoch(store, NAME, 8000, 0.0) == NO_EPOCH
    store.is_full = False
    assert epoch_objects.begin_epoch(store, NAME, 9000, 0.0) == begun(9000) > known + 1


@pytest.mark.parametrize("condition", ["If-None-Match", "If-Match"])
def test_a_store_that_ignores_a_condition_is_not_used(condition: str) -> None:
    for _ in range(2):
        epoch_objects.check_conditions(Objects(), 0.0)
        with pytest.raises(UnusableError, match=f"ignores {condition}: "):
            epoch_objects.check_conditions(Objects(ignores=condition), 0.0)


def test_a_real_bucket_honours_the_conditions(
    s3_server: Server, prefix: str, node_a: S3Tier
) -> None:
    bucket: Bucket = node_a._shared.bucket()
    until_s = time.monotonic() + 60
    for _ in range(2):
        epoch_objects.check_conditions(bucket, until_s)
    assert bucket.put("x", b"1", until_s) and not bucket.put("x", b"2", until_s)
    found = bucket.get("x", until_s)
    assert found is not None and bucket.put("x", b"3", until_s, found[1])
    assert not bucket.put("x", b"4", until_s, found[1])
    assert not bucket.put("y", b"4", until_s, found[1])
    assert bucket.get("x", until_s)[0] == b"3" and bucket.get("y", until_s) is None
    bucket.delete("x", until_s)
    bucket.delete("x", until_s)
    assert bucket.get("x", until_s) is None


@pytest.mark.parametrize("name", ["", "a/b", "..", "ä", "x" * 65])
def test_a_fingerprint_that_is_no_name_has_no_epoch(node_a: S3Tier, name: str) -> None:
    assert answer(lambda done: node_a.raise_epoch(name, 0, done)) is None
    assert epoch(node_a)


def test_content_of_blocks_is_what_was_written(
    s3_server: Server, prefix: str, node_a: S3Tier
) -> None:
    now = epoch(node_a)
    with bench_over(s3_server, prefix) as bench:
        keys = keys_of(now, 3)
        write(bench, keys)
        assert read(bench.tier, [*keys, b"hotkv/1/none"], {NAME: now}) == [1, 1, 1, Read.ABSENT]
        for at in range(3):
            assert np.array_equal(bench.slot(8 + at), content(at))
