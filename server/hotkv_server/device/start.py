"""Finds the devices when the server starts, and makes the objects that serve vLLM engines on GPUs:
the runtime, a copy engine for each device, and the pinner of the arena.

The setting `copy.cuda` decides whether CUDA is loaded: never with "off", always with "on", and with
"auto" if the device file of an NVIDIA GPU exists. If CUDA does not work, the start fails with "on".
With "auto" the server then runs without devices: it refuses sessions of engines on GPUs, with an
error message that has the reason.

At its end the server closes these in order: the memory of engines (with their sessions), then the
copy engines. Then it unpins the arena, and last it closes the arena.
"""

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from hotkv_server import systemd
from hotkv_server.dataplane.cuda.calibration import Calibration, driver_version
from hotkv_server.dataplane.cuda.engine import CudaCopyEngine
from hotkv_server.dataplane.cuda.values import CudaCopySettings, Method
from hotkv_server.dataplane.engines import CopyEngine, CopyEngines
from hotkv_server.device.devices import Devices
from hotkv_server.device.runtime import DeviceError, DeviceInfo, DeviceRuntime
from hotkv_server.memory import numa
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.memory.pinning import ArenaPinner, refusal
from hotkv_server.memory.state import read_file, replace_file
from hotkv_server.settings import Settings
from hotkv_server.settings.storage import CopySettings

log = logging.getLogger(__name__)

DEVICE_NODES = Path("/dev")


class CudaError(Exception):
    """The settings require a device or memory that this machine lacks. The message says how to fix
    it."""


@dataclass(frozen=True, slots=True)
class FoundDevices:
    """The result of `look`: a runtime with its devices, or the reason why there are no devices.

    `runtime`: calls CUDA; None without devices.
    `why_none`: the reason; empty if there is a runtime.
    """

    runtime: DeviceRuntime | None
    infos: tuple[DeviceInfo, ...] = ()
    why_none: str = ""


def has_device_node(folder: Path = DEVICE_NODES) -> bool:
    """Returns True if this machine or container has the device file of an NVIDIA GPU."""
    return any(folder.glob("nvidia[0-9]*")) or (folder / "dxg").exists()


def new_runtime() -> DeviceRuntime:
    """Loads CUDA and returns the runtime. Raises DeviceError if CUDA does not work. Takes
    seconds."""
    from hotkv_server.device.cupy_runtime import CupyRuntime

    return CupyRuntime()


def look(copy: CopySettings) -> FoundDevices:
    """Finds the devices. Loads CUDA, which takes seconds, if the setting `copy.cuda` is "on", or if
    it is "auto" and this machine has the device file of a GPU. `copy`: the settings of copies."""
    if copy.cuda == "off":
        return FoundDevices(None, why_none="it is switched off (copy.cuda = off)")
    if copy.cuda == "auto" and not has_device_node():
        return FoundDevices(
            None, why_none="it is given no NVIDIA device (no /dev/nvidia0; containers: --gpus all)"
        )
    try:
        runtime = new_runtime()
        infos = tuple(runtime.devices())
    except DeviceError as error:
        return FoundDevices(None, why_none=str(error))
    return (
        FoundDevices(runtime, infos)
        if infos
        else FoundDevices(None, why_none="CUDA sees no device")
    )


def look_in_background(copy: CopySettings) -> "Future[FoundDevices]":
    """Runs `look` on a thread, so that the caller can prefault the arena meanwhile. Returns a
    future of its result."""
    thread = ThreadPoolExecutor(1, "hotkv-cuda-start")
    found = thread.submit(look, copy)
    thread.shutdown(wait=False)
    return found


@dataclass(slots=True)
class CudaPart:
    """The objects with which the server copies blocks to and from host memory and GPUs.

    `devices`: the devices, and the memory of engines on them.
    `copy_engine`: combines the copy engines of all devices and of host memory.
    `engines`: the copy engines of devices, by the number of the device.
    `pinner`: pins the arena; None if the arena is not pinned.
    `pin_is_required`: True if the server must not serve unless the arena is pinned.
    """

    devices: Devices
    copy_engine: CopyEngine
    engines: dict[int, CudaCopyEngine] = field(default_factory=dict)
    pinner: ArenaPinner | None = None
    pin_is_required: bool = False

    def fault(self) -> str:
        """Returns the reason why the server can't serve: a lost device, or an arena that can't be
        pinned although the settings require it. Returns "" if there is no such reason."""
        lost = [engine.problem for engine in self.engines.values() if engine.problem]
        if self.pin_is_required and self.pinner is not None and self.pinner.error:
            lost.append(f"arena.pin is required, and {self.pinner.error}")
        return "; ".join(lost)

    def progress(self) -> str:
        """Returns a text with the progress of pinning; empty if pinning has ended, has failed or is
        not wanted."""
        pinner = self.pinner
        if pinner is None or pinner.is_done or pinner.error:
            return ""
        return f"pinning the arena: {pinner.pinned_bytes >> 20} of {pinner.num_bytes >> 20} MiB"

    def start(self) -> None:
        """Starts to pin the arena, in the background."""
        if self.pinner is not None:
            self.pinner.start()

    def close(self) -> None:
        """Closes the copy engines and unpins the arena. All sessions must have ended before. Blocks
        the calling thread."""
        self.copy_engine.close()
        if (pinner := self.pinner) is not None:
            # The driver unpins page by page, and a large arena has hundreds of millions of pages.
            # So ask systemd for more time.
            with systemd.patience("unpinning the arena", lambda: pinner.unpinned_bytes):
                pinner.close()


def open_part(
    settings: Settings, memory: NodeMemory, host: CopyEngine, found: FoundDevices
) -> CudaPart:
    """Makes the copy engines and the pinner for the devices that `look` has found. The caller must
    then call `CudaPart.start`. Blocks the calling thread. Raises CudaError.

    `memory`: has the arena, which is pinned for the devices.
    `host`: the copy engine for host memory.
    `found`: the result of `look`.
    """
    copy, arena = settings.copy_, memory.arena
    if found.runtime is None:
        if copy.cuda == "on":
            raise CudaError(f"copy.cuda is on: {found.why_none}")
        log.info("no devices: %s", found.why_none)
        return CudaPart(Devices(None, why_none=found.why_none), CopyEngines(host, {}))
    pinner = ArenaPinner(
        found.runtime,
        arena.address,
        arena.num_bytes,
        settings.arena.pin_piece_bytes,
        memory.filling.settle,
    )
    if settings.arena.pin == "required":
        try:
            pinner.pin_next()
        except (DeviceError, OSError) as error:
            raise CudaError(f"arena.pin is required: {refusal(error, arena.num_bytes)}") from error
    engines: dict[int, CudaCopyEngine] = {}
    for info in found.infos:
        try:
            engines[info.number] = _new_engine(found.runtime, info, pinner, copy, memory.directory)
        except DeviceError as error:
            if copy.cuda == "on":
                raise CudaError(
                    f"copy.cuda is on: {info.name} ({info.pci_bus_id}): {error}"
                ) from error
            log.warning("device not used number=%d name=%r: %s", info.number, info.name, error)
    infos = [info for info in found.infos if info.number in engines]
    log.info(
        "devices %s",
        "; ".join(
            f"{info.number}: {info.name} {info.pci_bus_id} node={info.numa_node}" for info in infos
        )
        or "none",
    )
    pins = pinner if engines and settings.arena.pin != "off" else None
    devices = Devices(
        found.runtime, infos, "" if infos else "no device can be used, see the log", engines, pins
    )
    return CudaPart(
        devices, CopyEngines(host, engines), engines, pins, settings.arena.pin == "required"
    )


def _new_engine(
    runtime: DeviceRuntime, info: DeviceInfo, pinner: ArenaPinner, copy: CopySettings, folder: Path
) -> CudaCopyEngine:
    """Makes the copy engine of a device. Its threads run on processors near the device. Reads the
    calibration of the device (the measured speeds of its copy methods) from `folder`. If there is
    none, the copy engine measures the device in the background, and saves the calibration there.

    `info`: the device.
    `pinner`: pins the arena for devices, and knows how much of the arena is pinned.
    `copy`: the settings of copies.
    """
    method, file = (
        None if copy.method == "auto" else Method(copy.method),
        folder / f"calibration-{info.uuid.hex()}.json",
    )

    def on_calibrated(calibration: Calibration) -> None:
        log.info("copies measured device=%d GB/s:\n%s", info.number, calibration.table())
        write_calibration(file, calibration)

    with numa.on_processors(numa.processors(info.numa_node)):
        return CudaCopyEngine(
            runtime,
            info.number,
            pinner,
            CudaCopySettings(method, copy.piece_bytes, copy.depth, copy.staging_bytes),
            calibration=read_calibration(file, info),
            driver=driver_version(),
            on_calibrated=on_calibrated,
        )


def read_calibration(path: Path, info: DeviceInfo) -> Calibration | None:
    """Returns the calibration that an earlier server has saved; None if it is missing, unusable, or
    not valid for this device and driver."""
    try:
        if path.stat().st_uid != os.geteuid():
            raise ValueError("it is another user's")
        calibration = Calibration.from_json(read_file(path).decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("calibration ignored file=%s: %s", path, error)
        return None
    return calibration if calibration.holds_for(info, driver_version()) else None


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Saves a calibration for the next start. Logs a failure."""
    try:
        replace_file(path, [calibration.to_json()])
    except OSError as error:
        log.warning("calibration not written file=%s: %s", path, error)
