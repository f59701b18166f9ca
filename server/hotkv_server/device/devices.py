"""The devices that this server can use, and the memory of engines on them: allocations opened by
CUDA's interprocess handles, and ranges mapped from descriptors.

Always true: an allocation is opened once, even for several sessions, and closed by the last; a
range belongs to one session. So the memory of an engine that has ended does not stay open.
Opening and closing wait for the device, so they run on its thread (`pool`): one that hangs delays
no session of another. Methods may be called from any thread.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hotkv_server.dataplane.cuda.engine import CudaCopyEngine
from hotkv_server.dataplane.cuda.values import CudaCopyFigures
from hotkv_server.device.runtime import (
    HOST,
    DeviceError,
    DeviceInfo,
    DeviceRuntime,
)
from hotkv_server.memory.clerk import full_pool
from hotkv_server.memory.numa import ONE_PART, Parts
from hotkv_server.memory.pinning import ArenaPinner

log = logging.getLogger(__name__)


def uuid_text(device_uuid: bytes) -> str:
    """As nvidia-smi writes it."""
    return (
        f"GPU-{uuid.UUID(bytes=device_uuid)}"
        if len(device_uuid) == 16
        else f"GPU-{device_uuid.hex()}"
    )


@dataclass(frozen=True, slots=True)
class Allocation:
    """An opened allocation of an engine. `address`: in this process; `num_bytes`: from there to
    its end, None if CUDA does not report it."""

    address: int
    num_bytes: int | None


@dataclass(frozen=True, slots=True)
class MappedRange:
    """Of an engine's virtual memory. `address`: in this process; `sizes`: bytes of each
    backing."""

    device: int
    address: int
    sizes: tuple[int, ...]


@dataclass(slots=True)
class _Opened:
    """`tenant`: of the session that opened it first.
    `num_users`: calls of `open_memory` without their `close_memory`.
    """

    allocation: Allocation
    tenant: str
    num_users: int = 0


class Devices:
    """`runtime`: None without devices.
    `why_none`: quoted in error messages.
    `engines`: copy engines by device; the caller closes them.
    `pinner`: None if the arena is not pinned; the caller closes it.
    `parts`: of the arena.
    `refused`: by UUID, why a device is not used.
    `troubles`: by number, why a device does not work now (`node.device_watch`).
    `on_refused`: called with such a device and the engine that asked for it.
    """

    def __init__(
        self,
        runtime: DeviceRuntime | None,
        infos: Sequence[DeviceInfo] = (),
        why_none: str = "",
        engines: Mapping[int, CudaCopyEngine] | None = None,
        pinner: ArenaPinner | None = None,
        refused: Mapping[bytes, str] | None = None,
        parts: Parts = ONE_PART,
    ) -> None:
        self.troubles: Mapping[int, str] = {}
        self.on_refused: Callable[[int, str], None] = lambda device, engine: None
        self.infos = tuple(infos)
        self.why_none = why_none
        self.engines = dict(engines or {})
        self.pinner = pinner
        self.parts = parts
        self._refused = dict(refused or {})
        self._runtime = runtime
        self._lock = threading.Lock()
        self._locks = {info.number: threading.Lock() for info in infos}
        self._pools = {info.number: full_pool(1, f"hotkv-cuda{info.number}") for info in infos}
        self._entered_s: dict[int, float] = {}
        self._memory: dict[tuple[int, bytes], _Opened] = {}
        self._ranges: set[MappedRange] = set()

    def __repr__(self) -> str:
        return (
            f"Devices({', '.join(info.name for info in self.infos) or self.why_none}, "
            f"{len(self._memory)} allocations open, {len(self._ranges)} ranges mapped)"
        )

    @property
    def runtime(self) -> DeviceRuntime:
        """Raises ValueError without devices."""
        if self._runtime is None:
            raise ValueError(f"this server has no CUDA copy engine: {self.why_none}")
        return self._runtime

    def figures(self) -> list[tuple[DeviceInfo, CudaCopyFigures]]:
        """Of devices that have a copy engine."""
        return [
            (info, replace(found, problem=found.problem or self.troubles.get(info.number, "")))
            for info in self.infos
            if info.number in self.engines
            for found in (self.engines[info.number].figures(),)
        ]

    def home(self, devices: Iterable[int]) -> int:
        """The part of the arena near these devices (`Parts.home`)."""
        nodes = {info.number: info.numa_node for info in self.infos}
        return self.parts.home({nodes[device] for device in devices})

    def pool(self, devices: Iterable[int]) -> ThreadPoolExecutor | None:
        """For calls that wait for these devices: a thread of the first; None without any."""
        return self._pools.get(min(devices, default=HOST))

    def stalled_s(self, device: int, now_s: float) -> float:
        """How long the present opening or closing has run; 0 without one. `now_s`: monotonic."""
        return now_s - self._entered_s.get(device, now_s)

    def close(self) -> None:
        """All sessions must have ended."""
        for pool in self._pools.values():
            pool.shutdown(wait=False)

    @property
    def pinned_bytes(self) -> int:
        return self.pinner.pinned_bytes if self.pinner is not None else 0

    @property
    def num_open(self) -> int:
        """Open allocations and mapped ranges."""
        return len(self._memory) + len(self._ranges)

    def find(self, device_uuid: bytes, engine: str = "") -> int:
        """Number of the device, for an engine if it is named. Raises ValueError, which lists those
        that exist, or says why this one does not work."""
        if why := self._refused.get(device_uuid):
            raise ValueError(f"device {uuid_text(device_uuid)} is not used: {why}")
        number = next((info.number for info in self.infos if info.uuid == device_uuid), None)
        if number is None and self._runtime is not None:
            seen = (
                ", ".join(f"{uuid_text(info.uuid)} ({info.name})" for info in self.infos) or "none"
            )
            raise ValueError(
                f"device {uuid_text(device_uuid)} is none that this server sees, which are: "
                f"{seen}; give the server's container all GPUs "
                "of its engines, whole (no MIG slices)"
            )
        if number is None:
            raise ValueError(f"this server has no CUDA copy engine: {self.why_none}")
        if why := self.troubles.get(number):
            if engine:
                self.on_refused(number, engine)
            raise ValueError(f"device {uuid_text(device_uuid)} does not work: {why}")
        return number

    def open_memory(self, device: int, handle: bytes, tenant: str = "") -> Allocation:
        """Opens an allocation, or counts one more user of it, until `close_memory`. Blocks.
        Raises DeviceError if CUDA can't, or if another tenant has it open: a handle alone must
        not give access. Raises ValueError for memory of another device, which CUDA opens too if
        `device` can reach it."""
        with self._entering(device):
            opened = self._memory.get((device, handle))
            if opened is not None and opened.tenant != tenant:
                log.warning(
                    "refused a handle of another tenant's memory device=%d tenant=%r owner=%r",
                    device,
                    tenant,
                    opened.tenant,
                )
                raise DeviceError("no such memory")
            if opened is None:
                opened = self._memory[device, handle] = _Opened(self._open(device, handle), tenant)
            opened.num_users += 1
            return opened.allocation

    def _open(self, device: int, handle: bytes) -> Allocation:
        runtime = self.runtime
        address = runtime.open_memory(device, handle)
        try:
            extent = runtime.extent(device, address)
            if extent.device >= 0 and extent.device != device:
                raise ValueError(
                    f"is that of device {device}, and the memory is of device {extent.device}"
                )
            return Allocation(address, extent.start + extent.num_bytes - address)
        except DeviceError as error:
            if not error.is_lost:
                log.warning(
                    "size of engine memory not known, the layout's counts device=%d: %s",
                    device,
                    error,
                )
                return Allocation(address, None)
            self._close(device, address)
            raise
        except ValueError:
            self._close(device, address)
            raise

    def close_memory(self, device: int, handle: bytes) -> None:
        """Ends one use; the last closes the allocation. Logs failures. Blocks."""
        with self._entering(device):
            opened = self._memory[device, handle]
            opened.num_users -= 1
            if opened.num_users:
                return
            del self._memory[device, handle]
            self._close(device, opened.allocation.address)

    def map_range(self, device: int, backings: Sequence[tuple[int, int]]) -> MappedRange:
        """Maps an engine's virtual memory until `unmap_range`. Blocks. Raises DeviceError if CUDA
        can't, ValueError for memory of another device.

        backings: (descriptor, all bytes of its memory), in the order of addresses.
        """
        with self._entering(device):
            address = self.runtime.map_range(device, backings)
            mapped = MappedRange(device, address, tuple(num_bytes for _, num_bytes in backings))
            self._ranges.add(mapped)
            try:
                self._check_owners(mapped)
            except BaseException:
                self._unmap(mapped)
                raise
            return mapped

    def _check_owners(self, mapped: MappedRange) -> None:
        device, at = mapped.device, mapped.address
        for index, num_bytes in enumerate(mapped.sizes):
            try:
                owner = self.runtime.extent(device, at).device
            except DeviceError as error:
                if error.is_lost:
                    raise
                log.warning("device of a range not known, the layout's counts: %s", error)
                return
            if owner >= 0 and owner != device:
                raise ValueError(
                    f"is that of device {device}, and the memory of backing {index} is of device "
                    f"{owner}"
                )
            at += num_bytes

    def unmap_range(self, mapped: MappedRange) -> None:
        """Logs failures. Blocks."""
        with self._entering(mapped.device):
            self._unmap(mapped)

    def _unmap(self, mapped: MappedRange) -> None:
        self._ranges.discard(mapped)
        try:
            self.runtime.unmap_range(mapped.device, mapped.address, mapped.sizes)
        except DeviceError as error:
            log.warning("engine memory not unmapped device=%d: %s", mapped.device, error)

    @contextmanager
    def _entering(self, device: int) -> Iterator[None]:
        with self._locks[device]:
            self._entered_s[device] = time.monotonic()
            try:
                yield
            finally:
                del self._entered_s[device]

    def _close(self, device: int, address: int) -> None:
        try:
            self.runtime.close_memory(device, address)
        except DeviceError as error:
            log.warning("engine memory not closed device=%d: %s", device, error)


NO_DEVICES = Devices(None, why_none="it runs without devices")
