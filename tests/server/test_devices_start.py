"""Tests how a start finds GPUs (simulated), refuses unusable ones, and remembers speeds of copy
methods."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.processes import runtime_folder
from hotkv_server.dataplane.cuda.calibration import PAGE_BYTES, Calibration, driver_version
from hotkv_server.dataplane.cuda.values import (
    WITHOUT_KERNELS,
    CudaCopySettings,
    Direction,
    Method,
)
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.device import start as device_start
from hotkv_server.device.runtime import DeviceError
from hotkv_server.device.start import (
    CudaError,
    CudaPart,
    FoundDevices,
    look,
    open_part,
    read_calibration,
    write_calibration,
)
from hotkv_server.memory.arena import NodeMemory, clear
from hotkv_server.settings import Settings, load_settings
from hotkv_server.settings.storage import CopySettings
from tests.doubles.device import FakeRuntime
from tests.doubles.device_memory import uuid_of
from tests.support.waiting import wait_for

Open = Callable[..., CudaPart]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[NodeMemory]:
    with runtime_folder(32 << 20) as folder:
        made = NodeMemory.open(folder / "arena", 16 << 20, 256 << 10, 100, 7)
        yield made
        made.release()


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_start, "PIN_PIECE_BYTES", 2 << 20)


def _settings(*flags: str) -> Settings:
    return load_settings(None, ["--arena.bytes", "16MiB", *flags], "test")


def test_why_there_are_no_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise DeviceError("CuPy is not installed: pip install cupy-cuda12x")

    def why(cuda: str) -> str:
        return look(CopySettings(cuda=cuda)).why_none  # type: ignore[call-arg]

    assert not device_start.has_device_node(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not device_start.has_device_node(tmp_path)
    (tmp_path / "nvidia3").touch()
    assert device_start.has_device_node(tmp_path)
    # CUDA is used only if the settings allow it and a device exists.
    monkeypatch.setattr(device_start, "new_runtime", lambda: pytest.fail("CUDA was touched"))
    monkeypatch.setattr(device_start, "has_device_node", lambda: False)
    assert "copy.cuda = off" in why("off") and "/dev/nvidia0" in why("auto")
    monkeypatch.setattr(device_start, "new_runtime", absent)
    assert "cupy-cuda12x" in why("on")
    monkeypatch.setattr(device_start, "new_runtime", lambda: FakeRuntime(num_devices=0))
    assert "sees no device" in why("on")


@pytest.fixture
def opened(memory: NodeMemory, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens the part that copies from and to GPUs; by default with the simulated ones."""

    monkeypatch.setattr(device_start, "COPIES", CudaCopySettings(Method.BATCH))

    def make(*flags: str, found: FoundDevices | None = None) -> CudaPart:
        known = found or FoundDevices(runtime, tuple(runtime.devices()))
        return open_part(_settings(*flags), memory, HostCopyEngine(1), known)

    return make


def test_a_start_without_devices(opened: Open) -> None:
    none = FoundDevices(None, why_none="there is none")
    part = opened(found=none)
    assert part.pinner is None and part.fault() == part.progress() == ""
    assert part.devices.why_none == "there is none"
    part.close()
    with pytest.raises(CudaError, match=r"copy\.cuda is on: there is none"):
        opened("--copy.cuda", "on", found=none)


def test_everything_is_given_back(opened: Open, runtime: FakeRuntime) -> None:
    part = opened()
    assert part.progress() == "pinning the arena: 0 of 16 MiB (0%)"
    part.start()
    wait_for(lambda: part.devices.pinned_bytes == 16 << 20)
    assert part.progress() == part.fault() == ""
    runtime.lose(1)
    part.close()
    assert not runtime.held().get("registered", 0)


def test_pinning_that_is_off_or_required(opened: Open, runtime: FakeRuntime) -> None:
    part = opened("--arena.pin", "off")
    part.start()
    part.close()
    assert part.pinner is None and "registered" not in runtime.held()
    runtime.fail_call("register", 1)
    with pytest.raises(CudaError, match=r"arena.pin is required: .*told to fail"):
        opened("--arena.pin", "required")
    runtime.fail_call("register", 4)
    part = opened("--arena.pin", "required")
    assert part.devices.pinned_bytes == 2 << 20 and part.fault() == ""
    part.start()
    wait_for(lambda: part.fault() != "")
    assert part.fault().startswith("arena.pin is required, and ")
    part.close()
    assert "registered" not in runtime.held()


@pytest.mark.parametrize("flags", [(), ("--copy.cuda", "on")])
def test_unusable_device_is_left_out(
    opened: Open, runtime: FakeRuntime, flags: tuple[str, ...]
) -> None:
    runtime.lose(1)
    part = opened(*flags)
    assert [info.number for info in part.devices.infos] == [0] and part.fault() == ""
    with pytest.raises(ValueError, match="is not used: fake device 1"):
        part.devices.find(uuid_of(1))
    part.close()


def test_a_start_without_a_usable_device(opened: Open, runtime: FakeRuntime) -> None:
    for number in range(2):
        runtime.lose(number)
    with pytest.raises(CudaError, match=r"copy\.cuda is on: fake device 0"):
        opened("--copy.cuda", "on")


# Calibrations

SPEEDS = {(d, m, size): 1.5 for d in Direction for m in WITHOUT_KERNELS for size in PAGE_BYTES}


def test_calibration_is_found_again_beside_the_arena(
    memory: NodeMemory, runtime: FakeRuntime
) -> None:
    info = runtime.devices()[0]
    made = Calibration(info.uuid, info.name, driver_version(), SPEEDS)
    file = memory.directory / f"calibration-{info.uuid.hex()}.json"
    write_calibration(file, made)
    assert read_calibration(file, info, WITHOUT_KERNELS) == made
    part = open_part(
        _settings(),
        memory,
        HostCopyEngine(1),
        FoundDevices(runtime, (info,)),
    )
    assert part.engines[0].calibration == made
    part.close()
    assert file.exists()
    memory.release()
    clear(memory.directory)
    assert not file.exists()
    memory._lock_fd = os.open(os.devnull, os.O_RDONLY)


def test_foreign_calibration_is_ignored(tmp_path: Path, runtime: FakeRuntime) -> None:
    one, two = runtime.devices()
    file = tmp_path / "file"
    for content in ("", "{}", "not json", '{"format": 2}', "[" * 100_000):
        file.write_text(content)
        assert read_calibration(file, one, WITHOUT_KERNELS) is None
    os.mkfifo(tmp_path / "pipe")
    assert [
        read_calibration(tmp_path / name, one, WITHOUT_KERNELS) for name in ("absent", "pipe")
    ] == [None, None]
    for driver in (driver_version(), "another driver"):
        write_calibration(file, Calibration(one.uuid, one.name, driver, SPEEDS))
        assert read_calibration(file, two, WITHOUT_KERNELS) is None
    assert read_calibration(file, one, WITHOUT_KERNELS) is None
    write_calibration(tmp_path / "no/such/folder", Calibration(one.uuid, one.name, "", SPEEDS))
