"""Faults that only a Valkey server has; `test_remote_faults` has the others."""

from collections.abc import Iterator

from hotkv_server.testing.fault_proxy import FaultProxy, nothing
from hotkv_server.testing.tier_contract import Bench
from hotkv_server.tiers.protocol import Read, Write
from tests.support.waiting import wait_for
from tests.tiers.valkey_support import Server, bench_over


def stored(bench: Bench) -> Bench:
    """Stores blocks 1, 2, 3, and returns the bench with open connections."""
    bench.fill([1, 2, 3], [0, 1, 2])
    assert (bench.write([1, 2, 3], [0, 1, 2]) == Write.STORED).all()
    bench.check_read([1, 2, 3], [4, 5, 6])
    bench.arena[:] = 0
    return bench


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
