"""Fixtures for tests of the vLLM connector; the folder is skipped where vLLM is not installed."""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py", "harness.py"]


@pytest.fixture
def server() -> Any:
    from hotkv_client.testing import FakeServer

    return FakeServer()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Any]:
    """A `Daemon` that the tests of a file share."""
    from tests.vllm.processes import Daemon

    folder = Path(tempfile.mkdtemp(prefix="hotkv-"))
    one = Daemon(folder / "run").start()
    yield one
    one.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def engine(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes engines of the harness that share `server`; shuts them down."""
    from tests.vllm.harness import Engine

    made: list[Any] = []

    def make(**settings: Any) -> Any:
        made.append(Engine(server, tmp_path / "model", monkeypatch, **settings))
        return made[-1]

    yield make
    for one in made:
        one.worker.shutdown()
        one.connector.shutdown()
