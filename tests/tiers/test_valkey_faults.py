"""Faults that only a Valkey has, beside those of `test_remote_faults`: one that is stopped, killed
or restarted costs hits, never bytes."""

from collections.abc import Iterator
from pathlib import Path

from hotkv_server.testing.fault_proxy import FaultProxy, nothing
from hotkv_server.testing.tier_contract import Bench
from hotkv_server.tiers.protocol import Read, Write
from tests.support.waiting import wait_for
from tests.tiers.valkey_support import Server, bench_over, running


def stored(bench: Bench) -> Bench:
    """Returns the bench, with blocks 1, 2, 3 in the store and connections that are open."""
    bench.fill([1, 2, 3], [0, 1, 2])
    assert (bench.write([1, 2, 3], [0, 1, 2]) == Write.STORED).all()
    bench.check_read([1, 2, 3], [4, 5, 6])
    bench.arena[:] = 0
    return bench


def test_a_server_that_is_away_at_the_start_is_known_without_a_call(tmp_path: Path) -> None:
    with bench_over(f"unix:{tmp_path}/v.sock") as bench:
        wait_for(bench.tier.problem, "no problem is known")
        assert "can't be reached: No such file" in bench.tier.problem()
        with running(tmp_path):
            wait_for(lambda: not bench.tier.problem(), "the problem stays")
            stored(bench)


def test_what_is_left_over_on_a_connection_ends_it(proxy: FaultProxy) -> None:
    def chatty(piece: bytes) -> Iterator[bytes]:
        yield piece + b":1\r\n"

    with bench_over(f"127.0.0.1:{proxy.port}", connections=1) as bench:
        stored(bench)
        proxy.on_reply = chatty
        assert bench.probe([1]).tolist() == [Read.FOUND]
        proxy.on_reply = nothing
        before = proxy.num_connections
        assert bench.probe([9, 1, 8]).tolist() == [Read.ABSENT, Read.FOUND, Read.ABSENT]
        assert proxy.num_connections == before + 1


def test_closing_gives_connections_back(server: Server) -> None:
    before = len(server.client.client_list())
    with bench_over(f"unix:{server.path}", connections=3) as bench:
        stored(bench)
        names = [client["name"] for client in server.client.client_list()]
        assert 1 <= names.count("hotkv") <= 3
    wait_for(lambda: len(server.client.client_list()) == before, "connections are left")
