"""Tests the Valkey tier over a real cluster: `tier_contract`, generation and blocks on different
servers, dead and moved servers."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hotkv_server.settings.tiers import ValkeySettings
from hotkv_server.tiers.protocol import Read, Write
from hotkv_server.tiers.valkey.cluster import NUM_SLOTS, ClusterPipe, slot_of
from hotkv_server.tiers.valkey.generation_keys import generation_key
from tests.contracts.flush_contract import (
    NAME,
    SharedStore,
    check_flushes,
    flush,
    generation,
    keys_of,
    read,
    write,
)
from tests.contracts.tier_contract import Bench, Codes, TierRig, check_tier, content, key
from tests.support.ports import free_ports
from tests.support.waiting import wait_for
from tests.tiers.cluster_support import NUM_NODES, QUICK_MS, Cluster, Node, running
from tests.tiers.valkey_support import bench_over, tier_over

GENERATION_KEY = generation_key(NAME)
PASSWORD = "correct-horse-battery"
RIGHTS = (
    "~hotkv/1/* +get +set +exists +unlink +incrby +hello +client|setname "
    "+cluster|slots +asking +wait"
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    wait_for(shared.is_well, "the cluster is not well")
    shared.flushall()
    return shared


def over(cluster: Cluster, **options: object) -> "contextlib.AbstractContextManager[Bench]":
    return bench_over(cluster.address, cluster=True, **options)


def test_a_cluster_keeps_the_contract(cluster: Cluster) -> None:
    @contextlib.contextmanager
    def make() -> Iterator[TierRig]:
        cluster.flushall()
        with tier_over(cluster.address, cluster=True) as (tier, arena):
            yield TierRig(tier, arena, lambda key, at: cluster.damage(key), cluster.killed)

    check_tier(make, seed=11)


def test_a_user_of_few_rights_reads_and_writes(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.touch(mode=0o600)
    path.write_text(PASSWORD)
    for one in cluster.nodes:
        one.client.execute_command("ACL", "SETUSER", "kv", "on", f">{PASSWORD}", *RIGHTS.split())
    with over(cluster, user="kv", password_file=path) as bench:
        bench.fill([1, 2], [0, 1])
        assert (bench.write([1, 2], [0, 1]) == Write.STORED).all()
        bench.check_read([1, 2], [4, 5])
    for one in cluster.nodes:
        one.client.execute_command("ACL", "SETUSER", "kv", "-cluster|slots")
    with over(cluster, user="kv", password_file=path) as bench:
        wait_for(bench.tier.problem, "no problem is known")
        assert "+cluster|slots" in bench.tier.problem()


def test_flushes_keep_their_contract(cluster: Cluster) -> None:
    owner = cluster.owner(GENERATION_KEY).client
    store = SharedStore(
        lambda **options: over(cluster, **options),
        lambda: owner.delete(GENERATION_KEY),
        lambda value: owner.set(GENERATION_KEY, value),
    )
    check_flushes(store)


def test_flush_answered_after_blocks_came_counts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with over(cluster) as node_a, over(cluster) as node_b:
        now = generation(node_a.tier)
        assert now
        keys = keys_of(now, 12)
        write(node_a, keys)
        asked, value = threading.Event(), ClusterPipe.value

        def flushed_after_the_last(self: ClusterPipe, *arguments: object) -> object:
            reply = value(self, *arguments)  # type: ignore[arg-type]
            if not self._sent:
                asked.set()
                cluster.owner(GENERATION_KEY).client.incr(GENERATION_KEY)
            return reply

        monkeypatch.setattr(ClusterPipe, "value", flushed_after_the_last)
        assert read(node_b.tier, keys, {NAME: now}) == [Read.ABSENT] * 12
        assert asked.is_set()


def begin_move(old: Node, new: Node, slots: set[int]) -> Callable[[Iterable[Node]], None]:
    """The returned function ends the move and tells these servers, in order."""
    ids = [one.client.execute_command("CLUSTER", "MYID") for one in (old, new)]
    for slot in slots:
        new.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        old.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])

    def end(told: Iterable[Node]) -> None:
        for one in told:
            for slot in slots:
                one.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])

    return end


def move(old: Node, new: Node, name: bytes) -> None:
    old.client.execute_command("MIGRATE", "127.0.0.1", new.port, name, 0, 5000)


def test_slots_that_move_cost_no_block(tmp_path: Path) -> None:
    """Servers answer ASK during the move, MOVED afterwards."""
    with running(tmp_path) as cluster, over(cluster, connections=1) as bench:
        numbers = list(range(12))
        bench.fill(numbers, numbers)
        assert (bench.write(numbers[:6], numbers[:6]) == Write.STORED).all()
        old = cluster.owner(key(0))
        new = next(one for one in cluster.nodes if one is not old)
        moving = [at for at in numbers if cluster.owner(key(at)) is old]
        assert any(at >= 6 for at in moving)
        end = begin_move(old, new, {slot_of(key(at)) for at in moving})
        assert (bench.write(numbers[6:], numbers[6:]) == Write.STORED).all()
        assert any(new.client.keys(key(at)) for at in moving)
        bench.check_read(numbers, numbers)
        for at in moving:
            move(old, new, key(at))
        bench.check_read(numbers, numbers)
        end((new, old, *cluster.nodes))
        bench.check_read(numbers, numbers)
        bench.check_read(numbers, numbers)
        # No request for the map, no redirection.
        before = maps_and_redirects(cluster)
        bench.check_read(numbers, numbers)
        assert maps_and_redirects(cluster) == before and not bench.tier.problem()


def maps_and_redirects(cluster: Cluster) -> list[tuple[object, object]]:
    """Per server, how often it has sent its map, and answered MOVED."""
    said = [one.client.info("all") | one.client.info("errorstats") for one in cluster.nodes]
    return [(one.get("cmdstat_cluster|slots"), one.get("errorstat_MOVED")) for one in said]


def test_failover_under_load_costs_no_block(tmp_path: Path) -> None:
    """The killed server has the generation."""
    numbers = list(range(24))
    with running(tmp_path) as cluster, over(cluster, connections=2) as bench:
        victim = cluster.owner(GENERATION_KEY)
        with cluster.replica_of(victim, tmp_path / "replica") as replica:
            bench.fill(numbers, numbers)
            assert (bench.write(numbers, numbers) == Write.STORED).all()
            with over(cluster) as other:
                before = generation(other.tier)
                after = flush(other.tier)
            assert before and after and after > before
            assert victim.client.wait(1, 5000) == 1
            ended: list[Codes] = []
            for _ in range(20):
                blocks = bench.blocks(numbers, numbers)
                bench.tier.read(blocks, time.monotonic() + 5, ended.append)
            cluster.suspect_after(QUICK_MS)
            victim.kill()
            wait_for(lambda: len(ended) == 20, "a read did not end")
            assert {Read.FOUND, Read.FAILED} >= {int(code) for one in ended for code in one}

            def serves() -> bool:
                bench.arena[:] = 0
                return bool((bench.read(numbers, numbers) == Read.FOUND).all())

            wait_for(serves, "the replica does not take over")
            assert all(np.array_equal(bench.slot(at), content(at)) for at in numbers)
            assert replica.client.info("replication")["role"] == "master"
            with over(cluster) as other:
                wait_for(lambda: generation(other.tier) == after)


def test_a_flush_that_no_replica_has_is_pending(tmp_path: Path) -> None:
    with running(tmp_path) as cluster, over(cluster) as bench:
        owner = cluster.owner(GENERATION_KEY)
        # No replica yet.
        wait_for(lambda: flush(bench.tier))
        with cluster.replica_of(owner, tmp_path / "replica") as replica:
            before = flush(bench.tier)
            with replica.stopped():
                assert flush(bench.tier) is None
                # Each raise makes all nodes flush, so a retry only waits.
                raised = generation(bench.tier)
                assert raised and flush(bench.tier, is_retry=True) is None
                assert generation(bench.tier) == raised
                # Else blocks stored since the last raise would be found.
                assert flush(bench.tier) is None and (generation(bench.tier) or 0) > raised
            wait_for(lambda: owner.client.wait(1, 500) == 1)
            wait_for(lambda: (flush(bench.tier) or 0) > (before or 0))
            # The old server's replica does not count for the new one.
            new = next(one for one in cluster.nodes if one is not owner)
            end = begin_move(owner, new, {slot_of(GENERATION_KEY)})
            move(owner, new, GENERATION_KEY)
            assert flush(bench.tier) is None
            end((new, owner))
            wait_for(lambda: (flush(bench.tier) or 0) > (before or 0))


def test_slots_of_keys(cluster: Cluster) -> None:
    for name in (
        b"",
        b"a",
        b"hotkv/1/x",
        b"{a}b",
        b"b{a}",
        b"{}a",
        b"}{",
        b"{a",
        b"{{a}}",
        b"a}{b}",
    ):
        asked = cluster.nodes[0].client.execute_command("CLUSTER", "KEYSLOT", name)
        assert slot_of(name) == asked


def test_a_pipe_that_is_closed_leaves_no_connection(cluster: Cluster) -> None:
    settings = ValkeySettings(address=cluster.address, cluster=True)

    def held() -> list[int]:
        listed = [one.client.client_list() for one in cluster.nodes]
        return [sum(client["name"] == "hotkv" for client in one) for one in listed]

    # Servers notice closed tiers late.
    wait_for(lambda: held() == [0] * NUM_NODES, "an earlier test has left a connection")
    pipe = ClusterPipe(settings, time.monotonic() + 60)
    assert held() == [1] * NUM_NODES
    assert pipe.is_fresh()
    cluster.nodes[1].client.client_kill_filter(skipme=True)
    wait_for(lambda: not pipe.is_fresh(), "an ended connection does not show")
    pipe.close()
    wait_for(lambda: held() == [0] * NUM_NODES, "a connection stays")


def test_hung_server_is_given_up_in_time(cluster: Cluster) -> None:
    with over(cluster, connections=1, timeout_s=0.3, connect_timeout_s=0.3) as bench:
        numbers = list(range(16))
        bench.fill(numbers, numbers)
        wait_for(lambda: Write.FAILED not in bench.write(numbers, numbers), "nothing is stored")
        with cluster.owner(key(1)).stopped():
            begun_s = time.monotonic()
            codes = bench.read(numbers, numbers).tolist()
            assert codes[1] == Read.FAILED and {*codes} <= {Read.FOUND, Read.FAILED}
            assert time.monotonic() - begun_s > 0.25
            wait_for(bench.tier.problem, "no problem is known")
            bench.arena[:] = 0xEE
        time.sleep(0.3)
        assert (bench.arena == 0xEE).all()
        wait_for(lambda: (bench.read(numbers, numbers) == Read.FOUND).all(), "it did not come back")


@pytest.mark.parametrize("has_old_map", [False, True])
def test_server_outside_the_cluster_hides_none(
    cluster: Cluster, tmp_path: Path, has_old_map: bool
) -> None:
    """Without slots, or (`has_old_map`) with all slots where no server is."""
    gone, *ports = free_ports(3)
    left = Node(tmp_path / "left", *ports)
    try:
        if has_old_map:
            left.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, NUM_SLOTS - 1)
            left.client.config_set("cluster-announce-port", gone)
        with bench_over(f"127.0.0.1:{left.port},{cluster.address}", cluster=True) as bench:
            bench.fill([1], [1])
            assert bench.write([1], [1]).tolist() == [Write.STORED]
    finally:
        left.kill()


def test_servers_of_a_cluster() -> None:
    settings = ValkeySettings(address="a:1, [::1]:2,b:3", cluster=True)
    assert settings.hosts_and_ports == [("a", 1), ("::1", 2), ("b", 3)]
    with_comma = ValkeySettings(address="unix:/run/a,b.sock")
    assert with_comma.unix_path == "/run/a,b.sock"
