"""Clients that send malformed messages, or do not read, wait; nobody else does."""

import itertools
import threading
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
from tests.server.support import hashes
from tests.support.waiting import wait_for

Make = Callable[..., PagedEngine]
LOOKUP = "/hotkv.v1.CacheService/Lookup"
TURNS = 10


@given(st.floats(1, 1e4), st.lists(st.floats(0, 5), min_size=1, max_size=60))
def test_a_pace_is_kept(per_s: float, gaps_s: list[float]) -> None:
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
    flags = ("--arena.slab-bytes", "64KiB", "--security.malformed-per-s", "1")
    with runtime_folder(64 << 20) as folder, Server(folder, "16MiB", *flags) as server:
        server.wait_ready()
        quiet, num_overtaken = engine(server.target, engine_id="quiet"), 0
        with grpc.insecure_channel(server.target) as channel:
            lookup = channel.unary_unary(LOOKUP)
            # More than may come at once.
            nonsense = [lookup.future(b"\xff" * 100, timeout=30) for _ in range(4)]
            for _ in range(TURNS):
                nonsense.append(lookup.future(b"\xff" * 100, timeout=30))
                for _ in range(5):
                    quiet.session.lookup([GroupHashes(0, hashes(1))]).result(60)
                num_overtaken += not nonsense[-1].done()
            assert {call.code() for call in nonsense} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert num_overtaken > TURNS // 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_hashes", "most_calls"), [(4096, OUTBOX_MESSAGES), ((1 << 17) - 1024, 21)]
)
def test_who_does_not_read_is_asked_for_nothing_more_and_closed(
    own_server: Server, engine: Make, num_hashes: int, most_calls: int
) -> None:
    """Many answers are bounded by their number, few large ones by their bytes."""
    quiet = engine(own_server.target, engine_id="quiet")
    deaf = PagedEngine(own_server.target, engine_id="deaf", model="deaf")
    asked, ended, num_sent = [GroupHashes(0, hashes(num_hashes))], threading.Event(), 0

    def requests() -> Iterator[_wire.Request]:
        nonlocal num_sent
        yield _wire.open_session(deaf.session.config)
        request = _wire.lookup(asked, 32)
        for number in range(1, most_calls):
            request.request_id = num_sent = number
            yield request
        ended.wait()

    options = [*channels.OPTIONS, ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(own_server.target, options) as channel:
        call = _wire.connect(_wire.Stub(channel), requests())
        try:
            wait_for(lambda: "does not read what it is sent" in own_server.log.read_text())
            # The answers that were sent come first, then the status.
            with pytest.raises(grpc.RpcError) as refused:
                list(call)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        finally:
            ended.set()
            call.cancel()
    print(f"{num_sent} calls were taken")
    quiet.session.lookup(asked).result(60)
    deaf.close()
