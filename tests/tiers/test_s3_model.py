"""Two nodes over the same bucket agree with a dict: found blocks are right, and a node finds the
blocks that it knows."""

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("obstore", reason="obstore speaks S3")

from hotkv_server.testing.tier_contract import Bench
from hotkv_server.tiers.protocol import Read, Write
from hotkv_server.tiers.s3.packs import list_bytes
from tests.tiers.s3_support import Server, bench_over, new_prefix, read, write

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


def key(number: int) -> bytes:
    # The keys belong to three key spaces, so a write becomes up to three packs.
    return b"hotkv/1/0%d/1/0/%032x" % (number % 3, number)


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_two_nodes_agree_with_a_dict(
    s3_server: Server, steps: list[tuple[str, int, list[int]]]
) -> None:
    prefix = new_prefix()
    # For each node: the blocks that it stored or found, unchanged since. It must find them again.
    sure: list[set[int]] = [set(), set()]
    ever: set[int] = set()
    with contextlib.ExitStack() as stack:

        def started() -> Bench:
            return stack.enter_context(bench_over(s3_server, prefix))

        nodes = [started(), started()]
        for what, who, given_to_it in steps:
            if what == "write":
                codes = write(nodes[who], given_to_it, key)
                assert set(codes) <= {Write.STORED, Write.PRESENT}
                for number, code in zip(given_to_it, codes, strict=True):
                    assert code == Write.PRESENT or number not in sure[who]
                    ever.add(number)
                    if code == Write.STORED:
                        sure[who].add(number)
            elif what == "read":
                codes = read(nodes[who], given_to_it, key)
                for number, code in zip(given_to_it, codes, strict=True):
                    assert code == Read.FOUND or number not in sure[who]
                    assert code != Read.FAILED and not nodes[who].tier.problem()
                    assert code == Read.ABSENT or number in ever
                    (sure[who].add if code == Read.FOUND else sure[who].discard)(number)
            elif what == "forget":
                nodes[who].tier.forget([key(number) for number in given_to_it])
                sure[who] -= set(given_to_it)
            elif what == "restart":
                nodes[who] = started()
                sure[who] = set()
            elif what == "damage" and (packs := s3_server.packs(prefix)):
                for at in given_to_it:
                    path = packs[at % len(packs)]
                    if body := s3_server.bytes_of(path):
                        s3_server.flip(path, at % len(body))
                # Any block may be found or not: nodes keep lists of packs that the bucket has lost.
                sure = [set(), set()]
            elif what == "expire" and (packs := s3_server.packs(prefix)):
                s3_server.store.delete(packs[-1])
                sure = [set(), set()]
            elif what == "cut" and (packs := s3_server.packs(prefix)):
                body = s3_server.bytes_of(packs[-1])
                s3_server.store.put(packs[-1], body[: given_to_it[0] % (len(body) or 1)])
                sure = [set(), set()]
        # A node that starts now finds blocks that are stored now.
        everything = list(range(12))
        write(nodes[0], everything, key)
        codes = read(nodes[0], everything, key)
        lost = [number for number in everything if codes[number] != Read.FOUND]
        write(nodes[0], lost, key)
        found = read(started(), everything, key)
        again = read(nodes[0], everything, key)
        assert again == [Read.FOUND] * 12
        assert all(code in (Read.FOUND, Read.CORRUPT, Read.ABSENT) for code in found)
        assert all(list_bytes(path.rpartition("/")[2]) for path in s3_server.packs(prefix))
