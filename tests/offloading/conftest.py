"""Fixtures: a real server that the tests of a file share, and `Rig` harnesses (vLLM's tiering with
hotkv's tier, but without an engine)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.offloading.rig import Rig
from tests.vllm.conftest import engines
from tests.vllm.processes import Daemon

__all__ = ["engines"]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    server = Daemon(Path(tmp_path_factory.mktemp("server"))).start()
    yield server
    server.stop()


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Starts a server for one test only, which may stop and kill it."""
    server = Daemon(tmp_path).start()
    yield server
    server.stop()


@pytest.fixture
def rigs(daemon: Daemon) -> Iterator[Any]:
    """Returns a function that makes connected `Rig` harnesses (vLLM's tiering with hotkv's tier).

    server: a real server; by default that of the file's tests.
    settings: arguments of `Rig`.
    """
    made = []

    def make(server: Daemon = daemon, **settings: Any) -> Rig:
        made.append(Rig(server.target, **settings).connected())
        return made[-1]

    yield make
    for rig in made:
        rig.close()
