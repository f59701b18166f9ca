"""Fixtures; without vLLM the folder has no tests."""

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
    """The nursery imports vLLM during the first tests."""
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
    """Not started yet."""
    from tests.vllm.processes import own_daemon

    with own_daemon() as one:
        yield one


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Any]:
    """Tests take key spaces of their own in it."""
    from tests.vllm.processes import own_daemon

    with own_daemon() as one:
        yield one.start()


@pytest.fixture
def start(shared_daemon: Any, tmp_path: Path) -> Iterator[Any]:
    """Starts engines in this test's key spaces."""
    from tests.vllm.feature_runs import Starter

    starter = Starter(shared_daemon, tmp_path)
    yield starter
    starter.stop()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Any]:
    from tests.vllm.processes import Engines

    made = Engines(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def server() -> Any:
    from tests.doubles.fake import FakeServer

    return FakeServer()


@pytest.fixture
def make(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Makes engines of a harness class. A busy machine does not end the wait for a check of the
    weights."""
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
    from tests.vllm.harness import Engine

    return functools.partial(make, Engine)


@pytest.fixture
def updated(engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes engines whose weights can be loaded again and change every KV value."""
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
    """An event must not be recorded again while a transfer waits for it."""
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
    from tests.vllm.worker_parts import Rig

    return lambda **settings: Rig(monkeypatch, **settings)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of all warnings."""
    from hotkv_vllm import link

    said: list[str] = []

    def noted(record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            said.append(record.getMessage())

    # vLLM removes handlers when an engine configures logging.
    monkeypatch.setattr(link.logger, "callHandlers", noted)
    return said
