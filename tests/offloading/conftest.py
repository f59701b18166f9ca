"""A real server for the tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.processes import Daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    server = Daemon(Path(tmp_path_factory.mktemp("server"))).start()
    yield server
    server.stop()


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A server that the test may stop and kill."""
    server = Daemon(tmp_path).start()
    yield server
    server.stop()
