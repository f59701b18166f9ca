"""A flush that a node has answered counts on every other node, whenever it happens during a call:
over a real Valkey and a real S3 server."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hotkv_server.testing import flush_contract
from hotkv_server.testing.fault_proxy import Dam, cut_after, nothing
from hotkv_server.testing.flush_contract import NAME, epoch, flush, keys_of, probe, read, write
from hotkv_server.testing.tier_contract import SLOT_BYTES
from hotkv_server.tiers.protocol import Read
from hotkv_server.tiers.valkey.resp import command
from tests.tiers.support import Gate, Store, broken

Ask = Callable[..., list[int]]
REPLY_BYTES = len(b"$%d\r\n\r\n" % (SLOT_BYTES + 24)) + SLOT_BYTES + 24
"""Bytes of a block's reply from Valkey on the wire."""


def test_flushes_keep_their_contract(store: Store) -> None:
    flush_contract.check_flushes(
        flush_contract.Store(store.direct, lambda: store.set_epoch(None), store.set_epoch)
    )


@pytest.mark.parametrize("ask", [read, probe])
@pytest.mark.parametrize("at", range(5))
def test_no_old_block_after_a_flush_was_answered(store: Store, at: int, ask: Ask) -> None:
    """Flushes on node A during a call of node B: the first `at` requests of the call reach the
    store before the flush, the others after it."""
    told, done = [], list[list[int]]()
    options = {"connections": 1, "on_epoch": lambda *flush: told.append(flush)}
    with store.direct() as node_a, store.bench(**options) as node_b:
        now = epoch(node_a.tier)
        keys = keys_of(now, 4)
        write(node_b, keys)
        assert ask(node_b.tier, keys, {NAME: now}) == [Read.FOUND] * 4
        if store.is_valkey:
            gate = Dam(at * len(command(b"GET" if ask is read else b"EXISTS", keys[0])))
        else:
            gate = Gate(b"GET", "/epochs/1/" if at or ask is probe else "/blocks/1/")
        store.proxy.on_command = gate
        thread = threading.Thread(target=lambda: done.append(ask(node_b.tier, keys, {NAME: now})))
        thread.start()
        assert gate.is_full.wait(60)
        # Give the store time to execute the requests that have passed, before the flush.
        time.sleep(0.05)
        raised = flush(node_a.tier)
        gate.opened.set()
        thread.join()
        assert done == [[Read.ABSENT] * 4] and told == [(NAME, raised)]
        store.proxy.on_command = nothing
        # Blocks of the new epoch are found.
        keys = keys_of(raised, 2)
        write(node_b, keys)
        assert ask(node_b.tier, keys, {NAME: raised}) == [Read.FOUND] * 2


@pytest.mark.parametrize(("ask", "reply_bytes"), [(read, REPLY_BYTES), (probe, len(b":1\r\n"))])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_a_call_that_loses_its_epoch_finds_nothing(
    store: Store, ask: Ask, reply_bytes: int, more: int
) -> None:
    """Cuts the connection when all blocks (or answers to a probe) have come, but not the answer
    with the epoch. The call must find nothing."""

    def lost(piece: bytes) -> Iterator[bytes]:
        if b"/epochs/1/" in piece[:500]:
            raise ConnectionAbortedError
        yield piece

    with store.bench(connections=1) as bench:
        now = epoch(bench.tier)
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
        assert epoch(bench.tier)
        with broken(store.proxy):
            assert epoch(bench.tier) is None and flush(bench.tier) is None
