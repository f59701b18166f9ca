"""Clients that send malformed messages, or do not read, wait; nobody else does."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.processes import Server, runtime_folder
from hotkv_client import GroupHashes, channels
from hotkv_client.testing import PagedEngine
from hotkv_client.wire import requests as _wire
from hotkv_server.node.session import OUTBOX_MESSAGES
from hotkv_server.wire.guard.limits import BURST_S, MAX_WAIT_S, Pace
from tests.support.waiting import wait_for

Make = Callable[..., PagedEngine]
LOOKUP = "/hotkv.v1.CacheService/Lookup"
TURNS = 10


@given(st.floats(1, 1e4), st.lists(st.floats(0, 5), min_size=1, max_size=60))
def test_a_pace_is_kept(per_s: float, gaps_s: list[float]) -> None:
    """Between two turns that did not wait as long as anybody must lie no more than the pace
    allows."""
    pace, now_s, ends = Pace(per_s), 100.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        wait_s = pace.wait_s(now_s)
        assert 0 <= wait_s <= MAX_WAIT_S
        if wait_s < MAX_WAIT_S:
            ends.append(now_s + wait_s)
    assert ends == sorted(ends)
    for (i, first_s), (j, last_s) in itertools.combinations(enumerate(ends), 2):
        assert j - i <= per_s * (last_s - first_s + BURST_S) + 1 + 1e-6


def test_what_comes_seldom_does_not_wait() -> None:
    pace = Pace(10.0)
    assert all(pace.wait_s(100.0 + turn) == 0 for turn in range(50))


@pytest.mark.long
def test_who_sends_nonsense_waits_and_others_do_not(engine: Make) -> None:
    """Calls that are sent after nonsense are answered before it, and it is refused all the same,
    with the canonical code."""
    flags = ("--arena.slab-bytes", "64KiB", "--security.malformed-per-s", "1")
    with runtime_folder(64 << 20) as folder, Server(folder, "16MiB", *flags) as server:
        server.wait_ready()
        quiet, num_overtaken = engine(server.target, engine_id="quiet"), 0
        with grpc.insecure_channel(server.target) as channel:
            lookup = channel.unary_unary(
                LOOKUP, request_serializer=bytes, response_deserializer=bytes
            )
            nonsense = [
                lookup.future(b"\xff" * 100, timeout=30) for _ in range(4)
            ]  # More than may come at once.
            for _ in range(TURNS):
                nonsense.append(lookup.future(b"\xff" * 100, timeout=30))
                for _ in range(5):
                    quiet.session.lookup([GroupHashes(0, [os.urandom(32)])]).result(60)
                num_overtaken += not nonsense[-1].done()
            assert {call.code() for call in nonsense} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert num_overtaken > TURNS // 2


@pytest.mark.long
def test_who_does_not_read_is_asked_for_nothing_more_and_closed(
    own_server: Server, engine: Make
) -> None:
    """What is answered and unread stays small."""
    quiet = engine(own_server.target, engine_id="quiet")
    deaf = PagedEngine(own_server.target, engine_id="deaf", model="deaf")
    hashes = [os.urandom(32) for _ in range(4096)]
    num_sent = 0

    def requests() -> Iterator[_wire.Request]:
        nonlocal num_sent
        yield _wire.open_session(deaf.session.config)
        for number in range(1, 100_000):
            request = _wire.lookup([GroupHashes(0, hashes)], 32)
            request.request_id = number
            num_sent = number
            yield request

    with grpc.insecure_channel(own_server.target, channels.OPTIONS) as channel:
        call = _wire.connect(_wire.Stub(channel), requests())
        # The answers that were sent come first, then the status.
        with pytest.raises(grpc.RpcError) as refused:
            until_s = time.monotonic() + 60
            while (
                "does not read what it is sent" not in own_server.log.read_text()
                and time.monotonic() < until_s
            ):
                time.sleep(0.05)
            for _ in call:
                pass
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    print(f"{num_sent} calls were taken")
    assert num_sent < OUTBOX_MESSAGES
    quiet.session.lookup([GroupHashes(0, hashes)]).result(60)
    deaf.close()


@pytest.mark.long
def test_few_large_answers_that_nobody_reads_are_not_kept_for_ever(
    own_server: Server, engine: Make
) -> None:
    """Fewer than count as many, from a client that then asks for nothing more."""
    quiet = engine(own_server.target, engine_id="quiet")
    deaf = PagedEngine(own_server.target, engine_id="deaf", model="deaf")
    hashes, ended = [os.urandom(32) for _ in range((1 << 17) - 1024)], threading.Event()

    def requests() -> Iterator[_wire.Request]:
        yield _wire.open_session(deaf.session.config)
        request = _wire.lookup([GroupHashes(0, hashes)], 32)
        for number in range(1, 21):
            request.request_id = number
            yield request
        ended.wait()

    with grpc.insecure_channel(
        own_server.target, [*channels.OPTIONS, ("grpc.http2.bdp_probe", 0)]
    ) as channel:
        call = _wire.connect(_wire.Stub(channel), requests())
        try:
            wait_for(lambda: "does not read what it is sent" in own_server.log.read_text())
        finally:
            ended.set()
            call.cancel()
    quiet.session.lookup([GroupHashes(0, hashes[:16])]).result(60)
    deaf.close()
