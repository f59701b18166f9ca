"""Tests faults and flushes of shared tiers over real Valkey and S3 servers behind a proxy.

A store that is dead, hung or slow, or answers garbage, may cost hits, never wrong bytes. After a
flush's answer no node finds an old block, even by a call from before.
"""

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotkv_server.tiers.protocol import Read, Write
from hotkv_server.tiers.remote import calls
from hotkv_server.tiers.remote.calls import PART_BLOCKS, PART_BYTES, cut
from hotkv_server.tiers.valkey.resp import command
from tests.contracts import flush_contract
from tests.contracts.flush_contract import NAME, flush, generation, keys_of, probe, read, write
from tests.contracts.tier_contract import SLOT_BYTES, Bench, Codes, content
from tests.doubles.fault_proxy import Dam, changed_at, cut_after, nothing
from tests.support.waiting import wait_for
from tests.tiers.support import Asked, Gate, Store, broken, quickest_s

NUMBERS = [3, 6, 9]
"""Blocks that are stored, in one key space."""
HASTY = {"timeout_s": 0.5, "connect_timeout_s": 0.5}


@pytest.fixture
def bench(store: Store) -> Iterator[Bench]:
    """One connection; NUMBERS are stored."""
    with store.bench(connections=1) as one:
        yield stored(one)


@pytest.fixture
def hasty(store: Store) -> Iterator[Bench]:
    """As `bench`, with short timeouts."""
    with store.bench(connections=1, **HASTY) as one:
        yield stored(one)


def stored(bench: Bench) -> Bench:
    """Reads the blocks once, so that the tier is connected."""
    bench.fill(NUMBERS, [0, 1, 2])
    wait_for(lambda: Write.FAILED not in bench.write(NUMBERS, [0, 1, 2]), "nothing is stored")
    found = [Read.FOUND] * 3
    wait_for(lambda: bench.read(NUMBERS, [4, 5, 6]).tolist() == found, "nothing is found")
    bench.arena[:] = 0
    return bench


def answered(bench: Bench, numbers: list[int], slots: list[int]) -> list[int]:
    """With short timeouts, reads may fail on a busy machine: repeated."""
    codes = list[int]()

    def are_answered() -> bool:
        codes[:] = bench.read(numbers, slots).tolist()
        return Read.FAILED not in codes

    wait_for(are_answered, "it does not answer")
    return codes


# --------------------------------------------------------------------------------- dead, hung, slow


def test_read_hanging_midway_writes_no_slot_later(store: Store, bench: Bench) -> None:
    dam = Dam(0)

    def hangs() -> bool:
        nonlocal dam
        store.proxy.on_reply = dam = Dam(SLOT_BYTES + SLOT_BYTES // 2)
        first, second = bench.read([3, 6], [4, 5], within_s=0.5).tolist()
        assert second == Read.FAILED
        assert first == Read.FAILED or np.array_equal(bench.slot(4), content(3))
        return dam.is_full.is_set()

    # On a busy machine the read may end before the answer.
    wait_for(hangs, "no read hangs in its middle")
    # Another call may have these slots by now.
    bench.arena[:] = 0xEE
    store.proxy.on_reply = nothing
    dam.opened.set()
    time.sleep(0.2)
    assert (bench.arena == 0xEE).all()
    wait_for(lambda: bench.read([3], [4]).tolist() == [Read.FOUND], "it did not come back")
    bench.check_read([6, 3, 9], [7, 8, 9])


def test_write_hanging_midway_is_not_believed(store: Store, hasty: Bench) -> None:
    dam = Dam(5000)
    store.proxy.on_command = dam
    hasty.fill([12], [1])
    assert hasty.write([12], [1]).tolist() == [Write.FAILED]
    # Another call may have the slot: the store gets the old bytes or nothing.
    hasty.arena[:] = 0xEE
    store.proxy.on_command = nothing
    dam.opened.set()
    (code,) = answered(hasty, [12], [5])
    assert code == Read.ABSENT or np.array_equal(hasty.slot(5), content(12))
    hasty.fill([12], [1])
    wait_for(lambda: hasty.write([12], [1])[0] in (Write.STORED, Write.PRESENT), "not stored")
    assert answered(hasty, [12, 3], [7, 8]) == [Read.FOUND] * 2
    assert np.array_equal(hasty.slot(7), content(12)) and np.array_equal(hasty.slot(8), content(3))


def test_dead_store_is_named_and_returns(
    store: Store, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    failed_before = bench.tier.figures().failed_blocks
    with broken(store.proxy):
        assert bench.read([3], [4]).tolist() == [Read.FAILED]
        assert bench.write([12], [1]).tolist() == [Write.FAILED]
        wait_for(bench.tier.problem, "no problem is known")
        assert bench.tier.problem().startswith(store.name)
        codes: list[int] = []
        quickest = quickest_s(lambda: codes.extend(bench.read([3], [4]).tolist()), 200)
        assert codes == [Read.FAILED] * 200
        assert quickest < 0.3, "a dead store costs waiting"
    # The server makes no calls to a tier with a problem.
    wait_for(lambda: not bench.tier.problem(), "the problem stays")
    bench.check_read(NUMBERS, [4, 5, 6])
    assert bench.tier.figures().failed_blocks - failed_before == 202
    assert caplog.text.count("can be used again") == 1


def test_hung_store_is_given_up_in_time(store: Store, hasty: Bench) -> None:
    dam = Dam(0)
    store.proxy.on_reply = dam
    # Two missed deadlines make a problem: of the first read, and of connecting again. On a busy
    # machine a read may be skipped, as its deadline passes before its turn.
    workers: Any = hasty.tier._workers
    num_connects, connect_to = 0, workers._connect_to

    def connect(until_s: float) -> Any:
        nonlocal num_connects
        num_connects += 1
        return connect_to(until_s)

    workers._connect_to = connect
    while not num_connects:
        assert not hasty.tier.problem()
        assert hasty.read([3], [4], within_s=0.05).tolist() == [Read.FAILED]
    assert num_connects == 1 and hasty.tier.problem().endswith("has not answered in time")
    codes: list[int] = []
    assert quickest_s(lambda: codes.extend(hasty.write([12], [4]).tolist()), 10) < 0.3
    assert quickest_s(lambda: codes.extend(hasty.probe([12]).tolist()), 10) < 0.3
    assert codes == [Write.FAILED] * 10 + [Read.FAILED] * 10
    store.proxy.on_reply = nothing
    dam.opened.set()
    wait_for(lambda: not hasty.tier.problem(), "the problem stays")
    assert answered(hasty, [3], [4]) == [Read.FOUND]
    assert np.array_equal(hasty.slot(4), content(3))


def test_a_call_that_waits_for_the_store_shows(store: Store) -> None:
    with store.bench(connections=1, timeout_s=60) as bench:
        dam, asked, probed = Dam(0), Asked(stored(bench)), list[Codes]()
        store.proxy.on_reply = dam
        asked.read("read", [3], [4])
        wait_for(lambda: bench.tier.stalled_s(time.monotonic()) > 0.2, "it does not show")
        # Probes transfer no blocks.
        bench.tier.probe([b"hotkv/1/none"], time.monotonic() + 60, probed.append)
        assert bench.tier.figures().queued_bytes == SLOT_BYTES and not asked.codes
        dam.opened.set()
        asked.wait("read")
        wait_for(lambda: probed, "a call did not end")
        assert bench.tier.stalled_s(time.monotonic()) == 0
        assert bench.tier.figures().queued_bytes == 0


def test_a_call_beyond_the_queue_fails_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.bench(connections=1, timeout_s=60) as bench:
        dam, asked = Dam(0), Asked(stored(bench))
        monkeypatch.setattr(calls, "MAX_QUEUED_PARTS", 3)
        store.proxy.on_reply = dam
        first, *others = range(12, 30, 3)
        asked.write(first, [first])
        wait_for(lambda: bench.tier.stalled_s(time.monotonic()), "nothing began")
        for number in others:
            asked.write(number, [number])
        assert asked.codes == {24: [Write.FAILED], 27: [Write.FAILED]}
        dam.opened.set()
        assert [asked.wait(number) for number in (first, *others[:3])] == [[Write.STORED]] * 4
        wait_for(lambda: not bench.tier.figures().queued_bytes, "bytes stay queued")


# --------------------------------------------------------------------------------- cut and garbled


@pytest.mark.parametrize("at", [0, 5, 200, SLOT_BYTES, SLOT_BYTES + 34, 2 * SLOT_BYTES])
def test_cut_answer_gives_whole_blocks_or_none(store: Store, bench: Bench, at: int) -> None:
    store.proxy.on_reply = cut_after(at)
    first, second = bench.read([3, 6], [4, 5]).tolist()
    assert second == Read.FAILED
    assert first == Read.FAILED or np.array_equal(bench.slot(4), content(3))
    store.proxy.on_reply = nothing
    wait_for(lambda: bench.read([3], [4]).tolist() == [Read.FOUND], "it did not come back")
    bench.check_read([6, 3, 9], [7, 8, 9])


@pytest.mark.parametrize("at", [0, 6, 40, SLOT_BYTES + 32])
@pytest.mark.parametrize(
    "garbage",
    [b"\x00", b"$9\r\n", b":1\r\n", b"+OK\r\n+OK\r\n", b"404", b"HTTP/1.1 200 OK\r\n\r\n"],
)
def test_garbage_is_never_served_and_read_recovers(
    store: Store, hasty: Bench, at: int, garbage: bytes
) -> None:
    store.proxy.on_reply = changed_at(at, garbage)
    codes = hasty.read(NUMBERS, [4, 5, 6]).tolist()
    for slot, (number, code) in enumerate(zip(NUMBERS, codes, strict=True), 4):
        assert code != Read.FOUND or np.array_equal(hasty.slot(slot), content(number))
    store.proxy.on_reply = nothing
    wait_for(lambda: not hasty.tier.problem(), "the problem stays")
    again = answered(hasty, NUMBERS, [7, 8, 9])
    for slot, (number, code, before) in enumerate(zip(NUMBERS, again, codes, strict=True), 7):
        if before in (Read.CORRUPT, Read.ABSENT):
            assert code == Read.ABSENT
        else:
            assert code == Read.FOUND and np.array_equal(hasty.slot(slot), content(number))


def test_ended_connections_cost_at_most_one_read(store: Store, bench: Bench) -> None:
    for _ in range(3):
        store.proxy.drop()
        wait_for(lambda: bench.read([3], [4]).tolist() == [Read.FOUND], "it did not come back")
        assert not bench.tier.problem()
    bench.check_read(NUMBERS, [4, 5, 6])


# ------------------------------------------------------------------------------------------ closing


def test_closing_over_a_hung_store_is_bounded(store: Store, hasty: Bench) -> None:
    dam, asked = Dam(0), Asked(hasty)
    store.proxy.on_reply = dam
    for number in range(20):
        asked.write(number, [number])
    hasty.tier.close()
    assert asked.codes == {number: [Write.FAILED] for number in range(20)}
    dam.opened.set()


def test_closing_gives_threads_back(store: Store) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with store.bench(connections=3) as bench:
        asked = Asked(stored(bench))
        for number in range(30):
            asked.read(number, [3], [4])
        assert all(asked.wait(number) == [Read.FOUND] for number in range(30))
        left = weakref.ref(bench.tier)
        threads = [one for one in threading.enumerate() if one.name not in before]
        kind = store.name.partition(" ")[0]
        assert {f"hotkv-{kind}-{number}" for number in range(3)} <= {one.name for one in threads}
        assert all(one.daemon for one in threads), "a thread keeps the process from ending"
    wait_for(
        lambda: (
            {thread.name for thread in threading.enumerate() if "hotkv" in thread.name} <= before
        ),
        "threads are left",
    )
    bench.tier.close()
    del bench, asked
    gc.collect()
    assert left() is None


# ----------------------------------------------------------------------------------- parts of calls


@given(st.lists(st.integers(0, 3 * PART_BYTES // 2) | st.integers(0, 4096), max_size=300))
@example([4096] * 150)
@example([PART_BYTES // 2] * 6)
def test_parts_are_all_rows_in_order_and_bounded(sizes: list[int]) -> None:
    num_bytes = np.array(sizes, np.int64)
    parts = list(cut(num_bytes))
    assert [row for part in parts for row in range(part.start, part.stop)] == [*range(len(sizes))]
    for part in parts:
        count = part.stop - part.start
        assert 0 < count <= PART_BLOCKS
        assert count == 1 or num_bytes[part].sum() <= PART_BYTES
    for part, after in pairwise(parts):
        # Parts are as large as allowed.
        more = num_bytes[part.start : after.start + 1]
        assert len(more) > PART_BLOCKS or more.sum() > PART_BYTES


# ------------------------------------------------------------------------------------------ flushes

Ask = Callable[..., list[int]]
REPLY_BYTES = len(b"$%d\r\n\r\n" % (SLOT_BYTES + 24)) + SLOT_BYTES + 24
"""Valkey's reply with a block, on the wire."""


def test_flushes_keep_their_contract(store: Store) -> None:
    flush_contract.check_flushes(
        flush_contract.SharedStore(
            store.direct, lambda: store.set_generation(None), store.set_generation
        )
    )


@pytest.mark.parametrize("ask", [read, probe])
def test_no_old_block_after_a_flush_was_answered(store: Store, ask: Ask) -> None:
    """Each request of the call that may come after the flush is held back; with S3 those for
    blocks and for the generation."""
    if store.is_valkey:
        name = b"GET" if ask is read else b"EXISTS"
        for number in range(5):
            flush_during_a_call(
                store, ask, lambda key, number=number: Dam(number * len(command(name, key)))
            )
    else:
        for part in ("/blocks/1/", "/generations/1/") if ask is read else ("/generations/1/",):
            flush_during_a_call(store, ask, lambda _, part=part: Gate(b"GET", part))


def flush_during_a_call(store: Store, ask: Ask, gate_of: Callable[[bytes], Dam | Gate]) -> None:
    """A call of node B, held back by a gate during a flush on node A, finds nothing.

    ask: makes the call.
    gate_of: makes the gate, given the key of the call's first block.
    """
    told, done = [], list[list[int]]()
    options = {"connections": 1, "on_generation": lambda *flush: told.append(flush)}
    with store.direct() as node_a, store.bench(**options) as node_b:
        # Its own generation, without blocks.
        now = flush(node_a.tier)
        keys = keys_of(now, 4)
        write(node_b, keys)
        assert ask(node_b.tier, keys, {NAME: now}) == [Read.FOUND] * 4
        gate = gate_of(keys[0])
        store.proxy.on_command = gate
        thread = threading.Thread(target=lambda: done.append(ask(node_b.tier, keys, {NAME: now})))
        thread.start()
        assert gate.is_full.wait(60)
        # The store executes what the gate has let pass.
        time.sleep(0.05)
        raised = flush(node_a.tier)
        gate.opened.set()
        thread.join()
        assert done == [[Read.ABSENT] * 4] and told == [(NAME, raised)]
        store.proxy.on_command = nothing
        keys = keys_of(raised, 2)
        write(node_b, keys)
        assert ask(node_b.tier, keys, {NAME: raised}) == [Read.FOUND] * 2


@pytest.mark.parametrize(("ask", "reply_bytes"), [(read, REPLY_BYTES), (probe, len(b":1\r\n"))])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_a_call_that_loses_its_generation_finds_nothing(
    store: Store, ask: Ask, reply_bytes: int, more: int
) -> None:
    """The last answer has the generation; without it blocks may be older than a flush.

    reply_bytes: of the answer for one block.
    more: bytes of the last answer that still arrive.
    """

    def lost(piece: bytes) -> Iterator[bytes]:
        if b"/generations/1/" in piece[:500]:
            raise ConnectionAbortedError
        yield piece

    with store.bench(connections=1) as bench:
        now = generation(bench.tier)
        keys = keys_of(now, 2)
        write(bench, keys)
        assert ask(bench.tier, keys, {NAME: now}) == [Read.FOUND] * 2
        if store.is_valkey:
            store.proxy.on_reply = cut_after(2 * reply_bytes + more)
        else:
            store.proxy.on_command = lost
        assert ask(bench.tier, keys, {NAME: now}) == [Read.FAILED] * 2
        store.proxy.on_reply = store.proxy.on_command = nothing
        assert ask(bench.tier, keys, {NAME: now}) == [Read.FOUND] * 2


def test_nobody_answers_for_a_dead_store(store: Store) -> None:
    with store.bench() as bench:
        assert generation(bench.tier)
        with broken(store.proxy):
            assert generation(bench.tier) is None and flush(bench.tier) is None
