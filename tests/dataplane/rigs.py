"""`CopyRig`s: a copy engine, an arena, and memories in the host or on fake devices."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from hotkv_server.dataplane.cuda.engine import CudaCopyEngine
from hotkv_server.dataplane.cuda.values import CudaCopySettings
from hotkv_server.dataplane.engines import CopyEngine, CopyEngines
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.dataplane.plan import Region
from hotkv_server.device.runtime import HOST
from tests.contracts.copy_engine_contract import Bytes, CopyRig
from tests.doubles.device import FakeRuntime
from tests.doubles.device_memory import map_pages, unmap_pages

ARENA_BYTES, PINNED_PIECE_BYTES = 1 << 20, 1 << 18
SMALL = CudaCopySettings(
    piece_bytes=48 << 10, depth=3, staging_bytes=6 * 24 << 10, calibration_bytes=0
)
"""Pieces so small that every copy job has several."""


@dataclass
class Arena:
    """A `PinnedArena` in host memory; each `grow` pins its next piece."""

    runtime: FakeRuntime
    num_bytes: int = ARENA_BYTES
    piece_bytes: int = PINNED_PIECE_BYTES
    pinned_bytes: int = 0
    address: int = 0

    def __post_init__(self) -> None:
        self.address = map_pages(self.num_bytes)

    def grow(self) -> None:
        if self.pinned_bytes < self.num_bytes:
            size = min(self.piece_bytes, self.num_bytes - self.pinned_bytes)
            self.runtime.register(self.address + self.pinned_bytes, size)
            self.pinned_bytes += size

    def close(self) -> None:
        for at in range(0, self.pinned_bytes, self.piece_bytes):
            self.runtime.unregister(self.address + at)
        unmap_pages(self.address, self.num_bytes)

    @property
    def region(self) -> Region:
        return Region(self.address, self.num_bytes, "the arena")


def read(runtime: FakeRuntime, region: Region) -> Bytes:
    return (
        region.array().copy()
        if region.device == HOST
        else runtime.peek(region.address, region.num_bytes)
    )


def write(runtime: FakeRuntime, region: Region, data: Bytes) -> None:
    if region.device == HOST:
        region.array()[:] = data
    else:
        runtime.poke(region.address, data)


def device_memory(runtime: FakeRuntime, device: int, num_bytes: int, name: str) -> Region:
    return Region(runtime.allocate(device, num_bytes), num_bytes, name, device)


def rig_of(
    engine: CopyEngine, arena: Arena, memories: tuple[Region, ...], break_next: Callable[[], None]
) -> CopyRig:
    """`break_next` makes the next copy fail."""
    runtime = arena.runtime
    return CopyRig(
        engine,
        arena.region,
        memories,
        lambda region: read(runtime, region),
        lambda region, data: write(runtime, region, data),
        break_next,
    )


@contextlib.contextmanager
def host_rig() -> Iterator[CopyRig]:
    engine, arena = HostCopyEngine(2), Arena(FakeRuntime(threaded=False))
    memory = np.zeros(ARENA_BYTES, np.uint8)
    own = engine._copy

    def broken(*args: object, **kwargs: object) -> None:
        engine._copy = own  # type: ignore[method-assign]
        raise OSError("told to fail")

    def break_next() -> None:
        engine._copy = broken  # type: ignore[method-assign]

    region = Region(memory.ctypes.data, memory.nbytes, "memory")
    yield rig_of(engine, arena, (region,), break_next)
    engine.close()
    arena.close()


@contextlib.contextmanager
def on_devices(
    runtime: FakeRuntime, arena: Arena, engine: CopyEngine, memories: tuple[Region, ...]
) -> Iterator[CopyRig]:
    """Afterwards checks that no device memory and no pin is left."""

    def break_next() -> None:
        """Also if it is tried again, by another method."""
        for method in ("copy", "copy_batch", "copy_kernel"):
            runtime.fail_call(method)

    yield rig_of(engine, arena, memories, break_next)
    engine.close()
    for memory in memories:
        if memory.device != HOST:
            runtime.free(memory.device, memory.address)
    arena.close()
    assert not runtime.held(), "memory of the device or pinned memory was not given back"
    runtime.close()


def cuda_rig(
    settings: CudaCopySettings = SMALL, *, seed: int = 0, num_pinned: int = 4
) -> Callable[[], contextlib.AbstractContextManager[CopyRig]]:
    """Two memories on a fake device; `num_pinned` pieces of the arena are pinned from the start."""

    @contextlib.contextmanager
    def make() -> Iterator[CopyRig]:
        runtime = FakeRuntime(seed, max_delay_s=20e-6)
        arena = Arena(runtime)
        for _ in range(num_pinned):
            arena.grow()
        engine = CudaCopyEngine(runtime, 0, arena, settings)
        # An injected fault must not hit the measurement.
        while settings.method is None and settings.calibration_bytes and engine.calibration is None:
            time.sleep(1e-3)
        memories = tuple(
            device_memory(runtime, 0, ARENA_BYTES // 2, f"memory {i}") for i in range(2)
        )
        with on_devices(runtime, arena, engine, memories) as rig:
            yield rig

    return make


@contextlib.contextmanager
def mixed_rig() -> Iterator[CopyRig]:
    """Two fake devices and the host, served by one `CopyEngines`."""
    runtime = FakeRuntime(7, num_devices=2, max_delay_s=20e-6)
    arena = Arena(runtime)
    arena.grow()
    arena.grow()
    cuda = {device: CudaCopyEngine(runtime, device, arena, SMALL) for device in range(2)}
    plain = np.zeros(ARENA_BYTES // 4, np.uint8)
    memories = tuple(
        device_memory(runtime, device, ARENA_BYTES // 4, f"memory of device {device}")
        for device in range(2)
    )
    host = Region(plain.ctypes.data, plain.nbytes, "memory of the host")
    engine = CopyEngines(HostCopyEngine(2), cuda)
    with on_devices(runtime, arena, engine, (*memories, host)) as rig:
        yield rig


@dataclass
class SwitchedGate:
    """Opened by `is_open`; `passed` and `release` raise `error` if set."""

    is_open: bool = False
    error: Exception | None = None
    device: int = HOST
    num_released: int = 0
    num_asked: int = 0
    askers: set[int] = field(default_factory=set)

    def passed(self) -> bool:
        assert not self.num_released, "asked after its release"
        self.num_asked += 1
        self.askers.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        return self.is_open

    def release(self) -> None:
        self.num_released += 1
        if self.error is not None:
            raise self.error
