"""One S3 server for all tests of a worker: it takes seconds to start."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.tiers.s3_support import Server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Server]":
    """A SeaweedFS server; skips the test if there is none."""
    pytest.importorskip("obstore", reason="obstore speaks S3")
    from tests.tiers.s3_support import running

    with running(Path(tmp_path_factory.mktemp("s3"))) as server:
        yield server
