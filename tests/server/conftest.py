"""Real servers, shared by a module's tests or started for each test."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import streams
from hotkv_client.paged_engine import PagedEngine
from tests.doubles.device import FakeRuntime
from tests.doubles.with_constants import constant
from tests.support.daemons import quick_servers

SHARED_FLAGS = constant("startup.access.MALFORMED_PER_S", 10**6)
"""Malformed messages are answered without a delay; test_client_memory tests the delay."""


@pytest.fixture(scope="session", autouse=True)
def _servers_are_forked() -> Iterator[None]:
    with quick_servers():
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with runtime_folder(256 << 20) as folder, Server(folder, "64MiB", *SHARED_FLAGS) as running:
        running.wait_ready()
        yield running


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    made = FakeRuntime(3, num_devices=2)
    yield made
    made.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    with (
        runtime_folder(64 << 20) as folder,
        Server(folder, "16MiB") as running,
    ):
        running.wait_ready()
        yield running


@pytest.fixture(params=["lane", pytest.param("grpc", marks=pytest.mark.long)])
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By which way the sessions of test engines speak to the server."""
    if request.param == "grpc":
        monkeypatch.setattr(streams, "SOCKET_NAME", "none.sock")
    return str(request.param)


@pytest.fixture
def engine(server: Server, stream: str) -> Iterator[Callable[..., PagedEngine]]:
    """Makes connected engines."""

    with contextlib.ExitStack() as stack:

        def make(target: str = server.target, **settings: object) -> PagedEngine:
            made = PagedEngine(target, **{"engine_id": uuid.uuid4().hex, **settings}).connect()  # type: ignore[arg-type]
            stack.callback(made.close)
            return made

        yield make
