"""A server finds its devices at start, refuses what can't work, and remembers its measurements."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.processes import ROOT, runtime_folder
from hotkv_server.dataplane.cuda.calibration import PAGE_BYTES, Calibration, driver_version
from hotkv_server.dataplane.cuda.values import Direction, Method
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.device import start as device_start
from hotkv_server.device.runtime import DeviceError
from hotkv_server.device.start import (
    CudaError,
    Found,
    look,
    open_part,
    read_calibration,
    write_calibration,
)
from hotkv_server.memory.arena import NodeMemory, clear
from hotkv_server.settings import Settings, load_settings
from hotkv_server.settings.storage import CopySettings
from hotkv_server.startup import StartError
from hotkv_server.startup.arena import placer
from hotkv_server.testing.device import FakeRuntime
from tests.support.waiting import wait_for


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    made = FakeRuntime(3, num_devices=2)
    yield made
    made.close()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[NodeMemory]:
    with runtime_folder(32 << 20) as folder:
        made = NodeMemory.open(folder / "arena", 16 << 20, 256 << 10, 100, 7)
        yield made
        made.release()


def _settings(*flags: str) -> Settings:
    return load_settings(
        None, ["--arena.bytes", "16MiB", "--arena.pin-piece-bytes", "2MiB", *flags], "test"
    )


def _found(runtime: FakeRuntime) -> Found:
    return Found(runtime, tuple(runtime.devices()))


def test_cuda_is_touched_only_where_it_is_wanted_and_a_device_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def explode() -> Any:
        raise AssertionError("CUDA was touched")

    monkeypatch.setattr(device_start, "new_runtime", explode)
    monkeypatch.setattr(device_start, "has_device_node", lambda: False)
    assert "copy.cuda = off" in look(CopySettings(cuda="off")).why_none  # type: ignore[call-arg]
    assert "/dev/nvidia0" in look(CopySettings(cuda="auto")).why_none  # type: ignore[call-arg]


def test_device_nodes(tmp_path: Path) -> None:
    assert not device_start.has_device_node(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not device_start.has_device_node(tmp_path)
    (tmp_path / "nvidia3").touch()
    assert device_start.has_device_node(tmp_path)


def test_why_there_is_none_comes_from_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise DeviceError("CuPy is not installed: pip install 'hotkv[cuda12]'")

    monkeypatch.setattr(device_start, "new_runtime", absent)
    assert "hotkv[cuda12]" in look(CopySettings(cuda="on")).why_none  # type: ignore[call-arg]
    monkeypatch.setattr(
        device_start, "new_runtime", lambda: FakeRuntime(num_devices=0, threaded=False)
    )
    assert "sees no device" in look(CopySettings(cuda="on")).why_none  # type: ignore[call-arg]


def test_the_real_runtime_says_what_is_missing_here() -> None:
    """On a machine with CuPy and a GPU there is nothing to say."""
    found = look(CopySettings(cuda="on"))  # type: ignore[call-arg]
    assert found.runtime is not None or found.why_none


def test_a_start_without_devices(memory: NodeMemory) -> None:
    host, none = HostCopyEngine(1), Found(None, why_none="there is none")
    part = open_part(_settings(), memory, host, none)
    assert (
        part.pinner is None
        and part.fault() == part.progress() == ""
        and part.devices.why_none == "there is none"
    )
    part.close()
    with pytest.raises(CudaError, match=r"copy\.cuda is on: there is none"):
        open_part(_settings("--copy.cuda", "on"), memory, HostCopyEngine(1), none)


def test_everything_is_given_back(memory: NodeMemory, runtime: FakeRuntime) -> None:
    part = open_part(
        _settings("--copy.method", "batch"), memory, HostCopyEngine(1), _found(runtime)
    )
    assert part.progress() == "pinning the arena: 0 of 16 MiB"
    part.start()
    wait_for(lambda: part.devices.pinned_bytes == 16 << 20)
    assert part.progress() == part.fault() == ""
    runtime.lose(1)
    part.close()
    held = runtime.held()
    assert not held.get("registered", 0)


def test_pinning_that_is_off(memory: NodeMemory, runtime: FakeRuntime) -> None:
    part = open_part(
        _settings("--arena.pin", "off", "--copy.method", "batch"),
        memory,
        HostCopyEngine(1),
        _found(runtime),
    )
    part.start()
    part.close()
    assert part.pinner is None and "registered" not in runtime.held()


def test_pinning_that_is_required(memory: NodeMemory, runtime: FakeRuntime) -> None:
    runtime.fail_call("register", 1)
    with pytest.raises(CudaError, match=r"arena.pin is required: .*told to fail"):
        open_part(_settings("--arena.pin", "required"), memory, HostCopyEngine(1), _found(runtime))
    runtime.fail_call("register", 4)
    part = open_part(
        _settings("--arena.pin", "required", "--copy.method", "batch"),
        memory,
        HostCopyEngine(1),
        _found(runtime),
    )
    assert part.devices.pinned_bytes == 2 << 20 and part.fault() == ""
    part.start()
    wait_for(lambda: part.fault() != "")
    assert part.fault().startswith("arena.pin is required, and ")
    part.close()
    assert "registered" not in runtime.held()


def test_a_device_that_cannot_be_used_is_left_out(memory: NodeMemory, runtime: FakeRuntime) -> None:
    runtime.lose(1)
    settings = ("--copy.method", "batch")
    part = open_part(_settings(*settings), memory, HostCopyEngine(1), _found(runtime))
    assert [info.number for info in part.devices.infos] == [0] and part.fault() == ""
    part.close()
    with pytest.raises(CudaError, match=r"copy\.cuda is on: Fake GPU 1"):
        open_part(
            _settings(*settings, "--copy.cuda", "on"), memory, HostCopyEngine(1), _found(runtime)
        )


def test_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(StartError, match=r"arena\.numa is 999"):
        placer("999")
    assert placer("none") is None


# Calibrations


def test_a_calibration_is_found_again_and_goes_with_the_arena(
    memory: NodeMemory, runtime: FakeRuntime
) -> None:
    info = runtime.devices()[0]
    speeds = {(d, m, size): 1.5 for d in Direction for m in Method for size in PAGE_BYTES}
    made = Calibration(info.uuid, info.name, driver_version(), speeds)
    file = memory.directory / f"calibration-{info.uuid.hex()}.json"
    write_calibration(file, made)
    assert read_calibration(file, info) == made
    part = open_part(
        _settings("--copy.staging-bytes", "0"), memory, HostCopyEngine(1), Found(runtime, (info,))
    )
    assert part.engines[0].calibration == made
    part.close()
    assert file.exists()
    memory.release()
    clear(memory.directory)
    assert not file.exists()
    memory._lock_fd = os.open(os.devnull, os.O_RDONLY)


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"format": 1}', "[" * 100_000])
def test_a_damaged_calibration_is_ignored(
    tmp_path: Path, runtime: FakeRuntime, content: str
) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(content)
    assert read_calibration(file, runtime.devices()[0]) is None
    assert read_calibration(tmp_path / "absent", runtime.devices()[0]) is None


def test_another_devices_calibration_is_ignored(tmp_path: Path, runtime: FakeRuntime) -> None:
    one, two = runtime.devices()
    speeds = {(d, m, size): 1.5 for d in Direction for m in Method for size in PAGE_BYTES}
    write_calibration(tmp_path / "file", Calibration(one.uuid, one.name, driver_version(), speeds))
    assert read_calibration(tmp_path / "file", two) is None
    write_calibration(tmp_path / "file", Calibration(one.uuid, one.name, "another driver", speeds))
    assert read_calibration(tmp_path / "file", one) is None
    write_calibration(tmp_path / "no/such/folder", Calibration(one.uuid, one.name, "", speeds))


# The command


def test_a_server_that_must_have_devices_says_what_to_do(tmp_path: Path) -> None:
    if device_start.has_device_node():
        pytest.skip("this machine has one")
    flags = [
        "--runtime-dir",
        str(tmp_path / "run"),
        "--arena.dir",
        str(tmp_path / "arena"),
        "--arena.bytes",
        "16MiB",
        "--copy.cuda",
        "on",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "hotkv_server.cli", "run", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "copy.cuda is on: " in done.stderr
