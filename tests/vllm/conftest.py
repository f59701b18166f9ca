"""Fixtures for tests of the vLLM connector. If vLLM is not installed, pytest collects no tests in
this folder."""

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py", "harness.py"]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the process that forks vLLM engines (`nursery`) if a collected test needs it, so that
    the process imports vLLM while the first tests run."""
    names = {"engines", "start"}
    needed = any(names & set(getattr(item, "fixturenames", ())) for item in session.items)
    if needed and not session.config.option.collectonly:
        from tests.vllm.nursery import nursery

        nursery()


@pytest.fixture(scope="session", autouse=True)
def _models_are_inspected_here() -> None:
    from tests.vllm.nursery import inspect_models_here

    inspect_models_here()


@pytest.fixture
def daemon() -> Iterator[Any]:
    """Yields a hotkv-server (`processes.Daemon`) for one test. The test has to start it."""
    from tests.vllm.processes import own_daemon

    with own_daemon() as one:
        yield one


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Any]:
    """Yields a running hotkv-server for all tests of a file. Each test uses another
    `weights_identity` and so another key space, so that the tests share no blocks."""
    from tests.vllm.processes import own_daemon

    with own_daemon() as one:
        yield one.start()


@pytest.fixture
def start(shared_daemon: Any, tmp_path: Path) -> Iterator[Any]:
    """Yields a function that starts engines at the file's `shared_daemon` (`feature_runs.Starter`).
    Their key spaces belong to this test only. Stops the engines after the test."""
    from tests.vllm.feature_runs import Starter

    starter = Starter(shared_daemon, tmp_path)
    yield starter
    starter.stop()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Any]:
    """Yields a factory for vLLM engine processes (`processes.Engines`). Stops the engines after the
    test."""
    from tests.vllm.processes import Engines

    made = Engines(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def server() -> Any:
    """Returns a fake hotkv server, which all simulated engines of the test share."""
    from hotkv_client.testing import FakeServer

    return FakeServer()


@pytest.fixture
def make(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Yields a function that makes an engine of a given harness class, such as `harness.Engine`, at
    the fake `server`. Shuts the engines down after the test. Requests wait for the ranks' answers
    to a check of the weights even if the machine is busy."""
    from hotkv_vllm.identity import rekeying

    monkeypatch.setattr(rekeying, "PATIENCE_S", 60.0)
    made: list[Any] = []

    def make(kind: Any, **settings: Any) -> Any:
        made.append(kind(server, tmp_path / "model", monkeypatch, **settings))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


@pytest.fixture
def engine(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that makes engines (`harness.Engine`) at the fake `server`. The engines
    are shut down after the test."""
    from tests.vllm.harness import Engine

    return functools.partial(make, Engine)


@pytest.fixture
def updated(engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns a function that makes simulated engines whose weights can be loaded again (the model
    has `load_weights`). The loaded weights change every KV value."""
    import torch

    from tests.vllm.changing_weights import may_load, show_weights

    may_load(monkeypatch)

    def make(**settings: Any) -> Any:
        torch.manual_seed(0)
        one = engine(**settings)
        show_weights(one)
        return one

    return make


@pytest.fixture
def device(server: Any) -> Any:
    """Returns a fake device. The fake `server` begins a transfer only when this device has reached
    the transfer's mark (a point in the device's queue of work), often a CUDA event. Fails the test
    if the engine records an event again while a transfer waits for it."""
    from hotkv_proto.order import OrderKind
    from tests.vllm.device import ScriptedDevice

    device = ScriptedDevice()

    def on_record(event: Any) -> None:
        names = {name for _, name, _, _ in server.held if name in server.afters}
        afters = [server.afters[name] for name in names]
        in_use = {after.mark.index for after in afters if after.kind is OrderKind.EVENTS}
        assert event.number not in in_use, f"{event.number} is recorded while {names} wait"

    device.on_record = on_record
    server.has_passed = device.has_passed
    return device


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns a function that makes the connector's worker side, with a session (connection to the
    server) but without an engine (`worker_parts.Rig`)."""
    from tests.vllm.worker_parts import Rig

    return lambda **settings: Rig(monkeypatch, **settings)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that receives the text of each warning that hotkv logs during the test."""
    from hotkv_vllm import link

    said: list[str] = []

    def noted(record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            said.append(record.getMessage())

    # Patches the logger instead of adding a handler, which vLLM would remove when the first engine
    # of the process configures logging.
    monkeypatch.setattr(link.logger, "callHandlers", noted)
    return said
