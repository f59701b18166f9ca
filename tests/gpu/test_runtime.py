"""Tests on a real GPU that `CupyRuntime` is a `DeviceRuntime`. Needs only numpy, CuPy and
pytest."""

import mmap
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hotkv_server.device.cupy_runtime import CupyRuntime
from hotkv_server.device.runtime import DeviceError, Priority, Stream

pytestmark = pytest.mark.gpu

MIB = 1 << 20
POOL_BYTES = 32 * MIB


@pytest.fixture(scope="module")
def runtime() -> CupyRuntime:
    try:
        return CupyRuntime()
    except DeviceError as error:
        pytest.skip(str(error))


class Pinned:
    """Registered host memory, as bytes."""

    def __init__(self, runtime: CupyRuntime, num_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, num_bytes)
        self.bytes = np.frombuffer(self._mapping, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        runtime.register(self.address, num_bytes)


@pytest.fixture(scope="module")
def host(runtime: CupyRuntime) -> Iterator[Pinned]:
    pinned = Pinned(runtime, 2 * POOL_BYTES)
    yield pinned
    runtime.unregister(pinned.address)


@pytest.fixture(scope="module")
def table(runtime: CupyRuntime) -> Iterator[Pinned]:
    pinned = Pinned(runtime, MIB)
    yield pinned
    runtime.unregister(pinned.address)


@pytest.fixture(scope="module")
def memory(runtime: CupyRuntime) -> Iterator[int]:
    address = runtime.allocate(0, POOL_BYTES)
    yield address
    runtime.free(0, address)


@pytest.fixture
def stream(runtime: CupyRuntime) -> Stream:
    return runtime.new_stream(0, Priority.LOW)


def finish(runtime: CupyRuntime, stream: Stream) -> None:
    event = runtime.new_event(stream.device)
    runtime.record(event, stream)
    runtime.synchronize(event)
    assert runtime.passed(event)


Copies = Callable[[CupyRuntime, Stream, Pinned, np.ndarray, np.ndarray, np.ndarray], None]


def by_one(
    runtime: CupyRuntime,
    stream: Stream,
    table: Pinned,
    dst: np.ndarray,
    src: np.ndarray,
    sizes: np.ndarray,
) -> None:
    for to, at, size in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
        runtime.copy(stream, to, at, size)


def by_batch(
    runtime: CupyRuntime,
    stream: Stream,
    table: Pinned,
    dst: np.ndarray,
    src: np.ndarray,
    sizes: np.ndarray,
) -> None:
    runtime.copy_batch(stream, dst, src, sizes)


def by_kernel(
    runtime: CupyRuntime,
    stream: Stream,
    table: Pinned,
    dst: np.ndarray,
    src: np.ndarray,
    sizes: np.ndarray,
) -> None:
    rows = np.stack([dst, src, sizes])
    table.bytes[: rows.nbytes] = rows.view(np.uint8).ravel()
    runtime.copy_kernel(stream, table.address, len(dst), int(sizes.max(initial=0)))


SHAPES = {
    "pages of 4 KiB": (np.full(2000, 4096), 0),
    "pages of 16 KiB": (np.full(500, 16384), 0),
    "one of 20 MiB": (np.full(1, 20 * MIB), 0),
    "odd sizes, aligned": (np.array([1, 15, 16, 17, 4095, 4097, 0, 100_000, MIB + 3]), 16),
    "odd sizes, any place": (np.array([1, 15, 16, 17, 4095, 4097, 0, 100_000, MIB + 3]), 1),
}


@pytest.mark.parametrize("copies", [by_one, by_batch, by_kernel])
@pytest.mark.parametrize("shape", SHAPES)
def test_copies_there_and_back(
    runtime: CupyRuntime,
    stream: Stream,
    host: Pinned,
    table: Pinned,
    memory: int,
    copies: Copies,
    shape: str,
) -> None:
    sizes, align = SHAPES[shape]
    random = np.random.default_rng(len(shape))
    gaps = random.integers(0, 40, (3, len(sizes))) * align
    places = np.cumsum(sizes + gaps, axis=1) - sizes
    source, back = host.bytes[:POOL_BYTES], host.bytes[POOL_BYTES:]
    source[:] = random.integers(0, 256, POOL_BYTES, dtype=np.uint8)
    back[:] = 0xA5
    order = random.permutation(len(sizes))
    at, middle, to = (
        host.address + places[0],
        memory + places[1],
        host.address + POOL_BYTES + places[2],
    )
    copies(runtime, stream, table, middle[order], at[order], sizes[order])
    finish(runtime, stream)
    copies(runtime, stream, table, to, middle, sizes)
    finish(runtime, stream)
    expected = np.full(POOL_BYTES, 0xA5, np.uint8)
    for i, size in enumerate(sizes):
        expected[places[2, i] : places[2, i] + size] = source[places[0, i] : places[0, i] + size]
    np.testing.assert_array_equal(back, expected)


@pytest.mark.parametrize("copies", [by_one, by_batch, by_kernel])
def test_copies_on_the_device(
    runtime: CupyRuntime, stream: Stream, host: Pinned, table: Pinned, memory: int, copies: Copies
) -> None:
    host.bytes[:MIB] = np.random.default_rng(1).integers(0, 256, MIB, dtype=np.uint8)
    runtime.copy(stream, memory, host.address, MIB)
    steps = np.arange(0, MIB, 8192)
    copies(
        runtime,
        stream,
        table,
        memory + 2 * MIB + steps[::-1].copy(),
        memory + steps,
        np.full(len(steps), 8192),
    )
    runtime.copy(stream, host.address + MIB, memory + 2 * MIB, MIB)
    finish(runtime, stream)
    np.testing.assert_array_equal(
        host.bytes[MIB : 2 * MIB].reshape(-1, 8192), host.bytes[:MIB].reshape(-1, 8192)[::-1]
    )


def test_no_copies_are_no_error(runtime: CupyRuntime, stream: Stream, table: Pinned) -> None:
    none = np.zeros(0, np.int64)
    for copies in (by_one, by_batch, by_kernel):
        copies(runtime, stream, table, none, none, none)
    finish(runtime, stream)


def test_memory_is_aligned_and_registered_once(
    runtime: CupyRuntime, stream: Stream, memory: int
) -> None:
    small = [runtime.allocate(0, 5) for _ in range(3)]
    pinned = runtime.allocate_pinned(5000)
    assert all(address % 256 == 0 for address in small) and pinned % 4096 == 0
    for address in small:
        runtime.free(0, address)
    runtime.free_pinned(pinned)
    other = Pinned(runtime, MIB)
    with pytest.raises(DeviceError, match="cuMemHostRegister_v2") as raised:
        runtime.register(other.address, MIB)
    assert not raised.value.is_lost
    runtime.unregister(other.address)
    runtime.register(other.address, MIB // 2)
    runtime.register(other.address + MIB // 2, MIB // 2)
    other.bytes[:] = 3
    runtime.copy(stream, memory, other.address, MIB // 2)
    finish(runtime, stream)
    runtime.unregister(other.address)
    runtime.unregister(other.address + MIB // 2)


def test_devices_describe_themselves(runtime: CupyRuntime) -> None:
    import cupy

    for device in runtime.devices():
        properties = cupy.cuda.runtime.getDeviceProperties(device.number)
        assert device.name == properties["name"].decode()
        assert len(device.uuid) == 16 and device.uuid.startswith(properties["uuid"].split(b"\0")[0])
        assert device.pci_bus_id == cupy.cuda.runtime.deviceGetPCIBusId(device.number).lower()


ENGINE = """
import sys
import numpy as np
from cupy.cuda import runtime as r
size = int(sys.argv[1])
r.setDevice(0)
at, stream = r.malloc(size), r.streamCreateWithFlags(r.streamNonBlocking)
event = r.eventCreateWithFlags(r.eventInterprocess | r.eventDisableTiming)
print(r.ipcGetMemHandle(at).hex(), r.ipcGetEventHandle(event).hex(), flush=True)
for line in sys.stdin:
    order, value = line.split()
    if order == "fill":
        r.memsetAsync(at, int(value), size, stream)
        r.eventRecord(event, stream)
    elif order == "sum":
        back = np.zeros(size, np.uint8)
        r.memcpy(back.ctypes.data, at, size, r.memcpyDeviceToHost)
        print(int(back.sum(dtype=np.int64)), flush=True)
        continue
    print("done", flush=True)
"""


class Engine:
    """A child process that owns device memory and a CUDA event."""

    def __init__(self, num_bytes: int) -> None:
        arguments = [sys.executable, "-c", ENGINE, str(num_bytes)]
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.memory, self.event = (
            bytes.fromhex(word) for word in self.process.stdout.readline().split()
        )

    def ask(self, order: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def engine(runtime: CupyRuntime) -> Iterator[Engine]:
    engine = Engine(POOL_BYTES)
    yield engine
    engine.kill()


def test_another_processes_memory_and_event(
    runtime: CupyRuntime, stream: Stream, host: Pinned, engine: Engine
) -> None:
    address = runtime.open_memory(0, engine.memory)
    assert runtime.open_memory(0, engine.memory) == address, "opened twice, one address"
    runtime.close_memory(0, address)
    event = runtime.open_event(0, engine.event)
    for value in (1, 2, 3):
        assert engine.ask(f"fill {value}") == "done"
        runtime.synchronize(event)
        runtime.copy(stream, host.address, address, POOL_BYTES)
        finish(runtime, stream)
        assert (host.bytes[:POOL_BYTES] == value).all()
    host.bytes[:POOL_BYTES] = 5
    runtime.copy(stream, address, host.address, POOL_BYTES)
    finish(runtime, stream)
    assert engine.ask("sum 0") == str(5 * POOL_BYTES)
    runtime.close_event(event)
    runtime.close_memory(0, address)


def test_dead_processs_memory_is_free_when_closed(runtime: CupyRuntime) -> None:
    import cupy

    size = 512 * MIB
    engine = Engine(size)
    address = runtime.open_memory(0, engine.memory)
    engine.ask("fill 9")
    engine.ask("sum 0")
    engine.kill()
    cupy.cuda.runtime.setDevice(0)
    before = cupy.cuda.runtime.memGetInfo()[0]
    runtime.close_memory(0, address)
    assert cupy.cuda.runtime.memGetInfo()[0] - before >= size * 9 // 10


def test_errors_say_what_failed_and_lose_nothing(runtime: CupyRuntime, stream: Stream) -> None:
    for call in (
        lambda: runtime.open_memory(0, bytes(64)),
        lambda: runtime.open_event(0, bytes(64)),
        lambda: runtime.allocate(0, 1 << 50),
        lambda: runtime.unregister(1 << 40),
    ):
        with pytest.raises(DeviceError, match=r"on device 0: CUDA_ERROR_\w+ \(\d+\): ") as raised:
            call()
        assert not raised.value.is_lost
    finish(runtime, stream)
