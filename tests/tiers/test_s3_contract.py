"""The tier in S3 keeps the contract over a real server, and over few and many connections."""

from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="obstore speaks S3")

from hotkv_server.testing.tier_contract import check_round_trip, check_tier
from tests.server.certificates import Authority
from tests.support.waiting import wait_for
from tests.tiers.s3_support import Server, bench_over, new_prefix, proxied, rig_maker
from tests.tiers.support import tls_proxy


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
