"""Finds devices at start and makes the parts for engines on GPUs: the runtime, a copy engine for
each device, the pinned arena.

Always true: CUDA is used only if the settings allow it and an NVIDIA device exists. If CUDA does
not work and the settings do not require it, the server runs without devices and refuses engines on
GPUs with the reason. Parts close in the order of their dependencies: engines' memory (with the
sessions), copy engines, the pinned arena, the arena.
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
from hotkv_server.settings import Settings
from hotkv_server.settings.storage import CopySettings

log = logging.getLogger(__name__)

DEVICE_NODES = Path("/dev")


class CudaError(Exception):
    """Raised if the settings require a device or memory that this machine lacks; the message gives
    the fix."""


@dataclass(frozen=True, slots=True)
class Found:
    """A runtime with its devices, or the reason why there is no runtime."""

    runtime: DeviceRuntime | None
    infos: tuple[DeviceInfo, ...] = ()
    why_none: str = ""


def has_device_node(folder: Path = DEVICE_NODES) -> bool:
    """Returns whether this process may open an NVIDIA GPU."""
    return any(folder.glob("nvidia[0-9]*")) or (folder / "dxg").exists()


def new_runtime() -> DeviceRuntime:
    """Loads CUDA. Raises DeviceError if CUDA does not work. Takes seconds."""
    from hotkv_server.device.cupy_runtime import CupyRuntime

    return CupyRuntime()


def look(copy: CopySettings) -> Found:
    """Finds the runtime and devices for these settings. Takes seconds if there is a device."""
    if copy.cuda == "off":
        return Found(None, why_none="it is switched off (copy.cuda = off)")
    if copy.cuda == "auto" and not has_device_node():
        return Found(
            None, why_none="it is given no NVIDIA device (no /dev/nvidia0; containers: --gpus all)"
        )
    try:
        runtime = new_runtime()
        infos = tuple(runtime.devices())
    except DeviceError as error:
        return Found(None, why_none=str(error))
    return Found(runtime, infos) if infos else Found(None, why_none="CUDA sees no device")


def look_in_background(copy: CopySettings) -> "Future[Found]":
    """Runs `look` on a thread, while the arena is prefaulted."""
    thread = ThreadPoolExecutor(1, "hotkv-cuda-start")
    found = thread.submit(look, copy)
    thread.shutdown(wait=False)
    return found


@dataclass(slots=True)
class CudaPart:
    """The parts for engines on GPUs; see the module.

    copy_engine: serves all devices and the host.
    """

    devices: Devices
    copy_engine: CopyEngine
    engines: dict[int, CudaCopyEngine] = field(default_factory=dict)
    pinner: ArenaPinner | None = None
    pin_is_required: bool = False

    def fault(self) -> str:
        """Returns why the server can't serve; empty if it can."""
        lost = [engine.problem for engine in self.engines.values() if engine.problem]
        if self.pin_is_required and self.pinner is not None and self.pinner.error:
            lost.append(f"arena.pin is required, and {self.pinner.error}")
        return "; ".join(lost)

    def progress(self) -> str:
        """Returns the progress of pinning, for people; empty when it has ended."""
        pinner = self.pinner
        if pinner is None or pinner.is_done or pinner.error:
            return ""
        return f"pinning the arena: {pinner.pinned_bytes >> 20} of {pinner.num_bytes >> 20} MiB"

    def start(self) -> None:
        """Begins to pin the arena, in the background."""
        if self.pinner is not None:
            self.pinner.start()

    def close(self) -> None:
        """Closes copy engines and unpins the arena. All sessions must have ended. Blocks the
        calling thread."""
        self.copy_engine.close()
        if (pinner := self.pinner) is not None:
            # The driver unpins page by page; a large arena has hundreds of millions.
            with systemd.patience("unpinning the arena", lambda: pinner.unpinned_bytes):
                pinner.close()


def open_part(settings: Settings, memory: NodeMemory, host: CopyEngine, found: Found) -> CudaPart:
    """Makes copy engines and the pinner for the devices found. The caller then calls
    `CudaPart.start`. Blocks the calling thread. Raises CudaError."""
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
    """Makes a device's copy engine, whose threads run on processors near the device. Reads the
    device's calibration from the folder, or measures the device and saves the calibration there."""
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
    """Returns the calibration of an earlier server; None if it is missing or not valid for this
    device and driver."""
    try:
        if path.stat().st_uid != os.geteuid():
            raise ValueError("it is another user's")
        calibration = Calibration.from_json(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("calibration ignored file=%s: %s", path, error)
        return None
    return calibration if calibration.holds_for(info, driver_version()) else None


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Saves a calibration for the next start. A failure is only logged."""
    scratch = path.with_suffix(".new")
    try:
        scratch.write_text(calibration.to_json())
        scratch.replace(path)
    except OSError as error:
        log.warning("calibration not written file=%s: %s", path, error)
