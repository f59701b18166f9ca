"""Valkey and S3 servers, shared by tests as they start slowly, and proxies in front of them."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.doubles.fault_proxy import FaultProxy
    from tests.tiers import s3_support, valkey_support
    from tests.tiers.support import Store


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[s3_support.Server]":
    """SeaweedFS. Skips the test without it or obstore."""
    pytest.importorskip("obstore", reason="obstore speaks S3")
    from tests.tiers.s3_support import running

    with running(Path(tmp_path_factory.mktemp("s3"))) as server:
        yield server


@pytest.fixture
def s3_proxy(s3_server: "s3_support.Server") -> "Iterator[FaultProxy]":
    from tests.tiers.s3_support import proxied

    with proxied(s3_server) as (one, _):
        yield one


@pytest.fixture(scope="module")
def valkey_of_file(
    tmp_path_factory: pytest.TempPathFactory,
) -> "Iterator[valkey_support.Server]":
    from tests.tiers.valkey_support import running

    with running(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(valkey_of_file: "valkey_support.Server") -> "valkey_support.Server":
    """Empty. Skips the test without Valkey."""
    valkey_of_file.client.flushall()
    return valkey_of_file


@pytest.fixture
def proxy(server: "valkey_support.Server") -> "Iterator[FaultProxy]":
    from tests.doubles.fault_proxy import FaultProxy

    one = FaultProxy(server.path)
    yield one
    one.close()


@pytest.fixture(params=["valkey", "s3"])
def store(request: pytest.FixtureRequest) -> "Store":
    """Each test runs with Valkey and with S3."""
    from tests.contracts.flush_contract import NAME
    from tests.tiers.support import Store

    if request.param == "valkey":
        from hotkv_server.tiers.valkey.generation_keys import generation_key
        from tests.tiers.valkey_support import bench_over

        valkey, proxy = request.getfixturevalue("server"), request.getfixturevalue("proxy")
        address, key = f"127.0.0.1:{proxy.port}", generation_key(NAME)
        return Store(
            proxy,
            partial(bench_over, address),
            partial(bench_over, f"unix:{valkey.path}"),
            lambda value: valkey.client.set(key, value) if value else valkey.client.delete(key),
            f"valkey at {address} ",
        )
    bucket, proxy = request.getfixturevalue("s3_server"), request.getfixturevalue("s3_proxy")
    from tests.tiers import s3_support

    prefix = s3_support.new_prefix()
    path, endpoint = f"{prefix}/generations/1/{NAME}", f"http://127.0.0.1:{proxy.port}"
    return Store(
        proxy,
        partial(s3_support.bench_over, bucket, prefix, refresh_s=3600, endpoint=endpoint),
        partial(s3_support.bench_over, bucket, prefix),
        lambda value: bucket.store.put(path, value) if value else bucket.store.delete(path),
        f"s3 at {endpoint}/of-tests/",
    )
