"""Tests the S3 tier over a real server: `tier_contract`, few requests, two nodes against a dict,
damaged and deleted blocks."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("obstore", reason="obstore speaks S3")

from hotkv_server.tiers.protocol import Codes, Read, Write
from hotkv_server.tiers.s3 import client, lister
from hotkv_server.tiers.s3.packs import list_bytes
from tests.contracts import flush_contract
from tests.contracts.flush_contract import answer, blocks_of
from tests.contracts.tier_contract import SLOT_BYTES, Bench, check_round_trip, check_tier
from tests.doubles.fault_proxy import FaultProxy
from tests.server.certificates import Authority
from tests.support.waiting import wait_for
from tests.tiers.s3_support import (
    SPACE,
    Server,
    bench_over,
    key,
    new_prefix,
    probe,
    proxied,
    read,
    rig_maker,
    write,
)
from tests.tiers.support import Gate, tls_proxy


def test_odd_keys(s3_server: Server) -> None:
    """One key twice, and one that hotkv would not make."""
    with bench_over(s3_server, new_prefix()) as bench:
        bench.fill([1, 2, 1, 3], range(4))
        blocks = blocks_of([key(1), key(2), key(1), b"elsewhere"], 0, {})
        codes, _ = bench.answer(blocks)
        assert codes.tolist() == [Write.STORED, Write.STORED, Write.PRESENT, Write.FAILED]
        assert read(bench, [1, 2, 1]) == [Read.FOUND] * 3
        assert flush_contract.read(bench.tier, [b"elsewhere"], {}) == [Read.ABSENT]


class Requests:
    """Counts requests by method and folder."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.counts: Counter[str] = Counter()
        proxy.on_command = self

    def __call__(self, piece: bytes) -> Iterator[bytes]:
        method, _, rest = piece[:400].partition(b" ")
        if method in (b"GET", b"PUT", b"HEAD", b"DELETE", b"POST"):
            place = rest.split(b" ")[0].decode()
            kind = "LIST" if "?list-type" in place else method.decode()
            self.counts[f"{kind} {'packs' if 'blocks' in place else 'other'}"] += 1
        yield piece

    def taken(self) -> dict[str, int]:
        """Counts since the last call."""
        counts, self.counts = dict(self.counts), Counter()
        return counts


def test_a_chain_costs_few_requests(s3_server: Server) -> None:
    prefix, chain = new_prefix(), list(range(32))
    with proxied(s3_server) as (proxy, over_it):
        options = {"refresh_s": 3600, "connections": 1, **over_it}
        with bench_over(s3_server, prefix, **options) as node_a:
            assert read(node_a, [99]) == [Read.ABSENT]
            requests = Requests(proxy)
            assert write(node_a, chain) == [Write.STORED] * 32
            assert requests.taken() == {"PUT packs": 1}
            assert read(node_a, chain) == [Read.FOUND] * 32
            assert requests.taken() == {"GET packs": 1}
            assert read(node_a, [*chain[:9], 77, *chain[11:20]]).count(Read.FOUND) == 18
            assert requests.taken() == {"GET packs": 1}
            assert probe(node_a, chain * 10) == [Read.FOUND] * 320
            assert probe(node_a, [77, 78]) == [Read.ABSENT] * 2
            # An old generation finds nothing, and hides no newer packs.
            s3_server.store.put(f"{prefix}/generations/1/0a", b"7")
            old = [key(1, "0a/6")]
            assert flush_contract.probe(node_a.tier, old, {"0a": 6}) == [Read.ABSENT]
            assert requests.taken() == {"LIST packs": 1, "GET other": 1}
            assert probe(node_a, chain) == [Read.FOUND] * 32
            # By the index the block is larger: no request.
            half = blocks_of([key(1)], 32, {})
            half.num_bytes[:] //= 2
            codes = answer(lambda done: node_a.tier.read(half, time.monotonic() + 20, done))
            assert codes.tolist() == [Read.CORRUPT] and requests.taken() == {}
        with bench_over(s3_server, prefix, **options) as node_b:
            # Not counted: how the node checks its connection.
            wait_for(lambda: requests.counts["PUT other"] == 3, "it does not connect")
            assert requests.taken() == {"LIST other": 1, "PUT other": 3, "GET other": 1}
            assert probe(node_b, chain) == [Read.FOUND] * 32
            assert requests.taken() == {"LIST packs": 1, "GET packs": 1}
            assert read(node_b, chain) == [Read.FOUND] * 32
            assert requests.taken() == {"GET packs": 1}


def test_damaged_block_is_corrupt_once_per_node(s3_server: Server) -> None:
    prefix = new_prefix()
    with bench_over(s3_server, prefix) as node_a, bench_over(s3_server, prefix) as node_b:
        assert write(node_a, [1, 2, 3]) == [Write.STORED] * 3
        (path,) = s3_server.packs(prefix)
        s3_server.flip(path, list_bytes(path.rpartition("/")[2]) + 2 * SLOT_BYTES - 1)
        for node in (node_a, node_b):
            assert read(node, [1, 2, 3]) == [Read.FOUND, Read.CORRUPT, Read.FOUND]
            assert node.tier.figures().corrupt_blocks == 1
        assert read(node_a, [2]) == probe(node_a, [2]) == [Read.ABSENT]
        assert write(node_a, [2]) == [Write.STORED]
        wait_for(lambda: read(node_b, [2]) == [Read.FOUND], "the new one is not found")
    # A damaged pack and a newer one.
    with bench_over(s3_server, prefix) as node_c:
        assert read(node_c, [1, 2, 3]) == [Read.FOUND] * 3


def test_a_pack_that_the_lifecycle_removed_is_absent(s3_server: Server) -> None:
    """It is removed while node B lists the bucket."""
    prefix = new_prefix()
    with bench_over(s3_server, prefix) as node_a, proxied(s3_server) as (proxy, over_it):
        assert write(node_a, [1, 2]) == [Write.STORED] * 2
        assert write(node_a, [3]) == [Write.STORED]
        gate = Gate(b"GET", "/blocks/1/")
        proxy.on_command = gate
        with bench_over(s3_server, prefix, **over_it) as node_b:
            ended: list[Codes] = []
            node_b.tier.probe([key(1), key(3)], time.monotonic() + 20, ended.append)
            # About to read their lists.
            assert gate.is_full.wait(60)
            s3_server.store.delete(s3_server.packs(prefix)[1])
            gate.opened.set()
            wait_for(lambda: ended, "the probe did not end")
            assert ended[0].tolist() == [Read.ABSENT, Read.FOUND]
        assert read(node_a, [1, 2, 3]) == [Read.ABSENT, Read.ABSENT, Read.FOUND]
        # It was in the deleted pack too.
        assert probe(node_a, [2]) == [Read.ABSENT]
        assert write(node_a, [2]) == [Write.STORED] and not node_a.tier.problem()


def test_a_wait_for_a_listing_is_no_stall(s3_server: Server) -> None:
    """Listing a large bucket takes long, while other key spaces' reads go on."""
    prefix, ended = new_prefix(), list[Codes]()
    with bench_over(s3_server, prefix) as node_a, proxied(s3_server) as (proxy, over_it):
        assert write(node_a, [1]) == [Write.STORED]
        proxy.on_command = gate = Gate(b"GET", "/blocks/1/")
        with bench_over(s3_server, prefix, **over_it) as node_b:
            node_b.tier.probe([key(1)], time.monotonic() + 60, ended.append)
            assert gate.is_full.wait(60)
            assert node_b.tier.stalled_s(time.monotonic() + 1000) == 0
            gate.opened.set()
            wait_for(lambda: ended, "the probe did not end")
            assert ended[0].tolist() == [Read.FOUND]


def test_forbidden_objects_cost_only_their_blocks(
    s3_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    prefix, forbidden = new_prefix(), list[str]()

    def unsigned(piece: bytes) -> Iterator[bytes]:
        line = piece[:500].partition(b"\r\n")[0].decode()
        is_forbidden = any(part in line for part in forbidden)
        yield piece.replace(b"\r\nauthorization:", b"\r\nx:") if is_forbidden else piece

    with bench_over(s3_server, prefix) as node_a, proxied(s3_server) as (proxy, over_it):
        assert write(node_a, [1]) == write(node_a, [2]) == [Write.STORED]
        second, first = s3_server.packs(prefix)
        forbidden.append(first)
        proxy.on_command = unsigned
        with bench_over(s3_server, prefix, **over_it) as node_b:
            # First the first pack's list, later the second's blocks.
            assert read(node_b, [1, 2]) == [Read.ABSENT, Read.FOUND]
            forbidden.clear()
            wait_for(lambda: read(node_b, [1, 2]) == [Read.FOUND] * 2, "a pack is not found")
            node_b.tier.forget([key(1)])
            wait_for(lambda: probe(node_b, [1]) == [Read.ABSENT], "it is not forgotten")
            forbidden.append(second)
            assert read(node_b, [1, 2]) == [Read.ABSENT, Read.FAILED]
            # It may be allowed again.
            assert write(node_b, [1, 2]) == [Write.STORED, Write.PRESENT]
            assert read(node_b, [1, 2]) == [Read.FOUND, Read.FAILED]
            assert not node_b.tier.problem()
            forbidden.remove(second)
            assert read(node_b, [1, 2]) == [Read.FOUND] * 2
            forbidden.append(f"/generations/1/{flush_contract.NAME}")
            assert (
                flush_contract.generation(node_b.tier) is flush_contract.flush(node_b.tier) is None
            )
            assert flush_contract.generation(node_b.tier) is None
            assert caplog.text.count(f"usable generation of fingerprint={flush_contract.NAME}") == 1
            assert flush_contract.generation(node_b.tier, "0b") and not node_b.tier.problem()
            # Unknown, not absent.
            forbidden[:] = [""]
            assert read(node_b, [1]) == [Read.FAILED]
            assert "allow s3:GetObject" in node_b.tier.problem()
            forbidden.clear()
            wait_for(lambda: not node_b.tier.problem(), "the problem stays")
            assert read(node_b, [1, 2]) == [Read.FOUND] * 2


def test_two_servers_of_one_name_are_told(
    s3_server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Packs of one microsecond then have one name."""
    monkeypatch.setattr(client, "_now_us", lambda: 10**15)
    prefix = new_prefix()
    with bench_over(s3_server, prefix, node="a") as one:
        assert write(one, [1]) == [Write.STORED]
        with bench_over(s3_server, prefix, node="a") as other:
            assert write(other, [2]) == [Write.FAILED]
            assert "give each server another node" in caplog.text
        assert read(one, [1, 2]) == [Read.FOUND, Read.ABSENT]
    for number in (3, 4):
        with bench_over(s3_server, prefix) as unnamed:
            assert write(unnamed, [number]) == [Write.STORED]


def test_other_objects_in_the_folder_do_no_harm(s3_server: Server) -> None:
    prefix = new_prefix()
    folder = f"{prefix}/blocks/1/{SPACE}"
    for name in ("readme", "!", "~", f"{5:016}-node-1-900", f"{5:016}-node-1-1/more"):
        s3_server.store.put(f"{folder}/{name}", b"<html>" * 100)
    with bench_over(s3_server, prefix) as node_a, bench_over(s3_server, prefix) as node_b:
        assert write(node_a, [1]) == [Write.STORED]
        assert read(node_b, [1, 2]) == [Read.FOUND, Read.ABSENT]


def test_key_spaces_beyond_the_bound_relist(
    s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lister, "MAX_SPACES", 2)
    keys = [key(1, f"0a/{generation}") for generation in range(5)]
    with bench_over(s3_server, new_prefix()) as bench:
        flush_contract.write(bench, keys)
        assert "Lister(2 key spaces" in repr(bench.tier._shared)
        assert flush_contract.read(bench.tier, keys, {}) == [Read.FOUND] * 5


@pytest.mark.parametrize("connections", [1, 6])
def test_a_bucket_keeps_the_contract(s3_server: Server, connections: int) -> None:
    with proxied(s3_server) as (proxy, _):
        check_tier(rig_maker(s3_server, proxy, connections=connections), seed=connections)


def test_blocks_come_back_over_tls(s3_server: Server, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path, "ca"), Authority(tmp_path, "other")
    with tls_proxy(("127.0.0.1", s3_server.port), authority) as proxy:
        endpoint = f"https://127.0.0.1:{proxy.port}"
        make = rig_maker(s3_server, proxy, endpoint=endpoint, ca_file=authority.path)
        check_round_trip(make, seed=3)
        options = {"endpoint": endpoint, "ca_file": other.path}
        with bench_over(s3_server, new_prefix(), **options) as bench:
            wait_for(bench.tier.problem, "no problem")
            assert "certificate that does not pass" in bench.tier.problem()
            other.path.write_bytes(authority.path.read_bytes())
            wait_for(lambda: not bench.tier.problem(), "ca_file is not read again")


NUMBERS = st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 1), NUMBERS),
        st.tuples(st.just("read"), st.integers(0, 1), NUMBERS),
        st.tuples(st.just("forget"), st.integers(0, 1), NUMBERS),
        st.tuples(st.just("restart"), st.integers(0, 1), st.just([])),
        st.tuples(st.just("damage"), st.integers(0, 1), st.lists(st.integers(0, 1 << 20))),
        st.tuples(st.just("expire"), st.just(0), st.just([])),
        st.tuples(st.just("cut"), st.just(0), st.lists(st.integers(0, 1 << 20), min_size=1)),
    ),
    max_size=12,
)


def key_of_three(number: int) -> bytes:
    """Of one of three key spaces, so a write makes up to three packs."""
    return b"hotkv/1/0%d/1/0/%032x" % (number % 3, number)


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_two_nodes_agree_with_a_dict(
    s3_server: Server, steps: list[tuple[str, int, list[int]]]
) -> None:
    prefix = new_prefix()
    # Per node what it must find: stored or found, and nothing flushed, damaged or deleted since.
    sure: list[set[int]] = [set(), set()]
    ever: set[int] = set()
    with contextlib.ExitStack() as stack:

        def started() -> Bench:
            return stack.enter_context(bench_over(s3_server, prefix))

        nodes = [started(), started()]
        for what, who, given_to_it in steps:
            if what == "write":
                codes = write(nodes[who], given_to_it, key_of_three)
                assert set(codes) <= {Write.STORED, Write.PRESENT}
                for number, code in zip(given_to_it, codes, strict=True):
                    assert code == Write.PRESENT or number not in sure[who]
                    ever.add(number)
                    if code == Write.STORED:
                        sure[who].add(number)
            elif what == "read":
                codes = read(nodes[who], given_to_it, key_of_three)
                for number, code in zip(given_to_it, codes, strict=True):
                    assert code == Read.FOUND or number not in sure[who]
                    assert code != Read.FAILED and not nodes[who].tier.problem()
                    assert code == Read.ABSENT or number in ever
                    (sure[who].add if code == Read.FOUND else sure[who].discard)(number)
            elif what == "forget":
                nodes[who].tier.forget([key_of_three(number) for number in given_to_it])
                sure[who] -= set(given_to_it)
            elif what == "restart":
                nodes[who] = started()
                sure[who] = set()
            elif what == "damage" and (packs := s3_server.packs(prefix)):
                for at in given_to_it:
                    path = packs[at % len(packs)]
                    if body := s3_server.bytes_of(path):
                        s3_server.flip(path, at % len(body))
                # Nodes still know the pack's list.
                sure = [set(), set()]
            elif what == "expire" and (packs := s3_server.packs(prefix)):
                s3_server.store.delete(packs[-1])
                sure = [set(), set()]
            elif what == "cut" and (packs := s3_server.packs(prefix)):
                body = s3_server.bytes_of(packs[-1])
                s3_server.store.put(packs[-1], body[: given_to_it[0] % (len(body) or 1)])
                sure = [set(), set()]
        everything = list(range(12))
        write(nodes[0], everything, key_of_three)
        codes = read(nodes[0], everything, key_of_three)
        lost = [number for number in everything if codes[number] != Read.FOUND]
        write(nodes[0], lost, key_of_three)
        found = read(started(), everything, key_of_three)
        again = read(nodes[0], everything, key_of_three)
        assert again == [Read.FOUND] * 12
        assert all(code in (Read.FOUND, Read.CORRUPT, Read.ABSENT) for code in found)
        assert all(list_bytes(path.rpartition("/")[2]) for path in s3_server.packs(prefix))
