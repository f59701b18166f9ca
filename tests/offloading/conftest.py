"""Fixtures: a real server for a file's tests, and `Rig`s."""

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
    server = Daemon(tmp_path).start()
    yield server
    server.stop()


@pytest.fixture
def rigs(daemon: Daemon) -> Iterator[Any]:
    made = []

    def make(server: Daemon = daemon, **settings: Any) -> Rig:
        made.append(Rig(server.target, **settings).connected())
        return made[-1]

    yield make
    for rig in made:
        rig.close()
