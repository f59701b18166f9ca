"""Tests generations in Valkey, where each is a key. `test_remote_faults` tests flushes during
reads."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotkv_server.tiers.protocol import Read, begun
from hotkv_server.tiers.remote.calls import PART_KEYS
from hotkv_server.tiers.remote.client import LostError
from hotkv_server.tiers.valkey.generation_keys import (
    GRACE_S,
    YOUNG_S,
    StoreClock,
    generation_key,
    get,
    now_us,
    parsed,
)
from hotkv_server.tiers.valkey.resp import ErrorReply, Reply, command
from hotkv_server.tiers.valkey.tier import ValkeyTier
from tests.contracts.flush_contract import (
    NAME,
    answer,
    flush,
    generation,
    keys_of,
    probe,
    read,
    write,
)
from tests.doubles.fault_proxy import Dam, FaultProxy, nothing
from tests.support.waiting import wait_for
from tests.tiers.valkey_support import Server, bench_over, running, tier_over


@pytest.fixture
def node_a(server: Server) -> Iterator[ValkeyTier]:
    with tier_over(f"unix:{server.path}", connections=1) as (tier, _):
        yield tier


def test_flush_between_parts_refuses_the_call(
    server: Server, proxy: FaultProxy, node_a: ValkeyTier
) -> None:
    now = generation(node_a)
    assert now and server.client.ttl(generation_key(NAME)) == -1, "a generation expires"
    keys = keys_of(now, PART_KEYS + 1)
    server.client.mset(dict.fromkeys(keys, b"x"))
    with tier_over(f"127.0.0.1:{proxy.port}", connections=1) as (node_b, _):
        assert probe(node_b, keys, {NAME: now}) == [Read.FOUND] * len(keys)
        first = b"".join(command(b"EXISTS", one) for one in keys[:PART_KEYS]) + b"".join(
            get(NAME).pieces
        )
        dam = Dam(len(first))
        proxy.on_command = dam
        done: list[list[int]] = []
        node_b.probe(
            keys, time.monotonic() + 20, lambda codes: done.append(codes.tolist()), {NAME: now}
        )
        assert dam.is_full.wait(60)
        flush(node_a)
        dam.opened.set()
        wait_for(lambda: done, "the call did not end")
        assert done == [[Read.ABSENT] * len(keys)]


@pytest.mark.parametrize("reply", [0, -1, b"", b"x", b"9" * 20, ErrorReply(b"WRONGTYPE no"), []])
def test_a_reply_that_is_no_generation_is_lost(reply: Reply) -> None:
    with pytest.raises(LostError):
        parsed(reply)


def test_a_generation_of_another_type_lets_nothing_pass(server: Server, node_a: ValkeyTier) -> None:
    server.client.rpush(generation_key(NAME), b"a")
    assert read(node_a, keys_of(1, 2), {NAME: 1}) == [Read.FAILED] * 2
    assert generation(node_a) is None and flush(node_a) is None


def test_control_calls_overtake_reads(proxy: FaultProxy, node_a: ValkeyTier) -> None:
    """A slow read must not delay a flush."""
    now = generation(node_a)
    keys = keys_of(now, 4)
    with bench_over(f"127.0.0.1:{proxy.port}", connections=1) as bench:
        write(bench, keys)
        dam = Dam(0)
        proxy.on_command = dam
        done: list[list[int]] = []
        reading = threading.Thread(
            target=lambda: done.append(read(bench.tier, keys, {NAME: now})), daemon=True
        )
        reading.start()
        assert dam.is_full.wait(60)
        proxy.on_command = nothing
        assert generation(bench.tier) == now
        raised = flush(bench.tier)
        assert raised and raised > now and not done
        dam.opened.set()
        reading.join(60)
        assert done == [[Read.ABSENT] * 4]


def info(run_id: bytes, now_s: float, up_s: int) -> bytes:
    lines = (b"run_id:%b", b"server_time_usec:%d", b"uptime_in_seconds:%d")
    return b"\r\n".join((b"# Server", *lines)) % (run_id, int(now_s * 1e6), up_s)


def test_just_started_servers_old_generations_are_distrusted() -> None:
    clock, start_s = StoreClock(), 1_790_000_000.0
    below = clock.restored_below(info(b"one", start_s + 2.9, 2), 100.0)
    assert begun(int(start_s * 1e6)) <= below <= begun(int((start_s + 1) * 1e6))
    # Uptime is in whole seconds; several answers narrow the start down.
    said, start = info(b"one", start_s + 3.0, 3), begun(int(start_s * 1e6))
    now = begun(int((start_s + 3.0) * 1e6))
    assert clock.restored_below(said, 100.1) == clock.restored_below(said, 100.1, now) == start
    assert clock.restored_below(said, 100.1, now + 1) == now + 2
    assert not clock.restored_below(info(b"one", start_s + 9.0, 9), 100.0 + GRACE_S)
    # Noticed 40 s late. A restart may lose the latest generation: none from before it is trusted
    # for GRACE_S.
    assert clock.restored_below(info(b"two", start_s + 100.0, 40), 300.0)
    assert not clock.restored_below(info(b"two", start_s + 100.0, 40), 300.0 + GRACE_S)
    assert not StoreClock().restored_below(info(b"one", start_s + YOUNG_S, int(YOUNG_S)), 0.0)
    much = b"# Server\r\nserver_time_usec:" + b"9" * 20
    for said in (None, b"", b"# Server\r\nuptime_in_seconds:x", much, ErrorReply(b"NOPERM no")):
        assert not clock.restored_below(said, 1.0)
        assert abs(now_us(said) - time.time_ns() // 1000) < 60_000_000


def test_what_a_server_brings_back_is_distrusted(tmp_path: Path) -> None:
    with (
        running(tmp_path / "kept", appendonly="yes", appendfsync="always") as server,
        tier_over(f"unix:{server.path}") as (tier, _),
    ):
        now = generation(tier)
        server.kill()
        server.start()
        wait_for(lambda: not tier.problem() and generation(tier), "the server is not reached")
        shown = answer(lambda done: tier.generations([NAME], time.monotonic() + 9, done))
        assert shown.generations == {NAME: now} and shown.restored_below > now
        raised = flush(tier)
        shown = answer(lambda done: tier.generations([NAME], time.monotonic() + 9, done))
        assert shown.generations == {NAME: raised} and raised >= shown.restored_below
        # Raises at one moment run ahead of the clock, so a generation from before the restart
        # may too.
        ahead = server.client.incrby(generation_key(NAME), begun(10**7))
        shown = answer(lambda done: tier.generations([NAME], time.monotonic() + 9, done))
        assert shown.generations == {NAME: ahead} and ahead < shown.restored_below
