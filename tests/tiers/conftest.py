"""Stores that tests of a file or of a worker share: they take long to start."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hotkv_server.testing.fault_proxy import FaultProxy
    from tests.tiers import s3_support, valkey_support


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[s3_support.Server]":
    """A SeaweedFS server; skips the test if there is none."""
    pytest.importorskip("obstore", reason="obstore speaks S3")
    from tests.tiers.s3_support import running

    with running(Path(tmp_path_factory.mktemp("s3"))) as server:
        yield server


@pytest.fixture(scope="module")
def valkey_of_file(
    tmp_path_factory: pytest.TempPathFactory,
) -> "Iterator[valkey_support.Server]":
    from tests.tiers.valkey_support import running

    with running(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(valkey_of_file: "valkey_support.Server") -> "valkey_support.Server":
    """An empty Valkey server; skips the test if there is none."""
    valkey_of_file.client.flushall()
    return valkey_of_file


@pytest.fixture
def proxy(server: "valkey_support.Server") -> "Iterator[FaultProxy]":
    """In front of that server."""
    from hotkv_server.testing.fault_proxy import FaultProxy

    one = FaultProxy(server.path)
    yield one
    one.close()
