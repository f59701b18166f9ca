"""Test harnesses (`CopyRig`) for copy engines, which copy KV between engines' memory and the arena.
A `CopyRig` has a copy engine, an arena, and memories in the host or on fake devices."""

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
from hotkv_server.testing.copy_engine_contract import Bytes, CopyRig
from hotkv_server.testing.device import COPIES, FakeRuntime
from hotkv_server.testing.device_memory import map_pages, unmap_pages

ARENA_BYTES, PINNED_PIECE_BYTES = 1 << 20, 1 << 18
SMALL = CudaCopySettings(
    piece_bytes=48 << 10, depth=3, staging_bytes=6 * 24 << 10, calibration_bytes=0
)
"""Settings of a CUDA copy engine with pieces so small that every copy job has several pieces."""


@dataclass
class Arena:
    """An arena in host memory that implements `PinnedArena`. Each call of `grow` pins its next
    piece (registers it with the fake device)."""

    runtime: FakeRuntime
    num_bytes: int = ARENA_BYTES
    piece_bytes: int = PINNED_PIECE_BYTES
    pinned_bytes: int = 0
    address: int = 0

    def __post_init__(self) -> None:
        self.address = map_pages(self.num_bytes)

    def grow(self) -> None:
        """Pins the next piece of the arena, that is, registers its memory with the fake device."""
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
    """Returns a `CopyRig` for this copy engine, which can read and write memory in the host and on
    the arena's fake device. `break_next` makes the next copy fail."""
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
    """Yields a `CopyRig`. Afterwards closes the engine, frees all memory, and checks that no device
    memory or pinned memory is left."""
    yield rig_of(engine, arena, memories, lambda: runtime.fail_call(COPIES))
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
    """Returns a function that makes a `CopyRig` of a CUDA copy engine, with two memories on a fake
    device.

    num_pinned: number of the arena's pieces that are pinned (registered with the device), from its
        start.
    """

    @contextlib.contextmanager
    def make() -> Iterator[CopyRig]:
        runtime = FakeRuntime(seed, max_delay_s=20e-6)
        arena = Arena(runtime)
        for _ in range(num_pinned):
            arena.grow()
        engine = CudaCopyEngine(runtime, 0, arena, settings)
        # Waits until the engine has measured the speed of its copy methods: a fault that a test
        # injects later must not hit the measurement.
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
    """Yields a `CopyRig` with memories on two fake devices and in the host, all served by one
    `CopyEngines`."""
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
    """A fake gate, which delays a copy job until it is open. A test opens it by `is_open`, or sets
    `error`, which `passed` and `release` then raise. Counts the calls of both methods."""

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
