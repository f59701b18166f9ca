"""Finds the devices at the server's start, and makes what serves engines on GPUs: runtime, copy
engines, the arena's pinner.

The setting `copy.cuda` decides whether CUDA is loaded: never with "off", always with "on", and with
"auto" if the device file of an NVIDIA GPU exists. If CUDA then fails, "on" ends the start; with
"auto" the server refuses sessions of engines on GPUs, with the reason.

At its end the server closes, in order: engines' memory, copy engines, pins, arena.
"""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from hotkv_server import systemd
from hotkv_server.dataplane.cuda.calibration import Calibration, driver_version
from hotkv_server.dataplane.cuda.engine import CudaCopyEngine
from hotkv_server.dataplane.cuda.values import WITHOUT_KERNELS, CudaCopySettings, Method
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

COPIES = CudaCopySettings()
PIN_PIECE_BYTES = 1 << 30
"""Pinned in one call."""
DEVICE_NODES = Path("/dev")
MPS_PIPES = Path("/tmp/nvidia-mps")
"""Unless CUDA_MPS_PIPE_DIRECTORY names another folder."""


class CudaError(Exception):
    """The settings require a device or memory that this machine lacks; the message says how to
    fix it."""


@dataclass(frozen=True, slots=True)
class FoundDevices:
    """`runtime`: None without devices; `why_none` is then the reason."""

    runtime: DeviceRuntime | None
    infos: tuple[DeviceInfo, ...] = ()
    why_none: str = ""


def has_device_node(folder: Path = DEVICE_NODES) -> bool:
    """True if this machine or container has the device file of an NVIDIA GPU."""
    return any(folder.glob("nvidia[0-9]*")) or (folder / "dxg").exists()


def uses_mps() -> bool:
    """True if CUDA of this process shares its devices by MPS."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_PIPES) / "control").exists()


def new_runtime() -> DeviceRuntime:
    """Loads CUDA, which takes seconds. Raises DeviceError."""
    from hotkv_server.device.cupy_runtime import CupyRuntime

    return CupyRuntime()


def look(copy: CopySettings) -> FoundDevices:
    """Finds the devices as `copy.cuda` says. Takes seconds if it loads CUDA."""
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
    """`look` on a thread, while the caller prefaults the arena."""
    thread = ThreadPoolExecutor(1, "hotkv-cuda-start")
    found = thread.submit(look, copy)
    thread.shutdown(wait=False)
    return found


@dataclass(slots=True)
class CudaPart:
    """What copies blocks between host memory and GPUs.

    `copy_engine`: combines those of all devices and of host memory.
    `engines`: by device.
    `pinner`: None if the arena is not pinned.
    `pin_is_required`: the server must not serve before.
    """

    devices: Devices
    copy_engine: CopyEngines
    engines: dict[int, CudaCopyEngine] = field(default_factory=dict)
    pinner: ArenaPinner | None = None
    pin_is_required: bool = False

    def judge(self) -> None:
        """Lets equal devices choose by what was measured on all of them. Any thread."""
        known = [one.calibration for one in self.engines.values() if one.calibration is not None]
        for engine in self.engines.values():
            if (own := engine.calibration) is not None:
                engine.judged = own.merged([one for one in known if own.is_equal(one)])

    def fault(self) -> str:
        """Why the server can't serve, that is, if a required pin has failed; else empty."""
        if self.pin_is_required and self.pinner is not None and self.pinner.error:
            return f"arena.pin is required, and {self.pinner.error}"
        return ""

    def progress(self) -> str:
        """Of pinning; empty if it has ended, has failed or is not wanted."""
        pinner = self.pinner
        if pinner is None or pinner.is_done or pinner.error:
            return ""
        return (
            f"pinning the arena: {pinner.pinned_bytes >> 20} of {pinner.num_bytes >> 20} MiB "
            f"({pinner.pinned_bytes / pinner.num_bytes:.0%})"
        )

    def start(self) -> None:
        if self.pinner is not None:
            self.pinner.start()

    def close(self) -> None:
        """All sessions must have ended. Blocks."""
        self.copy_engine.close()
        self.devices.close()
        if (pinner := self.pinner) is not None:
            # The driver unpins page by page, and there may be hundreds of millions: ask systemd
            # for more time.
            with systemd.patience("unpinning the arena", lambda: pinner.unpinned_bytes):
                pinner.close()


def open_part(
    settings: Settings, memory: NodeMemory, host: CopyEngine, found: FoundDevices
) -> CudaPart:
    """Copy engines and pinner for the devices of `look`; the caller then calls `CudaPart.start`.
    Blocks. Raises CudaError. `host`: the copy engine for host memory."""
    copy, arena = settings.copy_, memory.arena
    if found.runtime is None:
        if copy.cuda == "on":
            raise CudaError(f"copy.cuda is on: {found.why_none}")
        log.info("no devices: %s", found.why_none)
        return CudaPart(Devices(None, why_none=found.why_none), CopyEngines(host, {}))
    pinner = ArenaPinner(
        found.runtime,
        arena.address,
        memory.num_bytes,
        PIN_PIECE_BYTES,
        memory.filling.settle,
    )
    if settings.arena.pin == "required":
        try:
            pinner.pin_next()
        except (DeviceError, OSError) as error:
            raise CudaError(f"arena.pin is required: {refusal(error, memory.num_bytes)}") from error
    engines: dict[int, CudaCopyEngine] = {}
    opened: list[CudaPart] = []

    def on_calibrated() -> None:
        for part in opened:
            part.judge()

    refused: dict[bytes, str] = {}
    for info in found.infos:
        try:
            engines[info.number] = _new_engine(
                found.runtime, info, pinner, memory.directory, on_calibrated
            )
        except DeviceError as error:
            refused[info.uuid] = str(error)
            log.warning("device not used number=%d name=%r: %s", info.number, info.name, error)
    if copy.cuda == "on" and not engines:
        raise CudaError(f"copy.cuda is on: {'; '.join(refused.values())}")
    infos = [info for info in found.infos if info.number in engines]
    log.info(
        "devices %s",
        "; ".join(
            f"{info.number}: {info.name} {info.pci_bus_id} node={info.numa_node}" for info in infos
        )
        or "none",
    )
    pins = pinner if engines and settings.arena.pin != "off" else None
    why_none = "" if infos else "no device can be used, see the log"
    parts = numa.parts(settings.arena.numa, memory.num_bytes, memory.slab_bytes)
    devices = Devices(found.runtime, infos, why_none, engines, pins, refused, parts)
    opened.append(
        CudaPart(
            devices, CopyEngines(host, engines), engines, pins, settings.arena.pin == "required"
        )
    )
    on_calibrated()
    return opened[0]


def _new_engine(
    runtime: DeviceRuntime,
    info: DeviceInfo,
    pinner: ArenaPinner,
    folder: Path,
    on_calibrated: Callable[[], None],
) -> CudaCopyEngine:
    """Its threads run on processors near the device. Without a calibration in `folder`, it
    measures in the background, saves one and calls `on_calibrated`."""
    file = folder / f"calibration-{info.uuid.hex()}.json"
    told = replace(COPIES, methods=tuple(Method) if uses_mps() else WITHOUT_KERNELS)

    def keep(calibration: Calibration) -> None:
        log.info("copies measured device=%d GB/s:\n%s", info.number, calibration.table())
        write_calibration(file, calibration)
        on_calibrated()

    with numa.on_processors(numa.processors(info.numa_node)):
        return CudaCopyEngine(
            runtime,
            info.number,
            pinner,
            told,
            calibration=read_calibration(file, info, told.methods),
            driver=driver_version(),
            on_calibrated=keep,
        )


def read_calibration(path: Path, info: DeviceInfo, methods: Sequence[Method]) -> Calibration | None:
    """None if it is missing, unusable, or of another device, driver or other methods."""
    try:
        if path.stat().st_uid != os.geteuid():
            raise ValueError("it is another user's")
        calibration = Calibration.from_json(read_file(path).decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("calibration ignored file=%s: %s", path, error)
        return None
    return calibration if calibration.holds_for(info, driver_version(), methods) else None


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Logs a failure."""
    try:
        replace_file(path, [calibration.to_json()])
    except OSError as error:
        log.warning("calibration not written file=%s: %s", path, error)
