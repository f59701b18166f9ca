"""The tier in S3 keeps the contract over a real server, and over few and many connections."""

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("obstore", reason="obstore speaks S3")

from hotkv_server.testing.tier_contract import check_tier
from tests.tiers.s3_support import proxied, rig_maker

if TYPE_CHECKING:
    from tests.tiers.s3_support import Server


@pytest.mark.parametrize("connections", [1, 6])
def test_a_bucket_keeps_the_contract(s3_server: "Server", connections: int) -> None:
    with proxied(s3_server) as (proxy, _):
        check_tier(rig_maker(s3_server, proxy, connections=connections), seed=connections)
